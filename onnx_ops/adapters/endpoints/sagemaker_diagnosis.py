"""Checks of a SageMaker endpoint's prerequisites."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onnx_ops.adapters.aws import (
    Clients,
    describe_alarms,
    get_error_code,
    make_clients,
    read_access,
    translate_errors,
)
from onnx_ops.adapters.endpoints.cloud import Finding, run_check
from onnx_ops.adapters.endpoints.sagemaker_options import (
    SageMakerOptions,
    read_sagemaker_options,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import OnnxOpsError
from onnx_ops.plugins import install_hint

_PRINCIPAL = "sagemaker.amazonaws.com"
_DOCS = "`onnx-ops docs sagemaker`"
_OPTIONS_PAGE = "`onnx-ops docs sagemaker-options`"
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<repository>[a-z0-9._/-]+)"
    r"(@(?P<digest>sha256:[0-9a-f]{64})|:(?P<tag>[\w.-]+))?"
)
_PULL_ACTIONS = (
    "ecr:BatchGetImage",
    "ecr:GetDownloadUrlForLayer",
    "ecr:BatchCheckLayerAvailability",
)
KEY_ACTIONS = ("kms:Decrypt", "kms:GenerateDataKey")
"""Actions on the key of `kms_key` that the containers' role needs."""
NETWORK_ACTIONS = (
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
)
"""Actions that the containers' role needs with `subnets`."""


def diagnose(given: Mapping[str, Json]) -> Iterator[Diagnosis]:
    """Yield the findings for an endpoint's options.

    Without options, only boto3 and the credentials are checked.
    """
    try:
        yield Diagnosis(check="boto3", ok=True, found=version("boto3"))
    except PackageNotFoundError:
        yield Diagnosis(
            check="boto3", ok=False, found="not installed", remedy=install_hint("boto3")
        )
        return
    try:
        options = read_sagemaker_options(given) if given else None
    except OnnxOpsError as error:
        yield Diagnosis(
            check="options",
            ok=False,
            found=error.what,
            remedy=error.remedy or f"See {_OPTIONS_PAGE}.",
        )
        return
    try:
        connect = make_clients(read_access(given))
    except OnnxOpsError as error:
        yield Diagnosis(
            check="credentials",
            ok=False,
            found=f"{error.what} {error.why}".strip(),
            remedy=error.remedy,
        )
        return

    def check_credentials() -> Finding:
        caller = connect("sts").get_caller_identity()
        return True, f"{caller['Arn']} in {connect('sagemaker').meta.region_name}", ""

    yield (credentials := _run("credentials", check_credentials))
    if not credentials.ok or options is None:
        return
    yield _run("role", lambda: _check_role(connect("iam"), options.role))
    yield _run("bucket", lambda: _check_bucket(connect("s3"), options.bucket))
    yield _run("image", lambda: _check_image(connect, options.image))
    yield _run("pull", lambda: _check_pull(connect("iam"), options.role, options.image))
    yield _run("permissions", lambda: _check_permissions(connect, options))
    if options.alarms:
        yield _run("alarms", lambda: _check_alarms(connect("cloudwatch"), options.alarms))
    if not options.serverless:
        yield _run("quota", lambda: _check_quota(connect("service-quotas"), options))


def _run(check: str, find: Callable[[], Finding]) -> Diagnosis:
    return run_check(check, translate_errors("")(find), cloud="AWS")


def _ask(request: Callable[[], Any], *codes: str) -> tuple[Any, str]:
    """Return the answer to a request and an empty string.

    If the request fails with an error code in `codes`, return None and this code.
    """
    from botocore.exceptions import ClientError

    try:
        return request(), ""
    except ClientError as error:
        if (code := get_error_code(error)) not in codes:
            raise
        return None, code


