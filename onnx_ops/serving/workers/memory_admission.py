"""Admission of new deployments by memory.

Before a worker loads new deployments, the available memory must suffice for them beside the running
ones.

A separate process loads them first, and its memory is measured (see `trial_load`). Without this
check, a deployment that exceeds the memory of the server would end workers that have requests to
answer.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from onnx_ops.domain.endpoint import Deployment, ServerMemory
from onnx_ops.errors import InfrastructureError
from onnx_ops.serving.workers.available_memory import GpuMemory, list_gpus, read_available_bytes

_log = logging.getLogger(__name__)

RESERVE = 8
"""Divisor of the needed memory: an eighth of it is reserved in addition.

Requests need more memory than the trial run of one row.
"""
_SAMPLE_S = 5e-3
"""Seconds between two samples. The kernel can allocate about 50 MB in this time."""
_MIB = 1 << 20
HOST = ""
"""Key of the machine's memory. The keys of GPUs are their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one kind of memory that new deployments need, beside the used memory.

    Attributes:
        workers: number of worker processes, each of which loads all new deployments.
        worker_bytes: peak of the memory in one worker that it shares with no other process.
        shadow_bytes: memory of the shadow processes that will start.
        restart_bytes: memory of workers that have ended, and whose successors have not yet loaded
            the running deployments.
    """

    workers: int
    worker_bytes: int
    shadow_bytes: int = 0
    restart_bytes: int = 0

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are reserved in addition to the measured need."""
        return -(-(self.workers * self.worker_bytes + self.shadow_bytes) // RESERVE)

    @property
    def total_bytes(self) -> int:
        """Total of all parts, including the reserve."""
        return (
            self.workers * self.worker_bytes
            + self.shadow_bytes
            + self.reserve_bytes
            + self.restart_bytes
        )

    def fits(self, available_bytes: int) -> bool:
        """Return whether the available bytes suffice; True if workers need none."""
        return self.worker_bytes <= 0 or self.total_bytes <= available_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class MemoryMeter:
    """Meter of the memory of a process that loads new deployments.

    It kills the process before the process exhausts the memory.

    Attributes:
        before_bytes: private memory of the process at its start.
        available_bytes: memory that was available before its start, by kind. A kind that cannot be
            read is missing.
        has_exceeded: whether the last sample exceeds the available memory. `watch` then kills the
            process.
    """

    gpu_memory: GpuMemory
    before_bytes: int
    available_bytes: Mapping[str, int]
    has_exceeded: bool = False
    _private: int = 0
    _shared: int = 0
    _free: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, deployments: Sequence[Deployment]) -> MemoryMeter:
        """Read the available memory, before the caller forks the process to measure."""
        gpu_memory = GpuMemory(list_gpus(deployments))
        available = gpu_memory.read_free_bytes()
        if (host := read_available_bytes()) is not None:
            available[HOST] = host
        before, _ = measure_memory(os.getpid())
        return cls(gpu_memory=gpu_memory, before_bytes=before, available_bytes=available)

    def restart(self) -> None:
        """Reset the measurements before another process loads the deployments again."""
        self._private = self._shared = 0
        self._free.clear()

    async def watch(self, pid: int) -> None:
        """Sample the memory of the process until this task is cancelled.

        If the process exceeds the available memory, kill it and return.
        """
        while True:
            with suppress(OSError):
                self.sample(pid)
            if self.has_exceeded:
                # The process id is valid, because the process is reaped only after this task.
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(_SAMPLE_S)

    def sample(self, pid: int) -> None:
        """Measure the memory of the process once."""
        private, shared = measure_memory(pid)
        self._private, self._shared = max(self._private, private), max(self._shared, shared)
        for gpu, free in self.gpu_memory.read_free_bytes().items():
            self._free[gpu] = min(free, self._free.get(gpu, free))
        need = MemoryNeed(workers=1, worker_bytes=private - self.before_bytes)
        self.has_exceeded = HOST in self.available_bytes and not need.fits(
            self.available_bytes[HOST]
        )

    def compute_peak(self, private_bytes: int, resident_bytes: int) -> Mapping[str, int]:
        """Return the bytes that the process needed at its peak, by the kind of memory.

        The kernel records the peak of resident memory, which includes mapped files. The largest
        sample of mapped files is subtracted from this peak. So a peak of private memory between two
        samples is included.

        Args:
            private_bytes: private memory at the end of the process.
            resident_bytes: the peak that the kernel has recorded.
        """
        private = max(self._private, private_bytes, resident_bytes - self._shared)
        peak = {HOST: max(0, private - self.before_bytes)} if HOST in self.available_bytes else {}
        return peak | {
            gpu: max(0, self.available_bytes[gpu] - free) for gpu, free in self._free.items()
        }

    def close(self) -> None:
        """Close the reader of the memory of GPUs."""
        self.gpu_memory.close()


