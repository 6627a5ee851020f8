"""Lanes and the threads that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from onnx_ops.serving.http import Overloaded
from onnx_ops.serving.lanes import Hands, Lane, RunTime
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
    hands, work = Hands(), Work()
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
    until(lambda: not wide.busy)
    assert (row[QUEUED], row[RUNNING]) == (0, 0)


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
