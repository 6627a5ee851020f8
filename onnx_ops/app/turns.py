"""Who waits for whom: measurements for a quiet machine, and whoever would do the same work for whoever does it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from onnx_ops.domain.artifact import Digest, hex_digits


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """One measurement of times at once on this machine. The lock goes with its holder, however that ends."""
    path = Path(tempfile.gettempdir()) / f"onnx-ops-benchmark-{os.getuid()}.lock"
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Quiet:
    """Among the pipelines that one process runs side by side, a measurement has the machine to itself.

    In the order in which they come: work goes beside work, a measurement waits for all that has begun, and what comes
    later waits for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = 0
        self._admitted = 0
        self._working = 0
        self._measuring = False

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Work whose duration nobody measures."""
        with self._turn(alone=False):
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Work whose figures are times."""
        with self._turn(alone=True):
            self._measuring = True
        try:
            yield
        finally:
            with self._changed:
                self._measuring = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        """Waits for this comer's turn; what the block writes down is seen by the next one."""
        with self._changed:
            ticket, self._tickets = self._tickets, self._tickets + 1
            self._changed.wait_for(
                lambda: self._admitted == ticket and not self._measuring and not (alone and self._working)
            )
            self._admitted += 1
            yield
            self._changed.notify_all()


@contextlib.contextmanager
def claimed(folder: Path, key: Digest) -> Iterator[None]:
    """The work of a key, done by one at a time: of the threads and processes on this machine that name this folder.

    Whoever had to wait looks for the result first. A claim goes with its holder, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hex_digits(key)}.lock"
    while True:
        with path.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if not _still_there(path, stream.fileno()):  # its last holder has taken the file away
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
