"""Read the scales and ranges of quantized activations.

They are read from QuantizeLinear pairs and from integer operators.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import (
    collect_constants,
    get_opset,
    map_readers,
    read_model,
    share_structure,
)

if TYPE_CHECKING:
    import onnx

QUANTIZED_SUFFIX = "_quantized"
"""Suffix that ONNX Runtime's quantizers add to the name of a quantized tensor.

The rest of the name is the name of the original tensor.
"""

WRITTEN_SUFFIX = "_QuantizeLinear_Input"
"""Suffix of the name of a value before its quantization.

ONNX Runtime's quantizers add it if the dequantized value has the original's name.
"""

_AXIS_OPSET = 13
"""First opset in which DequantizeLinear has the attribute `axis`."""

_OPAQUE = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "MatMulInteger", "ConvInteger", "Shape", "Size"}
)
"""Operators that can take integers, but do not rearrange them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The roles of the inputs of an integer operator.

    `operands` has indices of values, each followed by its scale and zero point; `result` is the
    index of the result's scale. `dropped` lists attributes that the float operator lacks.
    """

    op_type: str
    operands: tuple[int, ...]
    result: int
    bias: int | None = None
    dropped: tuple[str, ...] = ()


_PAIR, _SINGLE = (0, 3), (0,)
_LAYOUTS: Mapping[str, _Layout] = {
    "QLinearConv": _Layout(op_type="Conv", operands=_PAIR, result=6, bias=8),
    "QLinearMatMul": _Layout(op_type="MatMul", operands=_PAIR, result=6),
    "QGemm": _Layout(op_type="Gemm", operands=_PAIR, result=7, bias=6),
    "QLinearAdd": _Layout(op_type="Add", operands=_PAIR, result=6),
    "QLinearMul": _Layout(op_type="Mul", operands=_PAIR, result=6),
    "QLinearSigmoid": _Layout(op_type="Sigmoid", operands=_SINGLE, result=3),
    "QLinearLeakyRelu": _Layout(op_type="LeakyRelu", operands=_SINGLE, result=3),
    "QLinearSoftmax": _Layout(op_type="Softmax", operands=_SINGLE, result=3, dropped=("opset",)),
    "QLinearAveragePool": _Layout(
        op_type="AveragePool", operands=_SINGLE, result=3, dropped=("channels_last",)
    ),
    "QLinearGlobalAveragePool": _Layout(
        op_type="GlobalAveragePool", operands=_SINGLE, result=3, dropped=("channels_last",)
    ),
}


@dataclass(slots=True)
class _Rewriting:
    """The new graph during the rewrite.

    `scales` has the scale and zero point of each integer value.
    """

    tensors: dict[str, onnx.TensorProto]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    added: list[onnx.TensorProto] = field(default_factory=list)
    scales: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """Return the name, with a number appended if the name is taken."""
        candidate, number = name, 0
        while candidate in self.names:
            number += 1
            candidate = f"{name}.{number}"
        self.names.add(candidate)
        return candidate

    def read(self, value: str, scale: tuple[str, ...], axis: int) -> str:
        """Dequantize an integer value, and return the name of the result."""
        from onnx import helper

        after = self.fresh(f"{value}.read")
        node = helper.make_node("DequantizeLinear", [value, *scale], [after])
        if scale[0] in self.tensors and math.prod(self.tensors[scale[0]].dims) > 1:
            node.attribute.append(helper.make_attribute("axis", axis))
        self.nodes.append(node)
        return after

    def write(self, value: str, scale: tuple[str, ...]) -> str:
        """Add a QuantizeLinear, and return the name of its float input.

        The name ends in `WRITTEN_SUFFIX`.
        """
        from onnx import helper

        before = value.removesuffix(QUANTIZED_SUFFIX) + WRITTEN_SUFFIX
        self.nodes.append(helper.make_node("QuantizeLinear", [before, *scale], [value]))
        self.scales[value] = scale
        return before


def expand_integer_operators(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Rewrite integer operators as float operators between quantization pairs.

    A model without integer operators is returned unchanged. Operators that rearrange integers
    (MaxPool, Reshape, Concat …) do not change the scale, and also get pairs. A reader that uses
    another scale than the producer is then detected as in a graph of pairs.

    Raises:
        MeasurementError: an integer operator cannot be read, or the opset is older than 13.
    """
    if not any(_is_integer(node) for node in model.graph.node):
        return model
    if (opset := get_opset(model)) < _AXIS_OPSET:
        remedy = f"Export the model with opset {_AXIS_OPSET} or later."
        raise MeasurementError(
            f"integer operators of opset {opset} cannot be read", where=where, remedy=remedy
        )
    expanded = copy.deepcopy(model)
    work = _Rewriting(tensors=collect_constants(model))
    work.names |= {name for node in model.graph.node for name in (*node.input, *node.output)}
    for node in model.graph.node:
        if node.op_type == "QLinearConcat" or node.op_type in _LAYOUTS:
            _expand(work, node)
        elif _is_integer(node):
            raise MeasurementError(f"integer operator {node.op_type} cannot be read", where=where)
        elif node.input and node.input[0] in work.scales and node.op_type not in _OPAQUE:
            _keep_scale(work, node)
        else:
            if node.op_type == "QuantizeLinear":
                work.scales[node.output[0]] = tuple(node.input[1:3])
            work.nodes.append(node)
    del expanded.graph.node[:]
    expanded.graph.node.extend(work.nodes)
    expanded.graph.initializer.extend(work.added)
    return expanded


