"""Access to AWS: boto3's clients, their errors, and the names of variants."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, Unit

from onnx_ops.adapters.host import machine_vendor
from onnx_ops.adapters.retry import retry
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.artifact import digest_bytes, hex_digits
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import (
    InfrastructureError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.plugins import absent, require

T = TypeVar("T")

Clients = Callable[[str], Any]
"""Function that returns boto3's client for the name of a service.

It always returns the same client for one service.
"""

GUARDED_VARIANT = "main"
"""Name of the variant of a guarded endpoint, which every update keeps.

SageMaker guards the updates of such an endpoint with alarms (`strategy: guarded`, `traffic:
table`). It does not guard an update that changes the name of the variant.
"""

_NAME = re.compile(r"(?=.{1,63}\Z)[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_ATTEMPTS = 6
API_TIMEOUT_S = 60.0
"""Seconds within which AWS must answer one request, by default."""
_UNAVAILABLE = (ServiceUnavailableError, "AWS cannot serve the request now", "Try again later.")
_ERRORS_BY_CODES: Mapping[str, tuple[type[OnnxOpsError], str, str]] = {
    "ConditionalRequestConflict InternalFailure InternalServerError RequestTimeout "
    "ServiceUnavailable": _UNAVAILABLE,
    "RequestLimitExceeded SlowDown Throttling ThrottlingException "
    "TooManyRequestsException": _UNAVAILABLE,
    "AccessDenied AccessDeniedException UnauthorizedOperation 403": (
        RefusedError,
        "AWS does not permit {}",
        "Grant the caller the permission. `onnx-ops docs sagemaker` lists those for endpoints.",
    ),
    "ExpiredToken ExpiredTokenException InvalidClientTokenId UnrecognizedClientException "
    "SignatureDoesNotMatch": (
        ServiceUnavailableError,
        "AWS does not accept the credentials",
        "Sign in again with `aws sso login`, or replace the access key.",
    ),
    "LimitExceededException ResourceLimitExceeded": (
        InfrastructureError,
        "a quota of the account is used up",
        "Request a higher quota, or delete resources that `onnx-ops status --orphans` lists.",
    ),
}
"""Error class, message and remedy by the error codes of a service.

