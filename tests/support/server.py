"""A real endpoint server as a process family of its own, to load, to measure and to kill."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import CorruptStateError, MeasurementError
from onnx_ops.protocol.messages import COUNTS_PATH, STATE_PATH, AdminState, Counts, UserCountsRequest, read_message
from onnx_ops.protocol.server_process import SERVER_FILE, TOKEN_FILE, ServerRecord
from tests.support.processes import ROOT, session_of

_LOOPBACK = "127.0.0.1"
_START_S = 60.0
_STOP_S = 60.0
_PAUSE_S = 0.002


def stop_endpoints(folder: Path) -> None:
    """Stop the local endpoints whose folders are in this one, if there is any."""
    from onnx_ops.adapters.endpoints.local_server import LocalServer

    for endpoint in folder.iterdir() if folder.is_dir() else ():
        LocalServer(endpoint, sys.executable).stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class ServerFamily:
    """The server of one folder: `python -m onnx_ops.serving.main`, with whatever processes it starts.

    Args:
        folder: its state folder; the log is written beside it.
        options: further arguments, as `("--workers", "2")`.
        module: what is run by `python -m`, as `("tests.support.dying", "order.json")`.
        port: the public port; 0 lets the system choose at the first start, and the choice is kept.
    """

    folder: Path
    options: Sequence[str] = ()
    module: Sequence[str] = ("onnx_ops.serving.main",)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    sessions: list[int] = field(default_factory=list)

    @property
    def supervisor(self) -> int:
        """The process that was started last."""
        if self.process is None:
            raise MeasurementError("the server was not started")
        return self.process.pid

    def start(self) -> ServerRecord:
        """Start a server on the folder, beside whatever is left of an earlier one; returns once it is ready.

        Raises:
            MeasurementError: it ended, or was not ready within a minute.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            *self.module,
            "--state-dir",
            str(self.folder.absolute()),
            "--port",
            str(self.port),
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.options], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.sessions.append(self.process.pid)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError, CorruptStateError):
                record = self.record()
                if record.pid == self.process.pid:
                    self.port = record.port
                    return record
            if self.process.poll() is not None:
                raise MeasurementError("the server ended at once", why=self.log()[-2000:])
            time.sleep(_PAUSE_S)
        raise MeasurementError("the server was not ready in time", why=self.log()[-2000:])

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        os.kill(self.supervisor, signal.SIGTERM)
        return self._wait()

    def kill(self) -> int:
        """SIGKILL to the process that was started last, and to it alone."""
        os.kill(self.supervisor, signal.SIGKILL)
        return self._wait()

    def reap(self) -> int:
        """Wait for the end of the process that was started last, which somebody else has brought about."""
        return self._wait()

    def destroy(self) -> None:
        """SIGKILL to everything that any start of this family left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self._wait()

    def processes(self) -> list[int]:
        """Every live process of this family, those of earlier starts included."""
        return [pid for session in self.sessions for pid in session_of(session)]

    def workers(self) -> list[int]:
        """The live processes of the last start but the one that was started."""
        return [pid for pid in session_of(self.supervisor) if pid != self.supervisor]

    def record(self) -> ServerRecord:
        return read_message((self.folder / SERVER_FILE).read_bytes(), ServerRecord)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def url(self, path: str) -> str:
        return f"http://{_LOOPBACK}:{self.port}{path}"

    def call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return _call(self.port, method, path, body, headers or {})

    def publish(self, state: EndpointState, generation: int) -> Answer:
        return self._admin("PUT", codec.dumps(replace(state, generation=generation)))

    def state(self) -> EndpointState | None:
        answer = self._admin("GET", None)
        if answer.status != 200:
            raise MeasurementError("the server does not show its state", why=str(answer))
        return read_message(answer.body, AdminState).state

    def counts(self, watch: UserCountsRequest | None = None) -> Counts:
        body = None if watch is None else codec.dumps(watch)
        answer = self._admin("GET" if body is None else "POST", body, COUNTS_PATH)
        if answer.status != 200:
            raise MeasurementError("the server does not show its counts", why=str(answer))
        return read_message(answer.body, Counts)

    def _admin(self, method: str, body: bytes | None, path: str = STATE_PATH) -> Answer:
        token = (self.folder / TOKEN_FILE).read_text(encoding="utf-8").strip()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        return _call(self.record().admin_port, method, path, body, headers)

    def _wait(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=_STOP_S)

    @property
    def _log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"


def _call(port: int, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
    connection = http.client.HTTPConnection(_LOOPBACK, port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=named, body=response.read())
    finally:
        connection.close()
