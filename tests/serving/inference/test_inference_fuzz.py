"""Any input is read as a request, or refused with an error that becomes a 4xx."""

from __future__ import annotations

import random

import pytest

from tests.serving.inference.request_mutations import SIGNATURES, attack, seeds

pytestmark = pytest.mark.usefixtures("small_is_large")


def test_mutated_requests_are_read_or_refused() -> None:
    draw = random.Random(7)  # noqa: S311 (to be repeatable)
    corpus = seeds()
    outcomes = [attack(draw, corpus) for _ in range(4000)]
    assert {"read", "refused"} == set(outcomes)
    assert outcomes.count("read") > 100, "too few mutations pass the first check"
    assert len(SIGNATURES) > 3
