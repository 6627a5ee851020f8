"""The shadow processes: one for each deployment that gets mirrored requests.

The supervisor forks them. A shadow process loads only its deployment, and has no public socket.
Workers send copies of requests to it over a Unix socket (`ShadowQueue`). After the load, it runs at
the lowest priority that the system permits. The supervisor owns the listening socket. The socket
remains when a shadow process ends, and the next process uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import OnnxOpsError, describe_exit
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.inference.deployments import DeployedModel, TableRevision
from onnx_ops.serving.inference.run_monitor import RunMonitor
from onnx_ops.serving.inference.shadow import run_mirrored_request, take_requests
from onnx_ops.serving.metrics import (
    IN_PROGRESS,
    SHADOW_FAILED,
    SHADOW_RESTARTS,
    MetricsRow,
    SharedMetrics,
    count_load,
)
from onnx_ops.serving.workers.listeners import SHADOW_SOCKETS, get_shadow_path, listen_unix
from onnx_ops.serving.workers.worker import (
    ControlChannel,
    WorkerReady,
    encode_message,
    load_deployment,
)
from onnx_ops.serving.workers.worker_pool import (
    MAX_LOAD_FAILURES,
    compute_restart_pause_s,
    fork_child,
    kill_process,
    prefer_for_oom_kill,
    wait_exit,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_LOWEST_NICE = 19
_READ_BYTES = 1 << 18
_KILLED_S = 1.0
"""Seconds in which a killed process usually ends. A shutdown does not wait longer."""
_STABLE_S = 60.0
"""Seconds after which a process is regarded as stable.

If a stable process ends, the next one starts without a pause.
"""


def run_shadow_process(
    deployment: Deployment,
    folder: Path,
    options: ServerOptions,
    row: MetricsRow,
    listener: socket.socket,
    control: socket.socket,
    supervisor: int,
) -> None:
    """Run a shadow process until its supervisor ends, or closes `control`.

    If the deployment cannot be loaded, the process reports the reason and returns. The supervisor
    has the other end of `control`. The counters of the process are in `row`.
    """
    _end_with_parent(supervisor)
    prefer_for_oom_kill()
    gc.freeze()  # Objects that the process inherited are never freed before it ends.
    try:
        with count_load(row):
            loaded = load_deployment(deployment, folder, options)
    except OnnxOpsError as error:
        control.sendall(encode_message(WorkerReady(failed={deployment.name: str(error)})))
        return
    _lower_priority()
    control.sendall(encode_message(WorkerReady()))
    monitor = RunMonitor()

    def run(outputs: Sequence[str], feed: Tensors) -> Sequence[Array]:
        with monitor.limit(time.perf_counter() + options.run_timeout) as run_options:
            return loaded.run(outputs, feed, run_options)

    model = DeployedModel(
        deployment=deployment, signature=loaded.signature, run=run, max_body=options.max_body
    )
    answer_mirrored_requests(model, row, listener, control)


def _end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (prctl(2)).

    The kernel also kills a process in which a model hangs.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # If the parent ended before the call, no signal would arrive.
        os._exit(1)


def _lower_priority() -> None:
    """Give all threads the lowest priority, which later threads inherit.

    This must be called after the load. At this priority, a load might never finish on a busy
    machine.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # A sandbox can forbid the change of the scheduler.
            with contextlib.suppress(OSError):
                # Without permission for either change, the process works at normal priority.
                os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_NICE)


