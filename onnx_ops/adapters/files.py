"""Files of this machine: durable, created once, private, locked, appended to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops.adapters.retry import wait_until
from onnx_ops.errors import ConflictError, RefusedError

TEMPORARY = ".tmp-"
"""Begins the name of a file that is being written, or whose writer was killed."""
UNFINISHED_S = 3600.0
"""Age at which such a file counts as left by a killed writer."""


def fsync_path(path: Path) -> None:
    """Make the content of a file, or the renames and links in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _temporary_file(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=TEMPORARY)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """Give a private temporary file that takes its name when the block ends well."""
    with _temporary_file(path.parent) as temporary:
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)


def create_file(path: Path, data: bytes) -> bool:
    """Write a private file if its name is free; return whether it was.

    An exclusive open would leave a torn file if the writer is killed; a link appears whole or not at all.
    """
    with _temporary_file(path.parent) as temporary:
        temporary.write_bytes(data)
        fsync_path(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        fsync_path(path.parent)
        return True


def read_private(path: Path, what: str, *, remedy: str = "") -> str:
    """Return the stripped text of a file that only its owner can read.

    Args:
        path: the file.
        what: its content for messages, as in "the webhook secret".
        remedy: what to do if others can read it.

    Raises:
        FileNotFoundError: there is no such file.
        RefusedError: others than its owner can read it.
    """
    with path.open("rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise RefusedError(
                f"{what} may be read by others than its owner",
                where=str(path),
                why=f"its mode is {mode:04o}",
                remedy=remedy or f"Renew it if others may have seen it, and: chmod 600 {path}",
            )
        return stream.read().decode("utf-8", "replace").strip()


@contextmanager
def exclusive_lock(path: Path, timeout_s: float, *, where: str) -> Iterator[None]:
    """Hold the lock (flock) on a file, which ends with the process.

    Raises:
        ConflictError: another process holds it for longer than `timeout_s`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as stream:
        if not wait_until(lambda: try_lock(stream.fileno(), fcntl.LOCK_EX), timeout_s):
            raise ConflictError("another process is changing this endpoint", where=where)
        yield


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file (LOCK_SH or LOCK_EX) without waiting; return whether that worked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileJournal:
    """A journal of one writer: a line with digest and JSON for each document."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[Any, ...]:
        """Return the documents up to the first damaged line, and cut the file there."""
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
        """Append a document durably; the file is created by the first one."""
        text = json.dumps(document, sort_keys=True).encode("utf-8")
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as stream:
            stream.write(_digest(text) + b" " + text + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        if is_new:
            fsync_path(self._path.parent)

    def clear(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode("ascii")
