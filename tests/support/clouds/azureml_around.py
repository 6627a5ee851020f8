"""What stands around the fake's workspace: container registries, identities, and who may pull."""

from __future__ import annotations

from collections.abc import Collection

from tests.support.clouds.azureml_resources import reply
from tests.support.clouds.azureml_web import Reply

ACR_PULL = "7f951dda-4ed3-4680-a7ca-43fe172d538d"
"""Azure's own id of the role AcrPull."""
_REGISTRIES = "/providers/Microsoft.ContainerRegistry/registries"
_IDENTITIES = "/providers/Microsoft.ManagedIdentity/userAssignedIdentities/"
_ASSIGNMENTS = "/providers/Microsoft.Authorization/roleAssignments"


def told_around(path: str, registries: Collection[str], pullers: Collection[str]) -> Reply | None:
    """None if the path is about something else.

    Args:
        registries: names of the subscription's container registries.
        pullers: names of the identities that have the role AcrPull on them.
    """
    group = f"{'/'.join(path.split('/')[:3])}/resourceGroups/group"
    if path.endswith(_REGISTRIES):
        found = [
            {"id": f"{group}{_REGISTRIES}/{name}", "properties": {"loginServer": f"{name}.azurecr.io"}}
            for name in registries
        ]
        return reply(200, {"value": found})
    if _IDENTITIES in path:
        return reply(200, {"properties": {"principalId": _principal(path.rpartition("/")[2])}})
    if _REGISTRIES in path and path.endswith(_ASSIGNMENTS):
        role = f"/providers/Microsoft.Authorization/roleDefinitions/{ACR_PULL}"
        found = [{"properties": {"principalId": _principal(name), "roleDefinitionId": role}} for name in pullers]
        return reply(200, {"value": found})
    return None


def _principal(identity: str) -> str:
    return f"principal-of-{identity}"
