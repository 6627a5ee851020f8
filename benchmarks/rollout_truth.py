"""Check the promises of rollouts by simulated traffic with a known truth.

    python -m benchmarks.rollout_truth [--quick] [--trials N] [--seed N]

The traffic runs against the product's own code. Exits with 1 if the confidence interval of a rate
leaves its promise. Worlds come from a new seed in each run, which is printed. `--quick` has fewer
trials and fewer kinds of traffic.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.truth.claims import summary
from benchmarks.truth.draws import begin_run
from benchmarks.truth.rollouts import prove


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few trials: shows gross breaks, not rates"
    )
    parser.add_argument("--trials", type=int, help="rollouts of each kind")
    parser.add_argument("--seed", type=int, help="repeat the worlds of an earlier run")
    options = parser.parse_args()
    begun, seed = time.perf_counter(), begin_run(options.seed)
    claims = prove(quick=options.quick, seed=seed, trials=options.trials)
    summary(claims)
    print(f"  ({time.perf_counter() - begun:.0f} s)")
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