Several codes are separated by spaces. `{}` in a message is replaced by the operation.
"""
_ERRORS = {code: error for codes, error in _ERRORS_BY_CODES.items() for code in codes.split()}


_IDENTITY_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_IDENTITY_SETTINGS = (
    "aws_access_key_id",
    "credential_process",
    "login_session",
    "role_arn",
    "sso_session",
    "sso_start_url",
    "web_identity_token_file",
)


# Slots would break options classes that inherit from two bases.
@dataclass(frozen=True, kw_only=True)
class AwsAccess:
    """Region, profile and time-out of requests to AWS.

    If `region` or `profile` is empty, boto3 determines it.
    """

    region: str = ""
    profile: str = ""
    api_timeout: Annotated[float, Unit("s"), Ge(0.1), Le(600)] = API_TIMEOUT_S


def read_access(*options: Mapping[str, Json], where: str = "") -> AwsAccess:
    """Return `AwsAccess` from mappings of options; later mappings take precedence.

    Raises:
        UserError: an option is not valid.
    """
    names = [f.name for f in fields(AwsAccess)]
    given = {name: each[name] for each in options for name in names if name in each}
    return bind_options(given, AwsAccess, where=where)


def make_clients(access: AwsAccess, *, where: str = "") -> Clients:
    """Return boto3's clients for a region and a profile.

    A client makes at most six attempts if an error is retryable.

    Raises:
        MissingPackageError: boto3 is not installed.
        UserError: the profile does not exist, or the region is missing.
    """
    require("boto3", where=where or "AWS")
    import boto3
    import botocore.session
    from botocore.config import Config

    core = botocore.session.Session(profile=access.profile or None)
    with translate_errors(where):
        core.register_component("data_loader", _models(core.get_config_variable("data_path")))
        session = boto3.session.Session(region_name=access.region or None, botocore_session=core)
    if session.region_name is None:
        raise _no_region(where)
    how = Config(
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        connect_timeout=min(10.0, access.api_timeout),
        read_timeout=access.api_timeout,
        user_agent_extra="onnx-ops",
    )

    @cache
    def client(service: str) -> Any:
        with translate_errors(where):
            return session.client(service, config=how)

    return client


def find_missing_credentials(access: AwsAccess, *, where: str = "") -> OnnxOpsError | None:
    """Return an error if profile, region or credentials are missing; send no request.

    Missing credentials are not an error on a machine in AWS, which can have a role that only a
    request would reveal. The result is None if boto3 is not installed.
    """
    if absent(("boto3",)):
        return None  # `make_clients` reports the missing package.
    import botocore.session

    core = botocore.session.Session(profile=access.profile or None)
    try:
        with translate_errors(where):
            if not access.region and core.get_config_variable("region") is None:
                return _no_region(where)
            known = core.full_config.get("profiles", {}).get(core.profile or "default", {})
    except OnnxOpsError as error:
        return error
    if any(os.environ.get(name) for name in _IDENTITY_VARIABLES) or any(
        known.get(name) for name in _IDENTITY_SETTINGS
    ):
        return None
    return None if machine_vendor().startswith("Amazon") else _no_credentials(where)


@cache
def _models(data_path: str | None) -> Any:
    """Return the loader of the service descriptions; sessions share it by data path.

    Loading the descriptions takes a third of a second.
    """
    from botocore.loaders import create_loader

    return create_loader(data_path)


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Raise boto3's errors as errors of onnx-ops, with a remedy for known codes."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        InvalidRegionError,
        NoCredentialsError,
        NoRegionError,
        ParamValidationError,
        PartialCredentialsError,
        ProfileNotFound,
    )

    try:
        yield
    except ClientError as error:
        code, operation = get_error_code(error), str(getattr(error, "operation_name", "the call"))
        is_down = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
        otherwise = _UNAVAILABLE if is_down else (InfrastructureError, "AWS refused {}", "")
        kind, what, remedy = _ERRORS.get(code, otherwise)
        why = f"{operation}: {code}: {get_error_message(error)}"
        raise kind(what.format(operation), where=where, why=why, remedy=remedy) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise _no_credentials(where, str(error)) from error
    except NoRegionError as error:
        raise _no_region(where) from error
    except (ProfileNotFound, ParamValidationError, InvalidRegionError) as error:
        what = "the AWS profile, the region or a parameter of the request is not valid"
        remedy = "Correct the setting that the cause names."
        raise UserError(what, where=where, why=str(error), remedy=remedy) from error
    except BotoCoreError as error:
        raise ServiceUnavailableError(
            "the request to AWS failed",
            where=where,
            why=str(error),
            remedy="Try again later, or sign in again if the credentials have expired.",
        ) from error


def write_conditionally(send: Callable[[], T]) -> T | None:
    """Return the response to a conditional write to S3; None if the condition fails.

    The condition also fails if the object was deleted meanwhile. S3 can refuse both of two
    concurrent writers, and then requests a retry. Such a write is sent up to six times.
    """
    from botocore.exceptions import ClientError

    raced = ("ConditionalRequestConflict", "409")
    try:
        return retry(
            send,
            lambda error: isinstance(error, ClientError) and get_error_code(error) in raced,
            _ATTEMPTS,
        )
    except ClientError as error:
        # S3 returns `NoSuchKey` for a conditional write if the object was deleted meanwhile.
        if get_error_code(error) not in ("PreconditionFailed", "412", "NoSuchKey"):
            raise
        return None


def describe_alarms(cloudwatch: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named alarms that exist in CloudWatch, by name."""
    answer = cloudwatch.describe_alarms(
        AlarmNames=list(names), AlarmTypes=["MetricAlarm", "CompositeAlarm"]
    )
    kinds = ("MetricAlarms", "CompositeAlarms")
    return {alarm["AlarmName"]: alarm for kind in kinds for alarm in answer.get(kind, ())}


def get_error_code(error: Any) -> str:
    """Return the error code that the service gave in a `ClientError`."""
    return str(error.response.get("Error", {}).get("Code", ""))


def get_error_message(error: Any) -> str:
    """Return the message that the service gave in a `ClientError`."""
    return str(error.response.get("Error", {}).get("Message", ""))


def build_variant_name(deployment: str) -> str:
    """Return the variant name of a deployment.

    If SageMaker allows the deployment's name, this name is returned. Otherwise, the result consists
    of at most 40 characters of this name and a part of its digest. Hyphens replace the characters
    that are not allowed.
    """
    if _NAME.fullmatch(deployment):
        return deployment
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", deployment).strip("-")[:40].strip("-")
    return f"{plain or 'd'}-{hex_digits(digest_bytes(deployment.encode()))[:8]}"


def is_valid_name(text: str) -> bool:
    """Return whether a string is a valid name of an endpoint or a variant."""
    return _NAME.fullmatch(text) is not None


def _no_credentials(where: str, why: str = "") -> UserError:
    remedy = (
        "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or run on a machine with a role."
    )
    return UserError(
        "AWS credentials are missing or incomplete", where=where, why=why, remedy=remedy
    )


def _no_region(where: str) -> UserError:
    remedy = "Set AWS_DEFAULT_REGION, or `region` in an endpoint's options or in the AWS profile."
    return UserError("no AWS region is set", where=where, remedy=remedy)
