"""The low-precision arithmetic of machines, on which quantization depends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx_ops.domain.execution import CPU
from onnx_ops.domain.target import HardwareFingerprint, Target

_CPUS = frozenset({CPU, "cpu"})
WASM = "wasm"
"""WebAssembly.

8-bit numbers are widened to 16 bits before they are multiplied, so that no sum saturates.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The low-precision arithmetic of a target.

    `saturates`: whether sums of two products of uint8 and int8 are cut to 16 bits, so that large
    weights give wrong sums. `fp16`: whether half precision is computed as such, not converted to
    float32 and back. `wide`: whether registers have 512 bits. The layout of convolutions in a graph
    that is saved at level `all` depends on it.
    """

    family: Literal["x86", "arm", "accelerator", "other"]
    saturates: bool = False
    fp16: bool = False
    wide: bool = False


def detect_arithmetic(hardware: HardwareFingerprint, target: Target) -> Arithmetic:
    """Return the arithmetic from the machine's flags and the target's first provider."""
    flags = set(hardware.cpu_flags)
    provider = target.providers[0].name
    if provider == WASM:
        return Arithmetic(family="other")
    if provider not in _CPUS:
        return Arithmetic(family="accelerator", fp16=True)
    machine = hardware.machine.lower()
    if machine in ("x86_64", "amd64", "i686"):
        vnni = flags & {"avx512_vnni", "avx_vnni"}
        return Arithmetic(
            family="x86",
            saturates=not vnni,
            fp16="avx512_fp16" in flags,
            wide={"avx512f", "avx512bw"} <= flags,
        )
    if machine in ("aarch64", "arm64"):
        return Arithmetic(family="arm", fp16="asimdhp" in flags)
    return Arithmetic(family="other")
