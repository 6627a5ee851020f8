"""Temporary folders that are removed even if their process is killed."""

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
    """A temporary folder for this user only, removed at the end of a `with` or with this object.

    A killed process leaves its folder behind, as large as its models and with its secrets. A folder in use has a lock,
    which the system releases with the process and its forks. The next process that creates a folder removes all
    unlocked ones.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another process found it before it was locked
                handle = os.open(folder.name, _FLAGS)
                with contextlib.suppress(OSError):  # without locks in the file system, no process removes it either
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
    """Remove the folders of this user's killed processes; once per process, as listing a folder takes time."""
    for path in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # also of a lock that another process holds
            handle = os.open(path, _FLAGS)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
