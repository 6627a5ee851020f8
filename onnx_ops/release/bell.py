"""Wakes a loop that waits: for some models, or to end it."""

from __future__ import annotations

import queue
import threading

_MOST = 1000
"""Models that can be waiting to be looked at; a bell rung for more is answered by the next pass over everything."""


class Bell:
    """`wake` may be called in any thread, `stop` also in a signal handler: a SimpleQueue can be put to within a put."""

    def __init__(self) -> None:
        self._rung: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._models: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def wake(self, model: str) -> None:
        """Have the endpoints of a model looked at soon; ringing again before that changes nothing."""
        with self._lock:
            if model in self._models or len(self._models) >= _MOST:
                return
            self._models.add(model)
        self._rung.put(True)

    def stop(self) -> None:
        """End the loop before its next effect."""
        self._stopped = True
        self._rung.put(True)

    def stopped(self) -> bool:
        return self._stopped

    def wait(self, seconds: float) -> frozenset[str]:
        """Wait until the bell is rung, at most for some seconds; the models that it was rung for."""
        try:
            self._rung.get(timeout=max(seconds, 0.0))
            while True:
                self._rung.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            models, self._models = frozenset(self._models), set()
        return models
