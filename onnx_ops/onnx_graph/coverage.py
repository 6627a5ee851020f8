"""Int8 coverage: which matrix products and convolutions a runtime really runs in int8, and why others stay in float.

A quantized file is a wish: QuantizeLinear pairs around an operator that the runtime fuses into an int8 operator, or
does not, and then the operator runs in float with the conversions on top. What became of it stands in the graph as the
runtime has rewritten it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.structure import FloatOperator, Int8Coverage
from onnx_ops.onnx_graph.files import read_structure

if TYPE_CHECKING:
    import onnx

INT8_OPERATORS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
"""What matrix products and convolutions become in int8."""

_FLOAT_OPERATORS = frozenset(
    {"Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "NhwcFusedConv", "TransposeMatMul"}
)
_WITHOUT_KERNEL = frozenset({"ConvTranspose"})
_KINDS = {
    "FusedConv": "Conv",
    "FusedGemm": "Gemm",
    "FusedMatMul": "MatMul",
    "NhwcFusedConv": "Conv",
    "TransposeMatMul": "MatMul",
}

_AFFIXES = re.compile(r"^fused |(?:_token_\d+|_nchwc|_quant|_MatMul|/\w+Fusion)$")
"""What the quantizers and the runtime put around a node's name when they rewrite it."""

FUSE = "target file: session: {graph_level: all}"
"""The setting with which the runtime fuses pairs into operators."""

_INT8 = 3


@dataclass(frozen=True, slots=True)
class _Graph:
    """The rewritten graph: who makes a value, who reads it, and what is stored."""

    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, Sequence[onnx.NodeProto]]
    types: Mapping[str, int]

    def constant(self, name: str) -> bool:
        """Stored as it is, or behind a DequantizeLinear."""
        maker = self.makers.get(name)
        if maker is not None and maker.op_type in ("DequantizeLinear", "Constant", "Transpose"):
            return maker.op_type == "Constant" or self.constant(maker.input[0])
        return name in self.types


def int8_coverage(source: Path, rewritten: Path, excluded: Iterable[str] = ()) -> Int8Coverage:
    """Which operators of a quantized variant run in int8.

    Args:
        source: the float export, whose names are told.
        rewritten: the variant's graph as the runtime runs it.
        excluded: names of nodes that were to stay in float.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the files.
    """
    names = _names(read_structure(source))
    model = read_structure(rewritten)
    graph = _graph(model)
    kept = set(excluded)
    int8: list[str] = []
    floats: list[FloatOperator] = []
    for node in model.graph.node:
        name = _told(node, names)
        if node.op_type in INT8_OPERATORS:
            int8.append(name)
        elif node.op_type in _FLOAT_OPERATORS | _WITHOUT_KERNEL:
            reason, setting = ("excluded", "") if name in kept else _reason(node, graph)
            kind = _KINDS.get(node.op_type, node.op_type)
            floats.append(FloatOperator(name=name, op_type=kind, reason=reason, setting=setting))
    return Int8Coverage(int8=tuple(int8), floats=tuple(floats), unheeded=tuple(name for name in int8 if name in kept))


def _reason(node: onnx.NodeProto, graph: _Graph) -> tuple[str, str]:
    """Why the node runs in float, and the setting that mends it."""
    if node.op_type in _WITHOUT_KERNEL:
        return f"the runtime has no int8 kernel for {node.op_type}", ""
    makers = [graph.makers.get(name) for name in node.input[:2]]
    read = [maker is not None and maker.op_type == "DequantizeLinear" for maker in makers]
    weight = graph.constant(node.input[1])
    if not weight and not all(read):
        return "both of its inputs are computed: it has no constant weight", "method: static, which takes such products"
    if not read[0]:
        maker = makers[0]
        reason = f"its input is not quantized: it comes in float from {maker.op_type if maker else 'the model input'}"
        return reason, f"name {_KINDS.get(node.op_type, node.op_type)} in `options.op_types`, or leave op_types out"
    levels = makers[0].input[2] if makers[0] is not None and len(makers[0].input) > 2 else ""
    if graph.types.get(levels) == _INT8:
        reason = "its QuantizeLinear pair is not fused: activations are int8, kernels of x86 take uint8"
        return reason, "options: {activations: uint8}"
    if not weight and not read[1]:
        return "its QuantizeLinear pair is not fused: the second input is not quantized", "leave `options.op_types` out"
    after = [reader.op_type for reader in graph.readers.get(node.output[0], ())]
    if "QuantizeLinear" not in after:
        follows = after[0] if after else "the model output"
        reason = f"its QuantizeLinear pair is not fused: {follows} follows instead of QuantizeLinear"
        return reason, f"name {after[0]} in `options.op_types`, or exclude the operator" if after else ""
    return "its QuantizeLinear pair is not fused, though input and output are quantized", FUSE


def _graph(model: onnx.ModelProto) -> _Graph:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return _Graph(
        makers={name: node for node in model.graph.node for name in node.output},
        readers=readers,
        types={tensor.name: tensor.data_type for tensor in model.graph.initializer},
    )


def _names(model: onnx.ModelProto) -> dict[str, str]:
    """The name of each node by itself and by what it computes, which is what a node without a name is called."""
    found: dict[str, str] = {}
    for node in model.graph.node:
        called = node.name or node.output[0]
        found |= dict.fromkeys((called, *node.output), called)
    return found


def _told(node: onnx.NodeProto, names: Mapping[str, str]) -> str:
    """The node's name in the export; its own where that cannot be told."""
    name, before = node.name, ""
    while name != before:
        if name in names:
            return names[name]
        before, name = name, _AFFIXES.sub("", name, count=1)
    return names.get(node.output[0], node.name or node.output[0])
