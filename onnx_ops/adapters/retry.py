"""Repetition of what fails or is not done yet: retry, converge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from onnx_ops.errors import OnnxOpsError

T = TypeVar("T")


def retry(call: Callable[[], T], is_transient: Callable[[Exception], bool], attempts: int) -> T:
    """Return what a call returns, repeating it after transient errors."""
    for _ in range(attempts - 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
    return call()


def attempts(timeout_s: float, pause_s: float, *, longest_s: float = 0.0, at_least: int = 1) -> Iterator[int]:
    """Count attempts, pausing between them, until the time is over.

    Args:
        timeout_s: time after which no further attempt starts.
        pause_s: pause after the first attempt.
        longest_s: limit up to which pauses grow by half each time; 0: they do not grow.
        at_least: minimum number of attempts, even if the time is over.
    """
    deadline, count = time.monotonic() + timeout_s, 0
    while count < at_least or time.monotonic() < deadline:
        yield count
        count += 1
        time.sleep(pause_s)
        pause_s = max(pause_s, min(pause_s * 1.5, longest_s))


def converge(
    step: Callable[[], T | None],
    tries: Iterable[object],
    timeout: Callable[[], OnnxOpsError],
    *,
    retried: tuple[type[OnnxOpsError], ...] = (),
) -> T:
    """Repeat a step until it returns something: observe, diff, make one call.

    Args:
        step: returns None as long as the goal is not reached.
        tries: how often, and with which pauses, as by `attempts`.
        timeout: makes the error that is raised when no attempt is left and none has failed.
        retried: errors after which the step is repeated; the last one is raised when no attempt is left.
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
