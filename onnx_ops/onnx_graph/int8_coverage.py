"""Report which operators a target runs in int8.

The report also has the reasons why other operators stay in float, and the settings that change
this. A statically quantized file has QuantizeLinear pairs around an operator. The runtime either
fuses them into an int8 operator, or runs the operator in float with additional conversions. Only
the graph that the runtime has rewritten shows which of these cases applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.evidence import Advice, FloatOperator, Int8Coverage
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.files import (
    collect_constants,
    iterate_graphs,
    iterate_nodes,
    map_readers,
    read_model,
    read_structure,
    share_structure,
)
from onnx_ops.onnx_graph.model_summary import RECURRENT
from onnx_ops.onnx_graph.saturation import find_saturating_weights

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
"""The int8 forms of matrix products and convolutions."""


_WITHOUT_KERNEL = frozenset({"ConvTranspose"})
_KINDS = {
    **{name: name for name in ("Conv", "ConvTranspose", "Gemm", "MatMul")},
    "FusedConv": "Conv",
    "FusedGemm": "Gemm",
    "FusedMatMul": "MatMul",
    "NhwcFusedConv": "Conv",
    "TransposeMatMul": "MatMul",
    **{name: name for name in RECURRENT},
}
"""Operator of each float product, convolution and recurrent layer, by type.

