"""Variants and faulty copies of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_ops.adapters.optimizers.low_precision import Fp16Optimizer, WeightOnlyQuantizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.ports import OptimizeRequest, Tensors
from onnx_ops.testing.models import rows
from tests.support.processor import detect_here

_OPTIMIZERS: Mapping[str, Any] = {
    "static": StaticQuantizer,
    "dynamic": DynamicQuantizer,
    "fp16": Fp16Optimizer,
    "weight-only": WeightOnlyQuantizer,
}


def derive(
    source: Path,
    method: str,
    options: Mapping[str, Any] | None = None,
    calibration: Tensors | None = None,
) -> Path:
    """Derive a variant for this CPU, beside its source.

    Without `calibration`, the source is the perceptron of `onnx_ops.testing.models`.
    """
    path = source.with_name(f"{method}.onnx")
    calibrate = Calibrate() if method == "static" else None
    section = Quantize(
        name="variant", method=method, calibrate=calibrate, options=dict(options or {})
    )
    taken = (calibration or rows(256)) if calibrate else None
    request = OptimizeRequest(
        section=section, source=source, path=path, calibration=taken, machines=(detect_here(),)
    )
    _OPTIMIZERS[method]().optimize(request)
    return path


def write_changed(
    model: Path, tensor: str, change: Callable[[Any], Any], name: str = "changed.onnx"
) -> Path:
    """Write a copy beside a model, with one of its constants changed."""
    proto = onnx.load(model)
    stored = next(one for one in proto.graph.initializer if one.name == tensor)
    before = numpy_helper.to_array(stored)
    after = np.asarray(change(before), dtype=before.dtype).reshape(before.shape)
    stored.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(after), tensor))
    onnx.save(proto, model.with_name(name))
    return model.with_name(name)