def answer_mirrored_requests(
    model: DeployedModel, row: MetricsRow, listener: socket.socket, control: socket.socket
) -> None:
    """Run requests from connections of `listener`.

    The function returns when `control` is closed and all received requests have run.
    """
    listener.setblocking(False)
    timeout_s: float | None = None
    received: dict[object, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        while events := selector.select(timeout_s):
            for key, _ in events:
                if key.fileobj is control:
                    selector.unregister(control)
                    timeout_s = 0.0
                elif key.fileobj is listener:
                    client, _ = listener.accept()
                    selector.register(client, selectors.EVENT_READ)
                    received[client] = bytearray()
                elif isinstance(connection := key.fileobj, socket.socket):
                    try:
                        data = connection.recv(_READ_BYTES)
                    except ConnectionError:
                        data = b""
                    if not data:  # The worker has ended, or has closed the connection.
                        selector.unregister(connection)
                        connection.close()
                        del received[connection]
                        continue
                    received[connection] += data
                    for request in take_requests(received[connection]):
                        row[IN_PROGRESS] = 1
                        run_mirrored_request(model, row, request)
                        row[IN_PROGRESS] = 0


@dataclass(slots=True, eq=False)
class _Shadow:
    """State of a shadow deployment in the supervisor.

    Attributes:
        control: control socket of the running process; None without a process.
        failed: why the deployment has no process until the next publication; empty if it has one,
            or will get one.
    """

    deployment: Deployment
    row: MetricsRow
    path: Path
    listener: socket.socket | None = None
    task: asyncio.Task[None] | None = None
    control: socket.socket | None = None
    failed: str = ""

    def close(self) -> None:
        """End the process, and refuse connections of workers."""
        if self.task is not None:
            self.task.cancel()
        self.close_listener()

    def close_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
            self.path.unlink(missing_ok=True)

    def fail(self, why: str) -> None:
        """Record why the shadow deployment has no process until the next publication.

        Requests to it are dropped.
        """
        _log.error("shadow deployment %s has no process: %s", self.deployment.name, why)
        self.failed = why
        self.close_listener()


class ShadowProcesses:
    """The shadow processes of one server, managed on the supervisor's event loop."""

    def __init__(self, folder: Path, options: ServerOptions, shared: SharedMetrics) -> None:
        self._folder = folder
        self._options = options
        self._shared = shared
        self._shadows: dict[Deployment, _Shadow] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        for path in folder.glob(SHADOW_SOCKETS):
            path.unlink(missing_ok=True)  # A supervisor that was killed leaves its sockets behind.

    def get_failed(self) -> Mapping[str, str]:
        """Return shadow deployments without a process, with the reason."""
        return {
            shadow.deployment.name: shadow.failed
            for shadow in self._shadows.values()
            if shadow.failed
        }

    def start(self, revision: TableRevision) -> None:
        """Start the missing processes of a revision.

        Requests wait in a socket until their process has loaded the deployment.
        """
        for deployment in _list_shadows(revision):
            known = self._shadows.get(deployment)
            if known is not None and not known.failed:
                continue
            slot = revision.slots[deployment.name]
            path = get_shadow_path(self._folder, self._shared.origin, slot)
            shadow = self._shadows[deployment] = _Shadow(
                deployment, self._shared.get_shadow_row(slot), path
            )
            try:
                shadow.listener = listen_unix(path)
            except OSError as error:
                shadow.fail(str(error))
                continue
            shadow.task = self._add_task(self._supervise(shadow, shadow.listener))

    def retain(self, revision: TableRevision | None) -> None:
        """End all processes but those of a revision."""
        needed = () if revision is None else _list_shadows(revision)
        for deployment in self._shadows.keys() - set(needed):
            self._shadows.pop(deployment).close()

    async def stop(self, timeout_s: float) -> None:
        """Stop all processes after they have run the requests that they received.

        Processes that do not end within the time limit are killed.
        """
        self._stopping = True
        for shadow in self._shadows.values():
            if shadow.control is not None:
                with contextlib.suppress(OSError):
                    shadow.control.shutdown(socket.SHUT_WR)
            elif shadow.task is not None:
                shadow.task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self.retain(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_KILLED_S)

    async def _supervise(self, shadow: _Shadow, listener: socket.socket) -> None:
        """Run the process of a shadow deployment, and replace it when it ends."""
        load_deaths = deaths = 0
        while True:
            started_at = time.monotonic()
            try:
                ready, status = await self._run(shadow, listener)
            except Exception as error:
                _log.exception("shadow %s could not be run", shadow.deployment.name)
                shadow.fail(f"the shadow process could not be run: {error}")
                return
            finally:
                was_running, shadow.row[IN_PROGRESS] = shadow.row[IN_PROGRESS], 0
            if self._stopping:
                return
            if ready is not None and ready.failed:
                shadow.fail(ready.failed[shadow.deployment.name])
                return
            why = describe_exit(os.waitstatus_to_exitcode(status))
            load_deaths = 0 if ready is not None else load_deaths + 1
            if load_deaths >= MAX_LOAD_FAILURES:
                shadow.fail(
                    f"{load_deaths} shadow processes ended before the model was loaded, "
                    f"the last with {why}"
                )
                return
            deaths = 1 if time.monotonic() - started_at > _STABLE_S else deaths + 1
            _log.error(
                "the process of shadow %s ended (%s) and is replaced", shadow.deployment.name, why
            )
            # The request in progress has probably caused the end of the process.
            shadow.row[SHADOW_FAILED] += was_running
            self._shared.get_shadow_row(0)[SHADOW_RESTARTS] += 1
            await asyncio.sleep(compute_restart_pause_s(deaths))

    async def _run(
        self, shadow: _Shadow, listener: socket.socket
    ) -> tuple[WorkerReady | None, int]:
        """Run one process; return its message and its wait status.

        The message reports whether the process has loaded the deployment. If the process has sent
        no message, the first value is None.
        """
        ours, theirs = socket.socketpair()
        inherited = self._folder, self._options, shadow.row, listener, theirs, os.getpid()
        run = partial(run_shadow_process, shadow.deployment, *inherited)
        with theirs:
            pid = fork_child(run, keep=(theirs.fileno(), listener.fileno()))
        exit_status = self._add_task(_reap(pid))
        shadow.control = ours
        try:
            channel = await ControlChannel.open(ours)
            with contextlib.closing(channel):
                message = await channel.receive()
                while await channel.receive() is not None:
                    pass
        finally:
            # The process has closed its socket, so it is about to end, or the process is no longer
            # needed.
            shadow.control = None
            if not exit_status.done():  # After its exit, another process can have its process id.
                kill_process(pid, signal.SIGKILL)
        return message if isinstance(message, WorkerReady) else None, await asyncio.shield(
            exit_status
        )

    def _add_task(self, run: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _reap(pid: int) -> int:
    """Wait until a child has ended; return its wait status."""
    await wait_exit(pid)
    _, status = os.waitpid(pid, 0)
    return status


def _list_shadows(revision: TableRevision) -> list[Deployment]:
    state = revision.table.state
    return [d for d in state.deployments if state.split.shadow.get(d.name)]
