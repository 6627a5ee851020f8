"""Whether the endpoint will find its image in an Azure container registry, and may pull it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnx_ops.adapters.azure import ask
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.domain.target import Finding

_SUFFIX = ".azurecr.io"
_PULLS = frozenset({"7f951dda-4ed3-4680-a7ca-43fe172d538d", "8311e382-0749-4cb8-b61a-304f252e45ec"})
"""Azure's own ids of the roles AcrPull and AcrPush."""


def image_findings(settings: AzureSettings, workspace: Mapping[str, Any]) -> Iterator[Finding]:
    """The registry, and the right to pull from it. Whether the tag is there Azure Resource Manager does not tell.

    Args:
        workspace: what Azure Resource Manager says of it.
    """
    host, check = settings.image.partition("/")[0], "azure image"
    if not host.endswith(_SUFFIX):
        told = f"{host} is no Azure container registry: whether the endpoint may pull from it is not seen from here"
        yield Finding(check=check, ok=True, found=told)
        return
    path = f"/subscriptions/{settings.place.subscription}/providers/Microsoft.ContainerRegistry/registries"
    registries = ask(f"{path}?api-version=2023-07-01").get("value", ())
    ids = [one["id"] for one in registries if str(one["properties"]["loginServer"]).lower() == host.lower()]
    if not ids:
        remedy = (
            f"az acr create --name {host.removesuffix(_SUFFIX)} --sku Basic --resource-group GROUP, or correct `image`."
        )
        yield Finding(check=check, ok=False, found=f"the subscription has no registry {host}", remedy=remedy)
        return
    yield Finding(check=check, ok=True, found=f"{host} is there")
    yield _pull(settings, str(ids[0]), str(workspace.get("properties", {}).get("containerRegistry", "")))


def _pull(settings: AzureSettings, registry: str, attached: str) -> Finding:
    check = "azure pull"
    if not settings.identity:
        if registry.lower() == attached.lower():
            return Finding(check=check, ok=True, found="it is the workspace's registry, which its endpoints may use")
        told = "the endpoint's own identity has to get the role AcrPull, once the endpoint is there"
        return Finding(check=check, ok=True, found=told)
    principal = ask(f"{settings.identity}?api-version=2023-01-31")["properties"]["principalId"]
    found = ask(f"{registry}/providers/Microsoft.Authorization/roleAssignments?api-version=2022-04-01").get("value", ())
    roles = {
        str(one["properties"]["roleDefinitionId"]).rpartition("/")[2]
        for one in found
        if one["properties"]["principalId"] == principal
    }
    name = settings.identity.rpartition("/")[2]
    if roles & _PULLS:
        return Finding(check=check, ok=True, found=f"{name} may pull")
    remedy = f"az role assignment create --assignee {principal} --role AcrPull --scope {registry}"
    return Finding(check=check, ok=False, found=f"{name} has no role AcrPull there", remedy=remedy)
