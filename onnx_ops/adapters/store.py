"""Content-addressed store of files, stage results by key, and model folders."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.files import UNFINISHED_S, LocalObjects, ObjectStore, sweep_unfinished
from onnx_ops.domain.artifact import (
    Digest,
    Manifest,
    StoredObject,
    canonical_json,
    digest_bytes,
    digest_file,
    digest_folder,
    digest_json,
    hex_digits,
    is_digest,
    short_digest,
)
from onnx_ops.errors import CorruptStateError, DigestMismatchError, UserError
from onnx_ops.file_locks import hold_lock, hold_temporary_lock
from onnx_ops.onnx_graph.files import read_structure
from onnx_ops.scratch import TEMPORARY, storage_errors, sync_path

_BLOBS, _RECORDS, _LOCK = "blobs", "records", "collect.lock"
READ_ONLY = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
_MAX_VERIFIED = 8192
"""Number of verified blobs to remember, so that they are not hashed again.

A pipeline usually has fewer blobs.
"""


class ContentStore:
    """Store of blobs (content by digest) and records (files of a stage by its key).

    A remote store is read through a local cache of a limited size. Names are not trusted: a file is
    hashed before its first use, and again if it changed. A record contains its own digest, so a
    partial or changed record is detected and ignored.
    """

    def __init__(self, objects: ObjectStore, cache: Path, cache_bytes: int = 50 * 10**9) -> None:
        self._objects = objects
        self._cache = objects.root if isinstance(objects, LocalObjects) else cache
        self._cache_bytes = cache_bytes
        # The sum starts at the limit, so that the first download also removes excess files of
        # earlier processes.
        self._downloaded = cache_bytes
        self._verified: dict[Digest, tuple[int, ...]] = {}
        self._verified_lock = threading.Lock()

    def put_bytes(self, data: bytes) -> Digest:
        """Store content; return its digest."""
        digest = digest_bytes(data)
        if not self._has_local(digest):
            with self._collecting(shared=True):
                self._objects.write(_blob(digest), data)
            self._protect(digest)
        return digest

    def put_file(self, path: Path) -> Digest:
        """Store a file's content; return its digest."""
        digest = digest_file(path)
        if not self._has_local(digest):
            with self._collecting(shared=True):
                self._objects.upload(_blob(digest), path)
            self._protect(digest)
            self.path(digest)  # This call raises an error if the file changed during the copy.
        return digest

    def path(self, digest: Digest) -> Path:
        """Return the local file with this digest; download it if necessary.

        Raises:
            CorruptStateError: the content is missing or does not match the digest.
            ServiceUnavailableError: a remote store cannot be used.
        """
        if not is_digest(digest):
            raise CorruptStateError(f"not a digest: {digest[:80]!r}", where="store")
        local = self._cache / _blob(digest)
        if self._intact(local, digest):
            return local
        remote = not isinstance(self._objects, LocalObjects)
        if remote and self._objects.download(_blob(digest), local) and self._intact(local, digest):
            self._protect(digest)
            self._downloaded += local.stat().st_size
            if self._downloaded > self._cache_bytes / 10:
                self._downloaded = 0
                self._trim()
            return local
        cause = "the file does not match its digest" if local.exists() else "the file is missing"
        raise CorruptStateError(
            f"stored content {short_digest(digest)} cannot be used",
            where="store",
            why=cause,
            remedy="Run the pipeline again: it repeats the stage that made this content.",
        )

    def read(self, digest: Digest) -> bytes:
        """Return the content with this digest; raise the errors of `path`."""
        return self.path(digest).read_bytes()

    def record(self, key: Digest, manifest: Manifest) -> None:
        """Record the files that a stage produced, under the key of the stage."""
        content = {"key": key, "files": dict(manifest.files)}
        self._objects.write(
            _record(key), canonical_json({**content, "digest": digest_json(content)})
        )

    def lookup(self, key: Digest) -> Manifest | None:
        """Return the recorded files of a key; None unless all of them are intact."""
        manifest = _parse_record(self._objects.read(_record(key)), key)
        if manifest is None:
            return None
        try:
            for digest in manifest.files.values():
                self.path(digest)
        except CorruptStateError:
            return None
        return manifest

    def results(self) -> Iterator[Manifest]:
        """Yield all recorded results that can be read."""
        for entry in self._objects.list_objects(_RECORDS):
            key = Digest(f"sha256:{Path(entry.name).stem}")
            manifest = _parse_record(self._objects.read(entry.name), key)
            if manifest is not None:
                yield manifest

    def contents(self) -> tuple[StoredObject, ...]:
        """Return all blobs, and the unfinished files of current and killed writers.

        Records are not included.
        """
        contents = []
        for entry in (*self._objects.list_objects(_BLOBS), *self._objects.list_objects(_RECORDS)):
            name = entry.name.rpartition("/")[2]
            digest = None if name.startswith(TEMPORARY) else Digest(f"sha256:{name}")
            if digest is None or (is_digest(digest) and entry.name == _blob(digest)):
                contents.append(
                    StoredObject(
                        name=entry.name, digest=digest, size_bytes=entry.size_bytes, at=entry.at
                    )
                )
        return tuple(contents)

    def forget(self, stored: StoredObject) -> bool:
        """Delete an object unless it was stored again.

        The result is False if the object was stored again. It is True if the object was deleted,
        now or before.
        """
        if not isinstance(self._objects, LocalObjects):
            # If a writer stores the same content at this moment, the content is lost. The writer's
            # pipeline then repeats the stage in a later run.
            neighbours = self._objects.list_objects(stored.name.rpartition("/")[0])
            if any(entry.name == stored.name and entry.at > stored.at for entry in neighbours):
                return False
            self._objects.delete(stored.name)
            (self._cache / stored.name).unlink(missing_ok=True)
            return True
        with self._collecting(shared=False):
            try:
                again = (self._objects.root / stored.name).stat().st_mtime > stored.at
            except FileNotFoundError:
                return True
            if not again:
                self._objects.delete(stored.name)
            return not again

    def _has_local(self, digest: Digest) -> bool:
        """Return whether a local store has the content, so that it is not written again.

        The same small documents are stored for every variant and target. The time of the content is
        renewed, so that the content is not deleted before its record is written. A remote store is
        not queried; the content is written again.
        """
        path = self._cache / _blob(digest)
        if not isinstance(self._objects, LocalObjects) or not self._intact(path, digest):
            return False
        with self._collecting(shared=True):
            try:
                os.utime(path)
            except OSError:  # The file was just deleted, or belongs to another user.
                return False
        return True

    @contextmanager
    def _collecting(self, *, shared: bool) -> Iterator[None]:
        """Hold the lock that excludes writes to a local store during a deletion.

        Writers use `shared`; a deletion uses the lock exclusively from its check of the object's
        age to its end. The lock is a flock, and is only used for local stores.
        """
        if not isinstance(self._objects, LocalObjects):
            yield
            return
        with storage_errors():
            if not (self._cache / _LOCK).exists():
                self._objects.create(_LOCK, b"")
            with hold_lock(self._cache / _LOCK, shared=shared):
                yield

    def _intact(self, path: Path, digest: Digest) -> bool:
        """Return whether the file exists and its content matches the digest."""
        try:
            status = path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            known = self._verified.get(digest) == seen
            if not known and digest_file(path) != digest:
                return False
        except FileNotFoundError:
            return False
        if not known:
            with self._verified_lock:
                self._verified[digest] = seen
                while len(self._verified) > _MAX_VERIFIED:
                    del self._verified[next(iter(self._verified))]
        return True

    def _trim(self) -> None:
        """Delete the oldest content of the cache until its size is within the limit.

        Content that was downloaded within the last hour is not deleted.
        """
        entries = []
        for path in (self._cache / _BLOBS).glob("*/*"):
            with suppress(FileNotFoundError):  # Another process can delete a file at the same time.
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in entries) - self._cache_bytes
        before = time.time() - UNFINISHED_S  # noqa: TID251 (compared with times of the file system)
        for at, size, path in sorted(entries):
            if excess <= 0 or at > before:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _protect(self, digest: Digest) -> None:
        with storage_errors(), suppress(FileNotFoundError):
            os.chmod(self._cache / _blob(digest), READ_ONLY)


