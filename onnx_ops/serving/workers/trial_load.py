"""The trial load: new deployments are first loaded in a separate process.

A model can abort the process that loads it, hang it, or exceed its memory limit. Because a worker has requests to
answer, it loads only models that such a process has loaded before.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import shlex
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from onnx_ops.domain.artifact import MODEL_FILE
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import InfrastructureError, OnnxOpsError, describe_exit
from onnx_ops.protocol.messages import error_from_bytes, error_to_bytes
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.workers.worker import load_deployment
from onnx_ops.serving.workers.worker_pool import fork_child, prefer_for_oom_kill, wait_exit

_log = logging.getLogger(__name__)

_LIMITS = ((resource.RLIMIT_AS, "VmSize", "address space"), (resource.RLIMIT_DATA, "VmData", "data segment"))
_MAX_OUTPUT_BYTES = 1 << 16
_SHOWN_LINES = 3
_RAISE_LIMIT = "Raise the memory limit of the server, or publish a smaller variant: see `onnx-ops docs variants`."


async def run_trial_load(
    deployments: Sequence[Deployment], folder: Path, options: ServerOptions, workers: Collection[int], *, limit_s: int
) -> float:
    """Load and run deployments in a separate process, as a worker does.

    Returns the seconds until the models were verified, loaded and warm. Raises as `load_model`, and InfrastructureError
    if the process crashed, or ran out of memory or time.

    Args:
        workers: process ids of the workers that will load the deployments next.
        limit_s: seconds after which the process is killed.
    """
    with open(os.memfd_create("report"), "r+b") as report, open(os.memfd_create("output"), "r+b") as output:
        trial = partial(_run_trial, deployments, folder, options, workers, report.fileno(), output.fileno(), limit_s)
        pid = fork_child(trial, keep=(report.fileno(), output.fileno()))
        try:
            await wait_exit(pid)
        finally:
            os.kill(pid, signal.SIGKILL)  # it has ended unless this was cancelled, and is not reaped yet
            _, status = os.waitpid(pid, 0)
        message, text = _read_tail(report), _read_tail(output).decode("utf-8", "replace").strip()
    if message.startswith(b"{"):
        raise error_from_bytes(message)
    if status:
        code = os.waitstatus_to_exitcode(status)
        _log.error("a trial load ended with %s; its last output:\n%s", describe_exit(code), text)
        raise _build_crash_error(code, text, deployments, limit_s)
    return float(message)


def _read_tail(file: BinaryIO) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
    return file.read()


def _run_trial(
    deployments: Sequence[Deployment],
    folder: Path,
    options: ServerOptions,
    workers: Collection[int],
    report: int,
    output: int,
    limit_s: int,
) -> None:
    """Run the trial, and write its duration or error into `report`."""
    signal.alarm(limit_s)  # the kernel enforces this limit even if the model hangs or the supervisor is gone
    os.dup2(output, 1)
    os.dup2(output, 2)
    prefer_for_oom_kill()
    limits = _adopt_limits(workers)
    try:
        before = _measure_private_bytes()
        started_at = time.perf_counter()
        models = [load_deployment(deployment, folder, options) for deployment in deployments]
        seconds = time.perf_counter() - started_at
        for model in models:
            model.run_random()
        others = (len(workers) - 1) * (_measure_private_bytes() - before)
        if others > 0:  # they share a limit of the system
            with suppress(OSError):  # beyond the limit of one process, which is not a limit for several
                mmap.mmap(-1, others, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
        os.write(report, f"{seconds:.6f}".encode())
    except MemoryError as error:
        os.write(report, error_to_bytes(_build_memory_error(str(error), limits, deployments)))
    except OnnxOpsError as error:
        reported = _build_memory_error(error.why, limits, deployments) if "alloc" in error.why else error
        os.write(report, error_to_bytes(reported))


def _adopt_limits(workers: Collection[int]) -> str:
    """Leave this process as much memory as the largest worker; return the limits."""
    limits = []
    for number, field, name in _LIMITS:
        soft, hard = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            largest = max((_read_status_bytes(pid, field) for pid in workers), default=0)
            used = largest - _read_status_bytes(os.getpid(), field)
            resource.setrlimit(number, (max(0, soft - max(0, used)), hard))
            limits.append(f"the {name} of a worker is limited to {soft >> 20} MiB")
    return " and ".join(limits)


def _read_status_bytes(pid: int, field: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def _measure_private_bytes() -> int:
    """Return the bytes of memory that no other process shares."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _build_crash_error(code: int, text: str, deployments: Sequence[Deployment], limit_s: int) -> InfrastructureError:
    why = f"the process that loaded it before the workers ended with {describe_exit(code)}"
    path = Path(deployments[0].location) / MODEL_FILE
    program = f"import onnxruntime; onnxruntime.InferenceSession({str(path)!r})"
    remedy = f"Reproduce it, and publish a version that loads: python -c {shlex.quote(program)}"
    if code == -signal.SIGKILL:
        why += ", which the kernel sends when a memory limit is exceeded"
        remedy = _RAISE_LIMIT
    elif code == -signal.SIGALRM:
        why += f", as it took longer than {limit_s} s"
    if lines := text.splitlines()[-_SHOWN_LINES:]:
        why += f"; its last output: {' | '.join(lines)}"
    return _build_load_error(deployments, why, remedy)


def _build_memory_error(text: str, limits: str, deployments: Sequence[Deployment]) -> InfrastructureError:
    why = f"it exceeds the memory limit: {limits}" if limits else "the system has not enough memory for it"
    return _build_load_error(deployments, f"{why}; {text}" if text else why, _RAISE_LIMIT)


def _build_load_error(deployments: Sequence[Deployment], why: str, remedy: str) -> InfrastructureError:
    names = ", ".join(d.name for d in deployments)
    where = deployments[0].location
    return InfrastructureError(f"deployment {names} could not be loaded", where=where, why=why, remedy=remedy)
