"""The available memory: of control groups of both versions, the machine, and GPUs."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.execution import Execution, Provider
from onnx_ops.serving.workers import available_memory
from onnx_ops.serving.workers.available_memory import GpuMemory, list_gpus, read_available_bytes
from onnx_ops.serving.workers.memory_admission import MemoryMeter
from tests.support.endpoints import fileless_deployment
from tests.support.operators import build_library

MIB = 1 << 20
UNLIMITED = 9_223_372_036_854_771_712


class Root:
    """A folder with the files of /proc and /sys that name the available memory."""

    def __init__(self, folder: Path, *, available: int | None = None, groups: str = "") -> None:
        self.folder = folder
        self.write("proc/self/cgroup", groups)
        if available is not None:
            self.write("proc/meminfo", f"MemTotal:  99 kB\nMemAvailable:  {available >> 10} kB\n")

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def add_group(self, name: str, limit: int | str, usage: int, cache: int = 0) -> None:
        """Write the files of a group of version 2."""
        self.write(f"sys/fs/cgroup{name}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{name}/memory.current", f"{usage}\n")
        stat = f"anon 1\ninactive_file {cache}\nactive_file 0\nslab_reclaimable 0\n"
        self.write(f"sys/fs/cgroup{name}/memory.stat", stat)

    def add_old_group(self, name: str, limit: int, usage: int, cache: int = 0) -> None:
        """Write the files of a group of version 1."""
        self.write(f"sys/fs/cgroup/memory{name}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory{name}/memory.usage_in_bytes", f"{usage}\n")
        stat = f"inactive_file 7\ntotal_inactive_file 0\ntotal_active_file {cache}\n"
        self.write(f"sys/fs/cgroup/memory{name}/memory.stat", stat)

    def read(self) -> int | None:
        return read_available_bytes(self.folder)


def test_read_available_bytes_of_current_machine_returns_number() -> None:
    assert (read_available_bytes() or 0) > MIB


def test_read_available_bytes_without_files_returns_none(tmp_path: Path) -> None:
    assert read_available_bytes(tmp_path) is None


def test_read_available_bytes_without_groups_returns_memory_of_machine(tmp_path: Path) -> None:
    assert Root(tmp_path, available=80 * MIB).read() == 80 * MIB


@pytest.mark.parametrize("available", [None, 10_000 * MIB])
def test_read_available_bytes_of_group_returns_limit_minus_unreclaimable(
    tmp_path: Path, available: int | None
) -> None:
    root = Root(tmp_path, available=available, groups="0::/pod/box\n")
    root.add_group("/pod/box", 500 * MIB, 300 * MIB, cache=120 * MIB)
    assert root.read() == 320 * MIB


def test_read_available_bytes_of_version_1_group_uses_totals_with_children(tmp_path: Path) -> None:
    root = Root(tmp_path, groups="9:name=systemd:/box\n4:cpu,memory:/box\n0::/\n")
    root.add_old_group("/box", 500 * MIB, 300 * MIB, cache=100 * MIB)
    root.add_old_group("", UNLIMITED, 900 * MIB)
    assert root.read() == 300 * MIB


def test_read_available_bytes_of_nested_groups_returns_least(tmp_path: Path) -> None:
    root = Root(tmp_path, groups="0::/pod/box\n")
    root.add_group("/pod/box", "max", 300 * MIB)
    root.add_group("/pod", 700 * MIB, 600 * MIB)
    assert root.read() == 100 * MIB


@pytest.mark.parametrize("name", ["/../..", "/docker/0123"])
def test_read_available_bytes_with_group_outside_mount_reads_root_of_mount(
    tmp_path: Path, name: str
) -> None:
    root = Root(tmp_path, groups=f"4:memory:{name}\n0::{name}\n")
    root.add_old_group("", 500 * MIB, 100 * MIB)
    assert root.read() == 400 * MIB


@pytest.mark.parametrize(("limit", "usage"), [(0, 0), (0, 50 * MIB), (10 * MIB, 20 * MIB)])
def test_read_available_bytes_of_exhausted_group_is_zero(
    tmp_path: Path, limit: int, usage: int
) -> None:
    root = Root(tmp_path, available=80 * MIB, groups="0::/box\n")
    root.add_group("/box", limit, usage)
    assert root.read() == 0


@given(st.lists(st.binary(max_size=30), min_size=5, max_size=5))
def test_read_available_bytes_of_damaged_files_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("root")
    root = Root(folder, groups="0::/\n")
    root.add_group("", 1, 1)
    root.write("proc/meminfo", "")
    for path, content in zip(
        (p for p in sorted(folder.rglob("*")) if p.is_file()), contents, strict=True
    ):
        path.write_bytes(content)
    assert (root.read() or 0) >= 0


def test_list_gpus_names_devices_of_cuda_and_tensorrt_only() -> None:
    base = fileless_deployment("a")
    providers = [
        Provider(name="CPUExecutionProvider"),
        Provider(name="CUDAExecutionProvider"),
        Provider(name="TensorrtExecutionProvider", options={"device_id": "1"}),
        Provider(name="ROCMExecutionProvider", options={"device_id": "2"}),
    ]
    deployments = [
        replace(base, execution=Execution(providers=(provider,))) for provider in providers
    ]
    assert list_gpus(deployments) == {"0", "1"}


def test_gpu_memory_of_unreadable_gpu_returns_no_bytes() -> None:
    memory = GpuMemory(["63", "none"])
    assert memory.read_free_bytes() == {}
    memory.close()
    memory.close()


LIBRARY = """
#include <stdlib.h>
#include <string.h>
static unsigned long long free_bytes[4] = {100, 200, 300, 400};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = atoi(getenv("GPUS")); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &free_bytes[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &free_bytes[2];
    return strcmp(uuid, "GPU-1") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 1000;
    memory[1] = *(unsigned long long *)device;
    memory[2] = memory[0] - memory[1];
    *(unsigned long long *)device -= 10;
    return 0;
}
"""  # noqa: E501
"""A library with the calls of NVML that are used.

