"""Where a deployment's requests wait for their turn, and the threads that run them.

A lane waits for nothing: a thread takes what queued up while it was busy and runs it at once, together if the model's
rows are independent of each other, else one by one. Under little load no request is delayed; under much load batches
grow by themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from onnx_ops.serving.http import Overloaded
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.shared import QUEUED, RUNNING, Row

T = TypeVar("T")

MOST_TOGETHER = 64
"""Requests that are run as one batch at most."""
_ALONE_EVERY = 16
"""Every so many turns of a lane take one request alone: how long a version needs is told by such requests, and under
much load there might be none."""
_LONGEST_RETRY_S = 60
_PATIENCE_S = 20e-3
_PATIENCE_TURNS = 4
_WEIGHT = 1 / 8


@dataclass(slots=True, eq=False)
class _Turn:
    """One go of a thread at a lane. Nobody waits for the end of one that is `overdue`."""

    lane: Lane[Any]
    items: Sequence[Any]
    since: float
    overdue: bool = False


class Hands:
    """Threads that run the models of a worker, so many at once, whatever their lanes.

    Whoever came first has the next turn, in whichever lane. Were there a turn for each lane, the version with most of
    the traffic would have most of the waiting, and the other one would hardly ever run without it beside: a rollout
    would hold either against a version that is the same.

    A turn that takes far longer than those of the lane that waits for it is overdue: another one begins beside it, so
    that a model that hangs holds no other up.

    Who was idle last works next. Two lanes with threads of their own are not alike: the system leaves a thread on the
    processor where it is, and the same model was seen 45 % slower in one of them for a hundred requests.

    Args:
        at_once: turns at the same time, not counting those that are overdue.
    """

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = at_once
        self.changed = threading.Condition(threading.Lock())
        """Guards everything here and in the lanes."""
        self._idle: list[_Hand] = []
        self._turns: list[_Turn] = []
        self._waiting: list[Lane[Any]] = []
        self._arrivals = 0
        self._watcher: threading.Thread | None = None
        self._watching = False

    def arrival(self, lane: Lane[Any]) -> int:
        """The number of a request that comes into `lane`. Needs the lock, as all but `after`."""
        if lane not in self._waiting:
            self._waiting.append(lane)
        self._arrivals += 1
        return self._arrivals

    def begin(self) -> None:
        """Give a turn to whoever is next, if one is free."""
        if (turn := self._next()) is not None:
            hand = self._idle.pop() if self._idle else _Hand(self)
            hand.take(turn)
        elif not self._watching and self._due() is not None:
            self._watching = True
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="overdue", daemon=True)
                self._watcher.start()
            self.changed.notify()

    def queued(self, lane: Lane[Any]) -> int:
        """How many requests wait for a turn that `lane` might have. What waits for a model that hangs does not count,
        but in its own lane."""
        hanging = {turn.lane for turn in self._turns if turn.overdue} - {lane}
        return sum(other.queued for other in self._waiting if other not in hanging)

    def after(self, turn: _Turn, hand: _Hand) -> _Turn | None:
        """The turn that `hand` has next; None if it is idle from now on."""
        with self.changed:
            self._turns.remove(turn)
            turn.lane.ended(len(turn.items), time.perf_counter() - turn.since)
            following = self._next()
            if following is None:
                self._idle.append(hand)
            return following

    def _next(self) -> _Turn | None:
        lane = self._first()
        if lane is None or sum(not turn.overdue for turn in self._turns) >= self.at_once:
            return None
        turn = _Turn(lane, lane.taken(), time.perf_counter())
        if not lane.queued:
            self._waiting.remove(lane)
        self._turns.append(turn)
        return turn

    def _first(self) -> Lane[Any] | None:
        """The lane whose oldest request came first, of those that may have another turn."""
        ready = [lane for lane in self._waiting if lane.at_work < lane.threads]
        return min(ready, key=lambda lane: lane.oldest, default=None)

    def _due(self) -> tuple[float, _Turn] | None:
        """When the oldest turn that holds another lane up is overdue, by `time.perf_counter`."""
        lane = self._first()
        if lane is None:
            return None
        others = [turn for turn in self._turns if not turn.overdue and turn.lane is not lane]
        patience_s = max(_PATIENCE_S, _PATIENCE_TURNS * lane.turn_s)
        return min(((turn.since + patience_s, turn) for turn in others), key=lambda due: due[0], default=None)

    def _watch(self) -> None:
        with self.changed:
            while True:
                due = self._due()
                self._watching = due is not None
                left_s = None if due is None else due[0] - time.perf_counter()
                if due is None or left_s is None or left_s > 0:
                    self.changed.wait(left_s)
                    continue
                due[1].overdue = True
                self.begin()


class _Hand:
    """A thread that does what it is given, and then whatever is next."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._turn: _Turn | None = None
        self._given = threading.Lock()
        self._given.acquire()
        threading.Thread(target=self._loop, name="run", daemon=True).start()

    def take(self, turn: _Turn) -> None:
        self._turn = turn
        self._given.release()

    def _loop(self) -> None:
        while True:
            self._given.acquire()
            turn, self._turn = self._turn, None
            while turn is not None:
                turn.lane.work(turn.items)
                turn = self._hands.after(turn, self)


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """A queue of requests for one deployment.

    Args:
        hands: the worker's threads.
        work: gets what queued up, at most `together` items, on one of the threads. It must not raise.
        limit: how many items may wait in all lanes that wait for each other.
        together: how many items a turn takes at most.
        threads: how many turns it may have at the same time.
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
    at_work: int = 0
    """Turns that it has now."""
    turn_s: float = 0.0
    """Exponentially weighted mean of what its turns took, in seconds."""
    _items: deque[tuple[int, T]] = field(default_factory=deque)
    _running: int = 0
    _turns: int = 0

    def put(self, item: T) -> None:
        """Raises Overloaded if the queue is full."""
        with self.hands.changed:
            waiting = self.hands.queued(self)
            if waiting >= self.limit:
                raise Overloaded(
                    "too many requests are waiting for this model", retry_after_s=self._retry_after_s(waiting)
                )
            self._items.append((self.hands.arrival(self), item))
            self.hands.begin()
            self._gauges()

    @property
    def queued(self) -> int:
        return len(self._items)

    @property
    def oldest(self) -> int:
        """Number of the request that waits longest."""
        return self._items[0][0]

    def taken(self) -> list[T]:
        """What the turn that begins now is about."""
        together = self.together if self._turns % _ALONE_EVERY else 1
        found = [self._items.popleft()[1] for _ in range(min(len(self._items), together))]
        self._turns += 1
        self.at_work += 1
        self._running += len(found)
        self._gauges()
        return found

    def ended(self, items: int, seconds: float) -> None:
        """A turn about so many items is over."""
        self.at_work -= 1
        self._running -= items
        self.turn_s += (seconds - self.turn_s) * (_WEIGHT if self.turn_s else 1)
        self._gauges()

    def _retry_after_s(self, waiting: int) -> int:
        wait_s = waiting * self.run_time.seconds / self.threads
        return max(1, min(_LONGEST_RETRY_S, round(wait_s)))

    def _gauges(self) -> None:
        self.row[QUEUED], self.row[RUNNING] = len(self._items), self._running
