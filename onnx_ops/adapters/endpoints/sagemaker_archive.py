"""A version's files as the archive that SageMaker unpacks, and its way into S3.

The same files make the same bytes. An archive lies under a key that its content decides, is sent with its digest, and
is never overwritten.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from onnx_ops.adapters.aws import code_of, create_once, translated
from onnx_ops.adapters.endpoints.sagemaker_layout import document_of
from onnx_ops.domain.artifact import Manifest, digest_file, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import DigestMismatchError, NotFoundError
from onnx_ops.protocol.server_process import DEPLOYMENT_FILE, MODEL_FOLDER

PART_BYTES = 64 << 20
"""Larger archives are sent in parts of this size; S3 takes at least 5 MiB."""
_MISSING = frozenset({"404", "NoSuchKey", "NotFoundError"})


def pack(deployment: Deployment, target: IO[bytes]) -> None:
    """Write `deployment.json` and `model/` with the version's files as a tar.gz.

    Raises:
        NotFoundError: the files are not there.
        DigestMismatchError: they are not those of the deployment's manifest.
    """
    folder = Path(deployment.location)
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if deployment.location else []
    if not files:
        raise NotFoundError(
            f"the files of {deployment.name} are not there",
            where=str(folder),
            remedy="Run this where the version was fetched, or `onnx-ops reconcile` to fetch it again.",
        )
    named = {path.relative_to(folder).as_posix(): path for path in files}
    manifest = Manifest(files={name: digest_file(path) for name, path in named.items()}).digest()
    if manifest != deployment.manifest:
        raise DigestMismatchError(
            f"the files of {deployment.name} are not those of its manifest {short(deployment.manifest)}",
            where=str(folder),
            remedy="They were changed after they were verified; remove the folder, and it is fetched again.",
        )
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as packed,
        tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
    ):
        document = document_of(deployment)
        archive.addfile(_entry(DEPLOYMENT_FILE, len(document)), io.BytesIO(document))
        for name, path in sorted(named.items()):
            with path.open("rb") as stream:
                archive.addfile(_entry(f"{MODEL_FOLDER}/{name}", path.stat().st_size), stream)


class Archives:
    """Archives in one bucket.

    Args:
        s3: a boto3 client.
        kms_key: encrypts what is sent; empty for the bucket's own rule.
    """

    def __init__(self, s3: Any, bucket: str, *, kms_key: str = "", part_bytes: int = PART_BYTES) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._part_bytes = part_bytes
        self._sealed = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}

    def ensure(self, key: str, deployment: Deployment) -> None:
        """See that the deployment's archive lies under its key. What lies there already is left alone.

        Raises:
            NotFoundError: the files are needed and not there.
            DigestMismatchError: the files are not those of the manifest.
            ServiceUnavailableError: S3 does not answer.
        """
        if self.holds(key):
            return
        with tempfile.TemporaryFile() as packed:
            pack(deployment, packed)
            size = packed.tell()
            packed.seek(0)
            with translated(f"s3://{self._bucket}/{key}"):
                if size <= self._part_bytes:
                    self._send(key, packed.read())
                else:
                    self._send_parts(key, packed)

    def holds(self, key: str) -> bool:
        from botocore.exceptions import ClientError

        with translated(f"s3://{self._bucket}/{key}"):
            try:
                self._s3.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if code_of(error) in _MISSING:
                    return False
                raise
        return True

    def _send(self, key: str, data: bytes) -> None:
        # Somebody else's archive under the same key has the same content.
        create_once(
            lambda: self._s3.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=data,
                IfNoneMatch="*",
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=_sha256(data),
                ContentType="application/gzip",
                **self._sealed,
            )
        )

    def _send_parts(self, key: str, packed: IO[bytes]) -> None:
        began = self._s3.create_multipart_upload(
            Bucket=self._bucket, Key=key, ChecksumAlgorithm="SHA256", ContentType="application/gzip", **self._sealed
        )
        named = {"Bucket": self._bucket, "Key": key, "UploadId": began["UploadId"]}
        try:
            parts = []
            for number, data in enumerate(iter(lambda: packed.read(self._part_bytes), b""), start=1):
                checksum = _sha256(data)
                sent = self._s3.upload_part(**named, PartNumber=number, Body=data, ChecksumSHA256=checksum)
                parts.append({"PartNumber": number, "ETag": sent["ETag"], "ChecksumSHA256": checksum})
            create_once(
                lambda: self._s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
            )
        except Exception:
            self._s3.abort_multipart_upload(**named)
            raise


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o644, 0
    return entry


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def unfinished(s3: Any, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Key and id of uploads that nobody completed. Their parts are paid for."""
    for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            yield upload["Key"], upload["UploadId"]
