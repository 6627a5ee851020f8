"""Lanes and the threads that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from onnx_ops.serving.http import Overloaded
from onnx_ops.serving.lanes import Hands, Lane
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.shared import QUEUED, RUNNING, Row, Shared

PATIENCE_S = 20.0


@pytest.fixture
def row() -> Row:
    return Shared(1).row(0, 1)


@dataclass
class Work:
    """Notes who does what, and holds on at the gate."""

    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: list[tuple[list[int], int]] = field(default_factory=list)

    def __call__(self, items: Sequence[int]) -> None:
        self.begun.release()
        assert self.gate.wait(PATIENCE_S)
        self.done.append((list(items), threading.get_ident()))
        self.ended.release()

    @property
    def threads(self) -> set[int]:
        return {thread for _, thread in self.done}


def lane(hands: Hands, work: Work, row: Row, *, limit: int = 8, together: int = 1, threads: int = 1) -> Lane[int]:
    return Lane(hands, work, limit=limit, together=together, threads=threads, row=row, run_time=RunTime())


def idle(hands: Hands) -> Callable[[], bool]:
    """Whether every thread has come back, as far as one lane knows."""
    return lambda: bool(hands._idle)


def until(condition: Callable[[], bool]) -> None:
    woken = threading.Event()
    for _ in range(int(PATIENCE_S / 0.001)):
        if condition():
            return
        woken.wait(0.001)
    raise AssertionError("it never came to that")


def test_two_lanes_in_turn_are_worked_by_one_thread(row: Row) -> None:
    hands, work = Hands(), Work()
    work.gate.set()
    lanes = [lane(hands, work, row) for _ in range(2)]
    for turn in range(20):
        lanes[turn % 2].put(turn)
        assert work.ended.acquire(timeout=PATIENCE_S)
        until(idle(hands))
    assert [items for items, _ in work.done] == [[turn] for turn in range(20)]
    assert len(work.threads) == 1


def test_a_lane_that_hangs_keeps_no_other_waiting(row: Row) -> None:
    hands, stuck, free = Hands(), Work(), Work()
    free.gate.set()
    held, other = lane(hands, stuck, row), lane(hands, free, row)
    held.put(0)
    assert stuck.begun.acquire(timeout=PATIENCE_S)
    held.put(1)
    other.put(2)
    assert free.ended.acquire(timeout=PATIENCE_S)
    assert [items for items, _ in free.done] == [[2]]
    assert stuck.done == []
    stuck.gate.set()
    for _ in range(2):
        assert stuck.ended.acquire(timeout=PATIENCE_S)
    assert [items for items, _ in stuck.done] == [[0], [1]]
    assert free.threads.isdisjoint(stuck.threads)


def test_as_many_threads_work_on_a_lane_as_it_may_have(row: Row) -> None:
    hands, work = Hands(2), Work()
    wide = lane(hands, work, row, threads=2)
    for item in range(3):
        wide.put(item)
    for _ in range(2):
        assert work.begun.acquire(timeout=PATIENCE_S)
    assert not work.begun.acquire(timeout=0.05)
    assert (row[QUEUED], row[RUNNING]) == (1, 2)
    work.gate.set()
    for _ in range(3):
        assert work.ended.acquire(timeout=PATIENCE_S)
    assert sorted(items[0] for items, _ in work.done) == [0, 1, 2]
    until(lambda: (row[QUEUED], row[RUNNING]) == (0, 0))


def test_what_queued_up_is_taken_together_and_a_full_queue_refuses(row: Row) -> None:
    hands, work = Hands(), Work()
    batches = lane(hands, work, row, limit=3, together=2)
    batches.put(0)
    assert work.begun.acquire(timeout=PATIENCE_S)
    for item in (1, 2, 3):
        batches.put(item)
    with pytest.raises(Overloaded):
        batches.put(4)
    work.gate.set()
    for _ in range(3):
        assert work.ended.acquire(timeout=PATIENCE_S)
    assert [items for items, _ in work.done] == [[0], [1, 2], [3]]


def test_whoever_came_first_has_the_next_turn_whatever_the_lane(row: Row) -> None:
    hands, work = Hands(), Work()
    lanes = [lane(hands, work, row) for _ in range(3)]
    lanes[0].put(0)
    assert work.begun.acquire(timeout=PATIENCE_S)
    for item, which in enumerate((1, 0, 0, 2, 1, 0), 1):
        lanes[which].put(item)
    work.gate.set()
    for _ in range(7):
        assert work.ended.acquire(timeout=PATIENCE_S)
    assert [items for items, _ in work.done] == [[item] for item in range(7)]
    assert len(work.threads) == 1


def test_so_many_turns_at_once_in_all_lanes_together(row: Row) -> None:
    hands, work = Hands(2), Work()
    slow = RunTime(1.0)
    lanes = [Lane(hands, work, limit=9, together=1, threads=2, row=row, run_time=slow, turn_s=60.0) for _ in range(3)]
    for each in lanes:
        each.put(0)
    for _ in range(2):
        assert work.begun.acquire(timeout=PATIENCE_S)
    assert not work.begun.acquire(timeout=0.1)
    work.gate.set()
    for _ in range(3):
        assert work.ended.acquire(timeout=PATIENCE_S)


def test_a_lane_that_hangs_keeps_no_place_in_the_queue_of_others(row: Row) -> None:
    hands, stuck, free = Hands(), Work(), Work()
    held, other = lane(hands, stuck, row, limit=2), lane(hands, free, row, limit=2)
    held.put(0)
    assert stuck.begun.acquire(timeout=PATIENCE_S)
    other.put(1)
    assert free.begun.acquire(timeout=PATIENCE_S)
    held.put(2)
    held.put(3)
    with pytest.raises(Overloaded):
        held.put(4)
    other.put(5)
    other.put(6)
    with pytest.raises(Overloaded):
        other.put(7)
    for work in (free, stuck):
        work.gate.set()
    for work, number in ((free, 3), (stuck, 3)):
        for _ in range(number):
            assert work.ended.acquire(timeout=PATIENCE_S)


def test_lanes_that_wait_for_each_other_share_one_queue(row: Row) -> None:
    hands, work = Hands(), Work()
    lanes = [
        Lane(hands, work, limit=3, together=1, threads=1, row=row, run_time=RunTime(), turn_s=60.0) for _ in range(2)
    ]
    lanes[0].put(0)
    assert work.begun.acquire(timeout=PATIENCE_S)
    for item in (1, 2, 3):
        lanes[item % 2].put(item)
    for each in lanes:
        with pytest.raises(Overloaded):
            each.put(4)
    work.gate.set()
    for _ in range(4):
        assert work.ended.acquire(timeout=PATIENCE_S)


def test_now_and_then_one_request_is_run_alone_whatever_the_load(row: Row) -> None:
    hands, work = Hands(), Work()
    batches = lane(hands, work, row, limit=100, together=4)
    for item in range(70):
        batches.put(item)
    work.gate.set()
    until(lambda: sum(len(items) for items, _ in work.done) == 70)
    sizes = [len(items) for items, _ in work.done]
    assert sizes[:17] == [1, *[4] * 15, 1]
    assert [item for items, _ in work.done for item in items] == list(range(70))
