"""Run stages on workers of Prefect work pools, one pool for each kind of machine."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.pool import EndedRun, PlacedRun, PlacedStage, PoolStatus, WorkerStatus
from onnx_ops.errors import MeasurementError, ServiceUnavailableError, StageError, UserError
from onnx_ops.orchestration.pool_records import (
    CLAIMED,
    DEAD_AFTER_HEARTBEATS,
    DEAD_STATES,
    FINISHED_STATES,
    FLOW,
    HEARTBEAT_S,
    TAKEN,
    declare_crashed,
    get_state_type,
    is_alive,
    is_final,
    list_alive,
    read_announcements,
)
from onnx_ops.orchestration.prefect_client import (
    PAGE_SIZE,
    describe_unavailability,
    is_unavailable,
    retry_soon,
    server_time,
)
from onnx_ops.ports import Pools

if TYPE_CHECKING:
    from prefect import State
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_LATE = timedelta(minutes=1)
"""Maximum age of the last heartbeat of a worker that is late, not dead.

It is also the maximum age of a work queue's last poll if a worker takes its stages.
"""


class _WorkerDied(Exception):
    """The worker died, or another process cancelled its run."""


@dataclass(kw_only=True)
class PrefectPools(Pools):
    """Client of work pools, which runs stages by the deployment `work/POOL`.

    Durations are in seconds.

    A worker that is killed together with its flow run reports nothing. After `silence` without a
    heartbeat, it is treated as dead. The stage is then requested again, in at most `tries` runs.
    """

    poll: float = 0.5
    start_timeout_s: float = 600.0
    """Time limit for the start of a run that a worker has taken.

    The limit includes the time for pulling a container's image.
    """
    silence: float = DEAD_AFTER_HEARTBEATS * HEARTBEAT_S - 1
    """Time without a heartbeat after which a run is treated as dead.

    It is a little less than three heartbeats, so that a death is detected within 15 s.
    """
    outage: float = 120.0
    """Longest outage of Prefect's server after which a requested run is still awaited."""
    tries: int = 2
    runs: set[UUID] = field(default_factory=set)
    """Flow runs that this process created and waits for."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Lock that is held while a run is created.

    A server on SQLite delays simultaneous writers by seconds.
    """
    _cancelled: bool = False
    _waited: set[UUID] = field(default_factory=set)
    """Flow runs that threads of this process wait for."""
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _read_at: float = -math.inf
    _found: Mapping[UUID, FlowRun] | Exception = field(default_factory=dict)
    """The awaited flow runs as of `_read_at`, or the error of reading them."""
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _client: SyncPrefectClient | None = None
    """Client that all threads share to request stages; open until this process ends."""
    _ready: dict[tuple[str, StageKind], tuple[float, UUID]] = field(default_factory=dict)
    """Time of the last check for workers, and the deployment, by pool and kind."""

    def prepare(self) -> None:
        """Connect to Prefect's server, if it answers."""
        with contextlib.suppress(Exception), self._asking():
            pass

    @contextlib.contextmanager
    def _asking(self) -> Iterator[SyncPrefectClient]:
        """Yield the client of this process.

        Raises:
            UserError: no Prefect server is configured.
            ServiceUnavailableError: the server is unavailable.
        """
        with self._lock:
            if self._client is None:
                self._client = self._open.enter_context(_open_client())
        with _typed_errors():
            yield self._client

    def _find(self, client: SyncPrefectClient, stage: PlacedStage) -> UUID:
        """Return the deployment of a stage's pool; require workers for the stage's kind."""
        seen, deployment = self._ready.get((stage.pool, stage.kind), (0.0, None))
        if deployment is None or time.monotonic() - seen > HEARTBEAT_S:
            deployment = _find_deployment(client, stage)
            self._ready[stage.pool, stage.kind] = (time.monotonic(), deployment)
        return deployment

    def run(self, stage: PlacedStage, is_done: Callable[[], bool]) -> EndedRun:
        """Request a stage from the workers of its pool, and wait for its end."""
        deaths: list[str] = []
        with self._asking() as client:
            with self._turn:
                deployment = self._find(client, stage)
            for number in itertools.count():
                with self._turn:
                    if self._cancelled:
                        raise StageError(
                            "the run was cancelled",
                            where=stage.title,
                            remedy="Run the pipeline again.",
                        )
                    run, is_ours = _create_run(client, deployment, stage, number)
                    if is_ours:
                        self.runs.add(run.id)
                if is_final(run.state):
                    # A final state belongs to an earlier request for the same stage.
                    if is_done():
                        return EndedRun(run=str(run.id), seconds=run.total_run_time.total_seconds())
                    continue
                self._waited.add(run.id)
                try:
                    return self._wait(client, run.id, stage)
                except _WorkerDied as death:
                    if is_done():  # The worker can die after it has stored the result.
                        return EndedRun(run=str(run.id))
                    deaths.append(str(death))
                    if len(deaths) == self.tries:
                        raise MeasurementError(
                            f"{self.tries} flow runs of the stage on pool {stage.pool} crashed, "
                            "were cancelled, or sent no heartbeat, one after the other",
                            where=stage.title,
                            why=deaths[-1],
                            remedy=f"See the flow runs of `{FLOW}` in Prefect, "
                            "and check the memory of the machines of the workers.",
                        ) from None
                except BaseException:
                    if is_ours:
                        _cancel(client, run.id)
                    raise
                finally:
                    self.runs.discard(run.id)
                    self._waited.discard(run.id)
        raise AssertionError("unreachable: the loop over `count` does not end")

    def cancel(self) -> None:
        """Cancel the flow runs that this process created and awaits, and create no others."""
        self._cancelled = True
        if self._turn.acquire(timeout=HEARTBEAT_S):
            # `acquire` has waited until a creation in progress ended, so that `runs` contains its
            # run.
            self._turn.release()
        if runs := tuple(self.runs):
            with contextlib.suppress(Exception), _open_client() as client:
                for run in runs:
                    _cancel(client, run)

    def work(self, pool: str, kinds: Sequence[StageKind], *, limit: int) -> None:
        """Execute on this machine the stages that wait in a pool."""
        from onnx_ops.orchestration.pool_worker import PoolWorker

        with _open_client() as client:
            PoolWorker(pool=pool, kinds=kinds, limit=limit).run(client)

    def read_status(self) -> tuple[PoolStatus, ...]:
        """Return the status of each pool that has a deployment `work/POOL`."""
        with _open_client() as client:
            from prefect.client.schemas.filters import FlowFilter, FlowFilterName

            now, described = server_time(client), list(read_announcements(client).values())
            deployments = client.read_deployments(
                flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW]))
            )
            pools = sorted(deployment.name for deployment in deployments)
            return tuple(_read_pool(client, pool, described, now) for pool in pools)

    def _read(self, client: SyncPrefectClient, run: UUID) -> FlowRun:
        """Return a flow run, as it was at most half of `poll` ago.

        One request reads up to 200 awaited runs, because a request for each run would overload the
        server.
        """
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.exceptions import ObjectNotFound

        with self._reading:
            known = isinstance(self._found, Exception) or run in self._found
            if not known or time.monotonic() - self._read_at > self.poll / 2:
                wanted = sorted({run, *self._waited})
                try:
                    self._found = {
                        one.id: one
                        for start in range(0, len(wanted), PAGE_SIZE)
                        for one in client.read_flow_runs(
                            flow_run_filter=FlowRunFilter(
                                id=FlowRunFilterId(any_=wanted[start : start + PAGE_SIZE])
                            ),
                            limit=PAGE_SIZE,
                        )
                    }
                except Exception as error:
                    self._found = error
                self._read_at = time.monotonic()
            if isinstance(self._found, Exception):
                raise self._found
            if run not in self._found:
                raise ObjectNotFound(KeyError(run))
            return self._found[run]

    def _read_if_available(
        self, client: SyncPrefectClient, run: UUID, silent_s: float
    ) -> FlowRun | None:
        """Return a run, or None during an outage of the server.

        `silent_s` is the time since the server last answered. If it exceeds `outage`, the error is
        raised.
        """
        try:
            return self._read(client, run)
        except Exception as error:
            if not is_unavailable(error) or silent_s > self.outage:
                raise
            return None

    def _check_time(self, stage: PlacedStage, running_s: float) -> None:
        # The worker normally enforces the time-out. This check stops a stage whose worker fails to
        # do so.
        if stage.timeout is not None and running_s > stage.timeout + 2 * self.silence:
            raise StageError(
                f"the stage ran longer than its time-out of {stage.timeout:g} s",
                where=stage.title,
                remedy="Raise `timeout` in the pipeline file if the stage needs more time. "
                "`recheck` uses the new value after `onnx-ops run FILE --no-cache benchmark`.",
            )

    def _check_start(self, stage: PlacedStage, pending_s: float) -> None:
        if pending_s > self.start_timeout_s:
            raise MeasurementError(
                f"a worker of pool {stage.pool} took the stage, "
                f"but did not start it within {self.start_timeout_s:g} s",
                where=stage.title,
                remedy="See the log of that worker.",
            )

    def _wait(self, client: SyncPrefectClient, run: UUID, stage: PlacedStage) -> EndedRun:
        """Wait for the end of a run, and return it.

        Raises:
            _WorkerDied: the run was cancelled or has crashed, or sends no heartbeats.
            StageError: the stage ran longer than its time-out.
            MeasurementError: a worker took the run, but did not start it in time.
            ServiceUnavailableError: no running worker takes this kind of stage.
        """
        contact = last_beat = checked = time.monotonic()
        started: float | None = None
        beat: object = None
        while True:
            pause = self.poll if beat is not None else min(self.poll, 0.2)
            # All threads read at the same time, so one request reads the runs of all threads.
            time.sleep(max(pause / 2, min(pause, self._read_at + pause - time.monotonic())))
            now = time.monotonic()
            flow_run = self._read_if_available(client, run, now - contact)
            if flow_run is None:
                continue
            silent, contact = now - contact > self.silence, now
            ended = _find_end(flow_run)
            if ended is not None:
                return ended
            kind = get_state_type(flow_run.state)
            # No heartbeat can be read during an outage, so the silence is measured from the end of
            # the outage.
            if (flow_run.updated, kind) != beat or silent:
                beat, last_beat = (flow_run.updated, kind), now
            if _is_taken(flow_run) and now - last_beat > self.silence:
                declare_crashed(
                    client,
                    run,
                    why := f"the flow run has sent no heartbeat for {now - last_beat:.0f} s",
                )
                raise _WorkerDied(why)
            if kind == "RUNNING":
                started = now if started is None else started
                self._check_time(stage, now - started)
            elif kind == "SCHEDULED" and now - checked > self.silence:
                checked = now
                require_workers(client, stage.pool, stage.kind.value, stage.title)
            elif kind == "PENDING":
                self._check_start(stage, now - last_beat)


