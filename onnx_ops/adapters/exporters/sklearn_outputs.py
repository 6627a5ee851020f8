"""Outputs of skl2onnx's conversions, given the names and shapes of scikit-learn's answers."""

from __future__ import annotations

from typing import Any

from onnx_ops.errors import UserError

_ROWS_OF_LABELS = frozenset({"OneVsOneClassifier", "QuadraticDiscriminantAnalysis"})
"""Their labels come as a matrix of one row or column."""

_NOT_RUN = {"RadiusNeighborsClassifier": "Use KNeighborsClassifier."}
"""Converted into a graph that ONNX Runtime refuses to run, and what to take instead."""


def check_runnable(model: object) -> None:
    """Raises UserError for an estimator whose conversion does not run."""
    name = type(_last(model)).__name__
    if name in _NOT_RUN:
        raise UserError(f"the conversion of {name} by skl2onnx does not run", where="export", remedy=_NOT_RUN[name])


def tidy_outputs(converted: Any, model: object, *, label: str, variable: str, regressor: bool) -> None:
    """Labels as a vector, and a regressor's one answer under its usual name.

    Args:
        converted: changed in place.
        model: the estimator.
        label: name of a classifier's first output.
        variable: name of a regressor's output.
        regressor: whether it answers with a number.
    """
    if regressor:
        _rename(converted, converted.graph.output[0].name, variable)
    elif type(_last(model)).__name__ in _ROWS_OF_LABELS:
        _flatten(converted, label)


def _last(model: object) -> object:
    steps = getattr(model, "steps", None)
    return steps[-1][1] if steps else model


def _rename(converted: Any, old: str, new: str) -> None:
    """Give the output its new name, which skl2onnx may have given to a value inside."""
    if old == new:
        return
    names = {old: new, new: f"{new}_inside"}
    converted.graph.output[0].name = new
    for node in converted.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _flatten(converted: Any, label: str) -> None:
    from onnx import TensorProto, helper

    graph = converted.graph
    inner, shape = f"{label}_rows", f"{label}_shape"
    for node in graph.node:
        node.input[:] = [inner if name == label else name for name in node.input]
        node.output[:] = [inner if name == label else name for name in node.output]
    graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [1], [-1]))
    graph.node.append(helper.make_node("Reshape", [inner, shape], [label], name=label))
    declared = next(value for value in graph.output if value.name == label).type.tensor_type.shape
    del declared.dim[:]
    declared.dim.add()
