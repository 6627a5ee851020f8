"""Locks on files between processes that share, fork, start programs or are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.file_locks import acquire_lock, hold_lock, hold_temporary_lock, try_lock
from tests.support.lock_holder import assert_waits_for_lock, run_lock_holder

COUNT = """
import sys
from pathlib import Path
from onnx_ops import file_locks
lock, counter = Path(sys.argv[2]), Path(sys.argv[3])
for _ in range(100):
    with getattr(file_locks, sys.argv[1])(lock):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
"""
FORK = """
import os, sys
from pathlib import Path
from onnx_ops.file_locks import hold_lock
with hold_lock(Path(sys.argv[1])):
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""
START = """
import subprocess, sys
from pathlib import Path
from onnx_ops.file_locks import hold_lock
with hold_lock(Path(sys.argv[1])):
    subprocess.Popen([sys.executable, "-c", "import sys; print('started', flush=True); sys.stdin.read()"])
    sys.stdin.readline()
"""  # noqa: E501


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.lock"


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    with path.open("a") as stream:
        yield stream.fileno()


def test_try_lock_excludes_other_processes_unless_both_share(path: Path, descriptor: int) -> None:
    with run_lock_holder(path):
        assert not try_lock(descriptor)
        assert not try_lock(descriptor, shared=True)
    with run_lock_holder(path, shared=True):
        assert not try_lock(descriptor)
        assert try_lock(descriptor, shared=True)
        with run_lock_holder(path, shared=True):
            pass
    assert try_lock(descriptor)


def test_acquire_lock_waits_for_other_processes_unless_both_share(path: Path) -> None:
    def acquire(*, shared: bool) -> None:
        with path.open("a") as stream:
            acquire_lock(stream.fileno(), shared=shared)

    assert_waits_for_lock(path, lambda: acquire(shared=True))
    assert_waits_for_lock(path, lambda: acquire(shared=False))
    assert_waits_for_lock(path, lambda: acquire(shared=False), shared=True)
    with run_lock_holder(path, shared=True):
        acquire(shared=True)


def test_locks_of_two_opens_in_one_process_exclude_each_other(path: Path, descriptor: int) -> None:
    with hold_lock(path):
        assert not try_lock(descriptor)
    assert try_lock(descriptor)


def test_locks_of_two_handles_of_folder_exclude_each_other_unless_both_share(
    tmp_path: Path,
) -> None:
    handles = [os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2)]
    acquire_lock(handles[0], shared=True)
    assert [try_lock(handles[1]), try_lock(handles[1], shared=True)] == [False, True]
    for handle in handles:
        os.close(handle)


def test_hold_lock_of_locked_file_reports_wait_once_and_keeps_file(path: Path) -> None:
    waits: list[str] = []

    def hold() -> None:
        with hold_lock(path, on_wait=lambda: waits.append("waits")):
            pass

    hold()
    assert waits == []
    assert_waits_for_lock(path, hold)
    assert (waits, path.exists()) == (["waits"], True)


def test_hold_lock_with_raising_block_releases_lock(path: Path, descriptor: int) -> None:
    with pytest.raises(ZeroDivisionError), hold_lock(path):
        raise ZeroDivisionError
    assert try_lock(descriptor)


def test_hold_temporary_lock_of_locked_file_waits_and_removes_file(path: Path) -> None:
    def hold() -> None:
        with hold_temporary_lock(path):
            assert path.exists()

    assert_waits_for_lock(path, hold)
    assert not path.exists()


@pytest.mark.parametrize("function", ["hold_lock", "hold_temporary_lock"])
def test_lock_around_concurrent_increments_loses_none(path: Path, function: str) -> None:
    counter = path.with_name("counter")
    counter.write_text("0")
    command = [sys.executable, "-c", COUNT, function, str(path), str(counter)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (counter.read_text(), path.exists()) == ("300", function == "hold_lock")


def test_lock_of_killed_process_lasts_until_its_fork_ends(path: Path, descriptor: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        process.wait()
        assert not try_lock(descriptor)
        process.stdin.close()
        # The read ends when the fork ends.
        process.stdout.read()
        acquire_lock(descriptor)


def test_lock_of_killed_process_with_running_subprocess_is_released(
    path: Path, descriptor: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert not try_lock(descriptor)
        process.kill()
        process.wait()
        assert try_lock(descriptor)
