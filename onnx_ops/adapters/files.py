"""Files of this machine, and named objects in a folder or an object store.

Files can be private, locked, or appended to. The store and the ledger rely on two guarantees.
Writing an object is atomic, so a reader sees the old or the new content. If several writers create
the same object, exactly one of them succeeds. Objects are files of a local folder, or of a file
system that fsspec supports.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from onnx_ops.adapters.retry import wait_until
from onnx_ops.errors import ConflictError, RefusedError, ServiceUnavailableError, UserError
from onnx_ops.file_locks import try_lock
from onnx_ops.plugins import imported, missing_package
from onnx_ops.scratch import (
    PRIVATE,
    TEMPORARY,
    create_file,
    durable_file,
    storage_errors,
    sync_path,
    write_durably,
)

SHARED = 0o660
"""Mode of a file that a group shares."""
UNFINISHED_S = 3600.0
"""Age in seconds from which the writer of an unfinished file counts as killed."""
_CLIENTS = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "s3fs"})
"""Packages of the clients of object stores."""
_WITHOUT_FOLDERS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "s3", "s3a"})
"""Schemes of stores without folders."""
_CLIENTS_WITHOUT_RETRIES: Mapping[str, Mapping[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}}, "max_concurrency": 1}
}
"""Options that switch off the retries of clients, by scheme.

Other clients have no option for this. With more than one concurrent request, s3fs 2026.9 requests
the size of an object before it reads the object.
"""
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "created")
"""Keys of an object's modification time, which differ by file system."""


def sweep_unfinished(folder: Path) -> None:
    """Delete the unfinished files and folders of killed writers in a folder.

    Only entries directly in the folder and older than `UNFINISHED_S` are deleted.
    """
    before = time.time() - UNFINISHED_S  # noqa: TID251 (compared with times of the file system)
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # Another process can delete the file at the same time.
            if max(part.stat().st_mtime for part in (path, *path.rglob("*"))) < before:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def read_private(path: Path, what: str, *, remedy: str = "") -> str:
    """Return the stripped text of a file that only its owner can read.

    `what` describes the content in messages, as in "the webhook secret".

    Raises:
        OSError: the file is missing (FileNotFoundError) or cannot be read.
        RefusedError: users other than the owner have access to the file. `remedy` is the error's
            remedy.
    """
    with path.open("rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise RefusedError(
                f"other users have access to {what}",
                where=str(path),
                why=f"its mode is {mode:04o}",
                remedy=remedy
                or f"Run `chmod 600 {path}`; replace the content if other users had access to it.",
            )
        return stream.read().decode("utf-8", "replace").strip()


@contextmanager
def exclusive_lock(path: Path, timeout_s: float, *, where: str) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing; wait for a limited time.

    Raises:
        ConflictError: another process holds the lock for longer than `timeout_s`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as stream:
        if not wait_until(lambda: try_lock(stream.fileno()), timeout_s):
            raise ConflictError(
                "another process is changing this endpoint",
                where=where,
                remedy="Try again when that process has finished.",
            )
        yield


