"""A process that is killed at a chosen moment, and data of /proc about processes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fault_injection import FaultPoint, arm, count_points
from tests.support.processes import children_of, cpu_seconds, memory, peak_memory, session_of

SCRIPT = """
import os, socket, sys, time
from pathlib import Path
from tests.support.fault_injection import Watch
Watch(Path(sys.argv[1])).install()
folder = Path(sys.argv[2])
if os.fork() == 0:
    (folder / "child").touch()
    time.sleep(60)
    os._exit(0)
handle = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
os.write(handle, b"x")
os.fsync(handle)
(folder / "new").replace(folder / "old")
ours, theirs = socket.socketpair()
ours.sendall(b"x")
time.sleep(60 if len(sys.argv) > 3 else 0)
"""
CALLS = 5


def run(tmp_path: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "point.json"), str(tmp_path), *more]
    return subprocess.Popen(command, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    for pid in session_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("at", "exists"),
    [(0, set()), (1, {"new"}), (5, {"new"}), (6, {"new"}), (7, {"old"}), (2 * CALLS - 1, {"old"})],
)
def test_fault_point_kills_process_exactly_at_its_call(
    tmp_path: Path, at: int, exists: set[str]
) -> None:
    arm(tmp_path / "point.json", FaultPoint(at=at))
    process = run(tmp_path)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert count_points(tmp_path / "point.json") == at + 1
    assert {name for name in ("new", "old") if (tmp_path / name).exists()} == exists
    end(process)


def test_count_points_counts_calls_of_armed_process_only(tmp_path: Path) -> None:
    point = tmp_path / "point.json"
    process = run(tmp_path)
    assert process.wait(timeout=60) == 0
    end(process)
    assert count_points(point) == 0
    arm(point, FaultPoint(at=-1))
    process = run(tmp_path)
    assert process.wait(timeout=60) == 0
    end(process)
    assert count_points(point) == 2 * CALLS
    arm(point, FaultPoint(at=-1))
    assert count_points(point) == 0


def test_fault_point_of_worker_kills_child_only(tmp_path: Path) -> None:
    arm(tmp_path / "point.json", FaultPoint(at=3, victim="worker"))
    process = run(tmp_path, "stay")
    while not (tmp_path / "old").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert children_of(process.pid) == []
    assert session_of(process.pid) == [process.pid]
    assert process.poll() is None
    end(process)


def test_process_measurements_return_cpu_time_and_memory() -> None:
    me = [os.getpid()]
    before = cpu_seconds(me)
    sum(range(3_000_000))
    assert cpu_seconds(me) > before
    held = memory(me)
    assert 0 < held.pss <= held.rss <= peak_memory(me)
    # The mapping raises the resident memory by its size, less the pages that the process frees
    # meanwhile.
    with mmap.mmap(-1, 64 << 20) as blob:
        blob.write(b"x" * len(blob))
        assert memory(me).rss - held.rss > len(blob) // 2


def test_cpu_seconds_of_missing_process_raises_file_not_found_error() -> None:
    with pytest.raises(FileNotFoundError):
        cpu_seconds([2**22 + 1])
