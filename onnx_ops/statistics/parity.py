"""Parity: distances between the answers of two models, in units of rounding noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import BatchInvariance, ParityColumn, ParityMeasurement
from onnx_ops.errors import MeasurementError
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.statistics.probes import MIN_NOISE_ROWS, REAL

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
LARGEST = 1e30
"""Represents infinity in values that are written as JSON."""

_RTOL = {"float16": 5e-3, "bfloat16": 3e-2}
_RTOL_DEFAULT = 1e-3
_ATOL_OF_RTOL = 1e-2
_TOLERANCE_FACTOR = 10.0
_BFLOAT16_EPSILON = 2.0**-7
_SINGLE_EPSILON = 2.0**-23
_LARGEST_FLOOR = 1e-4
"""Share of a column's largest answer above which only the source's own noise excuses an error: an estimate from the
graph adds up worst cases, and would make a model with large terms that cancel pass whatever it answers."""


_FEW_TIES, _OFTEN_UNSURE = 0.5, 0.05
"""Share of rows whose scores may all tie, and of rows in which the source's two answers then have to differ."""

DIVERGENCE_FACTOR = 16.0
"""Error / noise above which a value diverges. With 16, 153 of 189 injected faults show at the faulty node or its
successor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What the graph shows of one output: its columns, and how far rounding may move its elements.

    Args:
        floor: error of each element in float32, of the output's shape; None if it is unknown.
        axis: axis of the columns; None makes the whole output one column.
        segments: number of the part that each element comes from, of the output's shape.
        scores: what an output of indices or classes ranks along `scores_axis`, with the error `scores_error` of each
            score.
        labels: the class of each index; None if the output holds indices.
    """

    floor: Array | None = None
    axis: int | None = -1
    segments: Array | None = None
    scores: Array | None = None
    scores_error: Array | None = None
    scores_axis: int = -1
    labels: Array | None = None


WHOLE = Rounding(axis=None)
"""Every value is measured in the noise of the whole output."""

MAX_COLUMNS = 4096
"""Columns above which those of one scale are measured as one: the largest of millions of errors is far from usual."""

_SHOWN_COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNoise:
    """Largest answer and largest distance of two correct answers in each column."""

    scales: Floats
    gaps: Floats


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of an output: indices of one axis, apart in each segment."""

    shape: tuple[int, ...]
    axis: int | None
    segments: Array | None

    @classmethod
    def of(cls, array: Array, rounding: Rounding) -> Columns:
        """Return the columns of an output; one, if it has one value a row."""
        axis, segments = rounding.axis, rounding.segments
        has_columns = axis is not None and array.ndim > 1 and 0 < axis % array.ndim < array.ndim
        columns = cls(array.shape, axis if has_columns else None, None)
        if segments is None or segments.shape != array.shape or array.ndim < 2 or columns.contain(segments):
            return columns
        return cls(array.shape, columns.axis, segments)

    def contain(self, segments: Array) -> bool:
        """Return whether each column lies in one segment, so that segments part nothing."""
        by_column = segments.reshape(-1, 1) if self.axis is None else np.moveaxis(segments, self.axis, -1)
        flat = by_column.reshape(-1, by_column.shape[-1])
        return not flat.size or bool((flat == flat[:1]).all())

    @property
    def width(self) -> int:
        """Return the number of columns of a segment."""
        return 1 if self.axis is None else self.shape[self.axis]

    def find_largest(self, values: Floats) -> Floats:
        """Return the largest value of each column; values are not negative."""
        parts = [values]
        if self.segments is not None:
            count = int(self.segments.max(initial=0)) + 1
            parts = [np.where(self.segments == number, values, 0.0) for number in range(count)]
        return np.concatenate([self._reduce(part) for part in parts])

    def _reduce(self, values: Floats) -> Floats:
        if self.axis is None:
            return np.asarray([values.max(initial=0.0)])
        return np.asarray(np.moveaxis(values, self.axis, -1).reshape(-1, self.width).max(axis=0, initial=0.0))

    def spread(self, by_column: Floats) -> Floats:
        """Return the value of its column for each element, in a shape that broadcasts to the output's."""
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
        """Return how a column is called; empty if it is the only one."""
        segment, index = divmod(number, self.width)
        kind = "column" if self.axis is None or self.axis % len(self.shape) == len(self.shape) - 1 else "channel"
        names = [f"segment {segment}"] if self.segments is not None else []
        names += [f"{kind} {index}"] if self.width > 1 else []
        return ", ".join(names)


