"""Rollback under a client's eyes, with the registry up and with it stopped."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from urllib.parse import urlsplit

import pytest

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from tests.e2e.e2e_project import ONLY_FP32, SECOND, Project
from tests.support.mlflow_server import mlflow_server
from tests.support.ports import free_port
from tests.support.processes import until

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
def test_rollback_with_the_registry_stopped_and_the_aliases_follow(twice: Project) -> None:
    port = free_port()
    twice.environ["ONNX_OPS_TRACKING_URI"] = f"http://127.0.0.1:{port}"
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
    with mlflow_server(twice.root / ".onnx-ops", artifacts="mlartifacts", port=port) as url:
        registry = MlflowRegistry(url)
        assert registry.aliases("digits-mlp")["champion-cpu-1t"] == new.removeprefix("v")
        twice.document("reconcile", "digits")
        aliases = registry.aliases("digits-mlp")
        assert aliases["champion-cpu-1t"] == old.removeprefix("v")
        assert "challenger-cpu-1t" not in aliases
        assert twice.status()["registry_pending"] == {}
        refused = twice.run(ONLY_FP32, SECOND, code=5)
        assert any("rolled this release back" in error["what"] for error in refused["errors"].values())
        assert registry.aliases("digits-mlp")["champion-cpu-1t"] == old.removeprefix("v")
