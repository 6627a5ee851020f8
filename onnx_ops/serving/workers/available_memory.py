"""The memory that is available to the server.

The values come from the control groups of the server, the machine, and GPUs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.domain.endpoint import Deployment

ROOT = Path("/")
"""Folder below which /proc and /sys are read."""
_UNLIMITED_BYTES = 1 << 60
_CUDA_PROVIDERS = frozenset(
    {"CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider"}
)
_NVML = "libnvidia-ml.so.1"
"""NVIDIA's management library, which is part of the driver."""


def read_available_bytes(root: Path | None = None) -> int | None:
    """Return the bytes that processes of this server can still allocate.

    The result is None if the files cannot be read. It is the smallest of the available memory of
    the machine and the remaining memory of each control group (version 1 or 2). The page cache
    is regarded as available, because the kernel frees it before it kills a process. Swap is not
    counted.

    Args:
        root: folder below which /proc and /sys are read.
    """
    root = root or ROOT
    sizes = [
        size for group in _list_groups(root) if (size := group.read_available_bytes()) is not None
    ]
    if (machine := _read_numbers(root / "proc/meminfo").get("MemAvailable:")) is not None:
        sizes.append(machine << 10)
    return max(0, min(sizes)) if sizes else None


def read_limit_bytes(root: Path | None = None) -> int | None:
    """Return the smallest limit of this process's control groups; None without one.

    Args:
        root: folder below which /proc and /sys are read.
    """
    limits = [
        limit for group in _list_groups(root or ROOT) if (limit := group.read_limit()) is not None
    ]
    return min(limits, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryGroup:
    """A memory control group: its folder and its files in this cgroup version."""

    folder: Path
    limit_file: str
    usage_file: str
    prefix: str

    def read_limit(self) -> int | None:
        """Return the group's limit in bytes; None if it has no limit."""
        limit = _read_text(self.folder / self.limit_file).strip()
        # Without a limit, version 2 of control groups writes `max`. Version 1 writes the largest
        # multiple of the page size below 2**63.
        return int(limit) if limit.isdecimal() and int(limit) < _UNLIMITED_BYTES else None

    def read_available_bytes(self) -> int | None:
        """Return the limit minus the memory that cannot be freed.

        Return None if there is no limit, or if the usage is unreadable.
        """
        limit, usage = self.read_limit(), _read_text(self.folder / self.usage_file).strip()
        if limit is None or not usage.isdecimal():
            return None
        stat = _read_numbers(self.folder / "memory.stat")
        cache = sum(
            stat.get(f"{self.prefix}{name}", 0) for name in ("inactive_file", "active_file")
        )
        return limit - max(0, int(usage) - cache - stat.get("slab_reclaimable", 0))


def _list_groups(root: Path) -> Iterator[_MemoryGroup]:
    """Yield each memory group of this process: its own group and all groups above it."""
    base = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            mount, files = base, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mount, files = (
                base / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
            )
        else:
            continue
        for folder in _list_folders(mount, name):
            limit_file, usage_file, prefix = files
            yield _MemoryGroup(
                folder=folder, limit_file=limit_file, usage_file=usage_file, prefix=prefix
            )


def _list_folders(mount: Path, name: str) -> list[Path]:
    """Return the folders of a group and of the groups above it.

    In a container without a namespace for groups, the group is mounted as the root. In /proc, its
    name is then the name outside of the container.
    """
    parts = Path(name.lstrip("/")).parts
    folder = mount.joinpath(*parts)
    if ".." in parts or not folder.is_dir():
        return [mount]
    return [folder, *folder.parents[: len(parts)]]


def _read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""


def _read_numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the word before the number."""
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def list_gpus(deployments: Iterable[Deployment]) -> frozenset[str]:
    """Return the GPUs that the execution providers of deployments name.

    A GPU is an index into the visible GPUs.
    """
    providers = (
        provider for deployment in deployments for provider in deployment.execution.providers
    )
    return frozenset(
        p.options.get("device_id", "0") for p in providers if p.name in _CUDA_PROVIDERS
    )


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class GpuMemory:
    """Reader of the free memory of GPUs through NVML.

    A number is returned only if the library is available, and NVML can identify the GPU.
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        self._devices: dict[str, ctypes.c_void_p] = {}
        self._library: ctypes.CDLL | None = None
        if wanted := frozenset(gpus):
            with suppress(OSError, AttributeError):
                self._open(ctypes.CDLL(_NVML), wanted)

    def _open(self, library: ctypes.CDLL, gpus: Iterable[str]) -> None:
        if library.nvmlInit_v2():
            return
        self._library = library
        # A GPU is identified by its position in CUDA_VISIBLE_DEVICES, whose entries are UUIDs or
        # CUDA's numbers. CUDA numbers GPUs by speed, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. NVML
        # numbers them by bus. If the two numberings can differ, only UUIDs identify GPUs.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        order = (
            [str(number) for number in range(count.value)]
            if visible is None
            else visible.split(",")
        )
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        for gpu in gpus:
            if not gpu.isdecimal() or int(gpu) >= len(order):
                continue
            name, device = order[int(gpu)].strip(), ctypes.c_void_p()
            if not name.isdecimal():
                failure = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
            elif by_bus or count.value == 1:
                failure = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
            else:
                continue
            if not failure:
                self._devices[gpu] = device

    def read_free_bytes(self) -> dict[str, int]:
        """Return the free bytes of each GPU that can be read."""
        free: dict[str, int] = {}
        for gpu, device in self._devices.items():
            memory = _Memory()
            if self._library is not None and not self._library.nvmlDeviceGetMemoryInfo(
                device, ctypes.byref(memory)
            ):
                free[gpu] = memory.free
        return free

    def close(self) -> None:
        """Release the library."""
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None
            self._devices.clear()