def measure_memory(pid: int) -> tuple[int, int]:
    """Return the private resident bytes of a process, and its resident file bytes.

    Private bytes are those of anonymous memory. They include pages that a fork still shares with
    its parent. File bytes include shared memory. Both numbers are 0 for a process that has ended
    and whose exit code was not read yet.

    Raises:
        OSError: there is no such process.
    """
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE, int(shared) * mmap.PAGESIZE


def estimate_restarts(pids: Collection[int], size: int, before_bytes: int) -> int:
    """Return the bytes that missing workers of a pool of this size will need.

    The estimate for each missing worker is the median memory of the running workers. The result is
    0 if no worker is running. `before_bytes` is the private memory of a worker at its start.
    """
    used = _measure_workers(pids, before_bytes)
    return (size - len(used)) * statistics.median_low(used) if used else 0


def measure_server_memory(pids: Collection[int]) -> ServerMemory | None:
    """Return the memory that running workers use, and the memory that is available.

    The result is None if reading the memory fails, or if no worker runs. Call the function in the
    process that has forked the workers, because workers start with the private memory of that
    process.
    """
    available_bytes = read_available_bytes()
    used = _measure_workers(pids, measure_memory(os.getpid())[0])
    if available_bytes is None or not used:
        return None
    return ServerMemory(
        workers=len(used), worker_bytes=statistics.median_low(used), available_bytes=available_bytes
    )


def _measure_workers(pids: Collection[int], before_bytes: int) -> list[int]:
    """Return the private bytes of running workers beyond those at their start."""
    used = []
    for pid in pids:
        with suppress(OSError):
            # A worker can end before it is measured.
            used.append(max(0, measure_memory(pid)[0] - before_bytes))
    return used


def find_shortage(memory: ServerMemory, peak_bytes: int) -> str:
    """Return why one more deployment does not fit beside the running deployments.

    The result is empty if the deployment fits.

    Args:
        peak_bytes: peak of the deployment's memory in one worker.
    """
    need = MemoryNeed(workers=memory.workers, worker_bytes=peak_bytes)
    if need.fits(memory.available_bytes):
        return ""
    needed, available = _format_up(need.total_bytes), f"{memory.available_bytes // _MIB:,} MiB"
    return f"it needs {needed} ({_describe_need(need)}), and {available} are available"


def check_memory(
    deployments: Sequence[Deployment], needs: Mapping[str, MemoryNeed], available: Mapping[str, int]
) -> None:
    """Check the memory of deployments against the available memory, by kind.

    Raises:
        InfrastructureError: the deployments exceed the available memory of a kind.
    """
    names = ", ".join(deployment.name for deployment in deployments)
    for kind, need in needs.items():
        memory = f"memory of GPU {kind}" if kind else "memory"
        text = f"{_format_up(need.total_bytes)} of {memory} ({_describe_need(need)})"
        text += (
            f", and {available[kind] // _MIB:,} MiB are available beside the running deployments"
        )
        if not need.fits(available[kind]):
            raise _build_memory_error(deployments, memory, f"the load needs {text}")
        _log.info("deployment %s needs %s", names, text)


def build_excess_error(
    deployments: Sequence[Deployment], peak_bytes: int, available_bytes: int
) -> InfrastructureError:
    """Return the error for deployments that exceeded the memory in the trial load."""
    need = MemoryNeed(workers=1, worker_bytes=peak_bytes)
    why = (
        f"the trial load needs more than {_format_up(need.total_bytes)}, "
        f"including a reserve of {_format_up(need.reserve_bytes)}, "
        f"and {available_bytes // _MIB:,} MiB are available beside the running deployments"
    )
    packing = (
        " If the model is packed for the cache, which takes several times its size, `prepack: "
        "0 B` avoids that."
    )
    return _build_memory_error(deployments, "memory", why, packing)


def _build_memory_error(
    deployments: Sequence[Deployment], memory: str, why: str, advice: str = ""
) -> InfrastructureError:
    names = ", ".join(deployment.name for deployment in deployments)
    return InfrastructureError(
        f"the {memory} of the server is too small to load {names}",
        where=deployments[0].location,
        why=why,
        remedy="Serve with fewer workers, give the server more memory, "
        f"or publish a smaller variant: see `onnx-ops docs variants`.{advice}",
    )


def _describe_need(need: MemoryNeed) -> str:
    parts = [f"{need.workers} workers × {_format_up(need.worker_bytes)} at the peak"]
    if need.shadow_bytes:
        parts.append(f"{_format_up(need.shadow_bytes)} in shadow processes")
    parts.append(f"a reserve of {_format_up(need.reserve_bytes)}")
    if need.restart_bytes:
        parts.append(f"{_format_up(need.restart_bytes)} in workers that start again")
    return ", ".join(parts)


def _format_up(size: int) -> str:
    return f"{-(-size // _MIB):,} MiB"
