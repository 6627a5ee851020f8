"""How often to try again what fails."""

from __future__ import annotations

LONGEST_PAUSE = 60.0
"""Seconds after which something that failed again and again is tried once more, at the latest."""


class Patience:
    """How many passes to leave out something that fails: none at first, then 1, 3, 7 … up to a minute's."""

    def __init__(self, every: float) -> None:
        """`every` is the time between two passes in seconds."""
        self._most = max(int(LONGEST_PAUSE / every) - 1, 0)
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
