"""Where an export first departs from its source, value by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.statistics.parity import LARGEST, measure
from onnx_ops.statistics.probes import ENOUGH_ROWS

AnyArray = npt.NDArray[np.generic]
Tensors = Mapping[str, AnyArray]

FACTOR = 16.0
"""Error / noise above which a value has departed: 153 of 189 faults then show at the culprit or right after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The value that departs first, and by what multiple of its noise; `LARGEST` if its shape or NaNs differ."""

    value: str
    ratio: float


def departed(measurement: ParityMeasurement, factor: float = FACTOR) -> bool:
    """Whether a value is farther from its source than rounding explains."""
    return bool(measurement.mismatch) or not measurement.ratio <= factor


def first_departure(
    names: Iterable[str], onnx: Tensors, single: Tensors, double: Tensors | None = None, factor: float = FACTOR
) -> Departure | None:
    """The first of the values, in the order given, whose error exceeds `factor` times its own noise.

    Only floats are compared: an integer or a boolean turns on a tie as soon as what it is made of rounds differently,
    and if it is really wrong the next float shows it. Values that a side lacks are passed over.

    Args:
        names: values in topological order.
        onnx: the export's values by name.
        single: the source's values in float32.
        double: the source's values in float64, where it can be run so; without them fixed tolerances apply.
        factor: largest error / noise of a value that has not departed.
    """
    for name in names:
        if name not in onnx or name not in single or "f" not in (onnx[name].dtype.kind, single[name].dtype.kind):
            continue
        exact = double.get(name) if double is not None else None
        if exact is not None and exact.shape != single[name].shape:
            exact = None
        found = measure(group="", output=name, onnx=onnx[name], single=single[name], double=exact)
        if departed(found, factor):
            return Departure(value=name, ratio=LARGEST if found.mismatch else found.ratio)
    return None


def spread(names: Sequence[str], limit: int) -> list[str]:
    """At most `limit` of the names, evenly, the last one always among them."""
    if len(names) <= limit:
        return list(names)
    return [names[(index + 1) * len(names) // limit - 1] for index in range(limit)]


def telling_rows(onnx: AnyArray, reference: AnyArray) -> list[int]:
    """At most 32 rows: the one that is worst off, and others evenly, so that the noise is a fair sample."""
    count = len(reference)
    if count <= ENOUGH_ROWS:
        return list(range(count))
    even = {index * count // (ENOUGH_ROWS - 1) for index in range(ENOUGH_ROWS - 1)}
    if onnx.shape == reference.shape:
        even.add(worst_row(onnx, reference))
    return sorted(even)


def worst_row(onnx: AnyArray, reference: AnyArray) -> int:
    """The row that is farthest off, one that is NaN on one side only before all others. The shapes are equal."""
    if {onnx.dtype.kind, reference.dtype.kind} <= set("fiub"):
        a, b = onnx.astype(np.float64), reference.astype(np.float64)
        with np.errstate(all="ignore"):
            away = np.where(np.isnan(a) == np.isnan(b), np.nan_to_num(np.abs(a - b), nan=0.0), np.inf)
    else:
        away = (onnx != reference).astype(np.float64)
    return int(away.reshape(len(away), -1).max(axis=1, initial=0.0).argmax())
