"""Evidence with nothing in it but what is judged, so that verdicts come from the product's own judge."""

from __future__ import annotations

from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.target import HardwareFingerprint

_NONE = Digest("sha256:" + "0" * 64)
_HARDWARE = HardwareFingerprint(
    machine="", cpu_model="", cpu_flags=(), cores=0, memory_bytes=0, runtime="", runtime_version=""
)


def evidence(**measured: Any) -> Evidence:
    """Evidence of a float variant `candidate` against `fp32`, with the given fields."""
    fields: dict[str, Any] = {
        "pipeline": "truth",
        "variant": "candidate",
        "target": "truth",
        "quantized": False,
        "release": _NONE,
        "manifest": _NONE,
        "target_digest": _NONE,
        "dedicated": False,
        "size_bytes": 0,
        "hardware": _HARDWARE,
    }
    return Evidence(**fields | measured)
