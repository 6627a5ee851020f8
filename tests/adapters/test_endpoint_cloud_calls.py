"""Requests of each operation to a cloud's control plane, and their permissions.

The page docs/cloud-traffic.md shows the numbers of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.sagemaker_diagnosis import KEY_ACTIONS, NETWORK_ACTIONS
from tests.adapters.cloud_operations import OperationCalls, perform_operations
from tests.adapters.fleet_site import (
    FleetSite,
    open_azure_fleet,
    open_sagemaker_fleet,
    with_options,
)
from tests.infra.infra_tools import ROOT
from tests.support.clouds import azureml_roles, iam
from tests.support.clouds.azureml_roles import Request
from tests.support.clouds.azureml_web import Call
from tests.support.clouds.sagemaker import FakeSageMaker
from tests.support.extras import require

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")

pytestmark = pytest.mark.services

COUNTED = ("step", "observe", "rollback", "repeated rollback")
"""Operations whose reads are counted too; those of others depend on the cloud's speed."""
NETWORK_OF_TABLE = {"s3:GetObject", "s3:ListBucket", "s3:PutObject"}
"""Actions of a follower in its container."""
FOR_SCALING = {
    "application-autoscaling:DeregisterScalableTarget",
    "application-autoscaling:PutScalingPolicy",
    "application-autoscaling:RegisterScalableTarget",
    "cloudwatch:DeleteAlarms",
    "cloudwatch:PutMetricAlarm",
    "iam:CreateServiceLinkedRole",
}
FOR_OPTIONS = FOR_SCALING | {
    "application-autoscaling:DescribeScalingPolicies",
    # The option `alarms` needs this action.
    "cloudwatch:DescribeAlarms",
    # This call needs no permission, but AWS lists it as an action.
    "sts:GetCallerIdentity",
}
WEIGHTS = "sagemaker:UpdateEndpointWeightsAndCapacities"
NATIVE_ONLY = {
    WEIGHTS,
    "cloudwatch:GetMetricData",
    # This action removes interrupted uploads of archives.
    "s3:AbortMultipartUpload",
}
"""What metrics, weights and archives of `traffic: native` need.

A change of the number of instances needs the weights' permission too.
"""
KEY = ("KmsKeyArn", "arn:aws:kms:us-east-1:123456789012:key/1")
KEY_OF_CALLER = {"kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:GenerateDataKey"}
AZURE = "Microsoft.MachineLearningServices/workspaces"
AZURE_OPTIONS = {
    "Microsoft.Insights/autoscaleSettings/delete",
    "Microsoft.Insights/autoscaleSettings/read",
    "Microsoft.Insights/autoscaleSettings/write",
    "Microsoft.Insights/metrics/read",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    "Microsoft.ManagedIdentity/userAssignedIdentities/read",
    "Microsoft.Authorization/roleAssignments/read",
}
"""What autoscaling, metrics of `traffic: native`, and the option `identity` need."""
AZURE_NATIVE_ONLY = {
    f"{AZURE}/datastores/read",
    f"{AZURE}/models/versions/read",
    f"{AZURE}/models/versions/write",
}


@pytest.fixture(params=[pytest.param("table", marks=pytest.mark.nightly), "native"])
def traffic(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def amazon(
    traffic: str, sagemaker: FakeSageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FleetSite]:
    for name, value in sagemaker.environment.items():
        monkeypatch.setenv(name, value)
    sagemaker.reset()
    sagemaker.behave(taken_back="", stuck="", quota="", lag=0, reads=2)
    with open_sagemaker_fleet(sagemaker, tmp_path) as site:
        sagemaker.permitted()
        yield with_options(site, traffic=traffic)
    sagemaker.reset()


def test_sagemaker_operations_use_only_permitted_actions_and_documented_requests(
    amazon: FleetSite, traffic: str, sagemaker: FakeSageMaker
) -> None:
    operations = perform_operations(amazon)
    caller, container = sagemaker.permitted()
    assert sagemaker.denied() == []
    granted = set[str]().union(*(_list_actions(one) for one in iam.caller()))
    # The tested operations change the image and keep the number of instances, so a fleet does not
    # need the permission for weights.
    assert granted - caller - FOR_OPTIONS == (
        NATIVE_ONLY if traffic == "table" else NATIVE_ONLY - {WEIGHTS}
    )
    assert container == (NETWORK_OF_TABLE if traffic == "table" else set())
    _require_documented_calls("SageMaker", traffic, operations)


@pytest.mark.parametrize("given", [(), (KEY,), (("UsesVpc", "true"),), (KEY, ("UsesVpc", "true"))])
def test_aws_roles_gain_only_actions_for_given_key_and_network(
    given: tuple[tuple[str, str], ...],
) -> None:
    grown = {
        name: set[str]().union(*map(_list_actions, role(*given)))
        - set[str]().union(*map(_list_actions, role()))
        for name, role in (("caller", iam.caller), ("container", iam.container))
    }
    has_key, has_network = KEY in given, len(given) > (KEY in given)
    assert grown["caller"] == (KEY_OF_CALLER if has_key else set())
    assert grown["container"] == {
        *(KEY_ACTIONS if has_key else ()),
        *(NETWORK_ACTIONS if has_network else ()),
    }


def test_azure_operations_use_only_permitted_actions_and_documented_requests(
    tmp_path: Path, traffic: str
) -> None:
    with open_azure_fleet(tmp_path) as site:
        requested: set[Request] = set()
        calls: list[Call] = []
        site.cloud.fault_rule = lambda _, call: calls.append(call)
        operations = perform_operations(with_options(site, traffic=traffic))
        for call in calls:
            requested.update(azureml_roles.requests_of(call))
    used = {one.action.lower() for one in requested if "/blobs/" not in one.action}
    granted = {
        action.lower()
        for _, actions in azureml_roles.granted()
        for action in actions
        if "/blobs/" not in action
    }
    used_blobs = {one.action for one in requested if "/blobs/" in one.action}
    assert bool(used_blobs) is (traffic == "native")
    needless = granted - used - {one.lower() for one in AZURE_OPTIONS}
    expected = AZURE_NATIVE_ONLY if traffic == "table" else set()
    assert needless == {one.lower() for one in expected}
    _require_documented_calls("Azure ML", traffic, operations)


def _list_actions(statement: Mapping[str, object]) -> set[str]:
    given = statement["Action"]
    return {given} if isinstance(given, str) else set(given)  # type: ignore[call-overload]


def _require_documented_calls(
    cloud: str, traffic: str, operations: Mapping[str, OperationCalls]
) -> None:
    """Compare a column of the page's table with the counted requests."""
    lines = (ROOT / "docs" / "cloud-traffic.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = next(row for row in rows if row[0] == "operation")
    column = header.index(f"{cloud}, `{traffic}`")
    documented = {row[0]: row[column] for row in rows if row[0] in operations}
    counted = {name: _describe(name, operation) for name, operation in operations.items()}
    assert documented == {name: text for name, text in counted.items() if name != "doctor"}


def _describe(name: str, operation: OperationCalls) -> str:
    """Return the cell of the page: requests and changes of an operation."""
    if name not in COUNTED:
        return f"{operation.changes} change{'' if operation.changes == 1 else 's'}"
    requests, first = len(operation.calls), operation.first_change
    return f"{requests}, change in request {first}" if first else f"{requests}"
