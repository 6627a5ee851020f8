"""Hostile bodies: the right status, and bounded memory.

The next good request is answered.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.chaos.chaos_parts import GOOD, INFER, MB, Patient, X, post


@pytest.fixture(autouse=True)
def well(patient: Patient) -> Iterator[None]:
    yield
    patient.is_well()


def tensor(**changes: object) -> bytes:
    return json.dumps({"inputs": [{**X, **changes}]}).encode()


BAD_BODIES = {
    "deep": b"[" * 1_000_000,
    "deep in data": tensor(data=[]).replace(b"[]", b"[" * 900 + b"1" + b"]" * 900),
    "beyond float64": GOOD.replace(b"[1, 2]}", b"[1e999, 2]}"),
    "beyond int64": GOOD.replace(b"[1, 2]}", b"[" + b"9" * 400 + b", 2]}"),
    "huge shape": tensor(shape=[1 << 31, 2]),
    "overflowing shape": tensor(shape=[1 << 62, 2]),
    "shape beyond 64 bits": tensor(shape=[10**30, 2]),
    "huge empty shape": tensor(shape=[0, 2, 1 << 40], data=[]),
    "binary size without binary": tensor(parameters={"binary_data_size": 1 << 40}, data=None),
}
"""Bodies that are too deep, contain numbers out of range, or announce missing data."""


@pytest.mark.parametrize("path", [INFER, "/invocations"])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_malformed_body_returns_400_with_bounded_memory(
    patient: Patient, body: bytes, path: str
) -> None:
    with patient.bounded(64 * MB):
        assert patient.sent(post(body, path=path)) == 400


def test_gzip_bomb_above_body_limit_returns_413_with_bounded_memory(patient: Patient) -> None:
    bomb = gzip.compress(b"\0" * (640 * MB))
    with patient.bounded(96 * MB):
        assert patient.sent(post(bomb, content_encoding="gzip")) == 413
