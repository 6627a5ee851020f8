"""Probes: inputs made from real samples on which a wrong export shows itself. Deterministic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[np.generic]
Rows = npt.NDArray[np.intp]
Tensors = Mapping[str, AnyArray]

REAL = "real"
"""Name of the group that holds real samples as they are."""

NAN = "nan"
"""Name of the group whose rows hold NaN."""

BATCH = "batch-"
"""Prefix of the groups that hold real samples in batches of several sizes."""

ENOUGH_ROWS = 32
"""Rows below which the largest rounding error is not a fair sample of the noise."""

BATCH_SIZES = (0, 1, 2, 3, 17, 64, 257)

_FACTORS = {"x10": 10.0, "x1e3": 1e3, "x1e5": 1e5, "x1e-8": 1e-8, "negatives": -1.0}


def edge_inputs(samples: Tensors) -> dict[str, Tensors]:
    """Inputs at the edges of what a model may see, as groups of 32 rows.

    `constants` holds rows of one value: zeros, ones, minus ones and values over the range of the samples; `spikes`
    rows of zeros with one large element; `x10`, `x1e3`, `x1e5`, `x1e-8` and `negatives` multiples of real rows. Only
    floats are distorted. Integers keep real rows, or stay within the range observed at their place; text and
    booleans keep real rows. A multiple that an input's type cannot hold is left out, and so is a group that would
    only repeat real rows.

    Args:
        samples: real inputs by name, axis 0 is the batch.

    Raises:
        ValueError: there is no row.
    """
    rows = _even_rows(samples)
    kinds = {array.dtype.kind for array in samples.values()}
    groups: dict[str, Tensors] = {}
    if kinds & set("fiu"):
        groups["constants"] = {name: _constants(array, rows) for name, array in samples.items()}
    if "f" in kinds:
        groups["spikes"] = _distorted(samples, rows, _spikes)
        for name, factor in _FACTORS.items():
            if all(_holds(array, factor) for array in samples.values()):
                groups[name] = {n: _multiple(array[rows], factor) for n, array in samples.items()}
    return groups


def batch_inputs(samples: Tensors) -> dict[str, Tensors]:
    """Real rows in batches of 0, 1, 2, 3, 17, 64 and 257, each starting where the one before ended.

    Raises:
        ValueError: there is no row.
    """
    count = _count(samples)
    groups: dict[str, Tensors] = {}
    start = 0
    for size in BATCH_SIZES:
        chosen = (start + np.arange(size)) % count
        groups[f"{BATCH}{size}"] = {name: array[chosen] for name, array in samples.items()}
        start += size
    return groups


def nonfinite_inputs(samples: Tensors) -> dict[str, Tensors]:
    """Groups `nan` and `infinite` of 32 real rows, in which one element of each float input is that; infinity of both
    signs.

    They stand apart because many a source takes one and refuses the other. Nothing where no input is of floats.

    Raises:
        ValueError: there is no row.
    """
    rows = _even_rows(samples)
    if all(array.dtype.kind != "f" for array in samples.values()):
        return {}
    kinds = {NAN: (np.nan,), "infinite": (np.inf, -np.inf)}
    return {
        name: _distorted(samples, rows, functools.partial(_with_strange, values=values))
        for name, values in kinds.items()
    }


def probe_groups(samples: Tensors) -> dict[str, Tensors]:
    """Real rows, edges made of them, and rows that are no numbers.

    Raises:
        ValueError: there is no row.
    """
    return {REAL: samples, **edge_inputs(samples), **nonfinite_inputs(samples)}


def in_rows(samples: Tensors, count: int) -> Tensors:
    """The first `count` rows; rows repeat if there are fewer."""
    chosen = np.arange(count) % _count(samples)
    return {name: array[chosen] for name, array in samples.items()}


def _count(samples: Tensors) -> int:
    count = min((len(array) for array in samples.values()), default=0)
    if not count:
        raise ValueError("probes are made from real samples, and there are none")
    return count


def _even_rows(samples: Tensors) -> Rows:
    count = _count(samples)
    return np.arange(ENOUGH_ROWS) * max(1, count // ENOUGH_ROWS) % count


def _distorted(samples: Tensors, rows: Rows, change: Callable[[AnyArray], AnyArray]) -> Tensors:
    """The chosen rows, with `change` done to those of floats."""
    return {name: change(array[rows]) if array.dtype.kind == "f" else array[rows] for name, array in samples.items()}


def _constants(array: AnyArray, rows: Rows) -> AnyArray:
    shape = (len(rows), *array.shape[1:])
    if array.dtype.kind == "f":
        finite = array[np.isfinite(array.astype(np.float64))].astype(np.float64)
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        values = np.concatenate([[0.0, 1.0, -1.0], np.linspace(low, high, len(rows) - 3)])
        return np.broadcast_to(values.reshape(-1, *[1] * (array.ndim - 1)), shape).astype(array.dtype)
    if array.dtype.kind in "iu":
        whole = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64)
        low_end, high_end = whole.min(axis=0), whole.max(axis=0)
        ends = np.stack([low_end, high_end, np.clip(0, low_end, high_end)])
        return ends[np.arange(len(rows)) % len(ends)].astype(array.dtype)
    return array[rows]


def _spikes(chosen: AnyArray) -> AnyArray:
    """One element a row, walking evenly over all places; as large as the largest value, sign alternating."""
    flat = np.zeros((len(chosen), int(np.prod(chosen.shape[1:]))), dtype=np.float64)
    places = flat.shape[1]
    if places:
        height = _largest(chosen) or 1.0
        row = np.arange(len(chosen))
        place = row * max(1, places // len(chosen)) % places
        flat[row, place] = np.where(row % 2, -height, height)
    return flat.reshape(chosen.shape).astype(chosen.dtype)


def _with_strange(chosen: AnyArray, values: Sequence[float]) -> AnyArray:
    flat = chosen.astype(np.float64).reshape(len(chosen), -1)
    places = flat.shape[1]
    if places:
        row = np.arange(len(chosen))
        flat[row, row * max(1, places // len(chosen)) % places] = np.resize(values, len(chosen))
    return flat.reshape(chosen.shape).astype(chosen.dtype)


def _multiple(chosen: AnyArray, factor: float) -> AnyArray:
    return (chosen.astype(np.float64) * factor).astype(chosen.dtype) if chosen.dtype.kind == "f" else chosen


def _holds(array: AnyArray, factor: float) -> bool:
    if array.dtype.kind != "f":
        return True
    return abs(factor) * _largest(array) < float(np.finfo(array.dtype.name).max)


def _largest(array: AnyArray) -> float:
    values = np.abs(array.astype(np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))
