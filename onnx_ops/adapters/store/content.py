"""The content-addressed store: files by digest, stage results by key."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from onnx_ops.adapters.objects import TEMPORARY, LocalObjects, Objects
from onnx_ops.domain.artifact import (
    Digest,
    Manifest,
    StoredObject,
    canonical_json,
    digest_bytes,
    digest_file,
    digest_json,
    hex_digits,
    is_digest,
    short_digest,
)
from onnx_ops.errors import CorruptStateError, storage_errors

_BLOBS, _RECORDS, _LOCK = "blobs", "records", "collect.lock"
READ_ONLY = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


_REMEMBERED = 8192
"""Blobs whose verified state is kept in mind; more than one pipeline has, and no more memory for many of them."""


class ContentStore:
    """Blobs under `blobs/`, records under `records/`; a remote store reads through a local cache.

    Nothing is trusted because of its name: content is hashed before it is handed out, and a record carries its own
    digest, so that a torn or tampered file counts as missing.
    """

    def __init__(self, objects: Objects, cache: Path) -> None:
        self._objects = objects
        self._cache = objects.root if isinstance(objects, LocalObjects) else cache
        self._verified: dict[Digest, tuple[int, ...]] = {}
        self._remembering = threading.Lock()

    def put_bytes(self, data: bytes) -> Digest:
        digest = digest_bytes(data)
        if not self._held(digest):
            with self._collecting(fcntl.LOCK_SH):
                self._objects.write(_blob(digest), data)
            self._protect(digest)
        return digest

    def put_file(self, path: Path) -> Digest:
        digest = digest_file(path)
        if not self._held(digest):
            with self._collecting(fcntl.LOCK_SH):
                self._objects.upload(_blob(digest), path)
            self._protect(digest)
            self.path(digest)  # refuses a file that changed while it was copied
        return digest

    def path(self, digest: Digest) -> Path:
        if not is_digest(digest):
            raise CorruptStateError(f"not a digest: {digest[:80]!r}", where="store")
        local = self._cache / _blob(digest)
        if self._intact(local, digest):
            return local
        remote = not isinstance(self._objects, LocalObjects)
        if remote and self._objects.download(_blob(digest), local) and self._intact(local, digest):
            self._protect(digest)
            return local
        cause = "its content is not what its name says" if local.exists() else "it is missing"
        raise CorruptStateError(
            f"stored content {short_digest(digest)} cannot be used",
            where="store",
            why=cause,
            remedy="Run the pipeline again: the stage that made it runs anew.",
        )

    def read(self, digest: Digest) -> bytes:
        return self.path(digest).read_bytes()

    def record(self, key: Digest, manifest: Manifest) -> None:
        content = {"key": key, "files": dict(manifest.files)}
        self._objects.write(_record(key), canonical_json({**content, "digest": digest_json(content)}))

    def lookup(self, key: Digest) -> Manifest | None:
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
        for found in self._objects.listed(_RECORDS):
            key = Digest(f"sha256:{Path(found.name).stem}")
            manifest = _parse_record(self._objects.read(found.name), key)
            if manifest is not None:
                yield manifest

    def contents(self) -> tuple[StoredObject, ...]:
        found = []
        for one in (*self._objects.listed(_BLOBS), *self._objects.listed(_RECORDS)):
            name = one.name.rpartition("/")[2]
            digest = Digest(f"sha256:{name}")
            if name.startswith(TEMPORARY):
                found.append(StoredObject(name=one.name, digest=None, size_bytes=one.size_bytes, at=one.at))
            elif is_digest(digest) and one.name == _blob(digest):
                found.append(StoredObject(name=one.name, digest=digest, size_bytes=one.size_bytes, at=one.at))
        return tuple(found)

    def forget(self, stored: StoredObject) -> bool:
        if not isinstance(self._objects, LocalObjects):
            return self._forget_remote(stored)
        with self._collecting(fcntl.LOCK_EX):
            try:
                again = (self._objects.root / stored.name).stat().st_mtime > stored.at
            except FileNotFoundError:
                return True
            if not again:
                self._objects.delete(stored.name)
            return not again

    def _forget_remote(self, stored: StoredObject) -> bool:
        """Whoever puts the same at this very instant finds it missing later, and does that stage again."""
        beside = self._objects.listed(stored.name.rpartition("/")[0])
        if any(found.name == stored.name and found.at > stored.at for found in beside):
            return False
        self._objects.delete(stored.name)
        (self._cache / stored.name).unlink(missing_ok=True)
        return True

    def _held(self, digest: Digest) -> bool:
        """Whether a local store has it whole already: the same small documents are put for every variant and target.

        Then it counts as put now, so that it is not collected before its record is written. A remote store is not
        asked: the answer would cost what writing costs.
        """
        path = self._cache / _blob(digest)
        if not isinstance(self._objects, LocalObjects) or not self._intact(path, digest):
            return False
        with self._collecting(fcntl.LOCK_SH):
            try:
                os.utime(path)
            except OSError:  # it was collected just now, or belongs to somebody else: it is written anew
                return False
        return True

    @contextmanager
    def _collecting(self, kind: int) -> Iterator[None]:
        """Nothing is put into a local store between the last look at old content and its removal. A kill lets go of the
        lock."""
        if not isinstance(self._objects, LocalObjects):
            yield
            return
        with storage_errors(), ExitStack() as stack:
            self._cache.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((self._cache / _LOCK).open("a")), kind)
            yield

    def _intact(self, path: Path, digest: Digest) -> bool:
        """Whether it is there and is what its name says; what is collected while it is read is not there."""
        try:
            status = path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            known = self._verified.get(digest) == seen
            if not known and digest_file(path) != digest:
                return False
        except FileNotFoundError:
            return False
        if not known:
            with self._remembering:
                self._verified[digest] = seen
                while len(self._verified) > _REMEMBERED:
                    del self._verified[next(iter(self._verified))]
        return True

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
    """None for a record that is missing, torn, tampered with or filed under another key."""
    try:
        document = json.loads(data or b"")
        content = {"key": document["key"], "files": document["files"]}
        if document["digest"] != digest_json(content) or document["key"] != key:
            return None
        return Manifest(files={str(name): Digest(str(digest)) for name, digest in document["files"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
