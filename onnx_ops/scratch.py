"""Temporary folders that are gone with their process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType

PREFIX = "onnx-ops-scratch-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Scratch:
    """A temporary folder of this user alone, removed at the end of a `with` or with this object.

    A process that is killed leaves its own, as large as its models and with the secrets that it was given. A lock on
    the folder says that somebody needs it, and the system takes the lock away with the process and those that it has
    forked; the next process that makes a folder removes all that nobody has locked.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another process found it before it was locked
                handle = os.open(folder.name, _FLAGS)
                with contextlib.suppress(OSError):  # a file system without locks: nobody gets one to remove it either
                    fcntl.flock(handle, fcntl.LOCK_SH)
                if Path(folder.name).exists():
                    break
                os.close(handle)
            folder.cleanup()
        self._folder, self.path = folder, Path(folder.name)
        self._unlock = weakref.finalize(self, os.close, handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._unlock()


@functools.cache
def _sweep(place: Path) -> None:
    """Remove what killed processes of this user have left; once a process, as looking through a folder takes time."""
    for path in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # also of a lock that another process holds
            handle = os.open(path, _FLAGS)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
