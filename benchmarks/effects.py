"""Let each effect of each release operation fail, and count inconsistencies.

    python -m benchmarks.effects [--quick] [--only NAME]

An undisturbed run counts the effects of an operation. An effect is a system call that changes a
file of the ledger, of a model folder or of the content store. For runs, deletions and prunings, it
is also a call of the registry or of an endpoint's provider. A trial concerns one effect: the
process is killed before or after it, the disk is full, access to the file is denied, or the call or
its answer is lost. Then follow the steps of an operator and of the reconciler. Exits with 1 if a
trial ends otherwise than the undisturbed run, leaves a torn record, or ends with an unexpected
error.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.truth.claims import Claim, summary, table
from tests.release.effect_operations import OPERATIONS, synthetic
from tests.release.effect_sweep import sweep_effects

QUICK = 29
"""Distance of the effects that a quick run tries; a full run tries each effect."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} effects")
    parser.add_argument("--only", choices=OPERATIONS, action="append", help="an operation (all)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[list[str]] = []
    trials, inconsistent = Counter[str](), Counter[str]()
    stride = QUICK if options.quick else 1
    for name in options.only or OPERATIONS:
        with tempfile.TemporaryDirectory(prefix="onnx-ops-effects-") as folder, synthetic():
            tally = sweep_effects(
                OPERATIONS[name], Path(folder) / "project", lambda points: list(points)[::stride]
            )
        trials.update(kind for kind, _ in tally.tried)
        inconsistent.update(kind for kind, _ in tally.inconsistent)
        rows.append([name, str(len(tally.tried)), str(len(tally.inconsistent))])
        print(*rows[-1], flush=True)
        for (kind, moment), problems in tally.inconsistent.items():
            print(f"  {kind} at moment {moment}: {'; '.join(problems)[:400]}", flush=True)
    table("Trials of every operation", ["operation", "trials", "inconsistent"], rows)
    claims = [
        Claim(
            gate="effects",
            what=kind,
            bound="0 inconsistent",
            figure=f"{inconsistent[kind]} of {count}",
            is_met=count > 0 and not inconsistent[kind],
        )
        for kind, count in trials.items()
    ]
    summary(claims)
    return 0 if claims and all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
