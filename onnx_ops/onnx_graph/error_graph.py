"""A model's graph, extended by nodes that compute errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.files import collect_constants, get_opset
from onnx_ops.onnx_graph.rounding_operators import (
    DOMAINS,
    EPSILON,
    EPSILON_DOUBLE,
    EXACT,
    ML_DOMAIN,
)

if TYPE_CHECKING:
    import onnx

MOST_STEPS = 200
"""Maximum number of operators through which errors are traced from an output.

At this number, only the operator's own rounding is included, not the errors of its inputs.
"""

_FLOAT, _DOUBLE = 1, 11
_OPSET_WITHOUT_DEFAULT_DOMAIN = 13
_AXES_INPUT_OPSETS: Mapping[str, int] = {"ReduceMax": 18, "ReduceMean": 18, "ReduceSum": 13}
"""Opset from which a reduction takes its axes as an input.

At older opsets, the axes are an attribute.
"""

Rule: TypeAlias = "Callable[[ErrorGraph, onnx.NodeProto, str], str | None]"
"""Function that adds the nodes that compute the error of a node's output.

The function returns the name of the error, or None for an exact output.
"""


class ErrorGraph:
    """A model to which nodes that compute errors are added.

    `error` returns the name of a value with the error of each element, or None for a value without
    error. `levels` is the number of further linear operators whose errors are included. `epsilon`
    is the relative spacing of the floats that the current operator computes in.

    Args:
        rules: the rule of each operator; the rule of "" is for all other operators.
    """

    def __init__(self, model: onnx.ModelProto, rules: Mapping[str, Rule]) -> None:
        self._model = model
        self._rules = rules
        self._opset = get_opset(model) or _OPSET_WITHOUT_DEFAULT_DOMAIN
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._constants = collect_constants(model)
        self._doubles = _find_doubles(model, self._constants)
        self._errors: dict[tuple[str, int], str | None] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._count = self._depth = 0
        self.levels = 1
        self.epsilon = EPSILON

    def finish(self, outputs: Iterable[str]) -> None:
        """Add the nodes to the model, and the named values to its outputs."""
        graph = self._model.graph
        graph.node.extend(self._nodes)
        for name in outputs:
            graph.output.add(name=name)  # ONNX Runtime infers the type of the output.
        if not get_opset(self._model):
            self._model.opset_import.add(domain="", version=self._opset)

    def error(self, name: str) -> str | None:
        """Return the name of the error of each element of a value; None without an error."""
        key = name, self.levels
        if key not in self._errors:
            self._errors[key] = self._estimate_error(name)
        return self._errors[key]

    def _estimate_error(self, name: str) -> str | None:
        node = self._producers.get(name)
        if node is None or node.op_type in EXACT or is_class_output(node, name):
            return None
        if self._depth >= MOST_STEPS:
            return self.own(name)
        rule = self._rules.get(node.op_type if node.domain in DOMAINS else "", self._rules[""])
        epsilon = self.epsilon
        self.epsilon = EPSILON_DOUBLE if name in self._doubles else EPSILON
        self._depth += 1
        error = rule(self, node, name)
        self._depth -= 1
        self.epsilon = epsilon
        return error

    # The following methods read the original model.

    def producer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that computes a value; None for inputs and initializers."""
        return self._producers.get(name)

    def main_input(self, node: onnx.NodeProto) -> str:
        """Return the first input that is not a constant, or else the first input."""
        computed = [name for name in node.input if name and name not in self._constants]
        return str(computed[0] if computed else node.input[0])

    def constant_value(self, name: str) -> npt.NDArray[Any] | None:
        """Return the value of a constant; None for other values and external constants."""
        from onnx import numpy_helper

        tensor = self._constants.get(name)
        if tensor is None or tensor.external_data:
            return None
        return numpy_helper.to_array(tensor)

    # The following methods add nodes and constants for rules; each returns the name of a value.

    def emit(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
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
        """Add a copy of a node with other inputs and some other attributes.

        Return the name of the copy's output at index `output`.
        """
        from onnx import helper

        added = type(node)()
        added.CopyFrom(node)
        added.name = ""
        added.input[:] = inputs
        names = [self._new_name() for _ in node.output]
        added.output[:] = names
        unchanged = [attribute for attribute in added.attribute if attribute.name not in attributes]
        changed = [helper.make_attribute(key, value) for key, value in attributes.items()]
        del added.attribute[:]
        added.attribute.extend([*unchanged, *changed])
        self._nodes.append(added)
        return names[output]

    def constant(self, value: npt.ArrayLike, dtype: Any = np.float32) -> str:
        """Add an initializer, and return its name."""
        from onnx import numpy_helper

        name = self._new_name()
        self._model.graph.initializer.append(
            numpy_helper.from_array(np.asarray(value, dtype=dtype), name)
        )
        return name

    def as_float(self, name: str) -> str:
        """Return the name of a value after its conversion to float32."""
        return self.emit("Cast", [name], to=_FLOAT)

    def size(self, name: str) -> str:
        """Return the name of the absolute value in float32."""
        return self.emit("Abs", [self.as_float(name)])

    def scale(self, name: str, factor: float) -> str:
        """Return the name of the value multiplied by a number."""
        return name if factor == 1 else self.emit("Mul", [name, self.constant(factor)])

    def total(self, first: str, *others: str | None) -> str:
        """Return the name of the sum of the values that are not None."""
        for name in others:
            if name is not None:
                first = self.emit("Add", [first, name])
        return first

    def expand(self, value: str, like: str) -> str:
        """Return the name of a value that is broadcast to the shape of another value."""
        return self.emit("Expand", [value, self.emit("Shape", [like])])

    def zeros(self, like: str) -> str:
        """Return the name of zeros in the shape of another value."""
        return self.expand(self.constant(0.0), like)

    def own(self, name: str, units: float = 1.0) -> str:
        """Return the name of the rounding error u |y| of a value y, times `units`.

        u is half of `epsilon`.
        """
        return self.scale(self.size(name), units * self.epsilon / 2)

    def root(self, *counts: str) -> str:
        """Return the name of sqrt(n) of a whole number n, or of a quotient of two numbers."""
        numbers = [self.as_float(count) for count in counts]
        return self.emit("Sqrt", [numbers[0] if len(numbers) == 1 else self.emit("Div", numbers)])

    def dimension(self, name: str, axis: int) -> str:
        """Return the name of the size of one axis, which is computed in each run."""
        shape = self.emit("Shape", [name])
        if axis < 0:
            rank = self.emit("Shape", [shape])
            place = self.emit("Add", [rank, self.constant([axis], np.int64)])
        else:
            place = self.constant([axis], np.int64)
        return self.emit("Gather", [shape, place], axis=0)

    def reduce(self, op_type: str, name: str, axes: list[int] | None) -> str:
        """Reduce some axes, or all axes; reduced axes have the size 1."""
        if axes is None:
            return self.emit(op_type, [name], keepdims=1)
        if self._opset >= _AXES_INPUT_OPSETS[op_type]:
            return self.emit(op_type, [name, self.constant(axes, np.int64)], keepdims=1)
        return self.emit(op_type, [name], axes=axes, keepdims=1)

    def largest(self, name: str) -> str:
        """Return the name of the largest element of a value, of shape (1,)."""
        return self.emit(
            "Reshape", [self.reduce("ReduceMax", name, None), self.constant([1], np.int64)]
        )

    def _new_name(self) -> str:
        self._count += 1
        return f"onnx-ops.rounding.{self._count}"


def get_attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return the value of an attribute; None if the node does not have it."""
    from onnx import helper

    values = (
        helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if attribute.name == name
    )
    return next(values, None)


def get_axis(node: onnx.NodeProto, default: int = -1) -> int:
    """Return the attribute `axis` of a node, or `default` without this attribute."""
    axis = get_attribute(node, "axis")
    return default if axis is None else int(axis)


def is_class_output(node: onnx.NodeProto, name: str) -> bool:
    """Return whether a value contains the classes that a classifier chooses."""
    return bool(node.op_type.endswith("Classifier") and name == node.output[0])


def _find_doubles(
    model: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]
) -> frozenset[str]:
    """Return the values of the main graph that are float64."""
    doubles = {name for name, tensor in constants.items() if tensor.data_type == _DOUBLE}
    doubles |= {
        value.name for value in model.graph.input if value.type.tensor_type.elem_type == _DOUBLE
    }
    for node in model.graph.node:
        if node.op_type == "Cast":
            is_double = get_attribute(node, "to") == _DOUBLE
        else:
            is_double = (
                node.op_type not in EXACT
                and node.domain != ML_DOMAIN
                and not doubles.isdisjoint(node.input)
            )
        if is_double:
            doubles.update(node.output)
    return frozenset(doubles)
