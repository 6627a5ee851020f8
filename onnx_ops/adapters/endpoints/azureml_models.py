"""Models of an endpoint in the datastore, the workspace and, if set, a registry.

Workspaces in several regions can use a registry. In the datastore, the name of a model's folder
contains a digest of the deployment, including its manifest. The folder contains `model/` and
`deployment.json`, which is written last and deleted first. If `deployment.json` is missing, an
upload or a deletion was interrupted, and the next upload completes the folder.
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
"""Version of every model asset in Azure: models of one name have the same content."""
_BLOCK_BYTES = 8 << 20


class AzureModels:
    """The models of one endpoint."""

    def __init__(self, client: AzureClient) -> None:
        self._client = client
        self._options = client.options
        self._endpoint = client.name

    def ensure(self, name: str, deployment: Deployment) -> str:
        """Return the model's resource id in the workspace, or its path in the registry.

        A missing model is uploaded.
        """
        if self._options.registry:
            return self._ensure_registered(name, deployment)
        return (
            f"{self._client.workspace.path}/models/{self._ensure_asset(name, deployment)}"
            f"/versions/{_VERSION}"
        )

    def stored(self) -> dict[str, str]:
        """Return the manifest digest of each model folder in the datastore.

        The digest is empty for an incomplete folder. With `traffic: table`, models are not in the
        datastore. The result is then empty, and the identity needs no permission on the datastore.
        """
        if self._options.is_table:
            return {}
        from azure.core.exceptions import ResourceNotFoundError

        def list_folders() -> dict[str, str]:
            container, prefix = self._container, f"{self._path()}/"
            manifests: dict[str, str] = {}
            for folder in container.walk_blobs(name_starts_with=prefix, delimiter="/"):
                name = folder.name.removeprefix(prefix).rstrip("/")
                try:
                    text: bytes = container.download_blob(
                        self._path(name, DEPLOYMENT_FILE)
                    ).readall()
                    manifests[name] = codec.loads(text, Deployment).manifest
                except (ResourceNotFoundError, OnnxOpsError):
                    manifests[name] = ""
            return manifests

        return self._client.read("the datastore", list_folders) or {}

    def delete(self, name: str) -> None:
        """Delete a model's folder from the datastore, if it exists.

        The model asset in the workspace remains. It becomes valid again when the same files are
        uploaded.
        """
        from azure.core.exceptions import ResourceNotFoundError

        def delete_files() -> None:
            container = self._container
            blobs = [
                blob.name for blob in container.list_blobs(name_starts_with=f"{self._path(name)}/")
            ]
            # deployment.json is deleted first, so that a partly deleted folder is never treated as
            # a complete model.
            for blob in sorted(blobs, key=lambda blob: not blob.endswith(f"/{DEPLOYMENT_FILE}")):
                with contextlib.suppress(ResourceNotFoundError):
                    container.delete_blob(blob)

        self._client.retry(f"model {name}", delete_files)

    def _ensure_asset(self, name: str, deployment: Deployment) -> str:
        """Upload and create a missing model; return its name in the workspace."""
        from azure.ai.ml.constants import AssetTypes
        from azure.ai.ml.entities import Model

        model_where = f"model {name}"
        if self._client.read(model_where, lambda: self._blob_md5(name, DEPLOYMENT_FILE)) is None:
            for relative, path in verify_files(deployment).items():
                blob = f"{name}/{MODEL_FOLDER}/{relative}"
                self._client.retry(model_where, functools.partial(self._upload, blob, path))
            record = codec.dumps(replace(deployment, location=""))
            md5 = hashlib.md5(record, usedforsecurity=False).digest()
            self._client.retry(
                model_where, lambda: self._send(f"{name}/{DEPLOYMENT_FILE}", record, md5)
            )
        asset = f"{self._endpoint}--{name}"
        where, models = f"model {asset}", self._client.ml.models
        if self._client.read(where, lambda: models.get(asset, _VERSION)) is None:
            model = Model(
                name=asset,
                version=_VERSION,
                type=AssetTypes.CUSTOM_MODEL,
                path=f"{self._options.models.rstrip('/')}/{self._endpoint}/{name}",
                tags={OWNER: self._endpoint, MANIFEST: deployment.manifest},
                description=f"{deployment.model} {deployment.version} ({deployment.variant})",
            )
            self._client.retry(where, lambda: models.create_or_update(model))
        return asset

    def _ensure_registered(self, name: str, deployment: Deployment) -> str:
        """Return the path of the model in the registry.

        The model is named by its content. A missing model is copied from the workspace.

        Raises:
            NotFoundError: the registry or files of the model are missing, or the identity cannot
                read the registry.
            DigestMismatchError: the files do not match the manifest of the model.
            RefusedError: the registry contains a model of that name with another manifest.
            ServiceUnavailableError: the copy does not appear in the registry in time.
        """
        from azure.ai.ml.entities import WorkspaceModelReference

        client, registry, model = self._client, self._options.registry, f"onnx-ops--{name}"
        where, path = (
            f"registry {registry}",
            f"azureml://registries/{registry}/models/{model}/versions/{_VERSION}",
        )
        try:
            models: Any = client.retry(where, lambda: client.registry(registry).models)
        except GoneError as error:
            raise NotFoundError(
                "there is no such registry, or the identity lacks the permission to read it",
                where=where,
                why=error.why,
                remedy="Correct `registry`, or give the identity the role AzureML Registry User on "
                "the registry.",
            ) from error

        def read() -> Any:
            return client.read(where, lambda: models.get(model, _VERSION))

        if (registered := read()) is not None:
            manifest = (registered.tags or {}).get(MANIFEST, deployment.manifest)
            if manifest != deployment.manifest:
                raise RefusedError(
                    f"the registry contains another model with the name {model}",
                    where=where,
                    why=f"its manifest is {manifest}",
                    remedy="Choose another `registry`.",
                )
            return path
        asset = self._ensure_asset(name, deployment)
        about = f"{client.workspace.path}?api-version=2024-04-01"
        workspace: Any = client.read("the workspace", lambda: request_resource(about))
        source = (
            f"azureml://locations/{workspace['location']}/workspaces/{workspace['properties']['workspaceId']}"
            f"/models/{asset}/versions/{_VERSION}"
        )
        reference = WorkspaceModelReference(name=model, version=_VERSION, asset_id=source)
        client.retry(where, lambda: read() or models.create_or_update(reference))
        for _ in client.policy.attempts(client.policy.lag_s):
            if read() is not None:
                return path
        raise ServiceUnavailableError(
            "the copied model did not appear in the registry in time",
            where=where,
            remedy="Try again.",
        )

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
        """Return the MD5 digest that Azure stores for a blob; None without the blob.

        The digest is empty if Azure stores none.
        """
        from azure.core.exceptions import ResourceNotFoundError

        try:
            properties = self._container.get_blob_client(self._path(*parts)).get_blob_properties()
        except ResourceNotFoundError:
            return None
        return bytes(properties.content_settings.content_md5 or b"")

    def _path(self, *parts: str) -> str:
        return "/".join((self._options.models_path[1], self._endpoint, *parts))

    @functools.cached_property
    def _container(self) -> ContainerClient:
        """Client of the datastore's blob container.

        The identity needs the role Storage Blob Data Contributor.
        """
        from azure.storage.blob import ContainerClient

        store: Any = self._client.ml.datastores.get(self._options.models_path[0])
        url = (
            self._options.blob_url
            or f"{store.protocol}://{store.account_name}.blob.{store.endpoint}"
        )
        answer_s = self._options.api_timeout
        return ContainerClient(
            url,
            store.container_name,
            get_credential(answer_s),
            retry_total=0,
            max_block_size=_BLOCK_BYTES,
            max_single_put_size=_BLOCK_BYTES,
            **build_timeouts(answer_s),
        )
