"""Repetition of operations that failed or are not yet complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from onnx_ops.errors import OnnxOpsError

T = TypeVar("T")


def retry(call: Callable[[], T], is_transient: Callable[[Exception], bool], attempts: int) -> T:
    """Return what a call returns, repeating it after transient errors.

    The call is made at most `attempts` times; the last error is raised.
    """
    for _ in range(attempts - 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
    return call()


def attempts(
    timeout_s: float, pause_s: float, *, longest_s: float = 0.0, at_least: int = 1
) -> Iterator[int]:
    """Yield the number of each attempt, from 0, within a time limit; pause after each.

    Each pause is 1.5 times the previous pause, up to `longest_s` (0: all pauses are `pause_s`). The
    first `at_least` attempts are made even if the time limit has passed.
    """
    deadline, count = time.monotonic() + timeout_s, 0
    while count < at_least or time.monotonic() < deadline:
        yield count
        count += 1
        time.sleep(pause_s)
        pause_s = max(pause_s, min(pause_s * 1.5, longest_s))


def wait_until(is_done: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Wait until a condition is true; return False if it is not within `timeout_s`."""
    # The condition can become true during the last pause, so it is checked once more.
    return any(is_done() for _ in attempts(timeout_s, pause_s)) or is_done()


def converge(
    step: Callable[[], T | None],
    tries: Iterable[object],
    timeout: Callable[[], OnnxOpsError],
    *,
    retried: tuple[type[OnnxOpsError], ...] = (),
) -> T:
    """Repeat a step until it returns a result.

    A step observes a service, compares it with the desired state, and makes the next call. `tries`
    yields the attempts and pauses between them, as `attempts` does. The step is repeated after the
    errors in `retried`. After the last attempt, the last of these errors is raised; without one,
    the error that `timeout` builds is raised.
    """
    last: OnnxOpsError | None = None
    for _ in tries:
        try:
            result = step()
        except retried as error:
            last = error
        else:
            if result is not None:
                return result
    raise last or timeout()
