"""Rollback under a client's eyes, with the registry up and with it stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from tests.e2e.e2e_project import ONLY_FP32, SECOND, Project, until
from tests.support.ports import free_port

pytestmark = pytest.mark.services

ROWS = {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]}


class Client:
    """Asks the endpoint again and again on one connection, and counts who answered and what went wrong."""

    def __init__(self, address: str) -> None:
        self._place = urlsplit(address)
        self._stop = threading.Event()
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self.last = ""
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        until(lambda: self.answers, what="a first answer")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        body = json.dumps(ROWS)
        connection = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=30)
        while not self._stop.is_set():
            try:
                connection.request("POST", "/v2/models/digits-mlp/infer", body, {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
                continue
            if response.status != 200:
                self.errors.append(f"status {response.status}")
            self.last = response.headers.get("x-onnx-ops-deployment", "")
            self.answers[self.last] += 1
        connection.close()


class MlflowServer:
    """A real `mlflow server` on a project's SQLite file; it is down until it is started."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command: list[str | Path] = [
            Path(sys.executable).with_name("mlflow"),
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        store = ["--backend-store-uri", f"sqlite:///{self._state / 'mlflow.db'}", "--workers", "1"]
        artifacts = ["--artifacts-destination", str(self._state / "mlartifacts")]
        environ = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self._process = subprocess.Popen(
            [*command, *store, *artifacts],
            env={**os.environ, **environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(self._healthy, seconds=180, what="mlflow server")

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@pytest.fixture
def mlflow_server(twice: Project) -> Iterator[MlflowServer]:
    server = MlflowServer(twice.root / ".onnx-ops")
    yield server
    server.stop()


def names(project: Project) -> tuple[str, str]:
    """The deployments of both releases, the older one first."""
    roles = project.status()["roles"]
    return roles["previous"]["name"], roles["stable"]["name"]


def test_rollback_under_load_fails_no_request_and_the_old_version_answers(twice: Project) -> None:
    old, new = names(twice)
    address = twice.status()["address"]
    with Client(address) as client:
        until(lambda: client.last == new, what="the new version answers")
        rolled = twice.document("rollback", "digits", "--reason", "wrong on sevens", "--actor", "night shift")
        answered = client.answers[old]
        until(lambda: client.answers[old] > answered + 20, what="answers by the old version")
        fresh = client.answers[new]
        until(lambda: client.answers[old] > answered + 60, what="more answers by the old version")
        assert client.answers[new] == fresh, "no request goes to the version that was rolled back"
    assert client.errors == []
    assert (rolled["moved_from"], rolled["moved_to"]) == (new, old)
    (line,) = [e for e in twice.document("history", "digits") if e["what"].startswith("rollback")]
    assert line["actor"] == "night shift"
    assert line["why"] == "wrong on sevens"
    assert f"{new} -> {old}" in line["what"]
    assert line["at"].startswith("20")


@pytest.mark.nightly
def test_rollback_with_the_registry_stopped_and_the_aliases_follow(twice: Project, mlflow_server: MlflowServer) -> None:
    twice.environ["ONNX_OPS_TRACKING_URI"] = mlflow_server.uri
    old, new = names(twice)
    address = twice.status()["address"]
    with Client(address) as client:
        until(lambda: client.last == new, what="the new version answers")
        rolled = twice.document("rollback", "digits", "--wait", "--reason", "night")
        until(lambda: client.last == old, what="the old version answers")
    assert client.errors == []
    assert rolled["registry_pending"] is True
    status = twice.status()
    assert status["traffic"][old] == 100
    assert status["registry_pending"]["champion-cpu-1t"] == old.removeprefix("v")
    mlflow_server.start()
    registry = MlflowRegistry(mlflow_server.uri)
    assert registry.aliases("digits-mlp")["champion-cpu-1t"] == new.removeprefix("v")
    twice.document("reconcile", "digits")
    aliases = registry.aliases("digits-mlp")
    assert aliases["champion-cpu-1t"] == old.removeprefix("v")
    assert "challenger-cpu-1t" not in aliases
    assert twice.status()["registry_pending"] == {}
    refused = twice.run(ONLY_FP32, SECOND, code=5)
    assert any("rolled this release back" in error["what"] for error in refused["errors"].values())
    assert registry.aliases("digits-mlp")["champion-cpu-1t"] == old.removeprefix("v")
