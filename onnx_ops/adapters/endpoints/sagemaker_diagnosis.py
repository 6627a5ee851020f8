"""What an endpoint at SageMaker needs of its surroundings, looked at one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onnx_ops.adapters.aws import Clients, Scalar, clients, code_of, translated
from onnx_ops.adapters.endpoints.sagemaker_image import image_found, role_pulls
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings, listed, settings_of
from onnx_ops.domain.target import Finding
from onnx_ops.errors import OnnxOpsError, RefusedError
from onnx_ops.plugins import install_hint

_PRINCIPAL = "sagemaker.amazonaws.com"
_DOCS = "docs/sagemaker.md"
_STRANGE = "the answer is not what AWS answers"
_PROXY = "Look at what stands between this machine and AWS: a proxy, or a page to log in."


def findings(given: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Package, credentials, region; with an endpoint's settings also its role, bucket, image, alarms and quota."""
    try:
        yield Finding(check="boto3", ok=True, found=version("boto3"))
    except PackageNotFoundError:
        yield Finding(check="boto3", ok=False, found="not installed", remedy=install_hint("boto3"))
        return
    settings = _settings(given)
    if isinstance(settings, Finding):
        yield settings
        return
    try:
        connected = clients(given)
    except OnnxOpsError as error:
        yield Finding(check="credentials", ok=False, found=f"{error.what} {error.why}".strip(), remedy=error.remedy)
        return
    alive = _looked("credentials", lambda: _caller(connected))
    yield alive
    if not alive.ok:
        return
    if settings is None:
        return
    yield _looked("role", lambda: _role(connected("iam"), settings.role))
    yield _looked("bucket", lambda: _bucket(connected("s3"), settings.bucket))
    yield _looked("image", lambda: image_found(connected, settings.image))
    yield _looked("pull", lambda: role_pulls(connected("iam"), settings.role, settings.image))
    if settings.alarms:
        yield _looked("alarms", lambda: _alarms(connected("cloudwatch"), listed(settings.alarms)))
    if not settings.serverless:
        yield _looked("quota", lambda: _quota(connected("service-quotas"), settings))


def _settings(given: Mapping[str, Scalar]) -> SageMakerSettings | Finding | None:
    if not given:
        return None
    try:
        return settings_of(given)
    except OnnxOpsError as error:
        return Finding(check="settings", ok=False, found=error.what, remedy=error.remedy or f"See {_DOCS}.")


def _looked(check: str, look: Callable[[], Finding]) -> Finding:
    """A look that cannot be taken is a finding too. What nobody needs to be permitted is no fault."""
    try:
        with translated(""):
            return look()
    except RefusedError as error:
        return Finding(check=check, ok=True, found=f"may not be looked at: {error.why}")
    except OnnxOpsError as error:
        return Finding(check=check, ok=False, found=f"{error.what} {error.why}".strip(), remedy=error.remedy)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a success without what it should hold
        return Finding(check=check, ok=False, found=f"{_STRANGE}: {error!r}", remedy=_PROXY)


def _caller(connected: Clients) -> Finding:
    sts = connected("sts")
    found = sts.get_caller_identity()
    return Finding(check="credentials", ok=True, found=f"{found['Arn']} in {connected('sagemaker').meta.region_name}")


def _role(iam: Any, arn: str) -> Finding:
    from botocore.exceptions import ClientError

    name = arn.rpartition("/")[2]
    try:
        role = iam.get_role(RoleName=name)["Role"]
    except ClientError as error:
        if code_of(error) != "NoSuchEntity":
            raise
        return Finding(check="role", ok=False, found=f"{arn} does not exist", remedy=f"{_DOCS} shows how to make it.")
    if role["Arn"] != arn:
        return Finding(check="role", ok=False, found=f"{name} is {role['Arn']}", remedy="Correct `role`.")
    trusts = _PRINCIPAL in json.dumps(role["AssumeRolePolicyDocument"])
    return Finding(
        check="role",
        ok=trusts,
        found=f"{arn} {'trusts' if trusts else 'does not trust'} SageMaker",
        remedy=f"Let {_PRINCIPAL} assume it: add it to the role's trust policy.",
    )


def _bucket(s3: Any, bucket: str) -> Finding:
    from botocore.exceptions import ClientError

    try:
        s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        missing = code_of(error) in ("404", "NoSuchBucket")
        if not missing and code_of(error) != "403":
            raise
        found = "does not exist" if missing else "is not permitted"
        remedy = f"aws s3 mb s3://{bucket}" if missing else "Permit s3:ListBucket, s3:GetObject and s3:PutObject on it."
        return Finding(check="bucket", ok=False, found=f"s3://{bucket} {found}", remedy=remedy)
    return Finding(check="bucket", ok=True, found=f"s3://{bucket}")


def _alarms(cloudwatch: Any, names: tuple[str, ...]) -> Finding:
    found = cloudwatch.describe_alarms(AlarmNames=list(names), AlarmTypes=["MetricAlarm", "CompositeAlarm"])
    states = {
        a["AlarmName"]: a["StateValue"] for kind in ("MetricAlarms", "CompositeAlarms") for a in found.get(kind, ())
    }
    told = ", ".join(f"{name}: {states.get(name, 'does not exist')}" for name in names)
    return Finding(
        check="alarms", ok=set(names) <= set(states), found=told, remedy="Make them in CloudWatch, or correct `alarms`."
    )


def _quota(quotas: Any, settings: SageMakerSettings) -> Finding:
    """An update runs the old instances beside the new ones; with `ab` two variants of them."""
    wanted = f"{settings.instance_type} for endpoint usage"
    pages = quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
    limits = [quota["Value"] for page in pages for quota in page["Quotas"] if quota["QuotaName"] == wanted]
    needed = (settings.max_instances or settings.instance_count) * (2 if settings.guarded else 3)
    remedy = f"Ask for {needed} of '{wanted}' in the console of Service Quotas; an update needs room for both fleets."
    if not limits:
        return Finding(check="quota", ok=False, found=f"no quota is called '{wanted}'", remedy=remedy)
    found = f"{limits[0]:g} {settings.instance_type}, of which an update takes up to {needed}"
    return Finding(check="quota", ok=limits[0] >= needed, found=found, remedy=remedy)
