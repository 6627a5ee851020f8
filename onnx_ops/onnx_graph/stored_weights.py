"""Read the rounded constants of a model.

They are integers or 8-bit floats with scales, blocks of few bits, or 16-bit floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnx_ops.onnx_graph.compatibility import DEFAULT_BLOCK
from onnx_ops.onnx_graph.files import collect_constants, iterate_nodes, map_readers
from onnx_ops.onnx_graph.quantized_activations import QUANTIZED_SUFFIX

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float64]
Tensors = Mapping[str, "onnx.TensorProto"]

_FLOAT, _HALF, _BFLOAT = 1, 10, 16
_NARROW = frozenset({2, 3, 17, 18, 19, 20, 21, 22, 23, 25, 26})
"""Element types of weights of at most 8 bits: integers and floats."""

_BFLOAT_BITS, _SMALLEST = 7, -126
"""Number of fraction bits of bfloat16, and its smallest exponent."""

_BLOCKED = re.compile(r"_(?:DQ_)?Q\d+(?:G\d+)?$")
"""Suffix of the names of weights that tools store in blocks."""

_END_STEPS = 2.0
"""Tolerance at the smallest and the largest level, in steps.

A rounded zero point, or a missing largest level, moves the ends of a range by up to a step more
than rounding does.
"""

_LEVEL_BITS = 8
_LSTM_AXES, _LSTM_INPUTS = 3, 12
"""Number of axes of a DynamicQuantizeLSTM's weights, and number of its inputs.

The inputs include all scales and zero points.
"""

_FIRST_PARAMETER = {
    "QuantizeLinear": 1,
    "DequantizeLinear": 1,
    "MatMulNBits": 2,
    "GatherBlockQuantized": 2,
    "DynamicQuantizeLSTM": 8,
}
"""Index of the first scale or zero point, by operator.

