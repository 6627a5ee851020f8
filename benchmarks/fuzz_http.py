"""Send damaged streams of requests to a real server for a given time.

    python -m benchmarks.fuzz_http --minutes 10 [--seed 1]

Prints the number of streams, the statuses of the answers, and the growth of memory after the first
tenth of the time. Exits with 1 if memory grows by `ALLOWED_MB` or more. The run ends early if a
process ends, if the server gives too many answers, if it answers a request inside a body, or if it
answers with an unexpected status such as 500. Then the seed and the number of the stream are
printed, which repeat the error.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.fuzz_wire import ALLOWED_MB
from tests.serving.http.http_mutations import build_attack, send_attack
from tests.serving.serving_process import serving
from tests.support.processes import memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    counts: Counter[int] = Counter()
    start, number, first = time.monotonic(), 0, 0
    options = "--max-body=1 MB", "--allowed-hosts=x"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *options, blue=100) as server,
    ):
        processes = server.processes()
        while (passed := time.monotonic() - start) < given.minutes * 60:
            if not first and passed > given.minutes * 6:
                first = memory(processes).pss
            number += 1
            try:
                draw = random.Random(f"{given.seed}/{number}")  # noqa: S311 (to be repeatable)
                counts.update(send_attack(build_attack(draw), server.port))
                assert server.processes() == processes, "a process has ended"
            except (AssertionError, OSError):
                print(f"seed {given.seed}, stream {number}")
                raise
        growth = (memory(processes).pss - first) / 1e6
        assert server.infer([1, 2]).status == 200
    assert counts[200], "no request was well-formed"
    print(
        f"{number} streams, {counts.total()} answers: {dict(sorted(counts.items()))}; "
        f"{growth:.0f} MB after a tenth"
    )
    return 0 if growth < ALLOWED_MB else 1


if __name__ == "__main__":
    sys.exit(main())
