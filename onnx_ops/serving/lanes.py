"""Where a deployment's requests wait for their turn, and the threads that run them.

A lane waits for nothing: a thread takes what queued up while it was busy and runs it at once, together if the model's
rows are independent of each other, else one by one. Under little load no request is delayed; under much load batches
grow by themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from onnx_ops.serving.http import Overloaded
from onnx_ops.serving.shared import QUEUED, RUNNING, Row

T = TypeVar("T")

INLINE_S = 250e-6
"""A model that runs faster than this is run on the event loop: handing over to a thread would cost as much."""
_WEIGHT = 1 / 8
_DOUBTFUL_S = 4 * INLINE_S
_CERTAIN_S = 20e-3
MOST_TOGETHER = 64
"""Requests that are run as one batch at most."""
_LONGEST_RETRY_S = 60


@dataclass(slots=True)
class RunTime:
    """Exponentially weighted mean of a model's run times in seconds, each counting for an eighth.

    A run of a fast model in which the system took the processor away looks like a slow one. It counts as 1 ms, so that
    one alone does not move the model off the event loop; what took more than 20 ms counts in full.
    """

    seconds: float = 0.0

    def observe(self, seconds: float) -> None:
        if _DOUBTFUL_S < seconds < _CERTAIN_S and self.seconds < INLINE_S:
            seconds = _DOUBTFUL_S
        self.seconds += (seconds - self.seconds) * _WEIGHT


class Hands:
    """Threads that run the models of a worker, whatever their lanes; who was idle last works next.

    Two lanes with threads of their own are not alike: the system leaves a thread on the processor where it is, and the
    same model was seen 45 % slower in one of them for a hundred requests. A rollout would hold that against a version.
    """

    def __init__(self) -> None:
        self._idle: list[_Hand] = []

    def do(self, work: Callable[[], None]) -> None:
        """Have `work` done, which must not raise, by a thread that nobody else waits for."""
        try:
            hand = self._idle.pop()
        except IndexError:
            hand = _Hand(self._idle)
        hand.take(work)


class _Hand:
    """A thread that does what it is given, and says that it is idle."""

    def __init__(self, idle: list[_Hand]) -> None:
        self._idle = idle
        self._work: Callable[[], None] | None = None
        self._given = threading.Lock()
        self._given.acquire()
        threading.Thread(target=self._loop, name="run", daemon=True).start()

    def take(self, work: Callable[[], None]) -> None:
        self._work = work
        self._given.release()

    def _loop(self) -> None:
        while True:
            self._given.acquire()
            work, self._work = self._work, None
            if work is not None:
                work()
            del work  # it holds a model
            self._idle.append(self)


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """A bounded queue, and how many threads may work on it at once.

    Args:
        hands: the worker's threads.
        work: gets what queued up, at most `together` items, on one of the threads. It must not raise.
        limit: how many items may wait.
        together: how many items a thread takes at once.
        threads: how many run at the same time.
        row: where the gauges of the lane are kept.
        run_time: of the deployment's model.
    """

    hands: Hands
    work: Callable[[Sequence[T]], None]
    limit: int
    together: int
    threads: int
    row: Row
    run_time: RunTime
    _items: deque[T] = field(default_factory=deque)
    _changed: threading.Lock = field(default_factory=threading.Lock)
    _at_work: int = 0
    _running: int = 0
    busy: bool = False
    """Whether something waits or is run."""

    def put(self, item: T) -> None:
        """Raises Overloaded if the queue is full."""
        with self._changed:
            if len(self._items) >= self.limit:
                raise Overloaded("too many requests are waiting for this model", retry_after_s=self._retry_after_s())
            self._items.append(item)
            self._gauges()
            if self._at_work == self.threads:
                return
            self._at_work += 1
        self.hands.do(self._empty)

    def _retry_after_s(self) -> int:
        wait_s = len(self._items) * self.run_time.seconds / self.threads
        return max(1, min(_LONGEST_RETRY_S, round(wait_s)))

    def _empty(self) -> None:
        while True:
            with self._changed:
                if not self._items:
                    self._at_work -= 1
                    return
                taken = [self._items.popleft() for _ in range(min(len(self._items), self.together))]
                self._running += len(taken)
                self._gauges()
            try:
                self.work(taken)
            finally:
                with self._changed:
                    self._running -= len(taken)
                    self._gauges()

    def _gauges(self) -> None:
        self.row[QUEUED], self.row[RUNNING] = len(self._items), self._running
        self.busy = bool(self._items or self._running)
