"""Kinds of faults of exports, each injected into a correct ONNX graph.

A fault changes the model in place, and chooses the place by `draw`. It returns False where the
model has no such place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Fault = Callable[[onnx.ModelProto, np.random.Generator], bool]
Change = Callable[[Any, np.random.Generator], Any]

FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[name] = function
        return function

    return register


def tensors_of(
    model: onnx.ModelProto, operators: Sequence[str], dimensions: Sequence[int]
) -> list[onnx.TensorProto]:
    """Return float initializers with several values that such operators read."""
    read = {name for node in model.graph.node if node.op_type in operators for name in node.input}
    return [
        tensor
        for tensor in model.graph.initializer
        if tensor.name in read
        and tensor.data_type == TensorProto.FLOAT
        and len(tensor.dims) in dimensions
        and np.prod(tensor.dims) > 1
    ]


def takes_floats(model: onnx.ModelProto) -> bool:
    return bool(model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT)


def nodes_of(model: onnx.ModelProto, *operators: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in operators]


def pick(draw: np.random.Generator, things: Sequence[Any]) -> Any:
    return things[int(draw.integers(len(things)))]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((a for a in node.attribute if a.name == name), None)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def rewire(
    model: onnx.ModelProto, old: str, new: str, *, spare: Sequence[onnx.NodeProto] = ()
) -> None:
    """Let every reader of `old` read `new`, except the nodes in `spare`."""
    for node in model.graph.node:
        if not any(node is other for other in spare):
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new


def after_input(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], result: str) -> None:
    """Put nodes between the first input and its readers."""
    rewire(model, model.graph.input[0].name, result)
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])


def _tensor_fault(
    name: str, operators: Sequence[str], dimensions: Sequence[int], change: Change
) -> None:
    def inject(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
        found = tensors_of(model, operators, dimensions)
        if not found:
            return False
        tensor = pick(draw, found)
        before = numpy_helper.to_array(tensor)
        after = change(before.copy(), draw)
        if after is None:
            return False
        tensor.CopyFrom(
            numpy_helper.from_array(np.ascontiguousarray(after, dtype=np.float32), tensor.name)
        )
        return True

    FAULTS[name] = inject


def _swapped(axis: int) -> Change:
    def change(array: Any, draw: np.random.Generator) -> Any:
        order = np.arange(array.shape[axis])
        if len(order) < 2:
            return None
        first, second = draw.choice(len(order), 2, replace=False)
        order[[first, second]] = order[[second, first]]
        return np.take(array, order, axis=axis)

    return change


def _at_one(function: Callable[[float], float]) -> Change:
    def change(array: Any, draw: np.random.Generator) -> Any:
        flat = array.reshape(-1)
        place = int(draw.integers(flat.size))
        flat[place] = function(float(flat[place]))
        return array

    return change


def _row_times(factor: float) -> Change:
    def change(array: Any, draw: np.random.Generator) -> Any:
        array[int(draw.integers(len(array)))] *= factor
        return array

    return change


def _transposed(array: Any, _: np.random.Generator) -> Any:
    return array.T if array.ndim == 2 and array.shape[0] == array.shape[1] else None


def _cut(bits: int) -> Change:
    """Return a change that keeps only so many bits of the mantissa.

    float16 has 10 bits, bfloat16 has 7.
    """

    def change(array: Any, _: np.random.Generator) -> Any:
        mask = np.uint32(0xFFFFFFFF ^ ((1 << (23 - bits)) - 1))
        return (array.astype(np.float32).view(np.uint32) & mask).view(np.float32)

    return change


def _other_checkpoint(array: Any, draw: np.random.Generator) -> Any:
    return array + draw.normal(0, 1e-3 * float(np.abs(array).max()), array.shape)


_PRODUCTS, _SUMS = ("MatMul", "Gemm", "Conv"), ("Gemm", "Conv", "Add")

for _name, _operators, _dimensions, _change in (
    ("weight rows swapped", _PRODUCTS, (2, 4), _swapped(0)),
    ("weight columns swapped", _PRODUCTS, (2, 4), _swapped(1)),
    ("weight rolled by one", _PRODUCTS, (2, 4), lambda a, _: np.roll(a, 1, axis=0)),
    ("weight transposed", _PRODUCTS, (2,), _transposed),
    ("kernel flipped", ("Conv",), (4,), lambda a, _: a[:, :, ::-1, ::-1]),
    ("weight negated", _PRODUCTS, (2, 4), lambda a, _: -a),
    ("one weight negated", _PRODUCTS, (2, 4), _at_one(lambda v: -v)),
    ("one weight zero", _PRODUCTS, (2, 4), _at_one(lambda _: 0.0)),
    ("weight row dropped", _PRODUCTS, (2, 4), _row_times(0.0)),
    ("weight row +10 %", _PRODUCTS, (2, 4), _row_times(1.1)),
    ("weight +0.1 %", _PRODUCTS, (2, 4), lambda a, _: a * 1.001),
    ("weight cut to float16", _PRODUCTS, (2, 4), _cut(10)),
    ("weight cut to bfloat16", _PRODUCTS, (2, 4), _cut(7)),
    ("weight of another checkpoint", _PRODUCTS, (2, 4), _other_checkpoint),
    ("bias dropped", _SUMS, (1,), lambda a, _: a * 0),
    ("bias negated", _SUMS, (1,), lambda a, _: -a),
    ("bias rolled by one", _SUMS, (1,), lambda a, _: np.roll(a, 1)),
    ("bias cut to bfloat16", _SUMS, (1,), _cut(7)),
    ("positions rolled by one", ("Add",), (2,), lambda a, _: np.roll(a, 1, axis=0)),
    ("norm scale dropped", ("LayerNormalization",), (1,), lambda a, _: a * 0 + 1.5),
    ("scaler mean rolled by one", ("Sub",), (1,), lambda a, _: np.roll(a, 1)),
    ("scaler mean dropped", ("Sub",), (1,), lambda a, _: a * 0),
    ("scaler deviation inverted", ("Div",), (1,), lambda a, _: 1 / a),
    ("scaler deviation +1 %", ("Div",), (1,), lambda a, _: a * 1.01),
):
    _tensor_fault(_name, _operators, _dimensions, _change)


@fault("wrong epsilon")
def _epsilon(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, "LayerNormalization", "BatchNormalization")
    if found:
        set_attribute(pick(draw, found), "epsilon", 1e-3)
    return bool(found)


_OTHER = {"Relu": "Elu", "Tanh": "Sigmoid", "Erf": "Tanh"}


@fault("activation swapped")
def _activation(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, *_OTHER)
    if found:
        node = pick(draw, found)
        node.op_type = _OTHER[node.op_type]
    return bool(found)


@fault("activation leaks")
def _leak(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, "Relu")
    if found:
        node = pick(draw, found)
        node.op_type = "LeakyRelu"
        set_attribute(node, "alpha", 0.01)
    return bool(found)


@fault("node missing")
def _missing(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, "Relu", "Tanh", "Sub", "LayerNormalization")
    if found:
        node = pick(draw, found)
        value = node.input[0]
        node.CopyFrom(helper.make_node("Identity", [value], list(node.output)))
    return bool(found)


@fault("residual missing")
def _residual(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    constants = {tensor.name for tensor in model.graph.initializer}
    found = [node for node in nodes_of(model, "Add") if not constants & set(node.input)]
    if found:
        node = pick(draw, found)
        node.CopyFrom(
            helper.make_node("Identity", [pick(draw, list(node.input))], list(node.output))
        )
    return bool(found)


@fault("range clipped at 6")
def _clip(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, "Relu")
    if found:
        node = pick(draw, found)
        limits = [
            numpy_helper.from_array(np.asarray(limit, dtype=np.float32), f"limit{limit}")
            for limit in (0, 6)
        ]
        model.graph.initializer.extend(limits)
        node.CopyFrom(
            helper.make_node("Clip", [node.input[0], *(t.name for t in limits)], list(node.output))
        )
    return bool(found)


@fault("wrong axis")
def _axis(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    del draw
    # In the transformer, the first Softmax is that of the attention, and normalizes the last of
    # four axes.
    found = nodes_of(model, "Softmax")
    if found:
        set_attribute(found[0], "axis", 1)
    return bool(found)


@fault("axis of the last softmax")
def _last_axis(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    """Set the axis of the last softmax to 1.

    Over two axes, this is the same as -1.
    """
    del draw
    found = nodes_of(model, "Softmax")
    if found:
        set_attribute(found[-1], "axis", 1)
    return bool(found)


@fault("wrong transpose")
def _transpose(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = [node for node in nodes_of(model, "Transpose") if len(_integers(node, "perm")) >= 3]
    if found:
        node = pick(draw, found)
        order = _integers(node, "perm")
        set_attribute(node, "perm", [order[0], *order[2:], order[1]])
    return bool(found)


@fault("padding on one side")
def _padding(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = [node for node in nodes_of(model, "Conv") if any(_integers(node, "pads"))]
    if found:
        node = pick(draw, found)
        pads = _integers(node, "pads")
        half = len(pads) // 2
        set_attribute(
            node,
            "pads",
            [0] * half + [a + b for a, b in zip(pads[:half], pads[half:], strict=True)],
        )
    return bool(found)


_OTHER_POOL = {"MaxPool": "AveragePool", "AveragePool": "MaxPool"}


@fault("other pooling")
def _pool(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, *_OTHER_POOL)
    if found:
        node = pick(draw, found)
        shape = _integers(node, "kernel_shape"), _integers(node, "strides")
        other = helper.make_node(_OTHER_POOL[node.op_type], list(node.input), list(node.output)[:1])
        node.CopyFrom(other)
        set_attribute(node, "kernel_shape", shape[0])
        set_attribute(node, "strides", shape[1])
    return bool(found)


@fault("wrong constant")
def _constant(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = [
        t
        for t in model.graph.initializer
        if t.data_type == TensorProto.FLOAT and np.prod(t.dims, dtype=int) == 1
    ]
    if found:
        tensor = pick(draw, found)
        tensor.CopyFrom(
            numpy_helper.from_array(np.asarray(numpy_helper.to_array(tensor) * 1.01), tensor.name)
        )
    return bool(found)


@fault("wrong alpha")
def _alpha(model: onnx.ModelProto, draw: np.random.Generator) -> bool:
    found = nodes_of(model, "Gemm")
    if found:
        set_attribute(pick(draw, found), "alpha", 1.01)
    return bool(found)


def _integers(node: onnx.NodeProto, name: str) -> list[int]:
    found = attribute(node, name)
    return list(found.ints) if found is not None else []