Later inputs are scales and zero points too, except the group indices and the bias of MatMulNBits.
"""

PRODUCTS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"})
"""Integer products whose weight is input 1, as in MatMul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One rounded constant, and its values as floats.

    `name` has no quantizer suffixes; `tensor` is the name under which the constant is stored.
    `step` is the distance of levels; its shape broadcasts against `values`. `allowed` is the error
    that is treated as one step; it is larger at the ends of the range. `stretch` is as in
    `WeightMeasurement`. `transposable` is True if the operator takes a matrix, whose original may
    be stored transposed.
    """

    name: str
    tensor: str
    values: Floats
    step: Floats
    allowed: Floats
    stretch: float | None = None
    transposable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """Names of a scale and a zero point, and the axis and block size of their entries."""

    scale: str
    zero_point: str
    axis: int
    block: int = 0


class StoredWeightReader:
    """Reader of the rounded constants of a model as floats.

    QGemm and QLinear operators must be absent, as after `expand_integer_operators`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.tensors = collect_constants(model)
        self._nodes = list(model.graph.node)
        self._makers = {name: node for node in self._nodes for name in node.output}
        self._readers = map_readers(self._nodes)
        self._all_nodes = list(iterate_nodes(model))

    def iterate_weights(self) -> Iterator[StoredWeight]:
        """Yield each rounded constant of the main graph once.

        Constants without axes or of unknown layout are omitted. For 16-bit floats, see
        `iterate_half_weights`.
        """
        seen = set()
        for node in self._nodes:
            for weight in self._read_weights(node):
                if weight.tensor not in seen and weight.values.ndim:
                    seen.add(weight.tensor)
                    yield weight

    def list_unread(self, read: Collection[str]) -> tuple[str, ...]:
        """Return constants of at most 8 bits that look like weights and are not in `read`.

        Their layout is unknown.
        """
        parameters = self.parameters()
        taken = {
            name
            for node in self._all_nodes
            if node.domain.startswith("com.")
            for name in node.input
        }
        taken |= {node.input[0] for node in self._all_nodes if node.op_type == "DequantizeLinear"}
        return tuple(
            sorted(
                name
                for name, tensor in self.tensors.items()
                if name not in read
                and name not in parameters
                and tensor.data_type in _NARROW
                and (
                    (name.endswith(QUANTIZED_SUFFIX) and tensor.dims)
                    or (name in taken and len(tensor.dims) > 1)
                )
            )
        )

    def parameters(self) -> frozenset[str]:
        """Return the names of scales and zero points, and of the inputs that follow them."""
        return frozenset(name for node in self._all_nodes for name in self._list_parameters(node))

    def read_weight(self, node: onnx.NodeProto) -> StoredWeight | None:
        """Return the constant that a node dequantizes, rounds or multiplies by.

        Return None if the node has no such constant, or if its layout is unknown.
        """
        match node.op_type:
            case "DequantizeLinear":
                return self._read_linear(node)
            case "QuantizeLinear":
                return self._read_rounded_floats(node)
            case "MatMulInteger" | "ConvInteger" | "MatMulIntegerToFloat" | "DynamicQuantizeMatMul":
                return self._read_integer_product(node)
            case "MatMulNBits":
                return self._read_blocks(node)
            case "GatherBlockQuantized":
                return self._read_block_table(node)
            case _:
                return None

    def _read_weights(self, node: onnx.NodeProto) -> Iterator[StoredWeight]:
        """Yield the rounded constants of a node; only a recurrent layer has two."""
        if node.op_type == "DynamicQuantizeLSTM":
            yield from self._read_recurrent(node)
        elif (weight := self.read_weight(node)) is not None:
            yield weight

    def _read_recurrent(self, node: onnx.NodeProto) -> Iterator[StoredWeight]:
        """Yield the weights of a DynamicQuantizeLSTM.

        Their axes are in the order of those of LSTM: directions, gates, inputs. Source:
        onnxruntime's operator. Its weights have the last two axes exchanged, and its scales are by
        direction, or by direction and gate.
        """
        if len(node.input) < _LSTM_INPUTS:
            return
        for place, scale_place in ((1, 8), (2, 10)):
            names = (node.input[place], *node.input[scale_place : scale_place + 2])
            if not set(names) <= set(self.tensors):
                continue
            stored, *parameters = (self._array(name) for name in names)
            if stored.ndim != _LSTM_AXES:
                continue
            directions, _, gates = stored.shape
            if any(each.size not in (directions, directions * gates) for each in parameters):
                continue
            levels = stored.swapaxes(1, 2).astype(np.float64)
            scale, centre = (
                each.astype(np.float64).reshape(directions, -1, 1) for each in parameters
            )
            yield StoredWeight(
                name=_strip(names[0], blocked=False),
                tensor=names[0],
                values=(levels - centre) * scale,
                step=np.abs(scale),
                allowed=np.abs(scale) * _count_end_steps(levels, stored.dtype.name),
                stretch=_measure_stretch(stored.dtype.name, levels - centre, centre),
            )

    def _list_parameters(self, node: onnx.NodeProto) -> Iterator[str]:
        """Yield the scales and zero points of a node, and the inputs that follow them."""
        first = _FIRST_PARAMETER.get(node.op_type)
        if first is not None:
            yield from node.input[first:]
        elif node.op_type in PRODUCTS or node.op_type == "ConvInteger":
            yield from node.input[2:]

    def _array(self, name: str) -> npt.NDArray[Any]:
        from onnx import numpy_helper

        return numpy_helper.to_array(self.tensors[name])

    def _read_linear(self, node: onnx.NodeProto) -> StoredWeight | None:
        """Return the constant of a DequantizeLinear.

        A Gather may select rows of the constant before it is dequantized.
        """
        name = node.input[0]
        maker = self._makers.get(name)
        if maker is not None and maker.op_type == "Gather":
            name = maker.input[0]
        attributes = {a.name: a.i for a in node.attribute}
        scales = _Scales(
            scale=node.input[1],
            zero_point=node.input[2] if len(node.input) > 2 else "",
            axis=attributes.get("axis", 1),
            block=attributes.get("block_size", 0),
        )
        if name not in self.tensors or scales.scale not in self.tensors:
            return None
        readers = {reader.op_type for reader in self._readers.get(node.output[0], ())}
        transposable = bool(readers & {"MatMul", "Gemm", "Transpose"})
        return self._scaled(name, self._array(name), scales, transposable=transposable)

    def _read_rounded_floats(self, node: onnx.NodeProto) -> StoredWeight | None:
        """Return a float constant that a QuantizeLinear rounds in each run."""
        name = node.input[0]
        if not {name, *node.input[1:3]} <= set(self.tensors) or len(node.input) < 3:
            return None
        zero = self._array(node.input[2])
        if zero.dtype.name not in _LIMITS:
            return None
        attributes = {a.name: a.i for a in node.attribute}
        scales = _Scales(
            scale=node.input[1],
            zero_point=node.input[2],
            axis=attributes.get("axis", 1),
            block=attributes.get("block_size", 0),
        )
        values = self._array(name).astype(np.float64)
        scale, centre = (
            expand_scales(
                self._array(n).astype(np.float64), values.shape, scales.axis, scales.block
            )
            for n in node.input[1:3]
        )
        if scale is None or centre is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            levels = np.clip(
                np.nan_to_num(np.rint(values / scale) + centre), *_LIMITS[zero.dtype.name]
            )
        weight = self._scaled(name, levels, scales, transposable=True, stored_as=zero.dtype.name)
        # The rounding of the constant to float16 adds an error of less than one float16 step.
        if weight is not None and self.tensors[name].data_type == _HALF:
            return replace(
                weight,
                allowed=weight.allowed + np.spacing(np.abs(self._array(name))).astype(np.float64),
            )
        return weight

    def _read_integer_product(self, node: onnx.NodeProto) -> StoredWeight | None:
        if len(node.input) < 2 or node.input[1] not in self.tensors:
            return None
        scale, zero = {
            "MatMulIntegerToFloat": (node.input[3:4], node.input[5:6]),
            "DynamicQuantizeMatMul": (node.input[2:3], node.input[3:4]),
        }.get(node.op_type, ([self._find_scale(node)], node.input[3:4]))
        scales = _Scales(
            scale=[*scale, ""][0],
            zero_point=[*zero, ""][0],
            axis=0 if node.op_type == "ConvInteger" else -1,
        )
        if scales.scale not in self.tensors:
            return None
        name = node.input[1]
        return self._scaled(name, self._array(name), scales, transposable=node.op_type in PRODUCTS)

    def _find_scale(self, node: onnx.NodeProto) -> str:
        """Return the name of the scale of an integer product's weight.

        It is a constant with the weight's name and the suffix `_scale`, or otherwise the constant
        that the product's result is multiplied by.
        """
        named = f"{node.input[1].removesuffix(QUANTIZED_SUFFIX)}_scale"
        if named in self.tensors:
            return named
        value = node.output[0]
        for reader in self._readers.get(value, ()):
            value = reader.output[0] if reader.op_type == "Cast" else value
        for reader in self._readers.get(value, ()):
            others = (
                [name for name in reader.input if name != value] if reader.op_type == "Mul" else []
            )
            for other in others:
                maker = self._makers.get(other)
                factors = (
                    list(maker.input) if maker is not None and maker.op_type == "Mul" else [other]
                )
                if known := [str(name) for name in factors if name in self.tensors]:
                    return known[0]
        return ""

    def _scaled(
        self,
        name: str,
        stored: npt.NDArray[Any],
        scales: _Scales,
        *,
        transposable: bool,
        stored_as: str = "",
    ) -> StoredWeight | None:
        levels = stored.astype(np.float64)
        scale = expand_scales(
            self._array(scales.scale).astype(np.float64), levels.shape, scales.axis, scales.block
        )
        centre: Floats | None = np.zeros((1,) * levels.ndim)
        if scales.zero_point in self.tensors:
            zero = self._array(scales.zero_point).astype(np.float64)
            centre = expand_scales(zero, levels.shape, scales.axis, scales.block)
        if scale is None or centre is None:
            return None
        kind = stored_as or stored.dtype.name
        return StoredWeight(
            name=_strip(name, blocked=scales.block > 0),
            tensor=name,
            values=(levels - centre) * scale,
            step=np.abs(scale),
            allowed=np.abs(scale) * _count_end_steps(levels, kind),
            stretch=None if scales.block else _measure_stretch(kind, levels - centre, centre),
            transposable=transposable,
        )

    def _read_blocks(self, node: onnx.NodeProto) -> StoredWeight | None:
        """Return the matrix (K, N) of a MatMulNBits from its blocks along K."""
        if not set(node.input[1:3]) <= set(self.tensors):
            return None
        sizes = {a.name: a.i for a in node.attribute}
        depth, width, block = (sizes[name] for name in ("K", "N", "block_size"))
        bits = sizes.get("bits", 4)
        count = -(-depth // block)
        levels = _unpack(self._array(node.input[1]).reshape(width, -1), bits)[:, :depth]
        scale = self._array(node.input[2]).astype(np.float64).reshape(width, -1)[:, :count]
        centre = self._read_packed_zeros(node, 3, (width, count), bits)
        if levels.shape != (width, depth) or scale.shape != (width, count) or centre is None:
            return None
        steps, centres = (np.repeat(part, block, axis=1)[:, :depth] for part in (scale, centre))
        return _build_blocked(node.input[1], levels.T, steps.T, centres.T, bits, transposable=True)

    def _read_block_table(self, node: onnx.NodeProto) -> StoredWeight | None:
        """Return the dequantized table of a GatherBlockQuantized, stored in blocks."""
        if not {node.input[0], node.input[2]} <= set(self.tensors):
            return None
        sizes = {a.name: a.i for a in node.attribute}
        bits, block = sizes.get("bits", 4), sizes.get("block_size", DEFAULT_BLOCK)
        stored = self._array(node.input[0])
        packed = stored.dtype == np.uint8
        levels = (
            _unpack(stored.reshape(-1, stored.shape[-1]), bits)
            if packed
            else stored.astype(np.float64)
        )
        levels = levels.reshape(*stored.shape[:-1], -1)
        axis = sizes.get("quantize_axis", 1) % levels.ndim
        scale = expand_scales(
            self._array(node.input[2]).astype(np.float64), levels.shape, axis, block
        )
        places = tuple(self.tensors[node.input[2]].dims)
        zero = self._read_packed_zeros(
            node, 3, places, bits, default=float(1 << (bits - 1)) if packed else 0.0
        )
        centre = None if zero is None else expand_scales(zero, levels.shape, axis, block)
        if scale is None or centre is None:
            return None
        return _build_blocked(
            node.input[0], levels, scale, centre, bits if packed else 0, transposable=False
        )

    def _read_packed_zeros(
        self,
        node: onnx.NodeProto,
        place: int,
        shape: tuple[int, ...],
        bits: int,
        default: float | None = None,
    ) -> Floats | None:
        """Return the zero points of blocks.

        Missing zero points are `default` or, without a default, the middle of the levels.
        Return None if they are computed, or do not fit the shape.
        """
        if len(node.input) <= place or not node.input[place]:
            return np.full(shape, float(1 << (bits - 1)) if default is None else default)
        if node.input[place] not in self.tensors:
            return None
        stored = self._array(node.input[place])
        rows = int(np.prod(shape[:-1]))
        zeros = (
            _unpack(stored.reshape(rows, -1), bits)
            if stored.dtype == np.uint8
            else stored.astype(np.float64)
        )
        zeros = zeros.reshape(rows, -1)[:, : shape[-1]]
        return zeros.reshape(shape) if zeros.size == np.prod(shape) else None


def iterate_half_weights(
    tensors: Tensors, parameters: frozenset[str] = frozenset()
) -> Iterator[StoredWeight]:
    """Yield constants in float16 and bfloat16, except those named in `parameters`.

    A step is the spacing of the type at the value.
    """
    from onnx import numpy_helper

    for name, tensor in tensors.items():
        if tensor.data_type not in (_HALF, _BFLOAT) or name in parameters:
            continue
        values = numpy_helper.to_array(tensor)
        if tensor.data_type == _HALF:
            step = np.spacing(np.abs(values)).astype(np.float64)
        else:
            _, exponents = np.frexp(values.astype(np.float64))
            step = np.exp2(np.maximum(exponents - 1, _SMALLEST) - _BFLOAT_BITS)
        yield StoredWeight(
            name=name,
            tensor=name,
            values=values.astype(np.float64),
            step=step,
            allowed=step,
            transposable=True,
        )


def iterate_float_weights(tensors: Tensors) -> Iterator[StoredWeight]:
    """Yield float32 constants; their levels are the spacings of float32."""
    from onnx import numpy_helper

    for name, tensor in sorted(tensors.items()):
        if tensor.data_type == _FLOAT and math.prod(tensor.dims):
            values = numpy_helper.to_array(tensor).astype(np.float64)
            step = np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)
            yield StoredWeight(
                name=name, tensor=name, values=values, step=step, allowed=step, transposable=True
            )


