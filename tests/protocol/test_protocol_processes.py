from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from onnx_ops.protocol import processes
from onnx_ops.protocol.admin import WORKERS_FOLDER


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_process_is_known_by_when_it_started() -> None:
    assert processes.start_of(os.getpid()) == processes.start_of(os.getpid())
    with sleeper() as other:
        assert processes.start_of(other.pid) not in (None, processes.start_of(os.getpid()))
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert processes.start_of(other.pid) is None  # a zombie does not live
    assert processes.start_of(other.pid) is None


FIRST_THREAD_ENDS = """
import ctypes, os, platform, threading
threading.Thread(target=lambda: os._exit(len(os.read(0, 1)))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2), of this thread alone
"""


def test_one_whose_first_thread_has_ended_lives_until_the_last_has() -> None:
    """As for a moment after a SIGKILL, when its threads end one by one; its port is taken until then."""
    with subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE) as process:
        started = processes.start_of(process.pid)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert process.poll() is None
        assert processes.start_of(process.pid) == started is not None
        process.communicate()
    assert processes.start_of(process.pid) is None


def test_only_live_workers_are_listed_and_files_of_others_are_removed(tmp_path: Path) -> None:
    assert processes.workers(tmp_path) == ()
    mine = processes.enlist(tmp_path)
    reused = tmp_path / WORKERS_FOLDER / str(os.getppid())
    reused.write_text("17")  # the number belongs to somebody else by now
    assert processes.workers(tmp_path) == (os.getpid(),)
    assert mine.exists()
    assert not reused.exists()


def test_a_signal_reaches_a_worker_and_never_a_stranger(tmp_path: Path) -> None:
    with sleeper() as worker, sleeper() as stranger:
        (tmp_path / WORKERS_FOLDER).mkdir()
        (tmp_path / WORKERS_FOLDER / str(worker.pid)).write_text(processes.start_of(worker.pid) or "")
        (tmp_path / WORKERS_FOLDER / str(stranger.pid)).write_text("17")
        processes.end(stranger.pid, tmp_path, signal.SIGKILL)
        processes.end(worker.pid, tmp_path, signal.SIGKILL)
        assert worker.wait(timeout=30) == -signal.SIGKILL
        assert stranger.poll() is None
        stranger.kill()
    processes.end(worker.pid, tmp_path, signal.SIGKILL)