def _keep_scale(work: _Rewriting, node: onnx.NodeProto) -> None:
    """Put an operator that rearranges integers between pairs.

    The scale of all pairs is that of the operator's first input.
    """
    scale = work.scales[node.input[0]]
    inputs = [
        work.read(name, scale, -1) if work.scales.get(name) == scale else name
        for name in node.input
    ]
    place = len(work.nodes)  # The new node belongs before the QuantizeLinear nodes of its outputs.
    moved = [work.write(name, scale) if name else "" for name in node.output]
    made = copy.deepcopy(node)
    made.input[:], made.output[:] = inputs, moved
    work.nodes.insert(place, made)


def refuse_channels_last(model: onnx.ModelProto, where: str) -> None:
    """Raise MeasurementError if integer operators have channels last.

    This layout comes from optimization for a processor.
    """
    for node in model.graph.node:
        if any(a.name == "channels_last" and a.i for a in node.attribute):
            remedy = "Judge the file as it was before ONNX Runtime optimized it for this processor."
            raise MeasurementError(
                f"{node.op_type} has channels last, a layout that cannot be read",
                where=where,
                remedy=remedy,
            )


def _is_integer(node: onnx.NodeProto) -> bool:
    return node.op_type in _LAYOUTS or node.op_type.startswith("QLinear")


def _expand(work: _Rewriting, node: onnx.NodeProto) -> None:
    from onnx import helper, numpy_helper

    layout = _LAYOUTS.get(node.op_type)
    # In QLinearConcat, the result's scale comes first, and any number of values follows.
    if layout is None:
        layout = _Layout(op_type="Concat", operands=tuple(range(2, len(node.input), 3)), result=0)
    axis = _find_weight_axis(node)
    inputs = [
        work.read(node.input[place], tuple(node.input[place + 1 : place + 3]), axis)
        for place in layout.operands
    ]
    if layout.bias is not None and len(node.input) > layout.bias and node.input[layout.bias]:
        # The step of a bias is the product of the scales of input and weight.
        name = node.input[layout.bias]
        one, other = (numpy_helper.to_array(work.tensors[node.input[place]]) for place in (1, 4))
        scale = work.fresh(f"{name}_scale")
        work.tensors[scale] = numpy_helper.from_array(
            np.asarray(one * other, dtype=np.float32), scale
        )
        work.added.append(work.tensors[scale])
        inputs.append(work.read(name, (scale,), 0))
    written = tuple(node.input[layout.result : layout.result + 2])
    place = len(work.nodes)
    result = work.write(node.output[0], written) if written and written[0] else node.output[0]
    made = helper.make_node(layout.op_type, inputs, [result], name=node.name)
    made.attribute.extend(a for a in node.attribute if a.name not in layout.dropped)
    work.nodes.insert(place, made)


