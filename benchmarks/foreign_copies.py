"""Wrong copies of a file: one fault each, where answers show it on rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnx_ops.errors import OnnxOpsError
from onnx_ops.onnx_graph.files import collect_constants, read_model
from onnx_ops.onnx_graph.input_bounds import read_input_bounds
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.tools.generated_rows import generate_samples
from onnx_ops.tools.model_inputs import shared_inputs

_LARGEST = 1 << 30
_SHOWN = 0.01
"""Difference relative to the largest answer, or share of labels, from which on a copy is wrong."""

_ROWS, _SEED = 64, 7

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.UINT8)
_SWAPS = {
    "Relu": "Neg", "Sigmoid": "Tanh", "Tanh": "Sigmoid", "Gelu": "Relu", "Add": "Sub", "Sub": "Add", "Mul": "Add",
    "ReduceMean": "ReduceMax", "ReduceMax": "ReduceMin", "ReduceSum": "ReduceMean", "AveragePool": "MaxPool",
    "GlobalAveragePool": "GlobalMaxPool", "ArgMax": "ArgMin", "Abs": "Neg",
}  # fmt: skip


def wrong_copies(path: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each copy that a fault can be made in, and whose answers differ by it."""
    try:
        if read_model_info(path).size_bytes > _LARGEST:
            return
        if not (right := _answers(path)):
            return
        for name, spoil in _FAULTS.items():
            model = read_model(path)
            if not spoil(model):
                continue
            wrong = path.parent / f"{name.replace(' ', '-')}-{path.name}"
            onnx.save_model(model, wrong)
            answers = _answers(wrong)
            if answers and differ(right, answers):
                yield name, wrong
    except OnnxOpsError:
        return


def _answers(path: Path) -> list[Any]:
    """All outputs on rows of the copies' own; empty where ONNX Runtime does not take the file."""
    samples = generate_samples(shared_inputs(path), count=_ROWS, dims={}, seed=_SEED, bounds=read_input_bounds(path))
    return run_model(path, samples.read_layout(path).arrange(samples.feed(_ROWS)))


def run_model(path: Path, request: Mapping[str, Any]) -> list[Any]:
    """All outputs of one request; empty where ONNX Runtime does not take it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return [_flat(value) for value in session.run(None, {name: np.asarray(v) for name, v in request.items()})]
    except Exception:  # the runtime's errors share no base class; a copy that does not run is not a wrong copy
        return []


def _flat(value: Any) -> Any:
    """Arrays as they are; sequences and maps as one row of all that is in them, keys included."""
    if isinstance(value, dict):
        return np.array([str(item) for pair in sorted(value.items()) for item in pair])
    if isinstance(value, list):
        parts = [_flat(item).reshape(-1) for item in value]
        return np.concatenate(parts) if parts else np.empty(0)
    return np.asarray(value)


def differ(right: list[Any], wrong: list[Any]) -> bool:
    """Whether answers differ by more than 1 %."""
    return any(_differs(a, b) for a, b in zip(right, wrong, strict=True))


def _differs(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return True
    if not a.size or a.dtype.kind == "V":
        return False
    if a.dtype.kind != "f":
        return bool((a != b).mean() > _SHOWN)
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    return bool(finite.any() and np.abs(a - b)[finite].max() > _SHOWN * max(np.abs(a[finite]).max(), 1e-6))


def _largest(model: onnx.ModelProto, rank: int) -> TensorProto | None:
    """The largest weight that is not all zeros, of at least that rank, or of one axis."""
    tensors = [tensor for tensor in collect_constants(model).values() if tensor.data_type in _TYPES]
    tensors = [tensor for tensor in tensors if (len(tensor.dims) > 1 if rank > 1 else len(tensor.dims) == 1)]
    tensors = [tensor for tensor in tensors if numpy_helper.to_array(tensor).any()]
    return max(tensors, key=lambda one: numpy_helper.to_array(one).size, default=None)


def _replaced(tensor: TensorProto, array: Any) -> bool:
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
    return True


def _spoil_weight(model: onnx.ModelProto) -> bool:
    if (tensor := _largest(model, 2)) is None:
        return False
    array = numpy_helper.to_array(tensor).copy()
    part = array.reshape(-1)[::4]
    part[:] = part * -1.3 if array.dtype.kind == "f" else ~part
    return _replaced(tensor, array)


def _spoil_layout(model: onnx.ModelProto) -> bool:
    """The values of a weight in the order of the transposed weight."""
    if (tensor := _largest(model, 2)) is None:
        return False
    array = numpy_helper.to_array(tensor)
    return _replaced(tensor, array.T.reshape(array.shape))


def _spoil_bias(model: onnx.ModelProto) -> bool:
    tensor = _largest(model, 1)
    return tensor is not None and _replaced(tensor, np.zeros_like(numpy_helper.to_array(tensor)))


def _spoil_operator(model: onnx.ModelProto) -> bool:
    for node in model.graph.node:
        if node.op_type in _SWAPS:
            node.op_type = _SWAPS[node.op_type]
            return True
    return False


def _spoil_attribute(model: onnx.ModelProto) -> bool:
    """The first attribute that determines the answers: an axis, a flag, a slope, what trees do with their sum."""
    for node in model.graph.node:
        for attribute in node.attribute:
            match attribute.name:
                case "axis":
                    attribute.i = 0 if attribute.i else 1
                case "largest" | "exclusive" | "reverse" | "select_last_index" | "direction" if attribute.type == 2:
                    attribute.i = 1 - attribute.i
                case "alpha" | "gamma" | "scale" if attribute.type == 1:
                    attribute.f = attribute.f * 1.5 + 0.1
                case "epsilon":
                    attribute.f = 1.0
                case "kernel_type" | "post_transform":
                    attribute.s = {b"RBF": b"LINEAR", b"NONE": b"LOGISTIC"}.get(attribute.s, b"NONE")
                case "aggregate_function":
                    attribute.s = b"AVERAGE" if attribute.s != b"AVERAGE" else b"SUM"
                case _:
                    continue
            return True
    return False


def _spoil_numbers(model: onnx.ModelProto) -> bool:
    """The largest list of numbers in a node (leaves of trees, coefficients), each fourth with the other sign."""
    lists = [
        attribute
        for node in model.graph.node
        for attribute in node.attribute
        if len(attribute.floats) > 1 and any(attribute.floats)
    ]
    if not lists:
        return False
    attribute = max(lists, key=lambda one: len(one.floats))
    attribute.floats[:] = [-1.3 * x if place % 4 == 0 else x for place, x in enumerate(attribute.floats)]
    return True


def _spoil_classes(model: onnx.ModelProto) -> bool:
    """Class labels in the other order, wherever a node holds them."""
    found = False
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name.startswith(("classlabels_", "classlabels", "keys_")):
                for values in (attribute.ints, attribute.strings):
                    values[:] = list(reversed(values))
                    found = found or len(values) > 1
    return found


_FAULTS: dict[str, Callable[[onnx.ModelProto], bool]] = {
    "other weight": _spoil_weight,
    "weight in transposed order": _spoil_layout,
    "bias dropped": _spoil_bias,
    "other operator": _spoil_operator,
    "other attribute": _spoil_attribute,
    "other numbers in a node": _spoil_numbers,
    "classes in another order": _spoil_classes,
}
