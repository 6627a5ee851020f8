"""Read damaged requests for a given time.

    python -m benchmarks.fuzz_wire --minutes 10 [--seed 1]

A request must be read, or refused with a status of 4xx. Prints the number of requests read and
refused, and the growth of memory after the first tenth of the time. Exits with 1 if memory grows by
`ALLOWED_MB` or more. Any other error ends the run with the seed and the number of the request,
which repeat the error.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter

from tests.serving.inference.request_mutations import attack, seeds

ALLOWED_MB = 64


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    corpus = seeds()
    counts: Counter[str] = Counter()
    start, first = time.monotonic(), 0.0
    number = 0
    while (passed := time.monotonic() - start) < given.minutes * 60:
        if not first and passed > given.minutes * 6:
            first = memory()
        number += 1
        try:
            draw = random.Random(f"{given.seed}/{number}")  # noqa: S311 (to be repeatable)
            counts[attack(draw, corpus)] += 1
        except Exception:
            print(f"seed {given.seed}, request {number}")
            raise
    growth = memory() - first
    print(
        f"{number} requests: {dict(counts)}; memory at most {memory():.0f} MB, "
        f"{growth:.0f} MB of it after a tenth"
    )
    return 0 if growth < ALLOWED_MB else 1


def memory() -> float:
    """Return the peak memory of the process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
