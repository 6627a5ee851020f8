"""Options of servers, what they can serve, and their worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.local import LocalEndpoints
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.execution import CPU, Environment, Provider, SessionSettings
from onnx_ops.domain.target import OrtFormat, Target
from onnx_ops.protocol.server_process import (
    WORKERS_FOLDER,
    explain_unservable,
    list_workers,
    read_start_time,
    register_worker,
    signal_worker,
)

CUDA = Provider(name="CUDAExecutionProvider")
ON_CUDA = Target(name="cuda", providers=(CUDA, Provider(name=CPU)))
PROVIDERS = (LocalEndpoints, SageMakerEndpoints, AzureEndpoints)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target(name="node", runtime="javascript"), "the server runs 'onnxruntime'"),
        (
            Target(name="own", env=Environment(requirements=("onnxruntime==1.20",))),
            "an isolated environment",
        ),
        (Target(name="phone", ort_format=OrtFormat()), ".ort files"),
        (
            Target(
                name="npu",
                providers=(Provider(name="QNNExecutionProvider", package="onnxruntime_qnn"),),
            ),
            "plug-in",
        ),
        (ON_CUDA, "has no CUDAExecutionProvider; it has CPUExecutionProvider"),
    ],
    ids=lambda value: value.name if isinstance(value, Target) else "",
)
def test_explain_unservable_of_unsupported_target_names_reason(target: Target, why: str) -> None:
    assert why in explain_unservable(target, [CPU])


def test_explain_unservable_of_supported_target_returns_empty_text() -> None:
    threads = Target(name="cpu-all", session=SessionSettings(intra_op_threads=0, spinning=True))
    assert explain_unservable(threads, [CPU]) == ""
    assert explain_unservable(ON_CUDA, [CUDA.name, CPU]) == ""


@pytest.mark.parametrize("kind", PROVIDERS)
def test_explain_unservable_of_endpoint_provider_names_missing_execution_provider(
    kind: type, tmp_path: object
) -> None:
    provider = kind(tmp_path)
    assert provider.explain_unservable(Target(name="cpu-1t")) == ""
    assert CUDA.name in provider.explain_unservable(ON_CUDA)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_read_start_time_identifies_live_process_and_is_none_after_its_end() -> None:
    assert read_start_time(os.getpid()) == read_start_time(os.getpid())
    with sleeper() as other:
        assert read_start_time(other.pid) not in (None, read_start_time(os.getpid()))
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        # A zombie counts as ended.
        assert read_start_time(other.pid) is None
    assert read_start_time(other.pid) is None


FIRST_THREAD_ENDS = """
import ctypes, os, platform, threading
threading.Thread(target=lambda: os._exit(len(os.read(0, 1)))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2), of this thread alone
"""  # noqa: E501


def test_read_start_time_without_first_thread_is_unchanged_until_last_ends() -> None:
    """The first thread has ended while another one still runs.

    This state lasts a moment after a SIGKILL, when the threads end one by one. The port is in use
    until the last one ends.
    """
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS], stdin=subprocess.PIPE
    ) as process:
        started = read_start_time(process.pid)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert process.poll() is None
        assert read_start_time(process.pid) == started is not None
        process.communicate()
    assert read_start_time(process.pid) is None


def test_list_workers_removes_files_of_ended_workers(tmp_path: Path) -> None:
    assert list_workers(tmp_path) == ()
    mine = register_worker(tmp_path)
    reused = tmp_path / WORKERS_FOLDER / str(os.getppid())
    # Another process now has this id.
    reused.write_text("17")
    assert list_workers(tmp_path) == (os.getpid(),)
    assert mine.exists()
    assert not reused.exists()


def test_signal_worker_signals_registered_worker_and_not_process_with_reused_id(
    tmp_path: Path,
) -> None:
    with sleeper() as worker, sleeper() as stranger:
        (tmp_path / WORKERS_FOLDER).mkdir()
        (tmp_path / WORKERS_FOLDER / str(worker.pid)).write_text(read_start_time(worker.pid) or "")
        (tmp_path / WORKERS_FOLDER / str(stranger.pid)).write_text("17")
        signal_worker(stranger.pid, tmp_path, signal.SIGKILL)
        signal_worker(worker.pid, tmp_path, signal.SIGKILL)
        assert worker.wait(timeout=30) == -signal.SIGKILL
        assert stranger.poll() is None
        stranger.kill()
    signal_worker(worker.pid, tmp_path, signal.SIGKILL)
