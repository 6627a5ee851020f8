"""Models where Azure's containers find them: a folder of a datastore, and the asset that names it.

A folder is named by what it holds and has `deployment.json` and `model/` in it. `deployment.json` is written last: a
folder without it is one whose upload was cut off, and is written over.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops import codec
from onnx_ops.adapters.azure import credential, timeouts
from onnx_ops.adapters.endpoints.azureml_client import AzureClient
from onnx_ops.adapters.endpoints.azureml_plan import MANIFEST, OWNER
from onnx_ops.adapters.endpoints.azureml_registry import VERSION, SharedModels
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.domain.artifact import Manifest, digest_file, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatchError, NotFoundError, OnnxOpsError
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER

if TYPE_CHECKING:
    from azure.storage.blob import ContainerClient

_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A folder of the datastore. `manifest` is empty where its upload was cut off."""

    name: str
    manifest: str


class AzureModels:
    """The models of one endpoint."""

    def __init__(self, client: AzureClient, settings: AzureSettings, endpoint: str) -> None:
        self._client = client
        self._settings = settings
        self._endpoint = endpoint

    def asset(self, name: str, deployment: Deployment) -> str:
        """Resource id of the model that the deployment of that name in Azure serves, or its path in the registry;
        uploaded if it is not there.

        Raises:
            NotFoundError: its files are not on this machine.
            DigestMismatchError: they are not those of its manifest.
            ServiceUnavailableError: Azure does not take them.
            RefusedError: the registry has another model of that name.
        """
        if not self._settings.registry:
            return f"{self._client.place.path}/models/{self._own_asset(name, deployment)}/versions/{VERSION}"
        shared = SharedModels(self._client, self._settings.registry)
        if not shared.holds(name, deployment):
            shared.take(name, self._own_asset(name, deployment))
        return shared.path(name)

    def kept(self) -> tuple[KeptModel, ...]:
        """What stands in the datastore for this endpoint, whole or not."""
        return tuple(self._client.read("the datastore", lambda: list(self._folders())) or ())

    def discard(self, name: str) -> None:
        """Delete a folder; no error if it is not there. The asset stays, as Azure keeps assets for ever: it costs
        nothing, and is good again once the same files are."""
        self._client.again(f"model {name}", lambda: self._delete_files(name))

    def _own_asset(self, name: str, deployment: Deployment) -> str:
        """Name of the workspace's model."""
        self._upload(name, deployment)
        model = f"{self._endpoint}--{name}"
        where = f"model {model}"
        if self._client.read(where, lambda: self._client.ml.models.get(model, VERSION)) is None:
            self._client.again(where, lambda: self._register(model, name, deployment))
        return model

    def _register(self, model: str, name: str, deployment: Deployment) -> None:
        from azure.ai.ml.constants import AssetTypes
        from azure.ai.ml.entities import Model

        self._client.ml.models.create_or_update(
            Model(
                name=model,
                version=VERSION,
                type=AssetTypes.CUSTOM_MODEL,
                path=f"{self._settings.models.rstrip('/')}/{self._endpoint}/{name}",
                tags={OWNER: self._endpoint, MANIFEST: deployment.manifest},
                description=f"{deployment.model} {deployment.version} ({deployment.variant})",
            )
        )

    def _upload(self, name: str, deployment: Deployment) -> None:
        record = codec.dumps(replace(deployment, location=""))
        where = f"model {name}"
        if self._client.read(where, lambda: self._blob_md5(name, DEPLOYMENT_FILE)) is not None:
            return
        folder = Path(deployment.location)
        if not folder.is_dir():
            raise NotFoundError("the files of the model are not there", where=deployment.name, why=str(folder))
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        found = Manifest(files={relative: digest_file(path) for relative, path in paths.items()}).digest()
        if found != deployment.manifest:
            raise DigestMismatchError(
                f"its files are {short(found)}, not {short(deployment.manifest)}",
                where=f"{deployment.model}/{deployment.version}",
                remedy="They were changed after they were verified; delete the folder, then they are fetched again.",
            )
        for relative, path in paths.items():
            self._client.again(where, self._sending(f"{name}/{MODEL_FOLDER}/{relative}", path))
        self._client.again(where, lambda: self._send(f"{name}/{DEPLOYMENT_FILE}", record, hashlib.md5(record).digest()))  # noqa: S324

    def _sending(self, blob: str, path: Path) -> Callable[[], None]:
        def send() -> None:
            with path.open("rb") as stream:
                md5 = hashlib.file_digest(stream, "md5").digest()
                if self._blob_md5(blob) == md5:
                    return
                stream.seek(0)
                self._send(blob, stream, md5)

        return send

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
        """Digest of a blob that is there, by which Azure and we mean the same bytes."""
        from azure.core.exceptions import ResourceNotFoundError

        try:
            found = self._container.get_blob_client(self._path(*parts)).get_blob_properties()
        except ResourceNotFoundError:
            return None
        return bytes(found.content_settings.content_md5 or b"")

    def _folders(self) -> Iterator[KeptModel]:
        from azure.core.exceptions import ResourceNotFoundError

        container, prefix = self._container, f"{self._path()}/"
        for found in container.walk_blobs(name_starts_with=prefix, delimiter="/"):
            name = found.name.removeprefix(prefix).rstrip("/")
            try:
                text: bytes = container.download_blob(self._path(name, DEPLOYMENT_FILE)).readall()
                yield KeptModel(name=name, manifest=codec.loads(text, Deployment).manifest)
            except (ResourceNotFoundError, OnnxOpsError):
                yield KeptModel(name=name, manifest="")

    def _delete_files(self, name: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        container, prefix = self._container, f"{self._path(name)}/"
        blobs = [blob.name for blob in container.list_blobs(name_starts_with=prefix)]
        # The mark first: what is half gone is never taken for a whole model.
        for blob in sorted(blobs, key=lambda blob: not blob.endswith(f"/{DEPLOYMENT_FILE}")):
            try:
                container.delete_blob(blob)
            except ResourceNotFoundError:
                continue

    def _path(self, *parts: str) -> str:
        return "/".join((self._settings.folder, self._endpoint, *parts))

    @functools.cached_property
    def _container(self) -> ContainerClient:
        """The datastore's container, asked for as ourselves: the role Storage Blob Data Contributor is needed."""
        from azure.storage.blob import ContainerClient

        store: Any = self._client.ml.datastores.get(self._settings.datastore)
        url = self._settings.blob_url or f"{store.protocol}://{store.account_name}.blob.{store.endpoint}"
        answer_s = self._client.answer_s
        return ContainerClient(
            url,
            store.container_name,
            credential(answer_s),
            retry_total=0,
            max_block_size=_BLOCK,
            max_single_put_size=_BLOCK,
            **timeouts(answer_s),
        )
