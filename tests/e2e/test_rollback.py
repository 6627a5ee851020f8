"""Rollback under a client's load, with the registry running and stopped."""

from __future__ import annotations

import json
import re
import time
import urllib.request

import pytest

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from tests.e2e.e2e_project import ONLY_FP32, SECOND, Project
from tests.support.load import LoadPlan, LoadProcess, Payload, Records
from tests.support.mlflow_server import mlflow_server
from tests.support.ports import free_port
from tests.support.processes import until

pytestmark = pytest.mark.services

ROWS = {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]}


def load(project: Project) -> LoadProcess:
    """Start a client that sends requests to the endpoint repeatedly."""
    url = f"{project.status()['address']}/v2/models/digits-mlp/infer"
    return LoadProcess(
        LoadPlan(url=url, payloads=[Payload(body=json.dumps(ROWS).encode())], seconds=300.0)
    )


def answered(records: Records, *, after_ns: int) -> set[str]:
    """Return the deployments that answered requests sent after this moment."""
    return {records.names[index] for index in records.deployment[records.sent_ns > after_ns]}


def wait_for_answers(project: Project, name: str) -> None:
    """Wait until the server counts twenty more answers of a deployment."""
    page, line = (
        f"{project.status()['address']}/metrics",
        f'onnx_ops_requests_total{{.*deployment="{name}".*}} (.*)',
    )

    def count() -> float:
        with urllib.request.urlopen(page, timeout=10) as answer:
            return sum(map(float, re.findall(line, answer.read().decode())))

    before = count()
    until(lambda: count() >= before + 20, what=f"answers by {name}")


def names(project: Project) -> tuple[str, str]:
    """Return the deployments of both releases, the older one first."""
    roles = project.status()["roles"]
    return roles["previous"]["name"], roles["stable"]["name"]


def test_rollback_under_load_fails_no_request_and_serves_old_version(twice: Project) -> None:
    old, new = names(twice)
    with load(twice) as clients:
        wait_for_answers(twice, new)
        rolled = twice.document(
            "rollback", "digits", "--reason", "wrong on sevens", "--actor", "night shift"
        )
        rolled_ns = time.monotonic_ns()
        wait_for_answers(twice, old)
        records = clients.stop()
    assert records.failures() == {}
    assert set(records.by_deployment()) == {old, new}
    assert answered(records, after_ns=rolled_ns) == {old}, (
        "no request goes to the version that was rolled back"
    )
    assert (rolled["moved_from"], rolled["moved_to"]) == (new, old)
    (line,) = [e for e in twice.document("history", "digits") if e["what"].startswith("rollback")]
    assert line["actor"] == "night shift"
    assert line["why"] == "wrong on sevens"
    assert f"{new} -> {old}" in line["what"]
    assert line["at"].startswith("20")


def test_rollback_from_other_state_folder_stays_pending_until_reconciled(twice: Project) -> None:
    old, new = names(twice)
    state, other = twice.root / ".onnx-ops", twice.root / "other"
    shared = {
        "ONNX_OPS_STATE": str(other),
        "ONNX_OPS_LEDGER": str(state / "ledger"),
        "ONNX_OPS_STORE": str(state / "store"),
        "ONNX_OPS_SIGNING_KEY": str(state / "keys" / "signing.pem"),
        "ONNX_OPS_TRACKING_URI": f"sqlite:///{state / 'mlflow.db'}",
    }
    error = twice.document("rollback", "digits", "--reason", "from afar", code=4, environ=shared)
    assert "accepted, still pending" in json.dumps(error)
    assert "never started from this state folder" in json.dumps(error)
    assert "would start another server" in error["remedy"]
    assert not (other / "endpoints" / "digits").exists(), "a second server was started"
    assert twice.status()["traffic"] == {old: 0, new: 100}
    assert twice.command("reconcile", "digits").code == 0
    assert twice.status()["traffic"] == {old: 100}


@pytest.mark.nightly
def test_rollback_with_stopped_registry_leaves_aliases_pending_until_reconciled(
    twice: Project,
) -> None:
    port = free_port()
    twice.environ["ONNX_OPS_TRACKING_URI"] = f"http://127.0.0.1:{port}"
    old, new = names(twice)
    with load(twice) as clients:
        rolled = twice.document("rollback", "digits", "--wait", "--reason", "night")
        rolled_ns = time.monotonic_ns()
        wait_for_answers(twice, old)
        records = clients.stop()
    assert records.failures() == {}
    assert answered(records, after_ns=rolled_ns) == {old}
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
        assert any(
            "rolled this release back" in error["what"] for error in refused["errors"].values()
        )
        assert registry.aliases("digits-mlp")["champion-cpu-1t"] == old.removeprefix("v")
