"""Another process that holds a lock on a file until it is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from pathlib import Path
from onnx_ops.file_locks import hold_lock
with hold_lock(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True)
    sys.stdin.read()
"""
_PAUSE_S = 0.2
"""Seconds in which a call that does not wait for the lock would return."""


@contextmanager
def run_lock_holder(path: Path, *, shared: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until the end of the block at the latest."""
    command = [sys.executable, "-c", _HOLD, str(path), "shared" if shared else "exclusive"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def assert_waits_for_lock(path: Path, call: Callable[[], object], *, shared: bool = False) -> None:
    """Assert that a call waits while another process holds the lock.

    It must return once that process is killed.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with run_lock_holder(path, shared=shared) as process:
        thread.start()
        thread.join(_PAUSE_S)
        is_waiting = thread.is_alive()
        process.kill()
    thread.join(60)
    assert (is_waiting, thread.is_alive(), errors) == (True, False, [])
