"""The worker processes: forked, listened to, and replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from onnx_ops.errors import InfrastructureError, OnnxOpsError, ServiceUnavailableError
from onnx_ops.protocol.messages import error_from_bytes
from onnx_ops.serving.control import Channel, Message, Prepare, Prepared, Ready, Settled
from onnx_ops.serving.endpoint import Edition
from onnx_ops.serving.worker import Start, work

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 5.0
_FIRST_PAUSE_S = 0.1
_LIVES_PER_EDITION = 2

_DEADLY = 5
"""A worker that died so often before it was ready is replaced by one that does not load the published table: it answers
503, but another table can be published to it."""

Begin = Callable[[int, socket.socket, str], Start]
"""What a worker inherits, by its number, its end of the control socket and why it must not load the table, if so."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process as the supervisor knows it. `gone` is done once it died, `ready` once it accepts."""

    number: int
    pid: int
    control: socket.socket
    ready: asyncio.Future[None]
    gone: asyncio.Future[None]
    channel: Channel | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    answers: dict[int, asyncio.Future[OnnxOpsError | None]] = field(default_factory=dict)


class Crew:
    """All workers of one server. Belongs to the supervisor's event loop, whose process has no other thread.

    Args:
        size: how many workers there are.
        begin: makes what a new worker inherits.
    """

    def __init__(self, size: int, begin: Begin) -> None:
        self._begin = begin
        self._numbers = range(size)
        self._workers: dict[int, Worker] = {}
        self._failures = dict.fromkeys(self._numbers, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._changed = asyncio.Condition()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(worker.pid for worker in self._workers.values())

    def failed(self) -> Mapping[str, str]:
        """Deployments that a worker could not load when it started, and why."""
        return {name: why for worker in self._workers.values() for name, why in worker.failed.items()}

    async def start(self) -> None:
        """Fork all workers and wait until every one accepts connections."""
        for number in self._numbers:
            self._fork(number)
        async with self._changed:
            await self._changed.wait_for(self._all_ready)

    async def prepare(self, edition: Edition, limit_s: float) -> None:
        """Have every worker prepare an edition. One that dies over it is replaced and asked again, once.

        Args:
            limit_s: workers that take longer are killed.

        Raises:
            OnnxOpsError: what the first worker that cannot prepare it says.
            InfrastructureError: loading it kills workers, or takes too long.
        """
        lives = dict.fromkeys(self._numbers, _LIVES_PER_EDITION)
        done: set[int] = set()
        try:
            async with asyncio.timeout(limit_s):
                while waiting := [n for n in self._numbers if self._pid(n) not in done]:
                    found = await asyncio.gather(*(self._ask(n, edition) for n in waiting))
                    for number, pid in zip(waiting, found, strict=True):
                        if pid is None:
                            lives[number] -= 1
                        else:
                            done.add(pid)
                    if not all(lives.values()):
                        raise InfrastructureError(
                            "a worker process ended whenever it loaded the state",
                            why="a process of its own had loaded it before, so it takes what else a worker holds",
                            remedy="See the server's log for how it ended, and publish the state before again.",
                        )
        except TimeoutError as error:
            for worker in tuple(self._workers.values()):
                if worker.pid not in done:
                    _signal(worker.pid, signal.SIGKILL)  # what hangs in a load cannot be told to stop
            raise ServiceUnavailableError(
                f"the workers did not load the state within {limit_s:.0f} s",
                why="the machine is too busy, or a model takes too long",
                remedy="Publish it again when the machine has less to do.",
            ) from error

    def healed(self) -> None:
        """A published edition was prepared by all: nothing is missing in any worker."""
        for worker in self._workers.values():
            worker.failed = {}

    async def settle(self, edition: Edition, *, published: bool) -> None:
        """Tell every worker what became of an edition."""
        for worker in tuple(self._workers.values()):
            if worker.channel is not None:
                with contextlib.suppress(ConnectionError):
                    await worker.channel.send(Settled(edition=edition.number, published=published))

    async def end(self, patience_s: float) -> None:
        """Let every worker drain, and kill what does not end in time."""
        self._ending = True
        for worker in self._workers.values():
            _signal(worker.pid, signal.SIGTERM)
        gone = [worker.gone for worker in self._workers.values()]
        if gone:
            await asyncio.wait(gone, timeout=patience_s)
        for worker in tuple(self._workers.values()):
            _log.warning("worker %d did not drain in time and is killed", worker.pid)
            _signal(worker.pid, signal.SIGKILL)
        if left := [worker.gone for worker in self._workers.values()]:
            await asyncio.wait(left)

    async def _ask(self, number: int, edition: Edition) -> int | None:
        """The process that has prepared the edition; None if it died over it."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._workers)
        worker = self._workers[number]
        await _first(worker.ready, worker.gone)
        if worker.gone.done() or worker.channel is None:
            return None
        answer = worker.answers.setdefault(edition.number, asyncio.get_running_loop().create_future())
        with contextlib.suppress(ConnectionError):
            await worker.channel.send(Prepare(edition=edition.number, table=edition.table, slots=edition.slots))
        await _first(answer, worker.gone)
        if not answer.done():
            return None
        error = answer.result()
        if error is not None:
            raise error
        return worker.pid

    def _pid(self, number: int) -> int:
        worker = self._workers.get(number)
        return 0 if worker is None else worker.pid

    def _all_ready(self) -> bool:
        return len(self._workers) == len(self._numbers) and all(w.ready.done() for w in self._workers.values())

    def _fork(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        start = self._begin(number, theirs, self._refused(number))
        listeners = (start.listeners.public, start.listeners.handover)
        pid = fork(lambda: work(start), keep=[end.fileno() for end in (theirs, *listeners)])
        theirs.close()
        worker = Worker(number, pid, ours, loop.create_future(), loop.create_future())
        self._workers[number] = worker
        self._run(self._listen(worker))

    async def _listen(self, worker: Worker) -> None:
        worker.channel = await Channel.over(worker.control)
        while (message := await worker.channel.receive()) is not None:
            await self._heard(worker, message)
        await self._mourn(worker)

    async def _heard(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Ready):
            worker.failed = message.failed
            worker.ready.set_result(None)
            async with self._changed:
                self._changed.notify_all()
        elif isinstance(message, Prepared):
            answer = worker.answers.pop(message.edition, None)
            if answer is not None and not answer.done():
                answer.set_result(error_from_bytes(message.error.encode()) if message.error else None)

    async def _mourn(self, worker: Worker) -> None:
        """A worker closed its socket, which it does only by dying."""
        _signal(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        if worker.channel is not None:
            worker.channel.close()
        del self._workers[worker.number]
        was_ready = worker.ready.done()
        worker.ready.cancel()
        worker.gone.set_result(None)
        if self._ending:
            return
        _log.error("worker %d ended (%s) and is replaced", worker.pid, how_it_ended(status))
        failures = self._failures[worker.number] = 0 if was_ready else self._failures[worker.number] + 1
        if failures > 1:
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures))
        if not self._ending:
            self._fork(worker.number)
            async with self._changed:
                self._changed.notify_all()

    def _refused(self, number: int) -> str:
        return "workers died again and again while they loaded it" if self._failures[number] >= _DEADLY else ""

    def _run(self, task: Coroutine[Any, Any, None]) -> None:
        running = asyncio.get_running_loop().create_task(task)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)


def fork(run: Callable[[], None], *, keep: Collection[int]) -> int:
    """Fork a child of this process, which has no other thread, and have it run a function and exit.

    Args:
        run: what the child does; it ends with exit code 1 if this raises.
        keep: open files that the child inherits, besides the standard ones.

    Returns:
        The child's process id.
    """
    # A signal that comes before the child has handlers of its own would be taken by those of this process.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _become_child(run, keep)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    return pid


def _become_child(run: Callable[[], None], keep: Collection[int]) -> NoReturn:
    """The child's side of a fork.

    Everything that was inherited but is not the child's is closed by number and never touched again: the parent's
    event loop shares its selector with the child, and whoever tidied it up here would unhook the parent.
    """
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells all; the supervisor decides
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in {0, 1, 2, *keep}:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run()
        code = 0
    except BaseException:
        _log.exception("process %d cannot go on", os.getpid())
    finally:
        logging.shutdown()
        os._exit(code)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def how_it_ended(status: int) -> str:
    """Return how a process ended, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({names.get(-code, 'no name')})"
