"""Models where Azure's containers read them: datastore, workspace, registry, which workspaces of all regions read.

A folder is named by its content and holds `model/` and, written last, `deployment.json`: without that the upload was
cut off, and is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import codec
from onnx_ops.adapters.azure import build_timeouts, get_credential, request_resource
from onnx_ops.adapters.endpoints.azureml_client import AzureClient, GoneError
from onnx_ops.adapters.endpoints.azureml_plan import MANIFEST, OWNER
from onnx_ops.adapters.endpoints.cloud import verify_files
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import NotFoundError, OnnxOpsError, RefusedError, ServiceUnavailableError
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

_VERSION = "1"
"""Version of every model: the content of a name never changes."""
_BLOCK_BYTES = 8 << 20


class AzureModels:
    """The models of one endpoint."""

    def __init__(self, client: AzureClient) -> None:
        self._client = client
        self._settings = client.settings
        self._endpoint = client.name

    def ensure(self, name: str, deployment: Deployment) -> str:
        """Return the model's resource id or path in the registry; upload it if missing."""
        if not self._settings.registry:
            return f"{self._client.workspace.path}/models/{self._ensure_asset(name, deployment)}/versions/{_VERSION}"
        registry = _RegistryModel(self._client, self._settings.registry, name)
        if not registry.exists(deployment):
            registry.copy(self._ensure_asset(name, deployment))
        return registry.path

    def stored(self) -> dict[str, str]:
        """Return manifest digests of the datastore's folders by name; empty if cut off."""
        from azure.core.exceptions import ResourceNotFoundError

        def list_folders() -> dict[str, str]:
            container, prefix = self._container, f"{self._path()}/"
            manifests: dict[str, str] = {}
            for folder in container.walk_blobs(name_starts_with=prefix, delimiter="/"):
                name = folder.name.removeprefix(prefix).rstrip("/")
                try:
                    text: bytes = container.download_blob(self._path(name, DEPLOYMENT_FILE)).readall()
                    manifests[name] = codec.loads(text, Deployment).manifest
                except (ResourceNotFoundError, OnnxOpsError):
                    manifests[name] = ""
            return manifests

        return self._client.read("the datastore", list_folders) or {}

    def delete(self, name: str) -> None:
        """Delete a folder; no error if it does not exist.

        The asset stays: Azure keeps assets for ever, and it is valid again once the same files are uploaded.
        """
        from azure.core.exceptions import ResourceNotFoundError

        def delete_files() -> None:
            container = self._container
            blobs = [blob.name for blob in container.list_blobs(name_starts_with=f"{self._path(name)}/")]
            # deployment.json first, so that a folder that is half deleted never counts as a whole model.
            for blob in sorted(blobs, key=lambda blob: not blob.endswith(f"/{DEPLOYMENT_FILE}")):
                with contextlib.suppress(ResourceNotFoundError):
                    container.delete_blob(blob)

        self._client.retry(f"model {name}", delete_files)

    def _ensure_asset(self, name: str, deployment: Deployment) -> str:
        """Return the name of the workspace's model."""
        from azure.ai.ml.constants import AssetTypes
        from azure.ai.ml.entities import Model

        model_where = f"model {name}"
        if self._client.read(model_where, lambda: self._blob_md5(name, DEPLOYMENT_FILE)) is None:
            for relative, path in verify_files(deployment).items():
                blob = f"{name}/{MODEL_FOLDER}/{relative}"
                self._client.retry(model_where, functools.partial(self._upload, blob, path))
            record = codec.dumps(replace(deployment, location=""))
            md5 = hashlib.md5(record, usedforsecurity=False).digest()
            self._client.retry(model_where, lambda: self._send(f"{name}/{DEPLOYMENT_FILE}", record, md5))
        asset = f"{self._endpoint}--{name}"
        where, models = f"model {asset}", self._client.ml.models
        if self._client.read(where, lambda: models.get(asset, _VERSION)) is None:
            model = Model(
                name=asset,
                version=_VERSION,
                type=AssetTypes.CUSTOM_MODEL,
                path=f"{self._settings.models.rstrip('/')}/{self._endpoint}/{name}",
                tags={OWNER: self._endpoint, MANIFEST: deployment.manifest},
                description=f"{deployment.model} {deployment.version} ({deployment.variant})",
            )
            self._client.retry(where, lambda: models.create_or_update(model))
        return asset

    def _upload(self, blob: str, path: Path) -> None:
        with path.open("rb") as stream:
            md5 = hashlib.file_digest(stream, "md5").digest()
            if self._blob_md5(blob) != md5:
                stream.seek(0)
                self._send(blob, stream, md5)

    def _send(self, blob: str, data: Any, md5: bytes) -> None:
        from azure.storage.blob import ContentSettings

        self._container.upload_blob(
            self._path(blob),
            data,
            overwrite=True,
            validate_content=True,
            content_settings=ContentSettings(content_md5=bytearray(md5)),
        )

    def _blob_md5(self, *parts: str) -> bytes | None:
        """Return the MD5 digest that Azure keeps of a blob; None if there is none of that name."""
        from azure.core.exceptions import ResourceNotFoundError

        try:
            properties = self._container.get_blob_client(self._path(*parts)).get_blob_properties()
        except ResourceNotFoundError:
            return None
        return bytes(properties.content_settings.content_md5 or b"")

    def _path(self, *parts: str) -> str:
        return "/".join((self._settings.models_path[1], self._endpoint, *parts))

    @functools.cached_property
    def _container(self) -> ContainerClient:
        """The datastore's container; the identity needs the role Storage Blob Data Contributor."""
        from azure.storage.blob import ContainerClient

        store: Any = self._client.ml.datastores.get(self._settings.models_path[0])
        url = self._settings.blob_url or f"{store.protocol}://{store.account_name}.blob.{store.endpoint}"
        answer_s = self._settings.api_timeout
        return ContainerClient(
            url,
            store.container_name,
            get_credential(answer_s),
            retry_total=0,
            max_block_size=_BLOCK_BYTES,
            max_single_put_size=_BLOCK_BYTES,
            **build_timeouts(answer_s),
        )


