"""Read quantized weights together with the float weights that they were made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import collect_constants, read_model, write_model
from onnx_ops.onnx_graph.quantized_activations import expand_integer_operators
from onnx_ops.onnx_graph.stored_weights import (
    Floats,
    StoredWeight,
    StoredWeightReader,
    iterate_float_weights,
    iterate_half_weights,
)
from onnx_ops.onnx_graph.weight_origins import OriginFinder

if TYPE_CHECKING:
    import onnx

_FLOAT = 1

_KEPT_SPACINGS = 8
"""Step of a constant that stays in float, in spacings of float32.

The spacing is that at the constant's largest value. Such a constant can differ by about half a
step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One weight or bias with its float original.

    `scale` is the error that is treated as one step. It is the distance of levels, or more at the
    ends of the type. Its shape broadcasts against `original` and `dequantized`.

    A step is at least the spacing of float32 at the original's values. This spacing is the finest
    that an int32 bias with a tiny scale can resolve. A constant that stayed in float has a step of
    8 such spacings at its largest value.

    `origin` is the original's name, `transposed` whether its axes are swapped there. `spacing` is
    the distance of neighbouring levels, which can be smaller than a step. It is None for a constant
    that stayed in float. `stretch` is as in `WeightMeasurement`. `rounded` is False for a constant
    that stayed in float.
    """

    name: str
    original: Floats
    dequantized: Floats
    scale: Floats
    origin: str = ""
    transposed: bool = False
    spacing: Floats | None = None
    stretch: float | None = None
    rounded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedWeights:
    """The rounded weights of a file with their originals.

    `unpaired` are the names of the weights without an original, or with an unknown layout.
    """

    pairs: tuple[QuantizedWeight, ...]
    unpaired: tuple[str, ...] = ()


def read_quantized_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """Return the rounded weights of `derived` with their originals, sorted by name.

    Raises:
        MeasurementError: the original of a weight is missing, its storage form is unknown, or an
            integer operator cannot be read (see `expand_integer_operators`).
    """
    paired = pair_quantized_weights(source, derived)
    if paired.unpaired:
        what = (
            f"quantized weight {paired.unpaired[0]} cannot be compared: its original in the "
            "source is missing, or its layout is unknown"
        )
        raise MeasurementError(what, where=derived.name)
    return paired.pairs


def pair_quantized_weights(source: Path, derived: Path) -> PairedWeights:
    """Find the original of each rounded weight of `derived`.

    The following constants are read:

    - constants behind a DequantizeLinear, with one scale, or one for each channel or block.
    - constants of integer operators (QLinearConv, MatMulInteger …), of MatMulNBits, of
      GatherBlockQuantized and of DynamicQuantizeLSTM.
    - float constants before a QuantizeLinear.
    - float16 and bfloat16 constants that have another type in the source.

    `OriginFinder` finds the originals, whatever their names are. Errors are those of `read_model`,
    and the following.

    Raises:
        MeasurementError: an integer operator cannot be read.
    """
    before, after = read_model(source), expand_integer_operators(read_model(derived), derived.name)
    reader, finder = StoredWeightReader(after), OriginFinder(before, after)
    rounded = list(reader.iterate_weights())
    rounded += _list_narrowed(finder, reader, {weight.tensor for weight in rounded})
    origins = finder.find(rounded)
    pairs = []
    for weight in rounded:
        origin = origins.get(weight.tensor)
        if origin is None:
            continue
        original = finder.read(origin).astype(np.float64).reshape(weight.values.shape)
        pairs.append(
            QuantizedWeight(
                name=weight.name,
                original=original,
                dequantized=weight.values,
                scale=np.maximum(weight.allowed, _single_spacing(original)),
                origin=origin.name,
                transposed=origin.transposed,
                spacing=weight.step,
                stretch=weight.stretch,
            )
        )
    # A single number without an original was computed from other numbers, so it is not reported.
    # Only the judgement of two files checks it, by their functions without rounding.
    unpaired = {
        weight.name for weight in rounded if weight.tensor not in origins and weight.values.size > 1
    }
    return PairedWeights(
        pairs=tuple(sorted(pairs, key=lambda pair: pair.name)),
        unpaired=tuple(
            sorted(unpaired | set(reader.list_unread({weight.tensor for weight in rounded})))
        ),
    )


def _list_narrowed(
    finder: OriginFinder, reader: StoredWeightReader, read: set[str]
) -> list[StoredWeight]:
    """Return the float16 and bfloat16 constants that have another type in the source.

    Single numbers are omitted. Constants that the source lacks are included.
    """
    known = {name: tensor.data_type for name, tensor in finder.tensors.items()}
    return [
        weight
        for weight in iterate_half_weights(reader.tensors, reader.parameters())
        if weight.tensor not in read
        and weight.values.size > 1
        and known.get(weight.tensor) != reader.tensors[weight.tensor].data_type
    ]


def read_float_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """Return the constants that are float32 under the same name in both files.

    They include the biases of a dynamically quantized model, so that a changed bias is detected.
    Constants for which `OriginFinder.find_by_name` returns None are omitted.
    """
    before, after = read_model(source), read_model(derived)
    reader, finder = StoredWeightReader(after), OriginFinder(before, after)
    rounded = {weight.tensor for weight in reader.iterate_weights()}
    kept = [
        weight
        for weight in iterate_float_weights(reader.tensors)
        if weight.tensor not in rounded and weight.tensor in finder.tensors
    ]
    weights = []
    for weight in kept:
        origin = finder.find_by_name(weight)
        if origin is None or finder.tensors[origin.name].data_type != _FLOAT:
            continue
        original = finder.read(origin).astype(np.float64).reshape(weight.values.shape)
        step = np.asarray(
            _KEPT_SPACINGS * np.spacing(np.float32(np.abs(original).max())), dtype=np.float64
        )
        weights.append(
            QuantizedWeight(
                name=weight.name,
                original=original,
                dequantized=weight.values,
                scale=step,
                origin=origin.name,
                transposed=origin.transposed,
                rounded=False,
            )
        )
    return tuple(weights)


def _single_spacing(values: Floats) -> Floats:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose")

ErrorSumNames = tuple[str, str]
"""Names of two sums of squared errors over a run.

