"""Every request of the SageMaker provider goes wrong in every way, and the client is killed at each of them.

Whatever happens, the endpoint answers all the while, the way back is open, and nothing stands there that is not told.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.testing.endpoints import state_of
from tests.adapters.sagemaker_cloud import (
    Load,
    all_that_stands,
    apply_when_told,
    cloud,
    config_of,
    fake,
    invoke,
    pair,
    process_context,
)
from tests.support.clouds.sagemaker import FakeSageMaker
from tests.support.clouds.sagemaker_faults import can_conflict
from tests.support.suite import Sweep

__all__ = ["cloud", "fake", "pair"]
pytestmark = pytest.mark.services

KINDS = ("throttle", "error", "drop", "hang", "conflict")
ANSWER_S = 0.4
"""How long an answer is waited for where some do not come; an honest one that takes longer is asked for again."""
CONFLICTS = ("SageMaker.UpdateEndpoint", "PUT /")
READS = ("GET ", "HEAD ", "SageMaker.Describe", "SageMaker.List")


@pytest.fixture
def provider(fake: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> SageMakerEndpoints:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)  # its pauses between attempts
    return SageMakerEndpoints()


@pytest.fixture
def load(fake: FakeSageMaker) -> Iterator[Load]:
    with Load(fake) as load:
        yield load
    assert load.failed == []
    assert load.answered > 0


@dataclass
class Endpoint:
    """One endpoint, whose change is tried again and again: each try begins where `check` has left it."""

    provider: SageMakerEndpoints
    fake: FakeSageMaker
    pair: tuple[Deployment, Deployment]
    name: str
    generation: int = 0
    answer_s: float = 60

    @property
    def before(self) -> EndpointState:
        return state_of(self.pair[0], blue=100)

    @property
    def after(self) -> EndpointState:
        return state_of(*self.pair, blue=90, green=10)

    def apply(self, state: EndpointState) -> None:
        self.generation += 1
        self.provider.apply(config_of(self.name, api_timeout=f"{self.answer_s} s"), state, generation=self.generation)

    def requests(self) -> list[str]:
        """Names of the requests that the change takes when all is well."""
        self.apply(self.before)
        self.fake.fault()
        self.apply(self.after)
        requests = self.fake.calls()
        self.check()
        return requests

    def check(self) -> None:
        """It answers, goes on, goes back, and nothing stands there that is not told."""
        config, blue = config_of(self.name), self.pair[0]
        observed = self.provider.observe(config)
        assert observed is not None
        assert sum(observed.split.weights.values()) == 100
        self.apply(self.after)
        assert invoke(self.fake, self.name, "green") == ("green", 3.0)
        self.apply(self.before)
        assert invoke(self.fake, self.name) == ("blue", 2.0)
        left = self.provider.list_orphans(config, frozenset({blue.manifest}))
        for one in left:
            self.provider.delete_orphan(config, one)
        assert self.provider.list_orphans(config, frozenset({blue.manifest})) == ()
        stands = all_that_stands(self.fake, self.name)
        assert sorted(kind for kind, _ in stands) == ["archive", "endpoint-config", "model"], (left, stands)
        assert invoke(self.fake, self.name) == ("blue", 2.0)


def moments(kind: str, requests: list[str]) -> list[int]:
    """When such a fault is let happen: at every request that changes something, before its effect and after it, as far
    as there is such a thing. To us one read that fails is like another, so there the kinds take turns."""
    found = []
    turns = [other for other in KINDS if other != "conflict"]
    for at, name in enumerate(requests):
        before, after = 2 * at, 2 * at + 1
        if kind == "conflict":
            found += [moment for moment in (before, after) if can_conflict(name, after=moment == after)]
        elif name.startswith(READS):
            found += [before] if turns[at % len(turns)] == kind else []
        else:
            found += [before] if kind == "throttle" else [before, after]  # what was throttled had no effect
    return found


def order(fake: FakeSageMaker, kind: str, requests: list[str], moment: int, *, lasting: bool) -> None:
    """Let it happen at that moment; or from then on to requests of that sort, for longer than any client tries."""
    times, only = 8 if lasting else 1, ""
    if kind == "conflict":
        only = next(sort for sort in (*CONFLICTS, requests[moment // 2]) if sort in requests[moment // 2])
        moment = 2 * sum(only in name for name in requests[: moment // 2]) + moment % 2
    fake.fault(at=moment, kind=kind, times=times, only=only)


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lasting", [False, True], ids=["passing", "lasting"])
def test_faults_at_every_request(
    provider: SageMakerEndpoints,
    fake: FakeSageMaker,
    pair: tuple[Deployment, Deployment],
    load: Load,
    kind: str,
    lasting: bool,
    sweep: Sweep,
) -> None:
    """A fault that passes is survived; one that lasts is told, and nothing is lost by it."""
    endpoint = Endpoint(provider, fake, pair, f"s-{kind}-{int(lasting)}")
    requests = endpoint.requests()
    endpoint.answer_s = ANSWER_S if kind == "hang" else endpoint.answer_s
    load.endpoint = endpoint.name
    due = moments(kind, requests)
    assert len(due) >= 5
    # One that lasts is met at a part of them: a client that waits gives up after six answers that do not come.
    for moment in sweep(due[:: (4 if kind == "hang" else 2) if lasting else 1]):
        order(fake, kind, requests, moment, lasting=lasting)
        try:
            endpoint.apply(endpoint.after)
        except ServiceUnavailableError:
            assert lasting, (kind, requests[moment // 2])
        fake.fault()
        endpoint.check()


@pytest.mark.nightly
def test_a_client_that_is_killed_at_every_request(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], load: Load, sweep: Sweep
) -> None:
    endpoint = Endpoint(provider, fake, pair, "k")
    requests = endpoint.requests()
    load.endpoint = endpoint.name
    context = process_context()
    for moment in sweep((0, *range(1, 2 * len(requests), 2))):  # after one request is before the next
        endpoint.generation += 1
        ours, theirs = context.Pipe()
        state = replace(endpoint.after, generation=endpoint.generation)
        config = config_of(endpoint.name)
        process = context.Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
        process.start()
        fake.fault(at=moment, kind="kill", pid=process.pid)
        ours.send("go")
        process.join(60)
        if process.exitcode != -signal.SIGKILL:  # it had to wait less long, and was through with fewer requests
            assert (process.exitcode, moment >= 2 * len(fake.calls())) == (0, True)
        fake.fault()
        endpoint.check()
