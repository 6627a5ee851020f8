"""The server of one folder on this machine: process, admin API, crash recovery."""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import subprocess
import threading
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.files import exclusive_lock
from onnx_ops.adapters.retry import attempts, wait_until
from onnx_ops.config.server_options import format_flags
from onnx_ops.errors import (
    CorruptStateError,
    RefusedError,
    ServiceUnavailableError,
    describe_exit,
)
from onnx_ops.file_locks import try_lock
from onnx_ops.protocol.messages import STATE_PATH
from onnx_ops.protocol.server_process import (
    LOCK_FILE,
    SERVER_FILE,
    TOKEN_FILE,
    ServerOptions,
    ServerRecord,
    list_workers,
    signal_worker,
)
from onnx_ops.scratch import write_durably

LOG_FILE = "server.log"
APPLY_LOCK = "apply.lock"
LOOPBACK = "127.0.0.1"

_START_S = 60.0
_STOP_S = 30.0
_KILLED_S = 2.0
_VARIABLES = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = ("LC_", "PYTHON", "CUDA_", "OMP_", "ORT_", "OTEL_")
"""Prefixes of the variables that the server's environment inherits.

Variables other than these and `_VARIABLES` are not inherited, since they can contain secrets of the
process that starts the server.
"""


class LocalServer:
    """The server of one folder: a supervisor and its workers.

    The server runs while its process holds the lock. The system releases the lock when the process
    ends. So a stale record or a reused process id is never trusted or given the token.
    """

    def __init__(
        self, folder: Path, python: str, *, host: str = LOOPBACK, log: Path | None = None
    ) -> None:
        self.folder = folder
        self._python = python
        self._host = host
        self.log = log or folder / LOG_FILE

    def lock(self, timeout_s: float = 120.0) -> AbstractContextManager[None]:
        """Return the lock that a process holds while it starts or changes this server.

        If another process keeps the lock for `timeout_s`, ConflictError is raised.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        return exclusive_lock(self.folder / APPLY_LOCK, timeout_s, where=self.folder.name)

    def record(self) -> ServerRecord | None:
        """Return the server's ports and options; None if no server is ready."""
        pid = self._pid()
        if pid is None:
            return None
        try:
            record = codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)
        except (FileNotFoundError, CorruptStateError):
            return None
        return record if record.pid == pid else None

    def is_orphaned(self) -> bool:
        """Return whether workers run although their supervisor has ended.

        A new server replaces such workers.
        """
        return self._pid() is None and bool(list_workers(self.folder))

    def is_ready(self, port: int, *, timeout_s: float) -> bool | None:
        """Return whether the server on a port is ready; None if it does not answer."""
        try:
            with closing(
                http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
            ) as connection:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return None

    def start(self, port: int, options: ServerOptions) -> ServerRecord:
        """Start the server and wait until it is ready.

        Raises:
            RefusedError: other users have access to the admin token.
            ServiceUnavailableError: the server ended, or was not ready in time. The error shows the
                last lines of the server's log.
        """
        token = self.folder / TOKEN_FILE
        if not token.exists():
            write_durably(token, secrets.token_urlsafe(32).encode())
        if token.stat().st_mode & 0o077:
            raise RefusedError(
                "other users have access to the admin token",
                where=str(token),
                remedy=f"Run: chmod 600 {token}",
            )
        command = [self._python, "-P", "-m", "onnx_ops.serving.main", "--state-dir", "."]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--host", self._host, "--port", str(port), *format_flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={
                    k: v
                    for k, v in os.environ.items()
                    if k in _VARIABLES or k.startswith(_PREFIXES)
                },
                start_new_session=True,
            )
        # This thread reaps the server process if it ends before this process.
        threading.Thread(target=process.wait, name="reap-server", daemon=True).start()
        for _ in attempts(_START_S, 0.02):
            record = self.record()
            if record is not None and record.pid == process.pid:
                return record
            if process.poll() is not None:
                how = describe_exit(process.returncode)
                raise self._failure(f"the endpoint server ended with {how} before it was ready")
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # The supervisor's workers are in its group.
        raise self._failure(f"the endpoint server was not ready within {_START_S:.0f} s")

    def kill_supervisor(self) -> None:
        """Kill the supervisor if it runs.

        The supervisor's workers answer with the last table, until another server replaces them.
        """
        if (pid := self._pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait_until_stopped(_KILLED_S)

    def kill(self, port: int | None) -> None:
        """Kill the supervisor if it runs; kill its workers if `port` does not answer.

        The workers are also killed if `port` is None.
        """
        self.kill_supervisor()
        if list_workers(self.folder) and (
            port is None or self.is_ready(port, timeout_s=_KILLED_S) is None
        ):
            self._signal_workers(signal.SIGKILL, _KILLED_S)

    def stop(self) -> None:
        """Stop the server and its workers, if any run, by SIGTERM and then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if (pid := self._pid()) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                self.wait_until_stopped(_STOP_S)
            self._signal_workers(number, _STOP_S)

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Wait until the server has stopped; return False after the time limit."""
        return wait_until(lambda: self._pid() is None, timeout_s)

    def request(
        self,
        record: ServerRecord,
        method: str,
        body: bytes | None = None,
        *,
        path: str = STATE_PATH,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Return status and body of the answer to an admin request.

        Raises:
            ServiceUnavailableError: the request fails.
        """
        try:
            token = (self.folder / TOKEN_FILE).read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            with closing(
                http.client.HTTPConnection(LOOPBACK, record.admin_port, timeout=timeout_s)
            ) as connection:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailableError(
                "the request to the endpoint server failed",
                where=self.folder.name,
                why=str(error) or type(error).__name__,
                remedy=f"See the server's log: {self.log}",
            ) from error

    def _pid(self) -> int | None:
        """Return the id of the process that holds the server's lock; None if it is free."""
        try:
            with (self.folder / LOCK_FILE).open(encoding="utf-8") as stream:
                if try_lock(stream.fileno(), shared=True):
                    return None
                text = stream.read()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def _signal_workers(self, number: signal.Signals, timeout_s: float) -> None:
        for worker in list_workers(self.folder):
            signal_worker(worker, self.folder, number)
        wait_until(lambda: not list_workers(self.folder), timeout_s)

    def _failure(self, what: str) -> ServiceUnavailableError:
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            if self.log.is_file()
            else []
        )
        return ServiceUnavailableError(
            what,
            where=self.folder.name,
            why="its log ends: " + " | ".join(lines),
            remedy=f"See the complete log: {self.log}",
        )