Each reading finds 10 bytes less.
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nvml.c").write_text(LIBRARY)
    build_library(tmp_path / "nvml.c", tmp_path / "nvml.so")
    monkeypatch.setattr(available_memory, "_NVML", str(tmp_path / "nvml.so"))
    return tmp_path


@pytest.mark.parametrize(
    ("gpus", "environment", "free"),
    [
        pytest.param(1, {}, {"0": 100}, id="the only one"),
        pytest.param(4, {}, {}, id="several in unknown order"),
        pytest.param(
            4, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"0": 100, "1": 200}, id="in order of the bus"
        ),
        pytest.param(
            4,
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,0"},
            {"0": 400, "1": 100},
            id="of visible ones",
        ),
        pytest.param(4, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, {"0": 300}, id="by name"),
        pytest.param(4, {"CUDA_VISIBLE_DEVICES": "GPU-2"}, {}, id="by an unknown name"),
        pytest.param(1, {"CUDA_VISIBLE_DEVICES": ""}, {}, id="none visible"),
    ],
)
def test_gpu_memory_follows_cuda_device_numbering(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    environment: dict[str, str],
    free: dict[str, int],
) -> None:
    assert library.is_dir()
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "GPUS": str(gpus)}.items():
        monkeypatch.setenv(name, value)
    memory = GpuMemory(["0", "1"])
    assert memory.read_free_bytes() == free
    memory.close()
    assert memory.read_free_bytes() == {}


def test_memory_meter_of_gpu_counts_decrease_of_free_memory(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.is_dir()
    monkeypatch.setenv("GPUS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    provider = Provider(name="CUDAExecutionProvider")
    deployment = replace(fileless_deployment("a"), execution=Execution(providers=(provider,)))
    with closing(MemoryMeter.open([deployment])) as meter:
        for _ in range(3):
            meter.sample(os.getpid())
        assert meter.compute_peak(0, 0)["0"] == 30
