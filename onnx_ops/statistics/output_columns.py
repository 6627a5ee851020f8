"""Columns of an output, and the rounding noise of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import ParityColumn, ParityMeasurement
from onnx_ops.ports.data import Array
from onnx_ops.statistics.probes import REAL

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LARGEST = 1e30
"""Value that represents infinity in evidence, since JSON has no infinity."""

MAX_COLUMNS = 4096
"""Number of columns above which columns of one scale share their largest floor.

The largest error of millions of columns is far above the usual one.
"""

TOLERANCE_FACTOR = 10.0
"""Ratio of error to noise that rounding can explain.

It is the default limit of the parity gate.
"""

_BFLOAT16_EPSILON = 2.0**-7
_SINGLE_EPSILON = 2.0**-23

_LARGEST_FLOOR = 1e-4
"""Maximum floor, as a share of a column's largest answer.

Above it, only the noise of the source's answers can excuse an error. A floor from the graph adds up
worst cases. Without this maximum, a model with large terms that cancel would pass with any answer.
"""

_SHOWN_COLUMNS = 16
"""Maximum number of columns that a measurement lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The columns and the rounding error of one output, computed from the graph.

    Args:
        floor: error of each element in float32, of the output's shape; None if it is unknown.
        axis: axis of the columns; None makes the whole output one column.
        segments: number of the part that each element comes from, of the output's shape.
        scores: the values whose order along `scores_axis` determines an output of indices or
            classes; `scores_error` is the error of each score.
        labels: the class of each index; None if the output contains indices.
    """

    floor: Array | None = None
    axis: int | None = -1
    segments: Array | None = None
    scores: Array | None = None
    scores_error: Array | None = None
    scores_axis: int = -1
    labels: Array | None = None


WHOLE = Rounding(axis=None)
"""The rounding of an output that is measured as one column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNoise:
    """Largest answer, and largest difference of two correct answers, by column."""

    scales: Floats
    gaps: Floats


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of an output: the indices along one axis, separate in each segment."""

    shape: tuple[int, ...]
    axis: int | None
    segments: Array | None

    @classmethod
    def of(cls, array: Array, rounding: Rounding) -> Columns:
        """Return the columns of an output; one column if the axis is missing or axis 0.

        Segments are ignored if each column lies within one segment, if their shape differs, or if
        the output has fewer than two axes.
        """
        axis, segments = rounding.axis, rounding.segments
        has_columns = axis is not None and array.ndim > 1 and 0 < axis % array.ndim < array.ndim
        columns = cls(array.shape, axis if has_columns else None, None)
        if (
            segments is None
            or segments.shape != array.shape
            or array.ndim < 2
            or columns.contain(segments)
        ):
            return columns
        return cls(array.shape, columns.axis, segments)

    def contain(self, segments: Array) -> bool:
        """Return whether each column lies within one segment."""
        by_column = (
            segments.reshape(-1, 1) if self.axis is None else np.moveaxis(segments, self.axis, -1)
        )
        flat = by_column.reshape(-1, by_column.shape[-1])
        return not flat.size or bool((flat == flat[:1]).all())

    @property
    def width(self) -> int:
        """Return the number of columns of a segment."""
        return 1 if self.axis is None else self.shape[self.axis]

    def find_largest(self, values: Floats) -> Floats:
        """Return the largest value of each column of non-negative values."""
        parts = [values]
        if self.segments is not None:
            count = int(self.segments.max(initial=0)) + 1
            parts = [np.where(self.segments == number, values, 0.0) for number in range(count)]
        return np.concatenate([self._reduce(part) for part in parts])

    def _reduce(self, values: Floats) -> Floats:
        if self.axis is None:
            return np.asarray([values.max(initial=0.0)])
        return np.asarray(
            np.moveaxis(values, self.axis, -1).reshape(-1, self.width).max(axis=0, initial=0.0)
        )

    def spread(self, by_column: Floats) -> Floats:
        """Return the value of each element's column.

        The shape broadcasts to that of the output.
        """
        if self.axis is None and self.segments is None:
            return np.asarray(by_column[0])
        place = np.zeros((), dtype=np.intp)
        if self.axis is not None:
            sizes = [1] * len(self.shape)
            sizes[self.axis] = self.width
            place = np.arange(self.width).reshape(sizes)
        if self.segments is not None:
            place = place + self.segments.astype(np.intp) * self.width
        return np.asarray(by_column[place])

    def name(self, number: int) -> str:
        """Return the name of a column; empty if there is only one."""
        segment, index = divmod(number, self.width)
        kind = (
            "column"
            if self.axis is None or self.axis % len(self.shape) == len(self.shape) - 1
            else "channel"
        )
        names = [f"segment {segment}"] if self.segments is not None else []
        names += [f"{kind} {index}"] if self.width > 1 else []
        return ", ".join(names)


def measure_columns(single: Array, double: Array, rounding: Rounding) -> ColumnNoise | None:
    """Return the largest answer and difference of each column, on real rows.

    Both answers must be floats of one shape, with at least one value. Otherwise, return None. The
    result is also used for groups of few rows.

    Args:
        double: the answer in float64, or `single` again if there is none.
    """
    if not (is_float(single) and is_float(double) and single.shape == double.shape and single.size):
        return None
    first, exact = single.astype(np.float64), double.astype(np.float64)
    finite = np.isfinite(first) & np.isfinite(exact)
    first, exact = np.where(finite, first, 0.0), np.where(finite, exact, 0.0)
    columns = Columns.of(exact, rounding)
    return ColumnNoise(
        scales=columns.find_largest(np.abs(exact)), gaps=columns.find_largest(np.abs(first - exact))
    )


def compute_column_noises(
    own: ColumnNoise, floors: Floats, known: ColumnNoise | None = None
) -> Floats:
    """Return the noise of each column.

    The noise is the floor of the column, or a larger difference of two correct answers in columns
    of the same scale. A few rows show the noise of a single column only by chance; columns of the
    same scale are a larger sample. `known` columns, those of real rows, are part of the sample.
    Above `MAX_COLUMNS` columns, columns of the same scale also share their largest floor.
    """
    scales, gaps = own.scales, own.gaps
    if known is not None:
        if known.scales.shape == scales.shape:
            scales = np.maximum(scales, known.scales)
        gaps = np.concatenate([gaps, known.gaps])
    places = _find_decades(scales)
    of_gaps = places if known is None else np.concatenate([places, _find_decades(known.scales)])
    noises = _share_largest(places, of_gaps, gaps)
    shared = _share_largest(places, places, floors) if len(floors) > MAX_COLUMNS else floors
    return np.maximum(noises, shared)


def _find_decades(scales: Floats) -> Floats:
    """Return the decimal exponents of the scales; the exponent of 0 is the lowest."""
    return np.where(scales > 0, np.floor(np.log10(np.where(scales > 0, scales, 1.0))), -400.0)


def _share_largest(places: Floats, of_values: Floats, values: Floats) -> Floats:
    """Return, for each decade in `places`, the largest value of that decade."""
    distinct, where = np.unique(np.concatenate([places, of_values]), return_inverse=True)
    largest = np.zeros(len(distinct))
    np.maximum.at(largest, where[len(places) :], values)
    return np.asarray(largest[where[: len(places)]])


def find_floors(scales: Floats, columns: Columns, rounding: Rounding, unit: float) -> Floats:
    """Return the floor, the least noise, of each column.

    It is the error in float32, or twice the spacing of the column's largest answer if that is
    larger. The error is first limited to `_LARGEST_FLOOR` of the column's largest answer. This
    limit is at least twice the spacing of float32 at 1 (the error of kernels). If the error is
    unknown, the floor is twice the spacing of the output's largest answer.

    Args:
        scales: largest answer of each column.
        unit: relative spacing of the output's floats.
    """
    floor = rounding.floor
    if floor is None or floor.shape != columns.shape:
        return np.full(len(scales), 2 * unit * float(scales.max(initial=0.0)))
    values = np.where(np.isfinite(floor), floor, 0.0).astype(np.float64)
    floors = np.minimum(
        columns.find_largest(values), np.maximum(_LARGEST_FLOOR * scales, 2 * _SINGLE_EPSILON)
    )
    return np.maximum(floors, 2 * unit * scales)


def report_columns(
    blank: ParityMeasurement, columns: Columns, errors: Floats, noises: Floats, scales: Floats
) -> ParityMeasurement:
    """Return the measurement of the column with the largest ratio of error to noise.

    On real rows, the measurement lists the columns with the most noise for their scale. Only large
    errors are detected in these columns.
    """
    ratios = np.array(
        [compute_ratio(float(e), float(n)) for e, n in zip(errors, noises, strict=True)]
    )
    worst = int(np.lexsort((errors, ratios))[-1])
    described: tuple[ParityColumn, ...] = ()
    if blank.group == REAL:
        shares = np.where(scales > 0, noises / np.where(scales > 0, scales, 1.0), 0.0)
        shown = sorted(np.argsort(-shares, kind="stable")[:_SHOWN_COLUMNS].tolist())
        described = tuple(
            ParityColumn(
                column=columns.name(number),
                scale=min(float(scales[number]), LARGEST),
                error=min(float(errors[number]), LARGEST),
                noise=min(float(noises[number]), LARGEST),
            )
            for number in shown
        )
    return replace(
        blank,
        error=min(float(errors[worst]), LARGEST),
        noise=min(float(noises[worst]), LARGEST),
        ratio=float(ratios[worst]),
        column=columns.name(worst),
        scale=min(float(scales[worst]), LARGEST),
        columns=described,
    )


def compute_ratio(error: float, noise: float) -> float:
    """Return error / noise, at most `LARGEST`; 0 if the error is 0."""
    if error == 0:
        return 0.0
    return min(error / noise, LARGEST) if noise > error / LARGEST else LARGEST


def compute_epsilon(array: Array) -> float:
    """Return the relative spacing of an array's floats, or float32's if larger."""
    single = float(np.finfo(np.float32).eps)
    if array.dtype.name == "bfloat16":
        return _BFLOAT16_EPSILON
    return max(single, float(np.finfo(array.dtype.name).eps)) if array.dtype.kind == "f" else single


def is_float(array: Array) -> bool:
    """Return whether the array contains floats, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def is_text(array: Array) -> bool:
    """Return whether the array contains strings or objects."""
    return array.dtype.kind in "USO"


def any_by_row(wrong: Bools) -> Bools:
    """Return, for each row, whether any of its elements is wrong."""
    return np.asarray(
        wrong.reshape(len(wrong), -1).any(axis=1) if wrong.ndim else np.atleast_1d(wrong),
        dtype=np.bool_,
    )
