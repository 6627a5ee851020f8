"""The trial load: new deployments are first loaded in a separate process.

A model can abort the process that loads it, hang it, or exceed its memory limit. A worker has
requests to answer. Therefore it loads the deployments of a new table only after a trial process has
loaded them. After a restart, workers load the stored table without a trial. The memory that the
trial process needs is measured, and must be available for all workers (see `memory_admission`).
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import InfrastructureError, OnnxOpsError, describe_exit
from onnx_ops.protocol.messages import error_from_bytes, error_to_bytes
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.workers.memory_admission import (
    HOST,
    MemoryMeter,
    MemoryNeed,
    build_excess_error,
    check_memory,
    estimate_restarts,
    measure_memory,
)
from onnx_ops.serving.workers.worker import CONTROL_PACKED_FOLDER, PACKED_FOLDER, load_deployment
from onnx_ops.serving.workers.worker_pool import fork_child, prefer_for_oom_kill, wait_exit

_log = logging.getLogger(__name__)

_LIMITS = (
    (resource.RLIMIT_AS, "VmSize", "address space"),
    (resource.RLIMIT_DATA, "VmData", "data segment"),
)
_MAX_OUTPUT_BYTES = 1 << 16
_SHOWN_LINES = 3
_REPORT = b"report "
"""Prefix of the report that a trial process writes; an error has no prefix."""
_RAISE_LIMIT = (
    "Raise the memory limit of the server, or publish a smaller variant: "
    "see `onnx-ops docs variants`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """Measurements of a process that loaded deployments.

    Attributes:
        seconds: time until the models were verified, loaded and warm.
        private_bytes: private memory at its end (see `measure_memory`).
        resident_bytes: peak of its resident memory, including mapped files.
        deployment_bytes: private memory that each deployment has added, by name.
        has_packed: whether it packed models for the cache. Packing takes memory that the next load
            does not need.
    """

    seconds: float
    private_bytes: int = 0
    resident_bytes: int = 0
    deployment_bytes: Mapping[str, int] = field(default_factory=dict)
    has_packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The processes that will load the deployments.

    Attributes:
        size: number of workers.
        pids: process ids of the current workers.
        shadows: names of deployments for which a shadow process starts too.
        has_control: whether the last deployment is loaded as a control replica.
    """

    size: int
    pids: Collection[int]
    shadows: Collection[str] = ()
    has_control: bool = False


async def measure_cold_start(
    deployments: Sequence[Deployment], folder: Path, options: ServerOptions, *, limit_s: int
) -> float:
    """Return the seconds until deployments are loaded and warm in a separate process.

    The check of the memory is left out, because no worker will load the deployments.

    Raises:
        OnnxOpsError: a deployment cannot be loaded (see `load_model`).
        InfrastructureError: the process crashed or exceeded its time.
    """
    return (await _run_process(deployments, folder, options, None, limit_s=limit_s)).seconds


async def run_trial_load(
    deployments: Sequence[Deployment],
    folder: Path,
    options: ServerOptions,
    plan: LoadPlan,
    *,
    limit_s: int,
) -> None:
    """Load and run deployments in a separate process, as the workers will do.

    The function checks that the memory suffices for all workers. If the available memory cannot be
    read, the process also allocates as much as the other workers will need.

    If the process has packed models for the cache, a second process loads them again and is
    measured.

    Args:
        limit_s: seconds for both processes, after which the running process is killed.

    Raises:
        OnnxOpsError: a deployment cannot be loaded (see `load_model`).
        InfrastructureError: a process crashed or exceeded its time, or the deployments exceed the
            memory.
    """
    started_at = time.monotonic()
    with closing(MemoryMeter.open(deployments)) as meter:
        report = await _run_process(deployments, folder, options, plan, meter, limit_s=limit_s)
        if report.has_packed:
            rest_s = max(1, limit_s - int(time.monotonic() - started_at))
            meter.restart()
            report = await _run_process(deployments, folder, options, plan, meter, limit_s=rest_s)
        peak = meter.compute_peak(report.private_bytes, report.resident_bytes)
        check_memory(
            deployments, _build_needs(peak, report, plan, meter.before_bytes), meter.available_bytes
        )


