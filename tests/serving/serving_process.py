"""A real server process to call, and clients that call it all the time."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.protocol import server_process
from onnx_ops.protocol.messages import STATE_PATH, AdminState
from onnx_ops.protocol.server_process import SERVER_FILE, TOKEN_FILE, ServerRecord
from tests.support.ports import free_port


def deploy(folder: Path, *, name: str = "blue", version: str = "1", model: str = "m") -> Deployment:
    """The deployment of whatever files a folder holds."""
    files = {p.relative_to(folder).as_posix(): digest_file(p) for p in folder.rglob("*") if p.is_file()}
    return Deployment(
        name=name,
        model=model,
        version=version,
        variant="fp32",
        release=digest_bytes(b"release"),
        manifest=Manifest(files=files).digest(),
        location=str(folder),
    )


INFER = "/v2/models/m/infer"


def infer_body(x: object) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": x}]}).encode()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A real server process on a folder.

    `options` are of the interpreter, `flags` of the server; `preamble` is code that runs before it in its process.
    """

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=free_port)
    options: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    preamble: str = ""

    def start(self) -> ServerRecord:
        with (self.folder.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(f"--port={self.port}"), stdout=log, stderr=log)
        for _ in range(2000):
            with suppress(FileNotFoundError):  # the record of a killed server goes away when the next one starts
                record = self.record()
                if record.pid == self.process.pid:
                    self.port = record.port
                    return record
            assert self.process.poll() is None, self.log()
            time.sleep(0.01)
        raise AssertionError(self.log())

    def command(self, *flags: str) -> list[str]:
        program = ["-m", "onnx_ops.serving.main"]
        if self.preamble:
            program = ["-c", f"{self.preamble}\nimport sys\nfrom onnx_ops.serving.main import main\nsys.exit(main())"]
        return [sys.executable, *self.options, *program, f"--state-dir={self.folder}", *self.flags, *flags]

    def record(self) -> ServerRecord:
        return codec.loads((self.folder / SERVER_FILE).read_bytes(), ServerRecord)

    def workers(self) -> tuple[int, ...]:
        return server_process.list_workers(self.folder)

    def kill_all(self) -> None:
        """End supervisor and workers by force, those of supervisors that died before too."""
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)
        while self.workers():
            for pid in self.workers():
                server_process.signal_worker(pid, self.folder, signal.SIGKILL)
            time.sleep(0.01)

    def log(self) -> str:
        return (self.folder.parent / "log").read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=60)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        admin: bool = False,
    ) -> Answer:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.record().admin_port if admin else self.port, timeout=60
        )
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def admin(self, method: str, body: bytes | None = None, token: str | None = None) -> Answer:
        shown = (self.folder / TOKEN_FILE).read_text() if token is None else token
        return self.call(method, STATE_PATH, body, {"authorization": f"Bearer {shown}"}, admin=True)

    def publish(self, state: EndpointState, generation: int) -> Answer:
        return self.admin("PUT", codec.dumps(replace(state, generation=generation)))

    def infer(self, x: object, headers: Mapping[str, str] | None = None, path: str = INFER) -> Answer:
        return self.call("POST", path, infer_body(x), headers)

    def generation(self) -> int:
        """Of what is published; 0 before the first time."""
        state = codec.loads(self.admin("GET").body, AdminState).state
        return 0 if state is None else state.generation

    def who_answers(self) -> str:
        return self.infer([1, 2]).headers["x-onnx-ops-deployment"]


class Clients:
    """Threads that call the server until they are told to stop."""

    def __init__(self, one: Callable[[], None], count: int) -> None:
        self._one = one
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._loop) for _ in range(count)]

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._one()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
