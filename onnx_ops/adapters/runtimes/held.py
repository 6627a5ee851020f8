"""A process that is kept from one request to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx_ops.adapters.isolation.process import Process


@dataclass(slots=True)
class Held:
    """At most one process: a second would take the machine's cores from the first."""

    _kept: tuple[str, Process] | None = None

    def get(self, key: str, start: Callable[[], Process]) -> Process:
        """The one that was started under the key, if it lives; else a new one, after the old one has ended."""
        if self._kept is not None:
            kept, process = self._kept
            if kept == key and process.alive:
                return process
            self.stop()
        process = start()
        self._kept = key, process
        return process

    def stop(self) -> None:
        """End it."""
        if self._kept is not None:
            self._kept[1].stop()
            self._kept = None
