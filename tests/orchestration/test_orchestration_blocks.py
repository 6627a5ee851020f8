"""Blocks: Prefect's own conformance suite, and the values that flows get."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr, ValidationError

from onnx_ops.app.project import check
from onnx_ops.errors import ConfigError, ServiceUnavailableError, UserError
from onnx_ops.orchestration.events import NAME

if TYPE_CHECKING:
    from onnx_ops.orchestration.blocks import (
        EndpointAccess,
        ModelRegistry,
        NotificationTarget,
        TargetDefinitions,
    )

CHECKS = (
    "test_has_a_description",
    "test_has_a_documentation_url",
    "test_all_fields_have_a_description",
    "test_has_a_valid_code_example",
    "test_has_a_valid_image",
)


class TestConformance:
    """Prefect's suite, with a local picture as the logo.

    The suite opens the logo's address, and there is no network here.
    """

    @pytest.fixture(autouse=True)
    def logo(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from PIL import Image
        from prefect.testing.standard_test_suites import blocks as suites

        def opened(address: str) -> io.BytesIO:
            assert address.startswith("https://")
            picture = io.BytesIO()
            Image.new("RGB", (256, 256)).save(picture, "PNG")
            return io.BytesIO(picture.getvalue())

        monkeypatch.setattr(suites, "urlopen", opened)

    @pytest.mark.parametrize(
        "name", ["ModelRegistry", "EndpointAccess", "NotificationTarget", "TargetDefinitions"]
    )
    @pytest.mark.parametrize("check", CHECKS)
    def test_block_passes_prefect_conformance_check(self, name: str, check: str) -> None:
        from prefect.testing.standard_test_suites import blocks as suites

        from onnx_ops.orchestration import blocks

        getattr(suites.BlockStandardTestSuite, check)(self, getattr(blocks, name))

    def test_checks_cover_whole_prefect_block_suite(self) -> None:
        from prefect.testing.standard_test_suites import blocks as suites

        assert {
            name for name in dir(suites.BlockStandardTestSuite) if name.startswith("test_")
        } == set(CHECKS)


def registry() -> ModelRegistry:
    from onnx_ops.orchestration.blocks import ModelRegistry

    return ModelRegistry(
        tracking_uri="https://mlflow.example", username="me", password=SecretStr("hush")
    )


def access() -> EndpointAccess:
    from onnx_ops.orchestration.blocks import EndpointAccess

    return EndpointAccess(ledger="memory://b/ledger", credentials={"AWS_SECRET_ACCESS_KEY": "hush"})  # type: ignore[arg-type]


def fleet() -> TargetDefinitions:
    from onnx_ops.orchestration.blocks import TargetDefinitions

    return TargetDefinitions(
        targets={"t4": {"providers": [{"name": "CUDAExecutionProvider"}], "pool": "t4"}}
    )


def people() -> NotificationTarget:
    from onnx_ops.orchestration.blocks import NotificationTarget

    return NotificationTarget(notify="webhook", webhook=SecretStr("https://chat.example/hush"))


def test_block_environ_returns_variables_of_settings(tmp_path: Path) -> None:
    assert registry().environ(tmp_path) == {
        "ONNX_OPS_TRACKING_URI": "https://mlflow.example",
        "MLFLOW_TRACKING_USERNAME": "me",
        "MLFLOW_TRACKING_PASSWORD": "hush",
    }
    assert access().environ(tmp_path) == {
        "ONNX_OPS_LEDGER": "memory://b/ledger",
        "AWS_SECRET_ACCESS_KEY": "hush",
    }
    environ = {"ONNX_OPS_NOTIFY": "webhook", "ONNX_OPS_NOTIFY_WEBHOOK": "https://chat.example/hush"}
    assert people().environ(tmp_path) == environ


@pytest.mark.parametrize(
    "name", ["PATH", "PYTHONPATH", "LD_PRELOAD", "AWS_X=1", "AWS_\nA", "ONNX_OPS_SIGNING_KEY"]
)
def test_endpoint_access_block_with_disallowed_credential_name_raises_validation_error(
    name: str,
) -> None:
    from onnx_ops.orchestration.blocks import EndpointAccess

    with pytest.raises(ValidationError, match="credentials must be named AWS_"):
        EndpointAccess(credentials={name: "x"})  # type: ignore[arg-type]


def test_block_repr_with_secret_hides_it() -> None:
    assert "hush" not in "".join(map(repr, (registry(), access(), people())))


@pytest.fixture(scope="module")
def saved(prefect_server: None) -> None:
    for block in (registry(), access(), people(), fleet()):
        block.save("prod", overwrite=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs" / "targets").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(("ONNX_OPS_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROD = (
    "onnx-ops-registry/prod",
    "onnx-ops-endpoints/prod",
    "onnx-ops-notifications/prod",
    "onnx-ops-targets/prod",
)


def test_project_of_blocks_applies_settings_and_restores_environment(
    saved: None, here: Path
) -> None:
    from onnx_ops.orchestration.environment import project_of

    before = dict(os.environ)
    with project_of(PROD) as project:
        assert project.settings.tracking_uri == "https://mlflow.example"
        assert project.settings.ledger == "memory://b/ledger"
        assert list(project.context.notifiers()) == [NAME, "webhook"]
        child = subprocess.run(
            ["printenv", "AWS_SECRET_ACCESS_KEY"], capture_output=True, text=True, check=True
        )
        assert child.stdout.strip() == "hush"
        assert project.targets.names() == ("t4",)
        assert project.targets.load("t4").pool == "t4"
        shared = project.settings.shared_targets
        assert shared is not None
    assert not shared.exists()
    assert dict(os.environ) == before


def test_check_of_pipeline_accepts_target_of_target_block_and_rejects_unknown_target(
    saved: None, here: Path
) -> None:
    from onnx_ops.orchestration.environment import project_of

    (here / "data.npz").touch()
    file = here / "configs" / "p.yaml"
    file.write_text(
        "schema: 1\nname: p\nmodel: m.onnx\nexport: {framework: onnx, inputs: "
        "[]}\nbenchmark: {targets: [t4, t5]}\n",
        encoding="utf-8",
    )
    with project_of(PROD[3:]) as project, pytest.raises(ConfigError) as refused:
        check(project, file)
    messages = [
        problem.message
        for problem in refused.value.problems
        if problem.path.startswith("benchmark")
    ]
    assert messages == ["no target is called 't5'; targets here: 't4'"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"env": {"requirements": ["evil==1"]}}, "use a target file of the project: t: env"),
        ({"custom_ops": [{"path": "x.so", "digest": "sha256:" + "0" * 64}]}, "custom_ops"),
        ({"providers": [{"name": "QNNExecutionProvider", "package": "evil"}]}, "package"),
        (
            {
                "providers": [
                    {"name": "QNNExecutionProvider", "options": {"backend_path": "/srv/evil.so"}}
                ]
            },
            "backend_path",
        ),
        ({"session": {"config": {"x": "evil.dll"}}}, "x 'evil.dll'"),
        ({"providers": []}, "providers"),
        ({"pol": "t4"}, "pol"),
        ({"schema": 99}, "newer"),
        ({"providers": [{"name": "CPUExecutionProvider", "options": {"x": "${env:HOME}"}}]}, "x '"),
        ({"name": "other"}, "differs from the name of the file"),
    ],
)
def test_target_block_with_code_or_invalid_target_raises_validation_error(
    target: dict[str, Any], expected: str
) -> None:
    from onnx_ops.orchestration.blocks import TargetDefinitions

    with pytest.raises(ValidationError, match=expected):
        TargetDefinitions(targets={"t": target})
    with pytest.raises(ValidationError, match="not a valid target name"):
        TargetDefinitions(targets={"../t": {}})


def test_collection_settings_are_used_as_defaults(
    saved: None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx_ops.orchestration.environment import project_of

    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PREFECT_INTEGRATIONS_ONNX_OPS_BLOCKS", " onnx-ops-registry/prod, ")
    monkeypatch.setenv("PREFECT_INTEGRATIONS_ONNX_OPS_ROOT", str(elsewhere))
    with project_of(()) as project:
        assert (project.settings.root, project.settings.tracking_uri) == (
            elsewhere,
            "https://mlflow.example",
        )
    with project_of(PROD[1:2]) as project:
        assert project.settings.tracking_uri.startswith("sqlite:")
    monkeypatch.setenv("ONNX_OPS_ROOT", str(here))
    with project_of(()) as project:
        assert project.settings.root == here


def test_environment_of_contradicting_blocks_raises_user_error(saved: None, tmp_path: Path) -> None:
    from onnx_ops.orchestration.blocks import ModelRegistry
    from onnx_ops.orchestration.environment import environment

    ModelRegistry(tracking_uri="https://other.example").save("other", overwrite=True)
    with pytest.raises(UserError, match="have different values of ONNX_OPS_TRACKING_URI"):
        environment(("onnx-ops-registry/prod", "onnx-ops-registry/other"), tmp_path / "one")
    assert environment(("onnx-ops-registry/prod",) * 2, tmp_path / "two") == dict(
        registry().environ(tmp_path)
    )


def test_environment_of_unknown_or_foreign_block_raises_user_error(
    saved: None, tmp_path: Path
) -> None:
    from prefect.blocks.system import Secret

    from onnx_ops.orchestration.environment import environment

    with pytest.raises(UserError, match="the block does not exist"):
        environment(("onnx-ops-registry/nobody",), tmp_path)
    with pytest.raises(UserError, match="the block does not exist"):
        environment(("nothing",), tmp_path)
    Secret(value="x").save("some", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not a block of onnx-ops"):
        environment(("secret/some",), tmp_path)


@pytest.mark.parametrize(
    ("exists", "address", "remedy"),
    [
        (False, "http://127.0.0.1:9/api", "prefect block ls"),
        (False, None, "prefect config set PREFECT_API_URL="),
        (True, "http://127.0.0.1:9/api", "Install the package"),
    ],
)
def test_load_block_of_missing_block_or_type_names_remedy(
    exists: bool, address: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.blocks.core import Block, UnknownBlockType
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from onnx_ops.orchestration.blocks import load_block

    def refuse(place: str) -> Block:
        raise UnknownBlockType(place) if exists else ValueError(place)

    monkeypatch.setattr(Block, "load", refuse)
    settings: dict[Any, Any] = {PREFECT_API_URL: address}
    with temporary_settings(settings), pytest.raises(UserError) as caught:
        load_block("slack-webhook/ops")
    assert remedy in caught.value.remedy


def test_environment_without_prefect_server_raises_service_unavailable_error(
    saved: None, tmp_path: Path
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from onnx_ops.orchestration.environment import environment

    settings: dict[Any, Any] = {PREFECT_API_URL: "http://127.0.0.1:9/api"}
    with (
        temporary_settings(settings),
        pytest.raises(ServiceUnavailableError, match="onnx-ops-registry/prod"),
    ):
        environment(("onnx-ops-registry/prod",), tmp_path)


def test_block_document_read_without_secrets_is_masked(saved: None) -> None:
    from prefect.client.orchestration import get_client

    wanted = {"block_types": {"slug": {"any_": ["onnx-ops-registry"]}}}
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/block_documents/filter", json=wanted).json()
    (password,) = [document["data"]["password"] for document in found if document["name"] == "prod"]
    assert set(password) == {"*"}


@pytest.mark.nightly
def test_collection_module_imports_no_heavy_package() -> None:
    from onnx_ops.orchestration.blocks import ModelRegistry

    pyproject = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )
    module = pyproject["project"]["entry-points"]["prefect.collections"]["onnx_ops"]
    assert module == ModelRegistry.__module__
    heavy = "{'mlflow', 'torch', 'onnxruntime', 'onnx', 'numpy', 'cattrs', 'yaml.cyaml'}"
    code = (
        f"import sys, prefect.main; old = set(sys.modules); import {module}; "
        f"print({heavy} & set(sys.modules) - old)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
