"""What a moved weight does to the answers of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_ops.onnx_graph.files import constants, read_model, write_model
from onnx_ops.onnx_graph.weights import Floats, QuantizedWeight

if TYPE_CHECKING:
    import onnx

_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose")

Pair = tuple[str, str]
"""Names of two sums of squares over a run: of the errors that a quantized weight and plain rounding make."""


def show_layer_errors(source: Path, weights: Sequence[QuantizedWeight], copy: Path) -> dict[str, tuple[Pair, ...]]:
    """Write a copy of the float model that gives, for each layer of the weights, the squared errors of its answers.

    A layer is linear in its weight, so that the error of its answer is the answer of the weight's error.

    Returns:
        The two sums of each layer, by the weight's name; nothing for a weight of another operator.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the file.
    """
    from onnx import helper, numpy_helper

    model = read_model(source)
    dims = {name: tuple(tensor.dims) for name, tensor in constants(model).items()}
    del model.graph.output[:]
    shown: dict[str, tuple[Pair, ...]] = {}
    for weight in weights:
        for node in [n for n in model.graph.node if n.op_type in _LAYERS and n.input[1] == weight.origin]:
            pair = f"{node.output[0]}.moved", f"{node.output[0]}.rounded"
            for name, error in zip(pair, (weight.original - weight.dequantized, _rounding(weight)), strict=True):
                turned = error.T if weight.transposed else error
                array = np.ascontiguousarray(turned.reshape(dims[weight.origin]), dtype=np.float32)
                model.graph.initializer.append(numpy_helper.from_array(array, f"{name}.weight"))
                model.graph.node.append(_alike(node, [node.input[0], f"{name}.weight"], f"{name}.answer"))
                model.graph.node.append(helper.make_node("ReduceSumSquare", [f"{name}.answer"], [name], keepdims=0))
                model.graph.output.add(name=name)
            shown[weight.name] = (*shown.get(weight.name, ()), pair)
    write_model(model, copy)
    return shown


def _rounding(weight: QuantizedWeight) -> Floats:
    spacing = weight.scale if weight.spacing is None else weight.spacing
    with np.errstate(divide="ignore", invalid="ignore"):
        rounded = np.where(spacing > 0, np.rint(weight.original / spacing) * spacing, weight.original)
    return weight.original - rounded


def _alike(node: onnx.NodeProto, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    made = type(node)()
    made.CopyFrom(node)
    made.name = output
    made.input[:], made.output[:] = inputs, [output]
    return made
