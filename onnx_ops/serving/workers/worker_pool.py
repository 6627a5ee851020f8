"""The worker processes, which the supervisor forks, and replaces when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onnx_ops.errors import (
    InfrastructureError,
    OnnxOpsError,
    ServiceUnavailableError,
    describe_exit,
)
from onnx_ops.protocol.messages import error_from_bytes
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.workers.worker import (
    ControlChannel,
    FinishRevision,
    PrepareRevision,
    RevisionPrepared,
    WorkerReady,
)
from onnx_ops.serving.workers.worker_health import WorkerHealth

_log = logging.getLogger(__name__)

_MAX_PAUSE_S = 5.0
_FIRST_PAUSE_S = 0.1
_ATTEMPTS_PER_REVISION = 2
_HANG_S = 4.0
"""Seconds without a heartbeat after which a worker is killed.

The time for parsing the largest body is added.
"""
_PARSED_BYTES_PER_S = 100e6
"""Assumed speed of the parser, which blocks the event loop.

The real speed is several times as high (`benchmarks/wire.py`).
"""
_CHECK_S = 0.5
_STABLE_S = 60.0
"""Seconds a worker must run so that earlier deaths do not delay its replacement.

A worker that was ended by a run is replaced immediately if it ran longer than this. Otherwise,
the pause grows with each such death after the first.
"""
_MAX_RUN_PAUSE_S = 2.0

MAX_LOAD_FAILURES = 5
"""Number of consecutive deaths before readiness after which a table is not loaded.

The next worker then responds with 503, but another table can be published to it.
"""

RunWorker = Callable[[int, socket.socket, str], None]
"""Function that runs a worker.

