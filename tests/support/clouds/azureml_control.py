"""The control plane of the fake: the Azure Resource Manager of one workspace."""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.clouds.azureml_autoscale import Autoscale
from tests.support.clouds.azureml_blobs import Blobs
from tests.support.clouds.azureml_registry import Registries
from tests.support.clouds.azureml_resources import BUSY, Body, Operation, Resource, refuse, reply
from tests.support.clouds.azureml_web import Call, Reply
from tests.support.clouds.containers import ContainerPool, Containers, NotReadyError

_NAME = re.compile(r"(?=.{3,32}\Z)[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?")
_ENDPOINT = re.compile(r"onlineEndpoints/(?P<name>[^/]+)")
_DEPLOYMENT = re.compile(r"onlineEndpoints/(?P<endpoint>[^/]+)/deployments/(?P<name>[^/]+)")
_ASSET = re.compile(r"(?P<kind>models|environments)/(?P<name>[^/]+)/versions/(?P<version>[^/]+)")
_DATASTORE_PATH = re.compile(
    r"azureml://(?:subscriptions/.*/)?datastores/(?P<store>\w+)/paths/(?P<path>.+)"
)
_MOST_DEPLOYMENTS = 20
_SPARE = 1.2
_SOON, _LATER = {"Retry-After": "0.01"}, {"Retry-After": "5"}
"""Headers of the answer to a poll.

The first apply if polls are counted, the second if time counts.
"""
_DELETED = {"Retry-After": "1"}
"""Header of the answer to a deletion.

The SDK reads it as an integer, and takes 0 for absent.
"""
LOCATION, SIZE, CORES = "loopback", "Standard_DS3_v2", 4
_MADE = "2026-11-20T12:00:00Z"
_REGISTRIES = "/providers/Microsoft.ContainerRegistry/registries"
_IDENTITIES = "/providers/Microsoft.ManagedIdentity/userAssignedIdentities/"
_ACR_PULL = "7f951dda-4ed3-4680-a7ca-43fe172d538d"
"""Azure's own id of the role AcrPull."""
STORE, CONTAINER = "workspaceblobstore", "models"
_DATASTORE = {
    "datastoreType": "AzureBlob",
    "accountName": "loopback",
    "containerName": CONTAINER,
    "endpoint": "core.windows.net",
    "protocol": "https",
    "isDefault": True,
    "credentials": {"credentialsType": "None"},
}


@dataclass(slots=True, kw_only=True)
class Conditions:
    """Behaviour of the cloud that tests can set.

    Args:
        looks: polls until an operation ends.
        duration: returns the seconds until an operation ends. If it is set, polls are not counted.
        lag: reads that still show the previous state.
        quota: quota in instances.
        broken: deployments that do not start.
        refusal: code and message with which instances of deployments are refused.
        forbidden: whether requests to the workspace are refused with 403.
        roles: the caller's permissions in the workspace.
        no_workspace: whether the workspace is missing.
        container_registries: names of the container registries.
        pullers: identities with the role AcrPull.
        missing_identities: identities that do not exist.
    """

    looks: int = 2
    duration: Callable[[], float] | None = None
    lag: int = 0
    quota: int = 100
    broken: set[str] = field(default_factory=set)
    refusal: tuple[str, str] | None = None
    forbidden: bool = False
    roles: list[Body] = field(default_factory=lambda: [{"actions": ["*"], "notActions": []}])
    no_workspace: bool = False
    container_registries: list[str] = field(default_factory=lambda: ["mlimages"])
    pullers: list[str] = field(default_factory=lambda: ["serving"])
    missing_identities: list[str] = field(default_factory=list)


