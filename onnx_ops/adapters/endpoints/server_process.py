"""One endpoint server as a process of its own: start, find, ask, stop."""

from __future__ import annotations

import fcntl
import http.client
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnx_ops.adapters.objects import durable_file
from onnx_ops.config.server_options import format_flags
from onnx_ops.errors import ConflictError, CorruptStateError, RefusedError, ServiceUnavailableError
from onnx_ops.protocol import server_process
from onnx_ops.protocol.messages import STATE_PATH, read_message
from onnx_ops.protocol.server_process import LOCK_FILE, SERVER_FILE, TOKEN_FILE, ServerOptions, ServerRecord

LOG_FILE = "server.log"

_LOOPBACK = "127.0.0.1"
_READY_PATH = "/v2/health/ready"
APPLY_LOCK = "apply.lock"
_START_S = 60.0
_STOP_S = 30.0
_KILLED_S = 2.0
_PAUSE_S = 0.02
_LOG_LINES = 5
_ENVIRONMENT = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = ("LC_", "PYTHON", "CUDA_", "OMP_", "ORT_")


class ServerProcess:
    """The server of one folder: a supervisor and its workers. It outlives the process that started it.

    Whether it lives is told by the lock that it holds, which the system releases when it dies: neither a stale
    record nor a reused process id is ever trusted, or shown the token.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self._python = python

    @contextmanager
    def alone(self, patience_s: float = 120.0) -> Iterator[None]:
        """Keep others from starting, stopping or changing this server meanwhile.

        Raises:
            ConflictError: somebody else is at it for longer than `patience_s`.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        deadline = time.monotonic() + patience_s
        with (self.folder / APPLY_LOCK).open("a") as stream:
            while not _locked(stream.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise ConflictError("somebody else is changing this endpoint", where=self.folder.name)
                time.sleep(_PAUSE_S)
            yield

    def record(self) -> ServerRecord | None:
        """Where the server listens; None if none runs, or it is not ready."""
        pid = self._pid()
        if pid is None:
            return None
        try:
            record = read_message((self.folder / SERVER_FILE).read_bytes(), ServerRecord)
        except (FileNotFoundError, CorruptStateError):
            return None
        return record if record.pid == pid else None

    def orphaned(self) -> bool:
        """Whether workers serve whose supervisor died. A new server takes over their port, and then from them."""
        return self._pid() is None and bool(server_process.list_workers(self.folder))

    def ready(self, port: int, *, timeout_s: float) -> bool | None:
        """Whether whoever serves on this port says that every deployment with traffic is loaded; None if nobody
        answers."""
        connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=timeout_s)
        try:
            connection.request("GET", _READY_PATH)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def start(self, port: int, options: ServerOptions) -> ServerRecord:
        """Start the server and wait until it is ready.

        Raises:
            ServiceUnavailableError: it ended, or was not ready in time; the error holds the end of its log.
        """
        self._make_token()
        log = self.folder / LOG_FILE
        command = [self._python, "-P", "-m", "onnx_ops.serving.main", "--state-dir", str(self.folder.resolve())]
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [*command, "--host", _LOOPBACK, "--port", str(port), *format_flags(options)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
            )
        # Reaps the server should it die before this process does.
        threading.Thread(target=process.wait, name="reap-server", daemon=True).start()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            record = self.record()
            if record is not None and record.pid == process.pid:
                return record
            if process.poll() is not None:
                raise self._failure(f"the endpoint server ended at once (exit code {process.returncode})")
            time.sleep(_PAUSE_S)
        process.kill()
        raise self._failure(f"the endpoint server was not ready within {_START_S:.0f} s")

    def kill(self, port: int | None) -> None:
        """End the supervisor at once, and its workers if nobody answers on the port. No error if none runs."""
        if (pid := self._pid()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.gone(_KILLED_S)
        workers = server_process.list_workers(self.folder)
        if workers and (port is None or self.ready(port, timeout_s=_KILLED_S) is None):
            for worker in workers:
                server_process.signal_worker(worker, self.folder, signal.SIGKILL)
            deadline = time.monotonic() + _KILLED_S
            while server_process.list_workers(self.folder) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """End the server and all of its workers: politely, and by force if they do not go. No error if none runs."""
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            if (pid := self._pid()) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                self.gone(patience_s)
            for worker in server_process.list_workers(self.folder):
                server_process.signal_worker(worker, self.folder, number)
            deadline = time.monotonic() + patience_s
            while server_process.list_workers(self.folder) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)

    def gone(self, patience_s: float) -> bool:
        """Whether no server runs, or stops running within that time."""
        deadline = time.monotonic() + patience_s
        while self._pid() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def ask(
        self,
        record: ServerRecord,
        method: str,
        body: bytes | None = None,
        *,
        path: str = STATE_PATH,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Status and body of the server's answer to an admin request.

        Raises:
            ServiceUnavailableError: it does not answer.
        """
        connection = http.client.HTTPConnection(_LOOPBACK, record.admin_port, timeout=timeout_s)
        try:
            token = (self.folder / TOKEN_FILE).read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailableError(
                "the endpoint server does not answer",
                where=self.folder.name,
                why=str(error) or type(error).__name__,
                remedy=f"Its log is {self.folder / LOG_FILE}.",
            ) from error
        finally:
            connection.close()

    def _pid(self) -> int | None:
        """The process that holds the server's lock."""
        try:
            with (self.folder / LOCK_FILE).open(encoding="utf-8") as stream:
                if _locked(stream.fileno(), fcntl.LOCK_SH):
                    return None
                text = stream.read()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def _make_token(self) -> None:
        path = self.folder / TOKEN_FILE
        if not path.exists():
            with durable_file(path) as temporary:  # made with mode 0600
                temporary.write_text(secrets.token_urlsafe(32), encoding="utf-8")
        if path.stat().st_mode & 0o077:
            raise RefusedError("others may read the admin token", where=str(path), remedy=f"Run: chmod 600 {path}")

    def _failure(self, what: str) -> ServiceUnavailableError:
        log = self.folder / LOG_FILE
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return ServiceUnavailableError(
            what, where=self.folder.name, why="its log ends: " + " | ".join(lines), remedy=f"The whole log is {log}."
        )


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _environment() -> dict[str, str]:
    """What the server needs, and none of the secrets that whoever starts it may hold."""
    return {k: v for k, v in os.environ.items() if k in _ENVIRONMENT or k.startswith(_PREFIXES)}
