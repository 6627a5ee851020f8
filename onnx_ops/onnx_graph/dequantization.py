"""Remove rounding, so that a quantized model and its original can be compared.

The quantized model is written in float, and its float original with the rounded weights. Both files
must give equal answers within the tolerance for float models. A missing node, a wrong axis or a
wrong constant is therefore detected despite the rounding.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import (
    collect_constants,
    iterate_graphs,
    iterate_tensors,
    read_model,
    write_model,
)
from onnx_ops.onnx_graph.int8_coverage import INT8_OPERATORS
from onnx_ops.onnx_graph.quantized_activations import (
    WRITTEN_SUFFIX,
    expand_integer_operators,
    find_folded_values,
    read_levels,
    refuse_channels_last,
)
from onnx_ops.onnx_graph.quantized_weights import QuantizedWeight
from onnx_ops.onnx_graph.stored_weights import StoredWeightReader, expand_scales
from onnx_ops.onnx_graph.weight_origins import OriginFinder

if TYPE_CHECKING:
    import onnx

_FLOAT, _HALF, _BFLOAT = 1, 10, 16
_NARROW = (_HALF, _BFLOAT)
_CUTTING = ("Relu", "Clip")
_INTEGER = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
_UNREAD = frozenset(
    {
        "DynamicQuantizeLSTM",
        "MatMulBnb4",
        "QAttention",
        "QEmbedLayerNormalization",
        "QMoE",
        "QOrderedMatMul",
    }
)
"""Operators whose rounding cannot be removed by this module."""

_ROUNDING = frozenset(
    {
        *_UNREAD,
        *INT8_OPERATORS,
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "GatherBlockQuantized",
        "MatMulNBits",
        "QuantizeLinear",
    }
)
"""Operators that are refused in subgraphs, besides those named `QLinear…`.

Their rounding could not be removed there.
"""


def write_with_weights(source: Path, weights: Iterable[QuantizedWeight], path: Path) -> None:
    """Write the float original with the dequantized values of quantized weights.

    A weight is skipped if its original is not a float32 constant of the main graph.
    """
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


def write_with_fp16_weights(source: Path, path: Path, names: Collection[str] = ()) -> None:
    """Write the float original with named float32 constants rounded to float16.

    Without names, all float32 constants are rounded. Constants of subgraphs are not changed.
    """
    from onnx import numpy_helper

    model = read_model(source)
    for name, tensor in collect_constants(model).items():
        if tensor.data_type == _FLOAT and (not names or name in names):
            with np.errstate(over="ignore"):
                values = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    write_model(model, path)


def write_dequantized(source: Path, derived: Path, path: Path) -> None:
    """Write a quantized model in float32, with the dequantized values of its weights.

    Errors are those of `read_model`, and the following.

    Args:
        source: the float original, with the ReLU and Clip that ranges of the quantized model
            replace.

    Raises:
        MeasurementError: the rounding of an operator cannot be removed, or a subgraph contains
            rounding. Also if an integer operator has channels last, or is unreadable (see
            `expand_integer_operators`).
    """
    model = read_model(derived)
    refuse_channels_last(model, derived.name)
    model = expand_integer_operators(model, derived.name)
    _refuse_unread_operators(model, derived.name)
    reader = StoredWeightReader(model)
    tensors = reader.tensors
    rewriting = _Dequantization(
        reader=reader,
        folded=_find_folded(source, model, reader),
        makers={name: node for node in model.graph.node for name in node.output},
        levels=frozenset(node.input[0] for node in model.graph.node if node.op_type in _INTEGER),
    )
    rewritten: list[onnx.NodeProto] = []
    for node in model.graph.node:
        rewritten += _rewrite(node, rewriting)
    del model.graph.node[:]
    model.graph.node.extend(rewritten)
    known = {tensor.name for tensor in model.graph.initializer} | {
        name for node in rewritten for name in node.output
    }
    model.graph.initializer.extend(tensor for name, tensor in tensors.items() if name not in known)
    _widen(model)
    write_model(model, path)


def _refuse_unread_operators(model: onnx.ModelProto, where: str) -> None:
    """Raise MeasurementError if the rounding of an operator cannot be removed."""
    unread = [node.op_type for node in model.graph.node if node.op_type in _UNREAD]
    unread += [
        f"{node.op_type} in a subgraph"
        for graph in itertools.islice(iterate_graphs(model), 1, None)
        for node in graph.node
        if node.op_type in _ROUNDING or node.op_type.startswith("QLinear")
    ]
    if unread:
        raise MeasurementError(f"the rounding of {min(unread)} cannot be removed", where=where)


def _find_folded(
    source: Path, model: onnx.ModelProto, reader: StoredWeightReader
) -> dict[str, onnx.NodeProto]:
    """Return copies of the original's ReLU and Clip that quantized ranges replace.

    The keys are the outputs of the QuantizeLinear nodes with these ranges. Quantizers omit a
    clipping operator if the range ends at the same values.
    """
    tensors = reader.tensors
    rounding = [
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in tensors
    ]
    if not rounding:
        return {}
    original = read_model(source)
    stored = collect_constants(original)
    known = OriginFinder(original, model).match_values(list(reader.iterate_weights()))
    clipping = _map_clipping(
        original, find_folded_values(source), [node.input[0] for node in rounding], known
    )
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    folded = {}
    for node in rounding:
        operator = clipping.get(node.input[0])
        if operator is None or operator.op_type in (
            makers.get(node.input[0]),
            makers.get(operator.output[0]),
        ):
            continue
        levels = read_levels(node, tensors)
        if levels is not None and _ends_alike(operator, stored, *levels):
            folded[node.output[0]] = _copy_operator(operator, stored, tensors)
    return folded


def _map_clipping(
    original: onnx.ModelProto,
    replaceable: Collection[str],
    values: Iterable[str],
    known: Mapping[str, str],
) -> dict[str, onnx.NodeProto]:
    """Return the ReLU or Clip of the original for values of the quantized model.

    A value can have the name of the clipping operator's output or input. For a value with another
    name, the weight of the layer that computes the value identifies the operator.

    Args:
        replaceable: inputs of operators that a range can replace.
        known: values of the original by those of the quantized model, from their layers' weights.
    """
    operators = [node for node in original.graph.node if node.op_type in _CUTTING and node.input]
    by_input = {node.input[0]: node for node in operators}
    by_output = {node.output[0]: node for node in operators}
    clipping = {}
    for value in values:
        name = value.removesuffix(WRITTEN_SUFFIX)
        if name not in by_output and name not in replaceable:
            name = known.get(value, name)
        if name in by_output:
            clipping[value] = by_output[name]
        elif name in replaceable:
            clipping[value] = by_input[name]
    return clipping


def _copy_operator(
    operator: onnx.NodeProto,
    stored: Mapping[str, onnx.TensorProto],
    tensors: dict[str, onnx.TensorProto],
) -> onnx.NodeProto:
    """Return a copy of an operator.

    Copies of the operator's constants are added to `tensors` under new names.
    """
    made = copy.deepcopy(operator)
    for place, name in enumerate(operator.input):
        if place and name:
            made.input[place] = f"{name}.original"
            tensors[made.input[place]] = copy.deepcopy(stored[name])
            tensors[made.input[place]].name = made.input[place]
    return made


def _ends_alike(
    cutting: onnx.NodeProto,
    stored: dict[str, onnx.TensorProto],
    step: float,
    low: float,
    high: float,
) -> bool:
    """Return whether a range is within the operator's range, up to half a step.

    Return False if the limits of the operator are not constants.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dequantization:
    """The graph during the rewrite.

    `reader` has its constants, and `makers` the producers of values. `folded` are the clipping
    operators to restore, by QuantizeLinear output. `levels` are the quantized values that integer
    products read.
    """

    reader: StoredWeightReader
    folded: dict[str, onnx.NodeProto]
    makers: dict[str, onnx.NodeProto]
    levels: frozenset[str]

    def store(self, name: str, values: npt.NDArray[np.generic]) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper

        self.reader.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name


def _rewrite(node: onnx.NodeProto, work: _Dequantization) -> list[onnx.NodeProto]:
    from onnx import helper

    tensors = work.reader.tensors
    match node.op_type:
        case "QuantizeLinear" if node.output[0] in work.folded:
            cut = work.folded[node.output[0]]
            cut.input[0], cut.output[:] = node.input[0], node.output
            return [cut]
        case "QuantizeLinear" if node.output[0] in work.levels and node.input[0] not in tensors:
            return [helper.make_node("Div", node.input[:2], node.output)]
        case "QuantizeLinear" | "DequantizeLinear":
            return _rewrite_pair(node, work)
        case "DynamicQuantizeLinear":
            work.store(node.output[1], np.array(1, np.float32))
            work.store(node.output[2], np.array(0, np.uint8))
            return [helper.make_node("Identity", node.input[:1], node.output[:1])]
        case "MatMulInteger" | "ConvInteger":
            return [_float_product(node, work)]
        case "MatMulNBits" | "MatMulIntegerToFloat" | "DynamicQuantizeMatMul":
            return _rewrite_product(node, work)
        case "GatherBlockQuantized":
            return [_rewrite_table(node, work)]
        case _:
            return [node]


def _rewrite_pair(node: onnx.NodeProto, work: _Dequantization) -> list[onnx.NodeProto]:
    """Replace a QuantizeLinear or DequantizeLinear by float values.

    A computed value is passed on unchanged. A constant is replaced by its dequantized values; if
    its layout is unknown, the node remains.
    """
    from onnx import helper

    maker = work.makers.get(node.input[0])
    weight = work.reader.read_weight(node)
    if weight is None:
        return [
            node
            if node.input[0] in work.reader.tensors
            else helper.make_node("Identity", node.input[:1], node.output)
        ]
    name = work.store(f"{node.output[0]}.values", weight.values.astype(np.float32))
    if maker is not None and maker.op_type == "Gather":
        # The weight consists of selected rows of a table.
        chosen = helper.make_node("Gather", [name, maker.input[1]], node.output)
        chosen.attribute.extend(maker.attribute)
        return [chosen]
    return [helper.make_node("Identity", [name], node.output)]


def _rewrite_product(node: onnx.NodeProto, work: _Dequantization) -> list[onnx.NodeProto]:
    """Rewrite a fused product as MatMul and Add in float.

    Its activations are not rounded.
    """
    from onnx import helper

    place = {"MatMulNBits": 5, "MatMulIntegerToFloat": 6}.get(node.op_type, 4)
    bias = [*node.input[place : place + 1], ""][0]
    weight = work.reader.read_weight(node)
    if weight is None or (node.op_type == "MatMulNBits" and any(node.input[4:5])):
        raise MeasurementError(
            f"the rounding of {node.op_type} {node.name or node.output[0]} cannot be removed"
        )
    name = work.store(f"{node.output[0]}.weight", weight.values.astype(np.float32))
    product = f"{node.output[0]}.product" if bias else node.output[0]
    made = [helper.make_node("MatMul", [node.input[0], name], [product], name=node.name)]
    return [*made, helper.make_node("Add", [product, bias], node.output)] if bias else made


def _rewrite_table(node: onnx.NodeProto, work: _Dequantization) -> onnx.NodeProto:
    from onnx import helper

    weight = work.reader.read_weight(node)
    if weight is None:
        raise MeasurementError(
            f"the rounding of {node.op_type} {node.name or node.output[0]} cannot be removed"
        )
    name = work.store(f"{node.output[0]}.table", weight.values.astype(np.float32))
    axis = next((a.i for a in node.attribute if a.name == "gather_axis"), 0)
    return helper.make_node("Gather", [name, node.input[1]], node.output, name=node.name, axis=axis)


def _float_product(node: onnx.NodeProto, work: _Dequantization) -> onnx.NodeProto:
    """Rewrite an integer product as a float32 product of the levels.

    Later nodes apply the scales.
    """
    from onnx import helper, numpy_helper

    tensors = work.reader.tensors
    stored = tensors.get(node.input[1])
    if stored is None:
        inputs = list(node.input[:2])  # Earlier nodes have already converted both inputs to floats.
    else:
        levels = numpy_helper.to_array(stored).astype(np.float64)
        if len(node.input) > 3 and node.input[3] in tensors:
            zero = numpy_helper.to_array(tensors[node.input[3]]).astype(np.float64)
            centre = expand_scales(zero, levels.shape, 0 if node.op_type == "ConvInteger" else -1)
            if centre is None:
                raise MeasurementError(
                    f"the zero point of {node.op_type} {node.name} does not fit its weight"
                )
            levels = levels - centre
        inputs = [node.input[0], work.store(f"{node.input[1]}.float", levels.astype(np.float32))]
    made = helper.make_node(_INTEGER[node.op_type], inputs, node.output, name=node.name)
    made.attribute.extend(node.attribute)
    return made


def _widen(model: onnx.ModelProto) -> None:
    """Convert float16 and bfloat16 constants, inputs, outputs and casts to float32.

    Subgraphs are included. The recorded types of intermediate values are removed.
    """
    from onnx import numpy_helper

    for tensor in iterate_tensors(model):
        if tensor.data_type in _NARROW:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in iterate_graphs(model):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type in _NARROW:
                value.type.tensor_type.elem_type = _FLOAT
        for node in graph.node:
            types = ("to",) if node.op_type == "Cast" else ("dtype", "output_dtype")
            for attribute in node.attribute:
                if attribute.name in types and attribute.i in _NARROW:
                    attribute.i = _FLOAT
