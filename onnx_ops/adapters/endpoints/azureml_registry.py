"""Models in an Azure ML registry, which workspaces of all regions read.

A model is named there by what it holds, so that the first workspace that needs it puts it there and the others find it.
"""

from __future__ import annotations

from typing import Any

from onnx_ops.adapters.azure import ask
from onnx_ops.adapters.endpoints.azureml_client import AzureClient
from onnx_ops.adapters.endpoints.azureml_errors import Gone
from onnx_ops.adapters.endpoints.azureml_plan import MANIFEST
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import NotFoundError, RefusedError, ServiceUnavailableError

VERSION = "1"
"""Of every model: what stands under a name never changes."""
_API = "api-version=2024-04-01"


class SharedModels:
    """Models of onnx-ops in one registry."""

    def __init__(self, client: AzureClient, registry: str) -> None:
        self._client = client
        self._registry = registry
        self._where = f"registry {registry}"

    def path(self, name: str) -> str:
        """What a deployment names."""
        return f"azureml://registries/{self._registry}/models/{_model(name)}/versions/{VERSION}"

    def holds(self, name: str, deployment: Deployment) -> bool:
        """Whether the model of the deployment of that name is there.

        Raises:
            NotFoundError: there is no such registry.
            RefusedError: another model has its name.
            ServiceUnavailableError: Azure does not answer.
        """
        models = self._models()
        found: Any = self._client.read(self._where, lambda: models.get(_model(name), VERSION))
        if found is None:
            return False
        manifest = (found.tags or {}).get(MANIFEST, deployment.manifest)
        if manifest != deployment.manifest:
            raise RefusedError(
                f"another model is called {_model(name)}",
                where=self._where,
                why=f"its manifest is {manifest}",
                remedy="Somebody made it by hand; choose another registry, or archive that model.",
            )
        return True

    def take(self, name: str, own: str) -> None:
        """Copy the workspace's model `own` into the registry; return once it can be read there.

        Raises:
            Busy: somebody else is copying it.
            ServiceUnavailableError: Azure does not answer, or does not show it.
        """
        from azure.ai.ml.entities import WorkspaceModelReference

        place, models = self._client.place, self._models()
        about: Any = self._client.read("the workspace", lambda: ask(f"{place.path}?{_API}"))
        source = (
            f"azureml://locations/{about['location']}/workspaces/{about['properties']['workspaceId']}"
            f"/models/{own}/versions/{VERSION}"
        )
        copy = WorkspaceModelReference(name=_model(name), version=VERSION, asset_id=source)

        def copied() -> None:
            if self._client.read(self._where, lambda: models.get(_model(name), VERSION)) is None:
                models.create_or_update(copy)

        self._client.again(self._where, copied)
        for _ in self._client.pace.tries(self._client.pace.lag):
            if self._client.read(self._where, lambda: models.get(_model(name), VERSION)) is not None:
                return
        raise ServiceUnavailableError(
            "the model was copied and does not appear", where=self._where, remedy="Try again."
        )

    def _models(self) -> Any:
        found: list[Any] = []
        try:
            self._client.again(self._where, lambda: found.append(self._client.registry(self._registry).models))
        except Gone as error:
            raise NotFoundError(
                "there is no such registry, or we may not see it",
                where=self._where,
                why=error.why,
                remedy="Correct `registry`, or give the identity the role AzureML Registry User on it.",
            ) from error
        return found[0]


def _model(name: str) -> str:
    return f"onnx-ops--{name}"