def _check_role(iam: Any, arn: str) -> Finding:
    name = arn.rpartition("/")[2]
    answer, is_missing = _ask(lambda: iam.get_role(RoleName=name), "NoSuchEntity")
    if is_missing:
        return False, f"{arn} does not exist", f"{_DOCS} shows how to create the role."
    role = answer["Role"]
    if role["Arn"] != arn:
        return False, f"{name} is {role['Arn']}", "Correct `role`."
    trusts = _PRINCIPAL in json.dumps(role["AssumeRolePolicyDocument"])
    found = f"{arn} {'trusts' if trusts else 'does not trust'} SageMaker"
    return trusts, found, f"Add {_PRINCIPAL} to the role's trust policy."


def _check_bucket(s3: Any, bucket: str) -> Finding:
    _, code = _ask(lambda: s3.head_bucket(Bucket=bucket), "404", "NoSuchBucket", "403")
    if code == "403":
        return (
            False,
            f"access to s3://{bucket} is denied",
            f"Permit s3:ListBucket on the bucket, and the other actions that {_DOCS} lists.",
        )
    if code:
        return False, f"s3://{bucket} does not exist", f"aws s3 mb s3://{bucket}"
    return True, f"s3://{bucket}", ""


def _check_image(connect: Clients, image: str) -> Finding:
    """Check that the image is in ECR, in the endpoint's region."""
    match, region = _ECR.fullmatch(image), connect("sagemaker").meta.region_name
    create = f"`aws ecr create-repository --region {region} --repository-name"
    if match is None:
        remedy = (
            f"Run {create} onnx-ops`. Push the image, as {_DOCS} shows, and set `image` to its "
            "address. Only ECR is supported."
        )
        return False, f"{image} is not in ECR", remedy
    ecr = connect("ecr")
    if match["region"] != region:
        remedy = f"Copy the image to {region} (ECR can replicate it), and set `image` to the copy."
        return False, f"the image is in {match['region']}, not in {region}", remedy
    tag, repository = match["tag"] or "latest", match["repository"]
    ids = [{"imageDigest": match["digest"]} if match["digest"] else {"imageTag": tag}]
    push = f"`docker push {image}`"
    if match["digest"]:  # Docker refuses to push a digest.
        push = (
            f"`docker push {image.partition('@')[0]}:TAG`, and set `image` to the address "
            "with the digest that it prints"
        )
    login = f"{_DOCS} shows the login of Docker."
    answer, code = _ask(
        lambda: ecr.describe_images(
            registryId=match["account"], repositoryName=repository, imageIds=ids
        ),
        "RepositoryNotFoundException",
        "ImageNotFoundException",
    )
    if code == "RepositoryNotFoundException":
        remedy = f"Run {create} {repository}`, then {push}. {login}"
        return False, f"ECR has no repository {repository}", remedy
    if code:
        remedy = f"Run {push}. {login}"
        return False, f"{repository} has no {match['digest'] or tag}", remedy
    return (True, image, "") if answer["imageDetails"] else (False, f"{image} is not described", "")


def _check_pull(iam: Any, role: str, image: str) -> Finding:
    """Check that the policies of the role permit pulling the image.

    The policy of a repository in another account cannot be checked here.
    """
    match = _ECR.fullmatch(image)
    if match is None:
        return True, "the permission to pull is checked only for images in ECR", ""
    _, partition, _, _, account, *_ = role.split(":")
    arn = (
        f"arn:{partition}:ecr:{match['region']}:{match['account']}:repository/{match['repository']}"
    )
    denied = [
        action
        for actions, resource in ((("ecr:GetAuthorizationToken",), "*"), (_PULL_ACTIONS, arn))
        for action in _list_denied(iam, role, actions, resource)
    ]
    if denied:
        return (
            False,
            f"the role does not have these permissions: {', '.join(denied)}",
            (
                f"Grant the role these permissions on {arn}; ecr:GetAuthorizationToken needs the "
                "resource *."
            ),
        )
    if account != match["account"]:
        found = (
            "the role can pull the image; this check does not show whether account "
            f"{match['account']} permits this to account {account}"
        )
        return True, found, ""
    return True, "the role can pull the image", ""


