"""The machine and its state, read from the system."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from onnx_ops.adapters.isolation.process import read_memory_bytes
from onnx_ops.domain.target import SPEED_FLAGS, HardwareFingerprint


def read_hardware(runtime: str, runtime_version: str) -> HardwareFingerprint:
    """Return the hardware and runtime for which measurements are valid."""
    model, flags = _cpu()
    accelerators, driver = _accelerators()
    return HardwareFingerprint(
        machine=platform.machine(),
        cpu_model=model,
        cpu_flags=tuple(flag for flag in SPEED_FLAGS if flag in flags),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=read_memory_bytes(),
        runtime=runtime,
        runtime_version=runtime_version,
        accelerators=accelerators,
        driver=driver,
    )


def read_conditions() -> Mapping[str, str]:
    """Return conditions that can disturb measurements.

    The conditions are load, steal time, governor and the limits of the cgroup.
    """
    files = {
        "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
        "cgroup.cpu.max": "/sys/fs/cgroup/cpu.max",
        "cgroup.memory.max": "/sys/fs/cgroup/memory.max",
    }
    texts = {name: text for name, path in files.items() if (text := _read(path))}
    texts["load"] = " ".join(f"{value:.2f}" for value in os.getloadavg())
    times = _read("/proc/stat").partition("\n")[0].split()
    if len(times) > 8:
        texts["steal_ticks"] = times[8]
    return texts


@functools.cache
def _cpu() -> tuple[str, frozenset[str]]:
    model, flags = platform.processor() or platform.machine(), frozenset[str]()
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "model name":
                model = value.strip()
            case "flags" | "Features" if not flags:
                flags = frozenset(value.split())
            case _:
                continue
    return model, flags


@functools.cache
def _accelerators() -> tuple[tuple[str, ...], str]:
    """Return the names of NVIDIA's GPUs, and the version of the driver.

    The GPUs are in the order of their PCI addresses. Names and version are read from /proc.
    """
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        pairs = (line.partition(":")[::2] for line in _read(str(path)).splitlines())
        names += [value.strip() for key, value in pairs if key.strip() == "Model"]
    driver = re.search(r"Kernel Module\D*([\d.]+)", _read("/proc/driver/nvidia/version"))
    return tuple(names), driver.group(1) if names and driver else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
