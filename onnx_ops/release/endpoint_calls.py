"""Call functions for several endpoints, and pause after failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from onnx_ops.errors import OnnxOpsError

COMMAND_TIMEOUT_S = 4.0
"""Time limit of a command for the responses of endpoints, in seconds.

A command must end within 10 s, including the start of Python.
"""
MAX_PAUSE_S = 60.0
"""Maximum pause between two attempts, in seconds."""

_Result = TypeVar("_Result")


class Backoff:
    """Pauses between the attempts of a failing operation, counted in skipped passes.

    After the first failure, no pass is skipped. After further successive failures, 1, 3, 7 … passes
    are skipped. A pause lasts at most `MAX_PAUSE_S`, or one interval if that is longer.

    Args:
        interval_s: seconds between two passes.
    """

    def __init__(self, interval_s: float) -> None:
        self._most = max(int(MAX_PAUSE_S / interval_s) - 1, 0)
        self._failures = 0
        self._skip = 0

    def is_due(self) -> bool:
        """Count a pass, and return whether to try in this pass."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def record(self, *, failed: bool) -> None:
        """Record the result of an attempt."""
        self._skip = min((1 << self._failures) - 1, self._most) if failed else 0
        self._failures = min(self._failures + 1, 30) if failed else 0


def call_each(
    names: Iterable[str], call: Callable[[str], _Result]
) -> tuple[dict[str, _Result], dict[str, OnnxOpsError]]:
    """Call a function with each name, and return results and errors by name.

    If a call raises an OnnxOpsError, the other calls are still made.
    """
    results: dict[str, _Result] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in names:
        try:
            results[name] = call(name)
        except OnnxOpsError as error:
            errors[name] = error
    return results, errors


def run_concurrently(
    calls: Mapping[str, Callable[[], _Result]],
    timeout_s: float,
    on_timeout: Callable[[str], OnnxOpsError],
) -> dict[str, _Result | OnnxOpsError]:
    """Run each call in a separate thread; return its result or error by name.

    The time limit begins once for all calls. A call that exceeds it continues in its thread, and
    `on_timeout` returns the error that is reported for the call.

    Raises:
        BaseException: a call raised an exception other than `OnnxOpsError`.
    """
    results: dict[str, _Result | BaseException] = {}

    def run(name: str, call: Callable[[], _Result]) -> None:
        try:
            results[name] = call()
        except BaseException as error:
            # `run_concurrently` returns each OnnxOpsError, and raises all other errors.
            results[name] = error

    threads = [
        threading.Thread(target=run, args=item, name="release-call", daemon=True)
        for item in calls.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    completed: dict[str, _Result | OnnxOpsError] = {}
    for name in calls:
        result = results[name] if name in results else on_timeout(name)
        if isinstance(result, BaseException) and not isinstance(result, OnnxOpsError):
            raise result
        completed[name] = result
    return completed
