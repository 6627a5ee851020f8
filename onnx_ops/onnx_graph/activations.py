"""Quantized activations of a graph: what is written in steps, what is read back, and the range that the steps span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_ops.onnx_graph.files import constants, read_model, read_structure
from onnx_ops.onnx_graph.qoperator import WRITTEN, as_pairs

if TYPE_CHECKING:
    import onnx

_FOLDED = ("Relu", "Clip")
_BOUNDED = frozenset({"Softmax", "Sigmoid", "HardSigmoid", "Tanh"})

_WIDEST = 2
"""Bytes of a level: activations have 8 or 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedActivation:
    """One QuantizeLinear of the main graph with fixed parameters, and a DequantizeLinear that reads it.

    `name` is the float value that is written, `origin` its name in the float export, `read` the value read back. `low`
    and `high` are what the least and the largest level stand for, `step` their distance. A range that begins at 0 clips
    on purpose: what lies below is a ReLU that was folded into it.
    """

    name: str
    origin: str
    read: str
    step: float
    low: float
    high: float


def quantized_activations(path: Path) -> tuple[QuantizedActivation, ...]:
    """Every pair of QuantizeLinear and DequantizeLinear with one constant scale, in the order of the graph.

    Integer operators (QLinearConv …) count as the pairs that they stand for: `qoperator.as_pairs`.

    Scales that are computed (dynamic quantization) or differ by channel are left out.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    model = as_pairs(read_model(path), path.name)
    stored = constants(model)
    readers: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            readers.setdefault(node.input[0], []).append(node.output[0])
    found = []
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear" or node.input[0] in stored:
            continue
        if (levels := levels_of(node, stored)) is None:
            continue
        step, low, high = levels
        found += [
            QuantizedActivation(
                name=node.input[0],
                origin=node.input[0].removesuffix(WRITTEN),
                read=read,
                step=step,
                low=low,
                high=high,
            )
            for read in readers.get(node.output[0], ())
        ]
    return tuple(found)


def cut_off(path: Path) -> dict[str, str]:
    """What a ReLU or Clip makes of values that nothing else uses: a range can stand for those operators.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    graph = read_structure(path).graph
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    shown = {value.name for value in graph.output}
    return {
        name: nodes[0].output[0]
        for name, nodes in users.items()
        if len(nodes) == 1 and nodes[0].op_type in _FOLDED and nodes[0].input[0] == name and name not in shown
    }


def bounded_values(path: Path) -> frozenset[str]:
    """Values of functions with a range of their own, which quantizers take whatever the rows are.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    return frozenset(node.output[0] for node in read_structure(path).graph.node if node.op_type in _BOUNDED)


def levels_of(node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> tuple[float, float, float] | None:
    """The step of a QuantizeLinear with constants, and what its least and largest level stand for; None without."""
    from onnx import numpy_helper

    if len(node.input) < 3 or not {node.input[1], node.input[2]} <= set(stored):
        return None
    scale, zero = (numpy_helper.to_array(stored[name]) for name in node.input[1:3])
    if scale.size != 1 or zero.size != 1 or zero.dtype.kind not in "iu" or zero.dtype.itemsize > _WIDEST:
        return None
    limits, step, centre = np.iinfo(zero.dtype), float(scale.item()), int(zero.item())
    if not (np.isfinite(step) and step > 0):
        return None
    return step, (int(limits.min) - centre) * step, (int(limits.max) - centre) * step
