"""Parity: distances between the answers of two models, in units of rounding noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import BatchInvariance, ParityMeasurement
from onnx_ops.errors import MeasurementError
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.statistics.output_columns import (
    LARGEST,
    TOLERANCE_FACTOR,
    WHOLE,
    ColumnNoise,
    Columns,
    Floats,
    Rounding,
    any_by_row,
    compute_column_noises,
    compute_epsilon,
    compute_ratio,
    find_floors,
    is_float,
    is_text,
    report_columns,
)
from onnx_ops.statistics.probes import MIN_NOISE_ROWS, REAL
from onnx_ops.statistics.ranking_ties import find_ties

_RTOL = {"float16": 5e-3, "bfloat16": 3e-2}
_RTOL_DEFAULT = 1e-3
_ATOL_OF_RTOL = 1e-2
"""Absolute tolerance by the largest answer, as a share of the relative tolerance."""

DIVERGENCE_FACTOR = 16.0
"""Ratio of error to noise above which a value diverges.

With 16, a nightly test in `tests/measure/test_measure_parity.py` locates at least 80 % of the
injected faults at the faulty node or its successor.
"""


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

    Floats are measured by column, and the column with the largest error / noise is reported:

    - error = max |onnx - double|.
    - noise = max(gap, floor, 2 eps max |double|); `find_floors` limits the floor.
    - gap = max |single - double| over the columns whose largest answers have the same decimal
      exponent.

    Only values that are finite in all three answers are compared. The kind of a value is finite,
    infinite (with its sign) or NaN. A value is a mismatch if its kind differs from that in every
    answer of the source. eps is that of float32, or of the output if it is coarser. Without a
    floor, the term 2 eps max |double| is that of the whole output.

    With one answer only, the noise is the larger of the floor and (rtol |answer| + atol max
    |answer|) / 10. Here rtol is 1e-3 (float16 5e-3, bfloat16 3e-2) and atol is rtol / 100. The
    default limit of the ratio then equals this tolerance.

    Other types have no noise. Their error is the share of rows that differ where both answers agree
    and the scores do not tie. Rows that differ and tie are `explained`.

    Without noise, the ratio is 0 for an error of 0, and otherwise `LARGEST`. `LARGEST` is also the
    maximum of error and noise.

    Args:
        onnx: the export's answer; axis 0 is the batch.
        single, double: the source's answers in float32 and float64; None for a missing answer.
        epsilon: spacing of the floats that the export computes in, if coarser than that of its
            outputs.
        rounding: the columns and the floor of the output.
        known: noise of the columns on real rows, for a group with too few rows to estimate it.

    Raises:
        MeasurementError: there is no answer, or the two answers have different shapes.
    """
    reference = _choose_reference(single, double, where=f"output {output}, inputs {group}")
    rows = int(onnx.shape[0]) if onnx.ndim else 1
    blank = ParityMeasurement(
        output=output, group=group, rows=rows, error=0.0, noise=0.0, ratio=0.0
    )
    if onnx.shape != reference.shape:
        return replace(blank, mismatch=f"shape {onnx.shape}, the source gives {reference.shape}")
    if is_text(onnx) != is_text(reference):
        return replace(blank, mismatch=f"type {onnx.dtype}, the source gives {reference.dtype}")
    if not (is_float(onnx) or is_float(reference)):
        return _measure_labels(
            blank, onnx, reference, reference if single is None else single, rounding
        )
    references = [array for array in (double, single) if array is not None]
    return _measure_floats(blank, onnx, references, epsilon, rounding, known)


def _choose_reference(single: Array | None, double: Array | None, *, where: str) -> Array:
    """Return the source's answer in float64, or in float32 if there is none."""
    reference = double if double is not None else single
    if reference is None:
        raise MeasurementError("the source gave no answer to compare with", where=where)
    if single is not None and single.shape != reference.shape:
        raise MeasurementError(
            "the source's answers in float32 and float64 have different shapes", where=where
        )
    return reference


