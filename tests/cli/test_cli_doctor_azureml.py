"""`onnx-ops doctor --provider`: what one provider finds, for the endpoints that are bound to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("azure.ai.ml", reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all")

from onnx_ops.cli.main import app
from onnx_ops.domain.rollout import RolloutPolicy
from onnx_ops.operations.promote import configure
from onnx_ops.wiring.project import open_project
from tests.adapters.azureml_parts import config_of, inside
from tests.support.clouds.azureml import AzureCloud

Captured = pytest.CaptureFixture[str]


def look(capfd: Captured, provider: str) -> tuple[int, Mapping[str, Mapping[str, object]]]:
    code = CliRunner().invoke(app, ["doctor", "--provider", provider, "--json"]).exit_code
    document = json.loads(capfd.readouterr().out)
    return code, {one["check"]: one for one in document} if isinstance(document, list) else document


def test_the_doctor_looks_at_the_endpoints_of_one_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    with AzureCloud(tmp_path / "cloud") as cloud, inside(cloud):
        code, findings = look(capfd, "azureml")
        assert code == 0
        assert set(findings) == {"azure packages", "azure credentials", "endpoints of azureml"}
        configure(open_project(tmp_path).ports, config_of(cloud), RolloutPolicy())
        assert look(capfd, "azureml")[0] == 0
        cloud.conditions.quota = 1
        code, findings = look(capfd, "azureml")
        assert code == 4
        bad = [one for one in findings.values() if not one["ok"]]
        assert [one["check"] for one in bad] == ["azure quota for Standard_DS3_v2"]
        assert "20%" in str(bad[0]["remedy"])


def test_a_provider_that_has_nothing_to_say_or_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(look(capfd, "local")[1]) == ["local"]
    assert look(capfd, "azure")[0] == 2