def measure_output(
    *,
    group: str,
    output: str,
    onnx: Array,
    single: Array | None,
    double: Array | None,
    epsilon: float = 0.0,
    rounding: Rounding = WHOLE,
    known: ColumnNoise | None = None,
) -> ParityMeasurement:
    """Measure how far an export's output is from the source's answers.

    Floats: by column, error = max |onnx - double| and noise = max(gap, floor, 2 eps max |double|), where the gap is
    max |single - double| over the columns whose largest answers have the same decimal exponent. Only values that are
    finite in all three count. The column with the largest error / noise is reported. A value that is NaN or infinite
    unlike both answers is a mismatch. eps is that of float32, or of a coarser output. Without a floor, the 2 eps are
    those of the whole output's largest answer. With one answer only, the noise is the larger of the floor and
    (rtol |answer| + atol max |answer|) / 10 with rtol 1e-3 (float16 5e-3, bfloat16 3e-2) and atol = rtol / 100, so that
    the default limit of the ratio equals that tolerance.

    Other types: error = share of rows that differ where both answers agree, and whose scores do not tie; there is no
    noise. Rows that differ and tie are `explained`.

    A ratio without noise is 0 if nothing differs, else `LARGEST`, which also caps error and noise.

    Args:
        onnx: the export's answer; axis 0 is the batch.
        epsilon: spacing of the floats that the export computes in, where that is coarser than its outputs'.
        known: of real rows, for a group of inputs with too few rows to show the noise of its columns.

    Raises:
        MeasurementError: there is no answer, or the two have different shapes.
    """
    reference = double if double is not None else single
    if reference is None or (single is not None and single.shape != reference.shape):
        what = "the source's answers in float32 and float64 have different shapes"
        if reference is None:
            what = "the source gave no answer to compare with"
        raise MeasurementError(what, where=f"output {output}, inputs {group}")
    rows = int(onnx.shape[0]) if onnx.ndim else 1
    blank = ParityMeasurement(output=output, group=group, rows=rows, error=0.0, noise=0.0, ratio=0.0)
    if onnx.shape != reference.shape:
        return replace(blank, mismatch=f"shape {onnx.shape}, the source gives {reference.shape}")
    if is_text(onnx) != is_text(reference):
        return replace(blank, mismatch=f"type {onnx.dtype}, the source gives {reference.dtype}")
    if not (is_float(onnx) or is_float(reference)):
        return _measure_labels(blank, onnx, reference, reference if single is None else single, rounding)
    answer = onnx.astype(np.float64)
    answers = [a.astype(np.float64) for a in (double, single) if a is not None]
    if mismatch := _describe_non_finite_mismatch(answer, answers):
        return replace(blank, mismatch=mismatch)
    finite = np.isfinite(answer) & np.logical_and.reduce([np.isfinite(a) for a in answers])
    if not finite.any():
        return blank
    answer, answers = np.where(finite, answer, 0.0), [np.where(finite, a, 0.0) for a in answers]
    unit = max(epsilon, compute_epsilon(onnx))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if len(answers) == 2:
            return _measure_in_noise(blank, answer, answers[0], answers[1], unit, rounding, known)
        return _measure_in_tolerance(blank, answer, answers[0], onnx.dtype.name, unit, rounding, known)


def _measure_in_noise(
    blank: ParityMeasurement,
    answer: Floats,
    double: Floats,
    single: Floats,
    unit: float,
    rounding: Rounding,
    known: ColumnNoise | None,
) -> ParityMeasurement:
    """Measure an answer in units of the noise of its columns."""
    columns = Columns.of(double, rounding)
    own = ColumnNoise(scales=columns.find_largest(np.abs(double)), gaps=columns.find_largest(np.abs(single - double)))
    errors = columns.find_largest(np.abs(answer - double))
    noises = compute_column_noises(own, find_floors(own.scales, columns, rounding, unit), known)
    return report_columns(blank, columns, errors, noises, own.scales)


