"""This machine and this process: clock, lease holder, actor."""

from __future__ import annotations

import getpass
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from onnx_ops.protocol.server_process import read_start_time


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()  # noqa: TID251 (this is the Clock)

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()


def machine_vendor() -> str:
    """Return the vendor of this machine, which clouds set; empty if unknown."""
    with suppress(OSError):
        return Path("/sys/class/dmi/id/sys_vendor").read_text(encoding="utf-8").strip()
    return ""


class LocalHost:
    """This process as the holder of leases: host, process id and start time."""

    def holder(self) -> str:
        """Return this process's name in leases."""
        return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"

    def alive(self, holder: str) -> bool:
        """Return whether a holder runs; True for those of other hosts."""
        host, _, rest = holder.partition(":")
        process, _, started = rest.partition(":")
        if host != socket.gethostname() or not process.isdecimal():
            return True
        return _started(int(process)) == started != ""

    def actor(self) -> str:
        """Return the user for the audit trail: ONNX_OPS_ACTOR or user@host."""
        return os.environ.get("ONNX_OPS_ACTOR") or f"{getpass.getuser()}@{socket.gethostname()}"


def _started(process: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not run, or `unknown`."""
    with suppress(PermissionError):  # another user's process, on a system that hides these
        if Path("/proc/self").exists():
            return read_start_time(process) or ""
    with suppress(PermissionError):  # it runs, too
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return ""
    return "unknown"
