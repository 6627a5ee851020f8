"""Faults at the ends of a model, and in tree ensembles and linear models.

The ends are the inputs, the outputs and the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.truth.faults import after_input as put_after_input
from benchmarks.truth.faults import (
    attribute,
    fault,
    nodes_of,
    pick,
    rewire,
    set_attribute,
    takes_floats,
)

_FLOAT16 = TensorProto.FLOAT16
_LINEAR, _TREES = "LinearClassifier", "TreeEnsembleClassifier"


@fault("input cut to float16")
def _input_half(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    if not takes_floats(model):
        return False
    name = model.graph.input[0].name
    nodes = [
        helper.make_node("Cast", [name], ["input.half"], to=_FLOAT16),
        helper.make_node("Cast", ["input.half"], ["input.cut"], to=TensorProto.FLOAT),
    ]
    put_after_input(model, nodes, "input.cut")
    return True


@fault("input scaled twice")
def _input_scaled(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    if not takes_floats(model):
        return False
    model.graph.initializer.append(
        numpy_helper.from_array(np.asarray(1 / 255, dtype=np.float32), "input.scale")
    )
    name = model.graph.input[0].name
    put_after_input(
        model, [helper.make_node("Mul", [name, "input.scale"], ["input.scaled"])], "input.scaled"
    )
    return True


@fault("features swapped")
def _features(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    value = model.graph.input[0]
    size = value.type.tensor_type.shape.dim[-1].dim_value
    order = np.arange(size)
    # These features of the digits data are 0 in most or all rows, so exchanging two of them has
    # almost no effect.
    free = np.setdiff1d(order, (0, 1, 32, 39) if size > 8 else ())
    first, second = draw.choice(free, 2, replace=False)
    order[[first, second]] = order[[second, first]]
    model.graph.initializer.append(numpy_helper.from_array(order, "input.order"))
    node = helper.make_node("Gather", [value.name, "input.order"], ["input.swapped"], axis=-1)
    put_after_input(model, [node], "input.swapped")
    return True


@fault("NaN replaced by zero")
def _nan(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    if not takes_floats(model):
        return False
    model.graph.initializer.append(
        numpy_helper.from_array(np.asarray(0, dtype=np.float32), "input.zero")
    )
    name = model.graph.input[0].name
    nodes = [
        helper.make_node("IsNaN", [name], ["input.strange"]),
        helper.make_node("Where", ["input.strange", "input.zero", name], ["input.sane"]),
    ]
    put_after_input(model, nodes, "input.sane")
    return True


@fault("input clipped")
def _input_clipped(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    if not takes_floats(model):
        return False
    limits = [
        numpy_helper.from_array(np.asarray(limit, dtype=np.float32), f"input.limit{limit}")
        for limit in (-3, 3)
    ]
    model.graph.initializer.extend(limits)
    name = model.graph.input[0].name
    node = helper.make_node("Clip", [name, *(tensor.name for tensor in limits)], ["input.clipped"])
    put_after_input(model, [node], "input.clipped")
    return True


@fault("normalizer missing")
def _normalizer(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, "Normalizer")
    for node in found:
        node.CopyFrom(helper.make_node("Identity", list(node.input), list(node.output)))
    return bool(found)


@fault("batch frozen")
def _frozen(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    return True


@fault("batch leaks")
def _leak(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    """Subtract the mean of its batch from each row.

    A normalization that was left in training mode does the same.
    """
    del draw
    if not takes_floats(model):
        return False
    name = model.graph.input[0].name
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([0], dtype=np.int64), "batch.axes")
    )
    nodes = [
        helper.make_node("ReduceMean", [name, "batch.axes"], ["batch.mean"], keepdims=1),
        helper.make_node("Sub", [name, "batch.mean"], ["batch.centred"]),
    ]
    put_after_input(model, nodes, "batch.centred")
    return True


@fault("output cut to float16")
def _output_half(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    name = _score(model)
    for node in model.graph.node:
        node.output[:] = [f"{n}.whole" if n == name else n for n in node.output]
    rewire(model, name, f"{name}.whole")
    model.graph.node.append(
        helper.make_node("Cast", [f"{name}.whole"], [f"{name}.half"], to=_FLOAT16)
    )
    model.graph.node.append(
        helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
    )
    return True


@fault("classes permuted")
def _classes(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    name = _score(model)
    for node in model.graph.node:
        node.output[:] = [f"{n}.ordered" if n == name else n for n in node.output]
    rewire(model, name, f"{name}.ordered")
    model.graph.initializer.append(
        numpy_helper.from_array(np.array([1, 0, *range(2, 10)]), "output.order")
    )
    model.graph.node.append(
        helper.make_node("Gather", [f"{name}.ordered", "output.order"], [name], axis=-1)
    )
    return True


@fault("labels permuted")
def _labels(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    return _change(
        model,
        (_LINEAR, _TREES),
        ("classlabels_ints", "classlabels_int64s"),
        lambda a: np.roll(a, 1),
    )


@fault("coefficient dropped")
def _coefficient(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _change(
        model, (_LINEAR,), ("coefficients",), lambda a: _at_largest(a, draw, lambda _: 0.0)
    )


@fault("intercepts dropped")
def _intercepts(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    return _change(model, (_LINEAR,), ("intercepts",), lambda a: a * 0)


@fault("tree dropped")
def _tree(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    for node in nodes_of(model, _TREES):
        trees = np.array(_values(node, "class_treeids"))
        weights = np.array(_values(node, "class_weights"), dtype=np.float32)
        weights[trees == int(draw.integers(trees.max() + 1))] = 0
        set_attribute(node, "class_weights", weights.tolist())
        return True
    return False


@fault("leaf changed")
def _leaf(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _change(
        model, (_TREES,), ("class_weights",), lambda a: _at_largest(a, draw, lambda v: v / 2)
    )


@fault("threshold moved")
def _threshold(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _change(
        model, (_TREES,), ("nodes_values",), lambda a: _at_largest(a, draw, lambda v: v * 0.9)
    )


@fault("leaf +0.01 %")
def _leaf_slightly(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    return _change(
        model, (_TREES,), ("class_weights",), lambda a: _at_largest(a, draw, lambda v: v * 1.0001)
    )


@fault("threshold one float32 up")
def _threshold_slightly(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    def up(value: float) -> float:
        return float(np.nextafter(np.float32(value), np.float32(np.inf)))

    return _change(model, (_TREES,), ("nodes_values",), lambda a: _at_largest(a, draw, up))


@fault("thresholds cut to float16")
def _thresholds_half(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    return _change(
        model, (_TREES,), ("nodes_values",), lambda a: a.astype(np.float16).astype(np.float32)
    )


@fault("branches swapped")
def _branches(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    for node in nodes_of(model, _TREES):
        yes, no = _values(node, "nodes_truenodeids"), _values(node, "nodes_falsenodeids")
        inner = [
            place for place, mode in enumerate(_values(node, "nodes_modes")) if mode != b"LEAF"
        ]
        place = pick(draw, inner)
        yes[place], no[place] = no[place], yes[place]
        set_attribute(node, "nodes_truenodeids", yes)
        set_attribute(node, "nodes_falsenodeids", no)
        return True
    return False


@fault("≤ became <")
def _strict(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    for node in nodes_of(model, _TREES):
        modes = [
            b"BRANCH_LT" if mode == b"BRANCH_LEQ" else mode for mode in _values(node, "nodes_modes")
        ]
        set_attribute(node, "nodes_modes", modes)
        return True
    return False


@fault("probabilities through softmax")
def _softmax(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    found = nodes_of(model, _TREES)
    for node in found:
        set_attribute(node, "post_transform", "SOFTMAX")
    return bool(found)


def _score(model: onnx.ModelProto) -> str:
    """Return the name of the output of floats."""
    return str(
        next(
            v.name for v in model.graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT
        )
    )


def _values(node: onnx.NodeProto, name: str) -> list[Any]:
    found = attribute(node, name)
    return list(helper.get_attribute_value(found)) if found is not None else []


def _change(
    model: onnx.ModelProto, operators: tuple[str, ...], names: tuple[str, ...], change: Any
) -> bool:
    for node in nodes_of(model, *operators):
        for name in names:
            if values := _values(node, name):
                whole = isinstance(values[0], int)
                array = np.array(values, dtype=np.int64 if whole else np.float32)
                set_attribute(node, name, change(array).tolist())
                return True
    return False


def _at_largest(array: Any, draw: np.random.Generator, function: Any) -> Any:
    """Change one of the values that are not small.

    Most of the other leaves and coefficients are zero.
    """
    places = np.flatnonzero(np.abs(array) >= np.quantile(np.abs(array), 0.75))
    place = pick(draw, [int(p) for p in places if array[p]])
    array[place] = function(float(array[place]))
    return array
