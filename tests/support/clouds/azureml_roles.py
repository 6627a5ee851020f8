"""What the identity that runs onnx-ops may do by `infra/azure`, and what a request to the fake asks for.

Of built-in roles the documented content stands here; our own are read from the file. What a person
is to permit outside of that file is not held against it: the shared registry, and the
subscription's sizes, quotas and container registries, which only `doctor` looks at.
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
"""The status of one's own operations; and registries."""
_WORKSPACE = "/providers/Microsoft.MachineLearningServices/workspaces/"


@dataclass(frozen=True, slots=True)
class Request:
    """An action, and the scope at which a role must allow it: `workspace`, `storage` or `` for the resource group."""

    action: str
    scope: str


def is_allowed(request: Request) -> bool:
    """Return whether a role that the operator's identity has at this scope, or above it, holds the action."""
    return any(
        scope in ("", request.scope) and any(_matches(action, request.action) for action in actions)
        for scope, actions in granted()
    )


@cache
def granted() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the scope and the actions of every role that infra/azure assigns to the operator's identity."""
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


def requests_of(call: Call) -> list[Request]:
    """Return what must be allowed so that Azure does what was asked."""
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
    """Resource providers name their actions after the types in a path, whose every second part is a name."""
    provider, *parts = call.path.rpartition("/providers/")[2].strip("/").split("/")
    types = [part for at, part in enumerate(parts) if at % 2 == 0]
    return "/".join([provider, *types, "action" if call.method == "POST" else _VERBS[call.method]])


def _matches(pattern: str, action: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), action, re.IGNORECASE) is not None
