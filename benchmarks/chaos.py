"""Kill processes of the server under load, during publications and at random.

    python -m benchmarks.chaos [--quick] [--only supervisor|worker|random] [--json]

A moment is the time just before or just after a call with which the supervisor accesses the disk or
communicates with a worker (tests.support.fault_injection). After each kill, what was published must
come back, no answer may be stale, and the next publication must be accepted. A killed supervisor
must cost no request. A killed worker may cost at most the request in progress on each connection.
Exits with 1 if a promise does not hold. `--quick` uses every fifth moment, and a fifth of the
random kills.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.truth.claims import Claim, table
from benchmarks.truth.page import fill, promises
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import scaling_deployment
from tests.support.chaos import Victim, count_moments, publish_and_kill

STEP = 5
RANDOM_BLOWS = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"every {STEP}th moment")
    parser.add_argument(
        "--only", choices=("supervisor", "worker", "random"), help="one kind of kill"
    )
    parser.add_argument("--page", type=Path, help="page to write the figures into")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnx-ops-chaos-") as name:
        folder = Path(name)
        first = scaling_deployment(folder / "blue", name="blue", version="0", scale=2.0, model="m")
        last = count_moments(folder / "counted", first)
        step = STEP if options.quick else 1
        kinds = [options.only] if options.only else ["supervisor", "worker", "random"]
        claims = [sweep(folder, first, kind, last, step, quiet=options.json) for kind in kinds]
    if options.page:
        fill(
            options.page,
            "chaos",
            f"A publication can be interrupted at {last} points.\n\n{promises(claims)}",
        )
    if options.json:
        print(json.dumps({"moments": last, "claims": [asdict(claim) for claim in claims]}))
    else:
        table(
            "promises",
            ("", "what", "bound", "figure"),
            [(c.outcome, c.what, c.bound, c.figure) for c in claims],
        )
    return 0 if all(claim.is_met for claim in claims) else 1


def sweep(
    folder: Path, first: Deployment, kind: str, last: int, step: int, *, quiet: bool
) -> Claim:
    """Kill a process at every `step`-th moment of a publication, each in a new run.

    The kind `random` draws the moments, the killed processes and the numbers of workers instead.
    """
    draw = random.Random(3)  # noqa: S311 (the same kills in every run)
    blows: list[tuple[int, Victim, int]] = []
    if kind == "random":
        for _ in range(RANDOM_BLOWS // step):
            victim: Victim = "supervisor" if draw.random() < 0.5 else "worker"
            blows.append((draw.randrange(last), victim, draw.choice((1, 2, 3))))
    else:
        blows = [
            (moment, "supervisor" if kind == "supervisor" else "worker", 2)
            for moment in range(0, last, step)
        ]
    broken, requests, reached = 0, 0, 0
    for number, (moment, who, workers) in enumerate(blows):
        outcome = publish_and_kill(
            folder / f"{kind}-{number}", first, moment=moment, victim=who, workers=workers
        )
        problems = outcome.broken(who)
        requests += len(outcome.records)
        reached += outcome.reached
        broken += bool(problems)
        if not quiet:
            text = "; ".join(problems) or f"well, generation {outcome.generation}"
            print(f"  {who} of {workers} at moment {moment} of {last}: {text}", flush=True)
    figure = f"{broken} of {len(blows)} runs ({reached} with a kill), {requests:,} requests"
    what = (
        "supervisor or worker killed at random moments"
        if kind == "random"
        else f"{kind} killed during a publication"
    )
    return Claim(
        gate="chaos",
        what=what,
        bound="0 runs that break a promise",
        figure=figure,
        is_met=broken == 0 and reached > 0,
    )


if __name__ == "__main__":
    sys.exit(main())
