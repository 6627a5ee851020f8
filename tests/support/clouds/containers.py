"""Containers of the fake clouds: the image's entrypoint as a process.

It serves the files of a model.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.artifact import digest_bytes, digest_json
from tests.support.ports import free_port

START_S = 60.0
BROKEN = 502
"""Status that stands for a container that does not answer."""
_LOOPBACK = "127.0.0.1"
_PASSED_ON = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")


class NotReadyError(Exception):
    """A container did not answer its ping; the error holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    content_type: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    port: int
    process: subprocess.Popen[bytes]

    def invoke(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send POST /invocations, as the cloud's front end does."""
        began = time.monotonic()
        status, kind = BROKEN, "application/json"
        data = json.dumps(
            {"error": {"code": "BadGateway", "message": "the container does not answer"}}
        ).encode()
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=60)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/invocations", body, dict(headers))
            response = connection.getresponse()
            kind = response.getheader("content-type", "application/octet-stream")
            data, status = response.read(), response.status
        return Answer(status=status, body=data, content_type=kind, seconds=time.monotonic() - began)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=2)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/ping")
            return connection.getresponse().status == 200
        return False

    def end(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Containers:
    """Containers, one for each set of files and variables.

    A container is started when it is first needed, and runs until the end. A test with hundreds of
    deployments of two models therefore starts two processes.

    Args:
        model_variable: variable that gives the container the path of the model's files.
        port_variable: variable that gives the container its port.
        folder: folder for the files; a temporary one by default.
    """

    def __init__(
        self, *, model_variable: str, port_variable: str, folder: Path | None = None
    ) -> None:
        self.startup_s = START_S
        """Longest time in which a container must answer its ping."""
        self._model_variable = model_variable
        self._port_variable = port_variable
        self._folder = Path(tempfile.mkdtemp(dir=folder, prefix="containers-"))
        self._running: dict[str, Container] = {}

    def start(self, files: Mapping[str, bytes], variables: Mapping[str, str]) -> Container:
        """Start a container, or return the running one.

        Raises:
            NotReadyError: the container does not answer its ping.
        """
        key = digest_json(
            [{name: digest_bytes(data) for name, data in files.items()}, dict(variables)]
        )
        found = self._running.get(key)
        if found is not None and found.process.poll() is None:
            return found
        place, port = Path(tempfile.mkdtemp(dir=self._folder)), free_port()
        (place / "model").mkdir()
        for name, data in files.items():
            path = place / "model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        environment = {
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            **variables,
            self._model_variable: str(place / "model"),
            self._port_variable: str(port),
            "ONNX_OPS_HOST": _LOOPBACK,
            "ONNX_OPS_STATE_DIR": str(place / "state"),
        }
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "onnx_ops.serving.container", "serve"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        container, deadline = (
            Container(port=port, process=process),
            time.monotonic() + self.startup_s,
        )
        while time.monotonic() < deadline and process.poll() is None:
            if container.is_ready():
                self._running[key] = container
                return container
            time.sleep(0.02)
        container.end(signal.SIGKILL)
        process.wait()
        raise NotReadyError(
            (place / "log").read_text(encoding="utf-8", errors="replace").strip()[-400:]
        )

    def stop(self) -> None:
        for container in self._running.values():
            container.end(signal.SIGTERM)
        for container in self._running.values():
            try:
                container.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                container.end(signal.SIGKILL)
                container.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
