"""What everything that speaks to Azure shares: whose workspace it is, at which cloud, and a token for it.

Which cloud, and who we are, come from the environment alone, as for every Azure tool: `AZUREML_CURRENT_CLOUD` or
`ARM_CLOUD_METADATA_URL`, and what `DefaultAzureCredential` of azure-identity looks for.
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

from onnx_ops.adapters.exchange import exchange, host_of
from onnx_ops.adapters.host import machine_vendor
from onnx_ops.config.binding import bind_settings
from onnx_ops.domain.quantities import Json, Pattern
from onnx_ops.errors import InfrastructureError, OnnxOpsError, RefusedError, ServiceUnavailableError, UserError, quoted
from onnx_ops.plugins import EXTRAS, require

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential


_MANAGEMENT = {
    "AzureCloud": "https://management.azure.com",
    "AzureChinaCloud": "https://management.chinacloudapi.cn",
    "AzureUSGovernment": "https://management.usgovcloudapi.net",
}
_ENDPOINT = Pattern(
    r"(?=.{3,32}\Z)[a-z]([-a-z0-9]*[a-z0-9])?", "3 to 32 lower-case letters, digits and hyphens, first a letter"
)
PlaceName = Annotated[str, Pattern(r"(?a)[\w.()-]{1,90}", "a name in Azure")]
EndpointName = Annotated[str, _ENDPOINT]
"""Azure takes capitals too, but lowers them in the traffic; so they are not used."""

API_TIMEOUT_S = 60.0
"""Time that Azure may take to answer one request."""
_CONNECT_S = 10.0
_TOKEN_TRIES = 3
_LONGEST_PAUSE_S = 5.0

LOGIN_REMEDY = (
    "Run `az login`, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET (or a federated token), or give "
    "the machine a managed identity."
)
ROLE_REMEDY = "Give the identity the role AzureML Data Scientist on the workspace; see docs/azureml.md."


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """An Azure ML workspace."""

    subscription: PlaceName
    resource_group: PlaceName
    workspace: PlaceName

    @property
    def path(self) -> str:
        """Its resource id."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )


def workspace_of(settings: Mapping[str, Json], *, where: str = "") -> Workspace:
    """The workspace that an endpoint's settings name.

    Raises:
        SettingsError: `subscription`, `resource_group` or `workspace` is missing or no name.
    """
    given = {f.name: settings[f.name] for f in fields(Workspace) if f.name in settings}
    return bind_settings(given, Workspace, where=where, remedy="Add them to the endpoint's settings: workspace: NAME.")


def endpoint_name(endpoint: str, settings: Mapping[str, Json]) -> str:
    """What the endpoint is called in Azure: its setting `name`, else its own name.

    Raises:
        UserError: Azure takes no such name.
    """
    name = settings.get("name", endpoint)
    if isinstance(name, str) and re.fullmatch(_ENDPOINT.regex, name):
        return name
    raise UserError(
        f"Azure takes no endpoint of the name {name!r}",
        where=endpoint,
        remedy="Set `name`: 3 to 32 lower-case letters, digits and hyphens, first a letter; unique in the region.",
    )


def management_url() -> str:
    """Where Azure Resource Manager answers."""
    if told := os.environ.get("ARM_CLOUD_METADATA_URL"):
        parts = urlsplit(told)
        return f"{parts.scheme}://{parts.netloc}"
    cloud = os.environ.get("AZUREML_CURRENT_CLOUD", "AzureCloud")
    return _MANAGEMENT.get(cloud, _MANAGEMENT["AzureCloud"])


def timeouts(api_timeout_s: float) -> dict[str, float]:
    """Options of every client of the SDK's, which would wait five minutes for a connection, and for an answer."""
    return {"connection_timeout": min(_CONNECT_S, api_timeout_s), "read_timeout": api_timeout_s}


@functools.cache
def credential(api_timeout_s: float = API_TIMEOUT_S) -> TokenCredential:
    """Who we are. Made once, since it keeps its tokens. A token is asked for three times at most.

    Args:
        api_timeout_s: how long the answer to such a request may take.

    Raises:
        MissingPackageError: the extra `azure` is not installed.
    """
    require(*EXTRAS["azure"], where="Azure")
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential(
        **timeouts(api_timeout_s), retry_total=_TOKEN_TRIES - 1, retry_backoff_max=_LONGEST_PAUSE_S
    )


_IDENTITY_VARIABLES = ("AZURE_CLIENT_ID", "AZURE_USERNAME", "IDENTITY_ENDPOINT", "MSI_ENDPOINT")
_IDENTITY_FILES = ("azureProfile.json", "msal_token_cache.json", "msal_token_cache.bin", "AzureRmContext.json")


def missing_credentials(*, where: str = "") -> OnnxOpsError | None:
    """Return that nothing here says who we are; None if something may. Nothing is asked or verified.

    A machine of Azure's may have an identity, which only the network tells.
    """
    home = Path.home()
    folders = [Path(os.environ.get("AZURE_CONFIG_DIR", home / ".azure")), home / ".Azure", home / ".azd" / "auth"]
    files = [folder / name for folder in folders for name in _IDENTITY_FILES]
    known = any(os.environ.get(name) for name in _IDENTITY_VARIABLES) or any(file.is_file() for file in files)
    if known or folders[-1].is_dir() or machine_vendor().startswith("Microsoft"):
        return None
    return RefusedError("Azure does not know who we are", where=where, remedy=LOGIN_REMEDY)


def bearer() -> str:
    """A token for Azure Resource Manager.

    Raises:
        RefusedError: nobody says who we are.
        InfrastructureError: that could not be found out.
        MissingPackageError: the extra `azure` is not installed.
    """
    require(*EXTRAS["azure"], where="Azure")
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    try:
        return str(credential().get_token(f"{management_url()}/.default").token)
    except ClientAuthenticationError as error:
        raise RefusedError("Azure does not know who we are", why=first_line(error), remedy=LOGIN_REMEDY) from error
    except AzureError as error:
        raise InfrastructureError("no token for Azure", why=first_line(error), remedy=LOGIN_REMEDY) from error


def ask(path: str, *, document: object = None, method: str = "GET") -> Any:
    """One exchange with Azure Resource Manager; None if the answer is empty.

    Args:
        path: of the resource, with the query.

    Raises:
        ServiceUnavailableError: it does not answer, asks to try again later, or does not answer JSON, as proxies
            and pages to log in do.
        RefusedError: it says no.
    """
    base = management_url()
    host = host_of(base, "the address of Azure Resource Manager")
    found = exchange(method, f"{base}{path}", document, host=host, headers={"Authorization": f"Bearer {bearer()}"})
    if isinstance(found, str) and found:
        why = f"it begins with {found[:60]!r}"
        remedy = f"Look at what stands between this machine and {host}: a proxy, or a page to log in."
        raise ServiceUnavailableError("does not answer in JSON", where=host, why=why, remedy=remedy)
    return found or None


def first_line(error: BaseException) -> str:
    """What an error of the SDK says, without its pages of advice."""
    text = str(getattr(error, "message", "") or error).strip()
    return quoted(text.splitlines()[0]) if text else type(error).__name__