def report_columns(
    blank: ParityMeasurement, columns: Columns, errors: Floats, noises: Floats, scales: Floats
) -> ParityMeasurement:
    """Return the measurement of the worst column, and on real rows the columns in which the least is visible."""
    ratios = np.array([compute_ratio(float(e), float(n)) for e, n in zip(errors, noises, strict=True)])
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


def compute_column_noises(own: ColumnNoise, floors: Floats, known: ColumnNoise | None = None) -> Floats:
    """Return the noise of each column: its floor, or what two correct answers differ by in columns of its scale.

    Few rows show the noise of a single column by luck only; columns of one scale are a larger sample. So are `known`
    columns, those of real rows. Above `MAX_COLUMNS` columns, those of one scale share their largest floor too.
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
    """Return the decimal exponents of the scales; that of 0 is below all others."""
    return np.where(scales > 0, np.floor(np.log10(np.where(scales > 0, scales, 1.0))), -400.0)


def _share_largest(places: Floats, of_values: Floats, values: Floats) -> Floats:
    """Return for each place the largest value of the same place."""
    distinct, where = np.unique(np.concatenate([places, of_values]), return_inverse=True)
    largest = np.zeros(len(distinct))
    np.maximum.at(largest, where[len(places) :], values)
    return np.asarray(largest[where[: len(places)]])


def find_floors(scales: Floats, columns: Columns, rounding: Rounding, unit: float) -> Floats:
    """Return the least noise of each column: its floor in float32, and twice the spacing `unit` of the output.

    A floor is at most `_LARGEST_FLOOR` of the column's largest answer, or twice the spacing of float32 at 1, which is
    what kernels err by.
    """
    floor = rounding.floor
    if floor is None or floor.shape != columns.shape:
        return np.full(len(scales), 2 * unit * float(scales.max(initial=0.0)))
    values = np.where(np.isfinite(floor), floor, 0.0).astype(np.float64)
    floors = np.minimum(columns.find_largest(values), np.maximum(_LARGEST_FLOOR * scales, 2 * _SINGLE_EPSILON))
    return np.maximum(floors, 2 * unit * scales)


def _measure_in_tolerance(
    blank: ParityMeasurement,
    answer: Floats,
    expected: Floats,
    kind: str,
    unit: float,
    rounding: Rounding,
    known: ColumnNoise | None,
) -> ParityMeasurement:
    """Measure an answer in tenths of a fixed tolerance, or in the floor of its column where that is larger."""
    rtol = _RTOL.get(kind, _RTOL_DEFAULT)
    atol = rtol * _ATOL_OF_RTOL
    columns = Columns.of(expected, rounding)
    errors, sizes = np.abs(answer - expected), np.abs(expected)
    scales = columns.find_largest(sizes)
    of_tolerance, floors = scales, np.zeros(len(scales))
    if rounding.floor is None:
        of_tolerance = np.full(len(scales), scales.max(initial=0.0))
    else:
        if known is not None and known.scales.shape == scales.shape:
            of_tolerance = np.maximum(scales, known.scales)
        floors = find_floors(scales, columns, rounding, unit)
    noises = (rtol * sizes + atol * columns.spread(of_tolerance)) / _TOLERANCE_FACTOR
    noises = np.maximum(noises, columns.spread(floors))
    ratios = columns.find_largest(np.where(errors == 0, 0.0, np.minimum(errors / noises, LARGEST)))
    worst_errors = columns.find_largest(errors)
    # The largest error need not have the largest ratio: the noise reported is the one that belongs to both.
    in_units = np.where(ratios > 0, worst_errors / np.where(ratios > 0, ratios, 1.0), columns.find_largest(noises))
    measurement = report_columns(blank, columns, worst_errors, in_units, scales)
    return replace(measurement, tolerance=f"rtol {rtol:g} + atol {atol:g} × max |answer|")


def _measure_labels(
    blank: ParityMeasurement, onnx: Array, double: Array, single: Array, rounding: Rounding
) -> ParityMeasurement:
    """Measure the share of rows whose labels differ although the source is sure of them."""
    if not onnx.size:
        return blank
    if is_text(onnx):
        onnx, double, single = (a.astype(np.str_) for a in (onnx, double, single))
    wrong = (onnx != double) & (single == double)
    tied = wrong & find_ties(onnx, double, rounding)
    error = float(any_by_row(wrong & ~tied).mean())
    explained = int((any_by_row(tied) & ~any_by_row(wrong & ~tied)).sum())
    return replace(blank, error=error, ratio=compute_ratio(error, 0.0), explained=explained)


def find_ties(onnx: Array, expected: Array, rounding: Rounding) -> Bools:
    """Return where two indices or classes differ, and have scores that rounding can exchange.

    An index that occurs twice is no tie, unless it does so in the expected answer.
    """
    none = np.zeros(onnx.shape, dtype=bool)
    scores, errors, axis = rounding.scores, rounding.scores_error, rounding.scores_axis
    if (
        scores is None
        or errors is None
        or errors.shape != scores.shape
        or not (scores.size and onnx.size and onnx.ndim)
    ):
        return none
    if rounding.labels is not None:
        onnx, expected = (_find_places(a, rounding.labels) for a in (onnx, expected))
    if onnx.dtype.kind not in "iu":
        return none
    count, rest = divmod(onnx.size * scores.shape[axis], scores.size)
    shape = list(scores.shape)
    shape[axis] = count
    if rest or len(onnx) != len(scores):
        return none
    chosen, wanted = (np.clip(a.reshape(shape), 0, scores.shape[axis] - 1).astype(np.intp) for a in (onnx, expected))
    scores = np.where(np.isfinite(scores), scores, 0.0).astype(np.float64)
    limits = _TOLERANCE_FACTOR * np.where(np.isfinite(errors), errors, 0.0).astype(np.float64)
    (first, second), (allowed, other) = (
        [np.asarray(np.take_along_axis(np.asarray(values), places, axis)) for places in (chosen, wanted)]
        for values in (scores, limits)
    )
    gaps, allowed = np.abs(first - second), np.maximum(allowed, other)
    twice = _has_duplicates(chosen, axis) & ~_has_duplicates(wanted, axis)
    inside = onnx.astype(np.int64).reshape(shape) == chosen
    return np.asarray(((gaps <= allowed) & ~twice & inside).reshape(onnx.shape))


def _find_places(classes: Array, labels: Array) -> Array:
    """Return the index of each class; -1 for others."""
    classes, labels = (a.astype(np.str_) for a in (classes, labels))
    order = np.argsort(labels)
    places = order[np.searchsorted(labels, classes, sorter=order).clip(max=len(labels) - 1)]
    return np.asarray(np.where(labels[places] == classes, places, -1))


def is_ranked_by_scores(single: Array, double: Array, rounding: Rounding) -> bool:
    """Return whether the scores of real rows rank anything, so that their ties explain a difference.

    A wrong export may give all classes the same score. Where that is so, its ties count only if the source is often
    unsure too, or gives practically one answer, while the scores are not the same in all rows.
    """
    scores, errors, axis = rounding.scores, rounding.scores_error, rounding.scores_axis
    if scores is None or errors is None or errors.shape != scores.shape or not scores.size:
        return False
    finite = np.where(np.isfinite(scores), scores, 0.0).astype(np.float64)
    limits = _TOLERANCE_FACTOR * np.where(np.isfinite(errors), errors, 0.0).astype(np.float64)
    if (np.ptp(finite, axis=axis) <= limits.max(axis=axis)).mean() <= _FEW_TIES:
        return True
    if single.shape != double.shape or not single.size:
        return False
    _, counts = np.unique(double.astype(np.str_) if is_text(double) else double, return_counts=True)
    varies = float(np.ptp(finite, axis=0).max()) > float(limits.max())
    one_answer = counts.max() >= (1 - _OFTEN_UNSURE) * double.size
    return bool(any_by_row(single != double).mean() >= _OFTEN_UNSURE or (one_answer and varies))


def _has_duplicates(indices: Array, axis: int) -> Bools:
    ordered = np.sort(indices, axis=axis)
    return np.asarray((np.diff(ordered, axis=axis) == 0).any(axis=axis, keepdims=True))


def any_by_row(wrong: Bools) -> Bools:
    """Return for each row whether any of its elements is."""
    return np.asarray(wrong.reshape(len(wrong), -1).any(axis=1) if wrong.ndim else np.atleast_1d(wrong), dtype=np.bool_)


def _describe_non_finite_mismatch(onnx: Floats, answers: Sequence[Floats]) -> str:
    kind = _classify_numbers(onnx)
    mismatched = np.logical_and.reduce([kind != _classify_numbers(a) for a in answers])
    if not mismatched.any():
        return ""
    first = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(mismatched)))
    pair = np.atleast_1d(onnx)[first], np.atleast_1d(answers[0])[first]
    count = f"{int(mismatched.sum())} of {mismatched.size} values"
    return f"{count} are non-finite on one side only; at {first} {pair[0]:g}, the source gives {pair[1]:g}"


def _classify_numbers(array: Floats) -> npt.NDArray[np.int8]:
    """Return 0 for finite values, 1 for infinity, -1 for minus infinity, 2 for NaN."""
    return np.select([np.isnan(array), np.isinf(array)], [2, np.sign(array)], 0).astype(np.int8)


def measure_columns(single: Array, double: Array, rounding: Rounding) -> ColumnNoise | None:
    """Return the columns of real rows, by which groups of few rows are measured; None if the answers are not floats.

    Args:
        double: the answer in float64; the same answer again, if there is only one.
    """
    if not (is_float(single) and is_float(double) and single.shape == double.shape and single.size):
        return None
    first, exact = single.astype(np.float64), double.astype(np.float64)
    finite = np.isfinite(first) & np.isfinite(exact)
    first, exact = np.where(finite, first, 0.0), np.where(finite, exact, 0.0)
    columns = Columns.of(exact, rounding)
    return ColumnNoise(scales=columns.find_largest(np.abs(exact)), gaps=columns.find_largest(np.abs(first - exact)))


def compute_ratio(error: float, noise: float) -> float:
    """Return error / noise, at most `LARGEST`; 0 without an error."""
    if error == 0:
        return 0.0
    return min(error / noise, LARGEST) if noise > error / LARGEST else LARGEST


def compute_epsilon(array: Array) -> float:
    """Return the relative spacing of floats, at least that of float32."""
    single = float(np.finfo(np.float32).eps)
    if array.dtype.name == "bfloat16":
        return _BFLOAT16_EPSILON
    return max(single, float(np.finfo(array.dtype.name).eps)) if array.dtype.kind == "f" else single


def is_float(array: Array) -> bool:
    """Return whether the array holds floats, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def is_text(array: Array) -> bool:
    """Return whether the array holds texts."""
    return array.dtype.kind in "USO"


