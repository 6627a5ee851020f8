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
    def now(self) -> float:
        return time.time()  # noqa: TID251 (this is the Clock)

    def monotonic(self) -> float:
        return time.monotonic()


def machine_vendor() -> str:
    """Who made this machine, as its firmware says; clouds name themselves. Empty if that is not known."""
    with suppress(OSError):
        return Path("/sys/class/dmi/id/sys_vendor").read_text(encoding="utf-8").strip()
    return ""


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
    """Start of a process in clock ticks after boot; empty if it does not run; `unknown` if the system does not tell."""
    with suppress(PermissionError):  # somebody else's, on a system that hides these
        if Path("/proc/self").exists():
            return read_start_time(process) or ""
    return "unknown" if _runs(process) else ""


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
