"""Read quantized weights beside the float weights that they were made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import collect_constants, read_model, write_model
from onnx_ops.onnx_graph.quantized_activations import QUANTIZED_SUFFIX, expand_integer_operators

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float64]

_FLOAT, _HALF = 1, 10

_KEPT_SPACINGS = 8
"""A constant that stays in float can move by about half of so many float32 spacings of its largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One weight or bias with its float original.

    `scale` is the quantization step; its shape broadcasts against the other two.

    A step is at least the spacing of float32 at the original's values, the finest that an int32 bias with a tiny scale
    can resolve. A constant that stayed in float has a step of 8 such spacings at its largest value.

    `origin` is the original's name, `transposed` whether its axes are swapped there. `spacing` is the distance of
    neighbouring levels where a step counts more than one. `stretch` is as in `WeightMeasurement`.
    """

    name: str
    original: Floats
    dequantized: Floats
    scale: Floats
    origin: str = ""
    transposed: bool = False
    spacing: Floats | None = None
    stretch: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Names of the tensors of a quantized weight, and the axis that its scales run along."""

    weight: str
    scale: str
    zero_point: str
    axis: int
    transposable: bool


def read_quantized_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """Return the quantized weights of `derived` with their originals, by name.

    Reads what static quantization stores (constants behind a DequantizeLinear, or of QLinearConv and its like), what
    dynamic quantization does (constants of MatMulInteger and ConvInteger), weights in float16, and weights in blocks
    (MatMulNBits).

    Raises:
        MeasurementError: a quantized weight has no original of its name and shape, or is stored in another way.
    """
    before, after = read_model(source), expand_integer_operators(read_model(derived), derived.name)
    originals, tensors = collect_constants(before), collect_constants(after)
    turned = _turned(before)
    by_name = {stored.weight: stored for stored in _stored(after, tensors)}
    if unread := sorted(name for name in tensors if name.endswith(QUANTIZED_SUFFIX) and name not in by_name):
        what = f"quantized weight {unread[0]} is stored in a way that cannot be compared"
        raise MeasurementError(what, where=derived.name)
    pairs = [_pair(by_name[name], originals, tensors, turned, derived.name) for name in by_name if tensors[name].dims]
    narrow = (*iterate_fp16_weights(originals, tensors), *iterate_block_weights(after, tensors))
    for weight in narrow:
        if weight.name not in originals:
            what = f"narrowed weight {weight.name} has no original to compare with"
            raise MeasurementError(what, where=derived.name)
        transposed = weight.transposable and weight.name in turned
        original = _read_original(originals[weight.name], transposed=transposed)
        if original.size != weight.values.size:
            what = f"narrowed weight {weight.name} has shape {weight.values.shape}, its original {original.shape}"
            raise MeasurementError(what, where=derived.name)
        original = original.reshape(weight.values.shape)
        pairs.append(
            QuantizedWeight(
                name=weight.name,
                original=original,
                dequantized=weight.values,
                scale=np.maximum(weight.step, _single_spacing(original)),
                origin=weight.name,
                transposed=transposed,
                spacing=weight.spacing,
            )
        )
    return tuple(sorted(pairs, key=lambda pair: pair.name))


def read_float_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """Return the constants that are float in both files, among them a dropped bias of a dynamically quantized model."""
    from onnx import numpy_helper

    before, after = read_model(source), read_model(derived)
    originals, turned = collect_constants(before), _turned(before)
    multiplied = {node.input[1] for node in after.graph.node if node.op_type == "MatMul"}
    weights = []
    for name, tensor in sorted(collect_constants(after).items()):
        if name not in originals or {originals[name].data_type, tensor.data_type} != {_FLOAT}:
            continue
        original = _read_original(originals[name], transposed=name in multiplied & turned)
        dequantized = numpy_helper.to_array(tensor).astype(np.float64)
        if original.size == dequantized.size > 0:
            step = np.asarray(_KEPT_SPACINGS * np.spacing(np.float32(np.abs(original).max())), dtype=np.float64)
            original = original.reshape(dequantized.shape)
            weights.append(QuantizedWeight(name=name, original=original, dequantized=dequantized, scale=step))
    return tuple(weights)


def _read_original(tensor: onnx.TensorProto, *, transposed: bool) -> Floats:
    from onnx import numpy_helper

    values: Floats = numpy_helper.to_array(tensor).astype(np.float64)
    return values.T if transposed else values


def _single_spacing(values: Floats) -> Floats:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


