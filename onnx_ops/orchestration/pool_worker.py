"""Worker of a Prefect work pool that executes each stage in a fork.

The worker imports the packages before it forks, so that the process of a stage starts fast.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import State, flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.logging import get_logger, get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Completed, Pending, Running
from prefect.types.names import MAX_VARIABLE_NAME_LENGTH

from onnx_ops import codec, plugins
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.app.context import Project
from onnx_ops.app.fork_server import FORK_SERVER
from onnx_ops.app.placed_stage import answer
from onnx_ops.domain.plan import PLACEABLE, Stage, StageKind
from onnx_ops.domain.pool import WorkerStatus
from onnx_ops.errors import OnnxOpsError, describe_exit
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.pool_records import (
    ANNOUNCEMENT,
    CLAIMED,
    FLOW,
    HEARTBEAT_S,
    TAKEN,
    declare_crashed,
    is_final,
    list_alive,
    read_announcements,
)
from onnx_ops.orchestration.prefect_client import (
    describe_unavailability,
    is_unavailable,
    retry_soon,
    server_time,
)
from onnx_ops.orchestration.tasks import failed
from onnx_ops.ports import Observer

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_POLL_S = 0.5
_WATCH_S = 2.5
"""Seconds between checks whether a flow run was cancelled.

The processes of a cancelled run should end within 10 s.
"""
_START_S = 60.0
"""Seconds for which a starting worker waits for an unavailable server."""
_DESCRIBED_S = 60.0
"""Time limit for reading what the machine can measure at the start, in seconds."""

_LOG = get_logger("onnx_ops.work")

_Logger = logging.Logger | logging.LoggerAdapter[Any]


@flow(name=FLOW, persist_result=False)
def work(request: str, store: str, asker: str) -> State[Any]:
    """Execute one stage of a pipeline on this machine.

    The result is recorded in the shared store.

    Args:
        request: Digest of the request in the store; not written by hand.
        store: The location of the requesting machine's store.
        asker: Random id of the first request; other requests share its flow run.
    """
    return _work(UUID(runtime.flow_run.id), request, store, get_run_logger())


def _work(run: UUID, request: str, store: str, logger: _Logger) -> State[Any]:
    """Execute the stage of a flow run; return its final state."""
    try:
        with project_of(()) as project, _watched(project, run):
            error = answer(project, request, place=store, run=str(run), observer=_Log(logger))
    except OnnxOpsError as raised:
        error = raised
    return (
        Completed(message="the result of the stage is in the store")
        if error is None
        else failed(error)
    )


class _Log(Observer):
    """Observer that writes the progress of a stage to the log of its flow run."""

    def __init__(self, logger: _Logger) -> None:
        self._logger = logger

    def progressed(self, stage: Stage, line: str) -> None:
        """Write one line of progress to the log."""
        self._logger.info("%s: %s", stage.id, line)


@contextlib.contextmanager
def _watched(project: Project, run: UUID) -> Iterator[None]:
    """Send heartbeats of a flow run, and end its processes when the run ends early.

    A run ends early if it is cancelled, or if another process sets a final state. This process then
    ends too. A heartbeat is an update of the flow run that does not change its name. The requesting
    process reads the time of the last update.
    """
    done = threading.Event()

    def watch() -> None:
        sent = 0.0
        with get_client(sync_client=True) as client:
            retry_soon(client)
            while not done.wait(_WATCH_S):
                with contextlib.suppress(Exception):
                    # While the Prefect server is unavailable, the stage continues.
                    flow_run = client.read_flow_run(run)
                    if is_final(flow_run.state):
                        if flow_run.state is not None and flow_run.state.is_cancelling():
                            # If this request fails, the worker sets the state after the end of this
                            # process.
                            with contextlib.suppress(Exception):
                                # The state must be set before the processes end. Otherwise, the
                                # flow run would report their end as a failure.
                                why = "the flow run was cancelled"
                                client.set_flow_run_state(run, Cancelled(message=why), force=True)
                        project.running().end()
                        os._exit(1)
                    if time.monotonic() - sent > HEARTBEAT_S:
                        client.update_flow_run(run, name=flow_run.name)
                        sent = time.monotonic()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=HEARTBEAT_S)


def create_pool(client: SyncPrefectClient, pool: str) -> None:
    """Create a work pool and its queues if missing; create or update its deployment."""
    from prefect.client.schemas.actions import WorkPoolCreate

    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(
            WorkPoolCreate(name=pool, type="process", description="Stages of onnx-ops.")
        )
    for kind in PLACEABLE:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_queue(kind.value, work_pool_name=pool)
    client.create_deployment(
        flow_id=client.create_flow_from_name(FLOW),
        name=pool,
        entrypoint=f"{work.fn.__module__}.{work.fn.__name__}",
        work_pool_name=pool,
        enforce_parameter_schema=False,
        job_variables={"stream_output": False},
    )


@dataclass(kw_only=True)
class PoolWorker:
    """Worker that executes the stages of a pool, each in a fork of this process.

    This process must have one thread only: the fork of a process with several threads inherits
    locks that are never released.
    """

    pool: str
    kinds: Sequence[StageKind] = PLACEABLE
    limit: int = 1
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    stages: dict[int, FlowRun] = field(default_factory=dict)
    """Flow runs that this worker executes, by process id."""
    _ended: dict[UUID, str] = field(default_factory=dict)
    """How the process of each flow run ended, if the run's state is not checked yet."""
    _stopping: bool = False
    _away_since: float | None = None
    """Start of the server's outage on the monotonic clock; None if the server answers."""

    def run(self, client: SyncPrefectClient) -> None:
        """Execute stages until SIGTERM or SIGINT.

        After the first signal, the running stages finish and no other stage starts. A second signal
        ends the running stages.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        FORK_SERVER.start()
        _import_for_forks()
        variable = self._enter_pool(client)
        heartbeat = polled = -HEARTBEAT_S
        _LOG.info(
            "worker %s of pool %s takes stages: %s", self.name, self.pool, ", ".join(self.kinds)
        )
        while not self._stopping or self.stages or self._ended:
            now = time.monotonic()
            with self._outlasting(client):
                if now - heartbeat >= HEARTBEAT_S:
                    client.send_worker_heartbeat(self.pool, self.name, HEARTBEAT_S)
                    heartbeat = now
                self._reap(client)
                free = self.limit - len(self.stages)
                # The worker polls at least once per heartbeat even if it cannot start a stage. The
                # server records the time of the last poll of each queue, which shows the kinds of
                # stages that the pool's workers take.
                if not self._stopping and (
                    now - polled >= HEARTBEAT_S or (free > 0 and self._is_any_waiting(client))
                ):
                    polled = now
                    for run in self._waiting(client)[:free]:
                        self._take(client, run)
            self._pause()
        # If these requests fail, the worker is treated as dead once several heartbeats are missing.
        with contextlib.suppress(Exception):
            client.delete_variable_by_name(variable)
            place = {"work_pool_name": self.pool, "name": self.name}
            client.request(
                "DELETE", "/work_pools/{work_pool_name}/workers/{name}", path_params=place
            )
        _LOG.info("worker %s of pool %s has ended", self.name, self.pool)

    def _pause(self) -> None:
        """Wait until the next poll, or until a stage ends and another can start."""
        with contextlib.ExitStack() as stack:
            ends = list[int]()
            # Without a descriptor for each process, the worker polls: `pidfd_open` is missing, or
            # too many files are open.
            with contextlib.suppress(AttributeError, OSError):
                for pid in self.stages:
                    ends.append(end := os.pidfd_open(pid))
                    stack.callback(os.close, end)
            wait(ends, _POLL_S)

    def _enter_pool(self, client: SyncPrefectClient) -> str:
        """Create the pool, and publish the description of this worker.

        Return the name of the variable that has the description; empty if the worker is stopped
        before. If the server is unavailable, for instance during a restart, the request is repeated
        for up to `_START_S` after the first failure.
        """
        variable = ""
        while not variable and not self._stopping:
            with self._outlasting(client, limit_s=_START_S):
                create_pool(client, self.pool)
                variable = self._announce(client)
            if self._away_since is not None:
                self._pause()
        return variable

    def _announce(self, client: SyncPrefectClient) -> str:
        """Describe this worker in a Prefect variable, and return the variable's name.

        The variables of the pool's dead workers are removed.
        """
        client.send_worker_heartbeat(self.pool, self.name, HEARTBEAT_S)
        alive = list_alive(client, self.pool, server_time(client))
        for name, worker in read_announcements(client).items():
            if worker.pool == self.pool and worker.name not in alive:
                # The deletion fails if another worker has already deleted the variable.
                with contextlib.suppress(ObjectNotFound):
                    client.delete_variable_by_name(name)
        own = replace(
            _describe_machine(),
            pool=self.pool,
            name=self.name,
            kinds=tuple(self.kinds),
            limit=self.limit,
        )
        name = re.sub(r"[^a-z0-9]+", "_", f"{ANNOUNCEMENT}_{self.pool}_{self.name}".lower())[
            :MAX_VARIABLE_NAME_LENGTH
        ]
        value, tags = codec.to_json(own), [ANNOUNCEMENT]
        try:
            client.create_variable(VariableCreate(name=name, value=value, tags=tags))
        except ObjectAlreadyExists:
            # An earlier worker with the same name left the variable. A restarted container has the
            # same host name, and its processes can have the same ids.
            client.update_variable(VariableUpdate(name=name, value=value, tags=tags))
        return name

    def _stop(self, number: int, frame: object) -> None:
        if self._stopping:
            for pid in self.stages:
                _end(pid)
        self._stopping = True

    @contextlib.contextmanager
    def _outlasting(
        self, client: SyncPrefectClient, *, limit_s: float = math.inf
    ) -> Iterator[None]:
        """Suppress the errors of an unavailable server, for up to `limit_s`.

        Meanwhile, running stages continue and scheduled stages wait. The exception is raised if the
        first failure of this outage is more than `limit_s` ago, in seconds.
        """
        try:
            yield
        except Exception as error:
            if not is_unavailable(error):
                raise
            if self._away_since is None:
                _LOG.warning(
                    "%s is unavailable (%s); trying again",
                    client.api_url,
                    describe_unavailability(error),
                )
                self._away_since = time.monotonic()
            elif time.monotonic() - self._away_since > limit_s:
                raise
        else:
            if self._away_since is not None:
                _LOG.info("%s is available again", client.api_url)
            self._away_since = None

    def _is_any_waiting(self, client: SyncPrefectClient) -> bool:
        """Return whether a run is scheduled in the pool.

        Between two heartbeats, the pool's queues are read only in this case.
        """
        scheduled = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
        )
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[self.pool]))
        return bool(
            client.read_flow_runs(flow_run_filter=scheduled, work_pool_filter=pool, limit=1)
        )

    def _waiting(self, client: SyncPrefectClient) -> list[FlowRun]:
        scheduled = client.get_scheduled_flow_runs_for_work_pool(
            self.pool, [kind.value for kind in self.kinds]
        )
        return [entry.flow_run for entry in scheduled]

    def _take(self, client: SyncPrefectClient, run: FlowRun) -> None:
        """Start a stage, unless another worker has taken it or it was cancelled."""
        result: Any = client.set_flow_run_state(
            run.id, Pending(name=CLAIMED, message=f"{TAKEN}{self.name}")
        )
        if result.status != "ACCEPT":
            return
        pid = os.fork()
        if pid == 0:
            _execute(run)
        _LOG.info("%s: started, process %d", run.name, pid)
        self.stages[pid] = run

    def _reap(self, client: SyncPrefectClient) -> None:
        """Report ended processes; a run without a recorded final state has crashed."""
        for pid, run in tuple(self.stages.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(ProcessLookupError):
                    # A killed stage can leave child processes behind.
                    os.killpg(pid, signal.SIGKILL)
                del self.stages[pid]
                self._ended[run.id] = describe_exit(os.waitstatus_to_exitcode(status))
                _LOG.info("%s: ended with %s", run.name, self._ended[run.id])
        for run_id, how in tuple(self._ended.items()):
            try:
                state = client.read_flow_run(run_id).state
            except ObjectNotFound:  # A user has deleted the flow run.
                del self._ended[run_id]
                continue
            if state is not None and state.is_cancelling():
                # The process of the stage did not set the state. Possibly the stage had not begun,
                # it ended before it detected the cancellation, or its request failed.
                client.set_flow_run_state(
                    run_id,
                    Cancelled(message=f"the process of the stage ended with {how}"),
                    force=True,
                )
            elif not is_final(state):
                declare_crashed(
                    client,
                    run_id,
                    f"the process of the stage on worker {self.name} ended with {how}",
                )
            del self._ended[run_id]


def _describe_machine() -> WorkerStatus:
    """Return what this machine can measure.

    A child process loads ONNX Runtime, which can start threads. This process must stay without
    threads. If the child process fails or exceeds `_DESCRIBED_S`, the description is empty.
    """
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_description, args=(sending,))
    child.start()
    sending.close()
    try:
        # If the child fails, its traceback is on standard error.
        with contextlib.suppress(EOFError):
            if receiving.poll(_DESCRIBED_S):
                return codec.loads(receiving.recv_bytes(), WorkerStatus)
        return WorkerStatus(pool="", name="")
    finally:
        receiving.close()
        child.kill()
        child.join()


def _send_description(sending: Connection) -> None:
    from onnx_ops.adapters.runtimes.onnxruntime_session import DISTRIBUTION, list_providers

    providers: tuple[str, ...] = ()
    with contextlib.suppress(ImportError):  # A machine that only trains can lack ONNX Runtime.
        providers = list_providers()
    with project_of(()) as project:
        described = WorkerStatus(
            pool="",
            name="",
            release=plugins.version("onnx-ops"),
            store=project.settings.store,
            machine=read_hardware("onnxruntime", plugins.version(DISTRIBUTION)),
            providers=providers,
        )
    sending.send_bytes(codec.dumps(described))


def _import_for_forks() -> None:
    """Import what every flow run needs, before this process forks.

    numpy is imported so that it starts no threads. A process that forks must have one thread only.
    """
    name = "OPENBLAS_NUM_THREADS"
    given = os.environ.get(name)
    os.environ[name] = "1"
    for module in ("onnx_ops.app.handler", "onnx_ops.app.execution"):
        importlib.import_module(module)
    del os.environ[name]
    if given is not None:
        os.environ[name] = given


def _execute(run: FlowRun) -> None:
    """Execute the stage of a flow run in this process, and end the process.

    The process is a fork of the worker.
    """
    code, logger = 1, flow_run_logger(run)
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with get_client(sync_client=True) as client:
            retry_soon(client)
            begun: Any = client.set_flow_run_state(run.id, Running())
            if begun.status == "ACCEPT":
                # The server rejects the state of a run that was cancelled meanwhile.
                state = _work(run.id, run.parameters["request"], run.parameters["store"], logger)
                client.set_flow_run_state(run.id, state)
                code = 0 if state.is_completed() else 1
    except Exception:
        logger.exception("the process of the flow run failed")
    finally:
        APILogHandler().flush()
        os._exit(code)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