def _build_needs(
    peak: Mapping[str, int], report: TrialReport, plan: LoadPlan, before_bytes: int
) -> Mapping[str, MemoryNeed]:
    """Return the memory need of all workers and shadow processes, by kind of memory.

    If several deployments were loaded, the GPU memory of each one is unknown. Therefore a shadow
    process is assumed to need the GPU memory of all of them.
    """
    return {
        kind: MemoryNeed(
            workers=plan.size,
            worker_bytes=size,
            shadow_bytes=sum(
                size
                if kind != HOST or len(report.deployment_bytes) == 1
                else report.deployment_bytes.get(name, 0)
                for name in plan.shadows
            ),
            restart_bytes=estimate_restarts(plan.pids, plan.size, before_bytes)
            if kind == HOST
            else 0,
        )
        for kind, size in peak.items()
    }


async def _run_process(
    deployments: Sequence[Deployment],
    folder: Path,
    options: ServerOptions,
    plan: LoadPlan | None,
    meter: MemoryMeter | None = None,
    *,
    limit_s: int,
) -> TrialReport:
    """Run one process that loads deployments; return its report.

    Args:
        plan: the workers beside which the process runs; None without a check of the memory.
        meter: measures the process.

    Raises:
        OnnxOpsError: a deployment cannot be loaded (see `load_model`).
        InfrastructureError: the process crashed, or exceeded its time or the available memory.
    """
    pids = plan.pids if plan is not None else ()
    has_control = plan is not None and plan.has_control
    others = (
        plan.size - 1
        if plan is not None and meter is not None and HOST not in meter.available_bytes
        else 0
    )
    with (
        open(os.memfd_create("report"), "r+b") as report,
        open(os.memfd_create("output"), "r+b") as output,
    ):
        files = report.fileno(), output.fileno()
        pid = fork_child(
            partial(
                _run_trial, deployments, folder, options, has_control, pids, others, *files, limit_s
            ),
            keep=files,
        )
        watching = (
            None if meter is None else asyncio.get_running_loop().create_task(meter.watch(pid))
        )
        try:
            await wait_exit(pid)
        finally:
            if watching is not None:
                watching.cancel()
            # The process has ended, or this task was cancelled. The process is not reaped yet, so
            # its id is valid.
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        message, text = _read_tail(report), _read_tail(output).decode("utf-8", "replace").strip()
    if plan is not None and meter is not None and meter.has_exceeded:
        raise build_excess_error(
            deployments, meter.compute_peak(0, 0)[HOST], meter.available_bytes[HOST]
        )
    if message and not message.startswith(_REPORT):
        raise error_from_bytes(message)
    if status or not message:
        code = os.waitstatus_to_exitcode(status)
        _log.error("a trial load ended with %s; its last output:\n%s", describe_exit(code), text)
        raise _build_crash_error(code, text, deployments, limit_s)
    return codec.loads(message.removeprefix(_REPORT), TrialReport, where="report of a trial load")


def _read_tail(file: BinaryIO) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
    return file.read()


