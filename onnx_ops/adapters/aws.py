"""Access to AWS: boto3's clients, their errors, and names of variants."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any

from annotated_types import Ge, Le, Unit

from onnx_ops.adapters.host import machine_vendor
from onnx_ops.adapters.retry import retry
from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.artifact import digest_bytes, hex_digits
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import InfrastructureError, OnnxOpsError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.plugins import absent, require

Clients = Callable[[str], Any]
"""A client of boto3 by the name of its service; always the same one."""

GUARDED_VARIANT = "main"
"""A guarded update keeps the variant's name: with another one SageMaker would not guard it."""

_NAME = re.compile(r"(?=.{1,63}\Z)[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_ATTEMPTS = 6
_CONNECT_S = 10.0
API_TIMEOUT_S = 60.0
"""Time that AWS may take to answer one request."""
_TAKEN = frozenset({"PreconditionFailed", "412"})
_RACED = frozenset({"ConditionalRequestConflict", "409"})
_UNAVAILABLE = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalFailure",
        "InternalServerError",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})
_UNAUTHENTICATED = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "SignatureDoesNotMatch",
    }
)
_QUOTA_USED_UP = frozenset({"LimitExceededException", "ResourceLimitExceeded"})


@dataclass(frozen=True, kw_only=True)  # no slots: settings inherit from two dataclasses
class AwsAccess:
    """Settings that choose account and region; boto3 finds empty ones."""

    region: str = ""
    profile: str = ""
    api_timeout: Annotated[float, Unit("s"), Ge(0.1), Le(600)] = API_TIMEOUT_S


def read_access(*settings: Mapping[str, Json], where: str = "") -> AwsAccess:
    """Return the access that settings choose among others; later ones win.

    Raises:
        SettingsError: One of them is wrong.
    """
    names = [f.name for f in fields(AwsAccess)]
    given = {name: each[name] for each in settings for name in names if name in each}
    return bind_settings(given, AwsAccess, where=where)


def make_clients(access: AwsAccess, *, where: str = "") -> Clients:
    """Return the clients for a region and a profile.

    They retry, six times at most, what may be tried again: throttling, 5xx, connections that break, answers that do not
    come in time.

    Raises:
        UserError: there is no such profile, or no region is chosen: some services would do without, others not.
        MissingPackageError: the extra `aws` is not installed.
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
        connect_timeout=min(_CONNECT_S, access.api_timeout),
        read_timeout=access.api_timeout,
        user_agent_extra="onnx-ops",
    )
    made: dict[str, Any] = {}

    def client(service: str) -> Any:
        if service not in made:
            with translate_errors(where):
                made[service] = session.client(service, config=how)
        return made[service]

    return client


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


def find_missing_credentials(access: AwsAccess, *, where: str = "") -> OnnxOpsError | None:
    """Return the error of missing credentials, without a request; None if unknown.

    A machine in AWS may have a role, which only a request would show.
    """
    if absent(("boto3",)):
        return None  # a problem of its own
    import botocore.session

    core = botocore.session.Session(profile=access.profile or None)
    try:
        with translate_errors(where):
            if not access.region and core.get_config_variable("region") is None:
                return _no_region(where)
            known = core.full_config.get("profiles", {}).get(core.profile or "default", {})
    except OnnxOpsError as error:
        return error
    if any(os.environ.get(name) for name in _IDENTITY_VARIABLES) or any(known.get(name) for name in _IDENTITY_SETTINGS):
        return None
    return None if machine_vendor().startswith("Amazon") else _no_credentials(where)


@cache
def _models(data_path: str | None) -> Any:
    """Return the descriptions of services, read once for all sessions: that takes a third of a second."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


@contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Raise boto3's errors as errors of onnx-ops, each with its remedy."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise _of_service(error, where) from error
    except BotoCoreError as error:
        raise _of_client(error, where) from error


def create_once(send: Callable[[], object]) -> None:
    """Let `send` create an object of S3 if there is none; an existing one stays.

    S3 may refuse two concurrent writers both, and asks them to retry.

    Raises:
        ClientError: it could not be created.
    """
    from botocore.exceptions import ClientError

    try:
        retry(send, lambda error: isinstance(error, ClientError) and get_error_code(error) in _RACED, _ATTEMPTS)
    except ClientError as error:
        if get_error_code(error) not in _TAKEN:
            raise


def get_error_code(error: Any) -> str:
    """Return the service's code of a `ClientError`."""
    return str(error.response.get("Error", {}).get("Code", ""))


def get_error_message(error: Any) -> str:
    """Return the service's message of a `ClientError`."""
    return str(error.response.get("Error", {}).get("Message", ""))


def has_error_text(error: Any, *texts: str) -> bool:
    """Return whether a `ClientError`'s message contains a text, in any case."""
    return any(text.lower() in get_error_message(error).lower() for text in texts)


def build_variant_name(deployment: str) -> str:
    """Return the name of a deployment's variant: its own where that is allowed."""
    if _NAME.fullmatch(deployment):
        return deployment
    plain = re.sub(r"[^a-zA-Z0-9]+", "-", deployment).strip("-")[:40].strip("-")
    return f"{plain or 'd'}-{hex_digits(digest_bytes(deployment.encode()))[:8]}"


def is_valid_name(text: str) -> bool:
    """Return whether it can be the name of an endpoint or a variant."""
    return _NAME.fullmatch(text) is not None


def _of_service(error: Any, where: str) -> OnnxOpsError:
    code, operation = get_error_code(error), str(getattr(error, "operation_name", "the call"))
    why = f"{operation}: {code}: {get_error_message(error)}"
    if code in _UNAUTHENTICATED:
        return ServiceUnavailableError(
            "AWS does not accept the credentials", where=where, why=why, remedy="Sign in again: `aws sso login`."
        )
    if code in _DENIED:
        return RefusedError(
            f"AWS does not permit {operation}",
            where=where,
            why=why,
            remedy="docs/sagemaker.md lists the permissions that the caller needs.",
        )
    if code in _QUOTA_USED_UP:
        return InfrastructureError(
            "a quota of the account is used up",
            where=where,
            why=why,
            remedy="Request more in the console of Service Quotas, or free some: `onnx-ops status --orphans`.",
        )
    if code in _UNAVAILABLE or error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
        return ServiceUnavailableError(
            "AWS does not answer as it should", where=where, why=why, remedy="Try again later."
        )
    return InfrastructureError(f"AWS refused {operation}", where=where, why=why)


def _no_credentials(where: str, why: str = "") -> UserError:
    remedy = "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role is given."
    return UserError("there are no AWS credentials", where=where, why=why, remedy=remedy)


def _no_region(where: str) -> UserError:
    remedy = "Set `region` in the endpoint's settings, or AWS_DEFAULT_REGION."
    return UserError("no AWS region is chosen", where=where, remedy=remedy)


def _of_client(error: Any, where: str) -> OnnxOpsError:
    from botocore import exceptions as of

    if isinstance(error, of.NoCredentialsError | of.PartialCredentialsError):
        return _no_credentials(where, str(error))
    if isinstance(error, of.NoRegionError):
        return _no_region(where)
    if isinstance(error, of.ProfileNotFound | of.ParamValidationError | of.InvalidRegionError):
        return UserError("AWS cannot be asked like that", where=where, why=str(error))
    return ServiceUnavailableError("AWS does not answer", where=where, why=str(error), remedy="Try again later.")
