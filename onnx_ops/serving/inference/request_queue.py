"""Queues of requests, one for each deployment, and the threads that run them.

A queue adds no delay. A thread takes the requests that arrived while it was busy, and runs them
immediately. It runs them as one batch if the model's rows are independent of each other, otherwise
one after the other. Under light load no request waits, and under heavy load batches grow. Requests
that the event loop reads in one turn are queued together before a thread takes them. Otherwise the
first request would run alone, and the others would wait almost as long as a batch takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from onnx_ops.domain.execution import INLINE_S
from onnx_ops.serving.inference.responses import QueueFullError
from onnx_ops.serving.metrics import IN_PROGRESS, QUEUED, MetricsRow

T = TypeVar("T")

MAX_BATCH = 64
"""Maximum number of requests in one batch."""
_SINGLE_EVERY = 16
"""Every 16th batch of a queue contains only one request.

Versions are compared by requests that run alone. Under heavy load, all other requests can run in
batches.
"""
_MAX_RETRY_S = 60
_MIN_OVERDUE_S = 20e-3
_OVERDUE_BATCHES = 4
_WEIGHT = 1 / 8

_LEAVE_INLINE_S = 1.25 * INLINE_S
"""Run time in seconds above which a model no longer runs on the event loop.

The value is above `INLINE_S`, so that a model with a run time near the limit does not alternate.
"""
_FAR_SLOWER_S = 4 * INLINE_S
_STALL_RATIO = 4
_NO_STALL_S = 100e-3


@dataclass(slots=True, eq=False)
class LatencyEstimator:
    """Exponentially weighted mean of run times in seconds; each run has weight 1/8.

    If the system suspends a run to run another process, a fast model seems slow. Therefore a slow
    run of a fast model enters the mean as at most the larger of 1 ms and four times the mean. So a
    single slow run moves the model off the event loop only if its mean is near the limit. Runs of
    at least 100 ms enter the mean unchanged.
    """

    seconds: float = 0.0
    is_fast: bool = field(init=False)
    """Whether the model should run on the event loop.

    If the mean is between `INLINE_S` and `_LEAVE_INLINE_S`, the value does not change.
    """

    def __post_init__(self) -> None:
        self.is_fast = self.seconds < INLINE_S

    def observe(self, seconds: float) -> None:
        """Add the time of one run, in seconds, to the mean."""
        before = self.seconds
        if _FAR_SLOWER_S < seconds < _NO_STALL_S and before < _FAR_SLOWER_S:
            seconds = min(seconds, max(_FAR_SLOWER_S, _STALL_RATIO * before))
        self.seconds = mean = before + (seconds - before) * _WEIGHT
        self.is_fast = mean < (_LEAVE_INLINE_S if self.is_fast else INLINE_S)

    def should_run_inline(self, leader: LatencyEstimator) -> bool:
        """Return whether the model should run on the event loop.

        The same model is about 50 µs slower on a thread. This alone would make two versions with
        run times near the limit differ. Therefore the leader decides for all deployments. Only
        another deployment with a mean of at least `_FAR_SLOWER_S` always runs on a thread.
        """
        return leader.is_fast and (leader is self or self.seconds < _FAR_SLOWER_S)


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that a thread runs.

    An `overdue` batch is excluded from the limit of concurrent batches.
    """

    queue: RequestQueue[Any]
    items: Sequence[Any]
    started_at: float
    overdue: bool = False


