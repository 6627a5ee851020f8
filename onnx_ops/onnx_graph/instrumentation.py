"""Write copies of a model for measurements.

A copy has intermediate values as outputs, or has one quantized operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.files import (
    collect_constants,
    get_opset,
    read_model,
    read_structure,
    share_structure,
    write_model,
)

if TYPE_CHECKING:
    import onnx

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""Property of a node that lists its modules, from the outermost to the node."""

_QUOTED = re.compile(r"'([^']*)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedValue:
    """A value of the main graph, and the node that computes the value.

    `node` is the name of the node, or of the value if the node has no name. `scope` is the path of
    the innermost PyTorch module that computes the node. It is empty if the file has no scopes, or
    if the node belongs to the outermost module.
    """

    name: str
    node: str
    op_type: str
    scope: str


def list_computed_values(path: Path) -> tuple[ComputedValue, ...]:
    """Return the values that nodes of the main graph compute, in topological order."""
    values = []
    for node in share_structure(path).graph.node:
        modules = _QUOTED.findall(
            {p.key: p.value for p in node.metadata_props}.get(NAME_SCOPES, "")
        )
        scope = modules[-2] if len(modules) > 1 else ""
        values += [
            ComputedValue(name=name, node=node.name or name, op_type=node.op_type, scope=scope)
            for name in node.output
            if name
        ]
    return tuple(values)


def write_with_outputs(path: Path, names: Sequence[str], copy: Path) -> None:
    """Write a copy of the model with named values as further outputs.

    The values are those of the main graph. Weights outside the file are not read: the copy refers
    to the same files, and so must be in the same folder. Each value is in memory while the copy
    runs.
    """
    model = read_structure(path)
    outputs = {value.name for value in model.graph.output}
    for name in dict.fromkeys(names):
        if name not in outputs:
            model.graph.output.add(name=name)  # ONNX Runtime infers the type of the output.
    write_model(model, copy)


ValueRange = tuple[float, float]

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "static": ("Conv", "Gemm", "MatMul"),
    "dynamic": ("Gather", "Gemm", "MatMul"),
}
"""Operators that can stay in float, by the method that would quantize them."""

_DYNAMIC_OPSET = 11
"""First opset that has the operator DynamicQuantizeLinear."""

_LEVELS = 255
_FLOAT = 1
_TABLE = 1024
"""Minimum number of elements of an embedding table that is worth quantizing."""


def list_quantizable_nodes(path: Path, method: str) -> tuple[str, ...]:
    """Return the nodes that a search quantizes by a method, in graph order.

    Unnamed nodes are omitted, since they cannot be excluded. Nodes whose inputs are all
    constants are omitted too. For dynamic quantization, products whose second input is computed are
    also omitted. A gather must then read a float32 matrix of at least `_TABLE` elements.
    """
    model = read_structure(path)
    stored = collect_constants(model)
    tables = {
        name
        for name, tensor in stored.items()
        if tensor.data_type == _FLOAT
        and len(tensor.dims) == 2
        and tensor.dims[0] * tensor.dims[1] >= _TABLE
    }
    return tuple(
        node.name
        for node in model.graph.node
        if node.name
        and node.op_type in OPERATORS.get(method, ())
        and not set(node.input[:2]) <= set(stored)
        and (method == "static" or node.input[0 if node.op_type == "Gather" else 1] in stored)
        and (node.op_type != "Gather" or node.input[0] in tables)
    )


def list_activations(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the activations of each matrix product and convolution, by node.

    Nodes without a name are omitted.
    """
    model = read_structure(path)
    stored = set(collect_constants(model))
    return {
        node.name: tuple(name for name in node.input[:2] if name not in stored)
        for node in model.graph.node
        if node.name and node.op_type in OPERATORS["static"]
    }


def write_with_quantized_node(
    path: Path,
    node_name: str,
    copy: Path,
    *,
    ranges: Mapping[str, ValueRange] | None,
    weight_levels: int,
) -> None:
    """Write a copy in which one operator computes with rounded numbers, in float.

    Errors are those of `read_model`, and the following.

    Args:
        ranges: (low, high) of each activation; None computes the ranges in each run, as dynamic
            quantization does.
        weight_levels: largest level of a weight: 127 for 8 bits, 63 for 7.

    Raises:
        ValueError: there is no such node, or the model's opset is too old for ranges that are
            computed in each run.
    """
    from onnx import numpy_helper

    model = read_model(path)
    place = next((i for i, node in enumerate(model.graph.node) if node.name == node_name), None)
    if place is None:
        raise ValueError(f"no node is called {node_name!r}")
    nodes = list(model.graph.node)
    node, stored = nodes[place], collect_constants(model)
    before: list[onnx.NodeProto] = []
    for slot, name in enumerate(node.input[: 1 if node.op_type == "Gather" else 2]):
        if name in stored:
            rounded = _rounded(node, numpy_helper.to_array(stored[name]), weight_levels)
            node.input[slot] = f"{name}_alone"
            model.graph.initializer.append(numpy_helper.from_array(rounded, node.input[slot]))
        else:
            before += _steps(model, name, slot, None if ranges is None else ranges[name])
            node.input[slot] = before[-1].output[0]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *before, *nodes[place:]])
    write_model(model, copy)


def _rounded(
    node: onnx.NodeProto, weight: npt.NDArray[np.generic], levels: int
) -> npt.NDArray[np.generic]:
    """Return a weight, rounded to `levels` levels on either side of zero.

    There is one scale per output channel, or one per table.
    """
    turned = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
    axis = 0 if node.op_type == "Conv" or turned else weight.ndim - 1
    others = tuple(i for i in range(weight.ndim) if i != axis or node.op_type == "Gather")
    values = weight.astype(np.float64)
    largest = np.abs(values).max(axis=others, keepdims=True)
    step = np.where(largest > 0, largest, 1.0) / levels
    return (np.round(values / step) * step).astype(weight.dtype)


def _steps(
    model: onnx.ModelProto, name: str, slot: int, limits: ValueRange | None
) -> list[onnx.NodeProto]:
    """Return nodes that quantize an activation to 8 bits and dequantize it."""
    from onnx import helper, numpy_helper

    written, scale, zero, read = (
        f"{name}_{what}_{slot}_alone" for what in ("written", "scale", "zero", "read")
    )
    if limits is None:
        if (opset := get_opset(model)) < _DYNAMIC_OPSET:
            raise ValueError(
                f"ranges that are computed in each run need opset {_DYNAMIC_OPSET}, "
                f"but the model has {opset}"
            )
        write = helper.make_node("DynamicQuantizeLinear", [name], [written, scale, zero])
    else:
        low, high = min(limits[0], 0.0), max(limits[1], 0.0)
        step = (high - low) / _LEVELS or 1.0
        model.graph.initializer.append(
            numpy_helper.from_array(np.asarray(step, dtype=np.float32), scale)
        )
        level = np.asarray(np.clip(round(-low / step), 0, _LEVELS), dtype=np.uint8)
        model.graph.initializer.append(numpy_helper.from_array(level, zero))
        write = helper.make_node("QuantizeLinear", [name, scale, zero], [written])
    return [write, helper.make_node("DequantizeLinear", [written, scale, zero], [read])]
