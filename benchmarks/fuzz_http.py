"""Damaged streams of requests against a real server for as long as asked.

    python -m benchmarks.fuzz_http --minutes 10 [--seed 1]

Prints the number of streams, the statuses of the answers, and the growth of memory after the first
tenth. A process that ends, an answer too many, an answer to a request inside of a body, and a
status of 500 end it with the seed and the number of the stream that repeat it.
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
