"""An endpoint server that is killed, or loses a worker, at a chosen moment of its work.

    python -m tests.support.fault_injection POINT SERVER-ARGUMENTS...

POINT is a file with a `FaultPoint`. A test writes it when the server is to begin counting. A moment
is the time just before or just after a call by which the supervisor uses the disk or communicates
with a worker. The number of moments so far is in the file beside it, POINT with the suffix
`.count`.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onnx_ops import codec
from tests.support.processes import children_of

_SYSTEM = ("open", "write", "fsync", "replace", "rename", "unlink", "remove", "mkdir")
_SOCKET = ("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoint:
    """The process that is killed by SIGKILL, and the moment, counted from 0.

    At a negative moment no process is killed: moments are only counted.
    """

    at: int
    victim: Literal["supervisor", "worker"] = "supervisor"


def arm(path: Path, point: FaultPoint) -> None:
    """Make the server that watches `path` count from 0, and kill the victim at the point."""
    _count_file(path).unlink(missing_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(codec.dumps(point))
    temporary.replace(path)


def count_points(path: Path) -> int:
    """Return how many moments have passed since the point was armed."""
    with suppress(FileNotFoundError):
        return _count_file(path).stat().st_size
    return 0


class Watch:
    """Counter of the moments of the process that created it.

    Moments of forked processes are not counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._open = os.open
        self._write = os.write

    def install(self) -> None:
        """Wrap the system calls of this process."""
        for module, names in ((os, _SYSTEM), (socket.socket, _SOCKET)):
            for name in names:
                setattr(module, name, self._around(getattr(module, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*arguments: Any, **options: Any) -> Any:
            self._moment()
            result = call(*arguments, **options)
            self._moment()
            return result

        return watched

    def _moment(self) -> None:
        if os.getpid() != self._owner or getattr(self._inside, "busy", False):
            return
        self._inside.busy = True
        try:
            with self._lock:
                self._obey()
        finally:
            self._inside.busy = False

    def _obey(self) -> None:
        try:
            point = codec.loads(self._path.read_bytes(), FaultPoint)
        except FileNotFoundError:
            return
        number = count_points(self._path)
        handle = self._open(_count_file(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._write(handle, b".")
        os.close(handle)
        if number == point.at:
            victims = (
                [self._owner] if point.victim == "supervisor" else children_of(self._owner)[:1]
            )
            for pid in victims:
                os.kill(pid, signal.SIGKILL)


def _count_file(path: Path) -> Path:
    return path.with_suffix(".count")


def main(arguments: Sequence[str]) -> int:
    Watch(Path(arguments[0])).install()
    from onnx_ops.serving import main as server

    return server.main(list(arguments[1:]))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
