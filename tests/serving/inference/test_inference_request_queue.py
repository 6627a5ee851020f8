"""Queues of requests, their threads, and the latency estimate.

The estimate keeps fast models on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from onnx_ops.domain.execution import INLINE_S
from onnx_ops.serving.inference.request_queue import LatencyEstimator, RequestQueue, WorkerThreads
from onnx_ops.serving.inference.responses import QueueFullError
from onnx_ops.serving.metrics import IN_PROGRESS, QUEUED, MetricsRow, SharedMetrics
from tests.serving.serving_process import wait_until

TIMEOUT_S = 20.0


@pytest.fixture
def row() -> MetricsRow:
    return SharedMetrics(1).get_row(0, 1)


@dataclass
class Work:
    """A run function that records its batches, and waits at the gate."""

    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: list[tuple[list[int], int]] = field(default_factory=list)

    def __call__(self, items: Sequence[int]) -> None:
        self.begun.release()
        assert self.gate.wait(TIMEOUT_S)
        self.done.append((list(items), threading.get_ident()))
        self.ended.release()

    @property
    def threads(self) -> set[int]:
        return {thread for _, thread in self.done}

    @property
    def items(self) -> list[list[int]]:
        """Return the items of each finished batch."""
        return [items for items, _ in self.done]

    def wait(self, which: threading.Semaphore, count: int = 1) -> None:
        """Wait until that many more batches have begun, or ended."""
        for _ in range(count):
            assert which.acquire(timeout=TIMEOUT_S)


def build_queue(
    threads: WorkerThreads,
    work: Work,
    row: MetricsRow,
    *,
    run_s: float = 0.0,
    batch_s: float = 0.0,
    **limits: int,
) -> RequestQueue[int]:
    given: dict[str, Any] = {"limit": 8, "max_batch": 1, "max_batches": 1, **limits}
    return RequestQueue(
        threads, work, row=row, latency=LatencyEstimator(run_s), batch_s=batch_s, **given
    )


def test_worker_threads_with_two_alternating_queues_use_one_thread(row: MetricsRow) -> None:
    threads, work = WorkerThreads(), Work()
    work.gate.set()
    queues = [build_queue(threads, work, row) for _ in range(2)]
    for turn in range(20):
        queues[turn % 2].put(turn)
        work.wait(work.ended)
        wait_until(lambda: threads._idle)
    assert work.items == [[turn] for turn in range(20)]
    assert len(work.threads) == 1


def test_worker_threads_with_hanging_queue_run_other_queue(row: MetricsRow) -> None:
    threads, stuck, free = WorkerThreads(), Work(), Work()
    free.gate.set()
    held, other = build_queue(threads, stuck, row), build_queue(threads, free, row)
    held.put(0)
    stuck.wait(stuck.begun)
    held.put(1)
    other.put(2)
    free.wait(free.ended)
    assert free.items == [[2]]
    assert stuck.done == []
    stuck.gate.set()
    stuck.wait(stuck.ended, 2)
    assert stuck.items == [[0], [1]]
    assert free.threads.isdisjoint(stuck.threads)


def test_request_queue_batches_requests_of_one_event_loop_turn(row: MetricsRow) -> None:
    deferred: list[Callable[[], None]] = []
    threads, work = WorkerThreads(defer=deferred.append), Work()
    work.gate.set()
    queue = build_queue(threads, work, row, max_batch=4)
    # The first batch of a queue contains one request.
    for turn in ([0], [1, 2, 3]):
        for item in turn:
            queue.put(item)
        assert not work.begun.acquire(timeout=0.05)
        (start,) = deferred
        deferred.clear()
        start()
        work.wait(work.begun)
        work.wait(work.ended)
    assert work.items == [[0], [1, 2, 3]]


def test_request_queue_runs_at_most_max_batches_concurrently(row: MetricsRow) -> None:
    threads, work = WorkerThreads(2), Work()
    wide = build_queue(threads, work, row, max_batches=2)
    for item in range(3):
        wide.put(item)
    work.wait(work.begun, 2)
    assert not work.begun.acquire(timeout=0.05)
    assert (row[QUEUED], row[IN_PROGRESS]) == (1, 2)
    work.gate.set()
    work.wait(work.ended, 3)
    assert sorted(work.items) == [[0], [1], [2]]
    wait_until(lambda: (row[QUEUED], row[IN_PROGRESS]) == (0, 0))


def test_request_queue_batches_items_and_rejects_when_full(row: MetricsRow) -> None:
    threads, work = WorkerThreads(), Work()
    batches = build_queue(threads, work, row, limit=3, max_batch=2)
    batches.put(0)
    work.wait(work.begun)
    for item in (1, 2, 3):
        batches.put(item)
    with pytest.raises(QueueFullError):
        batches.put(4)
    work.gate.set()
    work.wait(work.ended, 3)
    assert work.items == [[0], [1, 2], [3]]


def test_worker_threads_run_requests_in_order_of_arrival(row: MetricsRow) -> None:
    threads, work = WorkerThreads(), Work()
    queues = [build_queue(threads, work, row) for _ in range(3)]
    queues[0].put(0)
    work.wait(work.begun)
    for item, which in enumerate((1, 0, 0, 2, 1, 0), 1):
        queues[which].put(item)
    work.gate.set()
    work.wait(work.ended, 7)
    assert work.items == [[item] for item in range(7)]
    assert len(work.threads) == 1


def test_worker_threads_limit_applies_to_all_queues_together(row: MetricsRow) -> None:
    threads, work = WorkerThreads(2), Work()
    queues = [
        build_queue(threads, work, row, max_batches=2, run_s=1.0, batch_s=60.0) for _ in range(3)
    ]
    for each in queues:
        each.put(0)
    work.wait(work.begun, 2)
    assert not work.begun.acquire(timeout=0.1)
    work.gate.set()
    work.wait(work.ended, 3)


def test_request_queue_limit_ignores_hanging_queues(row: MetricsRow) -> None:
    threads, stuck, free = WorkerThreads(), Work(), Work()
    held, other = (
        build_queue(threads, stuck, row, limit=2),
        build_queue(threads, free, row, limit=2),
    )
    held.put(0)
    stuck.wait(stuck.begun)
    other.put(1)
    free.wait(free.begun)
    held.put(2)
    held.put(3)
    with pytest.raises(QueueFullError):
        held.put(4)
    other.put(5)
    other.put(6)
    with pytest.raises(QueueFullError):
        other.put(7)
    for work in (free, stuck):
        work.gate.set()
    for work, number in ((free, 3), (stuck, 3)):
        work.wait(work.ended, number)


def test_request_queue_limit_is_shared_by_waiting_queues(row: MetricsRow) -> None:
    threads, work = WorkerThreads(), Work()
    queues = [build_queue(threads, work, row, limit=3, batch_s=60.0) for _ in range(2)]
    queues[0].put(0)
    work.wait(work.begun)
    for item in (1, 2, 3):
        queues[item % 2].put(item)
    for each in queues:
        with pytest.raises(QueueFullError):
            each.put(4)
    work.gate.set()
    work.wait(work.ended, 4)


def test_request_queue_under_load_runs_single_request_after_15_full_batches(
    row: MetricsRow,
) -> None:
    threads, work = WorkerThreads(), Work()
    batches = build_queue(threads, work, row, limit=100, max_batch=4)
    for item in range(70):
        batches.put(item)
    work.gate.set()
    wait_until(lambda: sum(map(len, work.items)) == 70)
    sizes = [len(items) for items in work.items]
    assert sizes[:17] == [1, *[4] * 15, 1]
    assert [item for items in work.items for item in items] == list(range(70))


def test_latency_estimator_is_fast_until_repeated_or_very_slow_runs() -> None:
    latency = LatencyEstimator(20e-6)
    # The first slow run is an exception, as if the system had preempted the process once.
    for seconds, runs, is_fast in (
        (5e-3, 1, True),
        (5e-3, 3, False),
        (20e-6, 30, True),
        (10.0, 1, False),
    ):
        for _ in range(runs):
            latency.observe(seconds)
        assert latency.is_fast is is_fast


@pytest.mark.parametrize("seconds", [INLINE_S * 1.02, INLINE_S * 1.2])
def test_latency_estimator_between_limits_keeps_its_state(seconds: float) -> None:
    came_from = {True: LatencyEstimator(INLINE_S / 2), False: LatencyEstimator(INLINE_S * 2)}
    for fast, latency in came_from.items():
        for _ in range(100):
            latency.observe(seconds)
            assert latency.is_fast is fast


def test_latency_estimator_after_one_slow_run_stays_fast() -> None:
    latency = LatencyEstimator(0.8 * INLINE_S)
    latency.observe(50e-3)
    assert latency.is_fast


@pytest.mark.parametrize(
    ("leader", "own", "at_once"),
    [(0.9, 1.1, True), (0.9, 3.9, True), (0.9, 4.1, False), (1.1, 0.9, False)],
)
def test_should_run_inline_follows_leader_unless_far_slower(
    leader: float, own: float, at_once: bool
) -> None:
    assert (
        LatencyEstimator(own * INLINE_S).should_run_inline(LatencyEstimator(leader * INLINE_S))
        is at_once
    )


def test_should_run_inline_after_slow_runs_returns_false() -> None:
    leader, own = LatencyEstimator(0.9 * INLINE_S), LatencyEstimator(0.9 * INLINE_S)
    for _ in range(6):
        own.observe(90e-3)
    assert not own.should_run_inline(leader)


def test_should_run_inline_of_leader_depends_only_on_its_own_latency() -> None:
    leader = LatencyEstimator(0.9 * INLINE_S)
    assert leader.should_run_inline(leader)
    leader.observe(1.0)
    assert not leader.should_run_inline(leader)


@pytest.mark.parametrize("limit", [1, 4, 256])
def test_worker_threads_while_isolating_never_mix_batches_of_two_queues(
    row: MetricsRow, limit: int
) -> None:
    threads = WorkerThreads(limit)
    threads.is_isolating = True
    running: set[str] = set()
    together: list[set[str]] = []
    done = threading.Semaphore(0)
    guard = threading.Lock()

    def run_as(name: str) -> Callable[[Sequence[int]], None]:
        def run(_items: Sequence[int]) -> None:
            with guard:
                running.add(name)
                together.append(set(running))
            with guard:
                running.discard(name)
            done.release()

        return run

    # The mean duration of a batch is long, so that none becomes overdue on a busy machine.
    queues = [
        RequestQueue(
            threads, run_as(name), 600, 1, limit, row, LatencyEstimator(), batch_s=TIMEOUT_S
        )
        for name in ("a", "b")
    ]
    for item in range(400):
        queues[item % 3 == 0].put(item)
    for _ in range(400):
        assert done.acquire(timeout=TIMEOUT_S)
    assert {"a", "b"} not in together
    assert len(together) == 400


def test_worker_threads_while_isolating_start_all_waiting_batches_of_next_queue(
    row: MetricsRow,
) -> None:
    threads = WorkerThreads(4)
    threads.is_isolating = True
    first, second = Work(), Work()
    held = build_queue(threads, first, row, batch_s=TIMEOUT_S, max_batches=4)
    other = build_queue(threads, second, row, batch_s=TIMEOUT_S, max_batches=4)
    held.put(0)
    first.wait(first.begun)
    for item in (1, 2, 3):
        other.put(item)
    assert not second.begun.acquire(timeout=0.05)
    first.gate.set()
    # All three batches of the next queue begin, though only one thread has become free.
    second.wait(second.begun, 3)
    second.gate.set()
    second.wait(second.ended, 3)
    assert len(second.threads) == 3
