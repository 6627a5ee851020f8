"""Damaged streams of requests: every answer is valid and belongs to a request.

`benchmarks/fuzz_http.py` runs longer.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from onnx_ops.testing.endpoints import state_of
from tests.serving.http.http_mutations import build_attack, send_attack
from tests.serving.serving_worker import Worker
from tests.support.server import scaled


def test_damaged_request_streams_get_at_most_one_more_answer_than_request_lines(
    tmp_path: Path,
) -> None:
    counts: Counter[int] = Counter()
    with Worker(state_of(scaled(tmp_path, "blue"), blue=100)).running() as worker:
        for number in range(400):
            attack = build_attack(random.Random(f"7/{number}"))  # noqa: S311 (to be repeatable)
            counts.update(send_attack(attack, worker.port))
    assert counts[200] > 50
    assert counts[400] > 50