def _find_deployment(client: SyncPrefectClient, stage: PlacedStage) -> UUID:
    from prefect.exceptions import ObjectNotFound

    try:
        deployment = client.read_deployment_by_name(f"{FLOW}/{stage.pool}").id
    except ObjectNotFound as error:
        raise UserError(
            f"Prefect's server has no pool {stage.pool} for stages: "
            f"deployment {FLOW}/{stage.pool} is missing",
            where=f"{stage.title} on {client.api_url}",
            remedy=f"Start a worker on a machine of that pool: onnx-ops work --pool {stage.pool}",
        ) from error
    require_workers(client, stage.pool, stage.kind.value, stage.title)
    return deployment


def require_workers(client: SyncPrefectClient, pool: str, kind: str, title: str) -> None:
    """Raise ServiceUnavailableError if no worker of a pool takes this kind of stage.

    The same error is raised if no worker is running.
    """
    from prefect.exceptions import ObjectNotFound

    alive, now = _wait_for_late(client, pool)
    remedy = f"Start a worker on a machine of that pool: onnx-ops work --pool {pool}"
    if not alive:
        raise ServiceUnavailableError(
            f"no worker of pool {pool} is running", where=title, remedy=remedy
        )
    with contextlib.suppress(ObjectNotFound):
        polled = client.read_work_queue_by_name(kind, pool).last_polled
        if polled is not None and now - polled < _LATE:
            return
    raise ServiceUnavailableError(
        f"no worker of pool {pool} takes {kind} stages",
        where=title,
        why=f"running: {', '.join(alive)}",
        remedy=remedy,
    )