The types include ONNX Runtime's fused forms.
"""

_AFFIXES = re.compile(r"^fused |(?:_token_\d+|_nchwc|_quant|_MatMul|/\w+Fusion)$")
"""Affixes that quantizers and the runtime add to the name of a rewritten node."""

FUSE = "target file: session: {graph_level: all}"
"""A setting with which the runtime fuses QuantizeLinear pairs."""
_UNFUSED_LEVELS = ("disabled", "basic")

_FLOAT, _UINT8, _INT8, _UINT16, _HALF = 1, 2, 3, 4, 10
_SLOW_SETTINGS = {
    "session.x64quantprecision": "2.9 times the time; reduce_range also prevents wrong sums",
    "session.qdqisint8allowed": "3.7 times the time: activations become int8, "
    "which x86 kernels do not accept",
}
_DYNAMIC = ("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat")


_RECURRENT_REASON = (
    "recurrent layers stay in float: with 8 bits, the rounding errors of their state would add up "
    "from step to step"
)


def quantizes_activations(model: onnx.ModelProto) -> bool:
    """Return whether a model computes in integers.

    A model computes in integers if it quantizes computed values, or has integer operators.
    """
    stored = set(collect_constants(model))
    return any(
        node.op_type in INT8_OPERATORS
        or node.op_type == "DynamicQuantizeLinear"
        or node.op_type.startswith("QLinear")
        or (node.op_type == "QuantizeLinear" and node.input[0] not in stored)
        for node in iterate_nodes(model)
    )


@dataclass(frozen=True, slots=True)
class _Graph:
    """The rewritten graph with its subgraphs.

    `makers` and `readers` are the producers and consumers of values, and `types` the element types
    of stored constants. `inner` are the values of subgraphs. `dynamic` is True if ranges are
    computed in each run.
    """

    nodes: Sequence[onnx.NodeProto]
    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, Sequence[onnx.NodeProto]]
    types: Mapping[str, int]
    inner: frozenset[str]
    dynamic: bool

    def constant(self, name: str) -> bool:
        """Return whether a value is a constant, also a dequantized or transposed one."""
        maker = self.makers.get(name)
        if maker is not None and maker.op_type in ("DequantizeLinear", "Constant", "Transpose"):
            return maker.op_type == "Constant" or self.constant(maker.input[0])
        return name in self.types


def measure_int8_coverage(
    source: Path, rewritten: Path, excluded: Iterable[str] = ()
) -> Int8Coverage:
    """Return which operators of a quantized variant run in int8.

    Args:
        source: the float export, whose node names are reported.
        rewritten: the variant's graph as the runtime runs it.
        excluded: names of the operators that were to stay in float.
    """
    names = _list_names(source)
    graph = _read_graph(rewritten)
    excluded_names = set(excluded)
    int8: list[str] = []
    floats: list[FloatOperator] = []
    for node in graph.nodes:
        name = _find_name(node, names)
        if node.op_type in INT8_OPERATORS or node.op_type == "DynamicQuantizeLSTM":
            int8.append(name)
        elif kind := _KINDS.get(node.op_type):
            reason, setting = (
                ("excluded", "") if name in excluded_names else _explain_float(node, graph)
            )
            floats.append(FloatOperator(name=name, op_type=kind, reason=reason, setting=setting))
    unheeded = tuple(name for name in int8 if name in excluded_names)
    return Int8Coverage(int8=tuple(int8), floats=tuple(floats), unheeded=unheeded)


def _list_names(source: Path) -> dict[str, str]:
    """Return the name of each node, by its name and by its outputs.

    The name of a node without a name is its first output.
    """
    names: dict[str, str] = {}
    for node in iterate_nodes(share_structure(source)):
        called = node.name or node.output[0]
        names |= dict.fromkeys((called, *node.output), called)
    return names


def _find_name(node: onnx.NodeProto, names: Mapping[str, str]) -> str:
    """Return the name of a node in the float export.

    Quantizers and the runtime rename nodes. If the original name is unknown, the present name of
    the node is returned.
    """
    name, before = node.name, ""
    while name not in names and name != before:
        before, name = name, _AFFIXES.sub("", name, count=1)
    original = name and names.get(name)
    return original or names.get(node.output[0], node.name or node.output[0])


def _read_graph(rewritten: Path) -> _Graph:
    model = read_structure(rewritten)
    graphs = list(iterate_graphs(model))
    inner = [node for subgraph in graphs[1:] for node in subgraph.node]
    nodes = [*model.graph.node, *inner]
    return _Graph(
        nodes=nodes,
        makers={value: node for node in nodes for value in node.output},
        readers=map_readers(nodes),
        types={
            tensor.name: tensor.data_type for subgraph in graphs for tensor in subgraph.initializer
        },
        inner=frozenset(value for node in inner for value in node.output),
        dynamic=any(node.op_type in _DYNAMIC for node in nodes),
    )


def _explain_float(node: onnx.NodeProto, graph: _Graph) -> tuple[str, str]:
    """Return why a node runs in float, and the setting that changes this."""
    return (
        _explain_unreached(node, graph)
        or _explain_unquantized(node, graph)
        or _explain_unfused(node, graph)
    )


def _explain_unreached(node: onnx.NodeProto, graph: _Graph) -> tuple[str, str] | None:
    """Return why no quantizer handles the node, and the setting that changes this.

    Return None if a quantizer handles the node.
    """
    if node.op_type in _WITHOUT_KERNEL:
        return f"the runtime has no int8 kernel for {node.op_type}", ""
    if node.op_type in RECURRENT:
        return _RECURRENT_REASON, ""
    if node.output[0] in graph.inner:
        return "it is in a subgraph of If, Loop or Scan, which the quantizer did not rewrite", ""
    if graph.dynamic and _KINDS[node.op_type] == "Conv":
        return (
            "dynamic quantization leaves convolutions in float, because it would slow them down",
            "method: static",
        )
    return None


def _explain_unquantized(node: onnx.NodeProto, graph: _Graph) -> tuple[str, str] | None:
    """Return why an input of the node is not quantized, and the setting to change.

    Return None if the first input is quantized, and the second one is quantized or constant.
    """
    first, second = (graph.makers.get(name) for name in node.input[:2])
    is_first_quantized, is_second_quantized = (
        maker is not None and maker.op_type == "DequantizeLinear" for maker in (first, second)
    )
    if not graph.constant(node.input[1]) and not (is_first_quantized and is_second_quantized):
        reason = "its second input is computed: it has no constant weight"
        kind = _KINDS[node.op_type]
        return reason, f"method: static; name {kind} in `options.op_types`, or leave op_types out"
    if not is_first_quantized:
        reason = (
            "its input is not quantized: "
            f"{first.op_type if first else 'the model input'} supplies it in float"
        )
        return reason, f"name {_KINDS[node.op_type]} in `options.op_types`, or leave op_types out"
    return None


def _explain_unfused(node: onnx.NodeProto, graph: _Graph) -> tuple[str, str]:
    """Return why a node is not fused with its pairs, and the setting to change.

    The input of the node is quantized.
    """
    read = graph.makers[node.input[0]]
    zero_point = read.input[2] if len(read.input) > 2 else ""
    if graph.types.get(zero_point) == _INT8:
        reason = (
            "its QuantizeLinear pair is not fused: activations are int8, "
            "but x86 kernels accept uint8"
        )
        return reason, "options: {activations: uint8}"
    after = [reader.op_type for reader in graph.readers.get(node.output[0], ())]
    if "QuantizeLinear" in after:
        return "its QuantizeLinear pair is not fused, though input and output are quantized", FUSE
    if not after:
        return (
            (
                "its QuantizeLinear pair is not fused: the model output follows instead of "
                "QuantizeLinear"
            ),
            "",
        )
    reason = f"its QuantizeLinear pair is not fused: {after[0]} follows instead of QuantizeLinear"
    return reason, f"name {after[0]} in `options.op_types`, or exclude the operator"


def advise(
    variant: Path,
    rewritten: Path,
    target: Target,
    machine: Arithmetic,
    coverage: Int8Coverage | None,
) -> tuple[Advice, ...]:
    """Return all advice on a variant.

    The order is: element types, settings, operators in float, conversions and casts.

    Args:
        rewritten: the variant's graph as the runtime runs it on the target.
        coverage: which operators run in int8, with reasons; None for a float variant.
    """
    model, run = read_structure(variant), read_structure(rewritten)
    kinds = {node.op_type for node in (*model.graph.node, *run.graph.node)}
    # The weights can be gigabytes, so they are read only if the model is quantized.
    if kinds & {
        "DequantizeLinear",
        "QuantizeLinear",
        *_DYNAMIC,
    }:
        model = read_model(variant)
    advice = [*_list_type_advice(model, machine), *_list_setting_advice(target, machine, kinds)]
    if coverage is not None:
        shared: dict[tuple[str, str], list[str]] = {}
        fuses_already = target.session.graph_level not in _UNFUSED_LEVELS
        for operator in coverage.floats:
            if operator.setting and not (fuses_already and operator.setting == FUSE):
                shared.setdefault((operator.reason, operator.setting), []).append(operator.name)
        for (reason, setting), names in shared.items():
            operators = (
                "1 operator stays in float, because"
                if len(names) == 1
                else f"{len(names)} operators stay in float, each because"
            )
            finding = f"{operators} {reason}"
            advice.append(Advice(finding=finding, setting=setting, nodes=tuple(names)))
        if coverage.unheeded:
            finding = (
                "excluded operators run in int8: the runtime fuses each operator with the "
                "QuantizeLinear and DequantizeLinear nodes of its neighbours"
            )
            setting = "exclude the operators before and after them too"
            advice.append(Advice(finding=finding, setting=setting, nodes=coverage.unheeded))
    return (*advice, *_list_conversion_advice(run), *_list_cast_advice(run))


def _list_type_advice(model: onnx.ModelProto, machine: Arithmetic) -> Iterator[Advice]:
    """Yield advice on the element types of quantized activations and weights."""
    activations, weights = _read_element_types(model)
    if _UINT16 in activations:
        finding = "activations of 16 bits take longer than float32 does"
        yield Advice(finding=finding, setting="options: {activations: uint8}")
    if machine.family != "x86":
        return
    if _INT8 in activations:
        finding = (
            "activations are int8: x86 kernels accept uint8, so operators stay in float or run "
            "slowly"
        )
        yield Advice(finding=finding, setting="options: {activations: uint8}")
    if _UINT8 in weights:
        finding = "weights are uint8: x86 kernels are optimized for int8 weights"
        yield Advice(finding=finding, setting="options: {weights: int8}")
    if machine.saturates and find_saturating_weights(model):
        finding = (
            "weights use all 8 bits and the CPU lacks VNNI: sums of products can saturate, "
            "and answers can be wrong"
        )
        setting = "options: {reduce_range: true}, or omit the option: the target then decides"
        yield Advice(finding=f"{finding} without a warning", setting=setting)


def _read_element_types(model: onnx.ModelProto) -> tuple[set[int], set[int]]:
    """Return the element types of quantized activations, and of quantized weights."""
    stored = collect_constants(model)
    activations: set[int] = set()
    weights: set[int] = set()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in stored:
            activations |= {stored[name].data_type for name in node.input[2:3] if name in stored}
        elif node.op_type == "DequantizeLinear" and node.input[0] in stored:
            weights.add(stored[node.input[0]].data_type)
        elif node.op_type in _DYNAMIC and node.input[1] in stored:
            weights.add(stored[node.input[1]].data_type)
            activations.add(_UINT8)
    return activations, weights


def _list_setting_advice(target: Target, machine: Arithmetic, kinds: set[str]) -> Iterator[Advice]:
    """Yield advice on the target's session, and on the method of quantization."""
    session = target.session
    if "DequantizeLinear" in kinds and session.graph_level in _UNFUSED_LEVELS:
        finding = (
            f"at graph level {session.graph_level} no QuantizeLinear pair is fused into an int8 "
            "operator"
        )
        yield Advice(finding=finding, setting=FUSE)
    for name, cost in _SLOW_SETTINGS.items() if "DequantizeLinear" in kinds else ():
        if machine.family == "x86" and session.config.get(name) == "1":
            yield Advice(
                finding=f"{name}: {cost}",
                setting=f"target file: leave {name} out of session.config",
            )
    if "ConvInteger" in kinds:
        finding = (
            "convolutions compute their ranges in each run, which takes many times as long as "
            "float32"
        )
        yield Advice(finding=finding, setting="method: static")
    if "MatMulNBits" in kinds and machine.family in ("x86", "arm"):
        finding = (
            "weights in blocks are unpacked in each run: on a CPU this saves memory and no time"
        )
        yield Advice(finding=finding, setting="method: dynamic or static, to reduce time")


