"""Evidence without measurements, of which a test sets only the relevant fields."""

from __future__ import annotations

from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.execution import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint

DIGEST = Digest("sha256:" + "0" * 64)
CPU = "CPUExecutionProvider"
HARDWARE = HardwareFingerprint(
    machine="x86_64",
    cpu_model="cpu",
    cpu_flags=(),
    cores=2,
    memory_bytes=1,
    runtime="onnxruntime",
    runtime_version="1",
)
CPU_FACTS = RuntimeFacts(
    runtime="onnxruntime", version="1", asked=(CPU,), used=(CPU,), nodes={CPU: 3}
)
QUIET = ((0.001,), (-0.001,), (0.0,), (0.002,), (-0.002,)) * 8
"""Log ratios of forty session pairs of equal models."""


def make_evidence(variant: str = "int8", **fields: Any) -> Evidence:
    """Return evidence of a variant of one byte on `cpu`.

    The variant is quantized unless it is `fp32`.
    """
    defaults: dict[str, Any] = {
        "pipeline": "p",
        "target": "cpu",
        "quantized": variant != "fp32",
        "release": DIGEST,
        "manifest": DIGEST,
        "target_digest": DIGEST,
        "dedicated": False,
        "size_bytes": 1,
        "hardware": HARDWARE,
    }
    return Evidence(variant=variant, **defaults | fields)
