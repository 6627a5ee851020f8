"""The policies of infra/aws allow exactly the requests of the SageMaker provider.

The fake of `tests.support.clouds` checks every request of every test against them. The tests here
cover what no request shows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.adapters.endpoints.sagemaker_diagnosis import KEY_ACTIONS, NETWORK_ACTIONS
from tests.infra.infra_tools import ROOT
from tests.support.clouds import azureml_roles
from tests.support.clouds.iam import ROLE, Request, caller, container, is_allowed, resources

ADAPTERS = ROOT / "onnx_ops" / "adapters"
SERVICES = {
    "application-autoscaling": "application-autoscaling",
    "cloudwatch": "cloudwatch",
    "ecr": "ecr",
    "iam": "iam",
    "s3": "s3",
    "sagemaker": "sagemaker",
    "service-quotas": "servicequotas",
    "sts": "sts",
}
"""IAM's name of each service, by its name in botocore."""
S3_ACTIONS = {
    "CompleteMultipartUpload": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListObjectsV2": "ListBucket",
    "UploadPart": "PutObject",
}
"""Operations whose permission has another name."""
WITHOUT_OPERATION = {
    "cloudwatch:DeleteAlarms",
    "cloudwatch:PutMetricAlarm",
    "iam:CreateServiceLinkedRole",
    "iam:PassRole",
    "sagemaker:AddTags",
}
"""Permissions that AWS itself needs, without an operation.

AWS checks them where a request passes a role or tags, or sets up autoscaling.
"""
NOUNS = ("model", "endpoint_config")
"""Nouns that follow a verb such as `create_`.

The provider builds an operation's name of both.
"""
ENDPOINT = "arn:aws:sagemaker:us-east-1:123456789012:endpoint"
OURS = "aws:ResourceTag/onnx-ops.endpoint"
PASSED = {"iam:PassedToService": "sagemaker.amazonaws.com"}
ANYWHERE = {
    "application-autoscaling:DescribeScalableTargets",
    "application-autoscaling:DescribeScalingPolicies",
    "cloudwatch:DescribeAlarms",
    "cloudwatch:GetMetricData",
    "sagemaker:ListEndpointConfigs",
    "sagemaker:ListModels",
    "servicequotas:ListServiceQuotas",
    "sts:GetCallerIdentity",
}
"""Permissions that AWS does not limit to a resource."""


def sources() -> list[Path]:
    """Return every module of the provider and of its source of metrics."""
    endpoints = sorted((ADAPTERS / "endpoints").glob("sagemaker*.py"))
    return [*endpoints, ADAPTERS / "aws.py", ADAPTERS / "metrics" / "cloudwatch.py"]


@cache
def operations() -> Mapping[str, tuple[str, str]]:
    """Return IAM's name of the service and the operation, by the client's method."""
    import botocore.session
    from botocore import xform_name

    session = botocore.session.get_session()
    found = {}
    for service, prefix in SERVICES.items():
        for operation in session.get_service_model(service).operation_names:
            found[xform_name(operation)] = (prefix, operation)
    return found


