"""Copies of a model that also compute how far rounding may move each element of its answers.

The error is a first-order running error analysis in float32 (Higham, Accuracy and Stability of Numerical Algorithms,
2002, section 3.3), back to the last linear operators before an output: such an operator errs by u (|W| |h| + |b|).
The usual factor of sqrt(n) for n terms (section 2.8) is left out of products, whose kernels sum in blocks: with it, ten
times the floor hides 1.2 % of the injected faults of `benchmarks.truth.parity`, without it .5 %, and no correct export
comes closer than to a third of the limit. Sums of one term after the other have it. The operators after it pass the
error on by their slopes, and add what their kernels err.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.files import DEFAULT_DOMAINS, collect_constants, get_opset, read_structure, write_model

if TYPE_CHECKING:
    import onnx

EPSILON = 2.0**-23
"""Spacing of float32 relative to its values."""

_EPSILON_DOUBLE = 2.0**-52

ROUNDOFF = EPSILON / 2
"""Largest relative error of one rounding to float32."""

_ML = "ai.onnx.ml"
_MICROSOFT = "com.microsoft"
_FLOAT, _DOUBLE = 1, 11
_FLOATS = frozenset({1, 10, 11, 16})
"""Element types: float32, float16, float64, bfloat16."""

_OLDEST_OPSET = 9
"""The first one with Where and ConstantOfShape."""

_MOST_STEPS = 200
"""Operators between an output and the last linear one; beyond them the own rounding of an operator has to do."""

KERNEL_ERRORS: Mapping[str, float] = {
    "Atan": 1.0,
    "Celu": 0.5,
    "Elu": 0.5,
    "Erf": 0.5,
    "Gelu": 0.5,
    "HardSigmoid": 0.25,
    "HardSwish": 0.5,
    "Log": 0.5,
    "Mish": 1.0,
    "Selu": 1.0,
    "Sigmoid": 0.5,
    "Softplus": 0.5,
    "Tanh": 1.0,
}
"""Absolute errors of ONNX Runtime's float32 kernels beyond eps |y|, in units of eps, at most 2.5 times too small: the
largest distance from float64 over the 2.6 million arguments of `benchmarks.kernel_errors`."""

_SLOPES: Mapping[str, float] = {
    "Abs": 1.0,
    "Atan": 1.0,
    "Celu": 1.0,
    "Clip": 1.0,
    "Cos": 1.0,
    "Elu": 1.0,
    "Erf": 1.13,
    "Gelu": 1.13,
    "HardSigmoid": 0.2,
    "HardSwish": 1.5,
    "LeakyRelu": 1.0,
    "Mish": 1.1,
    "Neg": 1.0,
    "PRelu": 1.0,
    "Relu": 1.0,
    "Selu": 1.76,
    "Sin": 1.0,
    "Softplus": 1.0,
    "Softsign": 1.0,
    "ThresholdedRelu": 1.0,
}
"""Steepest slopes of functions of one argument."""

_SAME_SHAPE = frozenset({*_SLOPES, "Cast", "Dropout", "Exp", "Identity", "Log", "Pow", "Reciprocal", "Sigmoid"}) | {
    *("LogSoftmax", "Softmax", "Sqrt", "Tanh", "Add", "Div", "Mul", "Sub", "BatchNormalization", "LayerNormalization")
}
_MOVES = frozenset(
    {
        "ArrayFeatureExtractor",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "MaxPool",
        "ReduceMax",
    }
    | {"GlobalMaxPool", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu"}
    | {"Unsqueeze"}
)
"""Operators that move elements of their first input, or choose among them."""

_RESHAPES = frozenset({"Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_SUMS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceL1", "ReduceMean", "ReduceSum"})
_WITH_CHANNELS = frozenset({"Conv", "ConvTranspose", "InstanceNormalization", "MaxPool", "AveragePool", "Resize"})
_EXACT = frozenset(
    {
        "And",
        "ArgMax",
        "ArgMin",
        "Binarizer",
        "Ceil",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "Floor",
        "Greater",
        "IsNaN",
    }
    | {"GreaterOrEqual", "IsInf", "LabelEncoder", "Less", "LessOrEqual", "NonMaxSuppression", "NonZero", "Not", "Or"}
    | {"OneHot", "OneHotEncoder", "Range", "Round", "Shape", "Sign", "Size", "Xor"}
)
"""Operators whose answers do not round: they are right or wrong."""

_INDICES = ("ArgMax", "ArgMin", "TopK")
_RANKINGS = ("ArgMax", "ArgMin", "NonMaxSuppression")
_CLASSES = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")
_BEHIND_INDICES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

_Rule: TypeAlias = "Callable[[_Builder, onnx.NodeProto, str], str | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingOutputs:
    """The additional outputs of a copy that describe one output of the model.

    Args:
        error: the error of each element.
        axis: axis of the output's columns: 1, the channels, behind a convolution, else the last.
        segments: the number of the part that each element comes from, if the output is joined from several.
        scores: what an output of indices or classes ranks, along `scores_axis`, with the error `scores_error`.
        labels: the class of each index, if the output holds classes.
    """

    error: str = ""
    axis: int = -1
    segments: str = ""
    scores: str = ""
    scores_error: str = ""
    scores_axis: int = -1
    labels: npt.NDArray[Any] | None = None


def list_ranked_outputs(path: Path) -> frozenset[str]:
    """List the outputs of the main graph that depend on a ranking, but are no indices themselves.

    They jump where two scores change places: boxes, for example, in the order of their scores.
    """
    model = read_structure(path)
    ranked: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "TopK":  # its values are sorted, and do not jump
            ranked.update(node.output[1:])
        if node.op_type in _RANKINGS or not ranked.isdisjoint(node.input):
            ranked.update(node.output)
    ranked.discard("")
    builder = _Builder(model)
    names = [value.name for value in model.graph.output if value.name in ranked]
    return frozenset(name for name in names if builder.find_ranking(name) is None)


def write_with_rounding_errors(path: Path, copy: Path) -> dict[str, RoundingOutputs]:
    """Write a copy that also computes the rounding errors of the outputs.

    Weights outside the file are not read: the copy refers to the same files, and so must be in the same folder.

    Returns:
        The additional outputs by output; empty, and no file, for a model older than opset 9.

    Raises:
        as `read_structure` does.
    """
    model = read_structure(path)
    if 0 < get_opset(model) < _OLDEST_OPSET:
        return {}
    builder = _Builder(model)
    described = {value.name: builder.describe(value.name) for value in list(model.graph.output)}
    builder.finish(described)
    write_model(model, copy)
    return described


class _Builder:
    """Adds nodes to a model that compute errors.

    `error` returns the name of a value of the same shape with the error of each element, or None for one without.
    `levels` is the number of further linear operators whose errors count, `epsilon` the spacing of the floats that the
    current operator computes in.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._opset = get_opset(model) or 13
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._constants = collect_constants(model)
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
        self._floats = {name for name, kind in types.items() if kind in _FLOATS}
        self._errors: dict[tuple[str, int], str | None] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._count = self._depth = 0
        self.levels = 1
        self.epsilon = EPSILON
        self._doubles = _find_doubles(model, self._constants)

    def describe(self, name: str) -> RoundingOutputs:
        """Return the outputs that describe one output of the model."""
        if (ranking := self.find_ranking(name)) is not None:
            scores = ranking.scores
            error = self.error(scores) or self.zeros(scores)
            return replace(ranking, scores=self.emit("Identity", [scores]), scores_error=error)
        if name not in self._floats:
            return RoundingOutputs()
        outputs = RoundingOutputs(error=self.error(name) or "", axis=self._find_axis(name))
        return replace(outputs, segments=self._segments(name) or "")

    def finish(self, described: Mapping[str, RoundingOutputs]) -> None:
        """Add the nodes and the outputs to the model."""
        graph = self._model.graph
        graph.node.extend(self._nodes)
        for one in described.values():
            for name in (one.error, one.segments, one.scores, one.scores_error):
                if name:
                    graph.output.add(name=name)  # the runtime infers its type
        if not get_opset(self._model):
            self._model.opset_import.add(domain="", version=self._opset)

    def error(self, name: str) -> str | None:
        """Return the value with the error of each element; None if it has none."""
        if (name, self.levels) in self._errors:
            return self._errors[name, self.levels]
        node = self._producers.get(name)
        is_label = node is not None and node.op_type.endswith("Classifier") and name == node.output[0]
        if node is None or node.op_type in _EXACT or is_label:
            found = None
        elif self._depth >= _MOST_STEPS:
            found = self.own(name)
        else:
            self._depth += 1
            epsilon, self.epsilon = self.epsilon, _EPSILON_DOUBLE if name in self._doubles else EPSILON
            known = node.domain in (*DEFAULT_DOMAINS, _ML, _MICROSOFT)
            found = _RULES.get(node.op_type if known else "", _estimate_unknown)(self, node, name)
            self._depth -= 1
            self.epsilon = epsilon
        self._errors[name, self.levels] = found
        return found

    # Steps that rules are made of; each returns the name of a value.

    def emit(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node."""
        from onnx import helper

        output = self._new_name()
        self._nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def copy(
        self,
        node: onnx.NodeProto,
        inputs: list[str],
        output: int = 0,
        attributes: Mapping[str, float] = MappingProxyType({}),
    ) -> str:
        """Add a node with other inputs, and some other attributes."""
        from onnx import helper

        added = type(node)()
        added.CopyFrom(node)
        added.name = ""
        added.input[:] = inputs
        names = [self._new_name() for _ in node.output]
        added.output[:] = names
        kept = [a for a in added.attribute if a.name not in attributes]
        del added.attribute[:]
        added.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in attributes.items())])
        self._nodes.append(added)
        return names[output]

    def constant(self, value: npt.ArrayLike, dtype: Any = np.float32) -> str:
        """Add an initializer."""
        from onnx import numpy_helper

        name = self._new_name()
        self._model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def size(self, name: str) -> str:
        """Return |x| in float32."""
        return self.emit("Abs", [self.emit("Cast", [name], to=_FLOAT)])

    def scale(self, name: str, factor: float) -> str:
        """Return x times a number."""
        return name if factor == 1 else self.emit("Mul", [name, self.constant(factor)])

    def total(self, first: str, *others: str | None) -> str:
        """Return the sum of those that there are."""
        for name in others:
            if name is not None:
                first = self.emit("Add", [first, name])
        return first

    def fill(self, value: str, like: str) -> str:
        """Return a number in the shape of another value."""
        return self.emit("Expand", [value, self.emit("Shape", [like])])

    def zeros(self, like: str) -> str:
        """Return zeros in the shape of another value."""
        return self.fill(self.constant(0.0), like)

    def own(self, name: str, units: float = 1.0) -> str:
        """Return the rounding of the answer itself, u |y|."""
        return self.scale(self.size(name), units * self.epsilon / 2)

    def root(self, *counts: str) -> str:
        """Return sqrt(n), where n is a whole number, or the quotient of two."""
        numbers = [self.emit("Cast", [count], to=_FLOAT) for count in counts]
        return self.emit("Sqrt", [numbers[0] if len(numbers) == 1 else self.emit("Div", numbers)])

    def dimension(self, name: str, axis: int) -> str:
        """Return the size of one axis."""
        shape = self.emit("Shape", [name])
        if axis < 0:
            rank = self.emit("Shape", [shape])
            place = self.emit("Add", [rank, self.constant([axis], np.int64)])
        else:
            place = self.constant([axis], np.int64)
        return self.emit("Gather", [shape, place], axis=0)

    def reduce(self, op_type: str, name: str, axes: list[int] | None) -> str:
        """Reduce some axes, or all, and keep them."""
        changed = 13 if op_type == "ReduceSum" else 18
        if axes is None:
            return self.emit(op_type, [name], keepdims=1)
        if self._opset >= changed:
            return self.emit(op_type, [name, self.constant(axes, np.int64)], keepdims=1)
        return self.emit(op_type, [name], axes=axes, keepdims=1)

    def constant_value(self, name: str) -> npt.NDArray[Any] | None:
        """Return the value of a small constant that the file itself holds."""
        from onnx import numpy_helper

        tensor = self._constants.get(name)
        if tensor is None or tensor.external_data:
            return None
        return numpy_helper.to_array(tensor)

    def is_constant(self, name: str) -> bool:
        """Return whether a value is stored in the model."""
        return name in self._constants

    # Where the columns of an output are.

    def _find_axis(self, name: str) -> int:
        """Return the axis of the columns; that of channels behind a convolution."""
        moved: list[tuple[int, ...]] = []
        for _ in range(_MOST_STEPS):
            node = self._producers.get(name)
            if node is None:
                return -1
            if node.op_type in _WITH_CHANNELS:
                axis = 1
                for order in reversed(moved):
                    axis = order.index(axis)
                return axis
            if node.op_type == "Transpose" and (order := _attribute(node, "perm")):
                moved.append(tuple(order))
            elif node.op_type not in _SAME_SHAPE and node.op_type != "Concat":
                return -1
            name = self._main_input(node)
        return -1

    def _main_input(self, node: onnx.NodeProto) -> str:
        computed = [name for name in node.input if name and not self.is_constant(name)]
        return str(computed[0] if computed else node.input[0])

    def _segments(self, name: str) -> str | None:
        """Return the number of the part that each element comes from; None if the output is not joined."""
        node = self._producers.get(name)
        if node is None or self._depth >= _MOST_STEPS:
            return None
        if node.op_type == "Concat" and len(node.input) > 1:
            numbers = [self.fill(self.constant(number), part) for number, part in enumerate(node.input)]
            return self.copy(node, numbers)
        if node.op_type not in _SAME_SHAPE | _RESHAPES:
            return None
        self._depth += 1
        before = self._segments(self._main_input(node))
        self._depth -= 1
        if before is None or node.op_type not in _RESHAPES:
            return before
        return self.copy(node, [before, *node.input[1:]])

    def find_ranking(self, name: str) -> RoundingOutputs | None:
        """Return what an output of indices or classes ranks, and along which axis."""
        labels: npt.NDArray[Any] | None = None
        for _ in range(_MOST_STEPS):
            node = self._producers.get(name)
            if node is None:
                return None
            if node.op_type in _INDICES and not (node.op_type == "TopK" and name == node.output[0]):
                default = -1 if node.op_type == "TopK" else 0
                axis = _attribute(node, "axis")
                return RoundingOutputs(
                    scores=node.input[0], scores_axis=default if axis is None else axis, labels=labels
                )
            if node.op_type.endswith("Classifier") and name == node.output[0]:
                classes = next((v for key in _CLASSES if (v := _attribute(node, key))), ())
                texts = [one.decode() if isinstance(one, bytes) else one for one in classes]
                return RoundingOutputs(scores=node.output[1], labels=np.asarray(texts))
            if node.op_type in ("ArrayFeatureExtractor", "Gather") and labels is None:
                labels = self.constant_value(node.input[0])
                if labels is None:
                    return None
                labels, name = labels.reshape(-1), node.input[1]
            elif node.op_type in _BEHIND_INDICES:
                name = node.input[0]
            else:
                return None
        return None

    def _new_name(self) -> str:
        self._count += 1
        return f"onnx-ops.rounding.{self._count}"


def _find_doubles(model: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]) -> frozenset[str]:
    """Return the values of the main graph in float64."""
    doubles = {name for name, tensor in constants.items() if tensor.data_type == _DOUBLE}
    doubles |= {value.name for value in model.graph.input if value.type.tensor_type.elem_type == _DOUBLE}
    for node in model.graph.node:
        if node.op_type == "Cast":
            is_double = _attribute(node, "to") == _DOUBLE
        else:
            is_double = node.op_type not in _EXACT and node.domain != _ML and not doubles.isdisjoint(node.input)
        if is_double:
            doubles.update(node.output)
    return frozenset(doubles)


def _attribute(node: onnx.NodeProto, name: str) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def _estimate_unknown(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Return 2 eps of the largest answer of an operator that has no rule."""
    largest = b.reduce("ReduceMax", b.own(name, 4.0), None)
    return b.emit("Expand", [b.emit("Reshape", [largest, b.constant([1], np.int64)]), b.emit("Shape", [name])])


def _estimate_product(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """MatMul and its relatives: u |a| |b|, and the errors of their inputs."""
    sizes = [b.size(one) if one else "" for one in node.input]
    scales = {key: abs(float(v)) for key in ("alpha", "beta") if (v := _attribute(node, key)) is not None}
    own = b.scale(b.copy(node, sizes, attributes=scales), b.epsilon / 2)
    squares = {key: value**2 for key, value in scales.items()}
    return b.total(own, *_pass_through(b, node, sizes, squares, node.input[:2]))


def _estimate_convolution(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Conv: u (|W| |h| + |b|), and the error of h."""
    sizes = [b.size(one) if one else "" for one in node.input]
    own = b.scale(b.copy(node, sizes), b.epsilon / 2)
    return b.total(own, *_pass_through(b, node, sizes, {}, node.input[:1]))


def _pass_through(
    b: _Builder, node: onnx.NodeProto, sizes: list[str], squares: Mapping[str, float], names: Sequence[str]
) -> list[str]:
    """Return what the errors of the inputs do to a sum of products: they are independent, so that squares add up.

    Only those of one linear operator further back count: each level is as large as the next, and the distance of the
    source's two answers shows all of them.
    """
    if not b.levels:
        return []
    b.levels -= 1
    errors = {name: b.error(name) for name in names}
    b.levels += 1
    passed = []
    for place, name in enumerate(names):
        if (error := errors[name]) is not None:
            factors = [error if at == place else size for at, size in enumerate(sizes[:2])]
            products = b.copy(node, [b.emit("Mul", [one, one]) for one in factors], attributes=squares)
            passed.append(b.emit("Sqrt", [products]))
    return passed


def _estimate_sum(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Return eps sqrt(n) of the sum of |x|, and the sum of the errors, which may have one cause."""
    terms = b.root(b.emit("Size", [node.input[0]]), b.emit("Size", [name]))
    total = b.copy(node, [b.size(node.input[0]), *node.input[1:]])
    own = b.scale(b.emit("Mul", [total, terms]), b.epsilon)
    before = b.error(node.input[0])
    return own if before is None else b.total(own, b.copy(node, [before, *node.input[1:]]))


def _estimate_cumulative_sum(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    axis = b.constant_value(node.input[1])
    terms = b.root(b.dimension(name, -1 if axis is None else int(axis.reshape(-1)[0])))
    total = b.copy(node, [b.size(node.input[0]), node.input[1]])
    own = b.scale(b.emit("Mul", [total, terms]), b.epsilon)
    before = b.error(node.input[0])
    return own if before is None else b.total(own, b.copy(node, [before, node.input[1]]))


def _estimate_moved(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Operators that move elements: the errors move as they do."""
    before = b.error(node.input[0])
    if before is None:
        return None
    return b.copy(node, [before, *node.input[1:]], list(node.output).index(name))


def _estimate_padded(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    before = b.error(node.input[0])
    inputs = [*node.input[1:2], *(["", node.input[3]] if len(node.input) > 3 else [])]
    return None if before is None else b.copy(node, [before, *inputs])


def _estimate_joined(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    errors = [b.error(one) for one in node.input]
    if not any(errors):
        return None
    return b.copy(node, [error or b.zeros(one) for error, one in zip(errors, node.input, strict=True)])


def _estimate_chosen(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Where: the error of what was chosen."""
    errors = [b.error(one) for one in node.input[1:]]
    if not any(errors):
        return None
    chosen = b.emit("Where", [node.input[0], *(error or b.constant(0.0) for error in errors)])
    return b.emit("Expand", [chosen, b.emit("Shape", [name])])


def _estimate_total(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Add, Sub, Sum, Max, Min and Mean: the sum of the errors, and the rounding of the answer."""
    return b.total(b.own(name), *(b.error(one) for one in node.input))


def _estimate_times(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    first, second = node.input
    parts = [
        b.emit("Mul", [b.size(other), error])
        for one, other in ((first, second), (second, first))
        if (error := b.error(one)) is not None
    ]
    return b.total(b.own(name), *parts)


def _estimate_quotient(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    divisor = b.size(node.input[1])
    parts = []
    if (error := b.error(node.input[0])) is not None:
        parts.append(b.emit("Div", [error, divisor]))
    if (error := b.error(node.input[1])) is not None:
        parts.append(b.emit("Div", [b.emit("Mul", [b.size(name), error]), divisor]))
    return b.total(b.own(name), *parts)


def _estimate_function(slope: Callable[[_Builder, onnx.NodeProto, str], str] | float) -> _Rule:
    """Make the rule of a function of one argument from its slope, a value or a number."""

    def estimate(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
        kernel = KERNEL_ERRORS.get(node.op_type, 0.0) * b.epsilon
        own = b.own(name)
        if kernel:
            own = b.emit("Add", [own, b.constant(kernel)])
        before = b.error(node.input[0])
        if before is None:
            return own
        passed = b.scale(before, slope) if isinstance(slope, float) else b.emit("Mul", [slope(b, node, name), before])
        return b.total(own, passed)

    return estimate


def _slope_sigmoid(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    y = b.size(name)
    return b.emit("Mul", [y, b.emit("Abs", [b.emit("Sub", [b.constant(1.0), y])])])


def _slope_tanh(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    y = b.size(name)
    return b.emit("Abs", [b.emit("Sub", [b.constant(1.0), b.emit("Mul", [y, y])])])


def _slope_log(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    return b.emit("Div", [b.constant(1.0), b.size(node.input[0])])


def _slope_root(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    return b.emit("Div", [b.constant(0.5), b.size(name)])


def _slope_reciprocal(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    y = b.size(name)
    return b.emit("Mul", [y, y])


def _slope_power(b: _Builder, node: onnx.NodeProto, name: str) -> str:
    exponent = b.emit("Cast", [node.input[1]], to=_FLOAT)
    lower = b.emit("Sub", [exponent, b.constant(1.0)])
    return b.emit("Mul", [b.emit("Abs", [exponent]), b.emit("Pow", [b.size(node.input[0]), lower])])


def _estimate_softmax(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Softmax: y ((1 - y) E + the others' sum of y E), where E is the error of x - max x, and of the sum."""
    axis = _attribute(node, "axis")
    axes = [-1 if axis is None else int(axis)]
    y = b.size(name) if node.op_type == "Softmax" else b.emit("Exp", [b.emit("Cast", [name], to=_FLOAT)])
    shifted = b.scale(b.reduce("ReduceMax", b.size(node.input[0]), axes), b.epsilon)
    inner = b.total(shifted, b.constant(2 * b.epsilon), b.error(node.input[0]))
    total = _mix_errors(b, y, inner, axes)
    if node.op_type == "LogSoftmax":
        return b.total(b.own(name), total, b.constant(b.epsilon))
    return b.total(b.own(name), b.emit("Mul", [y, total]))


def _mix_errors(b: _Builder, y: str, errors: str, axes: list[int]) -> str:
    """Return (1 - y) E + the sum of y E over the other elements, the relative error of a softmax."""
    weighted = b.emit("Mul", [y, errors])
    others = b.emit("Sub", [b.reduce("ReduceSum", weighted, axes), weighted])
    return b.total(b.emit("Abs", [b.emit("Sub", [errors, weighted])]), b.emit("Abs", [others]))


def _estimate_log_sum(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    largest = b.copy(node, [b.size(node.input[0]), *node.input[1:]])
    own = b.emit("Add", [b.scale(largest, 2 * b.epsilon), b.constant(2 * b.epsilon)])
    before = b.error(node.input[0])
    if before is None:
        return own
    return b.total(
        own, b.fill(b.emit("Reshape", [b.reduce("ReduceMax", before, None), b.constant([1], np.int64)]), name)
    )


def _estimate_batch_norm(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """BatchNormalization at inference is linear: |s| (|x| + |m|) / sqrt(v) + |b|."""
    x, scale, bias, mean, variance = node.input[:5]
    turned = b.emit("Neg", [b.size(mean)])
    own = b.scale(b.copy(node, [b.size(x), b.size(scale), b.size(bias), turned, variance]), b.epsilon)
    before = b.error(x)
    if before is None:
        return own
    zero = b.zeros(bias)
    return b.total(own, b.copy(node, [before, b.size(scale), zero, zero, variance]))


def _estimate_normalized(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Layer and instance normalization: the errors of x - mean, of the deviation, and of the answer."""
    x, before = node.input[0], b.error(node.input[0])
    values = b.emit("Cast", [x], to=_FLOAT)
    factor, *offset = (b.size(one) for one in node.input[1:3] if one)
    if node.op_type == "LayerNormalization":
        axis = _attribute(node, "axis")
        axes = list(range(-1 if axis is None else int(axis), 0))
    else:  # every channel is a row
        flat, axes = b.constant([0, 0, -1], np.int64), [2]
        values = b.emit("Reshape", [values, flat])
        before = before and b.emit("Reshape", [before, flat])
        column = b.constant([-1, 1], np.int64)
        factor, *offset = (b.emit("Reshape", [one, column]) for one in (factor, *offset))
    if not axes:  # counted from the front, and so without the rank not known
        return _estimate_unknown(b, node, name)
    mean = b.reduce("ReduceMean", values, axes)
    moved = b.emit("Sub", [values, mean])
    least = b.constant(_attribute(node, "epsilon") or 1e-5)
    variance = b.emit("Add", [b.reduce("ReduceMean", b.emit("Mul", [moved, moved]), axes), least])
    inner = b.scale(b.emit("Add", [b.emit("Abs", [values]), b.emit("Abs", [mean])]), b.epsilon)
    if before is not None:
        inner = b.emit("Add", [inner, b.emit("Add", [before, b.reduce("ReduceMean", before, axes)])])
    # A variance that is computed as the mean of squares less the square of the mean errs by eps mean^2.
    lost = b.scale(b.emit("Div", [b.emit("Mul", [mean, mean]), variance]), b.epsilon)
    inner = b.emit("Add", [inner, b.emit("Mul", [b.emit("Abs", [moved]), lost])])
    error = b.emit("Mul", [b.emit("Div", [inner, b.emit("Sqrt", [variance])]), factor])
    for one in offset:
        error = b.emit("Add", [error, b.scale(one, b.epsilon)])
    return b.total(b.own(name, 2.0), b.emit("Reshape", [error, b.emit("Shape", [x])]))


def _estimate_linear_model(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """LinearRegressor and LinearClassifier: u (|W| |x| + |b|)."""
    weights = np.abs(np.asarray(_attribute(node, "coefficients"), dtype=np.float64))
    offsets = np.abs(np.asarray(_attribute(node, "intercepts") or [0.0], dtype=np.float64))
    if node.op_type == "LinearRegressor":
        targets = int(_attribute(node, "targets") or 1)
    else:
        targets = max(len(_attribute(node, key) or ()) for key in ("classlabels_ints", "classlabels_strings"))
    if not targets or weights.size % targets or offsets.size not in (1, targets):
        return _estimate_unknown(b, node, name)
    matrix = weights.reshape(targets, -1)
    product = b.emit("MatMul", [b.size(node.input[0]), b.constant(matrix.T * b.epsilon / 2)])
    error = b.emit("Add", [product, b.constant(offsets * b.epsilon / 2)])
    kind = (_attribute(node, "post_transform") or b"NONE").decode()
    if kind == "NONE":
        return error
    if kind not in ("LOGISTIC", "SOFTMAX"):
        return _estimate_unknown(b, node, name)
    y = b.size(name)
    if kind == "SOFTMAX":
        return b.total(b.own(name, 2.0), b.emit("Mul", [y, _mix_errors(b, y, error, [-1])]))
    kernel = b.constant(KERNEL_ERRORS["Sigmoid"] * b.epsilon)
    return b.total(b.own(name), b.emit("Mul", [_slope_sigmoid(b, node, name), error]), kernel)


def _estimate_trees(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """Return eps sqrt(trees) times the sum of the largest leaves of all trees, by target."""
    of = "target" if node.op_type == "TreeEnsembleRegressor" else "class"
    weights, targets, trees = (_attribute(node, f"{of}_{key}") for key in ("weights", "ids", "treeids"))
    transformed = (_attribute(node, "post_transform") or b"NONE") != b"NONE"
    if not weights or transformed or _attribute(node, "aggregate_function") not in (None, b"SUM", b"AVERAGE"):
        return _estimate_unknown(b, node, name)
    count = int(_attribute(node, "n_targets") or max(targets) + 1)
    if of == "class":
        count = max(len(_attribute(node, key) or ()) for key in ("classlabels_int64s", "classlabels_strings"))
    largest = np.zeros((max(trees) + 1, count))
    np.maximum.at(largest, (np.asarray(trees), np.asarray(targets)), np.abs(np.asarray(weights, dtype=np.float64)))
    total = largest.sum(axis=0)
    base = np.abs(np.asarray(_attribute(node, "base_values") or np.zeros(count)))
    if of == "class" and len(set(targets)) == 1:  # two classes, of which one is stored
        total[:] = total.max()
    if base.size == count:
        total = total + base
    if _attribute(node, "aggregate_function") == b"AVERAGE":
        total = total / len(set(trees))
    error = b.constant(total * b.epsilon * len(set(trees)) ** 0.5)
    return b.emit("Expand", [error, b.emit("Shape", [name])])


def _estimate_scaled(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    factors, offsets = (np.abs(np.asarray(_attribute(node, key) or [0.0])) for key in ("scale", "offset"))
    inner = b.scale(b.emit("Add", [b.size(node.input[0]), b.constant(offsets)]), b.epsilon)
    return b.emit("Mul", [b.total(inner, b.error(node.input[0])), b.constant(factors)])


def _estimate_top(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    """TopK: the errors of what was chosen."""
    if name != node.output[0]:
        return None
    before = b.error(node.input[0])
    if before is None or len(node.output) < 2 or not node.output[1]:
        return _estimate_unknown(b, node, name) if before is not None else None
    axis = _attribute(node, "axis")
    return b.emit("GatherElements", [before, node.output[1]], axis=-1 if axis is None else axis)


def _keep(b: _Builder, node: onnx.NodeProto, name: str) -> str | None:
    return b.error(node.input[0])


_RULES: Mapping[str, _Rule] = {
    **{op_type: _estimate_function(slope) for op_type, slope in _SLOPES.items()},
    **dict.fromkeys(_MOVES, _estimate_moved),
    **dict.fromkeys(("Add", "Max", "Mean", "Min", "Sub", "Sum"), _estimate_total),
    **dict.fromkeys(("Einsum", "FusedMatMul", "Gemm", "MatMul"), _estimate_product),
    **dict.fromkeys(("Conv", "ConvTranspose"), _estimate_convolution),
    **dict.fromkeys(_SUMS, _estimate_sum),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _estimate_softmax),
    **dict.fromkeys(("InstanceNormalization", "LayerNormalization"), _estimate_normalized),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor"), _estimate_linear_model),
    **dict.fromkeys(("TreeEnsembleClassifier", "TreeEnsembleRegressor"), _estimate_trees),
    **dict.fromkeys(("Cast", "Dropout", "Identity"), _keep),
    "BatchNormalization": _estimate_batch_norm,
    "Concat": _estimate_joined,
    "CumSum": _estimate_cumulative_sum,
    "Div": _estimate_quotient,
    "Exp": _estimate_function(lambda b, node, name: b.size(name)),
    "Log": _estimate_function(_slope_log),
    "Mul": _estimate_times,
    "Pad": _estimate_padded,
    "Pow": _estimate_function(_slope_power),
    "Reciprocal": _estimate_function(_slope_reciprocal),
    "ReduceLogSumExp": _estimate_log_sum,
    "Scaler": _estimate_scaled,
    "Sigmoid": _estimate_function(_slope_sigmoid),
    "Sqrt": _estimate_function(_slope_root),
    "Tanh": _estimate_function(_slope_tanh),
    "TopK": _estimate_top,
    "Where": _estimate_chosen,
}