def _list_conversion_advice(run: onnx.ModelProto) -> Iterator[Advice]:
    """Yield advice on float operators between int8 operators."""
    makers = {name: node for node in run.graph.node for name in node.output}
    between: dict[str, list[str]] = {}
    for node in run.graph.node:
        if node.op_type == "QuantizeLinear":
            maker = makers.get(node.input[0])
            # For an operator of these kinds, the coverage already states the reason.
            if maker is None or maker.op_type in _KINDS:
                continue
            sources = [makers[name] for name in maker.input if name in makers]
            if any(source.op_type in ("DequantizeLinear", *_DYNAMIC) for source in sources):
                between.setdefault(maker.op_type, []).append(maker.name or maker.output[0])
    for kind, names in sorted(between.items()):
        finding = (
            f"{len(names)} {kind} in float between int8 operators: "
            "each has a conversion before and after"
        )
        setting = (
            f"name {kind} in `options.op_types`; if it has no int8 kernel, exclude its neighbours"
        )
        yield Advice(finding=finding, setting=setting, nodes=tuple(names))


def _list_cast_advice(run: onnx.ModelProto) -> Iterator[Advice]:
    """Yield advice on casts between float16 and float32 within the graph."""
    halves = any(tensor.data_type == _HALF for tensor in run.graph.initializer)
    types = (_HALF, _FLOAT) if halves else (_HALF,)
    edges = {value.name for value in (*run.graph.input, *run.graph.output)}
    inner = [
        node.name or node.output[0]
        for node in run.graph.node
        if node.op_type == "Cast"
        and not edges.intersection((*node.input, *node.output))
        and next((a.i for a in node.attribute if a.name == "to"), 0) in types
    ]
    if inner:
        finding = f"{len(inner)} casts between float16 and float32 within the graph"
        yield Advice(
            finding=f"{finding}: the runtime has no float16 kernel for the operators around them",
            setting="options: {keep: [their types]}, or do not use this variant on this target",
            nodes=tuple(inner),
        )
