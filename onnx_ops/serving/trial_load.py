"""The trial load: what is new to the workers is first loaded and run in a process that ends right after.

A model can abort the process that loads it, hang it, or exceed its memory limit. A worker has requests to answer, so it
loads only what such a process has loaded before.
"""

from __future__ import annotations

import asyncio
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
from onnx_ops.errors import InfrastructureError, OnnxOpsError
from onnx_ops.protocol.messages import error_from_bytes, error_to_bytes
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.crew import fork, how_it_ended
from onnx_ops.serving.models import run_on_random
from onnx_ops.serving.worker import load

_log = logging.getLogger(__name__)

_FIRST_VICTIM = "1000"
"""The highest `oom_score_adj` (proc_pid_oom_score_adj(5)): out of memory, the kernel kills the trial, not a worker."""
_LIMITS = ((resource.RLIMIT_AS, "VmSize", "address space"), (resource.RLIMIT_DATA, "VmData", "data segment"))
_MOST_OUTPUT_BYTES = 1 << 16
_SHOWN_LINES = 3
_LARGER = "Raise the memory limit of the server, or publish a smaller variant of the model: see docs/variants.md."


async def try_load(
    deployments: Sequence[Deployment], folder: Path, options: ServerOptions, workers: Collection[int], *, limit_s: int
) -> float:
    """Load deployments as a worker does, run each on generated inputs, and unload them, in a process of its own.

    Args:
        deployments: what no worker has loaded yet.
        folder: that of the server.
        workers: process ids of those that are to load the deployments next.
        limit_s: after so many seconds the process is ended.

    Returns:
        Seconds until they could answer: files verified, sessions made, and warm.

    Raises:
        OnnxOpsError: what `load_model` raises.
        InfrastructureError: the process crashed, or ran out of memory or time.
    """
    with open(os.memfd_create("report"), "r+b") as report, open(os.memfd_create("output"), "r+b") as output:
        trial = partial(_load, deployments, folder, options, workers, report.fileno(), output.fileno(), limit_s)
        status = await _end_of(fork(trial, keep=(report.fileno(), output.fileno())))
        message, text = _tail_of(report), _tail_of(output).decode("utf-8", "replace").strip()
    if message.startswith(b"{"):
        raise error_from_bytes(message)
    if status:
        _log.error("a trial load ended with %s; its last output:\n%s", how_it_ended(status), text)
        raise _crash(status, text, deployments, limit_s)
    return float(message)


def _tail_of(file: BinaryIO) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_OUTPUT_BYTES))
    return file.read()


async def _end_of(pid: int) -> int:
    """Wait for the end of a child, and return its wait status. If this is cancelled, the child is killed."""
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
        os.kill(pid, signal.SIGKILL)  # it has ended unless this was cancelled, and is not reaped yet
        _, status = os.waitpid(pid, 0)
    return status


def _load(
    deployments: Sequence[Deployment],
    folder: Path,
    options: ServerOptions,
    workers: Collection[int],
    report: int,
    output: int,
    limit_s: int,
) -> None:
    """The trial process: it writes how long it took, or an error that it can name, into `report`, and all output into
    `output`."""
    signal.alarm(limit_s)  # the kernel keeps this limit, even if the model hangs or the supervisor is gone
    os.dup2(output, 1)
    os.dup2(output, 2)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM, encoding="ascii")
    limits = _take_limits_of(workers)
    try:
        before = _private_bytes()
        began = time.perf_counter()
        models = [load(deployment, folder, options) for deployment in deployments]
        seconds = time.perf_counter() - began
        for model in models:
            run_on_random(model)
        _hold((len(workers) - 1) * (_private_bytes() - before))
        os.write(report, f"{seconds:.6f}".encode())
    except MemoryError as error:
        os.write(report, error_to_bytes(_out_of_memory(str(error), limits, deployments)))
    except OnnxOpsError as error:
        named = _out_of_memory(error.why, limits, deployments) if "alloc" in error.why else error
        os.write(report, error_to_bytes(named))


def _take_limits_of(workers: Collection[int]) -> str:
    """Leave this process as much memory below its limits as the largest worker has left; return the limits."""
    found = []
    for number, field, name in _LIMITS:
        soft, hard = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            used = max((_status_bytes(pid, field) for pid in workers), default=0) - _status_bytes(os.getpid(), field)
            resource.setrlimit(number, (max(0, soft - max(0, used)), hard))
            found.append(f"the {name} of a worker is limited to {soft >> 20} MiB")
    return " and ".join(found)


def _status_bytes(pid: int, field: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def _private_bytes() -> int:
    """Memory that no other process shares with this one."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _hold(size: int) -> None:
    """Take memory for the other workers too: the limit of a control group or machine is one for all of them."""
    if size > 0:
        with suppress(OSError):  # beyond the limit of one process, which says nothing of several
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def _crash(status: int, text: str, deployments: Sequence[Deployment], limit_s: int) -> InfrastructureError:
    why = f"the process that loaded it before the workers ended with {how_it_ended(status)}"
    path = Path(deployments[0].location) / MODEL_FILE
    program = f"import onnxruntime; onnxruntime.InferenceSession({str(path)!r})"
    remedy = f"Reproduce it, and publish a version that loads: python -c {shlex.quote(program)}"
    if status == signal.SIGKILL:
        why += ", which the kernel sends when a memory limit is exceeded"
        remedy = _LARGER
    elif status == signal.SIGALRM:
        why += f", as it took longer than {limit_s} s"
    if lines := text.splitlines()[-_SHOWN_LINES:]:
        why += f"; its last output: {' | '.join(lines)}"
    return InfrastructureError(_failed(deployments), where=deployments[0].location, why=why, remedy=remedy)


def _out_of_memory(text: str, limits: str, deployments: Sequence[Deployment]) -> InfrastructureError:
    why = f"it exceeds the memory limit: {limits}" if limits else "the system has no memory for it"
    why = f"{why}; {text}" if text else why
    return InfrastructureError(_failed(deployments), where=deployments[0].location, why=why, remedy=_LARGER)


def _failed(deployments: Sequence[Deployment]) -> str:
    return f"deployment {', '.join(d.name for d in deployments)} could not be loaded"
