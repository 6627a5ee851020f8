"""The policy of infra/aws allows what the SageMaker provider asks AWS for, and nothing more."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.infra.infra_tools import INFRA, ROOT
from tests.support.clouds.sagemaker import SETTINGS, fake_sagemaker

ADAPTERS = ROOT / "onnx_ops" / "adapters"
SERVICES = {
    "application-autoscaling": "application-autoscaling",
    "cloudwatch": "cloudwatch",
    "iam": "iam",
    "s3": "s3",
    "sagemaker": "sagemaker",
    "service-quotas": "servicequotas",
    "sts": "sts",
}
"""botocore's name of a service, and IAM's."""
S3_ACTIONS = {
    "CompleteMultipartUpload": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "HeadBucket": "ListBucket",
    "HeadObject": "GetObject",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListObjectsV2": "ListBucket",
    "UploadPart": "PutObject",
}
"""Operations that need the permission of another name."""
WITHOUT_OPERATION = {"iam:PassRole", "sagemaker:AddTags"}
"""Asked for by AWS itself, where a role or tags are handed over with a request."""
NOUNS = ("model", "endpoint_config")
"""What stands behind a verb such as `create_`, where the provider puts an operation together."""
ANYWHERE = {
    "cloudwatch:DescribeAlarms",
    "cloudwatch:GetMetricData",
    "sagemaker:ListEndpointConfigs",
    "sagemaker:ListModels",
    "servicequotas:ListServiceQuotas",
    "sts:GetCallerIdentity",
}
"""What AWS does not limit to a resource."""


def sources() -> list[Path]:
    """Every module of the provider and its source of figures."""
    endpoints = sorted((ADAPTERS / "endpoints").glob("sagemaker*.py"))
    return [*endpoints, ADAPTERS / "aws.py", ADAPTERS / "metrics" / "cloudwatch.py"]


@cache
def operations() -> Mapping[str, tuple[str, str]]:
    """Name of a client's method to IAM's name of the service, and the operation."""
    import botocore.session
    from botocore import xform_name

    session = botocore.session.get_session()
    found = {}
    for service, prefix in SERVICES.items():
        for operation in session.get_service_model(service).operation_names:
            found[xform_name(operation)] = (prefix, operation)
    return found


def called(text: str) -> Iterator[str]:
    """Methods that are called by name, or by a verb and a noun, and operations that a paginator is made of."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            yield from (f"{node.values[0].value!s}{noun}" for noun in NOUNS)
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


class Template(yaml.SafeLoader):
    """Short forms of CloudFormation's functions are read as their arguments."""


def _argument(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    del tag
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)  # type: ignore[arg-type]


Template.add_multi_constructor("!", _argument)


def resources() -> dict[str, Any]:
    text = (INFRA / "aws" / "onnx-ops.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=Template)["Resources"]  # noqa: S506 (a safe loader)
    return found


def statements() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = resources()["Caller"]["Properties"]["PolicyDocument"]["Statement"]
    return found


def actions(statement: Mapping[str, Any]) -> set[str]:
    given = statement["Action"]
    return {given} if isinstance(given, str) else set(given)


def test_it_allows_what_is_asked_for_and_nothing_more() -> None:
    allowed = set().union(*(actions(statement) for statement in statements()))
    assert allowed == needed() | WITHOUT_OPERATION


@pytest.mark.services
def test_what_the_control_plane_was_asked_in_a_whole_life_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    config = EndpointConfig(
        endpoint="life",
        provider="sagemaker",
        model="scale",
        target="cpu-1t",
        target_digest=digest_bytes(b"target"),
        pipeline="digits",
        settings=SETTINGS,
    )
    provider = SageMakerEndpoints()
    with fake_sagemaker(tmp_path) as fake:
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        fake.fault()
        for generation, state in enumerate(
            (state_of(blue, blue=100), state_of(blue, green, blue=90, green=10), state_of(green, green=100)), start=1
        ):
            provider.apply(config, state, generation=generation)
            provider.observe(config)
        provider.metrics().read(config, {"green": None})
        for leftover in provider.leftovers(config, frozenset()):
            provider.discard(config, leftover)
        provider.remove(config)
        asked = {name.replace("SageMaker.", "sagemaker:") for name in fake.calls() if name.startswith("SageMaker.")}
    allowed = set().union(*(actions(statement) for statement in statements()))
    assert {"sagemaker:DeleteModel", "sagemaker:UpdateEndpointWeightsAndCapacities"} & asked
    assert asked <= allowed


def test_nothing_is_allowed_everywhere_that_can_be_limited() -> None:
    for statement in statements():
        assert not any("*" in action for action in actions(statement))
        if statement["Resource"] == "*":
            assert actions(statement) == ANYWHERE


def test_the_role_is_handed_to_sagemaker_only() -> None:
    (statement,) = [one for one in statements() if "iam:PassRole" in actions(one)]
    assert statement["Resource"] == "ContainerRole.Arn"
    assert statement["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_github_is_trusted_for_one_environment_of_one_repository() -> None:
    (statement,) = resources()["GitHubRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    ((how, claims),) = statement["Condition"].items()
    assert how == "StringEquals"
    assert (
        claims["token.actions.githubusercontent.com:sub"] == "repo:${GitHubRepository}:environment:${GitHubEnvironment}"
    )
    assert claims["token.actions.githubusercontent.com:aud"] == "sts.amazonaws.com"


def test_the_bucket_keeps_versions_encrypts_and_is_nobody_elses() -> None:
    properties = resources()["Models"]["Properties"]
    assert properties["VersioningConfiguration"] == {"Status": "Enabled"}
    assert "BucketEncryption" in properties
    assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}


@pytest.mark.parametrize(
    "kind", ["AWS::SageMaker::Endpoint", "AWS::SageMaker::Model", "AWS::SageMaker::EndpointConfig"]
)
def test_endpoints_are_the_pipelines(kind: str) -> None:
    assert kind not in {resource["Type"] for resource in resources().values()}
