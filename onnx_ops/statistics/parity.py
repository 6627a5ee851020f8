"""Parity: distances between the answers of two models, in units of rounding noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import BatchInvariance, ParityMeasurement
from onnx_ops.errors import MeasurementError
from onnx_ops.statistics.probes import MIN_NOISE_ROWS, REAL

Floats = npt.NDArray[np.float64]
AnyArray = npt.NDArray[np.generic]

LARGEST = 1e30
"""Stands for infinity in figures that must be written as JSON."""

_RTOL = {"float16": 5e-3, "bfloat16": 3e-2}
_RTOL_DEFAULT = 1e-3
_ATOL_OF_RTOL = 1e-2
_TOLERANCE_FACTOR = 10.0
_BFLOAT16_EPSILON = 2.0**-7

Tensors = Mapping[str, AnyArray]

DIVERGENCE_FACTOR = 16.0
"""Error / noise above which a value has departed: 153 of 189 faults then show at the culprit or right after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distance:
    error: float = 0.0
    noise: float = 0.0
    ratio: float = 0.0
    mismatch: str = ""
    tolerance: str = ""


def measure_output(
    *,
    group: str,
    output: str,
    onnx: AnyArray,
    single: AnyArray | None,
    double: AnyArray | None,
    epsilon: float = 0.0,
) -> ParityMeasurement:
    """Distance of an export's output from the source's answers in float32 (`single`) and float64 (`double`).

    Floats: error = max |onnx - double|, noise = max(max |single - double|, 2 eps max |double|), over the values that
    are finite in all three; a value that is NaN or infinite unlike both answers is a mismatch. eps is that of
    float32, or of a coarser output. With one answer only, rtol 1e-3 + atol 1e-5 max |answer| takes the noise's place
    (for float16 outputs rtol 5e-3, for bfloat16 3e-2, with a hundredth of it times the largest answer), divided by 10
    so that the default limit of the ratio is that tolerance.

    Everything else: error = share of rows that differ where both answers agree, and there is no noise.

    A ratio without noise is 0 if nothing differs, else `LARGEST`, which also caps error and noise.

    Args:
        group: name of the group of inputs.
        output: name of the output.
        onnx: the export's answer; axis 0 is the batch.
        single: the source's answer in float32, if there is one.
        double: the source's answer in float64, if there is one.
        epsilon: spacing of the floats that the export computes in, where that is coarser than its outputs'.

    Raises:
        MeasurementError: there is no answer, or the two have different shapes.
    """
    reference = double if double is not None else single
    if reference is None or (single is not None and single.shape != reference.shape):
        raise MeasurementError(
            "the source gave no answer to compare with"
            if reference is None
            else "the source's answers in float32 and float64 have different shapes",
            where=f"output {output}, inputs {group}",
        )
    distance = _distance(onnx, single, double, reference, epsilon)
    return ParityMeasurement(
        output=output,
        group=group,
        rows=int(onnx.shape[0]) if onnx.ndim else 1,
        error=distance.error,
        noise=distance.noise,
        ratio=distance.ratio,
        mismatch=distance.mismatch,
        tolerance=distance.tolerance,
    )


def _distance(
    onnx: AnyArray, single: AnyArray | None, double: AnyArray | None, reference: AnyArray, epsilon: float
) -> _Distance:
    if onnx.shape != reference.shape:
        return _Distance(mismatch=f"shape {onnx.shape}, the source gives {reference.shape}")
    if is_text(onnx) != is_text(reference):
        return _Distance(mismatch=f"type {onnx.dtype}, the source gives {reference.dtype}")
    if not (is_float(onnx) or is_float(reference)):
        return _label_distance(onnx, reference, reference if single is None else single)
    answer = onnx.astype(np.float64)
    answers = [a.astype(np.float64) for a in (double, single) if a is not None]
    if text := _non_finite_mismatch(answer, answers):
        return _Distance(mismatch=text)
    finite = np.isfinite(answer) & np.logical_and.reduce([np.isfinite(a) for a in answers])
    if not finite.any():
        return _Distance()
    usable = [a[finite] for a in answers]
    if len(usable) == 2:
        return _noise_distance(answer[finite], usable[1], usable[0], max(epsilon, compute_epsilon(onnx)))
    return _tolerance_distance(answer[finite], usable[0], onnx.dtype.name)


def _noise_distance(onnx: Floats, single: Floats, double: Floats, epsilon: float) -> _Distance:
    with np.errstate(over="ignore"):
        error = float(np.abs(onnx - double).max())
        noise = max(float(np.abs(single - double).max()), 2 * epsilon * float(np.abs(double).max()))
    return _Distance(error=min(error, LARGEST), noise=min(noise, LARGEST), ratio=compute_ratio(error, noise))


