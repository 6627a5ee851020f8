"""Send damaged images to a real endpoint that decodes them.

    python -m benchmarks.fuzz_images [--requests 2000] [--seed 1]

Prints the statuses of the answers, and the growth of memory after a tenth of the requests. The run
fails if an answer has another status than 200 and 400, if an answer takes 10 s or longer, if a
process ends, or if the memory of the server grows by `ALLOWED_MB` or more. The seed and the number
of a request repeat it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from onnx_ops.testing.endpoints import state_of
from tests.serving.http.image_mutations import VALID, build_image_request
from tests.serving.serving_process import INFER, Server, deploy
from tests.support.images import LIBRARY, write_mean_model
from tests.support.processes import memory

ALLOWED_MB = 100


@contextmanager
def serving_images(root: Path, *options: str) -> Iterator[Server]:
    """Yield a server of a model that decodes images."""
    write_mean_model(root / "model")
    deployment = replace(deploy(root / "model"), custom_ops=(LIBRARY,))
    with Server(folder=root / "state", options=options) as server:
        assert server.publish(state_of(deployment, blue=100), 1).status == 200
        yield server


def send_images(server: Server, *, seed: int, requests: int) -> tuple[Counter[int], float]:
    """Send damaged images; return the statuses, and the growth of memory in MB."""
    counts: Counter[int] = Counter()
    processes, first = server.processes(), 0
    for number in range(requests):
        if number == requests // 10:
            first = memory(processes).pss
        draw = random.Random(f"{seed}/{number}")  # noqa: S311 (to be repeatable)
        body, headers = build_image_request(draw)
        begun = time.monotonic()
        try:
            status = server.call("POST", INFER, body, headers).status
        except OSError as error:
            raise AssertionError(f"seed {seed}, request {number}: no answer: {error}") from error
        counts[status] += 1
        assert status in (200, 400), f"seed {seed}, request {number}: status {status}"
        assert time.monotonic() - begun < 10, f"seed {seed}, request {number}: slow"
    assert server.processes() == processes, "a process has ended"
    body = VALID[0]
    answer = server.call("POST", INFER, body, {"inference-header-content-length": "0"})
    assert answer.status == 200
    return counts, (memory(processes).pss - first) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving_images(Path(folder)) as server:
        counts, growth = send_images(server, seed=given.seed, requests=given.requests)
    print(f"{dict(sorted(counts.items()))}; {growth:.0f} MB after a tenth")
    return 0 if growth < ALLOWED_MB else 1


if __name__ == "__main__":
    sys.exit(main())
