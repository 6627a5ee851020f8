"""The supervisor: errors in its background tasks and in publications."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.protocol.messages import Counts, UserCountsRequest
from onnx_ops.protocol.routing_table import TableFile, build_next_table
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving import rollout_counts
from onnx_ops.serving.inference.integrity import TrustPolicy
from onnx_ops.serving.metrics import EPOCH, EPOCH_FAILURES, SharedMetrics
from onnx_ops.serving.workers import supervisor as supervisor_module
from onnx_ops.serving.workers.listeners import LOOPBACK, ListenerSockets, listen_tcp
from onnx_ops.serving.workers.supervisor import Supervisor, TablePublisher
from tests.support.endpoints import fileless_deployment

EPOCH_S = 0.1
in_task: ContextVar[bool] = ContextVar("in_task", default=False)
WATCH = UserCountsRequest(limits_s={"new": (), "old": ()})


class Site:
    """A supervisor that publishes a split with epochs, without workers."""

    def __init__(self, folder: Path) -> None:
        split = TrafficSplit(weights={"old": 90, "new": 10}, epoch_s=EPOCH_S)
        state = EndpointState(
            deployments=tuple(map(fileless_deployment, split.weights)), split=split, generation=1
        )
        TableFile(folder).write(build_next_table(None, state))
        self.shared = SharedMetrics(1)
        self.publisher = TablePublisher(TableFile(folder), self.shared)
        self.publisher.restore()
        self.listeners = ListenerSockets(
            public=listen_tcp(LOOPBACK, 0), handover=listen_tcp(LOOPBACK, 0)
        )
        options = ServerOptions(workers=1)
        self.supervisor = Supervisor(
            folder, options, self.listeners, self.publisher, self.shared, must_load=False
        )

    def read(self) -> Counts:
        return self.supervisor.collect_counts(WATCH)

    @property
    def failures(self) -> int:
        return self.shared.get_shadow_row(0)[EPOCH_FAILURES]

    def close(self) -> None:
        self.listeners.public.close()
        self.listeners.handover.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(supervisor_module, "_EPOCH_RETRY_S", EPOCH_S / 4)
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 0.0)
    site = Site(tmp_path)
    # Counting by user begins here.
    site.read()
    yield site
    site.close()


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, times: int | None) -> None:
    """Make a task's calls of a method fail, from the second call on.

    `times` calls fail, or all of them if it is None. Calls of readers succeed.
    """
    calls, original = itertools.count(), getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if not in_task.get():
            return original(*arguments, **options)
        if (number := next(calls)) and (times is None or number <= times):
            raise ZeroDivisionError(f"call {number}")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


async def run_until(site: Site, is_reached: Callable[[], bool]) -> None:
    """Turn epochs until a condition is true; fail after 20 s."""

    async def turn() -> None:
        in_task.set(True)
        await site.supervisor._turn_epochs()

    task = asyncio.get_running_loop().create_task(turn())
    try:
        async with asyncio.timeout(20):
            while not is_reached():
                await asyncio.sleep(EPOCH_S / 4)
        assert not task.done()
    finally:
        task.cancel()


CALLS: dict[str, Callable[[Site], Any]] = {
    "get_epoch_rest_s": lambda site: site.publisher.counts,
    "turn_epoch": lambda site: site.publisher.counts,
    "_close_epochs": lambda site: site.publisher.counts,
    "get_state": lambda site: site.supervisor,
}


@pytest.mark.parametrize("name", CALLS)
def test_epochs_after_one_error_continue_without_failed_epoch(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    discarded: list[int] = []
    discard = site.publisher.counts.discard_epoch

    def record_discarded() -> None:
        discarded.append(site.shared.header[EPOCH])
        discard()

    monkeypatch.setattr(site.publisher.counts, "discard_epoch", record_discarded)
    fail(monkeypatch, CALLS[name](site), name, times=1)
    closed: list[int] = []

    def has_closed_later() -> bool:
        if not discarded:
            return False
        closed[:] = [each.epoch for each in site.publisher.counts.collect(WATCH).epochs]
        return bool(closed) and closed[-1] > discarded[0] + 1

    asyncio.run(run_until(site, has_closed_later))
    assert len(discarded) == site.failures == 1
    assert discarded[0] not in closed
    assert len(closed) == len(set(closed))
    assert site.read().failure == ""


@pytest.mark.parametrize("name", CALLS)
def test_lasting_epoch_error_is_reported_until_epochs_start_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, CALLS[name](site), name, times=None)
        asyncio.run(run_until(site, lambda: site.failures >= 3))
    counts = site.read()
    assert counts.failure.startswith("the next epoch could not be started: ZeroDivisionError: ")
    assert site.supervisor.get_state().counting_failure == counts.failure
    asyncio.run(run_until(site, lambda: len(site.read().epochs) >= 2))
    assert site.read().failure == ""


def test_cold_start_error_is_visible_in_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_load(*_: object, **__: object) -> float:
        raise ZeroDivisionError("no time")

    monkeypatch.setattr(supervisor_module, "measure_cold_start", fail_load)
    site.supervisor._cold_s = {fileless_deployment("new"): []}
    asyncio.run(site.supervisor._measure_cold_starts())
    assert site.read().failure == "a cold start could not be measured: ZeroDivisionError: no time"


def test_publish_during_cold_start_waits_for_its_end_before_trial_load(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def measure() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            # This pause is the time in which the process of the measurement ends.
            await asyncio.sleep(0.05)
            ended.append("cold start")

    async def try_load(*_: object, **__: object) -> None:
        ended.append("trial load")
        raise UserError("it cannot be loaded")

    async def publish() -> None:
        supervisor = site.supervisor
        supervisor._orphans_ended.set()
        supervisor._cold_starts = asyncio.get_running_loop().create_task(measure())
        await asyncio.sleep(0)
        deployment = fileless_deployment("newer")
        with pytest.raises(UserError, match="cannot be loaded"):
            await supervisor.publish(
                EndpointState(
                    deployments=(deployment,),
                    split=TrafficSplit(weights={"newer": 100}),
                    generation=2,
                ),
                "test",
            )

    monkeypatch.setattr(supervisor_module, "run_trial_load", try_load)
    asyncio.run(publish())
    assert ended == ["cold start", "trial load"]


def test_publish_whose_binding_cannot_be_written_publishes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def succeed(*_: object, **__: object) -> None:
        pass

    supervisor = site.supervisor
    before = site.publisher.current
    assert before is not None
    monkeypatch.setattr(TrustPolicy, "from_options", lambda *_: SimpleNamespace(bind=refuse))
    monkeypatch.setattr(supervisor, "_try_new", succeed)
    monkeypatch.setattr(supervisor._pool, "prepare", succeed)
    state = before.table.state
    changed = replace(state, split=TrafficSplit(weights={"old": 100, "new": 0}), generation=2)
    supervisor._orphans_ended.set()
    with pytest.raises(ServiceUnavailableError, match="model and target of this server"):
        asyncio.run(asyncio.wait_for(supervisor.publish(changed, "al"), 20))
    assert site.publisher.current is before
