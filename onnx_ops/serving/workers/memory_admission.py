"""Admission of new deployments by memory.

New deployments must fit beside the running ones, before any worker loads them.

A separate process loads them first and is measured (see `trial_load`). A deployment that exceeds
the memory of the server would otherwise end workers that have requests to answer.
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
"""An eighth of the need is kept free: requests need more memory than the trial run of one row."""
_SAMPLE_S = 5e-3
"""Seconds between two samples; the kernel fills about 50 MB in this time."""
_MIB = 1 << 20
HOST = ""
"""Key of the machine's memory, beside the numbers of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one kind of memory that new deployments need, beside what is in use.

    Attributes:
        workers: worker processes, each of which loads all of them.
        worker_bytes: peak of one worker, of memory that it shares with no other process.
        shadow_bytes: of the shadow processes that start.
        restart_bytes: of workers that have ended and have not loaded the running deployments again.
    """

    workers: int
    worker_bytes: int
    shadow_bytes: int = 0
    restart_bytes: int = 0

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are kept free in addition."""
        return -(-(self.workers * self.worker_bytes + self.shadow_bytes) // RESERVE)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts, with the reserve."""
        return (
            self.workers * self.worker_bytes
            + self.shadow_bytes
            + self.reserve_bytes
            + self.restart_bytes
        )

    def fits(self, available_bytes: int) -> bool:
        """Return whether so much memory suffices. A need of 0 bytes always fits."""
        return self.worker_bytes <= 0 or self.total_bytes <= available_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class MemoryMeter:
    """Measures the memory of a process that loads new deployments.

    It ends the process before the process exhausts the memory.

    Attributes:
        before_bytes: private memory of the process at its start.
        available_bytes: what was available before its start, by the kind of memory; without what
            cannot be read.
        has_exceeded: it needed more than is available, and was killed.
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
        """Read what is available now. The process is forked from this one next."""
        gpu_memory = GpuMemory(list_gpus(deployments))
        available = gpu_memory.read_free_bytes()
        if (host := read_available_bytes()) is not None:
            available[HOST] = host
        before, _ = measure_memory(os.getpid())
        return cls(gpu_memory=gpu_memory, before_bytes=before, available_bytes=available)

    def restart(self) -> None:
        """Forget what was measured: another process loads the deployments again."""
        self._private = self._shared = 0
        self._free.clear()

    async def watch(self, pid: int) -> None:
        """Sample the memory of the process until it has ended, or this is cancelled."""
        while True:
            with suppress(OSError):
                self.sample(pid)
            if self.has_exceeded:
                os.kill(pid, signal.SIGKILL)  # it is not reaped before this has ended
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

        The kernel records the peak of resident memory, which contains mapped files. The largest
        sample of mapped files is subtracted. So a peak of private memory between two samples
        counts, too.

        Args:
            private_bytes: at the end of the process.
            resident_bytes: the peak that the kernel has recorded.
        """
        private = max(self._private, private_bytes, resident_bytes - self._shared)
        peak = {HOST: max(0, private - self.before_bytes)} if HOST in self.available_bytes else {}
        return peak | {
            gpu: max(0, self.available_bytes[gpu] - free) for gpu, free in self._free.items()
        }

    def close(self) -> None:
        """Release what reads the memory of GPUs."""
        self.gpu_memory.close()


def measure_memory(pid: int) -> tuple[int, int]:
    """Return the private resident bytes of a process, and its resident bytes of files.

    It shares the private bytes with no other process. Raises OSError.
    """
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE, int(shared) * mmap.PAGESIZE


def estimate_restarts(pids: Collection[int], size: int, before_bytes: int) -> int:
    """Return the bytes that missing workers of a pool of this size will use.

    The estimate is the median of the other workers. `before_bytes` is the private memory of a
    worker at its start.
    """
    used = _measure_workers(pids, before_bytes)
    return (size - len(used)) * statistics.median_low(used) if used else 0


def measure_server_memory(pids: Collection[int]) -> ServerMemory | None:
    """Return the memory that running workers use, and what is available beside it.

    The result is None if that cannot be read. This must run in the process that has forked the
    workers: its private memory is what they started with.
    """
    available_bytes = read_available_bytes()
    used = _measure_workers(pids, measure_memory(os.getpid())[0])
    if available_bytes is None or not used:
        return None
    return ServerMemory(
        workers=len(used), worker_bytes=statistics.median_low(used), available_bytes=available_bytes
    )


def _measure_workers(pids: Collection[int], before_bytes: int) -> list[int]:
    """Return the private bytes of running workers beyond what they started with."""
    used = []
    for pid in pids:
        with suppress(OSError):  # it has ended
            used.append(max(0, measure_memory(pid)[0] - before_bytes))
    return used


def find_shortage(memory: ServerMemory, peak_bytes: int) -> str:
    """Return why one more deployment does not fit beside the running ones.

    The text is empty if the deployment fits.

    Args:
        peak_bytes: of the deployment in one worker.
    """
    need = MemoryNeed(workers=memory.workers, worker_bytes=peak_bytes)
    if need.fits(memory.available_bytes):
        return ""
    needed, available = _format_up(need.total_bytes), f"{memory.available_bytes // _MIB:,} MiB"
    return f"it needs {needed} ({_describe_need(need)}), and {available} are available"


def check_memory(
    deployments: Sequence[Deployment], needs: Mapping[str, MemoryNeed], available: Mapping[str, int]
) -> None:
    """Raise InfrastructureError if deployments do not fit into a kind of memory."""
    names = ", ".join(deployment.name for deployment in deployments)
    for kind, need in needs.items():
        memory = f"memory of GPU {kind}" if kind else "memory"
        text = f"{_format_up(need.total_bytes)} of {memory} ({_describe_need(need)})"
        text += (
            f", and {available[kind] // _MIB:,} MiB are available beside the running deployments"
        )
        if not need.fits(available[kind]):
            raise _build_memory_error(deployments, memory, f"it needs {text}")
        _log.info("deployment %s needs %s", names, text)


def build_excess_error(
    deployments: Sequence[Deployment], workers: int, peak_bytes: int, available_bytes: int
) -> InfrastructureError:
    """Return the error of deployments that exceed the memory in the trial load."""
    need = MemoryNeed(workers=1, worker_bytes=peak_bytes)
    why = (
        f"the process that loads it before the {workers} workers needs more than "
        f"{_format_up(need.total_bytes)}, with a reserve of {_format_up(need.reserve_bytes)}, "
        f"and {available_bytes // _MIB:,} MiB are available beside the running deployments"
    )
    packing = (
        " If it is packed for the cache, which takes several times its size, `prepack: "
        "0 B` avoids that."
    )
    return _build_memory_error(deployments, "memory", why, packing)


def _build_memory_error(
    deployments: Sequence[Deployment], memory: str, why: str, advice: str = ""
) -> InfrastructureError:
    names = ", ".join(deployment.name for deployment in deployments)
    return InfrastructureError(
        f"deployment {names} does not fit into the {memory} of the server",
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