def _wait_for_late(client: SyncPrefectClient, pool: str) -> tuple[list[str], datetime]:
    """Return the names of a pool's live workers, and the time of Prefect's server.

    Live workers send heartbeats. After an outage of the server, the heartbeats of all workers are
    late. A worker with a heartbeat in the last minute is therefore awaited for the interval of one
    heartbeat.
    """
    end = time.monotonic() + HEARTBEAT_S
    while True:
        now = server_time(client)
        seen = client.read_workers_for_work_pool(pool)
        alive = sorted(worker.name for worker in seen if is_alive(worker, now))
        beats = [
            worker.last_heartbeat_time for worker in seen if worker.last_heartbeat_time is not None
        ]
        if alive or not any(now - beat < _LATE for beat in beats) or time.monotonic() > end:
            return alive, now
        time.sleep(HEARTBEAT_S / 10)


def _read_pool(
    client: SyncPrefectClient, pool: str, described: Sequence[WorkerStatus], now: datetime
) -> PoolStatus:
    from prefect.exceptions import ObjectNotFound

    own = {worker.name: worker for worker in described if worker.pool == pool}
    try:
        is_paused = client.read_work_pool(pool).is_paused
        alive = list_alive(client, pool, now)
    except ObjectNotFound:  # The pool was deleted, but the deployment that names it still exists.
        is_paused, alive = False, []
    workers = tuple(own.get(name, WorkerStatus(pool=pool, name=name)) for name in alive)
    status = PoolStatus(pool=pool, workers=workers, runs=tuple(_list_runs(client, pool, alive)))
    runs = (
        replace(run, why=_explain_wait(status, run, is_paused=is_paused))
        if run.state == "waiting"
        else run
        for run in status.runs
    )
    return replace(status, runs=tuple(runs))


