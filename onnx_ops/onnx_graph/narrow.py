"""Weights in float16, or in blocks of 4 or 8 bits, as numbers again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx

Floats = npt.NDArray[np.float64]

_FLOAT, _HALF = 1, 10
_BLOCKED = re.compile(r"_Q\d+(?:G\d+)?$")
"""What the tools put behind the name of a weight that they store in blocks."""

_ENDS = 2.0
"""Steps that count as one in a block: its zero point is rounded, or its largest level is missing, and either moves the
ends of a block by up to a step more than rounding does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """One weight: the original's name, its values, and the step of each; shapes are equal.

    `spacing` is the distance of neighbouring levels. `transposable`: it is stored for a MatMul, whichever way the
    original's operator takes it.
    """

    name: str
    values: Floats
    step: Floats
    spacing: Floats
    transposable: bool = False


def halves(originals: Mapping[str, onnx.TensorProto], tensors: Mapping[str, onnx.TensorProto]) -> Iterator[Narrow]:
    """Constants that were float32 and are float16; a step is the spacing of float16 there."""
    from onnx import numpy_helper

    for name, tensor in tensors.items():
        before = originals.get(name)
        if before is not None and before.data_type == _FLOAT and tensor.data_type == _HALF:
            values = numpy_helper.to_array(tensor)
            step = np.spacing(np.abs(values)).astype(np.float64)
            yield Narrow(name=name, values=values.astype(np.float64), step=step, spacing=step)


def blocks(model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]) -> Iterator[Narrow]:
    """Matrices (K, N) of every MatMulNBits, read out of their blocks."""
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
        yield Narrow(
            name=_BLOCKED.sub("", node.input[1]),
            values=((levels - centre) * steps).T,
            step=_ENDS * np.abs(steps).T,
            spacing=np.abs(steps).T,
            transposable=True,
        )


def _unpacked(packed: npt.NDArray[np.uint8], bits: int) -> Floats:
    """Levels of each row, the low bits of a byte first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    levels = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return levels.reshape(packed.shape[0], -1).astype(np.float64)
