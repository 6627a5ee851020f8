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


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """A bounded queue and its threads, which are started when the first item comes.

    Args:
        name: of the threads.
        work: gets what queued up, at most `together` items, on one of the threads. It must not raise.
        limit: how many items may wait.
        together: how many items a thread takes at once.
        threads: how many run at the same time.
        row: where the gauges of the lane are kept.
        run_time: of the deployment's model.
    """

    name: str
    work: Callable[[Sequence[T]], None]
    limit: int
    together: int
    threads: int
    row: Row
    run_time: RunTime
    _items: deque[T] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _started: int = 0
    _running: int = 0
    busy: bool = False
    """Whether something waits or is run."""
    _closed: bool = False

    def put(self, item: T) -> None:
        """Raises Overloaded if the queue is full."""
        with self._changed:
            if len(self._items) >= self.limit:
                raise Overloaded("too many requests are waiting for this model", retry_after_s=self._retry_after_s())
            self._items.append(item)
            self._gauges()
            if self._started < self.threads and self._started < self._running + len(self._items):
                self._started += 1
                threading.Thread(target=self._loop, name=self.name, daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """The threads end once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _retry_after_s(self) -> int:
        wait_s = len(self._items) * self.run_time.seconds / self.threads
        return max(1, min(_LONGEST_RETRY_S, round(wait_s)))

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._closed:
                    self._changed.wait()
                if not self._items:
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
