"""Locks on files and folders (flock).

The locks exclude the processes of this machine from each other.

A lock belongs to an open file (flock(2)): two opens of one file exclude each other, also in one
process. The system releases the lock when the last descriptor of that open file is closed. A killed
process therefore leaves no lock. A forked child has the same open file, and holds the lock until it
ends or closes the descriptor. A program that Python starts does not inherit the lock, because
Python closes its descriptors on exec (PEP 446).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def acquire_lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file or folder.

    Wait while another open file has a conflicting lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder if it is free; return whether it was locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(
    path: Path, *, shared: bool = False, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing and never removed.

    Args:
        shared: whether other shared locks are permitted at the same time.
        on_wait: function that is called once if the lock is not free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        if not try_lock(stream.fileno(), shared=shared):
            if on_wait is not None:
                on_wait()
            acquire_lock(stream.fileno(), shared=shared)
        yield


@contextlib.contextmanager
def hold_temporary_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, and remove the file afterwards.

    Use this function if the number of file names is not limited. A process that waited for the
    removed file then locks the new file of that name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as stream:
            acquire_lock(stream.fileno())
            if not _has_name(stream.fileno(), path):
                # The process that had the lock has removed the file.
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _has_name(descriptor: int, path: Path) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
