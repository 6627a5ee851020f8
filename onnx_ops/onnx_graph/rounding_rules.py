"""Rules that estimate the error of an operator's output from those of its inputs.

A rule adds nodes to an `ErrorGraph`. u is the roundoff of the floats that the operator computes in,
and eps is 2 u. E is the error of an input, and y is the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.error_graph import ErrorGraph, Rule, get_attribute, get_axis
from onnx_ops.onnx_graph.rounding_operators import KERNEL_ERRORS, MOVES, SLOPES, SUMS

if TYPE_CHECKING:
    import onnx

_LEAST_VARIANCE = 1e-5
"""Default addition to the variance in normalizations."""


def _estimate_unknown(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of an operator without a rule: 2 eps of its largest output."""
    return graph.expand(graph.largest(graph.own(name, 4.0)), name)


def _estimate_product(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a product: u |a| |b|, plus the effect of its inputs' errors."""
    sizes = [graph.size(value) if value else "" for value in node.input]
    factors = {key: get_attribute(node, key) for key in ("alpha", "beta")}
    scales = {key: abs(float(factor)) for key, factor in factors.items() if factor is not None}
    own = graph.scale(graph.copy(node, sizes, attributes=scales), graph.epsilon / 2)
    squared_scales = {key: scale**2 for key, scale in scales.items()}
    return graph.total(own, *_pass_through(graph, node, sizes, squared_scales, node.input[:2]))


def _estimate_convolution(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a convolution.

    It is u (|W| |h| + |b|), plus the effect of the error of h.
    """
    sizes = [graph.size(value) if value else "" for value in node.input]
    own = graph.scale(graph.copy(node, sizes), graph.epsilon / 2)
    return graph.total(own, *_pass_through(graph, node, sizes, {}, node.input[:1]))


def _pass_through(
    graph: ErrorGraph,
    node: onnx.NodeProto,
    sizes: list[str],
    squared_attributes: Mapping[str, float],
    names: Sequence[str],
) -> list[str]:
    """Return the effects of the inputs' errors on a sum of products.

    The errors are taken as independent, so that their squares add up. Only the errors of one
    further linear operator are included. The errors of earlier operators are about as large. The
    distance of the source's float32 and float64 answers shows all of them.
    """
    if not graph.levels:
        return []
    graph.levels -= 1
    errors = {name: graph.error(name) for name in names}
    graph.levels += 1
    passed = []
    for place, name in enumerate(names):
        if (error := errors[name]) is not None:
            factors = [error if at == place else size for at, size in enumerate(sizes[:2])]
            squares = [graph.emit("Mul", [factor, factor]) for factor in factors]
            products = graph.copy(node, squares, attributes=squared_attributes)
            passed.append(graph.emit("Sqrt", [products]))
    return passed


def _estimate_sum(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a sum: eps sqrt(n) sum |x|, plus the sum of the errors.

    The errors are added, since they may have the same cause.
    """
    terms = graph.root(graph.emit("Size", [node.input[0]]), graph.emit("Size", [name]))
    total = graph.copy(node, [graph.size(node.input[0]), *node.input[1:]])
    own = graph.scale(graph.emit("Mul", [total, terms]), graph.epsilon)
    before = graph.error(node.input[0])
    return own if before is None else graph.total(own, graph.copy(node, [before, *node.input[1:]]))


def _estimate_cumulative_sum(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a cumulative sum.

    It is eps sqrt(n) times the cumulative sum of |x|, plus the cumulative sum of the errors.
    """
    axes = graph.constant_value(node.input[1])
    axis = -1 if axes is None else int(axes.reshape(-1)[0])
    terms = graph.root(graph.dimension(name, axis))
    total = graph.copy(node, [graph.size(node.input[0]), node.input[1]])
    own = graph.scale(graph.emit("Mul", [total, terms]), graph.epsilon)
    before = graph.error(node.input[0])
    return own if before is None else graph.total(own, graph.copy(node, [before, node.input[1]]))


def _estimate_moved(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the errors, moved in the same way as the elements."""
    before = graph.error(node.input[0])
    if before is None:
        return None
    return graph.copy(node, [before, *node.input[1:]], list(node.output).index(name))


def _estimate_padded(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the errors, padded in the mode of the node; a pad value has no error."""
    before = graph.error(node.input[0])
    if before is None:
        return None
    pads, axes = node.input[1:2], node.input[3:4]
    without_value = [""] if axes else []
    # Before opset 11, the value is an attribute.
    no_error = {"value": 0.0} if any(each.name == "value" for each in node.attribute) else {}
    return graph.copy(node, [before, *pads, *without_value, *axes], attributes=no_error)


def _estimate_joined(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the errors of the parts, joined in the same way; 0 for an exact part."""
    errors = [graph.error(part) for part in node.input]
    if not any(errors):
        return None
    return graph.copy(
        node, [error or graph.zeros(part) for error, part in zip(errors, node.input, strict=True)]
    )


def _estimate_chosen(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the errors of the elements that a condition selected."""
    errors = [graph.error(choice) for choice in node.input[1:]]
    if not any(errors):
        return None
    chosen = graph.emit(
        "Where", [node.input[0], *(error or graph.constant(0.0) for error in errors)]
    )
    return graph.expand(chosen, name)


def _estimate_total(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the sum of the inputs' errors, plus the rounding of the output.

    For Mean, Max and Min, this is an upper bound.
    """
    return graph.total(graph.own(name), *(graph.error(value) for value in node.input))


def _estimate_times(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of an element-wise product a b.

    It is |b| times the error of a, plus |a| times the error of b, plus the rounding of the output.
    """
    first, second = node.input
    parts = []
    for factor, other in ((first, second), (second, first)):
        if (error := graph.error(factor)) is not None:
            parts.append(graph.emit("Mul", [graph.size(other), error]))
    return graph.total(graph.own(name), *parts)


def _estimate_quotient(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of an element-wise quotient y = a / b.

    It is 1 / |b| times the error of a, plus |y| / |b| times the error of b, plus the rounding of
    the output.
    """
    divisor = graph.size(node.input[1])
    parts = []
    if (error := graph.error(node.input[0])) is not None:
        parts.append(graph.emit("Div", [error, divisor]))
    if (error := graph.error(node.input[1])) is not None:
        parts.append(graph.emit("Div", [graph.emit("Mul", [graph.size(name), error]), divisor]))
    return graph.total(graph.own(name), *parts)


def _estimate_function(slope: Callable[[ErrorGraph, onnx.NodeProto, str], str] | float) -> Rule:
    """Return the rule of a function of one argument.

    The slope is a number, or a function that adds the nodes to compute it.
    """

    def estimate(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
        kernel = KERNEL_ERRORS.get(node.op_type, 0.0) * graph.epsilon
        own = graph.own(name)
        if kernel:
            own = graph.emit("Add", [own, graph.constant(kernel)])
        before = graph.error(node.input[0])
        if before is None:
            return own
        if isinstance(slope, float):
            return graph.total(own, graph.scale(before, slope))
        return graph.total(own, graph.emit("Mul", [slope(graph, node, name), before]))

    return estimate


def _compute_sigmoid_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    y = graph.size(name)
    rest = graph.emit("Abs", [graph.emit("Sub", [graph.constant(1.0), y])])
    return graph.emit("Mul", [y, rest])


def _compute_tanh_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    y = graph.size(name)
    return graph.emit("Abs", [graph.emit("Sub", [graph.constant(1.0), graph.emit("Mul", [y, y])])])


def _compute_exp_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    return graph.size(name)


def _compute_log_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    return graph.emit("Div", [graph.constant(1.0), graph.size(node.input[0])])


def _compute_root_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    return graph.emit("Div", [graph.constant(0.5), graph.size(name)])


def _compute_reciprocal_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    y = graph.size(name)
    return graph.emit("Mul", [y, y])


def _compute_power_slope(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str:
    exponent = graph.as_float(node.input[1])
    lower = graph.emit("Sub", [exponent, graph.constant(1.0)])
    return graph.emit(
        "Mul",
        [graph.emit("Abs", [exponent]), graph.emit("Pow", [graph.size(node.input[0]), lower])],
    )


def _estimate_softmax(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a softmax or its logarithm.

    For a softmax it is y ((1 - y) E + S), where S is the sum of y E over the other elements. E is
    the error of x - max x, and of the sum.
    """
    axes = [get_axis(node)]
    y = graph.size(name) if node.op_type == "Softmax" else graph.emit("Exp", [graph.as_float(name)])
    shifted = graph.scale(graph.reduce("ReduceMax", graph.size(node.input[0]), axes), graph.epsilon)
    inner = graph.total(shifted, graph.constant(2 * graph.epsilon), graph.error(node.input[0]))
    total = _mix_errors(graph, y, inner, axes)
    if node.op_type == "LogSoftmax":
        return graph.total(graph.own(name), total, graph.constant(graph.epsilon))
    return graph.total(graph.own(name), graph.emit("Mul", [y, total]))


def _mix_errors(graph: ErrorGraph, y: str, errors: str, axes: list[int]) -> str:
    """Return the error of a softmax, relative to its output.

    It is (1 - y) E, plus the sum of y E over the other elements.
    """
    weighted = graph.emit("Mul", [y, errors])
    others = graph.emit("Sub", [graph.reduce("ReduceSum", weighted, axes), weighted])
    return graph.total(
        graph.emit("Abs", [graph.emit("Sub", [errors, weighted])]), graph.emit("Abs", [others])
    )


def _estimate_log_sum(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of ReduceLogSumExp, including the largest error of its inputs."""
    largest = graph.copy(node, [graph.size(node.input[0]), *node.input[1:]])
    own = graph.emit(
        "Add", [graph.scale(largest, 2 * graph.epsilon), graph.constant(2 * graph.epsilon)]
    )
    before = graph.error(node.input[0])
    if before is None:
        return own
    return graph.total(own, graph.expand(graph.largest(before), name))


def _estimate_batch_norm(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return a batch normalization's error: eps (|s| (|x| + |m|) / sqrt(v) + |b|).

    At inference, a batch normalization is linear.
    """
    x, scale, bias, mean, variance = node.input[:5]
    turned = graph.emit("Neg", [graph.size(mean)])
    own = graph.scale(
        graph.copy(node, [graph.size(x), graph.size(scale), graph.size(bias), turned, variance]),
        graph.epsilon,
    )
    before = graph.error(x)
    if before is None:
        return own
    zero = graph.zeros(bias)
    return graph.total(own, graph.copy(node, [before, graph.size(scale), zero, zero, variance]))


def _estimate_normalized(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a layer or instance normalization.

    The rounding of its scale and offset is included.
    """
    axes = [2] if node.op_type == "InstanceNormalization" else list(range(get_axis(node), 0))
    if not axes:
        # The axis counts from the front, so the normalized axes are unknown without the rank.
        return _estimate_unknown(graph, node, name)
    x = node.input[0]
    before = graph.error(x)
    values = graph.as_float(x)
    factor, *offset = (graph.size(parameter) for parameter in node.input[1:3] if parameter)
    if node.op_type == "InstanceNormalization":
        # InstanceNormalization normalizes each channel separately, so every channel is a row.
        rows = graph.constant([0, 0, -1], np.int64)
        values = graph.emit("Reshape", [values, rows])
        before = before and graph.emit("Reshape", [before, rows])
        column = graph.constant([-1, 1], np.int64)
        factor, *offset = (
            graph.emit("Reshape", [parameter, column]) for parameter in (factor, *offset)
        )
    least = get_attribute(node, "epsilon") or _LEAST_VARIANCE
    error = graph.emit("Mul", [_estimate_standardized(graph, values, before, axes, least), factor])
    for parameter in offset:
        error = graph.emit("Add", [error, graph.scale(parameter, graph.epsilon)])
    return graph.total(
        graph.own(name, 2.0), graph.emit("Reshape", [error, graph.emit("Shape", [x])])
    )


def _estimate_standardized(
    graph: ErrorGraph, values: str, before: str | None, axes: list[int], least_variance: float
) -> str:
    """Return the errors of (x - mean) / deviation."""
    mean = graph.reduce("ReduceMean", values, axes)
    centered = graph.emit("Sub", [values, mean])
    least = graph.constant(least_variance)
    variance = graph.emit(
        "Add", [graph.reduce("ReduceMean", graph.emit("Mul", [centered, centered]), axes), least]
    )
    error = graph.scale(
        graph.emit("Add", [graph.emit("Abs", [values]), graph.emit("Abs", [mean])]), graph.epsilon
    )
    if before is not None:
        error = graph.emit(
            "Add", [error, graph.emit("Add", [before, graph.reduce("ReduceMean", before, axes)])]
        )
    # If a variance is computed as the mean of squares minus the square of the mean, its error is
    # about eps * mean².
    lost = graph.scale(
        graph.emit("Div", [graph.emit("Mul", [mean, mean]), variance]), graph.epsilon
    )
    error = graph.emit("Add", [error, graph.emit("Mul", [graph.emit("Abs", [centered]), lost])])
    return graph.emit("Div", [error, graph.emit("Sqrt", [variance])])


def _estimate_linear_model(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a linear model: u (|W| |x| + |b|).

    The error is passed on through the transformation of the scores.
    """
    weights = _read_sizes(node, "coefficients")
    offsets = _read_sizes(node, "intercepts")
    if node.op_type == "LinearRegressor":
        targets = int(get_attribute(node, "targets") or 1)
    else:
        targets = _count_classes(node, "classlabels_ints")
    kind = (get_attribute(node, "post_transform") or b"NONE").decode()
    is_regular = targets > 0 and weights.size % targets == 0 and offsets.size in (1, targets)
    if not is_regular or kind not in ("NONE", "LOGISTIC", "SOFTMAX"):
        return _estimate_unknown(graph, node, name)
    matrix = weights.reshape(targets, -1).T
    product = graph.emit(
        "MatMul", [graph.size(node.input[0]), graph.constant(matrix * graph.epsilon / 2)]
    )
    error = graph.emit("Add", [product, graph.constant(offsets * graph.epsilon / 2)])
    if kind == "NONE":
        return error
    if kind == "SOFTMAX":
        y = graph.size(name)
        return graph.total(
            graph.own(name, 2.0), graph.emit("Mul", [y, _mix_errors(graph, y, error, [-1])])
        )
    passed = graph.emit("Mul", [_compute_sigmoid_slope(graph, node, name), error])
    return graph.total(
        graph.own(name), passed, graph.constant(KERNEL_ERRORS["Sigmoid"] * graph.epsilon)
    )


def _estimate_trees(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a tree ensemble, by target.

    It is eps sqrt(n) times the sum of the base value and the largest leaf of each of n trees. For
    an average, the sum is divided by n.
    """
    prefix = "target" if node.op_type == "TreeEnsembleRegressor" else "class"
    weights, targets, trees = (
        get_attribute(node, f"{prefix}_{key}") for key in ("weights", "ids", "treeids")
    )
    is_transformed = (get_attribute(node, "post_transform") or b"NONE") != b"NONE"
    aggregate = get_attribute(node, "aggregate_function") or b"SUM"
    if not weights or is_transformed or aggregate not in (b"SUM", b"AVERAGE"):
        return _estimate_unknown(graph, node, name)
    if prefix == "class":
        width = _count_classes(node, "classlabels_int64s")
    else:
        width = int(get_attribute(node, "n_targets") or max(targets) + 1)
    largest = np.zeros((max(trees) + 1, width))
    np.maximum.at(
        largest, (np.asarray(trees), np.asarray(targets)), _read_sizes(node, f"{prefix}_weights")
    )
    total = largest.sum(axis=0)
    if prefix == "class" and len(set(targets)) == 1:
        # For two classes, the file stores the scores of only one class.
        total[:] = total.max()
    base = _read_sizes(node, "base_values")
    if base.size == width:
        total = total + base
    count = len(set(trees))
    if aggregate == b"AVERAGE":
        total = total / count
    return graph.expand(graph.constant(total * graph.epsilon * count**0.5), name)


def _count_classes(node: onnx.NodeProto, key_of_numbers: str) -> int:
    """Return the number of classes, which the node lists as numbers or strings."""
    return max(
        len(get_attribute(node, key) or ()) for key in (key_of_numbers, "classlabels_strings")
    )


def _read_sizes(node: onnx.NodeProto, key: str) -> npt.NDArray[np.float64]:
    """Return |w| of an attribute of numbers; a single 0 if the attribute is empty."""
    return np.abs(np.asarray(get_attribute(node, key) or [0.0], dtype=np.float64))


def _estimate_scaled(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the error of a scaler: |scale| (eps (|x| + |offset|) + E)."""
    factors, offsets = _read_sizes(node, "scale"), _read_sizes(node, "offset")
    inner = graph.scale(
        graph.emit("Add", [graph.size(node.input[0]), graph.constant(offsets)]), graph.epsilon
    )
    return graph.emit(
        "Mul", [graph.total(inner, graph.error(node.input[0])), graph.constant(factors)]
    )


def _estimate_top(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    """Return the errors of the values that TopK selected; its indices have no error."""
    if name != node.output[0]:
        return None
    before = graph.error(node.input[0])
    if before is None:
        return None
    if len(node.output) < 2 or not node.output[1]:
        return _estimate_unknown(graph, node, name)
    return graph.emit("GatherElements", [before, node.output[1]], axis=get_axis(node))


def _keep_error(graph: ErrorGraph, node: onnx.NodeProto, name: str) -> str | None:
    return graph.error(node.input[0])


RULES: Mapping[str, Rule] = {
    "": _estimate_unknown,
    **{op_type: _estimate_function(slope) for op_type, slope in SLOPES.items()},
    **dict.fromkeys(MOVES, _estimate_moved),
    **dict.fromkeys(("Add", "Max", "Mean", "Min", "Sub", "Sum"), _estimate_total),
    **dict.fromkeys(("Einsum", "FusedMatMul", "Gemm", "MatMul"), _estimate_product),
    **dict.fromkeys(("Conv", "ConvTranspose"), _estimate_convolution),
    **dict.fromkeys(SUMS, _estimate_sum),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _estimate_softmax),
    **dict.fromkeys(("InstanceNormalization", "LayerNormalization"), _estimate_normalized),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor"), _estimate_linear_model),
    **dict.fromkeys(("TreeEnsembleClassifier", "TreeEnsembleRegressor"), _estimate_trees),
    **dict.fromkeys(("Cast", "Dropout", "Identity"), _keep_error),
    "BatchNormalization": _estimate_batch_norm,
    "Concat": _estimate_joined,
    "CumSum": _estimate_cumulative_sum,
    "Div": _estimate_quotient,
    "Exp": _estimate_function(_compute_exp_slope),
    "Log": _estimate_function(_compute_log_slope),
    "Mul": _estimate_times,
    "Pad": _estimate_padded,
    "Pow": _estimate_function(_compute_power_slope),
    "Reciprocal": _estimate_function(_compute_reciprocal_slope),
    "ReduceLogSumExp": _estimate_log_sum,
    "Scaler": _estimate_scaled,
    "Sigmoid": _estimate_function(_compute_sigmoid_slope),
    "Sqrt": _estimate_function(_compute_root_slope),
    "Tanh": _estimate_function(_compute_tanh_slope),
    "TopK": _estimate_top,
    "Where": _estimate_chosen,
}
"""The rule of each operator; the rule of "" is for all other operators."""
