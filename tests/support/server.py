"""A real endpoint server in separate processes.

Tests call it, put it under load, measure it and kill it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import CorruptStateError, MeasurementError
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    STATE_PATH,
    AdminState,
    Counts,
    UserCountsRequest,
)
from onnx_ops.protocol.server_process import SERVER_FILE, TOKEN_FILE, ServerRecord
from onnx_ops.testing.endpoints import scaling_deployment
from tests.support.processes import ROOT, session_of

MAIN = ("-m", "onnx_ops.serving.main")
SCALES = {"blue": ("1", 2.0), "green": ("2", 3.0), "red": ("3", 4.0)}
"""Version and factor of the deployments of model `m`."""
_LOOPBACK = "127.0.0.1"
_START_S = 60.0
_STOP_S = 60.0
_PAUSE_S = 0.002


def stop_endpoints(folder: Path) -> None:
    """Stop the local endpoints whose folders are in this one, if any."""
    from onnx_ops.adapters.endpoints.local_server import LocalServer

    for endpoint in folder.iterdir() if folder.is_dir() else ():
        LocalServer(endpoint, sys.executable).stop()


def scaled(root: Path, name: str) -> Deployment:
    """Return the deployment of a model in its folder below `root`."""
    version, scale = SCALES[name]
    return scaling_deployment(root / name, name=name, version=version, scale=scale, model="m")


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def parse_answers(data: bytes) -> tuple[list[Answer], bytes]:
    """Return the complete answers in received bytes, and the remaining bytes.

    Interim answers are included.
    """
    answers = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        start, *lines = head.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]+", start)
        assert match is not None, f"no answer: {start[:80]!r}"
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            break
        answers.append(Answer(int(match[1]), headers, rest[:size]))
        data = rest[size:]
    return answers, data


def received(client: socket.socket, answers: int = 1) -> bytes:
    """Receive as many complete answers as requested.

    If the connection is closed earlier, return everything received.
    """
    data = b""
    with suppress(ConnectionError):
        while sum(answer.status != 100 for answer in parse_answers(data)[0]) < answers:
            piece = client.recv(1 << 16)
            if not piece:
                break
            data += piece
    return data


@dataclass(slots=True, kw_only=True)
class ServerFamily:
    """The server of one folder, with all processes that it starts.

    As a context manager, it runs the server inside the block.

    Args:
        folder: its state folder; the log is written beside it.
        options: further arguments, as `("--workers", "2")`.
        program: what the interpreter runs.
        port: the public port; 0 lets the system choose at the first start, and the choice is kept.
    """

    folder: Path
    options: Sequence[str] = ()
    program: Sequence[str] = MAIN
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    sessions: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def supervisor(self) -> int:
        """Return the process that was started last."""
        if self.process is None:
            raise MeasurementError("the server was not started")
        return self.process.pid

    def command(self, *options: str) -> list[str]:
        own = ("--state-dir", str(self.folder.absolute()), "--port", str(self.port))
        return [sys.executable, *self.program, *own, *self.options, *options]

    def launch(self) -> None:
        """Start a server on the folder, beside the remains of an earlier one."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.sessions.append(self.process.pid)

    def start(self) -> ServerRecord:
        """Launch a server; return once it is ready.

        Raises:
            MeasurementError: the server ended, or was not ready within a minute.
        """
        self.launch()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError, CorruptStateError):
                record = self.record()
                if record.pid == self.supervisor:
                    self.port = record.port
                    return record
            if self.process is not None and self.process.poll() is not None:
                raise MeasurementError("the server ended before start", why=self.log()[-2000:])
            time.sleep(_PAUSE_S)
        raise MeasurementError("the server was not ready in time", why=self.log()[-2000:])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the process that was started last; return its exit code.

        Other processes get no signal.
        """
        os.kill(self.supervisor, number)
        return self.reap()

    def kill(self) -> int:
        return self.stop(signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the end of the process that was started last, and return its exit code.

        Another process has caused the end.
        """
        assert self.process is not None
        return self.process.wait(timeout=_STOP_S)

    def destroy(self) -> None:
        """Send SIGKILL to all remaining processes of any start of this family."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.reap()

    def processes(self) -> list[int]:
        """Return every live process of this family, including those of earlier starts."""
        return [pid for session in self.sessions for pid in session_of(session)]

    def workers(self) -> list[int]:
        """Return the live processes of the last start, without the supervisor."""
        return [pid for pid in session_of(self.supervisor) if pid != self.supervisor]

    def record(self) -> ServerRecord:
        return codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def url(self, path: str) -> str:
        return f"http://{_LOOPBACK}:{self.port}{path}"

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        admin: bool = False,
    ) -> Answer:
        """Call the public listener, or the admin listener.

        A body that is not bytes is sent as JSON.
        """
        port = self.record().admin_port if admin else self.port
        connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=60)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Answer(
                response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
            )
        finally:
            connection.close()

    def admin(
        self,
        method: str,
        body: bytes | None = None,
        path: str = STATE_PATH,
        *,
        token: str | None = None,
    ) -> Answer:
        shown = (
            (self.folder / TOKEN_FILE).read_text(encoding="utf-8").strip()
            if token is None
            else token
        )
        headers = {"authorization": f"Bearer {shown}", "content-type": "application/json"}
        return self.call(method, path, body, headers, admin=True)

    def publish(self, state: EndpointState, generation: int) -> Answer:
        return self.admin("PUT", codec.dumps(replace(state, generation=generation)))

    def state(self) -> EndpointState | None:
        answer = self.admin("GET")
        if answer.status != 200:
            raise MeasurementError("the server does not show its state", why=str(answer))
        return codec.loads(answer.body, AdminState).state

    def counts(self, watch: UserCountsRequest | None = None) -> Counts:
        body = None if watch is None else codec.dumps(watch)
        answer = self.admin("GET" if body is None else "POST", body, COUNTS_PATH)
        if answer.status != 200:
            raise MeasurementError("the server does not show its counts", why=str(answer))
        return codec.loads(answer.body, Counts)

    @property
    def _log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"
