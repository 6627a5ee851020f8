"""Files of model versions in the store that replicas read.

The files of a version are stored by the digest of its manifest.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from onnx_ops import codec
from onnx_ops.adapters.files import ObjectStore
from onnx_ops.domain.artifact import (
    Digest,
    Manifest,
    canonical_json,
    digest_bytes,
    digest_folder,
    hex_digits,
)
from onnx_ops.errors import CorruptStateError, NotFoundError

FOLDER = "models"
_MANIFEST = "manifest.json"
_FILES = "files"


def upload_model(objects: ObjectStore, folder: Path) -> Digest:
    """Store the files of a version if they are missing; return the manifest's digest.

    The manifest is written last, so a stored manifest shows that the files are complete.

    Raises:
        ServiceUnavailableError, StorageError: the store cannot be used.
    """
    manifest = digest_folder(folder)
    place = _get_place(manifest.digest())
    if objects.read(f"{place}/{_MANIFEST}") is None:
        for name in manifest:
            objects.upload(f"{place}/{_FILES}/{name}", folder / name)
        objects.write(f"{place}/{_MANIFEST}", canonical_json(dict(manifest.files)))
    return manifest.digest()


def download_model(objects: ObjectStore, digest: Digest, folder: Path) -> Manifest:
    """Copy the files of a version into an empty folder.

    The caller must compare the copied files with the returned manifest.

    Raises:
        NotFoundError: the store has no such version, or lacks one of its files.
        CorruptStateError: the manifest is not the one with this digest, or names files outside the
            folder.
        ServiceUnavailableError, StorageError: the store cannot be used.
    """
    place = _get_place(digest)
    where = f"{objects.place}/{place}"
    data = objects.read(f"{place}/{_MANIFEST}")
    if data is None:
        raise NotFoundError(
            "the store has no files of this version",
            where=where,
            remedy="Restore the files from a backup of the store, or roll back to another version.",
        )
    if digest_bytes(data) != digest:
        raise CorruptStateError(
            "the manifest was changed",
            where=where,
            remedy="Restore the manifest from a backup of the store, or roll back to another "
            "version.",
        )
    manifest = _parse_manifest(data, where)
    for name in manifest:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not objects.download(f"{place}/{_FILES}/{name}", target):
            raise NotFoundError(
                f"file {name} is missing",
                where=where,
                remedy="Restore the file from a backup of the store, or roll back to another "
                "version.",
            )
    return manifest


def _parse_manifest(data: bytes, where: str) -> Manifest:
    files = codec.loads(data, dict[str, Digest], where=where)
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
            raise CorruptStateError(
                f"the manifest names {name[:80]!r}, which is not a path within its folder",
                where=where,
                remedy="Roll back to another version.",
            )
    return Manifest(files=files)


def _get_place(digest: Digest) -> str:
    return f"{FOLDER}/{hex_digits(digest)}"
