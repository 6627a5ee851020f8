"""Permissions that `infra/azure` grants, and permissions that a request needs.

The permissions are those of the identity that runs onnx-ops. Built-in roles are copied from Azure's
documentation; our own roles are read from the file. Requests for which an administrator grants
permissions outside of that file are not checked. These are the shared registry, and the
subscription's sizes, quotas and container registries, which only `doctor` reads.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from tests.support.clouds.azureml_web import Call
from tests.support.processes import ROOT

_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
BUILT_IN = {
    "blobContributor": tuple(
        f"{_BLOBS}/{verb}" for verb in ("read", "write", "delete", "add/action")
    )
}
_RESOURCE = re.compile(r"^resource (\w+) '([^@]+)@[^']+' = \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_ACTION = re.compile(r"'(Microsoft\.[\w./*]+/(?:read|write|delete|action))'")
_VERBS = {"GET": "read", "HEAD": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}
_ANYBODY = ("/operations/", "/mferp/", "/registrymanagement/", "/imports/")
"""Paths that need no permission.

They are the status of the caller's own operations, and registries.
"""
_WORKSPACE = "/providers/Microsoft.MachineLearningServices/workspaces/"


@dataclass(frozen=True, slots=True)
class Request:
    """An action, and the scope at which a role must allow it.

    The scope is `workspace`, `storage` or empty for the resource group.
    """

    action: str
    scope: str


def is_allowed(request: Request) -> bool:
    """Return whether a role of the operator's identity allows the action.

    The role must be assigned at this scope or above it.
    """
    return any(
        scope in ("", request.scope) and any(_matches(action, request.action) for action in actions)
        for scope, actions in granted()
    )


@cache
def granted() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the scope and the actions of every role of the operator's identity.

    The roles are those that infra/azure assigns.
    """
    text = (ROOT / "infra" / "azure" / "onnx-ops.bicep").read_text(encoding="utf-8")
    resources = {name: (kind, body) for name, kind, body in _RESOURCE.findall(text)}
    own = {
        name: tuple(_ACTION.findall(body))
        for name, (kind, body) in resources.items()
        if kind.endswith("roleDefinitions")
    }
    found = []
    for kind, body in resources.values():
        if kind.endswith("roleAssignments") and "principalId: operator." in body:
            scope = re.search(r"^  scope: (\w+)$", body, re.MULTILINE)
            role = re.search(
                r"roleDefinitionId: .*?(?:roles\.)?(\w+)(?:\.id|\))$", body, re.MULTILINE
            )
            assert role is not None, body
            found.append((scope[1] if scope else "", own.get(role[1]) or BUILT_IN[role[1]]))
    return tuple(found)


def data_roles(identity: str) -> dict[str, str]:
    """Return the roles for blobs that `infra/azure` assigns to an identity, by scope."""
    text = (ROOT / "infra" / "azure" / "onnx-ops.bicep").read_text(encoding="utf-8")
    found = {}
    for _, kind, body in _RESOURCE.findall(text):
        role = re.search(r"roles\.(blob\w+)\)$", body, re.MULTILINE)
        scope = re.search(r"^  scope: (\w+)$", body, re.MULTILINE)
        is_assignment = kind.endswith("roleAssignments") and f"principalId: {identity}." in body
        if is_assignment and role is not None and scope is not None:
            found[scope[1]] = role[1]
    return found


def requests_of(call: Call) -> list[Request]:
    """Return the permissions that Azure requires for a request."""
    if call.path.startswith("/blobs/"):
        return [Request(f"{_BLOBS}/{_VERBS[call.method]}", "storage")]
    if call.path.startswith(_ANYBODY) or "/resourceGroups/" not in call.path:
        return []
    scope = "workspace" if _WORKSPACE in call.path else ""
    found = [Request(_action(call), scope)]
    if call.method == "PUT" and call.body and not call.path.endswith("/deployments"):
        identity = json.loads(call.body).get("identity") or {}
        assign = "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action"
        found += [Request(assign, "") for _ in identity.get("userAssignedIdentities") or ()]
    return found


def _action(call: Call) -> str:
    """Return the action of a request.

    Resource providers name their actions after the types in a path. Every second part of a path is
    a name.
    """
    provider, *parts = call.path.rpartition("/providers/")[2].strip("/").split("/")
    types = [part for at, part in enumerate(parts) if at % 2 == 0]
    return "/".join([provider, *types, "action" if call.method == "POST" else _VERBS[call.method]])


def _matches(pattern: str, action: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), action, re.IGNORECASE) is not None