def _list_denied(iam: Any, role: str, actions: tuple[str, ...], resource: str) -> list[str]:
    """Return the actions on a resource that the policies of a role do not permit."""
    answer = iam.simulate_principal_policy(
        PolicySourceArn=role, ActionNames=list(actions), ResourceArns=[resource]
    )
    return [
        result["EvalActionName"]
        for result in answer["EvaluationResults"]
        if result["EvalDecision"] != "allowed"
    ]


def _check_permissions(connect: Clients, options: SageMakerOptions) -> Finding:
    """Check that the role's policies permit what the options require.

    The policies of a bucket or key in another account cannot be checked here.
    """
    denied = {
        resource: missing
        for resource, actions in _list_needed(connect, options).items()
        if (missing := _list_denied(connect("iam"), options.role, actions, resource))
    }
    if not denied:
        return True, "the role has the permissions that the options need", ""
    found = "; ".join(f"{', '.join(actions)} on {arn}" for arn, actions in denied.items())
    return (
        False,
        f"the role does not have these permissions: {found}",
        f"Grant the role these permissions; {_DOCS} lists them.",
    )


def _list_needed(connect: Clients, options: SageMakerOptions) -> dict[str, tuple[str, ...]]:
    """Return the actions that the containers' role needs, by resource."""
    partition, prefix = options.role.split(":")[1], options.prefix.strip("/")
    bucket = f"arn:{partition}:s3:::{options.bucket}"
    needed: dict[str, tuple[str, ...]] = {f"{bucket}/{prefix}/*": ("s3:GetObject",)}
    if options.is_table:
        needed[f"{bucket}/{prefix}-reports/*"] = ("s3:GetObject", "s3:PutObject")
        needed[bucket] = ("s3:ListBucket",)
    if options.capture_uri:
        captured = options.capture_uri.removeprefix("s3://").rstrip("/")
        needed[f"arn:{partition}:s3:::{captured}/*"] = ("s3:PutObject",)
    if options.kms_key:
        needed[_find_key(connect, options.kms_key)] = KEY_ACTIONS
    if options.subnets:
        needed["*"] = NETWORK_ACTIONS
    return needed


def _find_key(connect: Clients, key: str) -> str:
    """Return the ARN of a key, which can be given as an alias, an ID or an ARN."""
    if ":key/" in key:
        return key
    return str(connect("kms").describe_key(KeyId=key)["KeyMetadata"]["Arn"])


def _check_alarms(cloudwatch: Any, names: tuple[str, ...]) -> Finding:
    states = {
        name: alarm["StateValue"] for name, alarm in describe_alarms(cloudwatch, names).items()
    }
    found = ", ".join(f"{name}: {states.get(name, 'does not exist')}" for name in names)
    return (
        set(names) <= set(states),
        found,
        "Create the missing alarms in CloudWatch, or correct `alarms`.",
    )


def _check_quota(quotas: Any, options: SageMakerOptions) -> Finding:
    """Check that the quota of instances suffices for an update.

    An update runs old and new instances at the same time. With one variant (`traffic: table` or
    strategy `guarded`), an update needs twice the instance count of the options. With strategy
    `ab`, it needs three times this count. With autoscaling, the count is `max_instances`.
    """
    name = f"{options.instance_type} for endpoint usage"
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    limits = [
        quota["Value"] for page in pages for quota in page["Quotas"] if quota["QuotaName"] == name
    ]
    needed = (options.max_instances or options.instance_count) * (2 if options.guarded else 3)
    remedy = (
        f"Request a quota of {needed} for '{name}' in the Service Quotas console; "
        "an update runs old and new instances at the same time."
    )
    if not limits:
        return False, f"Service Quotas lists no value for the quota '{name}'", remedy
    return (
        limits[0] >= needed,
        (
            f"the quota is {limits[0]:g} instances of {options.instance_type}; "
            f"an update needs up to {needed}"
        ),
        remedy,
    )