def _stored(model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]) -> Iterator[_Stored]:
    consumers = {name: node.op_type for node in model.graph.node for name in node.input}
    tables = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    for node in model.graph.node:
        weight = tables.get(node.input[0], node.input[0]) if node.input else ""  # rows are read after they are chosen
        if node.op_type == "DequantizeLinear" and weight in tensors:
            yield _Stored(
                weight=weight,
                scale=node.input[1],
                zero_point=node.input[2] if len(node.input) > 2 else "",
                axis=next((a.i for a in node.attribute if a.name == "axis"), 1),
                transposable=consumers.get(node.output[0]) == "MatMul",
            )
        elif node.op_type in ("MatMulInteger", "ConvInteger") and node.input[1] in tensors:
            multiplied = node.op_type == "MatMulInteger"
            yield _Stored(
                weight=node.input[1],
                scale=f"{node.input[1].removesuffix(QUANTIZED_SUFFIX)}_scale",
                zero_point=node.input[3] if len(node.input) > 3 else "",
                axis=-1 if multiplied else 0,
                transposable=multiplied,
            )


def _turned(model: onnx.ModelProto) -> frozenset[str]:
    """Weights that a Gemm uses transposed; a quantizer that makes it a MatMul stores them transposed."""
    return frozenset(
        node.input[1]
        for node in model.graph.node
        if node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
    )


def _pair(
    stored: _Stored,
    originals: Mapping[str, onnx.TensorProto],
    tensors: Mapping[str, onnx.TensorProto],
    turned: frozenset[str],
    where: str,
) -> QuantizedWeight:
    from onnx import numpy_helper

    name = stored.weight.removesuffix(QUANTIZED_SUFFIX)
    stem = name.rstrip("0123456789")  # quantizers copy a bias that several nodes share, with a number appended
    candidates = [name[:end] for end in range(len(name), len(stem) - 1, -1)]
    origin = next((candidate for candidate in candidates if candidate in originals), "")
    if not origin or stored.scale not in tensors:
        raise MeasurementError(f"quantized weight {name} has no original or no scale to compare with", where=where)
    transposed = stored.transposable and origin in turned
    original = _read_original(originals[origin], transposed=transposed)
    integers = numpy_helper.to_array(tensors[stored.weight])
    levels = integers.astype(np.float64)
    if original.squeeze().shape != levels.squeeze().shape:
        what = f"quantized weight {name} has shape {levels.shape}, its original {original.shape}"
        raise MeasurementError(what, where=where)
    scale = shape_along(numpy_helper.to_array(tensors[stored.scale]).astype(np.float64), levels.ndim, stored.axis)
    centre = np.zeros_like(scale)
    if stored.zero_point in tensors:
        zero = numpy_helper.to_array(tensors[stored.zero_point]).astype(np.float64)
        centre = shape_along(zero, levels.ndim, stored.axis)
    levels = levels - centre
    original = original.reshape(levels.shape)
    return QuantizedWeight(
        name=name,
        original=original,
        dequantized=levels * scale,
        scale=np.maximum(np.abs(scale), _single_spacing(original)),
        origin=origin,
        transposed=transposed,
        stretch=_stretch(integers.dtype, levels, centre),
    )


def _stretch(dtype: np.dtype[np.generic], levels: Floats, centre: Floats) -> float | None:
    """Return the range of the type's levels relative to that of the part (channel, or all) that uses them best."""
    if dtype.name not in ("int8", "uint8") or not levels.size:
        return None
    limits = np.iinfo(dtype.name)
    along = tuple(axis for axis in range(levels.ndim) if centre.shape[axis] == 1)
    ends = []
    for end, used in (
        (limits.min, -levels.min(axis=along, keepdims=True)),
        (limits.max, levels.max(axis=along, keepdims=True)),
    ):
        reach = np.abs(end - centre)
        ends.append((reach / np.maximum(used, 1e-9))[used > 0])
    stretches = np.concatenate(ends)
    return float(stretches.min()) if stretches.size else None


def shape_along(values: Floats, dimensions: int, axis: int) -> Floats:
    """Shape values that belong to one axis (or to all) so that they broadcast."""
    if values.size == 1:
        return values.reshape((1,) * dimensions)
    shape = [1] * dimensions
    shape[axis] = -1
    return values.reshape(shape)


_BLOCKED = re.compile(r"_Q\d+(?:G\d+)?$")
"""Suffix of the name of a weight that tools store in blocks."""

