"""Access to Azure: workspace, cloud, credentials, Azure Resource Manager.

Cloud and credentials come from the environment: `AZUREML_CURRENT_CLOUD` or
`ARM_CLOUD_METADATA_URL`, and what `DefaultAzureCredential` of azure-identity reads.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from onnx_ops.adapters.host import machine_vendor
from onnx_ops.adapters.http_json import TIMEOUT_S, request_json, require_https
from onnx_ops.config.binding import bind_options
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.errors import (
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
    quoted,
)
from onnx_ops.plugins import EXTRAS, require

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

_MANAGEMENT = {
    "AzureCloud": "https://management.azure.com",
    "AzureChinaCloud": "https://management.chinacloudapi.cn",
    "AzureUSGovernment": "https://management.usgovcloudapi.net",
}
_ENDPOINT = Pattern(
    r"(?=.{3,32}\Z)[a-z]([-a-z0-9]*[a-z0-9])?",
    "3 to 32 lower-case letters, digits and hyphens, first a letter and last not a hyphen",
)
PlaceName = Annotated[str, Pattern(r"(?a)[\w.()-]{1,90}", "a name in Azure")]
EndpointName = Annotated[str, _ENDPOINT]
"""Name of an endpoint in Azure, without capitals.

Azure accepts capitals, but converts them to lower case in the keys of the traffic split.
"""

API_TIMEOUT_S = 60.0
"""Seconds within which Azure must answer one request of the SDK, by default.

`request_resource` waits at most `TIMEOUT_S` for an answer.
"""
_NO_CONNECTION = re.compile(
    r"timed out|connection (aborted|refused|reset)|failed to establish", re.IGNORECASE
)
_IDENTITY_VARIABLES = ("AZURE_CLIENT_ID", "AZURE_USERNAME", "IDENTITY_ENDPOINT", "MSI_ENDPOINT")
_IDENTITY_FILES = (
    "azureProfile.json",
    "msal_token_cache.json",
    "msal_token_cache.bin",
    "AzureRmContext.json",
)
LOGIN_REMEDY = (
    "Run `az login`, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET (or a "
    "federated token), or give the machine a managed identity."
)
_WORKSPACE_ROLE = "the role AzureML Data Scientist on the workspace"
_ROLES = {
    "LinkedAuthorizationFailed": "the role Managed Identity Operator on the endpoint's `identity`",
    "AuthorizationPermissionMismatch": (
        "the role Storage Blob Data Contributor on the storage account of the workspace"
    ),
    "Microsoft.MachineLearningServices/registries/": (
        "the role AzureML Registry User on the registry"
    ),
    "Microsoft.Insights/autoscaleSettings/": (
        "a role with the permissions of autoscaling (`onnx-ops docs azureml-options`)"
    ),
    "Microsoft.Insights/metrics/": "the role Monitoring Reader on the workspace",
}
"""Roles other than the workspace's, by a code or an action in Azure's refusal.

