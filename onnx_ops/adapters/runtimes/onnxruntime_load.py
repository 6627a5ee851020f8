"""Load: requests that several threads send to one session without pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from threading import Barrier

from onnx_ops.errors import MeasurementError


def window(call: Callable[[], object], pool: Executor, concurrency: int, requests: int) -> int:
    """Answer `requests` requests, `concurrency` of them at any moment.

    Args:
        call: answers one request; called from several threads at once.
        pool: has a free thread for each of `concurrency` calls.
        concurrency: threads; at least 1.
        requests: those of the window, shared out among the threads as they become free.

    Returns:
        Nanoseconds from the moment that all threads stand ready to the last answer.

    Raises:
        MeasurementError: the threads could not be started.
        Exception: what `call` raised first; the other threads end with the request they are at.
    """
    waiting = deque(range(requests))
    clock = time.perf_counter_ns
    begun: list[int] = []
    ready = Barrier(concurrency, action=lambda: begun.append(clock()))

    def work() -> int:
        ready.wait()
        try:
            while waiting:
                try:
                    waiting.pop()
                except IndexError:  # another thread took the last one
                    break
                call()
        except BaseException:
            waiting.clear()
            raise
        return clock()

    try:
        workers = [pool.submit(work) for _ in range(concurrency)]
    except RuntimeError as error:
        ready.abort()
        raise MeasurementError(
            f"{concurrency} threads could not be started",
            why=str(error),
            remedy="Lower `concurrency`, or raise the limit of threads on this machine.",
        ) from error
    return max(worker.result() for worker in workers) - begun[0]