def _run_trial(
    deployments: Sequence[Deployment],
    folder: Path,
    options: ServerOptions,
    has_control: bool,
    workers: Collection[int],
    others: int,
    report: int,
    output: int,
    limit_s: int,
) -> None:
    """Run the trial, and write its report or error into `report`.

    Args:
        has_control: whether the last deployment is loaded as a control replica.
        workers: process ids of the workers whose memory limits are adopted.
        others: number of other processes whose memory is allocated too. All processes share a limit
            that cannot be read.
    """
    # The kernel enforces this limit even if the model hangs or the supervisor has ended.
    signal.alarm(limit_s)
    os.dup2(output, 1)
    os.dup2(output, 2)
    prefer_for_oom_kill()
    limits = _adopt_limits(workers)
    try:
        sizes, packed = [_measure_private_bytes()], _list_packed(folder)
        started_at = time.perf_counter()
        models = []
        for number, deployment in enumerate(deployments, 1):
            control = has_control and number == len(deployments)
            models.append(load_deployment(deployment, folder, options, control=control))
            sizes.append(_measure_private_bytes())
        seconds = time.perf_counter() - started_at
        for model in models:
            model.run_random()
        private = _measure_private_bytes()
        if (size := others * (private - sizes[0])) > 0:
            # The mapping stands for the memory of the other workers. An OSError means that the sum
            # exceeds the limit of a single process. This limit does not apply to the sum, so the
            # error is ignored.
            with suppress(OSError):
                mmap.mmap(
                    -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
                ).close()
        trial_report = TrialReport(
            seconds=seconds,
            private_bytes=private,
            resident_bytes=_read_status_bytes(os.getpid(), "VmHWM"),
            deployment_bytes={
                deployment.name: max(0, after - before)
                for deployment, (before, after) in zip(deployments, pairwise(sizes), strict=True)
            },
            has_packed=bool(_list_packed(folder) - packed),
        )
        os.write(report, _REPORT + codec.dumps(trial_report))
    except MemoryError as error:
        os.write(report, error_to_bytes(_build_limit_error(str(error), limits, deployments)))
    except OnnxOpsError as error:
        reported = (
            _build_limit_error(error.why, limits, deployments) if "alloc" in error.why else error
        )
        os.write(report, error_to_bytes(reported))


def _list_packed(folder: Path) -> frozenset[Path]:
    """Return the folders of the models that are packed in the cache."""
    return frozenset(
        entry
        for name in (PACKED_FOLDER, CONTROL_PACKED_FOLDER)
        for entry in (folder / name).glob("[!.]*/")
    )


def _adopt_limits(workers: Collection[int]) -> str:
    """Let this process allocate only as much memory as the largest worker still can.

    Return the limits of a worker as text.
    """
    limits = []
    for number, size_field, name in _LIMITS:
        soft, hard = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            largest = max((_read_status_bytes(pid, size_field) for pid in workers), default=0)
            used = largest - _read_status_bytes(os.getpid(), size_field)
            resource.setrlimit(number, (max(0, soft - max(0, used)), hard))
            limits.append(f"the {name} of a worker is limited to {soft >> 20} MiB")
    return " and ".join(limits)


def _read_status_bytes(pid: int, field: str) -> int:
    with suppress(OSError):
        for line in (
            Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def _measure_private_bytes() -> int:
    private, _ = measure_memory(os.getpid())
    return private


def _build_crash_error(
    code: int, text: str, deployments: Sequence[Deployment], limit_s: int
) -> InfrastructureError:
    why = f"the trial process that loaded the model ended with {describe_exit(code)}"
    path = Path(deployments[0].location) / MODEL_FILE
    program = f"import onnxruntime; onnxruntime.InferenceSession({str(path)!r})"
    remedy = (
        "Publish a version that loads. To load the model alone, run: "
        f"python -c {shlex.quote(program)}"
    )
    if code == -signal.SIGKILL:
        why += ", which the kernel sends when a memory limit is exceeded"
        remedy = _RAISE_LIMIT
    elif code == -signal.SIGALRM:
        why += f", as it took longer than {limit_s} s"
    if lines := text.splitlines()[-_SHOWN_LINES:]:
        why += f"; its last output: {' | '.join(lines)}"
    return _build_load_error(deployments, why, remedy)


def _build_limit_error(
    text: str, limits: str, deployments: Sequence[Deployment]
) -> InfrastructureError:
    why = (
        f"the load could not allocate memory, and {limits}"
        if limits
        else "the load could not allocate the memory that it needs"
    )
    return _build_load_error(deployments, f"{why}; {text}" if text else why, _RAISE_LIMIT)


def _build_load_error(
    deployments: Sequence[Deployment], why: str, remedy: str
) -> InfrastructureError:
    names = ", ".join(d.name for d in deployments)
    where = deployments[0].location
    return InfrastructureError(
        f"the server could not load {names}", where=where, why=why, remedy=remedy
    )