class FileJournal:
    """A journal of one writer.

    Each document is a line with a digest and JSON.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[Any, ...]:
        """Return the documents before the first damaged line; delete the other lines."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        documents: list[Any] = []
        readable = 0
        for line in data.splitlines(keepends=True):
            digest, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or _digest(text) != digest:
                break
            documents.append(json.loads(text))
            readable += len(line)
        if readable < len(data):
            with self._path.open("r+b") as stream:
                stream.truncate(readable)
                os.fsync(stream.fileno())
        return tuple(documents)

    def append(self, document: Any) -> None:
        """Append a document durably; the first document creates the file."""
        text = json.dumps(document, sort_keys=True).encode("utf-8")
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as stream:
            stream.write(_digest(text) + b" " + text + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if is_new:
            sync_path(self._path.parent)

    def clear(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedObject:
    """An object in a listing.

    `at` is the time of its modification in seconds since the epoch.
    """

    name: str
    size_bytes: int
    at: float


class ObjectStore(ABC):
    """Objects by name, in a folder or an object store.

    `place` is the location of the objects for display, without a password.

    If the storage cannot be used, methods raise StorageError for a local folder, and
    ServiceUnavailableError for an object store.
    """

    place: str

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write an object if its name is free; return whether the name was free."""

    @abstractmethod
    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix, folders included, sorted."""

    @abstractmethod
    def list_objects(self, prefix: str) -> list[ListedObject]:
        """Return all objects below a prefix, sorted by name.

        In a local folder, unfinished objects are included.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; a missing object is not an error."""

    @abstractmethod
    def upload(self, name: str, path: Path) -> None:
        """Write an object from a local file."""

    @abstractmethod
    def download(self, name: str, path: Path) -> bool:
        """Copy an object to a local file; return False if the object does not exist."""


def open_objects(
    url: str, *, deadline_s: float | None = None, options: Mapping[str, Any] | None = None
) -> ObjectStore:
    """Return the objects under a local path or a URL such as `s3://bucket/prefix`.

    Args:
        deadline_s: seconds after which a remote request other than an upload or download fails, if
            the file system is asynchronous. A request that the store refuses fails immediately, so
            the caller must repeat requests. With None, the client of the store repeats requests,
            which can take a minute.
        options: options of the file system of fsspec, such as `profile` of s3fs.

    Raises:
        UserError: the file system cannot be opened with this URL.
        MissingPackageError: the file system requires a package that is not installed.
    """
    if "://" not in url or url.startswith("file://"):
        return LocalObjects(Path(urlsplit(url).path if url.startswith("file://") else url))
    return FsspecObjects(url, deadline_s=deadline_s, options=options)


def _stop_retries(file_system: Any) -> None:
    """Switch off the retries of clients that have no option for this.

    s3fs 2026.9 repeats requests even if retries of its client are off. Azure's client waits 15 s
    before it repeats a request, and adlfs 2026.8 cannot pass options to this client. The attributes
    are not public. If their names change, requests end at the deadline.
    """
    file_system.retries = 1
    with suppress(AttributeError):
        file_system.service_client._config.retry_policy.total_retries = 0  # noqa: SLF001 (there is no public way)


class LocalObjects(ObjectStore):
    """Objects as files below a folder.

    The files are private. If the group of the folder has write access, the files are shared with
    the group.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)

    def share(self, path: Path) -> int:
        """Return the mode for a file below the root.

        If the root is shared, missing folders of the file are created.
        """
        if not (self.root.is_dir() and self.root.stat().st_mode & stat.S_IWGRP):
            return PRIVATE
        for folder in reversed(path.relative_to(self.root).parents[:-1]):
            place = self.root / folder
            # A new folder belongs to one user until its mode is set. It is renamed to its final
            # name only then. So other users can write to every folder with a final name, even if
            # the writer is killed.
            if not place.is_dir():
                made = Path(tempfile.mkdtemp(dir=place.parent, prefix=TEMPORARY))
                made.chmod(stat.S_IMODE(self.root.stat().st_mode))
                with suppress(OSError):
                    made.rename(place)
                with suppress(FileNotFoundError):
                    # If another writer has created the folder, the rename can fail, and the
                    # temporary folder is left.
                    made.rmdir()
        return SHARED

    @override
    @storage_errors()
    def read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self.root / name).read_bytes()
        return None

    @override
    @storage_errors()
    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        write_durably(path, data, self.share(path))

    @override
    @storage_errors()
    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        return create_file(path, data, self.share(path))

    @override
    @storage_errors()
    def list_names(self, prefix: str) -> list[str]:
        folder = self.root / prefix
        if not folder.is_dir():
            return []
        return sorted(
            entry.name for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY)
        )

    @override
    @storage_errors()
    def list_objects(self, prefix: str) -> list[ListedObject]:
        objects = []
        for path in sorted((self.root / prefix).rglob("*")):
            with suppress(FileNotFoundError):
                # Another process can delete the file at the same time.
                status = path.stat()
                if path.is_file():
                    name = path.relative_to(self.root).as_posix()
                    objects.append(
                        ListedObject(name=name, size_bytes=status.st_size, at=status.st_mtime)
                    )
        return objects

    @override
    @storage_errors()
    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    @storage_errors()
    def upload(self, name: str, path: Path) -> None:
        place = self.root / name
        with durable_file(place, self.share(place)) as temporary:
            shutil.copyfile(path, temporary)

    @override
    @storage_errors()
    def download(self, name: str, path: Path) -> bool:
        with suppress(FileNotFoundError):
            with (
                (self.root / name).open("rb") as source,
                durable_file(path) as temporary,
                temporary.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink)
            return True
        return False


class FsspecObjects(ObjectStore):
    """Objects on a remote file system.

    `create` uses fsspec's mode `create`, which sends `If-None-Match: *` to S3 and Azure. For the
    parameters, see `open_objects`.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        import fsspec

        parts = urlsplit(url)
        # In abfs://CONTAINER@ACCOUNT, the part before the @ is not a secret, so it is shown.
        user, _, host = parts.netloc.rpartition("@")
        self.place = f"{parts.scheme}://{host if ':' in user else parts.netloc}{parts.path}"
        try:
            self._fs: Any
            # No listings are cached, since other processes write to the store too.
            retries = {} if deadline_s is None else _CLIENTS_WITHOUT_RETRIES.get(parts.scheme, {})
            self._fs, self._root = fsspec.core.url_to_fs(
                url, use_listings_cache=False, **retries, **(options or {})
            )
        except ImportError as error:
            raise missing_package(imported(error), where=self.place, why=str(error)) from error
        except ValueError as error:
            # For example, adlfs raises ValueError for a URL without an account.
            raise UserError(
                "the object store cannot be opened",
                where=self.place,
                why=str(error),
                remedy="Check the URL of the location, and the credentials of this process.",
            ) from error
        self._has_folders = parts.scheme not in _WITHOUT_FOLDERS
        self._deadline_s = deadline_s
        if deadline_s is not None:
            _stop_retries(self._fs)

    @override
    def read(self, name: str) -> bytes | None:
        with self._errors(), suppress(FileNotFoundError):
            return bytes(self._call("cat_file", self._path(name)))
        return None

    @override
    def write(self, name: str, data: bytes) -> None:
        with self._errors():
            self._make_folder(name)
            self._call("pipe_file", self._path(name), data)

    @override
    def create(self, name: str, data: bytes) -> bool:
        with self._errors():
            self._make_folder(name)
            with suppress(FileExistsError):
                self._call("pipe_file", self._path(name), data, mode="create")
                return True
        return False

    @override
    def list_names(self, prefix: str) -> list[str]:
        with self._errors(), suppress(FileNotFoundError):
            paths = self._call("ls", self._path(prefix), detail=False)
            return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)
        return []

    @override
    def list_objects(self, prefix: str) -> list[ListedObject]:
        objects, below, details = [], len(self._path("x")) - 1, dict[str, Any]()
        with self._errors():
            with suppress(FileNotFoundError):
                details = self._call("find", self._path(prefix), detail=True)
            for path, info in sorted(details.items()):
                # In s3fs 2026.9, `_find` lists the prefix, and calls `_info` if the list is empty.
                # If another writer adds the first object in between, the prefix is returned as a
                # directory.
                if info.get("type") == "directory":
                    continue
                at = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), None)
                at = self._fs.modified(path) if at is None else at
                if isinstance(at, datetime.datetime):
                    at = (
                        at if at.tzinfo is not None else at.replace(tzinfo=datetime.UTC)
                    ).timestamp()
                objects.append(
                    ListedObject(name=path[below:], size_bytes=int(info["size"] or 0), at=float(at))
                )
        return objects

    @override
    def delete(self, name: str) -> None:
        with self._errors():
            if self._call("exists", self._path(name)):
                self._call("rm_file", self._path(name))

    @override
    def upload(self, name: str, path: Path) -> None:
        with self._errors():
            self._make_folder(name)
            self._fs.put_file(str(path), self._path(name))

    @override
    def download(self, name: str, path: Path) -> bool:
        with suppress(FileNotFoundError), self._errors(), durable_file(path) as temporary:
            self._fs.get_file(self._path(name), str(temporary))
            return True
        return False

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system; cancel an asynchronous one at the deadline."""
        if self._deadline_s is None or not self._fs.async_impl:
            return getattr(self._fs, method)(*args, **options)
        from fsspec.asyn import sync

        return sync(
            self._fs.loop,
            getattr(self._fs, f"_{method}"),
            *args,
            timeout=self._deadline_s,
            **options,
        )

    def _make_folder(self, name: str) -> None:
        """Create the folder of an object, if the store has folders.

        In a store without folders, s3fs would create a missing bucket.
        """
        if self._has_folders:
            self._call("makedirs", self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except PermissionError as error:
            what, remedy = (
                "the object store denied access",
                "Check the credentials and their rights.",
            )
            raise ServiceUnavailableError(
                what, where=self.place, why=str(error), remedy=remedy
            ) from error
        except OSError as error:
            what = "the request to the object store failed"
            raise ServiceUnavailableError(what, where=self.place, why=str(error)) from error
        except Exception as error:
            # If credentials are missing or a name is invalid, the clients of clouds raise their own
            # types of errors.
            if type(error).__module__.partition(".")[0] not in _CLIENTS:
                raise
            what = "the object store cannot be used"
            remedy = "Check the address, and the credentials of this process."
            raise ServiceUnavailableError(
                what, where=self.place, why=str(error), remedy=remedy
            ) from error
