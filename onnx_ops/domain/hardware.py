"""Machines: what a figure was measured on, and what a target asks of one."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from annotated_types import Ge, doc

from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.quantities import LATER, Bytes

CpuFlag: TypeAlias = Literal[
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
]
"""CPU features that ONNX Runtime's kernels choose by, as Linux names them; the others change nothing that is
measured."""

SPEED_FLAGS: tuple[str, ...] = get_args(CpuFlag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a machine must have, or figures from it mean nothing for the target."""

    machine: Annotated[str, doc("Architecture, as `uname -m` says: x86_64, aarch64.")] = ""
    cpu: Annotated[str, doc("Part of the CPU's name, in any case: 'EPYC 9R14'.")] = ""
    cpu_flags: Annotated[tuple[CpuFlag, ...], doc("CPU features, of those that kernels choose by.")] = ()
    cores: Annotated[int, Ge(0), doc("At least so many cores that a process may use.")] = 0
    memory: Annotated[Bytes | None, doc("At least so much memory.")] = None
    accelerator: Annotated[str, doc("Part of an accelerator's name, in any case: 'H100'.")] = ""
    driver: Annotated[str, doc("Oldest driver of the accelerator: '550.54'.")] = ""

    def least(self, here: HardwareFingerprint) -> HardwareFingerprint:
        """A machine that just fits, with the runtime that is here; the architecture is this one's if none is asked."""
        return HardwareFingerprint(
            machine=self.machine or here.machine,
            cpu_model=self.cpu,
            cpu_flags=self.cpu_flags,
            cores=self.cores,
            memory_bytes=self.memory or 0,
            runtime=here.runtime,
            runtime_version=here.runtime_version,
            accelerators=(self.accelerator,) if self.accelerator else (),
            driver=self.driver,
        )

    def lacking(self, found: HardwareFingerprint) -> tuple[str, ...]:
        """What the machine does not have, in words; empty if it fits."""
        flags = [flag for flag in self.cpu_flags if flag not in found.cpu_flags]
        named = [name for name in found.accelerators if self.accelerator.lower() in name.lower()]
        checks = {
            f"it is {found.machine}, not {self.machine}": self.machine in ("", found.machine),
            f"its CPU is {found.cpu_model}, not {self.cpu}": self.cpu.lower() in found.cpu_model.lower(),
            f"its CPU lacks {', '.join(flags)}": not flags,
            f"it has {found.cores} of {self.cores} cores": found.cores >= self.cores,
            f"it has {found.memory_bytes / 1e9:.1f} of {(self.memory or 0) / 1e9:.1f} GB of memory": (
                found.memory_bytes >= (self.memory or 0)
            ),
            f"it has no accelerator called {self.accelerator}": not self.accelerator or bool(named),
            f"its driver is {found.driver or 'not known'}, older than {self.driver}": (
                not self.driver or _version(found.driver) >= _version(self.driver)
            ),
        }
        return tuple(reason for reason, fits in checks.items() if not fits)


def _version(text: str) -> tuple[int, ...]:
    """Numbers of a dotted version; none for what does not start with one."""
    parts = [re.match(r"\d+", part) for part in text.split(".")]
    return tuple(int(part.group()) for part in itertools.takewhile(bool, parts) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFingerprint:
    """What a figure was measured on. Two machines with one fingerprint may share cached benchmarks."""

    machine: str
    cpu_model: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    runtime: str
    runtime_version: str
    accelerators: tuple[str, ...] = field(default=(), metadata=LATER)
    driver: str = field(default="", metadata=LATER)

    def digest(self) -> Digest:
        return digest_json(
            [
                self.machine,
                self.cpu_model,
                sorted(self.cpu_flags),
                self.cores,
                self.memory_bytes,
                self.runtime,
                self.runtime_version,
                *([list(self.accelerators), self.driver] if self.accelerators else []),
            ]
        )