def expand_scales(
    values: Floats, shape: tuple[int, ...], axis: int, block: int = 0
) -> Floats | None:
    """Return scales in a shape that broadcasts against a weight.

    There is one scale, one for each entry of an axis, or one for each block. Return None if the
    scales do not fit. Source: the ONNX operator DequantizeLinear-21.
    """
    if block and values.ndim == len(shape):
        along = axis % len(shape)
        wide = np.repeat(values, block, axis=along).take(
            range(shape[along]), axis=along, mode="clip"
        )
        return wide if all(w in (1, s) for w, s in zip(wide.shape, shape, strict=True)) else None
    if values.size == 1:
        return values.reshape((1,) * len(shape))
    if values.ndim == len(shape) and all(
        v in (1, s) for v, s in zip(values.shape, shape, strict=True)
    ):
        # After MatMulInteger, Mul applies the scales, so any shape that broadcasts is valid.
        return values
    if not -len(shape) <= axis < len(shape) or values.size != shape[axis]:
        return None
    sizes = [1] * len(shape)
    sizes[axis] = -1
    return values.reshape(sizes)


def _strip(name: str, *, blocked: bool) -> str:
    short = name.removesuffix(QUANTIZED_SUFFIX)
    return _BLOCKED.sub("", short) if blocked else short


