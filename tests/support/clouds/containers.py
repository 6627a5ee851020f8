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
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.domain.artifact import digest_bytes, digest_json
from onnx_ops.protocol.server_process import FOLLOW_VARIABLE
from tests.support.ports import free_port

START_S = 60.0
BROKEN = 502
"""Status that stands for a container that does not answer."""
_LOOPBACK = "127.0.0.1"
_PASSED_ON = ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")


class NotReadyError(Exception):
    """A container did not answer its ping; the error contains the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    content_type: str
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def invoke(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send POST /invocations, as the cloud's front end does."""
        began = time.monotonic()
        status, kind, fields = BROKEN, "application/json", dict[str, str]()
        data = json.dumps(
            {"error": {"code": "BadGateway", "message": "the container does not answer"}}
        ).encode()
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=60)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/invocations", body, dict(headers))
            response = connection.getresponse()
            kind = response.getheader("content-type", "application/octet-stream")
            fields = {name.lower(): value for name, value in response.getheaders()}
            data, status = response.read(), response.status
        return Answer(
            status=status,
            body=data,
            content_type=kind,
            seconds=time.monotonic() - began,
            headers=fields,
        )

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(_LOOPBACK, self.port, timeout=2)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/ping")
            return connection.getresponse().status == 200
        return False

    def end(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(slots=True, kw_only=True)
class ContainerPool:
    """The containers of one deployment, one of which answers each request.

    A container with a model is shared by pools, and stands for all instances.
    """

    containers: list[Container]
    turn: int = 0

    def invoke(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        running = [one for one in self.containers if one.process.poll() is None]
        chosen = running or self.containers
        self.turn += 1
        return chosen[self.turn % len(chosen)].invoke(body, headers)


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
        self._followers: list[Container] = []
        self.follower_environment: Mapping[str, str] = {}
        """Further variables of followers, such as the cloud's address."""

    def start(
        self, files: Mapping[str, bytes], variables: Mapping[str, str], count: int
    ) -> ContainerPool:
        """Start the containers of a deployment.

        Without files, `count` new containers follow tables. With files, one container is started,
        or the running one is returned.

        Raises:
            NotReadyError: the container does not answer its ping.
        """
        if FOLLOW_VARIABLE in variables:
            pool = ContainerPool(containers=[])
            self.resize(pool, variables, count)
            return pool
        key = digest_json(
            [{name: digest_bytes(data) for name, data in files.items()}, dict(variables)]
        )
        found = self._running.get(key)
        if found is not None and found.process.poll() is None:
            return ContainerPool(containers=[found])
        container = self._launch(files, variables)
        self._wait_until_ready([container])
        self._running[key] = container
        return ContainerPool(containers=[container])

    def resize(self, pool: ContainerPool, variables: Mapping[str, str], count: int) -> None:
        """Start or end followers until the pool has `count`.

        Raises:
            NotReadyError: one of them does not answer its ping.
        """
        if FOLLOW_VARIABLE not in variables:
            return
        for container in pool.containers[count:]:
            container.end(signal.SIGTERM)
        del pool.containers[count:]
        given = {**self.follower_environment, **variables}
        started = [self._launch({}, given) for _ in range(count - len(pool.containers))]
        self._wait_until_ready(started)
        self._followers += started
        pool.containers += started

    def end(self, pool: ContainerPool) -> None:
        """End the followers of a pool."""
        for container in pool.containers:
            if container in self._followers:
                container.end(signal.SIGTERM)

    def _launch(self, files: Mapping[str, bytes], variables: Mapping[str, str]) -> Container:
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
        return Container(port=port, process=process, log=place / "log")

    def _wait_until_ready(self, started: Sequence[Container]) -> None:
        """Wait until all containers answer their ping; end all of them if one does not."""
        deadline = time.monotonic() + self.startup_s
        for container in started:
            while not container.is_ready():
                if time.monotonic() >= deadline or container.process.poll() is not None:
                    for other in started:
                        other.end(signal.SIGKILL)
                        other.process.wait()
                    text = container.log.read_text(encoding="utf-8", errors="replace")
                    raise NotReadyError(text.strip()[-400:])
                time.sleep(0.02)

    def end_followers(self) -> None:
        """End all followers, and wait until they have written their last reports."""
        _end_all(self._followers)
        self._followers.clear()

    def stop(self) -> None:
        _end_all([*self._running.values(), *self._followers])
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_all(containers: Sequence[Container]) -> None:
    for container in containers:
        container.end(signal.SIGTERM)
    for container in containers:
        try:
            container.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            container.end(signal.SIGKILL)
            container.process.wait()
