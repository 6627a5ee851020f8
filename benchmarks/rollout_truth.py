"""Do rollouts keep their promises? Simulated traffic of known truth against the product's own code.

    python -m benchmarks.rollout_truth [--quick] [--trials N]

Ends 1 if a promised bound does not hold. The full run takes a few minutes; `--quick` has a tenth of the trials.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.truth.claims import summary
from benchmarks.truth.rollouts import prove


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few trials: shows gross breaks, not rates")
    parser.add_argument("--trials", type=int, help="rollouts of each kind (1,000, quick 100)")
    options = parser.parse_args()
    begun = time.perf_counter()
    claims = prove(quick=options.quick, trials=options.trials)
    summary(claims)
    print(f"  ({time.perf_counter() - begun:.0f} s)")
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
