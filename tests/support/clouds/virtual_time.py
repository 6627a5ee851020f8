"""Time that passes only while a caller waits.

It is for clouds whose updates take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from onnx_ops.testing.fakes import FakeClock

TICK_S = 1.0
"""Longest step of the time: after each step, the listeners are called."""


class VirtualTime(FakeClock):
    """A clock that `time.sleep` advances while it is patched.

    `listeners` are called after each step of a wait, one after the other. They stand for the
    clients and machines that work at the same time. Only one thread may wait at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[], None]] = []
        self._is_calling = False

    def sleep(self, seconds: float) -> None:
        end = self.now() + max(0.0, seconds)
        while self.now() < end:
            self.advance(min(TICK_S, end - self.now()))
            self.call_listeners()

    def call_listeners(self) -> None:
        """Call the listeners, unless one of them is waiting itself."""
        if self._is_calling:
            return
        self._is_calling = True
        try:
            for listener in self.listeners:
                listener()
        finally:
            self._is_calling = False

    def monotonic(self) -> float:
        return self.now()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the clocks and waits of this process by this clock."""
        with ExitStack() as stack:
            for name in ("time", "monotonic"):
                stack.enter_context(patch.object(time, name, self.now))
            stack.enter_context(patch.object(time, "sleep", self.sleep))
            yield
