"""What a process says before it ends: kept to its last part, however much it is."""

from __future__ import annotations

import signal
import threading
from typing import IO

KEPT_BYTES = 1 << 16
LAST_LINES = 30
_LONGEST_LINE = 400
_CHUNK = 1 << 16


class Tail:
    """Reads a stream to its end in a thread of its own and keeps its last 64 KiB."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.total = 0
        self._kept = b""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, args=(stream,), daemon=True)
        self._thread.start()

    def text(self, patience: float = 2.0) -> str:
        """Its last lines. A process that has ended may have left something to read."""
        self._thread.join(patience)
        with self._lock:
            return last_lines(self._kept)

    def _drain(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := stream.read1(_CHUNK):  # type: ignore[attr-defined]
                with self._lock:
                    self.total += len(chunk)
                    self._kept = (self._kept + chunk)[-KEPT_BYTES:]


def last_lines(output: bytes) -> str:
    """The last lines of an output, each cut where it is too long for a person."""
    lines = output[-KEPT_BYTES:].decode("utf-8", errors="replace").splitlines()
    return "\n".join(line[:_LONGEST_LINE] for line in lines[-LAST_LINES:])


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
