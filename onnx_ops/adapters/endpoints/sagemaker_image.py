"""Whether SageMaker will find the image, and may pull it."""

from __future__ import annotations

import re
from typing import Any

from onnx_ops.adapters.aws import Clients, code_of
from onnx_ops.domain.target import Finding

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<repository>[a-z0-9._/-]+)"
    r"(@(?P<digest>sha256:[0-9a-f]{64})|:(?P<tag>[\w.-]+))?"
)
_PULLS = ("ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability")


def image_found(connected: Clients, image: str) -> Finding:
    """Whether it is in ECR, in the endpoint's region, and there."""
    from botocore.exceptions import ClientError

    found = _ECR.fullmatch(image)
    if found is None:
        remedy = (
            "Push it to ECR: SageMaker takes it from there. `aws ecr create-repository --repository-name onnx-ops`."
        )
        return Finding(check="image", ok=False, found=f"{image} is not in ECR", remedy=remedy)
    ecr, region = connected("ecr"), connected("sagemaker").meta.region_name
    if found["region"] != region:
        remedy = f"Push it to {region} too (ECR can replicate), and name that one in `image`."
        return Finding(check="image", ok=False, found=f"it is in {found['region']}, not in {region}", remedy=remedy)
    named = {"imageDigest": found["digest"]} if found["digest"] else {"imageTag": found["tag"] or "latest"}
    try:
        described = ecr.describe_images(
            registryId=found["account"], repositoryName=found["repository"], imageIds=[named]
        )["imageDetails"]
    except ClientError as error:
        if code_of(error) == "RepositoryNotFoundException":
            remedy = f"aws ecr create-repository --repository-name {found['repository']}, then docker push {image}"
            return Finding(check="image", ok=False, found=f"there is no {found['repository']}", remedy=remedy)
        if code_of(error) != "ImageNotFoundException":
            raise
        told = f"{found['repository']} has no {found['digest'] or found['tag'] or 'latest'}"
        return Finding(check="image", ok=False, found=told, remedy=f"docker push {image}")
    return Finding(check="image", ok=bool(described), found=image if described else f"{image} is not described")


def role_pulls(iam: Any, role: str, image: str) -> Finding:
    """Whether the role's policies let it pull. A repository of another account has a policy of its own beside them."""
    found = _ECR.fullmatch(image)
    if found is None:
        return Finding(check="pull", ok=True, found="nothing to say of an image that is not in ECR")
    partition = role.split(":")[1]
    arn = f"arn:{partition}:ecr:{found['region']}:{found['account']}:repository/{found['repository']}"
    asked = (("ecr:GetAuthorizationToken",), "*"), (_PULLS, arn)
    lacking = [
        one["EvalActionName"]
        for actions, resource in asked
        for one in iam.simulate_principal_policy(
            PolicySourceArn=role, ActionNames=list(actions), ResourceArns=[resource]
        )["EvaluationResults"]
        if one["EvalDecision"] != "allowed"
    ]
    if lacking:
        told = f"the role may not {', '.join(lacking)}"
        return Finding(check="pull", ok=False, found=told, remedy=f"Permit that to the role, on {arn} and *.")
    account = role.split(":")[4]
    if account != found["account"]:
        told = f"the role may; whether account {found['account']} lets account {account} is not seen from here"
        return Finding(check="pull", ok=True, found=told)
    return Finding(check="pull", ok=True, found="the role may pull it")
