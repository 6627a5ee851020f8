"""Faults in every request of the SageMaker provider, and kills at each of them.

The endpoint answers throughout, rollback stays possible, and every resource there is reported.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from onnx_ops.errors import ServiceUnavailableError
from tests.adapters.sagemaker_cloud import Site, config_of
from tests.support.clouds.sagemaker import BUCKET, FakeSageMaker
from tests.support.clouds.sagemaker_faults import can_conflict
from tests.support.load.loops import RequestLoop
from tests.support.suite import Sweep

pytestmark = pytest.mark.services

KINDS = ("throttle", "error", "drop", "hang", "conflict")
ANSWER_S = 0.4
"""Seconds that the client waits for an answer, where some answers do not come.

The client repeats a request whose answer takes longer.
"""
CONFLICTS = ("SageMaker.UpdateEndpoint", "PUT /")
READS = ("GET ", "HEAD ", "SageMaker.Describe", "SageMaker.List")


@pytest.fixture
def load() -> Iterator[RequestLoop]:
    with RequestLoop() as load:
        yield load
    assert load.failed == []
    assert load.answered > 0


@dataclass
class Endpoint:
    """One endpoint, whose change is tried repeatedly.

    Each try begins in the state in which `check` has left the endpoint.
    """

    site: Site
    name: str
    generation: int = 0
    answer_s: float = 60

    def apply(self, **weights: int) -> None:
        self.generation += 1
        self.site.apply(
            self.generation, config_of(self.name, api_timeout=f"{self.answer_s} s"), **weights
        )

    def requests(self) -> list[str]:
        """Return the names of the requests that the change sends without faults."""
        self.apply(blue=100)
        self.site.fake.fault()
        self.apply(blue=90, green=10)
        requests = self.site.fake.calls()
        self.check()
        return requests

    def check(self) -> None:
        """Assert that the endpoint answers, continues and rolls back.

        Everything that exists at the provider is reported.
        """
        site, config, needed = self.site, config_of(self.name), frozenset({self.site.blue.manifest})
        assert sum(site.observed(config).split.weights.values()) == 100
        self.apply(blue=90, green=10)
        assert site.invoke(self.name, "green") == ("green", 3.0)
        self.apply(blue=100)
        assert site.invoke(self.name) == ("blue", 2.0)
        left = site.provider.list_orphans(config, needed)
        for one in left:
            site.provider.delete_orphan(config, one)
        assert site.provider.list_orphans(config, needed) == ()
        assert self.stands() == ["archive", "endpoint-config", "model"], left
        assert site.invoke(self.name) == ("blue", 2.0)

    def stands(self) -> list[str]:
        """Return the kinds of all models, configs and archives of the endpoint.

        They are read by a separate client of the cloud.
        """
        sagemaker, s3 = self.site.client("sagemaker"), self.site.client("s3")
        models = sagemaker.get_paginator("list_models").paginate().build_full_result()["Models"]
        configs = (
            sagemaker.get_paginator("list_endpoint_configs")
            .paginate()
            .build_full_result()["EndpointConfigs"]
        )
        archives = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"onnx-ops/{self.name}/archives/").get(
            "Contents", ()
        )
        named = [("model", m["ModelName"]) for m in models]
        named += [("endpoint-config", c["EndpointConfigName"]) for c in configs]
        kinds = [kind for kind, name in named if name.startswith(f"{self.name}-")]
        return sorted([*kinds, *("archive" for _ in archives)])


def moments(kind: str, requests: list[str]) -> list[int]:
    """Return the moments at which a fault of this kind happens.

    They are before and after the effect of every request that changes something, where possible. A
    client treats all failed reads alike, so the kinds take turns at reads.
    """
    found = []
    turns = [other for other in KINDS if other != "conflict"]
    for at, name in enumerate(requests):
        before, after = 2 * at, 2 * at + 1
        if kind == "conflict":
            found += [
                moment for moment in (before, after) if can_conflict(name, after=moment == after)
            ]
        elif name.startswith(READS):
            found += [before] if turns[at % len(turns)] == kind else []
        else:
            # A throttled request had no effect.
            found += [before] if kind == "throttle" else [before, after]
    return found


def order(
    fake: FakeSageMaker, kind: str, requests: list[str], moment: int, *, lasting: bool
) -> None:
    """Set the fault at that moment.

    A lasting one also hits later requests of the same sort, for longer than any client retries.
    """
    times, only = 8 if lasting else 1, ""
    if kind == "conflict":
        only = next(
            sort for sort in (*CONFLICTS, requests[moment // 2]) if sort in requests[moment // 2]
        )
        moment = 2 * sum(only in name for name in requests[: moment // 2]) + moment % 2
    fake.fault(at=moment, kind=kind, times=times, only=only)


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lasting", [False, True], ids=["passing", "lasting"])
def test_sagemaker_apply_with_fault_at_any_request_keeps_serving(
    site: Site, load: RequestLoop, kind: str, lasting: bool, sweep: Sweep
) -> None:
    """The client retries after a transient fault, and raises an error for a lasting one.

    In both cases, the endpoint serves and can be rolled back.
    """
    endpoint = Endpoint(site, f"s-{kind}-{int(lasting)}")
    requests = endpoint.requests()
    endpoint.answer_s = ANSWER_S if kind == "hang" else endpoint.answer_s
    load.send = partial(site.invoke, endpoint.name)
    due = moments(kind, requests)
    assert len(due) >= 5
    # A lasting fault is tried at only a part of the requests. A client gives up only after six
    # failed attempts, which takes long.
    for moment in sweep(due[:: (4 if kind == "hang" else 2) if lasting else 1]):
        order(site.fake, kind, requests, moment, lasting=lasting)
        try:
            endpoint.apply(blue=90, green=10)
        except ServiceUnavailableError:
            assert lasting, (kind, requests[moment // 2])
        site.fake.fault()
        endpoint.check()


@pytest.mark.nightly
def test_sagemaker_apply_killed_at_any_request_keeps_serving(
    site: Site, load: RequestLoop, sweep: Sweep
) -> None:
    endpoint = Endpoint(site, "k")
    requests = endpoint.requests()
    load.send = partial(site.invoke, endpoint.name)
    # The moment after one request is the moment before the next one.
    for moment in sweep((0, *range(1, 2 * len(requests), 2))):
        endpoint.generation += 1
        state = replace(site.state(blue=90, green=10), generation=endpoint.generation)
        process, order = site.start_client(config_of(endpoint.name), state)
        site.fake.fault(at=moment, kind="kill", pid=process.pid)
        order.send("go")
        process.join(60)
        # A client that was not killed waited less than in the recorded run. It sent fewer requests,
        # and ended before the moment.
        if process.exitcode != -signal.SIGKILL:
            assert (process.exitcode, moment >= 2 * len(site.fake.calls())) == (0, True)
        site.fake.fault()
        endpoint.check()