def is_divergent(measurement: ParityMeasurement, factor: float = DIVERGENCE_FACTOR) -> bool:
    """Return whether a value is farther from its source than rounding explains."""
    return bool(measurement.mismatch) or not measurement.ratio <= factor


def find_first_divergence(
    names: Iterable[str], onnx: Tensors, single: Tensors, double: Tensors | None = None
) -> tuple[str, float] | None:
    """Return the first value whose error exceeds `DIVERGENCE_FACTOR` times its own noise, and that ratio.

    The ratio is `LARGEST` for another shape. Only floats are compared: integers and booleans change on a tie as soon as
    their inputs round differently, and a real fault shows at the next float. Values that one side lacks are skipped.

    Args:
        names: names of the values in topological order.
        double: the source's values in float64, if it runs in that; otherwise fixed tolerances apply.
    """
    for name in names:
        if name not in onnx or name not in single or "f" not in (onnx[name].dtype.kind, single[name].dtype.kind):
            continue
        exact = double.get(name) if double is not None else None
        if exact is not None and exact.shape != single[name].shape:
            exact = None
        measurement = measure_output(group="", output=name, onnx=onnx[name], single=single[name], double=exact)
        if is_divergent(measurement):
            return name, LARGEST if measurement.mismatch else measurement.ratio
    return None


