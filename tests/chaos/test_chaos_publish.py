"""Publishing and rolling back under load, with several workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnx_ops.domain.endpoint import Deployment
from tests.chaos.chaos_parts import Make
from tests.support.load import LoadPlan
from tests.support.publish_stress import stress_publications
from tests.support.server import ServerFamily

Plan = Callable[..., LoadPlan]


@pytest.mark.nightly
def test_no_request_fails_and_no_replaced_version_answers(family: Make, blue: Deployment, plan: Plan) -> None:
    server: ServerFamily = family("--workers", "2")
    seen = stress_publications(server, blue, plan(server, connections=16, keys=50), publications=60)
    assert seen.records.failures() == {}
    assert seen.stale == 0
    assert len(seen.records.by_deployment()) > 10, "too few publications were seen by a request to prove anything"


def test_an_endpoint_that_lags_is_caught(family: Make, blue: Deployment, plan: Plan) -> None:
    """The same load against publications told as if each had returned before it began: the detector sees it."""
    from dataclasses import replace

    server: ServerFamily = family()
    seen = stress_publications(server, blue, plan(server, connections=4), publications=10)
    early = tuple(replace(p, returned_ns=p.begun_ns - 10**9, begun_ns=p.begun_ns - 10**9) for p in seen.publications)
    assert replace(seen, publications=early).stale > 0
