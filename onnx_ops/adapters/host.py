"""This machine and this process: clock, lease holder, actor."""

from __future__ import annotations

import getpass
import os
import socket
import time
from pathlib import Path

_ENDED = ("Z", "X")
"""States of a process that was killed and whose parent has not asked for its end yet."""


class SystemClock:
    def now(self) -> float:
        return time.time()  # noqa: TID251 (this is the Clock)

    def monotonic(self) -> float:
        return time.monotonic()


class LocalHost:
    """Leases name host, process and the process's start, so that a reused process id is not taken for its holder."""

    def holder(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"

    def alive(self, holder: str) -> bool:
        host, _, rest = holder.partition(":")
        process, _, started = rest.partition(":")
        if host != socket.gethostname() or not process.isdecimal():
            return True
        return _started(int(process)) == started != ""

    def actor(self) -> str:
        named = os.environ.get("ONNX_OPS_ACTOR")
        return named or f"{getpass.getuser()}@{socket.gethostname()}"


def _started(process: int) -> str:
    """Start of a process in clock ticks after boot, or empty if it does not run (or the system has no /proc)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return "" if not _runs(process) else "unknown"
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in _ENDED else rest[18]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
