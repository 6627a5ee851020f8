"""What a process says before it ends: kept to its last part, however much it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

KEPT_BYTES = 1 << 16
LAST_LINES = 30
_LONGEST_LINE = 400
_CHUNK = 1 << 16
_MUCH = 1_000_000


@dataclass(frozen=True)
class Marked:
    """Lines that begin with `mark` go to `tell`, without it, as they come; they are not kept."""

    mark: bytes
    tell: Callable[[str], None]


class Tail:
    """Reads a stream to its end in a thread of its own and keeps its last 64 KiB."""

    def __init__(self, stream: IO[bytes], marked: Marked | None = None) -> None:
        self.total = 0
        self._kept = b""
        self._marked = marked
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._drain, args=(stream,), daemon=True)
        self._thread.start()

    def text(self, patience: float = 2.0) -> str:
        """Its last lines. A process that has ended may have left something to read."""
        self._thread.join(patience)
        with self._lock:
            return last_lines(self._kept)

    def summary(self) -> str:
        """Its last lines, and how much there was if it was much."""
        said = self.text()
        return f"{said}\n({self.total / 1e6:.0f} MB of output in all)" if self.total > _MUCH else said

    def _drain(self, stream: IO[bytes]) -> None:
        rest = b""
        with stream:
            while chunk := stream.read1(_CHUNK):  # type: ignore[attr-defined]
                if self._marked is None:
                    self._keep(chunk)
                    continue
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._hear(line + b"\n", self._marked)
                if len(rest) > KEPT_BYTES:  # a line without an end is none of ours
                    self._keep(rest)
                    rest = b""
        self._keep(rest)

    def _hear(self, line: bytes, marked: Marked) -> None:
        if line.startswith(marked.mark):
            marked.tell(line.removeprefix(marked.mark).decode("utf-8", errors="replace").rstrip("\n"))
        else:
            self._keep(line)

    def _keep(self, output: bytes) -> None:
        with self._lock:
            self.total += len(output)
            self._kept = (self._kept + output)[-KEPT_BYTES:]


def last_lines(output: bytes) -> str:
    """The last lines of an output, each cut where it is too long for a person."""
    lines = output[-KEPT_BYTES:].decode("utf-8", errors="replace").splitlines()
    return "\n".join(line[:_LONGEST_LINE] for line in lines[-LAST_LINES:])


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
