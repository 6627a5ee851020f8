"""IAM permissions that a request to the fake needs.

They are the actions and resources that AWS checks for the request, with their tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from tests.support.clouds.iam import Request
from tests.support.clouds.sagemaker_parts import ACCOUNT, REGION, arn_of

Tags = Mapping[str, Mapping[str, str]]
"""Tags by ARN."""
_NAMED = {
    "Model": ("model", "ModelName"),
    "EndpointConfig": ("endpoint-config", "EndpointConfigName"),
}
_S3_OF_OBJECT = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "POST": "PutObject"}
_LINKED_ROLE = "sagemaker.application-autoscaling.amazonaws.com"


def requests_of(environ: Mapping[str, Any], tags: Tags) -> list[Request]:
    """Return all permissions that AWS requires for a request.

    The list is empty if the request needs no permission.
    """
    target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
    body = environ["wsgi.input"].getvalue()
    if target.startswith("SageMaker."):
        return list(_sagemaker(target.removeprefix("SageMaker."), json.loads(body), tags))
    if target:
        service, _, operation = target.partition(".")
        return list(_other(service, operation, json.loads(body or b"{}")))
    if environ["PATH_INFO"] == "/" and environ["REQUEST_METHOD"] == "POST":
        return list(_query({name: values[0] for name, values in parse_qs(body.decode()).items()}))
    return [
        _s3(environ["REQUEST_METHOD"], environ["PATH_INFO"], str(environ.get("QUERY_STRING", "")))
    ]


def _sagemaker(operation: str, request: Mapping[str, Any], tags: Tags) -> Iterator[Request]:
    if "ResourceArn" in request:
        arns = [request["ResourceArn"]]
    elif operation.startswith("List"):
        arns = ["*"]
    else:
        arns = [arn_of(noun, request[key]) for noun, key in _nouns(operation) if key in request]
    given = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in request.get("Tags", ())}
    for arn in arns:
        held = {f"aws:ResourceTag/{key}": value for key, value in tags.get(arn, {}).items()}
        yield Request(f"sagemaker:{operation}", arn, given | held)
    if given:
        yield Request("sagemaker:AddTags", arns[0], {**given, "sagemaker:TaggingAction": operation})
    if "ExecutionRoleArn" in request:
        yield Request(
            "iam:PassRole",
            request["ExecutionRoleArn"],
            {"iam:PassedToService": "sagemaker.amazonaws.com"},
        )


def _nouns(operation: str) -> list[tuple[str, str]]:
    """Return the resource types of an operation, and the keys of their names.

    Other operations are about an endpoint and its config.
    """
    for suffix, named in _NAMED.items():
        if operation.endswith(suffix):
            return [named]
    return [("endpoint", "EndpointName"), _NAMED["EndpointConfig"]]


def _other(service: str, operation: str, request: Mapping[str, Any]) -> Iterator[Request]:
    """Yield the permissions for the services that use JSON."""
    if service == "AnyScaleFrontendService" and operation.startswith("Describe"):
        yield Request(f"application-autoscaling:{operation}", "*")
    elif service == "AnyScaleFrontendService":
        arn = f"arn:aws:application-autoscaling:{REGION}:{ACCOUNT}:scalable-target/1"
        yield Request(f"application-autoscaling:{operation}", arn)
        alarm = (
            f"arn:aws:cloudwatch:{REGION}:{ACCOUNT}:alarm:"
            f"TargetTracking-{request['ResourceId']}-AlarmHigh-1"
        )
        if operation == "RegisterScalableTarget":
            role = (
                f"role/aws-service-role/{_LINKED_ROLE}/"
                "AWSServiceRoleForApplicationAutoScaling_SageMakerEndpoint"
            )
            context = {"iam:AWSServiceName": _LINKED_ROLE}
            yield Request("iam:CreateServiceLinkedRole", f"arn:aws:iam::{ACCOUNT}:{role}", context)
        elif operation == "PutScalingPolicy":
            yield Request("cloudwatch:PutMetricAlarm", alarm)
        else:
            yield Request("cloudwatch:DeleteAlarms", alarm)
    elif service.startswith("AmazonEC2ContainerRegistry"):
        yield Request(
            f"ecr:{operation}",
            f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/{request['repositoryName']}",
        )
    elif service.startswith("GraniteService"):
        yield Request(f"cloudwatch:{operation}", "*")
    elif service == "TrentService":
        yield Request(f"kms:{operation}", f"arn:aws:kms:{REGION}:{ACCOUNT}:{request['KeyId']}")
    elif service.startswith("ServiceQuotas"):
        yield Request(f"servicequotas:{operation}", "*")
    else:
        yield Request(f"unknown:{service}.{operation}", "*")


def _query(request: Mapping[str, str]) -> Iterator[Request]:
    """Yield the permissions for IAM and STS.

    AWS lets every identity request its own identity.
    """
    action = request["Action"]
    if action == "GetCallerIdentity":
        return
    name = request.get("RoleName") or request.get("PolicySourceArn", "").rpartition("/")[2]
    yield Request(f"iam:{action}", f"arn:aws:iam::{ACCOUNT}:role/{name}")


def _s3(method: str, path: str, query: str) -> Request:
    bucket, _, key = path.strip("/").partition("/")
    if not key:
        action = (
            "ListBucketMultipartUploads"
            if re.search(r"(^|&)uploads(=|&|$)", query)
            else "ListBucket"
        )
        return Request(f"s3:{action}", f"arn:aws:s3:::{bucket}")
    if method == "DELETE":
        action = "AbortMultipartUpload" if "uploadId=" in query else "DeleteObject"
    else:
        action = _S3_OF_OBJECT[method]
    return Request(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}")
