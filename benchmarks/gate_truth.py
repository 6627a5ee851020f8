"""Check the promised error rates of the gates by faults with a known truth.

    python -m benchmarks.gate_truth [--quick] [--only GATE] [--trials N] [--seed N] [--load bursts]

The injected faults and known truths run against the product's own code. Exits with 1 if the
confidence interval of a rate leaves its promise. Simulated data come from a new seed in each run,
which is printed. `--quick` has fewer trials, seeds and models.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from benchmarks.truth.claims import Claim, summary
from benchmarks.truth.draws import begin_run

GATES = (
    "metric",
    "grouped",
    "losses",
    "choice",
    "parity",
    "columns",
    "exports",
    "quantization",
    "latency",
    "judge",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few trials: shows gross breaks, not rates"
    )
    parser.add_argument("--only", choices=GATES, help="one gate")
    parser.add_argument(
        "--trials", type=int, help="trials of each setting of latency, grouped, losses and choice"
    )
    parser.add_argument(
        "--load",
        choices=("as it is", "bursts"),
        help="one of the loads under which latency is tried",
    )
    parser.add_argument("--seed", type=int, help="repeat the worlds of an earlier run")
    options = parser.parse_args()
    begin_run(options.seed)
    claims: list[Claim] = []
    for gate in [options.only] if options.only else GATES:
        begun = time.perf_counter()
        extra = (
            {"trials": options.trials} if gate in ("latency", "grouped", "losses", "choice") else {}
        )
        extra |= {"load": options.load} if gate == "latency" else {}
        claims += importlib.import_module(f"benchmarks.truth.{gate}").prove(
            quick=options.quick, **extra
        )
        print(f"  ({gate}: {time.perf_counter() - begun:.0f} s)", flush=True)
    summary(claims)
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
