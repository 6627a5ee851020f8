"""A real `mlflow server --app-name onnx-ops` with basic-auth.

The tests check which requests it refuses over HTTP, and for which users.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.adapters.registries.mlflow_tags import DECISION, DIGEST
from onnx_ops.attestation import TrustedKeys, sign_record
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import RefusedError
from onnx_ops.release.decision_policy import read_override
from onnx_ops.testing.registries import publication
from tests.integrations.veto_parts import CHALLENGER, CHAMPION, SLOW, TARGET, judged
from tests.integrations.veto_process import (
    PASSWORD,
    GuardedServer,
    server_command,
    server_environment,
)

pytestmark = pytest.mark.services

ALIAS = "/api/2.0/mlflow/registered-models/alias"
SET_TAG, DELETE_TAG = (
    "/api/2.0/mlflow/model-versions/set-tag",
    "/api/2.0/mlflow/model-versions/delete-tag",
)
UI = "/ajax-api"


@pytest.fixture
def registry(
    veto_server: GuardedServer, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], MlflowRegistry]:
    """Return the registry as a user reaches it."""

    def reach(user: str) -> MlflowRegistry:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        return MlflowRegistry(veto_server.url)

    return reach


@pytest.fixture
def versions(
    veto_server: GuardedServer,
    registry: Callable[[str], MlflowRegistry],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> tuple[VersionRecord, VersionRecord]:
    """Return a version that passed and one that failed, of a model for this test only."""
    model = re.sub(r"[^a-z0-9]+", "-", request.node.name).strip("-")
    reached = registry("release-bot")
    read = []
    for seed, verdict in (("a", Verdict.PASS), ("b", Verdict.FAIL)):
        release = publication(tmp_path, model=model, seed=seed, verdict=verdict)
        version = reached.publish(judged(release, veto_server.signer, verdict))["fp32"]
        read.append(reached.version(model, version))
    return read[0], read[1]


def alias(record: VersionRecord, name: str = CHAMPION) -> dict[str, str]:
    return {"name": record.model, "alias": name, "version": record.version}


def tag(record: VersionRecord, key: str, value: str) -> dict[str, str]:
    return {"name": record.model, "version": record.version, "key": key, "value": value}


@pytest.mark.parametrize("path", [ALIAS, ALIAS.replace("/api", UI)])
def test_set_alias_through_ui_and_api_returns_same_refusal(
    veto_server: GuardedServer, versions: tuple[VersionRecord, VersionRecord], path: str
) -> None:
    passed, failed = versions
    assert veto_server.call("alice", "POST", path, alias(passed)) == (200, {})
    status, answer = veto_server.call("alice", "POST", path, alias(failed))
    assert (status, answer["error_code"]) == (403, "PERMISSION_DENIED")
    model, number = failed.model, failed.version
    for part in (CHAMPION, f"version {number} of {model}", "cpu-1t is FAIL", f"latency: {SLOW}"):
        assert part in answer["message"]
    for remedy in (
        f"`onnx-ops explain {model}/{number} --target cpu-1t`",
        "set tag override.cpu-1t",
    ):
        assert remedy in answer["message"]
    status, answer = veto_server.call("bob", "POST", path, alias(passed))
    assert (status, answer["error_code"]) == (403, "PERMISSION_DENIED")
    for part in ("policy.yaml:3", "only alice, release-bot", "champion-*", "you are bob"):
        assert part in answer["message"]
    assert veto_server.call("bob", "POST", path, alias(passed, CHALLENGER)) == (200, {})
    assert veto_server.call("bob", "POST", path, alias(failed, "mine")) == (200, {})


def test_set_alias_with_other_request_spelling_is_refused(
    veto_server: GuardedServer, versions: tuple[VersionRecord, VersionRecord]
) -> None:
    """The guard must understand every spelling that MLflow's handler understands."""
    _, failed = versions
    asked = alias(failed)
    for document in (
        json.dumps(asked),
        {**asked, "version": f"0{failed.version}"},
        {**asked, "more": 1},
    ):
        status, answer = veto_server.call("alice", "POST", ALIAS, document)
        assert status in (400, 403), answer
    status, answer = veto_server.call(
        "alice", "POST", "//api/2.0/mlflow/registered-models/alias", asked
    )
    assert status != 200
    _, found = veto_server.call(
        "alice", "GET", f"/api/2.0/mlflow/registered-models/get?name={failed.model}"
    )
    assert "aliases" not in found["registered_model"]


