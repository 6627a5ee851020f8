"""The machine and its state, read from the system."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementFailure

SPEED_FLAGS = (
    "amx_bf16",
    "amx_int8",
    "amx_tile",
    "asimd",
    "asimddp",
    "asimdhp",
    "avx",
    "avx2",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512bw",
    "avx512f",
    "avx512vl",
    "avx_vnni",
    "bf16",
    "f16c",
    "fma",
    "i8mm",
    "sse4_1",
    "sse4_2",
    "sve",
    "sve2",
)
"""CPU features that ONNX Runtime's kernels choose by; the others change nothing that is measured."""


def installed(distribution: str) -> str:
    """Version of a distribution of this installation; nothing is imported."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def fingerprint(runtime: str, runtime_version: str) -> HardwareFingerprint:
    """What figures of a runtime are bound to here."""
    model, flags = _cpu()
    return HardwareFingerprint(
        machine=platform.machine(),
        cpu_model=model,
        cpu_flags=tuple(flag for flag in SPEED_FLAGS if flag in flags),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        runtime=runtime,
        runtime_version=runtime_version,
    )


def lacking_flags(wanted: Iterable[str]) -> tuple[str, ...]:
    """CPU features, named as in /proc/cpuinfo, that this machine does not have."""
    return tuple(flag for flag in wanted if flag not in _cpu()[1])


def check_flags(target: Target) -> None:
    """Whether this machine has the CPU features that a target asks for.

    Raises:
        MeasurementFailure: it lacks one.
    """
    if lacking := lacking_flags(target.requires_cpu_flags):
        raise MeasurementFailure(
            f"this CPU lacks {', '.join(lacking)}",
            where=f"target {target.name}",
            remedy="Figures from here mean nothing for this target; measure it on a machine that has them.",
        )


def conditions() -> Mapping[str, str]:
    """What may have disturbed a measurement: load, steal, frequency governor, limits of the control group."""
    files = {
        "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
        "cgroup.cpu.max": "/sys/fs/cgroup/cpu.max",
        "cgroup.memory.max": "/sys/fs/cgroup/memory.max",
    }
    found = {name: text for name, path in files.items() if (text := _read(path))}
    found["load"] = " ".join(f"{value:.2f}" for value in os.getloadavg())
    times = _read("/proc/stat").partition("\n")[0].split()
    if len(times) > 8:
        found["steal_ticks"] = times[8]
    return found


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


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
