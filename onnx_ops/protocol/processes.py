"""Processes that are known by more than their number, which the system gives to somebody else later."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from onnx_ops.protocol.admin import WORKERS_FOLDER

_START_FIELD = 21
_STATE_FIELD = 2
_DEAD = ("Z", "X")


def start_of(pid: int) -> str | None:
    """When a process started, in the system's ticks since it booted (proc(5), field 22); None if it does not live.

    One whose first thread has ended lives, and keeps its port, until the last thread of it has.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name, in parentheses, may hold anything
    if fields[_STATE_FIELD - 2] in _DEAD and not _other_threads(pid):
        return None
    return fields[_START_FIELD - 2]


def _other_threads(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def enlist(folder: Path) -> Path:
    """Write down that this process is a worker of the server on the folder; returns the file."""
    path = folder / WORKERS_FOLDER / str(os.getpid())
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(start_of(os.getpid()) or "", encoding="utf-8")
    temporary.replace(path)
    return path


def workers(folder: Path) -> tuple[int, ...]:
    """The workers of a folder's server that live. Files of those that do not are removed."""
    alive = []
    for path in sorted((folder / WORKERS_FOLDER).glob("[0-9]*")):
        try:
            recorded = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        if recorded == start_of(int(path.name)):
            alive.append(int(path.name))
        else:
            path.unlink(missing_ok=True)
    return tuple(alive)


def end(pid: int, folder: Path, number: signal.Signals) -> None:
    """Send a signal to a worker of the folder; nothing happens if it does not live any more."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in workers(folder):  # checked while the handle is open, so that the number cannot change hands
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
