"""Runs with bfloat16, which numpy does not have: its 16 bits travel as uint16."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnx_ops.ports.data import Array, Tensors
from onnx_ops.serving.wire import Signature

_BFLOAT16 = 16
"""The number of the element type in ONNX (TensorProto.BFLOAT16)."""


def run_bits(session: Any, signature: Signature, feed: Tensors, outputs: Sequence[str]) -> list[Array]:
    """What `session.run` does, for a model with bfloat16 among its tensors. Raises what the runtime raises."""
    values = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
        if signature.inputs[name].dtype == "bfloat16"
        else ort.OrtValue.ortvalue_from_numpy(array)
        for name, array in feed.items()
    }
    results = session.run_with_ort_values(list(outputs), values)
    return [
        _bits(value) if signature.outputs[name].dtype == "bfloat16" else value.numpy()
        for name, value in zip(outputs, results, strict=True)
    ]


def _bits(value: Any) -> Array:
    """A copy of the value's elements; its memory ends with it."""
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * 2
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size) if size else b"", np.uint16).reshape(shape)
