"""What `doctor --provider azureml` finds, for each thing that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_diagnosis import ACTIONS, is_allowed
from onnx_ops.domain.target import Diagnosis
from tests.adapters.azureml_parts import POLICY, enter, inside
from tests.support.clouds.azureml import AzureCloud, Trouble
from tests.support.clouds.azureml_web import Call, Fault
from tests.support.extras import hide, require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all")

_ML = "Microsoft.MachineLearningServices/workspaces"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[AzureCloud]:
    with AzureCloud(tmp_path / "cloud") as cloud, inside(cloud):
        yield cloud


def failing_once(at: int, fault: Fault) -> Callable[[int, Call], Trouble | None]:
    """Trouble with the request of that number."""
    return lambda number, _: Trouble(fault=fault) if number == at else None


def look(cloud: AzureCloud, folder: Path, **settings: str | int) -> Mapping[str, Diagnosis]:
    found = AzureEndpoints(folder, policy=POLICY).diagnose({"digits": {**cloud.settings, **settings}})
    return {finding.check: finding for finding in found}


def broken(findings: Mapping[str, Diagnosis]) -> tuple[str, ...]:
    bad = [finding for finding in findings.values() if not finding.ok]
    assert all(finding.remedy for finding in bad)
    return tuple(finding.check for finding in bad)


def test_all_is_well(cloud: AzureCloud, tmp_path: Path) -> None:
    findings = look(cloud, tmp_path)
    assert broken(findings) == ()
    assert len(findings) == 6


def test_the_image_and_who_may_pull_it(cloud: AzureCloud, tmp_path: Path) -> None:
    image, identities = "mlimages.azurecr.io/onnx-ops:1", "Microsoft.ManagedIdentity/userAssignedIdentities"
    identity = f"/subscriptions/{cloud.settings['subscription']}/resourceGroups/group/providers/{identities}/serving"
    findings = look(cloud, tmp_path, image=image, identity=identity)
    assert broken(findings) == ()
    assert findings["azure pull"].found == "serving may pull"
    assert "own identity" in look(cloud, tmp_path, image=image)["azure pull"].found
    findings = look(cloud, tmp_path, image=image.replace("mlimages", "elsewhere"))
    assert broken(findings) == ("azure image",)
    assert "az acr create --name elsewhere" in findings["azure image"].remedy
    cloud.conditions.pullers = []
    findings = look(cloud, tmp_path, image=image, identity=identity)
    assert broken(findings) == ("azure pull",)
    assert "--assignee principal-of-serving --role AcrPull" in findings["azure pull"].remedy


def test_no_package(cloud: AzureCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "azure-identity")
    findings = look(cloud, tmp_path)
    assert broken(findings) == ("azure packages",)
    assert "onnx-ops[azure]" in findings["azure packages"].remedy
    assert cloud.calls == []


def test_no_credentials(cloud: AzureCloud, tmp_path: Path) -> None:
    enter({"IDENTITY_HEADER": "nobody"})
    findings = look(cloud, tmp_path)
    assert broken(findings) == ("azure credentials",)
    assert "az login" in findings["azure credentials"].remedy


@pytest.mark.parametrize("fault", ["page", "page-error"])
def test_page_of_html_instead_of_an_answer_is_a_finding(cloud: AzureCloud, tmp_path: Path, fault: Fault) -> None:
    look(cloud, tmp_path)
    for passing in range(len(cloud.calls)):
        cloud.trouble = failing_once(len(cloud.calls) + passing, fault)
        findings = look(cloud, tmp_path)
        (check,) = broken(findings)
        assert check.startswith("azure ")
        assert ("does not answer in JSON" in findings[check].found) == (fault == "page")


def test_answer_without_what_it_should_hold_is_a_finding(cloud: AzureCloud, tmp_path: Path) -> None:
    cloud.conditions.roles = ["no role"]  # type: ignore[list-item]
    findings = look(cloud, tmp_path)
    assert "not what Azure Resource Manager answers" in findings["azure role on workspace"].found


def test_no_workspace(cloud: AzureCloud, tmp_path: Path) -> None:
    findings = look(cloud, tmp_path, workspace="elsewhere")
    assert broken(findings) == ("azure workspace elsewhere",)


def test_no_role_at_all(cloud: AzureCloud, tmp_path: Path) -> None:
    cloud.conditions.forbidden = True
    findings = look(cloud, tmp_path)
    assert broken(findings) == ("azure workspace workspace",)
    assert "AzureML Data Scientist" in findings["azure workspace workspace"].remedy


def test_too_small_a_role(cloud: AzureCloud, tmp_path: Path) -> None:
    taken = [f"{_ML}/onlineEndpoints/delete"]
    cloud.conditions.roles = [{"actions": [f"{_ML}/*", "Microsoft.Insights/metrics/read"], "notActions": taken}]
    findings = look(cloud, tmp_path)
    assert broken(findings) == ("azure role on workspace",)
    assert findings["azure role on workspace"].found == f"not permitted: {_ML}/onlineEndpoints/delete"


def test_no_quota_for_two_versions_at_once(cloud: AzureCloud, tmp_path: Path) -> None:
    cloud.conditions.quota = 23
    findings = look(cloud, tmp_path, instances=10)
    assert broken(findings) == ("azure quota for Standard_DS3_v2",)
    assert "92 of 92 cores" in findings["azure quota for Standard_DS3_v2"].found
    assert "needs 96" in findings["azure quota for Standard_DS3_v2"].found
    cloud.conditions.quota = 24
    assert broken(look(cloud, tmp_path, instances=10)) == ()


def test_no_such_size(cloud: AzureCloud, tmp_path: Path) -> None:
    assert broken(look(cloud, tmp_path, instance_type="Standard_X1")) == ("azure quota for Standard_X1",)


@given(st.sampled_from(ACTIONS), st.integers(0, 60))
def test_a_wildcard_grants_what_begins_so(action: str, cut: int) -> None:
    assert is_allowed(action, [{"actions": [f"{action[:cut]}*"], "notActions": []}])
    assert is_allowed(action.upper(), [{"actions": [action], "notActions": []}])
    assert not is_allowed(action, [{"actions": ["*"], "notActions": [f"{action[:cut]}*"]}])
    assert not is_allowed(action, [{"actions": [f"{action}/more", "Other/*"], "notActions": []}])
