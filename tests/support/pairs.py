"""Pairs of a model and a variant of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.optimizers.low_precision import Fp16Optimizer, WeightOnlyQuantizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import rows

_OPTIMIZERS: Mapping[str, Any] = {
    "static": StaticQuantizer,
    "dynamic": DynamicQuantizer,
    "fp16": Fp16Optimizer,
    "weight-only": WeightOnlyQuantizer,
}


def derive(source: Path, method: str, options: Mapping[str, Any] | None = None) -> Path:
    """A variant of the perceptron of `onnx_ops.testing.models`, beside it."""
    path = source.with_name(f"{method}.onnx")
    calibrate = Calibrate() if method == "static" else None
    section = Quantize(name="variant", method=method, calibrate=calibrate, options=dict(options or {}))
    calibration = rows(256) if calibrate else None
    _OPTIMIZERS[method]().optimize(OptimizeRequest(section=section, source=source, path=path, calibration=calibration))
    return path