def _build_blocked(
    name: str, levels: Floats, steps: Floats, centres: Floats, bits: int, *, transposable: bool
) -> StoredWeight:
    return StoredWeight(
        name=_strip(name, blocked=True),
        tensor=name,
        values=(levels - centres) * steps,
        step=np.abs(steps),
        allowed=np.abs(steps) * _count_end_steps(levels, f"uint{bits}" if bits else "int4"),
        transposable=transposable,
    )


_LIMITS = {
    **{f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (2, 4, 8, 16)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (2, 4, 8, 16)},
}
"""The least and the largest level of each integer type."""


def _count_end_steps(levels: Floats, kind: str) -> Floats:
    """Return the tolerance in steps at each level, larger at the ends of the type."""
    if kind not in _LIMITS:
        return np.ones((1,) * levels.ndim)
    least, most = _LIMITS[kind]
    # Symmetric quantizers often leave the smallest level of a signed type unused, so the next level
    # is an end too.
    lowest = least + 1 if least < 0 else least
    return np.where((levels <= lowest) | (levels >= most), _END_STEPS, 1.0)


def _measure_stretch(kind: str, levels: Floats, centre: Floats) -> float | None:
    """Return the type's range of levels, divided by the range in use.

    The ranges below and above the zero point of each part are compared, and the smallest quotient
    is returned. A part is a channel, or the whole constant. Return None for types other than int8
    and uint8, and if no level differs from the zero point.
    """
    if kind not in ("int8", "uint8") or not levels.size:
        return None
    least, most = _LIMITS[kind]
    along = tuple(axis for axis in range(levels.ndim) if centre.shape[axis] == 1)
    ends = []
    for end, used in (
        (least, -levels.min(axis=along, keepdims=True)),
        (most, levels.max(axis=along, keepdims=True)),
    ):
        reach = np.abs(end - centre)
        ends.append((reach / np.maximum(used, 1e-9))[used > 0])
    stretches = np.concatenate(ends)
    return float(stretches.min()) if stretches.size else None


def _unpack(packed: npt.NDArray[Any], bits: int) -> Floats:
    """Return the levels of each row; the low bits of a byte come first."""
    if bits == _LEVEL_BITS:
        return packed.astype(np.float64)
    shifts = np.arange(0, _LEVEL_BITS, bits, dtype=np.uint8)
    levels = (packed.astype(np.uint8)[:, :, None] >> shifts) & ((1 << bits) - 1)
    return levels.reshape(packed.shape[0], -1).astype(np.float64)
