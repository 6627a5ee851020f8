"""Verified model folders by manifest digest, where endpoints load them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from onnx_ops.adapters.files import TEMPORARY, UNFINISHED_S, fsync_path
from onnx_ops.domain.artifact import Digest, Manifest, StoredObject, digest_file, hex_digits, is_digest, short_digest
from onnx_ops.errors import DigestMismatchError, UserError, storage_errors
from onnx_ops.onnx_graph.files import read_structure


class ModelFolders:
    """One read-only folder per manifest, so that a rollback needs no service."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def location(self, manifest: Digest) -> str | None:
        """Return the folder if it exists and is intact."""
        folder = self._folder(manifest)
        if not folder.is_dir() or manifest_of(folder).digest() != manifest:
            return None
        return str(folder)

    @storage_errors()
    def admit(self, folder: Path, manifest: Manifest) -> str:
        """Verify files against the manifest and copy them here; return the location.

        Raises:
            DigestMismatchError: a file is not what the manifest declares.
            RefusedError: the model references weights outside its folder.
        """
        actual = manifest_of(folder)
        if dict(actual.files) != dict(manifest.files):
            differs = set(actual.files.items()) ^ set(manifest.files.items())
            names = ", ".join(sorted({name for name, _ in differs}))
            raise DigestMismatchError(
                f"files are not what the manifest {short_digest(manifest.digest())} says: {names}",
                remedy="The artifact was changed after it was registered; run the pipeline again.",
            )
        for path in sorted(folder.glob("*.onnx")):  # refuses a model that reads outside its folder or its weights
            with contextlib.suppress(UserError):  # other problems are reported when it is loaded
                read_structure(path)
        place = self._folder(manifest.digest())
        if self.location(manifest.digest()) is not None:
            return str(place)
        self._root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = Path(tempfile.mkdtemp(dir=self._root, prefix=TEMPORARY))
        try:
            for path in sorted(folder.rglob("*")):
                copy = temporary / path.relative_to(folder)
                if path.is_dir():
                    copy.mkdir()
                    continue
                shutil.copyfile(path, copy)
                copy.chmod(0o444)
                with copy.open("rb") as stream:
                    os.fsync(stream.fileno())
            temporary.chmod(0o755)
            if place.exists():  # only a damaged folder is ever replaced
                shutil.rmtree(place)
            temporary.rename(place)
            fsync_path(self._root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return str(place)

    def kept(self) -> Sequence[StoredObject]:
        """Return every folder by its manifest's digest, with the time of its admission."""
        if not self._root.is_dir():
            return ()
        folders = {Digest(f"sha256:{entry.name}"): entry for entry in sorted(self._root.iterdir()) if entry.is_dir()}
        return tuple(
            StoredObject(
                name=folder.name,
                digest=digest,
                size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
                at=folder.stat().st_mtime,
            )
            for digest, folder in folders.items()
            if is_digest(digest)
        )

    @storage_errors()
    def forget(self, manifest: Digest) -> None:
        """Delete a folder; no error if it does not exist."""
        folder = self._folder(manifest)
        if folder.is_dir():
            # Renamed first, so that a folder that is half deleted never counts as a whole one.
            leaving = self._root / f"{TEMPORARY}{folder.name}-{os.getpid()}"
            folder.rename(leaving)
            shutil.rmtree(leaving)
        self._sweep()

    def _sweep(self) -> None:
        """Delete leftovers of killed processes that are more than an hour old."""
        before = time.time() - UNFINISHED_S  # noqa: TID251 (compared with times of the file system)
        for folder in self._root.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                if max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) < before:
                    shutil.rmtree(folder)

    def _folder(self, manifest: Digest) -> Path:
        return self._root / hex_digits(manifest)


def manifest_of(folder: Path) -> Manifest:
    """Return the digests of all files below a folder by their relative POSIX names."""
    files = {p.relative_to(folder).as_posix(): digest_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    return Manifest(files=files)