def _tolerance_distance(onnx: Floats, reference: Floats, dtype: str) -> _Distance:
    """Error and noise are those of the value that is worst off."""
    rtol = _RTOL.get(dtype, _RTOL_DEFAULT)
    atol = rtol * _ATOL_OF_RTOL
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        errors = np.abs(onnx - reference)
        noises = (rtol * np.abs(reference) + atol * np.abs(reference).max()) / _TOLERANCE_FACTOR
        worst = int(np.argmax(np.where(errors == 0, 0.0, errors / noises)))
    error, noise = float(errors[worst]), float(noises[worst])
    told = f"rtol {rtol:g} + atol {atol:g} × max |answer|"
    return _Distance(
        error=min(error, LARGEST), noise=min(noise, LARGEST), ratio=compute_ratio(error, noise), tolerance=told
    )


def _label_distance(onnx: AnyArray, double: AnyArray, single: AnyArray) -> _Distance:
    if not onnx.size:
        return _Distance()
    if is_text(onnx):
        onnx, double, single = (a.astype(np.str_) for a in (onnx, double, single))
    wrong = (onnx != double) & (single == double)
    rows = wrong.reshape(len(wrong), -1).any(axis=1) if wrong.ndim else np.atleast_1d(wrong)
    error = float(rows.mean())
    return _Distance(error=error, ratio=compute_ratio(error, 0.0))


def _non_finite_mismatch(onnx: Floats, answers: Sequence[Floats]) -> str:
    found = _kind_of_number(onnx)
    strange = np.logical_and.reduce([found != _kind_of_number(a) for a in answers])
    if not strange.any():
        return ""
    first = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(strange)))
    where = np.atleast_1d(onnx)[first], np.atleast_1d(answers[0])[first]
    count = f"{int(strange.sum())} of {strange.size} values"
    return f"{count} are non-finite on one side only; at {first} {where[0]:g}, the source gives {where[1]:g}"


def _kind_of_number(array: Floats) -> npt.NDArray[np.int8]:
    """0 finite, 1 infinite, -1 minus infinite, 2 NaN."""
    kind = np.zeros(array.shape, dtype=np.int8)
    kind[np.isposinf(array)] = 1
    kind[np.isneginf(array)] = -1
    kind[np.isnan(array)] = 2
    return kind


def pool_noise(measurements: Sequence[ParityMeasurement]) -> tuple[ParityMeasurement, ...]:
    """Small batches judged by the noise of all real rows.

    A batch group holds real rows, but may hold so few that its own rounding errors happen to be tiny. Below 32 rows
    its noise is the larger of its own and that of the same output on the real samples.
    """
    real: dict[str, float] = {}
    for m in measurements:
        if m.group == REAL:
            real[m.output] = max(real.get(m.output, 0.0), m.noise)
    pooled = []
    for m in measurements:
        noise = real.get(m.output, 0.0)
        small = m.group.startswith("batches") and m.rows < MIN_NOISE_ROWS
        pooled.append(replace(m, noise=noise, ratio=compute_ratio(m.error, noise)) if small and noise > m.noise else m)
    return tuple(pooled)


