"""Faults that are planted in quantized files: in scales, zero points, levels, ranges and biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def faults(path: Path) -> Iterator[tuple[str, Path]]:
    """Write copies of a quantized file with one planted fault each."""
    model = onnx.load(path)
    for name, plant in _FAULTS.items():
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        if plant(copy):
            file = path.with_name(f"fault-{name.replace(' ', '-')}.onnx")
            onnx.save(copy, file)
            yield name, file


_PLACES = {
    "DequantizeLinear": (0, 1, 2), "MatMulInteger": (1, -1, 3), "QLinearMatMul": (3, 4, 5), "QLinearConv": (3, 4, 5),
    "QGemm": (3, 4, 5), "MatMulNBits": (1, 2, 3), "ConvInteger": (1, -1, 3), "DynamicQuantizeMatMul": (1, 2, 3),
    "MatMulIntegerToFloat": (1, 3, 5), "DynamicQuantizeLSTM": (1, 8, 9),
}  # fmt: skip
"""Where a node has its weight, scale and zero point; -1: a constant of another node."""


def _largest_weight(model: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the node with the largest quantized weight, and the constants of the model."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    stored |= {
        n.output[0]: n.attribute[0].t
        for n in model.graph.node
        if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    sizes = [
        (int(np.prod(stored[node.input[_PLACES[node.op_type][0]]].dims)), index)
        for index, node in enumerate(model.graph.node)
        if node.op_type in _PLACES and len(node.input) > 1 and node.input[_PLACES[node.op_type][0]] in stored
    ]
    return (model.graph.node[max(sizes)[1]], stored) if sizes else None


def _rewrite(tensor: Any, values: Any) -> None:
    """Put other values of the same type into a constant."""
    limits = {"int4": (-8, 7), "uint4": (0, 15)}
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    if kind in limits:
        flat = np.clip(np.asarray(values).astype(int), *limits[kind]).reshape(-1).tolist()
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, flat))
        return
    before = numpy_helper.to_array(tensor)
    after = np.ascontiguousarray(np.asarray(values).astype(before.dtype).reshape(before.shape))
    tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))


def _parts(model: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return the node, and its weight, scale and zero point."""
    found = _largest_weight(model)
    if found is None:
        return None
    node, stored = found
    weight, scale, zero = _PLACES[node.op_type]
    names = [*node.input, *[""] * 10]
    scale_name = f"{names[weight].removesuffix('_quantized')}_scale" if scale < 0 else names[scale]
    return node, stored[names[weight]], stored.get(scale_name), stored.get(names[zero])


def _swap_scales(model: Any) -> bool:
    """Exchange the least and the largest scale of a weight; a single one is doubled."""
    found = _parts(model)
    if found is None or found[2] is None:
        return False
    scale = numpy_helper.to_array(found[2]).copy()
    flat = scale.reshape(-1)
    least, most = flat.argmin(), flat.argmax()
    if flat.size > 1:
        flat[[least, most]] = flat[[most, least]]
    else:
        flat *= 2
    _rewrite(found[2], scale)
    return True


def _move_zero(model: Any) -> bool:
    """Move the zero point of a weight, by an eighth of the levels."""
    found = _parts(model)
    if found is None or found[3] is None:
        return False
    zero = numpy_helper.to_array(found[3])
    kind = onnx.TensorProto.DataType.Name(found[3].data_type).lower()
    if found[0].op_type == "MatMulNBits":
        _rewrite(found[3], zero + 2 if zero.dtype.kind == "f" else zero ^ 0x22)
        return True
    step = 2 if "4" in kind else 16
    middle = 0 if kind.startswith("i") else (8 if "4" in kind else 128)
    moved = zero.astype(int)
    _rewrite(found[3], np.where(moved > middle, moved - step, moved + step))
    return True


def _shift_blocks(model: Any) -> bool:
    """Shift the scales by one block, or by one channel."""
    found = _parts(model)
    if found is None or found[2] is None:
        return False
    scale = numpy_helper.to_array(found[2])
    if scale.size < 2:
        return False
    axis = next((axis for axis, size in enumerate(scale.shape) if size > 1), 0)
    _rewrite(found[2], np.roll(scale, 1, axis=axis))
    return True


def _shift_levels(model: Any) -> bool:
    """Shift the rows of the stored levels by one."""
    found = _parts(model)
    if found is None or len(found[1].dims) < 2:
        return False
    levels = numpy_helper.to_array(found[1])
    _rewrite(found[1], np.roll(levels, 1, axis=0))
    return True


def _truncate(model: Any) -> bool:
    """Cut the levels off at half of their range."""
    found = _parts(model)
    if found is None:
        return False
    levels = numpy_helper.to_array(found[1])
    if found[0].op_type in ("MatMulNBits", "MatMulBnb4") and any(
        a.name == "bits" and a.i == 4 for a in found[0].attribute
    ):
        low, high = np.clip(levels & 15, 5, 11), np.clip(levels >> 4, 5, 11)
        _rewrite(found[1], low | (high << 4))
        return True
    if levels.dtype.kind == "f":
        return False
    values = levels.astype(int)
    middle = (values.max() + values.min()) / 2
    half = (values.max() - values.min()) / 4
    _rewrite(found[1], np.clip(values, round(middle - half), round(middle + half)))
    return True


def _roll_bias(model: Any) -> bool:
    """Roll the largest constant vector that is added, or that is the third input of a layer."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    places = {"Add": (0, 1), "Gemm": (2,), "Conv": (2,)}
    biases = [
        stored[node.input[place]]
        for node in model.graph.node
        for place in places.get(node.op_type, ())
        if len(node.input) > place and node.input[place] in stored and len(stored[node.input[place]].dims) == 1
    ]
    floats = [tensor for tensor in biases if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims[0] > 1]
    if not floats:
        return False
    largest = max(floats, key=lambda tensor: tensor.dims[0])
    _rewrite(largest, np.roll(numpy_helper.to_array(largest), 1))
    return True


_FAULTS: dict[str, Callable[[Any], bool]] = {
    "swapped scale": _swap_scales,
    "wrong zero point": _move_zero,
    "shifted scales": _shift_blocks,
    "shifted levels": _shift_levels,
    "truncated range": _truncate,
    "rolled bias": _roll_bias,
}