def _measure_floats(
    blank: ParityMeasurement,
    onnx: Array,
    references: Sequence[Array],
    epsilon: float,
    rounding: Rounding,
    known: ColumnNoise | None,
) -> ParityMeasurement:
    """Measure the values that are finite in all answers.

    `references` begins with the source's most exact answer.
    """
    answer = onnx.astype(np.float64)
    exact, *others = (reference.astype(np.float64) for reference in references)
    if mismatch := _describe_non_finite_mismatch(answer, [exact, *others]):
        return replace(blank, mismatch=mismatch)
    finite = np.logical_and.reduce([np.isfinite(array) for array in (answer, exact, *others)])
    if not finite.any():
        return blank
    answer, exact, *others = (np.where(finite, array, 0.0) for array in (answer, exact, *others))
    unit = max(epsilon, compute_epsilon(onnx))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if others:
            return _measure_in_noise(blank, answer, exact, others[0], unit, rounding, known)
        return _measure_in_tolerance(blank, answer, exact, onnx.dtype.name, unit, rounding, known)


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
    own = ColumnNoise(
        scales=columns.find_largest(np.abs(double)),
        gaps=columns.find_largest(np.abs(single - double)),
    )
    errors = columns.find_largest(np.abs(answer - double))
    noises = compute_column_noises(own, find_floors(own.scales, columns, rounding, unit), known)
    return report_columns(blank, columns, errors, noises, own.scales)


def _measure_in_tolerance(
    blank: ParityMeasurement,
    answer: Floats,
    expected: Floats,
    kind: str,
    unit: float,
    rounding: Rounding,
    known: ColumnNoise | None,
) -> ParityMeasurement:
    """Measure an answer in tenths of a fixed tolerance.

    Where the floor of a column is larger than a tenth of the tolerance, the floor is the unit.
    """
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
    noises = (rtol * sizes + atol * columns.spread(of_tolerance)) / TOLERANCE_FACTOR
    noises = np.maximum(noises, columns.spread(floors))
    ratios = columns.find_largest(np.where(errors == 0, 0.0, np.minimum(errors / noises, LARGEST)))
    worst_errors = columns.find_largest(errors)
    # The largest error and the largest ratio can be in different places. The reported noise is
    # their quotient, so that the three numbers agree.
    in_units = np.where(
        ratios > 0, worst_errors / np.where(ratios > 0, ratios, 1.0), columns.find_largest(noises)
    )
    measurement = report_columns(blank, columns, worst_errors, in_units, scales)
    return replace(measurement, tolerance=f"rtol {rtol:g} + atol {atol:g} × max |answer|")


def _measure_labels(
    blank: ParityMeasurement, onnx: Array, double: Array, single: Array, rounding: Rounding
) -> ParityMeasurement:
    """Measure the share of rows whose labels differ.

    A row can differ only where both answers of the source agree on the label.
    """
    if not onnx.size:
        return blank
    if is_text(onnx):
        onnx, double, single = (a.astype(np.str_) for a in (onnx, double, single))
    wrong = (onnx != double) & (single == double)
    tied = wrong & find_ties(onnx, double, rounding)
    error = float(any_by_row(wrong & ~tied).mean())
    explained = int((any_by_row(tied) & ~any_by_row(wrong & ~tied)).sum())
    return replace(blank, error=error, ratio=compute_ratio(error, 0.0), explained=explained)


def _describe_non_finite_mismatch(onnx: Floats, answers: Sequence[Floats]) -> str:
    kind = _classify_numbers(onnx)
    mismatched = np.logical_and.reduce([kind != _classify_numbers(a) for a in answers])
    if not mismatched.any():
        return ""
    first = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(mismatched)))
    pair = np.atleast_1d(onnx)[first], np.atleast_1d(answers[0])[first]
    count = f"{int(mismatched.sum())} of {mismatched.size} values"
    return (
        f"{count} are non-finite on one side only or in different ways; at {first} {pair[0]:g}, "
        f"the source gives {pair[1]:g}"
    )


def _classify_numbers(array: Floats) -> npt.NDArray[np.int8]:
    """Return 0 for finite values, 1 for infinity, -1 for minus infinity, 2 for NaN."""
    return np.select([np.isnan(array), np.isinf(array)], [2, np.sign(array)], 0).astype(np.int8)


def make_mismatch(output: str, group: str, text: str) -> ParityMeasurement:
    """Return the measurement of a difference without a number, such as another shape."""
    return ParityMeasurement(
        output=output, group=group, rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=text
    )


def is_divergent(measurement: ParityMeasurement, factor: float = DIVERGENCE_FACTOR) -> bool:
    """Return whether a value differs from the source by more than rounding explains."""
    return bool(measurement.mismatch) or not measurement.ratio <= factor