def test_request_without_credentials_returns_401(veto_server: GuardedServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401") as refusal:
        urllib.request.urlopen(f"{veto_server.url}{ALIAS}?name=x&alias=y", timeout=60)
    refusal.value.close()


def test_registry_client_set_alias_raises_refusal_of_server(
    registry: Callable[[str], MlflowRegistry], versions: tuple[VersionRecord, VersionRecord]
) -> None:
    _, failed = versions
    with pytest.raises(RefusedError, match="the verdict on cpu-1t is FAIL"):
        registry("alice").set_alias(failed.model, CHALLENGER, failed.version)


def test_forging_or_deletion_of_decision_tag_returns_403(
    veto_server: GuardedServer, versions: tuple[VersionRecord, VersionRecord]
) -> None:
    passed, failed = versions
    key = f"{DECISION}{TARGET}"
    lie = replace(failed.decisions[TARGET].record, verdict=Verdict.PASS, sequence=99)
    forged = replace(failed.decisions[TARGET], record=lie)
    for value in (codec.dumps(forged).decode(), passed.tags[key], '{"record":NaN}'):
        status, answer = veto_server.call("alice", "POST", SET_TAG, tag(failed, key, value))
        assert status == 403, answer
    status, answer = veto_server.call("alice", "DELETE", DELETE_TAG, tag(failed, key, ""))
    assert status == 403, answer


def test_set_alias_on_copied_version_with_earlier_pass_returns_403(
    veto_server: GuardedServer,
    versions: tuple[VersionRecord, VersionRecord],
    registry: Callable[[str], MlflowRegistry],
) -> None:
    _, failed = versions
    earlier = replace(
        failed.decisions[TARGET].record, verdict=Verdict.PASS, verdicts={}, sequence=1
    )
    tags = {
        **failed.tags,
        f"{DECISION}{TARGET}": codec.dumps(
            sign_record(earlier, veto_server.signer).envelope
        ).decode(),
    }
    source = str(registry("alice")._version(failed.model, failed.version).source)
    asked = {
        "name": failed.model,
        "source": source,
        "model_id": source.removeprefix("models:/"),
        "tags": [{"key": key, "value": value} for key, value in tags.items()],
    }
    status, answer = veto_server.call(
        "alice", "POST", "/api/2.0/mlflow/model-versions/create", asked
    )
    assert status == 200, answer
    copy = replace(failed, version=str(answer["model_version"]["version"]))
    status, answer = veto_server.call("alice", "POST", ALIAS, alias(copy))
    assert status == 403
    assert "is FAIL" in answer["message"]


def test_delete_rename_and_retag_of_guarded_version_return_403(
    veto_server: GuardedServer, versions: tuple[VersionRecord, VersionRecord]
) -> None:
    passed, _ = versions
    assert veto_server.call("alice", "POST", ALIAS, alias(passed))[0] == 200
    models, number = "/api/2.0/mlflow/registered-models", "/api/2.0/mlflow/model-versions"
    ways: list[tuple[str, str, Any, str]] = [
        (
            "DELETE",
            f"{number}/delete",
            {"name": passed.model, "version": passed.version},
            f"it has {CHAMPION}",
        ),
        (
            "DELETE",
            f"{models}/delete",
            {"name": passed.model},
            f"{CHAMPION} on version {passed.version}",
        ),
        (
            "POST",
            f"{models}/rename",
            {"name": passed.model, "new_name": "other"},
            "refer to the model by this name",
        ),
        (
            "POST",
            SET_TAG,
            tag(passed, DIGEST, "sha256:" + "0" * 64),
            "the tags of a registration cannot be changed",
        ),
    ]
    for method, path, document, reason in ways:
        for prefix in ("/api", UI):
            status, answer = veto_server.call(
                "release-bot", method, path.replace("/api", prefix), document
            )
            assert (status, answer["error_code"]) == (403, "PERMISSION_DENIED")
            assert reason in answer["message"]
    status, answer = veto_server.call(
        "bob", "DELETE", ALIAS, {"name": passed.model, "alias": CHAMPION}
    )
    assert (status, "you are bob" in answer["message"]) == (403, True)
    assert (
        veto_server.call("alice", "DELETE", ALIAS, {"name": passed.model, "alias": CHAMPION})[0]
        == 200
    )


def test_changes_of_model_not_registered_by_onnx_ops_return_200(veto_server: GuardedServer) -> None:
    models, number = "/api/2.0/mlflow/registered-models", "/api/2.0/mlflow/model-versions"
    assert veto_server.call("bob", "POST", f"{models}/create", {"name": "it's theirs"})[0] == 200
    asked = {"name": "it's theirs", "source": "s3://theirs/x"}
    status, answer = veto_server.call("bob", "POST", f"{number}/create", asked)
    assert status == 200, answer
    document = {"name": "it's theirs", "alias": CHAMPION, "version": "1"}
    assert veto_server.call("bob", "POST", ALIAS, document) == (200, {})
    renamed = {"name": "it's theirs", "new_name": "theirs still"}
    assert veto_server.call("bob", "POST", f"{models}/rename", renamed)[0] == 200
    assert veto_server.call("bob", "DELETE", f"{models}/delete", {"name": "theirs still"})[0] == 200


def test_override_by_permitted_user_is_signed_by_server(
    veto_server: GuardedServer,
    registry: Callable[[str], MlflowRegistry],
    versions: tuple[VersionRecord, VersionRecord],
) -> None:
    _, failed = versions
    reason = tag(failed, f"override.{TARGET}", "the old one is worse")
    status, answer = veto_server.call("bob", "POST", SET_TAG, reason)
    assert status == 403
    for part in ("policy.yaml:6", "only alice to override", "you are bob"):
        assert part in answer["message"]
    assert veto_server.call("alice", "POST", SET_TAG.replace("/api", UI), reason) == (200, {})
    assert veto_server.call("bob", "POST", ALIAS, alias(failed, CHALLENGER)) == (200, {})
    read = registry("release-bot").version(failed.model, failed.version)
    signed = read_override(read, TARGET, TrustedKeys(veto_server.home / "keys"))
    assert signed is not None
    assert (signed.record.by, signed.record.reason) == ("alice", "the old one is worse")


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ONNX_OPS_BASIC_AUTH": "false"}, "the policy names users (alice, bob, release-bot)"),
        ({"MLFLOW_FLASK_SERVER_SECRET_KEY": ""}, "secret key"),
    ],
)
def test_server_start_with_invalid_configuration_exits_1(
    veto_home: Path, changes: dict[str, str], reason: str
) -> None:
    done = subprocess.run(
        server_command(veto_home, 1),
        cwd=veto_home,
        env=server_environment(veto_home, **changes),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "onnx-ops refuses to start MLflow" in done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_server_start_with_mlflow_without_guarded_handler_exits_1(veto_home: Path) -> None:
    """The look-up of the application is that of MLflow's server, before it starts workers."""
    program = (
        "from mlflow.server import _is_factory, app\n"
        "del app.view_functions['_set_model_version_tag']\n"
        "_is_factory('onnx_ops.integrations.mlflow_app:create_app')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=server_environment(veto_home, ONNX_OPS_BASIC_AUTH="", ONNX_OPS_PROMOTION_POLICY=""),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "onnx-ops refuses to start MLflow" in done.stderr
    assert "it lacks _set_model_version_tag" in done.stderr


@pytest.mark.nightly
def test_graphql_schema_has_no_registry_mutation() -> None:
    """If a later MLflow adds such mutations, the guard must check them too."""
    program = (
        "from mlflow.server.graphql.graphql_schema_extensions import schema\n"
        "print(sorted(schema.graphql_schema.mutation_type.fields))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "['mlflowSearchDatasets', 'mlflowSearchRuns', 'testMutation']"