def called(text: str) -> Iterator[str]:
    """Yield the names of the methods that a source text calls.

    They include names built of a verb and a noun, and operations that are listed page by page.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            yield from (
                "".join(noun if part is None else str(part) for part in parts) for noun in NOUNS
            )
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def needed() -> set[str]:
    found = set()
    for file in sources():
        for name in called(file.read_text(encoding="utf-8")):
            if name in operations():
                service, operation = operations()[name]
                found.add(f"{service}:{S3_ACTIONS.get(operation, operation)}")
    return found


def actions(statement: Mapping[str, Any]) -> set[str]:
    given = statement["Action"]
    return {given} if isinstance(given, str) else set(given)


def test_aws_policy_allows_exactly_needed_actions() -> None:
    allowed = set().union(*(actions(statement) for statement in caller()))
    assert allowed == needed() | WITHOUT_OPERATION


def test_aws_policy_limits_resources_where_possible() -> None:
    for statement in caller():
        assert not any("*" in action for action in actions(statement))
        if statement["Resource"] == "*":
            assert actions(statement) == ANYWHERE


KEY = "arn:aws:kms:us-east-1:123456789012:key/1"


def test_aws_policies_permit_key_and_network_only_if_parameters_require_them() -> None:
    grant = {"kms:GrantIsForAWSResource": "true"}
    of_caller = [
        *(Request(f"kms:{name}", KEY) for name in ("Decrypt", "DescribeKey", "GenerateDataKey")),
        Request("kms:CreateGrant", KEY, grant),
    ]
    of_container = [Request(action, KEY) for action in KEY_ACTIONS]
    encrypts = ("KmsKeyArn", KEY)
    for request in of_caller:
        assert is_allowed(caller(encrypts), request)
        assert not is_allowed(caller(), request)
    assert not is_allowed(caller(encrypts), Request("kms:CreateGrant", KEY))
    for request in of_container:
        assert is_allowed(container(encrypts), request)
        assert not is_allowed(container(), request)
        assert not is_allowed(container(encrypts), replace(request, resource=f"{KEY}2"))
    for action in NETWORK_ACTIONS:
        assert is_allowed(container(("UsesVpc", "true")), Request(action, "*"))
        assert not is_allowed(container(), Request(action, "*"))


def test_sagemaker_page_lists_permissions_of_key_and_network() -> None:
    page = (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")
    for action in (*KEY_ACTIONS, *NETWORK_ACTIONS):
        assert action.removeprefix("ec2:") in page


def test_aws_policy_passes_role_to_sagemaker_only() -> None:
    (statement,) = [one for one in caller() if "iam:PassRole" in actions(one)]
    assert statement["Resource"] == ROLE
    assert statement["Condition"] == {
        "StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}
    }


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (Request("s3:PutObject", "arn:aws:s3:::models/onnx-ops/digits/claims/1.json"), True),
        (Request("s3:PutObject", "arn:aws:s3:::models/others/1.json"), False),
        (Request("s3:DeleteObject", "arn:aws:s3:::theirs/onnx-ops/digits/claims/1.json"), False),
        (Request("sagemaker:DeleteEndpoint", f"{ENDPOINT}/digits", {OURS: "digits"}), True),
        (Request("sagemaker:DeleteEndpoint", f"{ENDPOINT}/theirs"), False),
        (Request("sagemaker:DeleteEndpoint", f"{ENDPOINT}/theirs", {OURS: ""}), False),
        (
            Request(
                "sagemaker:DeleteEndpoint",
                f"{ENDPOINT}/theirs",
                {"aws:RequestTag/onnx-ops.endpoint": "us"},
            ),
            False,
        ),
        (
            Request(
                "sagemaker:CreateTrainingJob",
                "arn:aws:sagemaker:us-east-1:123456789012:training-job/1",
            ),
            False,
        ),
        (Request("iam:PassRole", ROLE, {"iam:PassedToService": "ec2.amazonaws.com"}), False),
        (Request("iam:PassRole", "arn:aws:iam::123456789012:role/admin", PASSED), False),
        (Request("iam:PassRole", ROLE, PASSED), True),
    ],
)
def test_is_allowed_of_request_follows_policy(request_: Request, allowed: bool) -> None:
    assert is_allowed(caller(), request_) is allowed


def test_is_allowed_with_deny_statement_returns_false() -> None:
    request = Request("s3:GetObject", "arn:aws:s3:::models/onnx-ops/1")
    deny = {"Effect": "Deny", "Action": "s3:Get*", "Resource": "*"}
    assert is_allowed(caller(), request)
    assert not is_allowed([*caller(), deny], request)


def test_aws_bucket_has_versioning_encryption_and_no_public_access() -> None:
    properties = resources()["Models"]["Properties"]
    assert properties["VersioningConfiguration"] == {"Status": "Enabled"}
    assert "BucketEncryption" in properties
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}


@pytest.mark.parametrize(
    "kind", ["AWS::SageMaker::Endpoint", "AWS::SageMaker::Model", "AWS::SageMaker::EndpointConfig"]
)
def test_aws_template_defines_no_endpoint_resources(kind: str) -> None:
    assert kind not in {resource["Type"] for resource in resources().values()}


def test_azure_serving_identity_reads_all_blobs_but_writes_only_reports() -> None:
    assert azureml_roles.data_roles("serving") == {
        "storage": "blobReader",
        "control": "blobReader",
        "reports": "blobContributor",
    }


def test_azure_operator_writes_tables_and_reports() -> None:
    """The containers are part of the storage account."""
    assert azureml_roles.data_roles("operator") == {"storage": "blobContributor"}


@pytest.mark.parametrize(
    ("action", "scope", "allowed"),
    [
        ("workspaces/onlineEndpoints/delete", "workspace", True),
        ("workspaces/onlineEndpoints/delete", "", False),
        ("workspaces/onlineEndpoints/regenerateKeys/action", "workspace", False),
        ("workspaces/delete", "workspace", False),
        ("workspaces/computes/write", "workspace", False),
        ("workspaces/listKeys/action", "workspace", False),
    ],
)
def test_azure_role_is_allowed_of_request_follows_actions_and_scope(
    action: str, scope: str, allowed: bool
) -> None:
    request = azureml_roles.Request(f"Microsoft.MachineLearningServices/{action}", scope)
    assert azureml_roles.is_allowed(request) is allowed
