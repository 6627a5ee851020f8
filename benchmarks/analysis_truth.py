"""Check the promises of analyses of other programs' rollouts, through HTTP.

    python -m benchmarks.analysis_truth [--trials N] [--kills N] [--prometheus PROGRAM] [--seed N]

Rollouts of a known truth run over a fake Prometheus, and a service is killed while it answers. With
`--prometheus`, rollouts run over a real Prometheus, too. Exits with 1 if a promise is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.truth.analyses import prove
from benchmarks.truth.analysis_kills import prove_kills
from benchmarks.truth.analysis_prometheus import prove_with_prometheus
from benchmarks.truth.claims import summary
from benchmarks.truth.draws import begin_run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=300, help="rollouts of each kind")
    parser.add_argument("--kills", type=int, default=50, help="kills of the service")
    parser.add_argument("--prometheus", type=Path, help="program of a real Prometheus")
    parser.add_argument("--seed", type=int, help="repeat the worlds of an earlier run")
    options = parser.parse_args()
    begin_run(options.seed)
    begun = time.perf_counter()
    claims = [*prove(options.trials), *prove_kills(options.kills)]
    if options.prometheus is not None:
        claims += prove_with_prometheus(options.prometheus, min(options.trials, 60))
    summary(claims)
    print(f"  ({time.perf_counter() - begun:.0f} s)")
    return 0 if all(claim.is_met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