_STATES: dict[str, Literal["running", "starting", "stopping", "waiting"]] = {
    "RUNNING": "running",
    "PENDING": "starting",
    "CANCELLING": "stopping",
    "SCHEDULED": "waiting",
}


def _list_runs(client: SyncPrefectClient, pool: str, alive: Sequence[str]) -> Iterator[PlacedRun]:
    """Yield the open flow runs of a pool.

    Runs with a worker come first, then waiting runs. In both groups, the oldest run comes first.
    """
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterName,
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    types = FlowRunFilterStateType(any_=[StateType(name) for name in _STATES])
    placed_runs = list[PlacedRun]()
    for offset in itertools.count(step=PAGE_SIZE):
        page = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[FLOW])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=types)),
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[pool])),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
            limit=PAGE_SIZE,
            offset=offset,
        )
        for run in page:
            state = _STATES[get_state_type(run.state)]
            worker = "" if state == "waiting" else _find_worker(client, run.id)
            placed_runs.append(
                PlacedRun(
                    run=str(run.id),
                    stage=run.name,
                    kind=run.work_queue_name or "",
                    state=state,
                    since=run.state.timestamp.timestamp() if run.state else 0.0,
                    worker=worker,
                    why="its worker sends no heartbeat" if worker and worker not in alive else "",
                )
            )
        if len(page) < PAGE_SIZE:
            break
    yield from sorted(placed_runs, key=lambda run: run.state == "waiting")


