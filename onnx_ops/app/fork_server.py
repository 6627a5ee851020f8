"""A process that has imported the modules of stages, and forks for each stage.

This saves half a second of CPU time for each further stage (docs/adr/0028-scale.md). Python's own
fork server is not used. It imports the main module in every child, and every forked process starts
another fork server. This fork server forks a monitor for each request. The monitor forks the
stage's process, and reports its process id and exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import mmap
import os
import pkgutil
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

from onnx_ops.errors import StageError

_NUMBER = 4
"""Size of a process id and of an exit code, in bytes."""
_SHIFTS: list[object] = []
"""Allocations of random size, which only shift the addresses of later allocations."""
_STAGES = "onnx_ops.pipeline.stages"
_PACKAGES = "_ONNX_OPS_FORK_SERVER_PACKAGES"
"""Environment variable of the server process with further packages to import."""
_IMPORTS = "import onnx_ops.app.worker, onnx_ops.app.fork_server as f; f._import_packages()"
"""Code that shows the errors of the server process's imports."""


class ForkedProcess:
    """Process of a stage, which leads a separate session and process group.

    The standard error of the process is redirected to its standard output.

    Args:
        pid: process id.
        stdin: stream to the standard input of the process.
        stdout: stream from the standard output of the process.
        status: descriptor from which the exit code can be read when the process has ended; it is
            closed with this object.
    """

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._status = status
        weakref.finalize(self, os.close, status)
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs.

        If a signal ended the process, the exit code is its negative number.
        """
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process has not ended after `timeout` seconds.
        """
        with self._lock:
            if self._code is not None:
                return self._code
        ended = select.poll()
        ended.register(self._status, select.POLLIN)
        if not ended.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        with self._lock:
            if self._code is None:
                if code := os.read(self._status, _NUMBER):
                    self._code = int.from_bytes(code, "little", signed=True)
                else:  # The monitor was killed before it could report the exit code.
                    self._code = -signal.SIGKILL
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
            return self._code

    def kill(self) -> None:
        """Kill the process group, unless the process has ended, and close its input."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


class ForkServer:
    """Client of a fork server that starts processes of `onnx_ops.app.worker`.

    The object is thread-safe, and forks of this process can use it too. The server process ends
    when all processes that use it have ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._packages: tuple[str, ...] = ()

    def start(self, packages: Collection[str] = ()) -> None:
        """Start the server process if none runs; do not wait for its imports.

        Args:
            packages: further packages that the server imports, so that stages need not import them.
        """
        with self._lock:
            self._packages = tuple(packages)
            self._connect()

    def fork(self, environ: Mapping[str, str], folder: Path) -> ForkedProcess:
        """Start a process with these environment variables, in this folder.

        Raises:
            StageError: the server process ends immediately.
        """
        # The first attempt fails if the fork server was killed. The second attempt starts a new
        # server.
        process = self._fork() or self._fork()
        if process is None:
            raise StageError(
                "no process can be started for a stage",
                remedy=f"`{_PACKAGES}={','.join(self._packages)} {sys.executable} -c "
                f"'{_IMPORTS}'` may show the cause.",
            )
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(
                json.dumps({"environ": dict(environ), "folder": str(folder)}).encode() + b"\n"
            )
            process.stdin.flush()
        return process

    def _fork(self) -> ForkedProcess | None:
        """Return a new process; None if the server process has ended.

        In that case, the next call starts another server process.
        """
        (theirs, stdin), (stdout, printed), (status, reported) = (os.pipe() for _ in range(3))
        with self._lock:
            control = self._connect()
            with contextlib.suppress(OSError):
                socket.send_fds(control, [b"."], (theirs, printed, reported))
        for descriptor in (theirs, printed, reported):
            os.close(descriptor)
        pid = os.read(status, _NUMBER)
        if not pid:
            for descriptor in (stdin, stdout, status):
                os.close(descriptor)
            with self._lock:
                control.close()
                if self._control is control:
                    self._control = None
            return None
        return ForkedProcess(
            int.from_bytes(pid, "little"), os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), status
        )

    def _connect(self) -> socket.socket:
        if self._control is None:
            self._control, server = socket.socketpair()
            atexit.register(self._control.close)
            with server:
                os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-m", "onnx_ops.app.worker"],
                    {**os.environ, _PACKAGES: ",".join(self._packages)},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, server.fileno(), 0),
                        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    ],
                )
        return self._control


def serve() -> None:
    """Fork a process for each request that arrives on standard input, a socket.

    This function returns only in the forked processes.
    """
    with contextlib.suppress(PermissionError):
        # The call fails if this process already leads a process group.
        os.setsid()
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in given]
    _import_packages()
    # In a forked process, a garbage collection would copy the pages of all imported modules.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the monitors.
    control = socket.socket(fileno=0)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_monitored(*descriptors)
            return _adopt(path)
        for descriptor in descriptors:
            os.close(descriptor)


def _import_packages() -> None:
    """Import the stages' modules, and packages that most stages or this run need.

    Missing packages are ignored.
    """
    for name in ("onnx", "onnxruntime", *filter(None, os.environ.pop(_PACKAGES, "").split(","))):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for module in pkgutil.iter_modules(importlib.import_module(_STAGES).__path__):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{_STAGES}.{module.name}")


def _fork_monitored(stdin: int, stdout: int, status: int) -> None:
    """Fork, and return only in the new process.

    The monitor is the parent process. It reports the id of the new process, waits for its end, and
    reports its exit code.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for descriptor, number in ((stdin, 0), (stdout, 1), (stdout, 2)):
            os.dup2(descriptor, number)
        for descriptor in (stdin, stdout, status):
            os.close(descriptor)
        return
    os.close(stdin)
    os.close(stdout)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, pid.to_bytes(_NUMBER, "little"))
    _, ended = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, os.waitstatus_to_exitcode(ended).to_bytes(_NUMBER, "little", signed=True))
    os._exit(0)


def _adopt(path: list[str]) -> None:
    """Apply the environment, folder and import path of the requesting process.

    Values that are random in a new process are drawn again: the state of NumPy's global generator,
    and memory addresses. Otherwise, two data sources without a seed would return the same values.
    All measurements of a run would have the same memory addresses, which affect the speed of a
    model (docs/adr/0028-scale.md).
    """
    if not (line := sys.stdin.readline()):
        os._exit(1)  # The requesting process has ended.
    request = json.loads(line)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [request["folder"], *given, *path]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    if generators := sys.modules.get("numpy.random"):
        generators.seed()
    _SHIFTS.append(bytearray(secrets.randbelow(1 << 16)))  # This allocation shifts the heap.
    # This mapping shifts large arrays.
    _SHIFTS.append(mmap.mmap(-1, 1 + secrets.randbelow(1 << 24)))


FORK_SERVER = ForkServer()
"""The fork server of this process.

A process that forks, such as a pool's worker, starts this server first, so that its forks share the
server.
"""
