"""`onnx-ops doctor --provider`: findings about one provider's bound endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.app.context import open_project
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint
from tests.adapters.azureml_parts import config_of, inside
from tests.support.clouds.azureml import AzureCloud
from tests.support.command import run_command
from tests.support.extras import require

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)


def look(folder: Path, provider: str) -> tuple[int, Mapping[str, Mapping[str, object]]]:
    done = run_command("doctor", "--provider", provider, "--json", cwd=folder)
    document = json.loads(done.stdout)
    return done.code, {one["check"]: one for one in document} if isinstance(
        document, list
    ) else document


def test_doctor_with_azureml_provider_runs_azure_checks_only_and_reports_exceeded_quota(
    tmp_path: Path,
) -> None:
    with AzureCloud(tmp_path / "cloud") as cloud, inside(cloud):
        code, findings = look(tmp_path, "azureml")
        assert code == 0
        assert set(findings) == {"azure packages", "azure credentials", "endpoints of azureml"}
        bind_endpoint(open_project(tmp_path).context, config_of(cloud), RolloutPolicy())
        assert look(tmp_path, "azureml")[0] == 0
        cloud.conditions.quota = 1
        code, findings = look(tmp_path, "azureml")
        assert code == 4
        bad = [one for one in findings.values() if not one["ok"]]
        assert [one["check"] for one in bad] == ["azure quota for Standard_DS3_v2"]
        assert "20%" in str(bad[0]["remedy"])


def test_doctor_with_provider_accepts_local_and_rejects_unknown_name(tmp_path: Path) -> None:
    assert list(look(tmp_path, "local")[1]) == ["local"]
    assert look(tmp_path, "azure")[0] == 2