def find_first_divergence(
    names: Iterable[str], onnx: Tensors, single: Tensors, double: Tensors | None = None
) -> tuple[str, float] | None:
    """Return the name of the first divergent value, and its error / noise.

    A value diverges if its error exceeds `DIVERGENCE_FACTOR` times its noise. The ratio is
    `LARGEST` for a mismatch, such as another shape or a NaN. Only floats are compared. A different
    rounding of the inputs can change integers and booleans at a tie. A real fault shows at the next
    float. Values that only one of the models has are skipped.

    Args:
        names: names of the values in topological order.
        double: the source's values in float64, if the source runs in float64; otherwise fixed
            tolerances apply.
    """
    for name in names:
        if (
            name not in onnx
            or name not in single
            or "f" not in (onnx[name].dtype.kind, single[name].dtype.kind)
        ):
            continue
        exact = double.get(name) if double is not None else None
        if exact is not None and exact.shape != single[name].shape:
            exact = None
        measurement = measure_output(
            group="", output=name, onnx=onnx[name], single=single[name], double=exact
        )
        if is_divergent(measurement):
            return name, LARGEST if measurement.mismatch else measurement.ratio
    return None


def pick_evenly(names: Sequence[str], limit: int) -> list[str]:
    """Return at most `limit` of the names, evenly spaced and including the last one."""
    if len(names) <= limit:
        return list(names)
    return [names[(index + 1) * len(names) // limit - 1] for index in range(limit)]


def select_rows(onnx: Array, reference: Array) -> list[int]:
    """Return the numbers of at most 32 rows: the worst row, and evenly spaced ones."""
    count = len(reference)
    if count <= MIN_NOISE_ROWS:
        return list(range(count))
    even = {index * count // (MIN_NOISE_ROWS - 1) for index in range(MIN_NOISE_ROWS - 1)}
    if onnx.shape == reference.shape:
        even.add(find_worst_row(onnx, reference))
    return sorted(even)


def find_worst_row(onnx: Array, reference: Array) -> int:
    """Return the number of the row with the largest difference.

    A value that is NaN in one answer only is the largest difference.
    """
    if {onnx.dtype.kind, reference.dtype.kind} <= set("fiub"):
        a, b = onnx.astype(np.float64), reference.astype(np.float64)
        with np.errstate(all="ignore"):
            away = np.where(
                np.isnan(a) == np.isnan(b), np.nan_to_num(np.abs(a - b), nan=0.0), np.inf
            )
    else:
        away = (onnx != reference).astype(np.float64)
    return int(away.reshape(len(away), -1).max(axis=1, initial=0.0).argmax())


def measure_batch_invariance(
    batched: Tensors, alone: Sequence[Tensors], noise: Mapping[str, float] | None = None
) -> tuple[BatchInvariance, ...]:
    """Measure the difference between rows of one batch and the same rows run alone.

    For floats, the ratio is in units of the output's noise. Without noise, the unit is a tenth of
    the fixed tolerance of `measure_output`. Labels have no noise. If the model also has scores, the
    ratio of a changed label is at most that of the scores, so that a tie is not reported. Otherwise
    every changed label is reported. The error of a value that is finite on one side only is
    `LARGEST`.

    Args:
        alone: outputs of n runs on one row each, in the same order.

    Returns:
        One measurement for each output that has one entry per row in every run.
    """
    floats: list[BatchInvariance] = []
    labels: list[BatchInvariance] = []
    for name, together in sorted(batched.items()):
        rows = [tensors[name] for tensors in alone if name in tensors]
        if len(rows) == len(alone) and _are_rows_of(rows, together):
            kind = floats if together.dtype.kind == "f" else labels
            kind.append(
                _compare_batches(name, together, np.concatenate(rows), (noise or {}).get(name, 0.0))
            )
    worst = max((m.ratio for m in floats), default=math.inf)
    labels = [replace(label, ratio=min(label.ratio, worst)) for label in labels]
    return tuple(sorted((*floats, *labels), key=lambda m: m.output))


def _are_rows_of(rows: Sequence[Array], together: Array) -> bool:
    """Return whether a batch consists of rows like those that were run alone.

    The number of rows and the shape of each row must be equal.
    """
    if not rows or together.ndim == 0 or len(together) != len(rows):
        return False
    return all(row.shape == (1, *together.shape[1:]) for row in rows)


def measure_noise(single: Tensors | None, double: Tensors | None) -> dict[str, float]:
    """Return the source's rounding noise by float output.

    The result is empty if one of the two answers is missing. The noise is that of parity: max(max
    |single - double|, 2 eps max |double|).

    Raises:
        MeasurementError: the two answers have different shapes.
    """
    if single is None or double is None:
        return {}
    return {
        name: measure_output(
            group=REAL, output=name, onnx=array, single=array, double=double[name]
        ).noise
        for name, array in single.items()
        if array.dtype.kind == "f" and name in double
    }


def _compare_batches(name: str, together: Array, single: Array, noise: float) -> BatchInvariance:
    # `measure_output` applies fixed tolerances to a single answer. The code below replaces them by
    # the noise.
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
