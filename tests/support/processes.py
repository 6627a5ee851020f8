"""Processes of this machine: their use of resources, and servers to start.

The use of resources is read from /proc (proc(5)).
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
"""Top of the checkout, where `python -m tests.support.…` finds its module."""
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_STATE, _PARENT, _SESSION, _UTIME, _STIME = 0, 1, 3, 11, 12
"""Positions in /proc/PID/stat after the command's name.

The name can contain any character.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of several processes together, in bytes.

    `rss` counts a shared page once for each process. `pss` divides it among all processes that
    share it.
    """

    pss: int
    rss: int


def until(
    condition: Callable[[], T | None],
    what: str = "condition",
    *,
    seconds: float = 60.0,
    pause_s: float = 0.02,
) -> T:
    """Wait for a condition; `seconds` is only a limit, not a measurement."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds:.0f} s"
        time.sleep(pause_s)
    return found


@contextmanager
def running_process(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], bool],
    *,
    seconds: float = 120.0,
    **options: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block, and yield it once it is ready.

    Its output is appended to `log`. `options` are those of Popen.
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, **options)
    deadline = time.monotonic() + seconds
    try:
        while not is_ready():
            assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8", errors="replace")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def does_answer(url: str) -> bool:
    """Return whether a server answers a GET with success."""
    with suppress(OSError):
        urllib.request.urlopen(url, timeout=2).close()
        return True
    return False


def session_of(leader: int) -> list[int]:
    """Return the live processes of the session that `leader` began.

    Their present parent does not matter.
    """
    return _with(_SESSION, leader)


def children_of(pid: int) -> list[int]:
    """Return the live processes whose parent is `pid`."""
    return _with(_PARENT, pid)


def end_all(folder: Path) -> None:
    """Kill the processes of a folder.

    They work in the folder or below it, or their command names it.
    """
    # The base package alone does not install psutil.
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = (process.cwd(), *process.cmdline())
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                process.kill()


def is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    with suppress(OSError):
        return _stat(pid)[_STATE] not in "ZX"
    return False


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of live processes in seconds.

    The resolution is the kernel's clock tick (usually 10 ms).
    """
    ticks = 0
    for pid in pids:
        fields = _stat(pid)
        ticks += int(fields[_UTIME]) + int(fields[_STIME])
    return ticks / _TICKS


def memory(pids: Iterable[int]) -> Memory:
    """Return the memory of the processes."""
    totals = {"Pss": 0, "Rss": 0}
    for pid in pids:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    return Memory(pss=totals["Pss"], rss=totals["Rss"])


def peak_memory(pids: Iterable[int]) -> int:
    """Return the sum of the peak memory of each process, in bytes."""
    total = 0
    for pid in pids:
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        total += int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return total


def _with(place: int, value: int) -> list[int]:
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The process can end after it was listed.
                fields = _stat(int(entry.name))
                if int(fields[place]) == value and fields[_STATE] not in "ZX":
                    found.append(int(entry.name))
    return sorted(found)


def _stat(pid: int) -> list[str]:
    return (
        (_PROC / str(pid) / "stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )
