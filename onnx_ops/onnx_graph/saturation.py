"""Find weights whose products with uint8 activations overflow 16 bits.

This happens on an x86 CPU without VNNI. There, ONNX Runtime multiplies uint8 activations by int8
weights with `vpmaddubsw`. This instruction adds neighbouring products in pairs and saturates each
sum at 16 bits (Intel 64 Software Developer's Manual, PMADDUBSW). Answers can then be wrong without
any error message. Two weights of the same sign are safe if they add up to at most 128, since
255 * 128 < 2**15. Weights of 7 bits are therefore always safe. Products of other types and of
depthwise convolutions are added in 32 bits; `_WEIGHT_INPUTS` describes ConvInteger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from onnx_ops.onnx_graph.files import collect_constants

if TYPE_CHECKING:
    import onnx

_UINT8, _INT8 = 2, 3

SAFE_SUM = 128
"""Largest sum of two weights of the same sign that never overflows, in steps.

With such weights, no pair of uint8 activations overflows the sum of products.
"""

_WEIGHT_INPUTS: Mapping[str, tuple[int, int]] = {
    "DynamicQuantizeMatMul": (1, -1),
    "MatMulInteger": (1, 2),
    "MatMulIntegerToFloat": (1, 4),
    "QGemm": (3, 2),
    "QLinearConv": (3, 2),
    "QLinearMatMul": (3, 2),
}
"""Indices of the weight and of the activations' zero point, by integer operator.

-1 stands for activations that are always uint8. ConvInteger is missing, since its products of int8
weights and uint8 activations are exact. ONNX Runtime multiplies its weights by the activations, so
the first factor is int8. Its products of uint8 weights and int8 activations saturate, but
DynamicQuantizeLinear returns uint8 activations only.
"""

_PAIRED = frozenset({"Conv", "Gemm", "MatMul"})
"""Operators that the runtime replaces by integer operators.

Both of their inputs must come from DequantizeLinear.
"""

_MOVES = frozenset({"DequantizeLinear", "Identity", "Reshape", "Transpose"})
"""Operators that do not change the levels of a weight."""


def find_saturating_weights(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return int8 weights whose products with uint8 activations can saturate, sorted.

    Subgraphs are not searched.
    """
    stored = collect_constants(model)
    return tuple(
        sorted({name for name in _list_mixed_weights(model, stored) if _can_overflow(stored[name])})
    )


def _list_mixed_weights(
    model: onnx.ModelProto, stored: Mapping[str, onnx.TensorProto]
) -> Iterator[str]:
    """Yield the int8 weights whose products with uint8 activations are added in pairs."""
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        if node.op_type in _WEIGHT_INPUTS:
            weight, place = _WEIGHT_INPUTS[node.op_type]
            zero = node.input[place] if 0 <= place < len(node.input) else ""
        elif node.op_type in _PAIRED and (reader := makers.get(node.input[0])) is not None:
            if reader.op_type != "DequantizeLinear":
                continue
            weight, zero = 1, reader.input[2] if len(reader.input) > 2 else ""
        else:
            continue
        name = _find_stored(node.input[weight], makers)
        if (
            name not in stored
            or stored[name].data_type != _INT8
            or _is_depthwise(node, stored[name])
        ):
            continue
        # Without a stored zero point, the type is uint8.
        if zero not in stored or stored[zero].data_type == _UINT8:
            yield name


def _find_stored(name: str, makers: Mapping[str, onnx.NodeProto]) -> str:
    """Return the constant behind a value, directly or through moving operators."""
    while (maker := makers.get(name)) is not None and maker.op_type in _MOVES:
        name = maker.input[0]
    return name


def _is_depthwise(node: onnx.NodeProto, weight: onnx.TensorProto) -> bool:
    """Return whether each group of a convolution has one input and one output channel."""
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    return node.op_type in ("Conv", "QLinearConv") and [*weight.dims[:2]] == [groups, 1]


def _can_overflow(weight: onnx.TensorProto) -> bool:
    """Return whether two levels of the same sign add up to more than `SAFE_SUM`."""
    from onnx import numpy_helper

    levels = numpy_helper.to_array(weight).astype(np.int16).ravel()
    if levels.size < 2:
        return False
    ends = np.partition(levels, (1, -2)) if levels.size > 2 else np.sort(levels)
    return bool(max(ends[-1] + ends[-2], -(ends[0] + ends[1])) > SAFE_SUM)
