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
from tests.e2e.e2e_project import Project, until
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
    """A real `mlflow server` on SQLite, which can be stopped and started on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [Path(sys.executable).with_name("mlflow"), "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self._folder / 'mlflow.db'}", "--workers", "1"]
        artifacts = ["--artifacts-destination", str(self._folder / "artifacts")]
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
def mlflow_server(tmp_path: Path) -> Iterator[MlflowServer]:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = MlflowServer(folder)
    server.start()
    yield server
    server.stop()


def two_releases(project: Project) -> tuple[str, str]:
    project.run("quantize=[]")
    project.run("quantize=[]", "train.with.seed=8")
    roles = project.document("status", "digits")[0]["roles"]
    return roles["previous"]["name"], roles["stable"]["name"]


def test_rollback_under_load_fails_no_request_and_the_old_version_answers(fresh_project: Project) -> None:
    old, new = two_releases(fresh_project)
    address = fresh_project.document("status", "digits")[0]["address"]
    with Client(address) as client:
        until(lambda: client.last == new, what="the new version answers")
        rolled = fresh_project.document("rollback", "digits", "--reason", "wrong on sevens", "--actor", "night shift")
        answered = client.answers[old]
        until(lambda: client.answers[old] > answered + 20, what="answers by the old version")
        fresh = client.answers[new]
        until(lambda: client.answers[old] > answered + 60, what="more answers by the old version")
        assert client.answers[new] == fresh, "no request goes to the version that was rolled back"
    assert client.errors == []
    assert (rolled["moved_from"], rolled["moved_to"]) == (new, old)
    (line,) = [e for e in fresh_project.document("history", "digits") if e["what"].startswith("rollback")]
    assert line["actor"] == "night shift"
    assert line["why"] == "wrong on sevens"
    assert f"{new} -> {old}" in line["what"]
    assert line["at"].startswith("20")


def test_rollback_with_the_registry_stopped_and_the_aliases_follow(
    fresh_project: Project, mlflow_server: MlflowServer
) -> None:
    fresh_project.environ["ONNX_OPS_TRACKING_URI"] = mlflow_server.uri
    old, new = two_releases(fresh_project)
    registry = MlflowRegistry(mlflow_server.uri)
    assert registry.aliases("digits-mlp")["champion-cpu-1t"] == new.removeprefix("v")
    mlflow_server.stop()
    address = fresh_project.document("status", "digits")[0]["address"]
    with Client(address) as client:
        rolled = fresh_project.document("rollback", "digits", "--wait", "--reason", "night")
        until(lambda: client.last == old, what="the old version answers")
    assert client.errors == []
    assert rolled["registry_pending"] is True
    (status,) = fresh_project.document("status", "digits")
    assert status["traffic"][old] == 100
    assert status["registry_pending"]["champion-cpu-1t"] == old.removeprefix("v")
    mlflow_server.start()
    fresh_project.document("reconcile", "digits")
    aliases = registry.aliases("digits-mlp")
    assert aliases["champion-cpu-1t"] == old.removeprefix("v")
    assert "challenger-cpu-1t" not in aliases
    assert fresh_project.document("status", "digits")[0]["registry_pending"] == {}
    refused = fresh_project.run("quantize=[]", "train.with.seed=8", code=5)
    assert any("does not come back by itself" in error["what"] for error in refused["errors"].values())
    assert registry.aliases("digits-mlp")["champion-cpu-1t"] == old.removeprefix("v")
