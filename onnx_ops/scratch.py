"""Handle temporary folders, durable files, and durations of steps.

The module also converts errors of a full disk or of denied access.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from onnx_ops.errors import CorruptStateError, StorageError
from onnx_ops.file_locks import acquire_lock, try_lock

PREFIX = "onnx-ops-scratch-"
TEMPORARY = ".tmp-"
"""Prefix of the names of files that are being written, or whose writer was killed."""
PRIVATE = 0o600
"""Mode of a file that only its owner can read and write."""
_REMEMBERED = 2000
"""Maximum number of steps in the file of durations."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""Flags to open a folder, but not a link to a folder."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS)
"""Error numbers of an inaccessible path.

The causes are denied access, a read-only file system, or a file in place of a folder.
"""
_FREE = (
    "Free some disk space and run the command again; completed stages are cached. "
    "See `onnx-ops docs runbooks/disk-full`."
)
_OPEN = "Grant the current user access to this path, or set another folder in onnx-ops.toml."


class Scratch:
    """A temporary folder that only this user can access.

    The folder is removed at the end of a `with` block, or when this object is deleted.

    A killed process cannot remove its folder, which can contain large models and secrets. The next
    process that creates such a folder therefore removes all unlocked folders of this user. A folder
    in use has a lock, which the system releases when the process and its forks have ended.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            # Another process can remove the folder before it is locked.
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(folder.name, _FLAGS)
                # Other processes remove the folder only on a file system with locks.
                with contextlib.suppress(OSError):
                    acquire_lock(handle, shared=True)
                if Path(folder.name).exists():
                    break
                os.close(handle)
            folder.cleanup()
        self._folder, self.path = folder, Path(folder.name)
        self._unlock = weakref.finalize(self, os.close, handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, and release its lock."""
        self._folder.cleanup()
        self._unlock()


@functools.cache
def _sweep(place: Path) -> None:
    """Remove the folders of this user's killed processes.

    Each process does this only once for a folder.
    """
    for path in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            handle = os.open(path, _FLAGS)
            try:
                if os.fstat(handle).st_uid == os.getuid() and try_lock(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def sync_path(path: Path) -> None:
    """Sync the content of a file, or the renames and links in a folder.

    The synced content, renames and links survive a power failure.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _temporary_file(folder: Path, mode: int) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=TEMPORARY)
    os.fchmod(handle, mode)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def durable_file(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Yield a temporary file, which is renamed to `path` if the block succeeds.

    By default, only its owner can access the file.
    """
    with _temporary_file(path.parent, mode) as temporary:
        yield temporary
        sync_path(temporary)
        temporary.replace(path)
        sync_path(path.parent)


def write_durably(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replace a file atomically, even in case of a power failure.

    The file keeps its old content if an OSError occurs before the replacement. If only the sync of
    the folder fails, the file already has its new content.
    """
    with durable_file(path, mode) as temporary:
        temporary.write_bytes(data)


def read_plain_file(path: Path, *, most: int) -> bytes:
    """Return the content of a plain file that untrusted code was able to write.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptStateError: the path is a link, a folder, a pipe or a device, or the file cannot be
            opened or is larger than `most` bytes.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        # With O_NOFOLLOW, opening a symbolic link raises OSError, for example.
        raise CorruptStateError(
            "not a plain file", where=str(path), why=error.strerror or str(error)
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CorruptStateError("not a plain file", where=str(path))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read(most + 1)
    if len(data) > most:
        raise CorruptStateError(f"larger than {most >> 20} MiB", where=str(path))
    return data


def create_file(path: Path, data: bytes, mode: int = PRIVATE) -> bool:
    """Write a file if `path` does not exist; return whether the file was written.

    By default, only its owner can access the file. The file is written under another name and then
    linked. An exclusive open would leave a partial file if the writer is killed.
    """
    with _temporary_file(path.parent, mode) as temporary:
        temporary.write_bytes(data)
        sync_path(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        sync_path(path.parent)
        return True


@contextlib.contextmanager
def storage_errors(where: str = "") -> Iterator[None]:
    """Convert an OSError about storage into a `StorageError` with a remedy.

    Such an error reports a full disk or quota, denied access, a read-only file system, or a file in
    place of a folder.

    Raises:
        StorageError: the block raised an OSError about storage. Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                "the disk is full", where=where, why=str(error), remedy=_FREE
            ) from error
        if error.errno in _CLOSED:
            what = "a file or folder is not accessible"
            raise StorageError(what, where=where, why=str(error), remedy=_OPEN) from error
        raise


class Durations:
    """The last duration of each step, in seconds, which a file stores.

    Errors of the file are ignored, since the durations are only used for estimates.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._new: dict[str, float] = {}
        self.last = self._read()
        """Seconds by step, of the file and of this process."""

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            if self._path is not None:
                return {
                    step: float(s)
                    for step, s in json.loads(self._path.read_text(encoding="utf-8")).items()
                }
        return {}

    def add(self, step: str, seconds: float) -> None:
        """Set the duration of a step in memory; `save` writes it to the file."""
        self._new.pop(step, None)
        self.last[step] = self._new[step] = round(seconds, 2)

    def save(self) -> None:
        """Write the added durations to the file, which keeps the newest `_REMEMBERED`."""
        with self._lock, contextlib.suppress(OSError):
            if self._path is not None:
                new = {**self._new}
                known = {**{step: s for step, s in self._read().items() if step not in new}, **new}
                write_durably(
                    self._path, json.dumps(dict([*known.items()][-_REMEMBERED:])).encode()
                )

    def record(self, step: str, seconds: float) -> None:
        """Record the duration of a step in the file, unless it is 0 (unknown)."""
        if seconds:
            self.add(step, seconds)
            self.save()

    @contextlib.contextmanager
    def measure(self, step: str) -> Iterator[None]:
        """Record the duration of a block that executes a step, unless the block fails."""
        started = time.monotonic()
        yield
        self.record(step, time.monotonic() - started)