def _find_weight_axis(node: onnx.NodeProto) -> int:
    """Return the axis of a weight that has a scale for each channel.

    It is the axis of the output channels.
    """
    if node.op_type == "QLinearConv":
        return 0
    if node.op_type == "QGemm":
        return 0 if any(a.name == "transB" and a.i for a in node.attribute) else 1
    return -1


_FOLDED = ("Relu", "Clip")
_BOUNDED = frozenset({"Softmax", "Sigmoid", "HardSigmoid", "Tanh"})

_WIDEST = 2
"""Maximum bytes of a level: activations have 8 or 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedActivation:
    """A QuantizeLinear with constant parameters, followed by a DequantizeLinear.

    `name` is the float value before the pair, `origin` its name in the float export, and `read` the
    value after the pair. `low` and `high` are the values of the smallest and the largest level, and
    `step` is the distance of levels. A range that begins at 0 can clip intentionally, if a ReLU was
    folded into it.
    """

    name: str
    origin: str
    read: str
    step: float
    low: float
    high: float


def read_quantized_activations(path: Path) -> tuple[QuantizedActivation, ...]:
    """Return the quantization pairs with one constant scale, in graph order.

    Integer operators (QLinearConv …) are included as their equivalent pairs:
    `expand_integer_operators`. Pairs of constants are omitted. Pairs that `read_levels` cannot read
    are also omitted, such as those with computed scales (dynamic quantization) or scales by
    channel. Errors are those of `read_model`, and the following.

    Raises:
        MeasurementError: an integer operator cannot be read (see `expand_integer_operators`), or
            has channels last.
    """
    model = read_model(path)
    refuse_channels_last(model, path.name)
    model = expand_integer_operators(model, path.name)
    stored = collect_constants(model)
    readers: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            readers.setdefault(node.input[0], []).append(node.output[0])
    activations = []
    for node in model.graph.node:
        if (
            node.op_type != "QuantizeLinear"
            or node.input[0] in stored
            or not (levels := read_levels(node, stored))
        ):
            continue
        step, low, high = levels
        activations += [
            QuantizedActivation(
                name=node.input[0],
                origin=node.input[0].removesuffix(WRITTEN_SUFFIX),
                read=read,
                step=step,
                low=low,
                high=high,
            )
            for read in readers.get(node.output[0], ())
        ]
    return tuple(activations)


def find_folded_values(path: Path) -> dict[str, str]:
    """Return the output of each ReLU or Clip that a range can replace, by its input.

    The ReLU or Clip is the only reader of the input in the main graph, and the input is not an
    output.
    """
    graph = share_structure(path).graph
    outputs = {value.name for value in graph.output}
    return {
        name: nodes[0].output[0]
        for name, nodes in map_readers(graph.node).items()
        if len(nodes) == 1
        and nodes[0].op_type in _FOLDED
        and nodes[0].input[0] == name
        and name not in outputs
    }


def find_bounded_values(path: Path) -> frozenset[str]:
    """Return the outputs of functions with a fixed range, such as Softmax.

    A quantizer can use this range, whatever the calibration rows are.
    """
    return frozenset(
        node.output[0] for node in share_structure(path).graph.node if node.op_type in _BOUNDED
    )


def read_levels(
    node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]
) -> tuple[float, float, float] | None:
    """Return step, lowest and highest value of a QuantizeLinear.

    Return None if the scale or the zero point is missing, computed or different by channel. Also
    return None if the scale is not positive and finite, or for other levels than integers of at
    most 16 bits.
    """
    from onnx import numpy_helper

    if len(node.input) < 3 or not {node.input[1], node.input[2]} <= set(stored):
        return None
    scale, zero = (numpy_helper.to_array(stored[name]) for name in node.input[1:3])
    if (
        scale.size != 1
        or zero.size != 1
        or zero.dtype.kind not in "iu"
        or zero.dtype.itemsize > _WIDEST
    ):
        return None
    limits, step, centre = np.iinfo(zero.dtype), float(scale.item()), int(zero.item())
    if not (np.isfinite(step) and step > 0):
        return None
    return step, (int(limits.min) - centre) * step, (int(limits.max) - centre) * step
