"""Model registries of the fake.

A registry is shared by all workspaces. Models are copied to it from a workspace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from tests.support.clouds.azureml_resources import Body, Operation, Resource, refuse, reply
from tests.support.clouds.azureml_web import Call, Reply

REGISTRY = "shared"
_DISCOVERY = re.compile(r"/registrymanagement/v1\.0/registries/(?P<name>[^/]+)/discovery")
_INSIDE = re.compile(
    r"/mferp/managementfrontend/subscriptions/[^/]+/.*/registries/(?P<name>[^/]+)/(?P<path>.+)"
)
_NAMED = re.compile(
    r"azureml://registries/(?P<registry>[^/]+)/(?P<path>models/[^/]+/versions/[^/]+)"
)
_SOURCE = re.compile(
    r"azureml://locations/[^/]+/workspaces/[^/]+/(?P<path>models/[^/]+/versions/[^/]+)"
)
_SOON = {"Retry-After": "0.01"}


class Registries:
    """One registry. It keeps its copies when the workspace's models change.

    Args:
        copied: returns the workspace's asset at a path and its files; None if there is no asset.
    """

    def __init__(
        self,
        url: str,
        subscription: str,
        copied: Callable[[str], tuple[Body, Mapping[str, bytes]] | None],
    ) -> None:
        self.models: dict[str, tuple[Body, dict[str, bytes]]] = {}
        """Assets and their files, by path in the registry."""
        self.looks = 2
        self._url = url
        self._subscription = subscription
        self._copied = copied
        self._imports: dict[str, tuple[Resource, Operation]] = {}

    @staticmethod
    def concerns(path: str) -> bool:
        return path.startswith(("/registrymanagement/", "/mferp/", "/imports/"))

    def files(self, asset: str) -> Mapping[str, bytes] | None:
        """Return the files that a deployment of `asset` mounts.

        None if `asset` names no model of this registry.
        """
        found = _NAMED.fullmatch(asset)
        if found is None or found["registry"] != REGISTRY or found["path"] not in self.models:
            return None
        return self.models[found["path"]][1]

    def answer(self, call: Call) -> Reply:
        if call.path.startswith("/imports/"):
            return self._progress(call.path)
        found = _DISCOVERY.fullmatch(call.path) or _INSIDE.fullmatch(call.path)
        if found is None or found["name"] != REGISTRY:
            return refuse(404, "ResourceNotFound", f"There is no registry at {call.path}.")
        if call.path.startswith("/registrymanagement/"):
            about = {
                "registryName": REGISTRY,
                "subscriptionId": self._subscription,
                "resourceGroup": "registries",
            }
            return reply(200, {**about, "primaryRegionResourceProviderUri": f"{self._url}/"})
        path = found["path"]
        if call.method == "POST" and path == "import":
            return self._import(json.loads(call.body)["properties"])
        if path in self.models:
            return reply(200, self.models[path][0])
        if path.endswith("/versions"):
            return reply(
                200,
                {
                    "value": [
                        body for at, (body, _) in self.models.items() if at.startswith(f"{path}/")
                    ]
                },
            )
        return refuse(404, "ModelNotFound", f"{path} was not found in registry {REGISTRY}.")

    def _import(self, asked: Body) -> Reply:
        path = f"models/{asked['destinationName']}/versions/{asked['destinationVersion']}"
        source = _SOURCE.fullmatch(asked["sourceAssetId"])
        copied = self._copied(source["path"]) if source is not None else None
        if copied is None:
            return refuse(404, "ModelNotFound", f"There is no {asked['sourceAssetId']}.")
        if path in self.models:
            return refuse(409, "Conflict", f"{path} exists already in registry {REGISTRY}.")
        number, (body, files) = str(len(self._imports)), copied
        resource = Resource(body={"properties": {}})
        about = {
            **body,
            "id": f"azureml://registries/{REGISTRY}/{path}",
            "name": asked["destinationVersion"],
        }

        def effect() -> None:
            self.models[path] = (about, dict(files))

        self._imports[number] = (resource, resource.begin("Creating", self.looks, effect))
        return reply(202, None, {"Location": f"{self._url}/imports/{number}", **_SOON})

    def _progress(self, path: str) -> Reply:
        resource, operation = self._imports[path.rpartition("/")[2]]
        resource.look()
        if operation.done:
            return reply(200)
        return reply(202, None, {"Location": f"{self._url}{path}", **_SOON})
