"""Commands that use a cloud, run by a user without access to the cloud.

The tests check messages and exit codes.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.attestation import sign_record
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout import Action, ActionKind, Roles, build_split_state
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.ports import Signer
from onnx_ops.release.effects import perform_action
from onnx_ops.release.journal import Journal
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.testing.fakes import FakeProvider, FakeRegistry
from tests.release.release_parts import config_of, override_record
from tests.support.clouds.sagemaker import SETTINGS
from tests.support.command import run_command
from tests.support.endpoints import fileless_deployment
from tests.support.extras import require
from tests.support.must import must
from tests.support.processes import end_all

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

AZURE: Mapping[str, Json] = {
    "subscription": "00000000-0000-0000-0000-000000000001",
    "resource_group": "group",
    "workspace": "workspace",
    "image": "registry.example/onnx-ops:1",
    "instance_type": "Standard_DS3_v2",
    "traffic": "native",
}
REMEDIES = {"sagemaker": "AWS_PROFILE", "region": "AWS_DEFAULT_REGION", "azureml": "az login"}
COMMANDS = {
    "status": ["status", "digits"],
    "orphans": ["status", "--orphans"],
    "rollback": ["rollback", "digits", "--reason", "test"],
    "reconcile": ["reconcile"],
    "prune": ["prune", "m"],
    "delete": ["delete", "digits", "--yes"],
    "doctor": ["doctor", "--provider"],
}


def deployment(version: str, signer: Signer) -> Deployment:
    plain = fileless_deployment(f"v{version}")
    return replace(plain, authority=sign_record(override_record(plain), signer).envelope)


@pytest.fixture(params=REMEDIES)
def stranger(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Provide a project on a machine that has lost its credentials or region.

    Its endpoint has changed from version 1 to 2.
    """
    monkeypatch.chdir(tmp_path)
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    # The SDK would set the variable without restoring it.
    monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "AzureCloud")
    # A rollback reports after four seconds. On a busy machine, the import of the SDK can take that
    # long, so the SDK is imported before.
    for name in ("azure.ai.ml", "azure.identity") if request.param == "azureml" else ("boto3",):
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(name)
    options = AZURE if request.param == "azureml" else SETTINGS
    if request.param == "region":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        options = {**SETTINGS, "region": ""}
    provider = FakeProvider()
    context = replace(open_project(tmp_path).context, provider=lambda _: provider)
    provider_name = "azureml" if request.param == "azureml" else "sagemaker"
    config = replace(config_of("digits"), provider=provider_name, model="m", options=options)
    bind_endpoint(context, config, RolloutPolicy())
    signer = must(context.signer())
    one, two = deployment("1", signer), deployment("2", signer)
    for kind, roles in (
        (ActionKind.FIRST, Roles(stable=one)),
        (ActionKind.FINISH, Roles(stable=two, previous=one)),
    ):
        state = build_split_state(None, must(roles.stable), 100)
        action = Action(kind=kind, state=state, roles=roles, why="test")
        perform_action(Journal.open(context, "digits"), action)
    yield str(request.param)
    # A rollback leaves a process that retries for minutes.
    end_all(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_without_cloud_access_shows_remedy(
    name: str, stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These commands also use the registry, whose database takes seconds to create.
    if name in ("prune", "reconcile"):
        here = open_project()
        there = replace(here, context=replace(here.context, registry=FakeRegistry))
        monkeypatch.setattr("onnx_ops.app.context.open_project", lambda: there)
    command = [*COMMANDS[name]]
    if name == "doctor":
        command.append("azureml" if stranger == "azureml" else "sagemaker")
    done = run_command(*command, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.code in (1, 2, 4, 5), said
    assert "Traceback" not in said
    assert REMEDIES[stranger] in " ".join(said.split()), said
    assert name == "doctor" or "digits" in said


def test_status_as_json_without_cloud_access_prints_one_document(
    stranger: str, tmp_path: Path
) -> None:
    json.loads(run_command("status", "digits", "--json", cwd=tmp_path).stdout)
