"""Pools as Prefect's server shows them: workers, running and waiting stages.

A waiting stage has a reason.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from onnx_ops import plugins
from onnx_ops.domain.plan import PLACEABLE, StageKind
from onnx_ops.domain.pool import PlacedStage, PoolStatus, WorkerStatus
from onnx_ops.errors import ServiceUnavailableError, StageError
from tests.support.processes import until

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

    from onnx_ops.orchestration.pool_worker import PoolWorker


@pytest.fixture
def pool(client: SyncPrefectClient) -> str:
    """Return a pool that no other test uses."""
    from onnx_ops.orchestration.pool_worker import create_pool

    name = f"pool-{uuid.uuid4().hex[:8]}"
    create_pool(client, name)
    return name


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def status_of(pool: str) -> PoolStatus:
    from onnx_ops.orchestration.pools import PrefectPools

    return next(status for status in PrefectPools().read_status() if status.pool == pool)


def ask_for(client: SyncPrefectClient, pool: str, title: str) -> FlowRun:
    deployment = client.read_deployment_by_name(f"work/{pool}").id
    queue = title.partition("/")[0]
    return client.create_flow_run_from_deployment(deployment, name=title, work_queue_name=queue)


def start_worker(client: SyncPrefectClient, pool: str, name: str, *kinds: StageKind) -> PoolWorker:
    """Return a worker that has registered its description and is idle."""
    from onnx_ops.orchestration.pool_worker import PoolWorker

    worker = PoolWorker(pool=pool, kinds=kinds or PLACEABLE, name=name)
    worker._announce(client)
    return worker


@pytest.mark.parametrize(
    "call", ["create_work_pool", "create_deployment", "send_worker_heartbeat", "create_variable"]
)
def test_worker_started_during_server_restart_enters_its_pool(
    client: SyncPrefectClient, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from onnx_ops.orchestration import pool_worker
    from onnx_ops.orchestration.pool_worker import PoolWorker

    monkeypatch.setattr(pool_worker, "_START_S", math.inf)  # requests of a busy server can be slow
    real, failures = (
        getattr(client, call),
        [httpx.ConnectError("refused"), httpx.ReadError("reset")],
    )

    def refuse(*arguments: object, **named: object) -> object:
        if failures:
            raise failures.pop()
        return real(*arguments, **named)

    monkeypatch.setattr(client, call, refuse)
    worker = PoolWorker(pool=f"pool-{uuid.uuid4().hex[:8]}", name="early")
    assert worker._enter_pool(client)
    assert [one.name for one in status_of(worker.pool).workers] == ["early"]
    assert not failures


def test_worker_start_after_slow_requests_outlasts_a_new_failure(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from onnx_ops.orchestration import pool_worker

    clock = mock.Mock(side_effect=itertools.count(step=3600))
    monkeypatch.setattr(pool_worker, "time", mock.Mock(monotonic=clock))
    one_failure = [httpx.ReadError("reset"), None]
    monkeypatch.setattr(client, "send_worker_heartbeat", mock.Mock(side_effect=one_failure))
    worker = pool_worker.PoolWorker(pool=f"pool-{uuid.uuid4().hex[:8]}", name="slow")
    assert worker._enter_pool(client)


def test_worker_start_without_server_until_deadline_raises_connect_error(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from onnx_ops.orchestration import pool_worker

    monkeypatch.setattr(pool_worker, "_START_S", 0.0)
    refused = mock.patch.object(
        client, "create_work_pool", side_effect=httpx.ConnectError("refused")
    )
    with refused, pytest.raises(httpx.ConnectError):
        pool_worker.PoolWorker(pool="none", name="alone")._enter_pool(client)


def test_worker_without_free_file_descriptor_polls_for_stage_end(
    client: SyncPrefectClient, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    worker = start_worker(client, pool, "full")
    worker.stages[os.getpid()] = ask_for(client, pool, "train/of-test")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(next_free := os.dup(0))
    waited = mock.Mock()
    monkeypatch.setattr("onnx_ops.orchestration.pool_worker.wait", waited)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
        with pytest.raises(OSError, match="Too many open files"):
            os.pidfd_open(os.getpid())
        worker._pause()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert waited.call_args.args[0] == []


def take(client: SyncPrefectClient, run: FlowRun, worker: str) -> None:
    from prefect.states import Pending, Running

    from onnx_ops.orchestration.pool_records import CLAIMED, TAKEN

    client.set_flow_run_state(run.id, Pending(name=CLAIMED, message=f"{TAKEN}{worker}"))
    client.set_flow_run_state(run.id, Running())


def test_worker_announcement_describes_its_machine(pool: str, client: SyncPrefectClient) -> None:
    start_worker(client, pool, "gpu-1-77", StageKind.TRAIN)
    (worker,) = status_of(pool).workers
    assert (worker.name, worker.kinds, worker.limit) == ("gpu-1-77", (StageKind.TRAIN,), 1)
    assert worker.release == plugins.version("onnx-ops")
    assert "CPUExecutionProvider" in worker.providers
    assert worker.store
    assert worker.machine is not None
    assert worker.machine.cores == len(os.sched_getaffinity(0))


def test_read_announcements_of_several_pages_returns_all_workers(
    pool: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.orchestration import pool_records

    names = {"one", "two", "three"}
    for name in names:
        start_worker(client, pool, name)
    monkeypatch.setattr(pool_records, "PAGE_SIZE", 2)
    found = pool_records.read_announcements(client).values()
    assert {worker.name for worker in found if worker.pool == pool} == names


def test_announcement_of_removed_worker_is_deleted_by_next_worker(
    pool: str, client: SyncPrefectClient
) -> None:
    from onnx_ops.orchestration.pool_records import read_announcements

    def announced() -> set[str]:
        return {
            worker.name for worker in read_announcements(client).values() if worker.pool == pool
        }

    start_worker(client, pool, "first")
    # The worker starts again with the same name, as in a restarted container.
    start_worker(client, pool, "first")
    place = {"work_pool_name": pool, "name": "first"}
    client.request("DELETE", "/work_pools/{work_pool_name}/workers/{name}", path_params=place)
    assert announced() == {"first"}
    assert status_of(pool).workers == ()
    start_worker(client, pool, "second")
    assert announced() == {"second"}


def test_require_workers_waits_for_late_worker_but_not_for_dead_worker(
    pool: str, client: SyncPrefectClient
) -> None:
    from onnx_ops.orchestration import pools
    from onnx_ops.orchestration.prefect_client import server_time

    worker = start_worker(client, pool, "late")
    worker._waiting(client)
    now = server_time(client)
    for late, sleeps in ((20, 2), (90, 0)):
        clock = mock.patch.object(
            pools,
            "server_time",
            side_effect=[now + timedelta(seconds=late)] * max(sleeps, 1) + [now],
        )
        slept = mock.Mock()
        pauses = SimpleNamespace(monotonic=time.monotonic, sleep=slept)
        with clock, mock.patch.object(pools, "time", pauses):
            if sleeps:
                pools.require_workers(client, pool, "train", "train")
            else:
                with pytest.raises(ServiceUnavailableError, match="is running"):
                    pools.require_workers(client, pool, "train", "train")
        assert slept.call_count == sleeps


def test_worker_announcement_in_unknown_format_is_ignored(
    pool: str, client: SyncPrefectClient
) -> None:
    from prefect.client.schemas.actions import VariableCreate

    from onnx_ops.orchestration.pool_records import ANNOUNCEMENT

    name = f"onnx_ops_worker_{uuid.uuid4().hex}"
    client.create_variable(
        VariableCreate(name=name, value={"pool": pool, "speed": 3}, tags=[ANNOUNCEMENT])
    )
    client.send_worker_heartbeat(pool, "newer", 5.0)
    assert status_of(pool).workers == (WorkerStatus(pool=pool, name="newer"),)
    assert status_of(pool).list_takers("train") == status_of(pool).workers


def test_pool_status_shows_worker_or_wait_reason_of_each_run(
    pool: str, client: SyncPrefectClient
) -> None:
    from prefect.client.schemas.actions import WorkPoolUpdate

    def seen() -> dict[str, tuple[str, str, str]]:
        return {run.stage: (run.state, run.worker, run.why) for run in status_of(pool).runs}

    running = ask_for(client, pool, "train")
    assert seen() == {"train": ("waiting", "", "no worker of the pool is running")}
    start_worker(client, pool, "trainer", StageKind.TRAIN)
    assert seen()["train"] == ("waiting", "", "the next worker that polls takes the stage")
    take(client, running, "trainer")
    ask_for(client, pool, "quantize/int8")
    ask_for(client, pool, "train/again")
    busy = ("waiting", "", "all workers are busy")
    assert seen() == {
        "train": ("running", "trainer", ""),
        "quantize/int8": ("waiting", "", "no running worker takes quantize stages"),
        "train/again": busy,
    }
    start_worker(client, pool, "quantizer", StageKind.QUANTIZE)
    assert seen()["train/again"] == ("waiting", "", "all workers that take train stages are busy")
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    assert seen()["train/again"][2] == "the pool is paused in Prefect"
    place = {"work_pool_name": pool, "name": "trainer"}
    client.request("DELETE", "/work_pools/{work_pool_name}/workers/{name}", path_params=place)
    assert seen()["train"] == ("running", "trainer", "its worker sends no heartbeat")


def test_pool_status_omits_ended_runs_and_workers_of_deleted_pool(
    pool: str, client: SyncPrefectClient
) -> None:
    from prefect.states import Completed

    ended = ask_for(client, pool, "train")
    client.set_flow_run_state(ended.id, Completed(), force=True)
    start_worker(client, pool, "idle")
    assert (status_of(pool).runs, len(status_of(pool).workers)) == ((), 1)
    client.delete_work_pool(pool)
    assert status_of(pool) == PoolStatus(pool=pool)


def test_pool_run_after_cancellation_requests_no_further_flow_run(
    pool: str, client: SyncPrefectClient
) -> None:
    from onnx_ops.orchestration.pools import PrefectPools

    start_worker(client, pool, "trainer")._waiting(client)
    stage = PlacedStage(
        pool=pool,
        kind=StageKind.TRAIN,
        title="train",
        pipeline="p",
        key=uuid.uuid4().hex,
        parameters={},
        timeout=None,
    )
    pools = PrefectPools()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(contextvars.copy_context().run, pools.run, stage, lambda: False)
        until(lambda: status_of(pool).runs or asked.done(), what="its flow run")
        pools.cancel()
        error = asked.exception(timeout=60)
    assert isinstance(error, StageError)
    assert "the run was cancelled" in str(error)
    assert status_of(pool).runs == ()


def test_read_of_awaited_flow_runs_sends_one_request(pool: str, client: SyncPrefectClient) -> None:
    from prefect.exceptions import ObjectNotFound

    from onnx_ops.orchestration.pools import PrefectPools

    pools = PrefectPools(poll=600.0)
    asked = {ask_for(client, pool, f"train/{number}").id for number in range(3)}
    pools._waited.update(asked)
    with mock.patch.object(client, "read_flow_runs", wraps=client.read_flow_runs) as requests:
        assert {pools._read(client, run).id for run in asked} == asked
        assert requests.call_count == 1
        with pytest.raises(ObjectNotFound):
            pools._read(client, uuid.uuid4())


def test_read_of_more_awaited_runs_than_one_page_finds_all(
    pool: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.orchestration.pools import PrefectPools

    monkeypatch.setattr("onnx_ops.orchestration.pools.PAGE_SIZE", 2)
    pools = PrefectPools(poll=600.0)
    asked = {ask_for(client, pool, f"train/{number}").id for number in range(5)}
    pools._waited.update(asked)
    assert {pools._read(client, run).id for run in asked} == asked