def _blob(digest: Digest) -> str:
    name = hex_digits(digest)
    return f"{_BLOBS}/{name[:2]}/{name}"


def _record(key: Digest) -> str:
    name = hex_digits(key)
    return f"{_RECORDS}/{name[:2]}/{name}.json"


def _parse_record(data: bytes | None, key: Digest) -> Manifest | None:
    """Return the manifest of a record.

    The result is None if the record is missing, incomplete, changed, or belongs to another key.
    """
    try:
        document = json.loads(data or b"")
        content = {"key": document["key"], "files": document["files"]}
        if document["digest"] != digest_json(content) or document["key"] != key:
            return None
        return Manifest(
            files={str(name): Digest(str(digest)) for name, digest in document["files"].items()}
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass
class ModelFolders:
    """Local read-only model folders, one per manifest.

    With a local folder, a rollback does not depend on MLflow or a remote store.
    """

    root: Path

    def place(self, manifest: Digest) -> str:
        """Return the path of the manifest's folder, whether or not it exists."""
        return str(self._folder(manifest).absolute())

    def location(self, manifest: Digest) -> str | None:
        """Return the path of the manifest's folder; None unless it exists intact."""
        folder = self._folder(manifest)
        if not folder.is_dir() or digest_folder(folder).digest() != manifest:
            return None
        return str(folder)

    @storage_errors()
    def admit(self, folder: Path, manifest: Manifest) -> str:
        """Verify files against the manifest and copy them below `root`.

        If an intact copy exists, no file is copied. The result is the path of the copy.

        Raises:
            DigestMismatchError: the files do not match the manifest.
            RefusedError: the model references weights outside its folder.
            StorageError: the files cannot be copied.
        """
        actual = digest_folder(folder)
        if dict(actual.files) != dict(manifest.files):
            differs = set(actual.files.items()) ^ set(manifest.files.items())
            names = ", ".join(sorted({name for name, _ in differs}))
            raise DigestMismatchError(
                f"files do not match manifest {short_digest(manifest.digest())}: {names}",
                remedy="Run the pipeline again.",
            )
        # Reading the structure raises RefusedError if the model refers to files outside its folder.
        for path in sorted(folder.glob("*.onnx")):
            with suppress(UserError):  # Other problems are reported when the model is loaded.
                read_structure(path)
        place = self._folder(manifest.digest())
        if self.location(manifest.digest()) is None:
            with hold_temporary_lock(self.root / f"{place.name}.lock"):
                # Another process can have copied the same files meanwhile.
                if self.location(manifest.digest()) is None:
                    self._copy(folder, place)
        return str(place)

    def _copy(self, folder: Path, place: Path) -> None:
        """Copy the files of a folder to a place, and replace files that are there."""
        sweep_unfinished(self.root)
        temporary = Path(tempfile.mkdtemp(dir=self.root, prefix=TEMPORARY))
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
            if place.exists():
                shutil.rmtree(place)
            temporary.rename(place)
            sync_path(self.root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def list_folders(self) -> Sequence[StoredObject]:
        """Return the digest, size and modification time of every model folder."""
        if not self.root.is_dir():
            return ()
        folders = {
            Digest(f"sha256:{entry.name}"): entry
            for entry in sorted(self.root.iterdir())
            if entry.is_dir()
        }
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
        """Delete a folder, if it exists."""
        folder = self._folder(manifest)
        if folder.is_dir():
            # The folder is renamed first, so that a partly deleted folder is never used.
            leaving = self.root / f"{TEMPORARY}{folder.name}-{os.getpid()}"
            folder.rename(leaving)
            shutil.rmtree(leaving)
        sweep_unfinished(self.root)

    def _folder(self, manifest: Digest) -> Path:
        return self.root / hex_digits(manifest)
