"""The containers behind a fake endpoint: the image's own entrypoint as a process, on an archive that was unpacked."""

from __future__ import annotations

import http.client
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_port

_LOOPBACK = "127.0.0.1"
START_S = 60.0
_PAUSE_S = 0.01
_PASSED_ON = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")


class NotReadyError(Exception):
    """A container that does not answer its ping; says what SageMaker would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    content_type: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Container:
    port: int
    process: subprocess.Popen[bytes]

    def invoke(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """POST /invocations, as SageMaker would. A container that is gone answers 500."""
        began = time.monotonic()
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=60)
        try:
            connection.request("POST", "/invocations", body, dict(headers))
            response = connection.getresponse()
            kind = response.getheader("content-type", "application/octet-stream")
            return Answer(
                status=response.status, body=response.read(), content_type=kind, seconds=time.monotonic() - began
            )
        except OSError as error:
            return Answer(status=500, body=str(error).encode(), content_type="text/plain", seconds=0.0)
        finally:
            connection.close()


class Containers:
    """One container for each archive and environment, started when it is first needed and kept until the end.

    Args:
        folder: where archives are unpacked.

    `startup_s` is how long a container may take to answer its ping.
    """

    def __init__(self, folder: Path) -> None:
        self.startup_s = START_S
        self._folder = folder
        self._running: dict[tuple[bytes, tuple[tuple[str, str], ...]], Container] = {}

    def start(self, archive: bytes, environment: Mapping[str, str]) -> Container:
        """Raises NotReadyError if it does not answer its ping."""
        key = (archive, tuple(sorted(environment.items())))
        found = self._running.get(key)
        if found is None or found.process.poll() is not None:
            self._running[key] = found = self._new(archive, environment)
        return found

    def stop(self) -> None:
        for container in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(container.process.pid, signal.SIGTERM)
        for container in self._running.values():
            try:
                container.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(container.process.pid, signal.SIGKILL)

    def _new(self, archive: bytes, environment: Mapping[str, str]) -> Container:
        place = Path(tempfile.mkdtemp(dir=self._folder, prefix="container-"))
        model, log = place / "model", place / "log"
        model.mkdir()
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
                packed.extractall(model, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise NotReadyError("Failed to extract model data archive from URL.") from error
        port = free_port()
        variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        variables |= environment
        variables |= {
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "ONNX_OPS_HOST": _LOOPBACK,
            "ONNX_OPS_MODEL_DIR": str(model),
            "ONNX_OPS_STATE_DIR": str(place / "state"),
            "ONNX_OPS_SERVE_WORKERS": "1",
        }
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "onnx_ops.serving.container", "serve"],
                env=variables,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        container = Container(port=port, process=process)
        self._wait(container, log)
        return container

    def _wait(self, container: Container, log: Path) -> None:
        deadline = time.monotonic() + self.startup_s
        while time.monotonic() < deadline and container.process.poll() is None:
            with suppress(OSError):
                connection = http.client.HTTPConnection(_LOOPBACK, container.port, timeout=2)
                connection.request("GET", "/ping")
                status = connection.getresponse().status
                connection.close()
                if status == 200:
                    return
            time.sleep(_PAUSE_S)
        with suppress(ProcessLookupError):
            os.killpg(container.process.pid, signal.SIGKILL)
        said = log.read_text(encoding="utf-8", errors="replace").strip()[-300:]
        raise NotReadyError(
            f"did not pass the ping health check. Please check CloudWatch logs for this endpoint. {said}"
        )
