"""Remove rounding: write a quantized model in float, and its float original with the rounded weights.

The two files must agree like float models, so a lost node, a wrong axis or a wrong constant is detected despite the
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import collect_constants, iterate_graphs, read_model, read_structure, write_model
from onnx_ops.onnx_graph.quantized_activations import (
    WRITTEN_SUFFIX,
    expand_integer_operators,
    find_folded_values,
    read_levels,
)
from onnx_ops.onnx_graph.quantized_weights import NarrowWeight, QuantizedWeight, iterate_block_weights, shape_along

if TYPE_CHECKING:
    import onnx

_FLOAT, _HALF = 1, 10
_CUTTING = ("Relu", "Clip")
_INTEGER = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
_UNREAD = frozenset(
    {
        "Attention", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4",
        "MatMulIntegerToFloat", "QAttention", "QEmbedLayerNormalization", "QMoE", "QOrderedMatMul",
    }
)  # fmt: skip
"""Operators whose rounding cannot be removed here."""


def write_with_weights(source: Path, weights: Iterable[QuantizedWeight], path: Path) -> None:
    """Write the float original with the dequantized values of quantized weights."""
    from onnx import numpy_helper

    model = read_model(source)
    tensors = collect_constants(model)
    for weight in weights:
        tensor = tensors.get(weight.origin)
        if tensor is None or tensor.data_type != _FLOAT:
            continue
        values = weight.dequantized.T if weight.transposed else weight.dequantized
        values = values.reshape(tuple(tensor.dims)).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
    write_model(model, path)


def write_with_fp16_weights(source: Path, path: Path) -> None:
    """Write the float original with every float32 constant rounded to float16."""
    from onnx import numpy_helper

    model = read_model(source)
    for tensor in collect_constants(model).values():
        if tensor.data_type == _FLOAT:
            with np.errstate(over="ignore"):
                values = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    write_model(model, path)


def write_dequantized(source: Path, derived: Path, path: Path) -> None:
    """Write a quantized model in float32, with the dequantized values of its weights.

    Args:
        source: the float original, with the ReLU and Clip that ranges of the quantized model replace.

    Raises:
        MeasurementError: the rounding of an operator cannot be removed.
    """
    model = expand_integer_operators(read_model(derived), derived.name)
    if hidden := sorted(node.op_type for node in model.graph.node if node.op_type in _UNREAD):
        raise MeasurementError(f"the rounding of {hidden[0]} cannot be removed", where=derived.name)
    tensors = collect_constants(model)
    folded = _folded(source, model, tensors)
    blocks = iterate_block_weights(model, tensors)
    rewritten: list[onnx.NodeProto] = []
    for node in model.graph.node:
        rewritten += _rewrite(node, tensors, folded, blocks)
    del model.graph.node[:]
    model.graph.node.extend(rewritten)
    known = {tensor.name for tensor in model.graph.initializer} | {name for node in rewritten for name in node.output}
    model.graph.initializer.extend(tensor for name, tensor in tensors.items() if name not in known)
    del model.graph.value_info[:]
    _widen(model)
    write_model(model, path)


def _folded(source: Path, model: onnx.ModelProto, tensors: dict[str, onnx.TensorProto]) -> dict[str, onnx.NodeProto]:
    """Return ReLU and Clip of the original that a range of the quantized model replaces, by QuantizeLinear output.

    Quantizers leave out a clipping operator where the range ends at the same values, and give its output's name to its
    input.
    """
    graph = read_structure(source).graph
    stored = collect_constants(read_structure(source))
    after = {node.input[0]: node for node in graph.node if node.op_type in _CUTTING and node.input}
    before = {node.output[0]: node for node in graph.node if node.op_type in _CUTTING}
    cut, makers = find_folded_values(source), {name: node.op_type for node in model.graph.node for name in node.output}
    folded = {}
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear" or node.input[0] in tensors:
            continue
        name = node.input[0].removesuffix(WRITTEN_SUFFIX)
        cutting = before.get(name) or (after[name] if name in cut else None)
        if cutting is None or cutting.op_type in (makers.get(node.input[0]), makers.get(cutting.output[0])):
            continue
        if (levels := read_levels(node, tensors)) is not None and _ends_alike(cutting, stored, *levels):
            made = folded[node.output[0]] = copy.deepcopy(cutting)
            for place, name in enumerate(cutting.input):
                if place and name:  # a constant, which gets a new name
                    made.input[place] = f"{name}.original"
                    tensors[made.input[place]] = copy.deepcopy(stored[name])
                    tensors[made.input[place]].name = made.input[place]
    return folded


def _ends_alike(
    cutting: onnx.NodeProto, stored: dict[str, onnx.TensorProto], step: float, low: float, high: float
) -> bool:
    """Return whether a range lies within that of the operator, up to half a step."""
    from onnx import numpy_helper

    if any(name and name not in stored for name in cutting.input[1:]):
        return False
    ends: list[float | None] = [0.0, None]
    if cutting.op_type == "Clip":
        given = {a.name: a.f for a in cutting.attribute}
        ends = [given.get("min"), given.get("max")]
        for place, name in enumerate(cutting.input[1:3]):
            if name:
                ends[place] = float(numpy_helper.to_array(stored[name]).item())
    least, most = ends
    return (least is None or low >= least - step / 2) and (most is None or high <= most + step / 2)


def _rewrite(
    node: onnx.NodeProto,
    tensors: dict[str, onnx.TensorProto],
    folded: dict[str, onnx.NodeProto],
    blocks: Iterator[NarrowWeight],
) -> list[onnx.NodeProto]:
    from onnx import helper, numpy_helper

    match node.op_type:
        case "QuantizeLinear" if node.output[0] in folded:
            cut = folded[node.output[0]]
            cut.input[0], cut.output[:] = node.input[0], node.output
            return [cut]
        case "QuantizeLinear" | "DequantizeLinear" if node.input[0] not in tensors:
            return [helper.make_node("Identity", node.input[:1], node.output)]
        case "DynamicQuantizeLinear":
            tensors[node.output[1]] = numpy_helper.from_array(np.array(1, np.float32), node.output[1])
            tensors[node.output[2]] = numpy_helper.from_array(np.array(0, np.uint8), node.output[2])
            return [helper.make_node("Identity", node.input[:1], node.output[:1])]
        case "MatMulInteger" | "ConvInteger":
            return [_float_product(node, tensors)]
        case "MatMulNBits" if set(node.input[1:3]) <= set(tensors):
            name, product, bias = f"{node.output[0]}.weight", node.output[0], [*node.input[5:6], ""][0]
            tensors[name] = numpy_helper.from_array(next(blocks).values.astype(np.float32), name)
            if not bias:
                return [helper.make_node("MatMul", [node.input[0], name], node.output, name=node.name)]
            product += ".product"
            return [
                helper.make_node("MatMul", [node.input[0], name], [product], name=node.name),
                helper.make_node("Add", [product, bias], node.output),
            ]
        case _:
            return [node]


def _float_product(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> onnx.NodeProto:
    """Rewrite an integer product as one of the same numbers in float32; its scales are applied afterwards."""
    from onnx import helper, numpy_helper

    stored = tensors.get(node.input[1])
    if stored is None:
        inputs = list(node.input[:2])  # both were converted to floats before
    else:
        levels = numpy_helper.to_array(stored).astype(np.float64)
        if len(node.input) > 3 and node.input[3] in tensors:
            centre = numpy_helper.to_array(tensors[node.input[3]]).astype(np.float64)
            levels = levels - shape_along(centre, levels.ndim, 0 if node.op_type == "ConvInteger" else -1)
        name = f"{node.input[1]}.float"
        tensors[name] = numpy_helper.from_array(levels.astype(np.float32), name)
        inputs = [node.input[0], name]
    made = helper.make_node(_INTEGER[node.op_type], inputs, node.output, name=node.name)
    made.attribute.extend(node.attribute)
    return made


def _widen(model: onnx.ModelProto) -> None:
    """Convert everything float16 to float32, inputs and outputs of the model included."""
    from onnx import numpy_helper

    for tensor in collect_constants(model).values():
        if tensor.data_type == _HALF:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in iterate_graphs(model):
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == _HALF:
                value.type.tensor_type.elem_type = _FLOAT
        for node in graph.node:
            types = ("to",) if node.op_type == "Cast" else ("dtype", "output_dtype")
            for attribute in node.attribute:
                if attribute.name in types and attribute.i == _HALF:
                    attribute.i = _FLOAT
                if node.op_type == "ConstantOfShape" and attribute.name == "value" and attribute.t.data_type == _HALF:
                    wide = numpy_helper.to_array(attribute.t).astype(np.float32)
                    attribute.t.CopyFrom(numpy_helper.from_array(wide, attribute.t.name))
