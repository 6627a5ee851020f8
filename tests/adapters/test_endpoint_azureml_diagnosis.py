"""Findings of `doctor --provider azureml` for each prerequisite that is missing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.adapters.endpoints.azureml_diagnosis import ACTIONS, is_allowed
from onnx_ops.domain.target import Diagnosis
from tests.adapters.azureml_parts import World, forget_clients
from tests.support.clouds.azureml import FaultRule
from tests.support.clouds.azureml_web import Fault
from tests.support.extras import hide, require

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

_ML = "Microsoft.MachineLearningServices/workspaces"
TOO_SMALL = {
    "actions": [f"{_ML}/*", "Microsoft.Insights/metrics/read"],
    "notActions": [f"{_ML}/onlineEndpoints/delete"],
}


def look(world: World, **options: str | int) -> Mapping[str, Diagnosis]:
    found = world.provider.diagnose({"digits": {**world.cloud.options, **options}})
    return {finding.check: finding for finding in found}


def broken(findings: Mapping[str, Diagnosis]) -> tuple[str, ...]:
    bad = [finding for finding in findings.values() if not finding.ok]
    assert all(finding.remedy for finding in bad)
    return tuple(finding.check for finding in bad)


def test_azureml_diagnosis_of_complete_setup_reports_no_problem(world: World) -> None:
    findings = look(world)
    assert broken(findings) == ()
    assert len(findings) == 6


def test_azureml_diagnosis_of_image_checks_registry_and_pull_role(world: World) -> None:
    image, identities = (
        "mlimages.azurecr.io/onnx-ops:1",
        "Microsoft.ManagedIdentity/userAssignedIdentities",
    )
    identity = (
        f"/subscriptions/{world.cloud.options['subscription']}"
        f"/resourceGroups/group/providers/{identities}/serving"
    )
    findings = look(world, image=image, identity=identity)
    assert broken(findings) == ()
    assert findings["azure pull"].found == "serving can pull"
    assert "own identity" in look(world, image=image)["azure pull"].found
    findings = look(world, image=image.replace("mlimages", "elsewhere"))
    assert broken(findings) == ("azure image",)
    assert "az acr create --name elsewhere" in findings["azure image"].remedy
    subscription = f"--subscription {world.cloud.options['subscription']}"
    assert subscription in findings["azure image"].remedy
    world.cloud.conditions.pullers = []
    findings = look(world, image=image, identity=identity)
    assert broken(findings) == ("azure pull",)
    assert "--assignee principal-of-serving --role AcrPull" in findings["azure pull"].remedy
    world.cloud.conditions.missing_identities = ["serving"]
    findings = look(world, image=image, identity=identity)
    assert broken(findings) == ("azure pull",)
    assert findings["azure pull"].found == "identity serving does not exist"


def test_azureml_diagnosis_without_azure_identity_package_reports_missing_packages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "azure-identity")
    findings = look(world)
    assert broken(findings) == ("azure packages",)
    assert "onnx-ops[azure]" in findings["azure packages"].remedy
    assert world.cloud.calls == []


def test_azureml_diagnosis_without_credentials_suggests_az_login(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDENTITY_HEADER", "nobody")
    forget_clients()
    findings = look(world)
    forget_clients()
    assert broken(findings) == ("azure credentials",)
    assert "az login" in findings["azure credentials"].remedy


@pytest.mark.parametrize("fault", ["page", "page-error"])
def test_azureml_diagnosis_with_html_response_reports_failed_check(
    world: World, fault: Fault
) -> None:
    look(world)
    for passing in range(len(world.cloud.calls)):
        world.mischief(passing, FaultRule(fault=fault))
        findings = look(world)
        (check,) = broken(findings)
        assert check.startswith("azure ")
        assert ("does not answer in JSON" in findings[check].found) == (fault == "page")


@pytest.mark.parametrize(
    ("conditions", "options", "check", "expected"),
    [
        ({}, {"workspace": "elsewhere"}, "workspace elsewhere", "it does not exist"),
        ({"forbidden": True}, {}, "workspace workspace", "AzureML Data Scientist"),
        (
            {"roles": [TOO_SMALL]},
            {},
            "role on workspace",
            f"not permitted: {_ML}/onlineEndpoints/delete ",
        ),
        (
            {"roles": ["no role"]},
            {},
            "role on workspace",
            "not have the format that Azure Resource Manager documents",
        ),
        (
            {"quota": 23},
            {"instances": 10},
            "quota for Standard_DS3_v2",
            "92 of 92 cores of standardDSv2Family",
        ),
        ({"quota": 23}, {"instances": 10}, "quota for Standard_DS3_v2", "need 96"),
        ({}, {"instance_type": "Standard_X1"}, "quota for Standard_X1", "does not have this size"),
        ({}, {"instance_type": "Standard_X1"}, "quota for Standard_X1", "--subscription "),
        (
            {"roles": [{"actions": [f"{_ML}/*"], "notActions": []}]},
            {"traffic": "native", "min_instances": 1, "max_instances": 2},
            "role on workspace",
            (
                "the role Monitoring Reader on the workspace and a role with the permissions of "
                "autoscaling"
            ),
        ),
    ],
)
def test_azureml_diagnosis_with_unmet_or_unreadable_prerequisite_reports_check_and_remedy(
    world: World,
    conditions: dict[str, object],
    options: dict[str, str | int],
    check: str,
    expected: str,
) -> None:
    for name, value in conditions.items():
        setattr(world.cloud.conditions, name, value)
    findings = look(world, **options)
    assert broken(findings) == (f"azure {check}",)
    assert expected in f"{findings[f'azure {check}'].found} {findings[f'azure {check}'].remedy}"


@pytest.mark.parametrize("missing", [f"{_ML}/models/versions/write", "Microsoft.Insights/*"])
def test_azureml_diagnosis_with_table_needs_neither_models_nor_metrics(
    world: World, missing: str
) -> None:
    world.cloud.conditions.roles = [{"actions": ["*"], "notActions": [missing]}]
    place = "abfs://{}@acmemodels.dfs.core.windows.net/prod"
    locations = {part: place.format(part) for part in ("control", "reports")}
    found = [
        next(
            finding.ok
            for finding in world.provider.diagnose({"digits": {**world.cloud.options, **options}})
            if finding.check == "azure role on workspace"
        )
        for options in ({"traffic": "table", **locations}, {"traffic": "native"})
    ]
    assert found == [True, False]


def test_azureml_diagnosis_with_quota_for_two_versions_reports_no_problem(world: World) -> None:
    world.cloud.conditions.quota = 24
    assert broken(look(world, instances=10)) == ()


@given(st.sampled_from(ACTIONS), st.integers(0, 60))
def test_is_allowed_of_listed_or_wildcard_action_returns_true_unless_excluded(
    action: str, cut: int
) -> None:
    assert is_allowed(action, [{"actions": [f"{action[:cut]}*"], "notActions": []}])
    assert is_allowed(action.upper(), [{"actions": [action], "notActions": []}])
    assert not is_allowed(action, [{"actions": ["*"], "notActions": [f"{action[:cut]}*"]}])
    assert not is_allowed(action, [{"actions": [f"{action}/more", "Other/*"], "notActions": []}])