def pick_evenly(names: Sequence[str], limit: int) -> list[str]:
    """Return at most `limit` of the names, evenly spaced, always with the last one."""
    if len(names) <= limit:
        return list(names)
    return [names[(index + 1) * len(names) // limit - 1] for index in range(limit)]


def select_rows(onnx: Array, reference: Array) -> list[int]:
    """Return at most 32 rows: the worst one, and evenly spaced others."""
    count = len(reference)
    if count <= MIN_NOISE_ROWS:
        return list(range(count))
    even = {index * count // (MIN_NOISE_ROWS - 1) for index in range(MIN_NOISE_ROWS - 1)}
    if onnx.shape == reference.shape:
        even.add(find_worst_row(onnx, reference))
    return sorted(even)


def find_worst_row(onnx: Array, reference: Array) -> int:
    """Return the row with the largest difference; one-sided NaN is largest."""
    if {onnx.dtype.kind, reference.dtype.kind} <= set("fiub"):
        a, b = onnx.astype(np.float64), reference.astype(np.float64)
        with np.errstate(all="ignore"):
            away = np.where(np.isnan(a) == np.isnan(b), np.nan_to_num(np.abs(a - b), nan=0.0), np.inf)
    else:
        away = (onnx != reference).astype(np.float64)
    return int(away.reshape(len(away), -1).max(axis=1, initial=0.0).argmax())


def measure_batch_invariance(
    batched: Tensors, alone: Sequence[Tensors], noise: Mapping[str, float] | None = None
) -> tuple[BatchInvariance, ...]:
    """Measure how far the rows of one batch are from the same rows run one by one.

    Floats: the ratio is in units of the output's noise or, without one, of a tenth of rtol 1e-3 + atol 1e-5 max
    |answer|. Labels have no noise. If the model also has scores, a changed label counts only as much as the scores
    differ, so that a tie is not a finding; otherwise every change counts. A value that is finite on one side only
    counts as `LARGEST`.

    Args:
        alone: outputs of n runs on one row each, in the same order.

    Returns:
        One measurement for each output that has one entry per row in every run.
    """
    floats: list[BatchInvariance] = []
    labels: list[BatchInvariance] = []
    for name, together in sorted(batched.items()):
        rows = [tensors[name] for tensors in alone if name in tensors]
        if not rows or together.ndim == 0 or not len(together) == len(alone) == len(rows):
            continue
        if all(row.shape == (1, *together.shape[1:]) for row in rows):
            kind = floats if together.dtype.kind == "f" else labels
            kind.append(_compare_batches(name, together, np.concatenate(rows), (noise or {}).get(name, 0.0)))
    if floats:
        worst = max(m.ratio for m in floats)
        labels = [replace(label, ratio=min(label.ratio, worst)) for label in labels]
    return tuple(sorted((*floats, *labels), key=lambda m: m.output))


def measure_noise(single: Tensors | None, double: Tensors | None) -> dict[str, float]:
    """Return the source's rounding noise by float output.

    Empty if one of the two is missing. The noise is that of parity: max(max |single - double|, 2 eps max |double|).
    """
    if single is None or double is None:
        return {}
    return {
        name: measure_output(group=REAL, output=name, onnx=array, single=array, double=double[name]).noise
        for name, array in single.items()
        if array.dtype.kind == "f" and name in double
    }


def _compare_batches(name: str, together: Array, single: Array, noise: float) -> BatchInvariance:
    # Fixed tolerances, as for a source with one answer; the noise then takes their place.
    measurement = measure_output(group=REAL, output=name, onnx=together, single=single, double=None)
    error, ratio = measurement.error, measurement.ratio
    is_scores = together.dtype.kind == "f"
    if measurement.mismatch:
        error = ratio = LARGEST
    elif is_scores and noise > 0:
        first, second = together.astype(np.float64), single.astype(np.float64)
        finite = np.isfinite(first) & np.isfinite(second)
        error = min(float(np.abs(first[finite] - second[finite]).max(initial=0.0)), LARGEST)
        ratio = min(error / noise, LARGEST)
    changed = None if is_scores else error
    if is_scores and together.ndim == 2 and together.shape[1] > 1:
        changed = float((together.argmax(axis=1) != single.argmax(axis=1)).mean())
    return BatchInvariance(output=name, rows=len(single), error=error, ratio=ratio, changed=changed)