The first sums the errors of a quantized weight or moved bias. The second sums those of plain
rounding, or of the original bias.
"""


def write_with_layer_errors(
    source: Path, weights: Sequence[QuantizedWeight], copy: Path
) -> dict[str, tuple[ErrorSumNames, ...]]:
    """Write a copy of the float model that outputs squared errors of layers.

    A layer is linear in its weight. The error of its output is therefore the output of the layer
    with the error of the weight as its weight.

    Returns:
        The names of the two sums of each layer, by the weight's name; weights of other operators
        have no entry.
    """
    from onnx import helper, numpy_helper

    model = read_model(source)
    dims = {name: tuple(tensor.dims) for name, tensor in collect_constants(model).items()}
    del model.graph.output[:]
    sum_names: dict[str, tuple[ErrorSumNames, ...]] = {}
    for weight in weights:
        spacing = weight.scale if weight.spacing is None else weight.spacing
        with np.errstate(divide="ignore", invalid="ignore"):
            rounded = np.where(
                spacing > 0, np.rint(weight.original / spacing) * spacing, weight.original
            )
        rounding = weight.original - rounded
        for node in [
            n for n in model.graph.node if n.op_type in _LAYERS and n.input[1] == weight.origin
        ]:
            pair = f"{node.output[0]}.moved", f"{node.output[0]}.rounded"
            for name, error in zip(
                pair, (weight.original - weight.dequantized, rounding), strict=True
            ):
                turned = error.T if weight.transposed else error
                array = np.ascontiguousarray(turned.reshape(dims[weight.origin]), dtype=np.float32)
                model.graph.initializer.append(numpy_helper.from_array(array, f"{name}.weight"))
                layer = model.graph.node.add()
                layer.CopyFrom(node)
                layer.name = f"{name}.answer"
                layer.input[:], layer.output[:] = (
                    [node.input[0], f"{name}.weight"],
                    [f"{name}.answer"],
                )
                model.graph.node.append(
                    helper.make_node("ReduceSumSquare", [f"{name}.answer"], [name], keepdims=0)
                )
                model.graph.output.add(name=name)
            sum_names[weight.name] = (*sum_names.get(weight.name, ()), pair)
    write_model(model, copy)
    return sum_names


def read_layer_inputs(
    derived: Path, weights: Sequence[QuantizedWeight]
) -> dict[str, tuple[Floats, Floats]]:
    """Return scale and zero point of the quantized input of layers with these weights.

    The keys are the names of the layers' weights in the original. Layers whose scale or zero point
    is computed are omitted.
    """
    from onnx import numpy_helper

    model = expand_integer_operators(read_model(derived), derived.name)
    reader = StoredWeightReader(model)
    makers = {output: node for node in model.graph.node for output in node.output}
    origins = {weight.name: weight.origin for weight in weights}
    inputs = {}
    for node in model.graph.node:
        if node.op_type not in _LAYERS or not {*node.input[:2]} <= set(makers):
            continue
        read, stored = (makers[name] for name in node.input[:2])
        weight = reader.read_weight(stored)
        known = (
            read.op_type == "DequantizeLinear"
            and len(read.input) > 2
            and {*read.input[1:3]} <= set(reader.tensors)
        )
        if known and weight is not None and weight.name in origins:
            scale, zero = (numpy_helper.to_array(reader.tensors[name]) for name in read.input[1:3])
            inputs[origins[weight.name]] = scale, zero
    return inputs


def write_with_bias_errors(
    source: Path,
    biases: Sequence[QuantizedWeight],
    weights: Sequence[QuantizedWeight],
    inputs: Mapping[str, tuple[Floats, Floats]],
    copy: Path,
) -> dict[str, tuple[ErrorSumNames, ...]]:
    """Write a copy of the float model that outputs squared errors by moved biases.

    The errors are those of layers with and without the moved bias. Quantizers move biases by the
    mean error that rounding causes in a layer (bias correction, Nagel et al. 2019, arXiv
    1906.04721). The layer's answers are then nearer to those of the float model. `inputs` is the
    result of `read_layer_inputs`.

    Returns:
        The names of the sums with the moved bias and with the original one, by the bias's name.
        Only biases of layers with a rounded weight have an entry.
    """
    model = read_model(source)
    by_origin = {weight.origin: weight for weight in weights}
    nodes = list(model.graph.node)
    makers = {output: node for node in nodes for output in node.output}
    layers = [node for node in nodes if node.op_type in _LAYERS and node.input[1] in by_origin]
    del model.graph.output[:]
    sum_names: dict[str, tuple[ErrorSumNames, ...]] = {}
    for bias in biases:
        sums = [node for node in nodes if node.op_type == "Add" and bias.origin in node.input]
        for layer in _list_biased_layers(layers, bias.origin, sums, makers):
            pair = _add_bias_errors(
                model, layer, bias, by_origin[layer.input[1]], inputs.get(layer.input[1])
            )
            sum_names[bias.name] = (*sum_names.get(bias.name, ()), pair)
    write_model(model, copy)
    return sum_names


def _list_biased_layers(
    layers: Sequence[onnx.NodeProto],
    bias: str,
    sums: Sequence[onnx.NodeProto],
    makers: Mapping[str, onnx.NodeProto],
) -> list[onnx.NodeProto]:
    """Return the layers that a bias belongs to.

    Either the bias is an input of the layer, or one of `sums` adds the bias to the layer's answer.
    """
    added = {id(makers[name]) for node in sums for name in node.input if name in makers}
    return [layer for layer in layers if bias in layer.input[2:] or id(layer) in added]


def _add_bias_errors(
    model: onnx.ModelProto,
    layer: onnx.NodeProto,
    bias: QuantizedWeight,
    weight: QuantizedWeight,
    levels: tuple[Floats, Floats] | None,
) -> ErrorSumNames:
    """Add the squared errors of a layer with the moved and with the original bias.

    Return the names of the two sums.
    """
    from onnx import helper, numpy_helper

    stem = f"{layer.output[0]}.{bias.name}"
    dims = {name: tuple(tensor.dims) for name, tensor in collect_constants(model).items()}

    def store(name: str, values: npt.NDArray[Any]) -> str:
        model.graph.initializer.append(
            numpy_helper.from_array(np.ascontiguousarray(values), f"{stem}.{name}")
        )
        return f"{stem}.{name}"

    def add(op_type: str, names: Sequence[str], result: str, **attributes: Any) -> str:
        model.graph.node.append(
            helper.make_node(op_type, names, [f"{stem}.{result}"], **attributes)
        )
        return f"{stem}.{result}"

    def place(values: Floats, pair: QuantizedWeight) -> npt.NDArray[np.float32]:
        turned = values.T if pair.transposed else values
        return turned.reshape(dims.get(pair.origin, turned.shape)).astype(np.float32)

    value = layer.input[0]
    if levels is not None:
        # The input of the layer is a quantized value, so it is quantized and dequantized here too.
        scales = [store(f"levels{part}", values) for part, values in enumerate(levels)]
        written = add("QuantizeLinear", [value, *scales], "written")
        value = add("DequantizeLinear", [written, *scales], "read")
    rounded = add(
        layer.op_type, [value, store("weight", place(weight.dequantized, weight))], "rounded"
    )
    right = add(layer.op_type, layer.input[:2], "right")
    for node in list(model.graph.node)[-2:]:
        node.attribute.extend(layer.attribute)
    shift = place(bias.dequantized - bias.original, bias)
    if layer.op_type.startswith("Conv") and shift.ndim == 1:
        shift = shift.reshape(-1, *[1] * (weight.original.ndim - 2))
    error = add("Sub", [rounded, right], "error")
    moved = add("Add", [error, store("shift", shift)], "moved")
    names = [
        add("ReduceSumSquare", [name], f"sum{part}", keepdims=0)
        for part, name in enumerate((moved, error))
    ]
    for name in names:
        model.graph.output.add(name=name)
    return names[0], names[1]
