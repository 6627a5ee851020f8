"""MLflow's deployments target against a real registry and real endpoint servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.app.context import Project, open_project
from onnx_ops.attestation import sign_record
from onnx_ops.config.targets import TargetFiles
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import EndpointDeleted
from onnx_ops.domain.release import Publication
from onnx_ops.release.journal import Journal, list_bound_endpoints
from onnx_ops.testing.registries import publication

if TYPE_CHECKING:
    from onnx_ops.integrations import mlflow_deployments

MODEL, TARGET = "linear", "cpu-1t"

pytestmark = pytest.mark.services


def signed(project: Project, release: Publication, verdict: Verdict) -> Publication:
    """Return the publication with decisions that the project's own key has signed."""
    signer = project.context.signer()
    assert signer is not None
    target = TargetFiles(project.settings.root).load(TARGET).digest()
    variants = []
    for variant in release.variants:
        record = replace(variant.signed[TARGET].record, target_digest=target, verdict=verdict)
        decision = sign_record(record, signer)
        variants.append(replace(variant, signed={TARGET: decision}))
    return replace(release, variants=tuple(variants))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Yield a project with versions 1 and 2, which passed, and 3, which failed.

    Another model has version 1, which passed.
    """
    root = tmp_path_factory.mktemp("project")
    (root / "configs" / "targets").mkdir(parents=True)
    (root / "configs" / "targets" / f"{TARGET}.yaml").write_text(
        f"name: {TARGET}\nruntime: onnxruntime\n"
    )
    (root / "onnx-ops.toml").write_text("")
    project = open_project(root)
    for seed, verdict in (("a", Verdict.PASS), ("b", Verdict.PASS), ("c", Verdict.FAIL)):
        release = publication(root / "files", model=MODEL, seed=seed, target=TARGET)
        project.context.registry().publish(signed(project, release, verdict))
    other = publication(root / "files", model="another", seed="a", target=TARGET)
    project.context.registry().publish(signed(project, other, Verdict.PASS))
    yield project
    for name in list_bound_endpoints(project.context):
        provider = project.context.provider("local")
        assert isinstance(provider, LocalEndpoints)
        provider.stop(Journal.open(project.context, name).config)


@pytest.fixture
def client(project: Project) -> Iterator[mlflow_deployments.OnnxOpsDeployments]:
    from mlflow.deployments import get_deploy_client

    from onnx_ops.integrations import mlflow_deployments

    made = get_deploy_client(f"onnx-ops:{project.settings.root}")  # type: ignore[no-untyped-call]
    assert isinstance(made, mlflow_deployments.OnnxOpsDeployments)
    yield made
    for entry in made.list_deployments():
        made.delete_deployment(entry["name"])


def slope(version: str, project: Project) -> float:
    """Return the factor of the version."""
    seed = {"1": "a", "2": "b"}[version]
    return 1.0 + int(digest_bytes(seed.encode())[-4:], 16) + len("fp32")


def test_get_deploy_client_with_or_without_project_path_returns_plugin(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.deployments import get_deploy_client

    from onnx_ops.integrations import mlflow_deployments

    monkeypatch.chdir(project.settings.root)
    for uri in (
        "onnx-ops",
        f"onnx-ops:{project.settings.root}",
        f"onnx-ops://{project.settings.root}",
    ):
        found = get_deploy_client(uri)  # type: ignore[no-untyped-call]
        assert isinstance(found, mlflow_deployments.OnnxOpsDeployments)
        assert found.list_deployments() == []
    assert "target" in mlflow_deployments.target_help()


def test_deployment_client_creates_updates_and_deletes_endpoint(
    client: mlflow_deployments.OnnxOpsDeployments, project: Project
) -> None:
    made = client.create_deployment(
        "first", f"models:/{MODEL}/1", config={"target": TARGET, "reason": "new"}
    )
    assert made == {"name": "first", "flavor": "onnx"}
    described = client.get_deployment("first")
    assert (described["name"], described["version"], described["traffic"]) == (
        "first",
        "1",
        {"v1": 100},
    )
    assert [entry["name"] for entry in client.list_deployments()] == ["first"]
    rows = np.array([[1.0, 2.0]], np.float32)
    for inputs in ({"x": rows}, {"x": rows.tolist()}):
        answer = client.predict("first", inputs)
        assert answer["predictions"]["y"] == (rows * np.float32(slope("1", project))).tolist()
    assert client.update_deployment("first", f"models:/{MODEL}/2")["name"] == "first"
    assert client.get_deployment("first")["version"] == "2"
    assert (
        client.predict("first", {"x": rows})["predictions"]["y"]
        == (rows * np.float32(slope("2", project))).tolist()
    )
    assert (
        client.update_deployment("first", f"models:/{MODEL}@champion-{TARGET}")["name"] == "first"
    )
    client.delete_deployment("first")
    client.delete_deployment("first")
    assert client.list_deployments() == []


@pytest.mark.parametrize(
    ("uri", "config", "code", "expected"),
    [
        (
            f"models:/{MODEL}/3",
            {"target": TARGET},
            "PERMISSION_DENIED",
            "the verdict on cpu-1t is FAIL",
        ),
        (f"models:/{MODEL}/9", {"target": TARGET}, "RESOURCE_DOES_NOT_EXIST", "has no version"),
        (f"models:/{MODEL}@nobody", {"target": TARGET}, "RESOURCE_DOES_NOT_EXIST", "no alias"),
        (
            "runs:/1234/model",
            {"target": TARGET},
            "INVALID_PARAMETER_VALUE",
            "does not name a registered version",
        ),
        (f"models:/{MODEL}/1", {}, "INVALID_PARAMETER_VALUE", "needs a target"),
        (f"models:/{MODEL}/1", {"target": "tpu"}, "RESOURCE_DOES_NOT_EXIST", "tpu"),
        (f"models:/{MODEL}/1", {"target": TARGET, "prot": "1"}, "INVALID_PARAMETER_VALUE", "prot"),
    ],
)
def test_create_deployment_with_refused_or_invalid_request_binds_nothing(
    client: mlflow_deployments.OnnxOpsDeployments,
    uri: str,
    config: dict[str, str],
    code: str,
    expected: str,
) -> None:
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match=expected) as caught:
        client.create_deployment("refused", uri, config=config)
    assert caught.value.error_code == code
    assert client.list_deployments() == []


def test_deployment_client_with_forbidden_change_of_endpoint_raises_mlflow_exception(
    client: mlflow_deployments.OnnxOpsDeployments,
) -> None:
    from mlflow.exceptions import MlflowException

    client.create_deployment("fixed", f"models:/{MODEL}/1", config={"target": TARGET})
    for config, expected in (
        ({"target": "cuda"}, "target and the provider of an endpoint cannot be changed"),
        ({"port": "80"}, "options of fixed"),
    ):
        with pytest.raises(MlflowException, match=expected):
            client.update_deployment("fixed", f"models:/{MODEL}/1", config=config)
    with pytest.raises(MlflowException, match="the verdict"):
        client.update_deployment("fixed", f"models:/{MODEL}/3")
    with pytest.raises(MlflowException, match=f"serves {MODEL}, not another"):
        client.update_deployment("fixed", "models:/another/1")
    assert client.get_deployment("fixed")["version"] == "1"
    with pytest.raises(MlflowException, match=f"update -t onnx-ops:.* -m models:/{MODEL}/1"):
        client.create_deployment("fixed", f"models:/{MODEL}/1", config={"target": TARGET})


def test_create_deployment_during_deletion_of_its_name_names_delete_command(
    client: mlflow_deployments.OnnxOpsDeployments, project: Project
) -> None:
    from mlflow.exceptions import MlflowException

    client.create_deployment("ended", f"models:/{MODEL}/1", config={"target": TARGET})
    Journal.update(project.context, "ended", lambda journal: journal.append(EndpointDeleted()))
    with pytest.raises(MlflowException, match="onnx-ops delete ended"):
        client.create_deployment("ended", f"models:/{MODEL}/1", config={"target": TARGET})


def test_deployment_client_with_unknown_endpoint_raises_resource_does_not_exist(
    client: mlflow_deployments.OnnxOpsDeployments,
) -> None:
    from mlflow.exceptions import MlflowException

    for call in (
        lambda: client.get_deployment("nothing"),
        lambda: client.predict("nothing", {"x": [[1.0, 2.0]]}),
    ):
        with pytest.raises(MlflowException) as caught:
            call()
        assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_predict_with_unknown_input_raises_mlflow_exception(
    client: mlflow_deployments.OnnxOpsDeployments,
) -> None:
    import pandas as pd
    from mlflow.exceptions import MlflowException

    client.create_deployment("asked", f"models:/{MODEL}/1", config={"target": TARGET})
    with pytest.raises(MlflowException, match="400"):
        client.predict("asked", pd.DataFrame({"z": [1.0]}))


def test_mlflow_deployments_command_line_manages_endpoint(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner
    from mlflow.deployments.cli import commands

    (tmp_path / "rows.json").write_text(json.dumps({"x": [[1.0, 2.0]]}))
    monkeypatch.chdir(project.settings.root)

    def mlflow(*arguments: str | Path) -> str:
        done = CliRunner().invoke(commands, [str(part) for part in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    named = ["-t", "onnx-ops", "--name", "shell"]
    assert "onnx deployment shell is created" in mlflow(
        "create", *named, "-m", f"models:/{MODEL}/1", "-C", f"target={TARGET}"
    )
    assert json.loads(mlflow("predict", *named, "-I", tmp_path / "rows.json"))["predictions"]
    assert "version: 1" in mlflow("get", *named)
    assert "is deleted" in mlflow("delete", *named)
