"""Retries: after a lost race for the ledger, with growing pauses, and within the time that a command may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from onnx_ops.errors import LedgerConflictError, OnnxOpsError

MAX_CONFLICT_ATTEMPTS = 10
"""Attempts to append after losing to another writer. Each loss means that the other writer made progress."""
COMMAND_TIMEOUT_S = 4.0
"""Seconds that a command waits for endpoints. An operator needs an answer within ten, start of Python included."""
MAX_PAUSE_S = 60.0
"""Longest pause between two attempts, in seconds."""

_Result = TypeVar("_Result")


def retry_on_conflict(attempt: Callable[[], _Result]) -> _Result:
    """Call `attempt`, which reads the ledger, decides and appends; repeat it if another writer was first.

    Raises:
        LedgerConflictError: other writers were first each time.
    """
    for _ in range(MAX_CONFLICT_ATTEMPTS - 1):
        try:
            return attempt()
        except LedgerConflictError:
            continue
    return attempt()


class Backoff:
    """Skip passes over something that fails: none at first, then 1, 3, 7 … up to `MAX_PAUSE_S`.

    Args:
        interval_s: seconds between two passes.
    """

    def __init__(self, interval_s: float) -> None:
        self._most = max(int(MAX_PAUSE_S / interval_s) - 1, 0)
        self._failures = 0
        self._skip = 0

    def is_due(self) -> bool:
        """Return whether to try in this pass. Call it once a pass."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def record(self, *, failed: bool) -> None:
        """Record the result of a try."""
        self._skip = min((1 << self._failures) - 1, self._most) if failed else 0
        self._failures = min(self._failures + 1, 30) if failed else 0


def run_concurrently(
    calls: Mapping[str, Callable[[], _Result]], timeout_s: float, on_timeout: Callable[[str], OnnxOpsError]
) -> dict[str, _Result | OnnxOpsError]:
    """Return what each call returned or raised, each run in a thread of its own.

    A call that has not ended in time continues until this process ends; `on_timeout` gives the error in its place.

    Raises:
        BaseException: what a call raised that is no `OnnxOpsError`.
    """
    results: dict[str, _Result | BaseException] = {}

    def run(name: str, call: Callable[[], _Result]) -> None:
        try:
            results[name] = call()
        except BaseException as error:  # raised again in the caller's thread
            results[name] = error

    threads = [threading.Thread(target=run, args=item, name="release-call", daemon=True) for item in calls.items()]
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
