"""Named objects under one root: a local folder, or any file system that fsspec knows.

Two promises carry the store and the ledger: `write` is atomic (a reader sees the old content or the new), and
`create` succeeds for exactly one of several writers.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from onnx_ops.errors import ConflictError, ServiceUnavailableError, storage_errors
from onnx_ops.plugins import imported, missing_package

TEMPORARY = ".tmp-"
"""Begins the name of a file that is being written, or whose writer was killed."""
UNFINISHED_S = 3600.0
"""Age at which such a file counts as left by a killed writer."""
_LOCK_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object as its storage lists it. `at` is when it was written, in seconds since the epoch by that storage."""

    name: str
    size_bytes: int
    at: float


class Objects(Protocol):
    @property
    def place(self) -> str:
        """Path or URL, without credentials."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content, or None if there is no such object."""
        ...

    def write(self, name: str, data: bytes) -> None: ...

    def create(self, name: str, data: bytes) -> bool:
        """Write only if the name is free; says whether it was."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Names directly below a prefix (folders included), sorted."""
        ...

    def listed(self, prefix: str) -> list[Found]:
        """All objects anywhere below a prefix, sorted by name; locally with files that killed writers left."""
        ...

    def delete(self, name: str) -> None: ...

    def upload(self, name: str, path: Path) -> None: ...

    def download(self, name: str, path: Path) -> bool:
        """Copy the object to a local file; False if there is no such object."""
        ...


def open_objects(url: str) -> Objects:
    """Objects under a local path or a URL (`s3://bucket/prefix`, `abfs://…`)."""
    if "://" not in url or url.startswith("file://"):
        return LocalObjects(Path(urlsplit(url).path if url.startswith("file://") else url))
    return FsspecObjects(url)


def fsync_folder(folder: Path) -> None:
    """Make a rename or link in this folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its name, durably, when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path, timeout_s: float, *, where: str) -> Iterator[None]:
    """Hold the lock (flock) on a file, which the system releases when the process dies.

    Raises:
        ConflictError: another process holds it for longer than `timeout_s`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("a") as stream:
        while not try_lock(stream.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ConflictError("another process is changing this endpoint", where=where)
            time.sleep(_LOCK_PAUSE_S)
        yield


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file (LOCK_SH or LOCK_EX) without waiting; return whether it is locked now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LocalObjects:
    """Objects as files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)

    @storage_errors()
    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    @storage_errors()
    def write(self, name: str, data: bytes) -> None:
        with durable_file(self.root / name) as temporary:
            temporary.write_bytes(data)

    @storage_errors()
    def create(self, name: str, data: bytes) -> bool:
        # An exclusive open would leave a torn object if the writer is killed; a link appears whole or not at all.
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            fsync_folder(path.parent)
            return True
        finally:
            Path(temporary).unlink(missing_ok=True)

    @storage_errors()
    def names(self, prefix: str) -> list[str]:
        folder = self.root / prefix
        if not folder.is_dir():
            return []
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY))

    @storage_errors()
    def listed(self, prefix: str) -> list[Found]:
        found = []
        for path in sorted((self.root / prefix).rglob("*")):
            with suppress(FileNotFoundError):  # somebody was faster
                status = path.stat()
                if path.is_file():
                    name = path.relative_to(self.root).as_posix()
                    found.append(Found(name=name, size_bytes=status.st_size, at=status.st_mtime))
        return found

    @storage_errors()
    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def sweep(self, prefix: str) -> None:
        """Remove what killed writers left directly below a prefix. What is younger than an hour may be written now."""
        before = time.time() - UNFINISHED_S  # noqa: TID251 (compared with times of the file system)
        for path in (self.root / prefix).glob(f"{TEMPORARY}*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()

    @storage_errors()
    def upload(self, name: str, path: Path) -> None:
        with durable_file(self.root / name) as temporary, path.open("rb") as source, temporary.open("wb") as sink:
            while block := source.read(1 << 20):
                sink.write(block)

    @storage_errors()
    def download(self, name: str, path: Path) -> bool:
        try:
            with (
                (self.root / name).open("rb") as source,
                durable_file(path) as temporary,
                temporary.open("wb") as sink,
            ):
                while block := source.read(1 << 20):
                    sink.write(block)
        except FileNotFoundError:
            return False
        return True


_WRITTEN = ("LastModified", "last_modified", "mtime", "created")


class FsspecObjects:
    """Objects on a remote file system. `create` is `If-None-Match: *` on S3 and Azure Blob."""

    def __init__(self, url: str) -> None:
        import fsspec

        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")  # abfs://CONTAINER@ACCOUNT holds no secret
        self.place = f"{parts.scheme}://{host if ':' in user else parts.netloc}{parts.path}"
        try:
            self._fs: Any
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise missing_package(imported(error), where=self.place, why=str(error)) from error

    def read(self, name: str) -> bytes | None:
        with self._reachable():
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._reachable():
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        with self._reachable():
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            return True

    def names(self, prefix: str) -> list[str]:
        with self._reachable():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(prefix), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def listed(self, prefix: str) -> list[Found]:
        with self._reachable():
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Any] = self._fs.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return []
            below = len(self._path("x")) - 1
            return [
                Found(name=path[below:], size_bytes=int(info["size"] or 0), at=self._written(path, info))
                for path, info in sorted(found.items())
            ]

    def delete(self, name: str) -> None:
        with self._reachable():
            if self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(name))

    def upload(self, name: str, path: Path) -> None:
        with self._reachable():
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> bool:
        try:
            with self._reachable(), durable_file(path) as temporary:
                self._fs.get_file(self._path(name), str(temporary))
        except FileNotFoundError:
            return False
        return True

    def _written(self, path: str, info: Mapping[str, Any]) -> float:
        """Every file system has another name for it."""
        at = next((info[name] for name in _WRITTEN if info.get(name) is not None), None)
        at = self._fs.modified(path) if at is None else at
        if isinstance(at, datetime.datetime):
            return (at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)).timestamp()
        return float(at)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ServiceUnavailableError(
                "the object store does not answer", where=self.place, why=str(error)
            ) from error