def _find_worker(client: SyncPrefectClient, run: UUID) -> str:
    """Return the worker that has taken a run; empty if it is not `onnx-ops work`."""
    states = client.read_flow_run_states(run)
    messages = [state.message or "" for state in states if state.name == CLAIMED]
    return messages[-1].removeprefix(TAKEN) if messages else ""


def _explain_wait(status: PoolStatus, run: PlacedRun, *, is_paused: bool) -> str:
    if is_paused:
        return "the pool is paused in Prefect"
    if not status.workers:
        return "no worker of the pool is running"
    takers = status.list_takers(run.kind)
    if not takers:
        return f"no running worker takes {run.kind} stages"
    load = Counter(other.worker for other in status.runs if other.state != "waiting")
    if all(load[worker.name] >= worker.limit for worker in takers):
        return (
            "all workers are busy"
            if takers == status.workers
            else f"all workers that take {run.kind} stages are busy"
        )
    return "the next worker that polls takes the stage"


def _create_run(
    client: SyncPrefectClient, deployment: UUID, stage: PlacedStage, number: int
) -> tuple[FlowRun, bool]:
    """Return a stage's run with this number, and whether this call has created it."""
    asker = uuid.uuid4().hex
    run = client.create_flow_run_from_deployment(
        deployment,
        parameters={**stage.parameters, "asker": asker},
        name=f"{stage.pipeline}/{stage.title}",
        idempotency_key=f"{stage.pool}/{stage.key}/{number}",
        work_queue_name=stage.kind.value,
    )
    return run, run.parameters.get("asker") == asker


def _cancel(client: SyncPrefectClient, run: UUID) -> None:
    """Stop a running stage, or prevent its start; suppress all exceptions."""
    from prefect.states import Cancelled, Cancelling

    # The caller reports the first error. An exception of Prefect's client would hide it.
    with contextlib.suppress(Exception):
        state = client.read_flow_run(run).state
        if not is_final(state):
            waiting = get_state_type(state) == "SCHEDULED"
            message = "the result of the stage is no longer needed"
            ended: State[Any] = (
                Cancelled(message=message) if waiting else Cancelling(message=message)
            )
            client.set_flow_run_state(run, ended, force=True)


def _is_taken(flow_run: FlowRun) -> bool:
    """Return whether a worker has taken a run, so that heartbeats are expected."""
    state = flow_run.state
    return state is not None and (get_state_type(state) == "RUNNING" or state.name == CLAIMED)


def _find_end(flow_run: FlowRun) -> EndedRun | None:
    """Return the recorded end of a run; None if no end is recorded yet.

    Raises:
        _WorkerDied: the run was cancelled or has crashed.
    """
    state, kind = flow_run.state, get_state_type(flow_run.state)
    if kind in DEAD_STATES:
        raise _WorkerDied(f"the flow run ended with state {state.name if state else kind}")
    if kind not in FINISHED_STATES:
        return None
    message = (state.message or "") if state else ""
    seconds = flow_run.total_run_time.total_seconds()
    return EndedRun(run=str(flow_run.id), failed=kind == "FAILED", message=message, seconds=seconds)


@contextlib.contextmanager
def _open_client() -> Iterator[SyncPrefectClient]:
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        # This check is first, since importing the client takes seconds.
        raise UserError(
            "stages with a `pool` need a Prefect server, and none is configured",
            where="PREFECT_API_URL",
            remedy="Run `prefect config set PREFECT_API_URL=http://HOST:4200/api`, or omit `pool`.",
        )
    from prefect.client.orchestration import get_client

    with _typed_errors(), get_client(sync_client=True) as client:
        retry_soon(client)
        yield client


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Raise ServiceUnavailableError if Prefect's server is unavailable."""
    from prefect.settings import PREFECT_API_URL

    try:
        yield
    except Exception as error:
        if not is_unavailable(error) or isinstance(error, ServiceUnavailableError):
            raise
        raise ServiceUnavailableError(
            "Prefect's server is unreachable, or answered with a server error",
            where=str(PREFECT_API_URL.value()),
            why=describe_unavailability(error),
        ) from error