def compute_weight_error(original: npt.ArrayLike, dequantized: npt.ArrayLike, scale: npt.ArrayLike) -> float:
    """Largest |original - dequantized| in quantization steps.

    Args:
        original: the float weight.
        dequantized: the same shape, what the quantized weight stands for.
        scale: the step, of a shape that broadcasts against the weight (one step, or one for each channel).

    Returns:
        Steps; `LARGEST` if a weight is not finite, or moved where the step is 0.

    Raises:
        ValueError: the shapes do not fit.
    """
    before, after = np.asarray(original, dtype=np.float64), np.asarray(dequantized, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(f"a weight of shape {before.shape} became one of shape {after.shape}")
    if not before.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        moved = np.abs(before - after)
        steps = np.where(moved == 0, 0.0, moved / np.abs(np.asarray(scale, dtype=np.float64)))
    largest = float(steps.max())
    return min(largest, LARGEST) if not np.isnan(largest) else LARGEST


def compute_ratio(error: float, noise: float) -> float:
    """error / noise; 0 without an error, `LARGEST` at most and where there is no noise."""
    if error == 0:
        return 0.0
    return min(error / noise, LARGEST) if noise > error / LARGEST else LARGEST


def compute_epsilon(array: AnyArray) -> float:
    """Spacing of the array's floats relative to their size, never finer than that of float32."""
    single = float(np.finfo(np.float32).eps)
    if array.dtype.name == "bfloat16":
        return _BFLOAT16_EPSILON
    return max(single, float(np.finfo(array.dtype.name).eps)) if array.dtype.kind == "f" else single


def is_float(array: AnyArray) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def is_text(array: AnyArray) -> bool:
    return array.dtype.kind in "USO"


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergentValue:
    """The value that departs first, and by what multiple of its noise; `LARGEST` if its shape or NaNs differ."""

    value: str
    ratio: float


def is_divergent(measurement: ParityMeasurement, factor: float = DIVERGENCE_FACTOR) -> bool:
    """Whether a value is farther from its source than rounding explains."""
    return bool(measurement.mismatch) or not measurement.ratio <= factor


def find_first_divergence(
    names: Iterable[str],
    onnx: Tensors,
    single: Tensors,
    double: Tensors | None = None,
    factor: float = DIVERGENCE_FACTOR,
) -> DivergentValue | None:
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
        found = measure_output(group="", output=name, onnx=onnx[name], single=single[name], double=exact)
        if is_divergent(found, factor):
            return DivergentValue(value=name, ratio=LARGEST if found.mismatch else found.ratio)
    return None


def pick_evenly(names: Sequence[str], limit: int) -> list[str]:
    """At most `limit` of the names, evenly, the last one always among them."""
    if len(names) <= limit:
        return list(names)
    return [names[(index + 1) * len(names) // limit - 1] for index in range(limit)]


def select_rows(onnx: AnyArray, reference: AnyArray) -> list[int]:
    """At most 32 rows: the one that is worst off, and others evenly, so that the noise is a fair sample."""
    count = len(reference)
    if count <= MIN_NOISE_ROWS:
        return list(range(count))
    even = {index * count // (MIN_NOISE_ROWS - 1) for index in range(MIN_NOISE_ROWS - 1)}
    if onnx.shape == reference.shape:
        even.add(find_worst_row(onnx, reference))
    return sorted(even)


def find_worst_row(onnx: AnyArray, reference: AnyArray) -> int:
    """The row that is farthest off, one that is NaN on one side only before all others. The shapes are equal."""
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
    """How far the rows of one batch are from the same rows asked one by one.

    Floats: the unit of the ratio is the noise of that output, or, without one, a tenth of rtol 1e-3 +
    atol 1e-5 max |answer|. Labels have no noise of their own: where the model has scores too, a label is as far off
    as the scores are, so that a tie is no finding; where it has none, every change counts. A value that is finite on
    one side only is `LARGEST` off.

    Args:
        batched: outputs of one run on n rows, by name.
        alone: outputs of n runs, each on one row, in the same order.
        noise: the source's own rounding noise by output; outputs that are not in it have none.

    Returns:
        One figure for each output that has one entry a row in every run; others say nothing of rows.
    """
    known = noise or {}
    floats: list[BatchInvariance] = []
    labels: list[BatchInvariance] = []
    for name, together in sorted(batched.items()):
        if (single := _stacked(name, together, alone)) is not None:
            kind = floats if together.dtype.kind == "f" else labels
            kind.append(_compared(name, together, single, known.get(name, 0.0)))
    if floats:
        worst = max(m.ratio for m in floats)
        labels = [_as_far(label, worst) for label in labels]
    return tuple(sorted((*floats, *labels), key=lambda m: m.output))


def measure_noise(single: Tensors | None, double: Tensors | None) -> dict[str, float]:
    """The source's rounding noise by float output, from its answers in float32 and float64 to the same rows.

    Empty if it lacks one of the two. The noise is that of parity: max(max |single - double|, 2 eps max |double|).
    """
    if single is None or double is None:
        return {}
    return {
        name: measure_output(group=REAL, output=name, onnx=array, single=array, double=double[name]).noise
        for name, array in single.items()
        if array.dtype.kind == "f" and name in double
    }


def _stacked(name: str, together: AnyArray, alone: Sequence[Tensors]) -> AnyArray | None:
    rows = [tensors[name] for tensors in alone if name in tensors]
    if not rows or together.ndim == 0 or together.shape[0] != len(alone):
        return None
    if len(rows) != len(alone) or any(row.shape != (1, *together.shape[1:]) for row in rows):
        return None
    return np.concatenate(rows)


def _compared(name: str, together: AnyArray, single: AnyArray, noise: float) -> BatchInvariance:
    # Fixed tolerances, as for a source that has one answer only; the noise then takes their place.
    found = measure_output(group=REAL, output=name, onnx=together, single=single, double=None)
    error, ratio = found.error, found.ratio
    if found.mismatch:
        error = ratio = LARGEST
    elif together.dtype.kind == "f" and noise > 0:
        error = _largest_difference(together, single)
        ratio = min(error / noise, LARGEST)
    return BatchInvariance(
        output=name, rows=len(single), error=error, ratio=ratio, changed=_changed(together, single, error)
    )


def _largest_difference(together: AnyArray, single: AnyArray) -> float:
    first, second = together.astype(np.float64), single.astype(np.float64)
    finite = np.isfinite(first) & np.isfinite(second)
    return min(float(np.abs(first[finite] - second[finite]).max(initial=0.0)), LARGEST)


def _changed(together: AnyArray, single: AnyArray, error: float) -> float | None:
    if together.dtype.kind != "f":
        return error
    if together.ndim != 2 or together.shape[1] < 2:
        return None
    return float((together.argmax(axis=1) != single.argmax(axis=1)).mean())


def _as_far(label: BatchInvariance, ratio: float) -> BatchInvariance:
    return BatchInvariance(
        output=label.output,
        rows=label.rows,
        error=label.error,
        ratio=min(label.ratio, ratio),
        changed=label.changed,
    )
