"""Threads that do work side by side, as many as are asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Crew(Generic[R]):
    """At most `jobs` pieces of work at once, begun in the order in which they are given.

    Its threads hold nobody up: whoever is interrupted leaves at once, and what they had begun ends with the process.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"a crew of {jobs} does no work")
        self._jobs = jobs
        self._given: SimpleQueue[tuple[Future[R], Callable[[], R]] | None] = SimpleQueue()

    def __enter__(self) -> Crew[R]:
        for _ in range(self._jobs):
            threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self._jobs):
            self._given.put(None)

    def give(self, work: Callable[[], R]) -> Future[R]:
        future: Future[R] = Future()
        self._given.put((future, work))
        return future

    def _work(self) -> None:
        while (task := self._given.get()) is not None:
            future, work = task
            try:
                result: Any = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, work  # or the last result would be kept while this thread waits


def in_order(jobs: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`work` of every item, in the order of the items; at most `jobs` at once. What was taken is not kept."""
    with Crew[R](jobs) as crew:
        given = deque(crew.give(partial(work, item)) for item in items)
        while given:
            yield given.popleft().result()
