"""The content-addressed store: files by digest, stage results by key."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from onnx_ops.adapters.objects import LocalObjects, Objects
from onnx_ops.domain.artifact import (
    Digest,
    Manifest,
    canonical_json,
    digest_bytes,
    digest_file,
    digest_json,
    hex_of,
    is_digest,
    short,
)
from onnx_ops.errors import StateCorrupt

READ_ONLY = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


class ContentStore:
    """Blobs under `blobs/`, records under `records/`; a remote store reads through a local cache.

    Nothing is trusted because of its name: content is hashed before it is handed out, and a record carries its own
    digest, so that a torn or tampered file counts as missing.
    """

    def __init__(self, objects: Objects, cache: Path) -> None:
        self._objects = objects
        self._cache = objects.root if isinstance(objects, LocalObjects) else cache
        self._verified: dict[Digest, tuple[int, ...]] = {}

    def put_bytes(self, data: bytes) -> Digest:
        digest = digest_bytes(data)
        self._objects.write(_blob(digest), data)
        self._protect(digest)
        return digest

    def put_file(self, path: Path) -> Digest:
        digest = digest_file(path)
        self._objects.upload(_blob(digest), path)
        self._protect(digest)
        self.path(digest)  # refuses a file that changed while it was copied
        return digest

    def path(self, digest: Digest) -> Path:
        if not is_digest(digest):
            raise StateCorrupt(f"not a digest: {digest[:80]!r}", where="store")
        local = self._cache / _blob(digest)
        if self._intact(local, digest):
            return local
        remote = not isinstance(self._objects, LocalObjects)
        if remote and self._objects.download(_blob(digest), local) and self._intact(local, digest):
            self._protect(digest)
            return local
        cause = "its content is not what its name says" if local.exists() else "it is missing"
        raise StateCorrupt(
            f"stored content {short(digest)} cannot be used",
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
        except StateCorrupt:
            return None
        return manifest

    def _intact(self, path: Path, digest: Digest) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        seen = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        if self._verified.get(digest) != seen:
            if digest_file(path) != digest:
                return False
            self._verified[digest] = seen
        return True

    def _protect(self, digest: Digest) -> None:
        local = self._cache / _blob(digest)
        if local.exists():
            os.chmod(local, READ_ONLY)


def _blob(digest: Digest) -> str:
    name = hex_of(digest)
    return f"blobs/{name[:2]}/{name}"


def _record(key: Digest) -> str:
    name = hex_of(key)
    return f"records/{name[:2]}/{name}.json"


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