A permission on a linked resource is missing only if `identity` is set. Blob storage names no
action.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """An Azure ML workspace."""

    subscription: PlaceName
    resource_group: PlaceName
    workspace: PlaceName

    @property
    def path(self) -> str:
        """Resource id of the workspace."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )


def read_workspace(options: Mapping[str, Json], *, where: str = "") -> Workspace:
    """Return the workspace that an endpoint's options name.

    Raises:
        UserError: an option is missing or not valid.
    """
    given = {f.name: options[f.name] for f in fields(Workspace) if f.name in options}
    return bind_options(
        given,
        Workspace,
        where=where,
        remedy="Set `subscription`, `resource_group` and `workspace` in the endpoint's options.",
    )


def read_endpoint_name(endpoint: str, options: Mapping[str, Json]) -> str:
    """Return an endpoint's name in Azure: the option `name`, else `endpoint`.

    Raises:
        UserError: the name is not valid in Azure.
    """
    name = options.get("name", endpoint)
    if isinstance(name, str) and re.fullmatch(_ENDPOINT.regex, name):
        return name
    raise UserError(
        f"{name!r} cannot be the name of an endpoint in Azure",
        where=endpoint,
        remedy="Set `name` to 3 to 32 lower-case letters, digits and hyphens. The first is a "
        "letter, the last is not a hyphen, and the name is unique in the region.",
    )


def get_management_url() -> str:
    """Return the address of Azure Resource Manager."""
    if metadata_url := os.environ.get("ARM_CLOUD_METADATA_URL"):
        parts = urlsplit(metadata_url)
        return f"{parts.scheme}://{parts.netloc}"
    cloud = os.environ.get("AZUREML_CURRENT_CLOUD", "AzureCloud")
    return _MANAGEMENT.get(cloud, _MANAGEMENT["AzureCloud"])


def make_role_remedy(*denied: str) -> str:
    """Return the remedy for missing permissions.

    Args:
        denied: actions, or refusals of Azure. A refusal that names no other permission is treated
            as one of the workspace.
    """
    roles = (
        next((role for part, role in _ROLES.items() if part in text), _WORKSPACE_ROLE)
        for text in denied
    )
    return f"Give the identity {' and '.join(dict.fromkeys(roles))}; see `onnx-ops docs azureml`."


def build_timeouts(api_timeout_s: float) -> dict[str, float]:
    """Return time-outs for clients of the SDK, which waits five minutes by default."""
    return {"connection_timeout": min(10.0, api_timeout_s), "read_timeout": api_timeout_s}


@functools.cache
def get_credential(api_timeout_s: float = API_TIMEOUT_S) -> TokenCredential:
    """Return the credential of this process for Azure.

    Credentials that request tokens over HTTP cache them, and make three attempts. Those of
    command-line tools, such as `az`, start a process for each token.

    Raises:
        MissingPackageError: a package of the extra `azure` is not installed.
    """
    require(*EXTRAS["azure"], where="Azure")
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential(
        **build_timeouts(api_timeout_s), retry_total=2, retry_backoff_max=5.0
    )


def find_missing_credentials(*, where: str = "") -> OnnxOpsError | None:
    """Return an error if credentials are missing; send no request.

    The result is None on a machine in Azure, which can have a managed identity that only a request
    would reveal.
    """
    home = Path.home()
    folders = [
        Path(os.environ.get("AZURE_CONFIG_DIR", home / ".azure")),
        home / ".Azure",
        home / ".azd" / "auth",
    ]
    files = [folder / name for folder in folders for name in _IDENTITY_FILES]
    known = any(os.environ.get(name) for name in _IDENTITY_VARIABLES) or any(
        file.is_file() for file in files
    )
    if known or folders[-1].is_dir() or machine_vendor().startswith("Microsoft"):
        return None
    return RefusedError("there are no Azure credentials", where=where, remedy=LOGIN_REMEDY)


def fetch_token(service: str = "", api_timeout_s: float = API_TIMEOUT_S) -> str:
    """Return a token for a service, which is given by its address.

    The default service is Azure Resource Manager.

    Raises:
        RefusedError: credentials are missing, or Azure does not accept them.
        ServiceUnavailableError: the token service does not answer, or the SDK reports another
            error.
        MissingPackageError: a package of the extra `azure` is not installed.
    """
    require(*EXTRAS["azure"], where="Azure")
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    scope = f"{service or get_management_url()}/.default"
    try:
        return str(get_credential(api_timeout_s).get_token(scope).token)
    except ClientAuthenticationError as error:
        if is_unanswered_token_request(error):
            raise make_token_error(error) from error
        raise RefusedError(
            "Azure credentials are missing or not accepted",
            why=summarize_error(error),
            remedy=LOGIN_REMEDY,
        ) from error
    except AzureError as error:
        raise ServiceUnavailableError(
            "no token for Azure could be obtained", why=summarize_error(error), remedy=LOGIN_REMEDY
        ) from error


def is_unanswered_token_request(error: BaseException) -> bool:
    """Return whether authentication failed because the token service did not answer."""
    is_answered = getattr(error, "status_code", None) is not None
    return not is_answered and _NO_CONNECTION.search(str(error)) is not None


def make_token_error(error: BaseException, where: str = "") -> ServiceUnavailableError:
    """Return the error of a token service that does not answer."""
    return ServiceUnavailableError(
        "the token service does not answer",
        where=where,
        why=summarize_error(error),
        remedy="Try again.",
    )


def request_resource(
    path: str,
    *,
    document: object = None,
    method: str = "GET",
    api_timeout_s: float = API_TIMEOUT_S,
) -> Any:
    """Send a request to Azure Resource Manager; return None for an empty answer.

    Raises:
        ServiceUnavailableError: Azure or its token service does not answer or reports a temporary
            error, or a proxy or login page answers in another format than JSON.
        RefusedError: there are no credentials, or the answer is a redirect or has another error
            status.
        UserError: the address of Azure Resource Manager does not use https.
        MissingPackageError: a package of the extra `azure` is not installed.
    """
    base = get_management_url()
    host = require_https(base, "the address of Azure Resource Manager")
    headers = {"Authorization": f"Bearer {fetch_token(api_timeout_s=api_timeout_s)}"}
    timeout_s = min(TIMEOUT_S, api_timeout_s)
    answer = request_json(
        method, f"{base}{path}", document, host=host, headers=headers, timeout_s=timeout_s
    )
    if isinstance(answer, str) and answer:
        why = f"its answer begins with {answer[:60]!r}"
        remedy = f"Check for a proxy or a login page between this machine and {host}."
        what = "the server does not answer in JSON"
        raise ServiceUnavailableError(what, where=host, why=why, remedy=remedy)
    return answer or None


def summarize_error(error: BaseException) -> str:
    """Return the first line of an SDK's error, without the long advice after it."""
    text = str(getattr(error, "message", "") or error).strip()
    return quoted(text.splitlines()[0]) if text else type(error).__name__