class WorkerThreads:
    """Threads of a worker that run batches, shared by all queues.

    See docs/adr/0008-endpoint-server.md.

    The next batch begins with the oldest request of all queues below their limits of batches
    (`max_batches`). If the queues took turns, requests to the version with most of the traffic
    would wait longer. A rollout would then measure a difference between equal versions. For the
    same reason, queues have no separate threads: a model was measured 45 % slower on one of two
    threads.

    A batch is overdue if it takes far longer than the batches of a waiting queue. Another batch
    then starts beside it. So a model that hangs does not delay other models.

    While `is_isolating`, only batches of one queue run at the same time, except beside overdue
    batches. So the death of the process can be attributed to one queue (see `worker_health`).

    Args:
        limit: maximum number of batches at the same time, not counting overdue batches.
        defer: calls a function at the end of the event loop's turn.
    """

    def __init__(
        self,
        limit: int = 1,
        defer: Callable[[Callable[[], None]], object] = lambda function: function(),
    ) -> None:
        self.limit = limit
        self.defer = defer
        self.is_isolating = False
        self.changed = threading.Condition(threading.Lock())
        """Lock for the state of this object and of its queues."""
        self._idle: list[SimpleQueue[_Batch]] = []
        """One queue for each idle thread, from which the thread takes its next batch."""
        self._batches: list[_Batch] = []
        self._waiting: list[RequestQueue[Any]] = []
        self._arrivals = 0
        self._watcher: threading.Thread | None = None
        self._watching = False
        self._is_deferred = False

    def add_arrival(self, queue: RequestQueue[Any]) -> int:
        """Register an arriving request; return its sequence number.

        The caller holds the lock.
        """
        if queue not in self._waiting:
            self._waiting.append(queue)
        self._arrivals += 1
        return self._arrivals

    def start_soon(self) -> None:
        """Start batches at the end of the event loop's current turn."""
        if not self._is_deferred:
            self._is_deferred = True
            self.defer(self._start_deferred)

    def _start_deferred(self) -> None:
        self._is_deferred = False
        with self.changed:
            self._start_batches()
            if not self._watching and self._find_overdue() is not None:
                self._watching = True
                if self._watcher is None:
                    self._watcher = threading.Thread(
                        target=self._watch, name="overdue", daemon=True
                    )
                    self._watcher.start()
                self.changed.notify()

    def _start_batches(self) -> None:
        """Start as many batches as the limit allows."""
        while (batch := self._take_batch()) is not None:
            if self._idle:
                started = self._idle.pop()
            else:
                started = SimpleQueue()
                threading.Thread(
                    target=self._run_batches, args=(started,), name="run", daemon=True
                ).start()
            started.put(batch)

    def count_queued(self, queue: RequestQueue[Any]) -> int:
        """Return the number of requests ahead of a new one.

        Requests in another queue are not counted while a batch of that queue is overdue.
        """
        hanging = {batch.queue for batch in self._batches if batch.overdue} - {queue}
        return sum(len(other) for other in self._waiting if other not in hanging)

    def _run_batches(self, started: SimpleQueue[_Batch]) -> None:
        """Run batches until none is waiting, then wait for the next one in `started`."""
        while True:
            batch: _Batch | None = started.get()
            while batch is not None:
                batch.queue.run(batch.items)
                with self.changed:
                    self._batches.remove(batch)
                    batch.queue.finish_batch(
                        len(batch.items), time.perf_counter() - batch.started_at
                    )
                    if (batch := self._take_batch()) is None:
                        self._idle.append(started)
                    # Batches of other queues possibly wait for the end of this isolated batch.
                    elif self.is_isolating:
                        self._start_batches()

    def _take_batch(self) -> _Batch | None:
        queue = self._find_next_queue()
        running = [batch.queue for batch in self._batches if not batch.overdue]
        if queue is None or len(running) >= self.limit:
            return None
        if self.is_isolating and any(other is not queue for other in running):
            return None
        batch = _Batch(queue, queue.take_batch(), time.perf_counter())
        if not len(queue):
            self._waiting.remove(queue)
        self._batches.append(batch)
        return batch

    def _find_next_queue(self) -> RequestQueue[Any] | None:
        """Return the queue with the oldest request, among queues below their batch limit."""
        ready = [queue for queue in self._waiting if queue.running_batches < queue.max_batches]
        return min(ready, key=lambda queue: queue.oldest, default=None)

    def _find_overdue(self) -> tuple[float, _Batch] | None:
        """Return when the next batch becomes overdue (`time.perf_counter`), and the batch."""
        queue = self._find_next_queue()
        if queue is None:
            return None
        others = [
            batch for batch in self._batches if not batch.overdue and batch.queue is not queue
        ]
        limit_s = max(_MIN_OVERDUE_S, _OVERDUE_BATCHES * queue.batch_s)
        return min(
            ((batch.started_at + limit_s, batch) for batch in others),
            key=lambda due: due[0],
            default=None,
        )

    def _watch(self) -> None:
        with self.changed:
            while True:
                due = self._find_overdue()
                self._watching = due is not None
                left_s = None if due is None else due[0] - time.perf_counter()
                if due is None or left_s is None or left_s > 0:
                    self.changed.wait(left_s)
                    continue
                due[1].overdue = True
                self._start_batches()


@dataclass(slots=True, eq=False)
class RequestQueue(Generic[T]):
    """Queue of requests for one deployment.

    Args:
        run: runs the items of a batch, on one of the threads. It must not raise.
        limit: maximum number of waiting items, in all queues together.
        max_batch: maximum number of items in one batch.
        max_batches: maximum number of batches at the same time.
    """

    threads: WorkerThreads
    run: Callable[[Sequence[T]], None]
    limit: int
    max_batch: int
    max_batches: int
    row: MetricsRow
    latency: LatencyEstimator
    running_batches: int = 0
    batch_s: float = 0.0
    """Exponentially weighted mean of the duration of this queue's batches in seconds."""
    _items: deque[tuple[int, T]] = field(default_factory=deque)
    _running_items: int = 0
    _batches: int = 0

    def put(self, item: T) -> None:
        """Add an item.

        Raises:
            QueueFullError: `limit` items are waiting (see `WorkerThreads.count_queued`).
        """
        with self.threads.changed:
            queued = self.threads.count_queued(self)
            if queued >= self.limit:
                wait_s = round(queued * self.latency.seconds / self.max_batches)
                raise QueueFullError(
                    "too many requests are queued",
                    retry_after_s=max(1, min(_MAX_RETRY_S, wait_s)),
                )
            self._items.append((self.threads.add_arrival(self), item))
            self._update_gauges()
        self.threads.start_soon()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def oldest(self) -> int:
        """Sequence number of the request that has waited longest."""
        return self._items[0][0]

    def take_batch(self) -> list[T]:
        """Remove and return the items of the next batch."""
        size = self.max_batch if self._batches % _SINGLE_EVERY else 1
        items = [self._items.popleft()[1] for _ in range(min(len(self._items), size))]
        self._batches += 1
        self.running_batches += 1
        self._running_items += len(items)
        self._update_gauges()
        return items

    def finish_batch(self, items: int, seconds: float) -> None:
        """Record the end of a batch."""
        self.running_batches -= 1
        self._running_items -= items
        self.batch_s += (seconds - self.batch_s) * (_WEIGHT if self.batch_s else 1)
        self._update_gauges()

    def _update_gauges(self) -> None:
        self.row[QUEUED], self.row[IN_PROGRESS] = len(self._items), self._running_items
