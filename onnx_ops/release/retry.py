"""How long to wait for what is slow, and how often to try again what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from onnx_ops.errors import LedgerConflictError, OnnxOpsError

COMMAND_TIMEOUT_S = 4.0
"""How long a command waits for endpoints, in seconds. An operator at night needs an answer within ten, in which Python
starts on a busy machine and the command looks at the endpoint."""
MAX_PAUSE_S = 60.0
"""Seconds after which something that failed again and again is tried once more, at the latest."""

_Result = TypeVar("_Result")


class Backoff:
    """How many passes to leave out something that fails: none at first, then 1, 3, 7 … up to a minute's."""

    def __init__(self, every: float) -> None:
        """`every` is the time between two passes in seconds."""
        self._most = max(int(MAX_PAUSE_S / every) - 1, 0)
        self._failures = 0
        self._skip = 0

    def due(self) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        return True

    def failed(self) -> None:
        self._skip = min((1 << self._failures) - 1, self._most)
        self._failures = min(self._failures + 1, 30)

    def succeeded(self) -> None:
        self._failures = self._skip = 0


def run_concurrently(
    calls: Mapping[str, Callable[[], _Result]], patience_s: float, late: Callable[[str], OnnxOpsError]
) -> dict[str, _Result | OnnxOpsError]:
    """What each call returned or raised, all made side by side.

    A call that has not ended in time goes on until this process ends; `late` gives the error that stands for it.

    Raises:
        BaseException: what a call raised that is no error of ours.
    """
    results: dict[str, _Result | BaseException] = {}

    def run(name: str, call: Callable[[], _Result]) -> None:
        try:
            results[name] = call()
        except BaseException as error:  # raised again where it was asked for
            results[name] = error

    threads = [threading.Thread(target=run, args=item, name="patience", daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found: dict[str, _Result | OnnxOpsError] = {}
    for name in calls:
        result = results[name] if name in results else late(name)
        if isinstance(result, BaseException) and not isinstance(result, OnnxOpsError):
            raise result
        found[name] = result
    return found


MAX_CONFLICT_ATTEMPTS = 10
"""Times a decision is made anew because somebody else wrote first. Each of these times somebody else got further."""


def retry_on_conflict(attempt: Callable[[], _Result]) -> _Result:
    """What `attempt` returns, which reads the ledger, decides and writes. Who is overtaken looks and decides again.

    Raises:
        LedgerConflictError: others never let it write.
    """
    for _ in range(MAX_CONFLICT_ATTEMPTS - 1):
        try:
            return attempt()
        except LedgerConflictError:
            continue
    return attempt()