_ENDS = 2.0
"""Steps that count as one in a block: its zero point is rounded, or its largest level is missing, and either moves the
ends of a block by up to a step more than rounding does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowWeight:
    """One weight: name, values and step of each value, in equal shapes.

    `spacing` is the distance of neighbouring levels. `transposable`: it is stored for a MatMul, for either orientation
    in the original's operator.
    """

    name: str
    values: Floats
    step: Floats
    spacing: Floats
    transposable: bool = False


def iterate_fp16_weights(
    originals: Mapping[str, onnx.TensorProto], tensors: Mapping[str, onnx.TensorProto]
) -> Iterator[NarrowWeight]:
    """Yield constants that were float32 and are float16; a step is the spacing of float16 at the value."""
    from onnx import numpy_helper

    for name, tensor in tensors.items():
        before = originals.get(name)
        if before is not None and before.data_type == _FLOAT and tensor.data_type == _HALF:
            values = numpy_helper.to_array(tensor)
            step = np.spacing(np.abs(values)).astype(np.float64)
            yield NarrowWeight(name=name, values=values.astype(np.float64), step=step, spacing=step)


def iterate_block_weights(model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]) -> Iterator[NarrowWeight]:
    """Yield the matrix (K, N) of every MatMulNBits, read from its blocks."""
    from onnx import numpy_helper

    for node in model.graph.node:
        if node.op_type != "MatMulNBits" or not set(node.input[1:3]) <= set(tensors):
            continue
        sizes = {a.name: a.i for a in node.attribute}
        depth, width, bits, block = (sizes[name] for name in ("K", "N", "bits", "block_size"))
        count = -(-depth // block)
        levels = _unpacked(numpy_helper.to_array(tensors[node.input[1]]).reshape(width, -1), bits)[:, :depth]
        scale = numpy_helper.to_array(tensors[node.input[2]]).astype(np.float64).reshape(width, count)
        zero = np.full((width, count), float(1 << (bits - 1)))
        if len(node.input) > 3 and node.input[3] in tensors:
            stored = numpy_helper.to_array(tensors[node.input[3]])
            packed = stored.dtype == np.uint8
            zero = _unpacked(stored.reshape(width, -1), bits)[:, :count] if packed else stored.reshape(width, count)
        steps = np.repeat(scale, block, axis=1)[:, :depth]
        centre = np.repeat(zero.astype(np.float64), block, axis=1)[:, :depth]
        yield NarrowWeight(
            name=_BLOCKED.sub("", node.input[1]),
            values=((levels - centre) * steps).T,
            step=_ENDS * np.abs(steps).T,
            spacing=np.abs(steps).T,
            transposable=True,
        )


def _unpacked(packed: npt.NDArray[np.uint8], bits: int) -> Floats:
    """Return the levels of each row, the low bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    levels = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return levels.reshape(packed.shape[0], -1).astype(np.float64)


_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose")

ErrorSumNames = tuple[str, str]
"""Names of two sums of squares over a run: of the errors that a quantized weight and plain rounding make."""


def write_with_layer_errors(
    source: Path, weights: Sequence[QuantizedWeight], copy: Path
) -> dict[str, tuple[ErrorSumNames, ...]]:
    """Write a copy of the float model that outputs squared errors of layers.

    A layer is linear in its weight, so that the error of its answer is the answer of the weight's error.

    Returns:
        The two sums of each layer, by the weight's name; nothing for a weight of another operator.
    """
    from onnx import helper, numpy_helper

    model = read_model(source)
    dims = {name: tuple(tensor.dims) for name, tensor in collect_constants(model).items()}
    del model.graph.output[:]
    sum_names: dict[str, tuple[ErrorSumNames, ...]] = {}
    for weight in weights:
        spacing = weight.scale if weight.spacing is None else weight.spacing
        with np.errstate(divide="ignore", invalid="ignore"):
            rounded = np.where(spacing > 0, np.rint(weight.original / spacing) * spacing, weight.original)
        rounding = weight.original - rounded
        for node in [n for n in model.graph.node if n.op_type in _LAYERS and n.input[1] == weight.origin]:
            pair = f"{node.output[0]}.moved", f"{node.output[0]}.rounded"
            for name, error in zip(pair, (weight.original - weight.dequantized, rounding), strict=True):
                turned = error.T if weight.transposed else error
                array = np.ascontiguousarray(turned.reshape(dims[weight.origin]), dtype=np.float32)
                model.graph.initializer.append(numpy_helper.from_array(array, f"{name}.weight"))
                layer = model.graph.node.add()
                layer.CopyFrom(node)
                layer.name = f"{name}.answer"
                layer.input[:], layer.output[:] = [node.input[0], f"{name}.weight"], [f"{name}.answer"]
                model.graph.node.append(helper.make_node("ReduceSumSquare", [f"{name}.answer"], [name], keepdims=0))
                model.graph.output.add(name=name)
            sum_names[weight.name] = (*sum_names.get(weight.name, ()), pair)
    write_model(model, copy)
    return sum_names
