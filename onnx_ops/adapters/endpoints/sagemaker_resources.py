"""The archives, models and endpoint configs of an endpoint, and their deletion.

Their names are derived from their content. The same version results in the same bytes under the
same key. An archive is sent with its digest, and is never overwritten.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import IO, Any

from onnx_ops.adapters.aws import translate_errors, write_conditionally
from onnx_ops.adapters.endpoints.cloud import verify_files
from onnx_ops.adapters.endpoints.sagemaker_client import MISSING_OBJECT, NOT_FOUND, SageMakerClient
from onnx_ops.adapters.endpoints.sagemaker_layout import (
    EndpointLayout,
    build_archive_key,
    encode_deployment,
    is_own_name,
    list_variants,
    read_deployment,
)
from onnx_ops.domain.artifact import Digest, hex_digits
from onnx_ops.domain.endpoint import Deployment, OrphanedResource
from onnx_ops.errors import ConflictError, InfrastructureError, RefusedError, UserError
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER

PART_BYTES = 64 << 20
"""Size of the parts of a multipart upload; S3 requires at least 5 MiB."""
_NAMES = {"model": "Model", "endpoint_config": "EndpointConfig"}
"""Names of resources in requests and answers, by their names in operations."""
_UPLOAD = "#"
"""Separator between key and id in the name of an incomplete upload."""
_UNUSED = "neither the live endpoint nor a needed version uses it"


def pack_archive(deployment: Deployment, target: IO[bytes]) -> None:
    """Write `deployment.json` and the model files as a reproducible tar.gz."""
    files = verify_files(deployment)
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as packed,
        tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
    ):
        document = encode_deployment(deployment)
        archive.addfile(_entry(DEPLOYMENT_FILE, len(document)), io.BytesIO(document))
        for name, path in files.items():
            with path.open("rb") as stream:
                archive.addfile(_entry(f"{MODEL_FOLDER}/{name}", path.stat().st_size), stream)


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o644, 0
    return entry


class EndpointResources:
    """The archives, models and configs of one endpoint.

    Archives above `part_bytes` are sent in parts of this size.
    """

    def __init__(self, client: SageMakerClient, *, part_bytes: int = PART_BYTES) -> None:
        self._client = client
        self._bucket = client.options.bucket
        self._archives = f"{client.folder}/archives/"
        self._part_bytes = part_bytes

    def has_archive(self, deployment: Deployment) -> bool:
        """Return whether the deployment's archive is stored."""
        where, named = self._locate_archive(deployment)
        stored = self._client.call(
            "s3", "head_object", ignored_codes=MISSING_OBJECT, where=where, **named
        )
        return stored is not None

    def _locate_archive(self, deployment: Deployment) -> tuple[str, dict[str, Any]]:
        """Return the URL of an archive, and the arguments of S3 that name it."""
        key = build_archive_key(self._client.options.prefix, self._client.endpoint, deployment)
        return f"s3://{self._bucket}/{key}", {"Bucket": self._bucket, "Key": key}

    def ensure_archive(self, deployment: Deployment) -> None:
        """Upload the deployment's archive unless its key exists."""
        if self.has_archive(deployment):
            return
        where, named = self._locate_archive(deployment)
        with tempfile.TemporaryFile() as packed:
            pack_archive(deployment, packed)
            size = packed.tell()
            packed.seek(0)
            with translate_errors(where):
                if size > self._part_bytes:
                    self._send_parts(named, packed)
                    return
                s3, data = self._client.clients("s3"), packed.read()
                once = {"IfNoneMatch": "*", "ChecksumSHA256": _sha256(data), **self._upload_options}
                # If another client has created the key meanwhile, the content is the same.
                write_conditionally(lambda: s3.put_object(**named, Body=data, **once))

    def ensure_definitions(self, layout: EndpointLayout) -> None:
        """Create the models and the config of a layout unless they exist."""
        for name, request in layout.models.items():
            self._create("model", name, request)
        self.ensure_config(layout)

    def ensure_config(self, layout: EndpointLayout) -> None:
        """Create the config of a layout if it is missing.

        The models of the layout must exist.
        """
        self._create("endpoint_config", layout.config_name, layout.config)

    def orphans(self, needed: frozenset[Digest]) -> Iterator[OrphanedResource]:
        """Yield resources that neither the live endpoint nor a version in `needed` uses.

        All uncompleted uploads are included. `needed` contains digests of manifests.
        """
        live = self._live_configs()
        manifests = {model: self._read_manifest(model) for model in self._list_own("model")}
        configs = {name: self._models_of(name) for name in self._list_own("endpoint_config")}
        used = {model for name in live for model in configs.get(name, ())}
        kept = used | {model for model, manifest in manifests.items() if manifest in needed}
        for name, models in configs.items():
            if name not in live and not kept.issuperset(models):
                why = "at least one of its models is not needed"
                yield OrphanedResource(kind="endpoint-config", name=name, why=why, paid=False)
        for model in manifests:
            if model not in kept:
                yield OrphanedResource(kind="model", name=model, why=_UNUSED, paid=False)
        kept_manifests = {
            manifest for model, manifest in manifests.items() if model in kept and manifest
        }
        yield from self._find_unused_archives(needed | kept_manifests)
        yield from self._find_open_uploads()

    def _read_manifest(self, model: str) -> Digest | None:
        """Return the manifest digest of the version that a model contains.

        The result is None if the model does not contain a version.
        """
        deployment = read_deployment(self._client.describe_model(model))
        return None if deployment is None else deployment.manifest

    def _find_unused_archives(self, kept: Set[Digest]) -> Iterator[OrphanedResource]:
        """Yield the archives of versions that are not in `kept`."""
        folders = set(map(hex_digits, kept))
        for key in self._client.keys(self._archives):
            if key.removeprefix(self._archives).partition("/")[0] not in folders:
                yield OrphanedResource(kind="archive", name=key, why=_UNUSED, paid=True)

    def _find_open_uploads(self) -> Iterator[OrphanedResource]:
        """Yield the uploads that were neither completed nor aborted.

        Their parts cost money.
        """
        within = {"Bucket": self._bucket, "Prefix": self._archives}
        for upload in self._client.list_all("s3", "list_multipart_uploads", "Uploads", **within):
            name = f"{upload['Key']}{_UPLOAD}{upload['UploadId']}"
            yield OrphanedResource(kind="upload", name=name, why="it was not completed", paid=True)

    def delete_orphan(self, orphan: OrphanedResource) -> None:
        """Delete an orphan, if it exists.

        Raises:
            ConflictError: the live endpoint uses the orphan again. SageMaker does not check this.
            RefusedError: the resource does not have the tag of this endpoint.
            UserError: the orphan is not a resource of this endpoint.
        """
        kind, name = orphan.kind, orphan.name
        if name in self._list_used(kind):
            raise ConflictError(f"{kind} {name} is now in use", where=self._client.endpoint)
        if (noun := kind.replace("-", "_")) in _NAMES:
            self._delete(noun, name)
        elif kind == "archive" and name.startswith(self._archives):
            self._delete_archive(name)
        elif kind == "upload" and name.startswith(self._archives):
            self._abort_upload(name)
        else:
            raise UserError(
                f"this endpoint has no orphan {kind} {name}", where=self._client.endpoint
            )

    def delete_all(self) -> None:
        """Delete all resources of an endpoint that does not exist any more."""
        for noun in ("endpoint_config", "model"):
            for name, arn in self._list_own(noun).items():
                self._delete(noun, name, arn)
        for key in self._client.keys(self._archives):
            self._delete_archive(key)
        for upload in list(self._find_open_uploads()):
            self._abort_upload(upload.name)

    def _list_used(self, kind: str) -> set[str]:
        """Return the names of the live endpoint's resources of a kind."""
        if kind not in ("endpoint-config", "model", "archive"):
            return set()
        configs = self._live_configs()
        if kind == "endpoint-config":
            return configs
        models = {model for config in configs for model in self._models_of(config)}
        if kind == "model":
            return models
        urls = [
            str(self._client.describe_model(model)["PrimaryContainer"].get("ModelDataUrl", ""))
            for model in models
        ]
        return {url.removeprefix(f"s3://{self._bucket}/") for url in urls}

    def _delete_archive(self, key: str) -> None:
        self._client.call("s3", "delete_object", Bucket=self._bucket, Key=key)

    def _abort_upload(self, name: str) -> None:
        key, upload = name.rsplit(_UPLOAD, 1)
        named: dict[str, Any] = {"Bucket": self._bucket, "Key": key, "UploadId": upload}
        self._client.call("s3", "abort_multipart_upload", ignored_codes=("NoSuchUpload",), **named)

    @property
    def _upload_options(self) -> dict[str, str]:
        options = {"ChecksumAlgorithm": "SHA256", "ContentType": "application/gzip"}
        if key := self._client.options.kms_key:
            options |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
        return options

    def _send_parts(self, named: Mapping[str, str], packed: IO[bytes]) -> None:
        s3 = self._client.clients("s3")
        upload = {
            **named,
            "UploadId": s3.create_multipart_upload(**named, **self._upload_options)["UploadId"],
        }
        try:
            parts = []
            for number, data in enumerate(
                iter(lambda: packed.read(self._part_bytes), b""), start=1
            ):
                checksum = _sha256(data)
                sent = s3.upload_part(
                    **upload, PartNumber=number, Body=data, ChecksumSHA256=checksum
                )
                parts.append(
                    {"PartNumber": number, "ETag": sent["ETag"], "ChecksumSHA256": checksum}
                )
            write_conditionally(
                lambda: s3.complete_multipart_upload(
                    **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
                )
            )
        except Exception:
            s3.abort_multipart_upload(**upload)
            raise

    def _create(self, noun: str, name: str, request: Mapping[str, Any]) -> None:
        """Create an immutable resource.

        An existing resource with this name must have the same content.

        Raises:
            InfrastructureError: an existing resource with this name has other content.
        """
        operation, taken = f"create_{noun}", ("already existing",)
        if self._client.call("sagemaker", operation, ignored_messages=taken, **request) is not None:
            return
        named: dict[str, Any] = {f"{_NAMES[noun]}Name": name}
        actual = self._client.call("sagemaker", f"describe_{noun}", **named)
        if not _contains(actual, {key: value for key, value in request.items() if key != "Tags"}):
            raise InfrastructureError(
                f"a different {noun.replace('_', ' ')} has the name {name}",
                where=self._client.endpoint,
                remedy="If nothing else uses this resource, delete it in SageMaker.",
            )

    def _live_configs(self) -> set[str]:
        description = self._client.describe() or {}
        pending = description.get("PendingDeploymentSummary", {}).get("EndpointConfigName", "")
        return {description.get("EndpointConfigName", ""), pending} - {""}

    def _list_own(self, noun: str) -> dict[str, str]:
        """Return the ARNs of the endpoint's models or configs, by name."""
        kind = _NAMES[noun]
        arns = {
            item[f"{kind}Name"]: item[f"{kind}Arn"]
            for item in self._client.list_all("sagemaker", f"list_{noun}s", f"{kind}s")
        }
        return {name: arn for name, arn in arns.items() if is_own_name(name, self._client.endpoint)}

    def _models_of(self, config: str) -> list[str]:
        return [
            variant["ModelName"] for variant in list_variants(self._client.describe_config(config))
        ]

    def _delete(self, noun: str, name: str, arn: str = "") -> None:
        """Delete a model or config with the endpoint's tag; read its ARN if not given.

        Raises:
            RefusedError: the resource does not have the tag of the endpoint.
        """
        named: dict[str, Any] = {f"{_NAMES[noun]}Name": name}
        if not arn:
            resource = self._client.call(
                "sagemaker", f"describe_{noun}", ignored_messages=NOT_FOUND, **named
            )
            if resource is None:
                return
            arn = resource[f"{_NAMES[noun]}Arn"]
        if self._client.tag_of(arn) != self._client.endpoint:
            raise RefusedError(
                f"{name} does not have the tag of this endpoint", where=self._client.endpoint
            )
        self._client.call("sagemaker", f"delete_{noun}", ignored_messages=NOT_FOUND, **named)


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _contains(actual: Any, desired: Any) -> bool:
    """Return whether a description contains at least all desired fields and values."""
    if isinstance(desired, Mapping) and isinstance(actual, Mapping):
        return all(
            key in actual and _contains(actual[key], value) for key, value in desired.items()
        )
    if (
        isinstance(desired, Sequence)
        and not isinstance(desired, str)
        and isinstance(actual, Sequence)
    ):
        return len(desired) == len(actual) and all(map(_contains, actual, desired))
    return bool(desired == actual)