class Control:
    """Resources by their path below the workspace. It handles one request at a time."""

    def __init__(self, url: str, workspace: str, blobs: Blobs, containers: Containers) -> None:
        self.conditions = Conditions()
        self.resources: dict[str, Resource] = {}
        self.routes: dict[str, list[dict[str, int]]] = {}
        """Every traffic split that took effect, by endpoint.

        The last split is in effect now.
        """
        self.mirrors: dict[str, dict[str, int]] = {}
        self.nodes: dict[tuple[str, str], ContainerPool] = {}
        self.keys: dict[str, str] = {}
        self._url = url
        self._workspace = workspace
        self._blobs = blobs
        self._containers = containers
        self._operations: dict[str, tuple[Resource, Operation]] = {}
        self.autoscale = Autoscale()
        self.registries = Registries(url, workspace.split("/")[2], self._copied)

    @property
    def _soon(self) -> Mapping[str, str]:
        return _SOON if self.conditions.duration is None else _LATER

    def concurrency(self, endpoint: str, deployment: str) -> int:
        """Return the number of requests that a deployment's instances take concurrently."""
        body = self.resources[f"onlineEndpoints/{endpoint}/deployments/{deployment}"].body
        requests = body["properties"].get("requestSettings") or {}
        return int(requests.get("maxConcurrentRequestsPerInstance", 1)) * int(
            (body.get("sku") or {}).get("capacity", 1)
        )

    def elapse(self) -> None:
        """Complete the operations whose time is over."""
        if self.conditions.duration is not None:
            for resource in list(self.resources.values()):
                resource.look()

    def answer(self, call: Call) -> Reply:
        self.elapse()
        if self.registries.concerns(call.path):
            return self.registries.answer(call)
        if call.path.startswith("/operations/"):
            return self._operation(call.path)
        if (around := self._around(call.path)) is not None:
            return reply(200, around)
        if self.autoscale.concerns(call.path) and not self.conditions.forbidden:
            return self.autoscale.answer(call)
        if (
            not call.path.lower().startswith(self._workspace.lower())
            or self.conditions.no_workspace
        ):
            return refuse(404, "ResourceNotFound", f"The Resource '{call.path}' was not found.")
        if self.conditions.forbidden:
            message = "The client does not have authorization to perform action over scope."
            return refuse(403, "AuthorizationFailed", message)
        return self._inside(call, call.path[len(self._workspace) :].strip("/"))

    def _inside(self, call: Call, path: str) -> Reply:
        fixed: dict[str, Callable[[], Body]] = {
            "": lambda: (
                self._described("", {"properties": {"workspaceId": "1"}}) | {"location": LOCATION}
            ),
            f"datastores/{STORE}": lambda: self._described(path, {"properties": _DATASTORE}),
            "providers/Microsoft.Authorization/permissions": lambda: {
                "value": self.conditions.roles
            },
        }
        if path in fixed:
            return reply(200, fixed[path]())
        if found := _DEPLOYMENT.fullmatch(path):
            return self._deployment(call, path, found["endpoint"], found["name"])
        if re.fullmatch(r"onlineEndpoints/([^/]+)/deployments", path):
            return self._list(f"{path}/")
        if found := re.fullmatch(r"onlineEndpoints/([^/]+)/listKeys", path):
            key = self.keys.get(found[1])
            return (
                reply(200, {"primaryKey": key, "secondaryKey": key}) if key else self._missing(path)
            )
        if found := _ENDPOINT.fullmatch(path):
            return self._endpoint(call, path, found["name"])
        if found := _ASSET.fullmatch(path):
            return self._asset(call, path, found)
        return self._missing(path)

    def _around(self, path: str) -> Body | None:
        """Return resources outside the workspace; None for other paths.

        These are container registries, identities, role assignments for pulls, sizes and free
        cores.
        """
        what = path.partition(f"/locations/{LOCATION}/")[2]
        if what == "vmSizes":
            return {"value": [{"name": SIZE, "family": "standardDSv2Family", "vCPUs": CORES}]}
        if what == "usages":
            kind, limit = {"value": "standardDSv2Family"}, self.conditions.quota * CORES
            used = (
                sum(_instances(r.body) for p, r in self.resources.items() if "/deployments/" in p)
                * CORES
            )
            return {"value": [{"name": kind, "currentValue": used, "limit": limit}]}
        if path.endswith(_REGISTRIES):
            group = f"{'/'.join(path.split('/')[:3])}/resourceGroups/group"
            names = self.conditions.container_registries
            ids = {name: f"{group}{_REGISTRIES}/{name}" for name in names}
            return {
                "value": [
                    {"id": ids[n], "properties": {"loginServer": f"{n}.azurecr.io"}} for n in names
                ]
            }
        if (
            _IDENTITIES in path
            and path.rpartition("/")[2] not in self.conditions.missing_identities
        ):
            return {"properties": {"principalId": f"principal-of-{path.rpartition('/')[2]}"}}
        if _REGISTRIES in path and path.endswith(
            "/providers/Microsoft.Authorization/roleAssignments"
        ):
            role = f"/providers/Microsoft.Authorization/roleDefinitions/{_ACR_PULL}"
            may = [
                {"principalId": f"principal-of-{n}", "roleDefinitionId": role}
                for n in self.conditions.pullers
            ]
            return {"value": [{"properties": properties} for properties in may]}
        return None

    def _endpoint(self, call: Call, path: str, name: str) -> Reply:
        there = self.resources.get(path)
        if call.method == "GET":
            return self._get(there, path)
        if there is not None and there.state in BUSY:
            message = (
                f"Cannot change endpoint {name} because it is in {there.state} provisioning state."
            )
            return refuse(409, "Conflict", message)
        if call.method == "DELETE":

            def forget() -> None:
                for other in [p for p in self.resources if p == path or p.startswith(f"{path}/")]:
                    del self.resources[other]
                for key in [key for key in self.nodes if key[0] == name]:
                    self._containers.end(self.nodes.pop(key))
                for kept in (self.routes, self.mirrors, self.keys):
                    kept.pop(name, None)

            return self._delete(there, forget)
        body = json.loads(call.body)
        if (wrong := self._wrong_endpoint(name, body)) is not None:
            return wrong
        resource, before = self._written(path, body)
        properties = resource.body["properties"]
        properties["traffic"] = {
            k.lower(): v for k, v in (properties.get("traffic") or {}).items() if v
        }
        properties["mirrorTraffic"] = {
            k.lower(): v for k, v in (properties.get("mirrorTraffic") or {}).items() if v
        }
        properties["scoringUri"] = f"{self._url}/score/{name}/invocations"
        self.keys.setdefault(name, f"key-of-{name}")

        def effect() -> None:
            resource.state = "Succeeded"
            self.routes.setdefault(name, []).append(dict(properties["traffic"]))
            self.mirrors[name] = dict(properties["mirrorTraffic"])
            resource.lags(self.conditions.lag, before)

        return self._begun(resource, "Creating" if before is None else "Updating", effect)

    def _wrong_endpoint(self, name: str, body: Body) -> Reply | None:
        if not _NAME.fullmatch(name):
            return refuse(400, "BadArgument", f"Endpoint name {name} is not valid.")
        traffic, mirror = (
            body["properties"].get(key) or {} for key in ("traffic", "mirrorTraffic")
        )
        if sum(traffic.values()) not in (0, 100):
            return refuse(400, "BadArgument", "Traffic must sum to 0 or 100.")
        if len(mirror) > 1 or any(v > 50 or traffic.get(k) for k, v in mirror.items()):
            return refuse(400, "BadArgument", "Mirror traffic is not valid.")
        for deployment in (*traffic, *mirror):
            found = self.resources.get(f"onlineEndpoints/{name}/deployments/{deployment.lower()}")
            if found is None or found.state != "Succeeded":
                return refuse(
                    404, "NotFound", f"Deployment {deployment} was not found in endpoint {name}."
                )
        return None

    def _deployment(self, call: Call, path: str, endpoint: str, name: str) -> Reply:
        there, owner = self.resources.get(path), self.resources.get(f"onlineEndpoints/{endpoint}")
        if call.method == "GET":
            return self._get(there, path)
        if owner is None:
            return self._missing(path)
        for what, found in ((f"endpoint {endpoint}", owner), (f"deployment {name}", there)):
            if found is not None and found.state in BUSY:
                message = (
                    f"Cannot create a deployment because {what} is in {found.state} provisioning "
                    "state"
                )
                return refuse(409, "Conflict", message)
        if call.method == "DELETE":
            split = {
                **owner.body["properties"]["traffic"],
                **owner.body["properties"]["mirrorTraffic"],
            }
            if split.get(name):
                return refuse(
                    400, "BadRequest", f"Deployment {name} has traffic and cannot be deleted."
                )

            def forget() -> None:
                self.resources.pop(path, None)
                if (pool := self.nodes.pop((endpoint, name), None)) is not None:
                    self._containers.end(pool)

            return self._delete(there, forget)
        if call.method == "PATCH" and there is None:
            return self._missing(path)
        return self._written_deployment(call, path, endpoint, name)

    def _written_deployment(self, call: Call, path: str, endpoint: str, name: str) -> Reply:
        body = json.loads(call.body)
        # PATCH can change only the tags and the number of instances (`sku`) of a deployment.
        if call.method == "PATCH":
            if set(body) - {"tags", "sku"}:
                return refuse(400, "BadArgument", "Only tags and sku can be changed.")
            body = {**copy.deepcopy(self.resources[path].body), **body}
        elif not _NAME.fullmatch(name):
            return refuse(400, "BadArgument", f"Deployment name {name} is not valid.")
        if (refused := self._over_quota(path, body)) is not None:
            return refused
        resource, before = self._written(path, body)
        resource.body["properties"]["scaleSettings"] = {"scaleType": "Default"}

        def effect() -> tuple[str, str] | None:
            if call.method == "PUT":
                return self._launched(resource, endpoint, name, before)
            count = int((resource.body.get("sku") or {}).get("capacity", 1))
            variables = resource.body["properties"].get("environmentVariables") or {}
            try:
                self._containers.resize(self.nodes[endpoint, name], variables, count)
            except NotReadyError as error:
                # The running instances continue to serve.
                resource.state = "Failed"
                return "ContainerCrashed", f"User container has crashed or terminated: {error}"
            resource.state = "Succeeded"
            resource.lags(self.conditions.lag, before)
            return None

        return self._begun(resource, "Creating" if before is None else "Updating", effect)

    def _over_quota(self, path: str, body: Body) -> Reply | None:
        others = [r for p, r in self.resources.items() if "/deployments/" in p and p != path]
        used = sum(_instances(r.body) for r in others)
        wanted = _instances(body)
        if self.conditions.refusal is not None:
            return refuse(400, *self.conditions.refusal)
        if used + wanted > self.conditions.quota:
            kind = body["properties"]["instanceType"]
            message = (
                f"Not enough quota available for {kind}. Current usage: {used}. Needed: {wanted}."
            )
            return refuse(400, "OutOfQuota", message)
        siblings = [
            p for p in self.resources if p.startswith(path.rpartition("/")[0]) and p != path
        ]
        if len(siblings) >= _MOST_DEPLOYMENTS:
            return refuse(
                400, "BadRequest", "The endpoint has the most deployments that are allowed."
            )
        return None

    def _launched(
        self, resource: Resource, endpoint: str, name: str, before: Body | None
    ) -> tuple[str, str] | None:
        """Mount the model and start the container; return an error if that fails."""
        properties = resource.body["properties"]
        model = str(properties.get("model") or "")
        shared = self.registries.files(model)
        copied = self._copied(model.partition(f"{self._workspace}/")[2])
        files = shared or (copied[1] if copied else {})
        wanted = properties.get("environmentVariables") or {}
        try:
            if name in self.conditions.broken:
                raise NotReadyError("broken on order")
            count = int((resource.body.get("sku") or {}).get("capacity", 1))
            self.nodes[endpoint, name] = self._containers.start(files, wanted, count)
        except NotReadyError as error:
            resource.state = "Failed"
            return "ContainerCrashed", f"User container has crashed or terminated: {error}"
        resource.state = "Succeeded"
        resource.lags(self.conditions.lag, before)
        return None

    def _copied(self, path: str) -> tuple[Body, dict[str, bytes]] | None:
        """Return the model at a path below the workspace, and its files."""
        asset = self.resources.get(path)
        if asset is None:
            return None
        mounted = _DATASTORE_PATH.fullmatch(str(asset.body["properties"]["modelUri"]))
        return copy.deepcopy(asset.body), self._blobs.below(mounted["path"]) if mounted else {}

    def _asset(self, call: Call, path: str, found: re.Match[str]) -> Reply:
        if call.method == "GET":
            return self._get(self.resources.get(path), path)
        resource, _ = self._written(path, json.loads(call.body))
        resource.body["properties"] = {"tags": {}, "flavors": {}, **resource.body["properties"]}
        resource.body["name"] = found["version"]
        return reply(201, resource.body)

    def _written(self, path: str, body: Body) -> tuple[Resource, Body | None]:
        """Return the resource with its new body, and its previous body."""
        there = self.resources.get(path)
        before = None if there is None else copy.deepcopy(there.body)
        described = self._described(path, body)
        if there is None:
            there = self.resources[path] = Resource(body=described)
        else:
            there.body, there.stale = described, 0
        return there, before

    def _begun(self, resource: Resource, state: str, effect: Callable[[], Any]) -> Reply:
        operation = resource.begin(state, self.conditions.looks, effect)
        if self.conditions.duration is not None:
            resource.ends_at = time.monotonic() + self.conditions.duration()
        number = str(len(self._operations) + 1)
        self._operations[number] = (resource, operation)
        headers = {
            "Azure-AsyncOperation": f"{self._url}/operations/{number}?api-version=1",
            **self._soon,
        }
        return reply(201 if state == "Creating" else 200, resource.body, headers)

    def _delete(self, there: Resource | None, effect: Callable[[], None]) -> Reply:
        if there is None:
            return reply(204)
        started = self._begun(there, "Deleting", effect)
        headers = {k: v for k, v in started.headers.items() if k != "Retry-After"}
        return reply(
            202, None, {**headers, **_DELETED, "Location": headers["Azure-AsyncOperation"]}
        )

    def _operation(self, path: str) -> Reply:
        resource, operation = self._operations[path.rpartition("/")[2]]
        resource.look()
        if not operation.done:
            return reply(200, {"status": "InProgress"}, self._soon)
        if operation.error is None:
            return reply(200, {"status": "Succeeded"})
        code, message = operation.error
        return reply(200, {"status": "Failed", "error": {"code": code, "message": message}})

    def _get(self, there: Resource | None, path: str) -> Reply:
        if there is not None:
            there.look()
            there = self.resources.get(path)
        body = None if there is None else there.shown()
        return self._missing(path) if body is None else reply(200, body)

    def _list(self, prefix: str) -> Reply:
        found = [resource for path, resource in self.resources.items() if path.startswith(prefix)]
        for resource in found:
            resource.look()
        kept = [resource for path, resource in self.resources.items() if path.startswith(prefix)]
        return reply(
            200, {"value": [body for resource in kept if (body := resource.shown()) is not None]}
        )

    def _described(self, path: str, body: Mapping[str, Any]) -> Body:
        full = f"{self._workspace}/{path}".rstrip("/")
        return {
            "tags": {},
            **copy.deepcopy(dict(body)),
            "id": full,
            "name": full.rpartition("/")[2],
            "type": "Microsoft.MachineLearningServices/workspaces",
            "systemData": {"createdBy": "somebody", "createdAt": _MADE, "lastModifiedAt": _MADE},
        }

    def _missing(self, path: str) -> Reply:
        return refuse(404, "ResourceNotFound", f"The Resource '{path}' was not found.")


def _instances(body: Body) -> int:
    """Return the instances that Azure counts: a fifth more than run."""
    return math.ceil(int((body.get("sku") or {}).get("capacity", 1)) * _SPARE)