class _RegistryModel:
    """One model of onnx-ops in an Azure ML registry, named by its content."""

    def __init__(self, client: AzureClient, registry: str, name: str) -> None:
        self._client = client
        self._name = f"onnx-ops--{name}"
        self._where = f"registry {registry}"
        self.path = f"azureml://registries/{registry}/models/{self._name}/versions/{_VERSION}"
        try:
            self._models: Any = client.retry(self._where, lambda: client.registry(registry).models)
        except GoneError as error:
            raise NotFoundError(
                "there is no such registry, or the identity lacks the permission to read it",
                where=self._where,
                why=error.why,
                remedy="Correct `registry`, or give the identity the role AzureML Registry User on it.",
            ) from error

    def exists(self, deployment: Deployment) -> bool:
        """Return whether the registry has it; raise RefusedError for a foreign model."""
        model = self._read()
        if model is None:
            return False
        manifest = (model.tags or {}).get(MANIFEST, deployment.manifest)
        if manifest != deployment.manifest:
            raise RefusedError(
                f"another model is called {self._name}",
                where=self._where,
                why=f"its manifest is {manifest}",
                remedy="It was made by hand: choose another registry, or archive that model.",
            )
        return True

    def copy(self, asset: str) -> None:
        """Copy the workspace's model into the registry; return once it can be read there."""
        from azure.ai.ml.entities import WorkspaceModelReference

        path = self._client.workspace.path
        workspace: Any = self._client.read("the workspace", lambda: request_resource(f"{path}?api-version=2024-04-01"))
        source = (
            f"azureml://locations/{workspace['location']}/workspaces/{workspace['properties']['workspaceId']}"
            f"/models/{asset}/versions/{_VERSION}"
        )
        reference = WorkspaceModelReference(name=self._name, version=_VERSION, asset_id=source)
        self._client.retry(self._where, lambda: self._read() or self._models.create_or_update(reference))
        for _ in self._client.policy.attempts(self._client.policy.lag_s):
            if self._read() is not None:
                return
        what = "the model was copied and does not appear"
        raise ServiceUnavailableError(what, where=self._where, remedy="Try again.")

    def _read(self) -> Any:
        return self._client.read(self._where, lambda: self._models.get(self._name, _VERSION))
