"""Do rollouts keep their promises? Simulated traffic of known truth against the product's own code.

    python -m benchmarks.rollout_truth [--quick] [--trials N] [--seed N]

Each run draws from a new seed, which it prints. It ends with 1 if the 98 % interval of a rate lies beyond its promised
bound. `--quick` has a tenth of the trials and fewer kinds of traffic.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from benchmarks.truth.claims import summary
from benchmarks.truth.rollouts import prove


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few trials: shows gross breaks, not rates")
    parser.add_argument("--trials", type=int, help="rollouts of each kind (1,000, quick 100)")
    parser.add_argument("--seed", type=int, help="repeat a run")
    options = parser.parse_args()
    begun, seed = time.perf_counter(), secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}")
    claims = prove(quick=options.quick, seed=seed, trials=options.trials)
    summary(claims)
    print(f"  ({time.perf_counter() - begun:.0f} s)")
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