Its arguments are the worker's number, its end of the control socket, and why it must not load the
table. The last argument is empty if the worker can load the table.
"""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """State of one worker process in the supervisor.

    `ready` is set when the process accepts connections.

    `responses` contains the results of `PrepareRevision`, by number of the revision.
    """

    number: int
    pid: int
    control: socket.socket
    ready: asyncio.Future[None]
    exited: asyncio.Future[None]
    channel: ControlChannel | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)
    responses: dict[int, asyncio.Future[OnnxOpsError | None]] = field(default_factory=dict)


class WorkerPool:
    """All workers of one server, managed on the supervisor's event loop.

    Each worker process calls `run`, and inherits the files in `keep`.
    """

    def __init__(
        self,
        size: int,
        run: RunWorker,
        *,
        keep: Collection[int],
        health: WorkerHealth,
        max_body: int,
    ) -> None:
        self._health = health
        self._hang_s = _HANG_S + max_body / _PARSED_BYTES_PER_S
        self._run = run
        self._keep = keep
        self._numbers = range(size)
        self._workers: dict[int, WorkerProcess] = {}
        self._load_failures = dict.fromkeys(self._numbers, 0)
        self._run_deaths = dict.fromkeys(self._numbers, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._changed = asyncio.Condition()

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of all workers."""
        return frozenset(worker.pid for worker in self._workers.values())

    def get_failed(self) -> Mapping[str, str]:
        """Return the deployments that a worker could not load, with the reason."""
        return {
            name: why for worker in self._workers.values() for name, why in worker.failed.items()
        }

    async def start(self) -> None:
        """Fork all workers, and wait until each accepts connections."""
        for number in self._numbers:
            self._fork(number)
        self._add_task(self._watch_heartbeats())
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    len(self._workers) == len(self._numbers)
                    and all(w.ready.done() for w in self._workers.values())
                )
            )

    async def prepare(self, revision: TableRevision, limit_s: float) -> None:
        """Let every worker prepare a revision.

        A worker that ends is replaced, and the new worker repeats the preparation. Workers that
        take longer than `limit_s` are killed.

        Raises:
            OnnxOpsError: a worker reported this error in place of the prepared revision.
            InfrastructureError: a worker ended `_ATTEMPTS_PER_REVISION` times during the
                preparation.
            ServiceUnavailableError: the workers did not prepare the revision within `limit_s`.
        """
        attempts = dict.fromkeys(self._numbers, _ATTEMPTS_PER_REVISION)
        prepared: set[int] = set()
        try:
            async with asyncio.timeout(limit_s):
                while waiting := set(self._numbers) - {
                    w.number for w in self._workers.values() if w.pid in prepared
                }:
                    pids = await asyncio.gather(
                        *(self._prepare_worker(n, revision) for n in waiting)
                    )
                    for number, pid in zip(waiting, pids, strict=True):
                        if pid is None:
                            attempts[number] -= 1
                        else:
                            prepared.add(pid)
                    if not all(attempts.values()):
                        raise InfrastructureError(
                            f"a worker process ended {_ATTEMPTS_PER_REVISION} times while it "
                            "loaded the state",
                            why="a trial process loaded the new deployments of the state, so they "
                            "can conflict with other models of the worker",
                            remedy="See the server's log for how the worker ended. "
                            "The previous state is still published.",
                        )
        except TimeoutError as error:
            for worker in tuple(self._workers.values()):
                if worker.pid not in prepared:
                    # A load that hangs can only be ended with its process.
                    kill_process(worker.pid, signal.SIGKILL)
            raise ServiceUnavailableError(
                f"the workers did not load the state within {limit_s:.0f} s",
                why="the machine is too busy, or a model takes too long",
                remedy="Publish the state again when the machine is less busy.",
            ) from error

    async def finish(self, number: int, *, is_published: bool) -> None:
        """Notify every worker that a revision was published or discarded."""
        message = FinishRevision(number=number, is_published=is_published)
        for worker in self._workers.values() if is_published else ():
            worker.failed = {}  # Every worker has loaded all deployments of a published table.
        for worker in tuple(self._workers.values()):
            if worker.channel is not None:
                with contextlib.suppress(ConnectionError):
                    await worker.channel.send(message)

    async def stop(self, timeout_s: float) -> None:
        """Drain all workers, and kill those that do not end within the time limit."""
        self._stopping = True
        for worker in self._workers.values():
            kill_process(worker.pid, signal.SIGTERM)
        if exits := [worker.exited for worker in self._workers.values()]:
            await asyncio.wait(exits, timeout=timeout_s)
        for worker in tuple(self._workers.values()):
            _log.warning("worker %d did not drain in time and is killed", worker.pid)
            kill_process(worker.pid, signal.SIGKILL)
        if exits := [worker.exited for worker in self._workers.values()]:
            await asyncio.wait(exits)

    async def _prepare_worker(self, number: int, revision: TableRevision) -> int | None:
        """Return the id of the process that prepared the revision; None if it has ended.

        Raises:
            OnnxOpsError: the worker could not prepare the revision.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._workers)
        worker = self._workers[number]
        await _wait_first(worker.ready, worker.exited)
        if worker.exited.done() or worker.channel is None:
            return None
        response = worker.responses.setdefault(
            revision.number, asyncio.get_running_loop().create_future()
        )
        with contextlib.suppress(ConnectionError):
            await worker.channel.send(PrepareRevision(revision=revision))
        await _wait_first(response, worker.exited)
        if not response.done():
            return None
        error = response.result()
        if error is not None:
            raise error
        return worker.pid

    def _fork(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        must_not_load = self._load_failures[number] >= MAX_LOAD_FAILURES
        refusal = "workers ended repeatedly while they loaded the table" if must_not_load else ""
        pid = fork_child(
            partial(self._run, number, theirs, refusal), keep=(theirs.fileno(), *self._keep)
        )
        theirs.close()
        worker = WorkerProcess(number, pid, ours, loop.create_future(), loop.create_future())
        self._workers[number] = worker
        self._add_task(self._listen(worker))

    def _add_task(self, run: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_heartbeats(self) -> None:
        """Kill workers whose event loop hangs, because they would never answer again."""
        while not self._stopping:
            started_at = time.monotonic()
            await asyncio.sleep(_CHECK_S)
            if time.monotonic() - started_at > 2 * _CHECK_S:
                # The whole machine was suspended or is overloaded, so the workers possibly could
                # not run.
                continue
            for worker in self._workers.values():
                silence_s = self._health.get_silence_s(worker.number)
                if worker.ready.done() and silence_s > self._hang_s:
                    _log.error(
                        "the event loop of worker %d has hung for %.1f s, so the worker is killed",
                        worker.pid,
                        silence_s,
                    )
                    self._health.record_hang(worker.number)
                    kill_process(worker.pid, signal.SIGKILL)

    async def _receive(self, worker: WorkerProcess, channel: ControlChannel) -> None:
        """Process the messages of a worker until it closes its socket."""
        while (message := await channel.receive()) is not None:
            if isinstance(message, WorkerReady):
                worker.failed = message.failed
                worker.ready.set_result(None)
                async with self._changed:
                    self._changed.notify_all()
            elif isinstance(message, RevisionPrepared):
                response = worker.responses.pop(message.number, None)
                if response is not None and not response.done():
                    response.set_result(
                        error_from_bytes(message.error.encode()) if message.error else None
                    )

    async def _listen(self, worker: WorkerProcess) -> None:
        """Receive the messages of a worker until it ends, then replace it."""
        worker.channel = await ControlChannel.open(worker.control)
        try:
            await self._receive(worker, worker.channel)
        except Exception:
            # A worker whose messages are lost would miss publications, so it is replaced.
            _log.exception("messages of worker %d cannot be read, so it is replaced", worker.pid)
        # The worker has closed its socket, so it is about to end, or its messages cannot be read.
        kill_process(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        worker.channel.close()
        del self._workers[worker.number]
        was_ready = worker.ready.done()
        worker.ready.cancel()
        worker.exited.set_result(None)
        if self._stopping:
            return
        running = self._health.record_death(worker.number)
        how = describe_exit(os.waitstatus_to_exitcode(status)) + (
            f", while it ran {running}" if running else ""
        )
        _log.error("worker %d ended (%s) and is replaced", worker.pid, how)
        if pause_s := self._compute_pause_s(worker, was_ready=was_ready, was_running=bool(running)):
            await asyncio.sleep(pause_s)
        if not self._stopping:
            self._fork(worker.number)
            async with self._changed:
                self._changed.notify_all()

    def _compute_pause_s(
        self, worker: WorkerProcess, *, was_ready: bool, was_running: bool
    ) -> float:
        """Return the pause in seconds before a worker that ended is replaced.

        A worker that had another cause of death than loading or a run is replaced immediately.
        """
        number = worker.number
        failures = self._load_failures[number] = 0 if was_ready else self._load_failures[number] + 1
        if time.monotonic() - worker.started_at >= _STABLE_S:
            self._run_deaths[number] = 0
        self._run_deaths[number] += was_running
        run_deaths = self._run_deaths[number] if was_running else 0
        return max(
            compute_restart_pause_s(failures),
            min(_MAX_RUN_PAUSE_S, compute_restart_pause_s(run_deaths)),
        )


def fork_child(run: Callable[[], None], *, keep: Collection[int]) -> int:
    """Fork a child that runs a function and exits; return its process id.

    The calling process must have a single thread.

    The child exits with code 1 if `run` raises. It inherits the standard files and the files in
    `keep`.
    """
    # All signals are blocked until the child has set its handlers. Before that, the handlers that
    # it inherits from this process would handle them.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The terminal sends SIGINT to all processes, and the supervisor handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Other files are closed by number, and their objects are never used again. The parent's
        # event loop shares its selector with the child, so cleaning up the objects here would
        # unregister files of the parent.
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in {0, 1, 2, *keep}:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run()
        code = 0
    except BaseException:
        _log.exception("process %d failed", os.getpid())
    finally:
        logging.shutdown()
        os._exit(code)


async def wait_exit(pid: int) -> None:
    """Wait until a child has ended, without reaping it.

    At the lowest priority, even a killed process can take seconds to end. The supervisor must not
    be blocked for that time.
    """
    loop, handle, exited = asyncio.get_running_loop(), os.pidfd_open(pid), asyncio.Event()
    loop.add_reader(handle, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _wait_first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def compute_restart_pause_s(failures: int) -> float:
    """Return the pause in seconds before a failed process is replaced.

    The result is 0 after at most one failure.
    """
    return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**failures) if failures > 1 else 0.0


def prefer_for_oom_kill() -> None:
    """Let the kernel kill this process before any worker if memory runs out.

    See proc_pid_oom_score_adj(5).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def kill_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that has not been reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
