"""Write copies of a model that also compute how far rounding may move each answer.

The error comes from a first-order running error analysis in float32 (Higham, Accuracy and Stability
of Numerical Algorithms, 2002, section 3.3). It begins at the last two linear operators before an
output. Such an operator errs by u (|W| |h| + |b|), where u is the unit roundoff. The operators
after it pass the error on by their slopes, and add the errors of their kernels.

The usual factor of sqrt(n) for n terms (section 2.8) is left out of products, whose kernels sum in
blocks. With the factor, a limit of ten times the error hides 1.2 % of the injected faults of
`benchmarks.truth.parity`. Without the factor, 0.5 % are hidden, and every correct export stays
below a third of the limit. Operators that add one term after the other have the factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.error_graph import (
    MOST_STEPS,
    ErrorGraph,
    get_attribute,
    get_axis,
    is_class_output,
)
from onnx_ops.onnx_graph.files import get_opset, read_structure, write_model
from onnx_ops.onnx_graph.rounding_operators import (
    BEHIND_INDICES,
    RANKINGS,
    RESHAPES,
    SAME_SHAPE,
    WITH_CHANNELS,
)
from onnx_ops.onnx_graph.rounding_rules import RULES

if TYPE_CHECKING:
    import onnx

_FLOATS = frozenset({1, 10, 11, 16})
"""Element types of floats: float32, float16, float64 and bfloat16."""

_OLDEST_OPSET = 9
"""First opset that has Where and ConstantOfShape."""

_CLASSES = ("classlabels_int64s", "classlabels_ints", "classlabels_strings")
"""Attributes with the classes of a classifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingOutputs:
    """The additional outputs of a copy that describe one output of the model.

    Args:
        error: the error of each element.
        axis: axis of the output's columns: that of the channels behind a convolution, otherwise the
            last axis.
        segments: the number of the part that each element comes from, if the output is joined from
            several parts.
        scores: the values whose order along `scores_axis` determines an output of indices or
            classes; `scores_error` is the error of each score.
        labels: the class of each index, if the output has classes.
    """

    error: str = ""
    axis: int = -1
    segments: str = ""
    scores: str = ""
    scores_error: str = ""
    scores_axis: int = -1
    labels: npt.NDArray[Any] | None = None


def list_ranked_outputs(path: Path) -> frozenset[str]:
    """Return the outputs that depend on a ranking, but are not its indices or classes.

    Only outputs of the main graph are returned. They change discontinuously where two scores change
    their order: for example, boxes in the order of their scores.
    """
    model = read_structure(path)
    ranked: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "TopK":
            # Only the indices of TopK jump. Its sorted values change continuously.
            ranked.update(node.output[1:])
        if node.op_type in RANKINGS or not ranked.isdisjoint(node.input):
            ranked.update(node.output)
    ranked.discard("")
    graph = ErrorGraph(model, RULES)
    names = [value.name for value in model.graph.output if value.name in ranked]
    return frozenset(name for name in names if _find_ranking(graph, name) is None)


def write_with_rounding_errors(path: Path, copy: Path) -> dict[str, RoundingOutputs]:
    """Write a copy that also computes the rounding errors of the outputs.

    Weights outside the file are not read: the copy refers to the same files, and so must be in the
    same folder. Errors are those of `read_structure`.

    Returns:
        The additional outputs by output; for a model older than opset 9, the result is empty and no
        file is written.
    """
    model = read_structure(path)
    if 0 < get_opset(model) < _OLDEST_OPSET:
        return {}
    graph = ErrorGraph(model, RULES)
    described = {value.name: _describe_output(graph, value) for value in list(model.graph.output)}
    additional = [
        name
        for outputs in described.values()
        for name in (outputs.error, outputs.segments, outputs.scores, outputs.scores_error)
        if name
    ]
    graph.finish(additional)
    write_model(model, copy)
    return described


def _describe_output(graph: ErrorGraph, value: onnx.ValueInfoProto) -> RoundingOutputs:
    """Add the nodes that describe one output of the model."""
    name = value.name
    if (ranking := _find_ranking(graph, name)) is not None:
        scores = ranking.scores
        error = graph.error(scores) or graph.zeros(scores)
        return replace(ranking, scores=graph.emit("Identity", [scores]), scores_error=error)
    if value.type.tensor_type.elem_type not in _FLOATS:
        return RoundingOutputs()
    error = graph.error(name) or ""
    return RoundingOutputs(
        error=error, axis=_find_axis(graph, name), segments=_number_segments(graph, name) or ""
    )


def _find_axis(graph: ErrorGraph, name: str) -> int:
    """Return the axis of the columns; behind a convolution, the axis of channels."""
    # The list contains the orders of the axes in the transpositions between the convolution and the
    # output, the last one first.
    orders: list[tuple[int, ...]] = []
    for _ in range(MOST_STEPS):
        node = graph.producer(name)
        if node is None:
            return -1
        if node.op_type in WITH_CHANNELS:
            axis = 1
            for order in reversed(orders):
                axis = order.index(axis)
            return axis
        if node.op_type == "Transpose" and (order := get_attribute(node, "perm")):
            orders.append(tuple(order))
        elif node.op_type not in SAME_SHAPE and node.op_type != "Concat":
            return -1
        name = graph.main_input(node)
    return -1


def _number_segments(graph: ErrorGraph, name: str, depth: int = 0) -> str | None:
    """Return the number of the part that each element of an output comes from.

    Return None if the output is not joined from parts.
    """
    node = graph.producer(name)
    if node is None or depth >= MOST_STEPS:
        return None
    if node.op_type == "Concat" and len(node.input) > 1:
        numbers = [
            graph.expand(graph.constant(number), part) for number, part in enumerate(node.input)
        ]
        return graph.copy(node, numbers)
    if node.op_type not in SAME_SHAPE | RESHAPES:
        return None
    before = _number_segments(graph, graph.main_input(node), depth + 1)
    if before is None or node.op_type not in RESHAPES:
        return before
    return graph.copy(node, [before, *node.input[1:]])


def _find_ranking(graph: ErrorGraph, name: str) -> RoundingOutputs | None:
    """Return the scores behind an output of indices or classes; None for others."""
    labels: npt.NDArray[Any] | None = None
    for _ in range(MOST_STEPS):
        node = graph.producer(name)
        if node is None:
            return None
        if (ranking := _read_ranking(node, name)) is not None:
            return ranking if ranking.labels is not None else replace(ranking, labels=labels)
        if node.op_type in BEHIND_INDICES:
            name = node.input[0]
        elif node.op_type in ("ArrayFeatureExtractor", "Gather") and labels is None:
            classes = graph.constant_value(node.input[0])
            if classes is None:
                return None
            labels, name = classes.reshape(-1), node.input[1]
        else:
            return None
    return None


def _read_ranking(node: onnx.NodeProto, name: str) -> RoundingOutputs | None:
    """Return the values that a node ranks, if `name` has its indices or classes."""
    if node.op_type in ("ArgMax", "ArgMin"):
        return RoundingOutputs(scores=node.input[0], scores_axis=get_axis(node, 0))
    if node.op_type == "TopK" and name != node.output[0]:
        return RoundingOutputs(scores=node.input[0], scores_axis=get_axis(node))
    if is_class_output(node, name):
        classes = next((values for key in _CLASSES if (values := get_attribute(node, key))), ())
        texts = [label.decode() if isinstance(label, bytes) else label for label in classes]
        return RoundingOutputs(scores=node.output[1], labels=np.asarray(texts))
    return None
