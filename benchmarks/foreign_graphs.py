"""Graphs under construction, and wrong changes of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Draw = np.random.Generator
Inputs = dict[str, tuple[int, Sequence[int | str]]]
Change = Callable[[onnx.ModelProto], None]


@dataclass(slots=True)
class Sketch:
    """A graph under construction, with its weights."""

    draw: Draw
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    def weight(self, *shape: int, scale: float = 0.5) -> str:
        """Return the name of new random weights."""
        return self.constant((self.draw.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, value: Any) -> str:
        """Return the name of a new constant."""
        name = f"constant_{len(self.weights)}"
        self.weights[name] = np.asarray(value)
        return name

    def add(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node and return its first output."""
        names = list(outputs) or [f"value_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0]

    def model(self, inputs: Inputs, outputs: Mapping[str, int]) -> onnx.ModelProto:
        """Return the model; its outputs have a rank, and no names of dimensions, as many exporters write them."""
        graph = helper.make_graph(
            self.nodes,
            "graph",
            [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model)
        return model


def iterate_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from iterate_nodes(attribute.g)


def tamper(name: str, make: Callable[[Sketch, str], str]) -> Change:
    """Return a change after which all readers of an input get what `make` computes from it."""

    def change(model: onnx.ModelProto) -> None:
        sketch = Sketch(np.random.default_rng(0))
        given = f"{name}_given"
        value = make(sketch, given)
        for node in iterate_nodes(model.graph):
            node.input[:] = [f"tampered_{value}" if one == name else one for one in node.input]
        prefix = "tampered_"
        for node in sketch.nodes:
            node.input[:] = [one if one == given else prefix + one for one in node.input]
            node.output[:] = [prefix + one for one in node.output]
        for node in sketch.nodes:
            node.input[:] = [name if one == given else one for one in node.input]
        for number, node in enumerate(sketch.nodes):
            model.graph.node.insert(number, node)
        model.graph.initializer.extend(numpy_helper.from_array(v, prefix + n) for n, v in sketch.weights.items())

    return change


def first_row(name: str, axis: int) -> Change:
    """Every row gets the input of row 0."""

    def make(sketch: Sketch, value: str) -> str:
        first = _cut(sketch, value, axis, 1)
        return sketch.add("Expand", first, sketch.add("Shape", value))

    return tamper(name, make)


def next_row(name: str, axis: int) -> Change:
    """Every row gets the input of the next one."""

    def make(sketch: Sketch, value: str) -> str:
        ends = [sketch.constant(np.array([one], np.int64)) for one in (1, 1 << 30, axis)]
        later = sketch.add("Slice", value, *ends)
        return sketch.add("Concat", later, _cut(sketch, value, axis, 1), axis=axis)

    return tamper(name, make)


def cut(name: str, axis: int, size: int) -> Change:
    """Entries from `size` on are lost."""
    return tamper(name, lambda sketch, value: _cut(sketch, value, axis, size))


def _cut(sketch: Sketch, value: str, axis: int, size: int) -> str:
    return sketch.add("Slice", value, *(sketch.constant(np.array([one], np.int64)) for one in (0, size, axis)))


def flip(name: str, axis: int) -> Change:
    """The entries of an axis are read backwards."""
    ends = (-1, -(1 << 30), axis, -1)
    return tamper(
        name,
        lambda sketch, value: sketch.add("Slice", value, *(sketch.constant(np.array([one], np.int64)) for one in ends)),
    )


def ignore(name: str) -> Change:
    """The input is taken for zeros."""
    return tamper(name, lambda sketch, value: sketch.add("Mul", value, sketch.constant(np.float32(0))))


def ignore_index(name: str) -> Change:
    """All indices are 0."""
    return tamper(name, lambda sketch, value: sketch.add("Mul", value, sketch.constant(np.int64(0))))


def at_most(name: str, limit: int) -> Change:
    """Indices above a limit are cut off."""
    return tamper(name, lambda sketch, value: sketch.add("Min", value, sketch.constant(np.int64(limit))))


def always(name: str, value: Any) -> Change:
    """A scalar is taken for a constant."""
    return tamper(name, lambda sketch, _: sketch.constant(value))


def exchange(first: str, second: str) -> Change:
    """Two inputs are taken for each other."""

    def change(model: onnx.ModelProto) -> None:
        other = {first: second, second: first}
        for node in iterate_nodes(model.graph):
            node.input[:] = [other.get(one, one) for one in node.input]

    return change
