"""Quantized weights beside the float ones that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import constants, read_model
from onnx_ops.onnx_graph.narrow import Narrow, blocks, halves
from onnx_ops.onnx_graph.qoperator import SUFFIX, as_pairs

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float64]

_FLOAT = 1

_KEPT_SPACINGS = 8
"""A constant that stays in float may move by about half of so many float32 spacings of its largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """One weight or bias. `scale` is the quantization step, of a shape that broadcasts against the other two.

    A step is never taken as finer than the spacing of float32 at the original's own values, which is all that an
    int32 bias with a tiny scale could resolve. A constant that stayed in float has a step of 8 such spacings at its
    largest value.

    `origin` is the original's name, `transposed` whether it has its axes the other way round there. `spacing` is the
    distance of neighbouring levels where a step counts more than one. `stretch` is as in `WeightMeasurement`.
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


def quantized_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """Every quantized weight and bias of `derived` with its float original in `source`, in order of name.

    Reads what static quantization stores (constants behind a DequantizeLinear, or of QLinearConv and its like), what
    dynamic quantization does (constants of MatMulInteger and ConvInteger), weights in float16, and weights in blocks
    (MatMulNBits).

    Raises:
        MeasurementError: a quantized weight has no original of its name and shape, or is stored in another way.
        NotFoundError, UserError, RefusedError: as for reading the files.
    """
    before, after = read_model(source), as_pairs(read_model(derived), derived.name)
    originals, tensors = constants(before), constants(after)
    turned = _turned(before)
    found = {stored.weight: stored for stored in _stored(after, tensors)}
    if unread := sorted(name for name in tensors if name.endswith(SUFFIX) and name not in found):
        raise MeasurementError(
            f"quantized weight {unread[0]} is stored in a way that cannot be compared", where=derived.name
        )
    pairs = [_pair(found[name], originals, tensors, turned, derived.name) for name in found if tensors[name].dims]
    narrow = (*halves(originals, tensors), *blocks(after, tensors))
    pairs += [_narrow_pair(one, originals, turned, derived.name) for one in narrow]
    return tuple(sorted(pairs, key=lambda pair: pair.name))


def kept_weights(source: Path, derived: Path) -> tuple[QuantizedWeight, ...]:
    """What `quantized_weights` leaves out: float constants that both files have.

    Here a dropped bias of a dynamically quantized model shows itself.

    Raises:
        NotFoundError, UserError, RefusedError: as for reading the files.
    """
    before, after = read_model(source), read_model(derived)
    return tuple(_kept(after, constants(before), constants(after), _turned(before)))


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
                scale=f"{node.input[1].removesuffix(SUFFIX)}_scale",
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

    name = stored.weight.removesuffix(SUFFIX)
    origin = _origin(name, originals)
    if origin not in originals or stored.scale not in tensors:
        raise MeasurementError(f"quantized weight {name} has no original or no scale to compare with", where=where)
    original = numpy_helper.to_array(originals[origin]).astype(np.float64)
    transposed = stored.transposable and origin in turned
    if transposed:
        original = original.T
    integers = numpy_helper.to_array(tensors[stored.weight])
    levels = integers.astype(np.float64)
    if original.squeeze().shape != levels.squeeze().shape:
        raise MeasurementError(
            f"quantized weight {name} has shape {levels.shape}, its original {original.shape}", where=where
        )
    scale = _along(numpy_helper.to_array(tensors[stored.scale]).astype(np.float64), levels.ndim, stored.axis)
    centre = np.zeros_like(scale)
    if stored.zero_point in tensors:
        zero = numpy_helper.to_array(tensors[stored.zero_point]).astype(np.float64)
        centre = _along(zero, levels.ndim, stored.axis)
        levels = levels - centre
    original = original.reshape(levels.shape)
    spacing = np.spacing(np.abs(original).astype(np.float32)).astype(np.float64)
    return QuantizedWeight(
        name=name,
        original=original,
        dequantized=levels * scale,
        scale=np.maximum(np.abs(scale), spacing),
        origin=origin,
        transposed=transposed,
        stretch=_stretch(integers.dtype, levels, centre),
    )


def _stretch(dtype: np.dtype[np.generic], levels: Floats, centre: Floats) -> float | None:
    """How many times as far the type's levels reach as those of the part (channel, or all) that uses them best."""
    if dtype not in (np.dtype(np.int8), np.dtype(np.uint8)) or not levels.size:
        return None
    limits = np.iinfo(np.int8 if dtype == np.dtype(np.int8) else np.uint8)
    along = tuple(axis for axis in range(levels.ndim) if centre.shape[axis] == 1)
    ends = []
    for end, used in (
        (limits.min, -levels.min(axis=along, keepdims=True)),
        (limits.max, levels.max(axis=along, keepdims=True)),
    ):
        reach = np.abs(end - centre)
        ends.append((reach / np.maximum(used, 1e-9))[used > 0])
    found = np.concatenate(ends)
    return float(found.min()) if found.size else None


def _narrow_pair(
    one: Narrow, originals: Mapping[str, onnx.TensorProto], turned: frozenset[str], where: str
) -> QuantizedWeight:
    from onnx import numpy_helper

    if one.name not in originals:
        raise MeasurementError(f"narrowed weight {one.name} has no original to compare with", where=where)
    original = numpy_helper.to_array(originals[one.name]).astype(np.float64)
    if one.transposable and one.name in turned:
        original = original.T
    if original.size != one.values.size:
        raise MeasurementError(
            f"narrowed weight {one.name} has shape {one.values.shape}, its original {original.shape}", where=where
        )
    original = original.reshape(one.values.shape)
    spacing = np.spacing(np.abs(original).astype(np.float32)).astype(np.float64)
    return QuantizedWeight(
        name=one.name,
        original=original,
        dequantized=one.values,
        scale=np.maximum(one.step, spacing),
        origin=one.name,
        transposed=one.transposable and one.name in turned,
        spacing=one.spacing,
    )


def _kept(
    model: onnx.ModelProto,
    originals: Mapping[str, onnx.TensorProto],
    tensors: Mapping[str, onnx.TensorProto],
    turned: frozenset[str],
) -> Iterator[QuantizedWeight]:
    """Constants that are float on both sides: a dropped bias of a model quantized dynamically is among them."""
    from onnx import numpy_helper

    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    for name in sorted(tensors):
        before, after = originals.get(name), tensors[name]
        if before is None or before.data_type != _FLOAT or after.data_type != _FLOAT:
            continue
        original = numpy_helper.to_array(before).astype(np.float64)
        if name in multiplied & turned:
            original = original.T
        found = numpy_helper.to_array(after).astype(np.float64)
        if original.size != found.size or not found.size:
            continue
        largest = np.float32(np.abs(original).max())
        step = np.asarray(_KEPT_SPACINGS * np.spacing(largest), dtype=np.float64)
        yield QuantizedWeight(name=name, original=original.reshape(found.shape), dequantized=found, scale=step)


def _origin(name: str, originals: Mapping[str, onnx.TensorProto]) -> str:
    """The original's name. A bias that several nodes share is copied for each, under its name with a number behind."""
    digits = len(name) - len(name.rstrip("0123456789"))
    return next((name[:end] for end in range(len(name), len(name) - digits - 1, -1) if name[:end] in originals), name)


def _along(values: Floats, dimensions: int, axis: int) -> Floats:
    """Shape values that belong to one axis (or to all) so that they broadcast."""
    if values.size == 1:
        return values.reshape((1,) * dimensions)
    shape = [1] * dimensions
    shape[axis] = -1
    return values.reshape(shape)
