"""Compare the values that two systems give at one step, within tolerances.

The default tolerances lie between the differences of correct implementations and those of faults in
`benchmarks.system_truth`; docs/parity-error-rates.md has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.system_comparison import Tolerances

Floats: TypeAlias = npt.NDArray[np.float64]
Form: TypeAlias = Literal["same", "resampled", "decoded"]
"""How a step makes its value.

`same`: each element is computed from the same elements, so only rounding differs. `resampled`:
elements are interpolated, so their number changes. `decoded`: a lossy codec decodes the raw file.
"""

LEVELS = 255.0
"""Levels of the range of a picture or signal; the unit of differences of signals."""
_SIGNAL_SIZE = 192
"""Minimum number of elements of an array of pixels or samples that is a signal."""
_SIGNAL_TYPES = ("uint8", "int16", "uint16")
_TAIL_RESAMPLED, _TAIL_DECODED = 3.0, 40.0
"""Limits of the 99th percentile of a signal's differences, in levels.

The first is for a value of the form `resampled` (or `same` with whole levels), the second for
`decoded`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDistance:
    """The difference of two values.

    `mismatch` describes a difference of form: the shape, the number or names of parts, or the
    places of NaN and infinity. `changed` is the share of texts, labels and ids that differ. `error`
    is the largest difference of a number, relative to its size plus a tenth of the reference's
    largest size.

    `mean` and `tail` (99th percentile) are those of the absolute differences. `shift` is the mean
    of the value minus that of the reference. `span` is the range of the reference, and `LEVELS` for
    uint8. `peak` is the largest difference as a share of the reference's largest size.

    `is_signal`: the value is an array of pixels or samples, such as an image or a sound.
    `is_pixel`: the signal has whole levels, which round differently.
    """

    mismatch: str = ""
    changed: float = 0.0
    error: float = 0.0
    mean: float = 0.0
    tail: float = 0.0
    shift: float = 0.0
    span: float = 0.0
    peak: float = 0.0
    is_signal: bool = False
    is_pixel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExcess:
    """A distance as a multiple of its limit, with the value and the limit.

    A ratio above 1 is outside the tolerance. `kind` is the name of the tolerance, `form` for a
    mismatch, or `values` for different labels.
    """

    ratio: float
    value: float
    limit: float
    unit: str
    kind: str


def measure_step(reference: Any, value: Any) -> StepDistance:
    """Return the largest differences of the parts of two values."""
    expected, given = dict(list_leaves(reference)), dict(list_leaves(value))
    if expected.keys() != given.keys() and len(expected) == len(given) == 1:
        given = dict(zip(expected, given.values(), strict=True))
    if expected.keys() != given.keys():
        return StepDistance(mismatch=_describe_keys(expected, given))
    distances = [_measure_leaf(name, expected[name], given[name]) for name in expected]
    return combine_distances(distances)


def combine_distances(distances: Sequence[StepDistance]) -> StepDistance:
    """Return the largest of each difference over several pairs."""
    if not distances:
        return StepDistance()
    return StepDistance(
        mismatch=next((one.mismatch for one in distances if one.mismatch), ""),
        changed=max(one.changed for one in distances),
        error=max(one.error for one in distances),
        mean=max(one.mean for one in distances),
        tail=max(one.tail for one in distances),
        shift=max((one.shift for one in distances), key=abs),
        span=max(one.span for one in distances),
        peak=max(one.peak for one in distances),
        is_signal=any(one.is_signal for one in distances),
        is_pixel=any(one.is_pixel for one in distances),
    )


def rate_distance(
    distance: StepDistance, form: Form, span: float, tolerances: Tolerances, step: str = ""
) -> StepExcess:
    """Return a distance as a multiple of the limit of the step's form.

    The ratio is infinite for a mismatch, and if texts, labels or ids differ.

    Args:
        span: range of the signal over all files.
        step: name of the step, which can have a separate factor.
    """
    factor = tolerances.steps.get(step, 1.0)
    if distance.mismatch:
        return StepExcess(ratio=math.inf, value=math.inf, limit=0.0, unit="", kind="form")
    if distance.changed > 0:
        return StepExcess(
            ratio=math.inf, value=distance.changed, limit=0.0, unit="1", kind="values"
        )
    if not distance.is_signal or (form == "same" and not distance.is_pixel):
        limit = tolerances.rounding * factor
        return StepExcess(
            ratio=distance.error / limit,
            value=distance.error,
            limit=limit,
            unit="1",
            kind="rounding",
        )
    is_decoded = form == "decoded"
    kind = "decoding" if is_decoded else "resampling"
    level = (span or 1.0) / LEVELS
    mean_limit = factor * (tolerances.decoding if is_decoded else tolerances.resampling)
    tail_limit = factor * (_TAIL_DECODED if is_decoded else _TAIL_RESAMPLED)
    parts = [
        (distance.mean / level, mean_limit, kind),
        (distance.tail / level, tail_limit, f"{kind} p99"),
        (abs(distance.shift) / level, tolerances.bias * factor, "bias"),
    ]
    value, limit, name = max(parts, key=lambda part: part[0] / part[1])
    return StepExcess(ratio=value / limit, value=value, limit=limit, unit="levels", kind=name)


def list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays, texts and other single values of a value, with their places.

    A list that is not an array of numbers also yields its length, at the place `path[]`.
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from list_leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not _is_numeric(value):
        yield f"{path}[]", np.array(len(value))
        for index, part in enumerate(value):
            yield from list_leaves(part, f"{path}[{index}]")
    elif isinstance(value, (str, bytes)) or value is None:
        yield path, value
    else:
        yield path, np.asarray(value)


def _is_numeric(value: Sequence[Any]) -> bool:
    """Return whether a list is an array of numbers."""
    if not value:
        return True
    if isinstance(value[0], (list, tuple)):
        lengths = {len(part) for part in value if isinstance(part, (list, tuple))}
        return len(lengths) == 1 and all(
            isinstance(part, (list, tuple)) and _is_numeric(part) for part in value
        )
    return all(isinstance(part, (bool, int, float, np.number)) for part in value)


def _describe_keys(expected: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    counts = [
        f"{int(given[name])} instead of {int(expected[name])} values"
        for name in expected
        if name.endswith("[]") and name in given and int(given[name]) != int(expected[name])
    ]
    if counts:
        return counts[0]
    missing = [name for name in expected if name not in given]
    added = [name for name in given if name not in expected]
    parts = [f"no {missing[0] or 'single value'}"] if missing else []
    return " and ".join(
        [*parts, *([f"an additional {added[0] or 'single value'}"] if added else [])]
    )


def _measure_leaf(name: str, expected: Any, given: Any) -> StepDistance:
    if name.endswith("[]") and int(expected) != int(given):
        return StepDistance(mismatch=f"{int(given)} instead of {int(expected)} values")
    if not isinstance(expected, np.ndarray) or not isinstance(given, np.ndarray):
        return StepDistance(changed=float(not _is_equal(expected, given)))
    if expected.dtype.kind in "USO" or given.dtype.kind in "USO":
        return _measure_labels(expected.astype(str), given.astype(str))
    return _measure_numbers(expected, given)


def _is_equal(expected: Any, given: Any) -> bool:
    """Return whether two values are equal; a text equals an array of this one text."""
    if isinstance(expected, np.ndarray) or isinstance(given, np.ndarray):
        sides = [np.asarray(side).reshape(-1) for side in (expected, given)]
        return sides[0].size == sides[1].size and bool(
            (sides[0].astype(str) == sides[1].astype(str)).all()
        )
    return bool(expected == given)


def _measure_labels(expected: npt.NDArray[Any], given: npt.NDArray[Any]) -> StepDistance:
    left, right = drop_single_axes(expected, given)
    if left.shape != right.shape:
        return StepDistance(mismatch=f"shape {given.shape} instead of {expected.shape}")
    return StepDistance(changed=float((left != right).mean()) if left.size else 0.0)


def drop_single_axes(
    expected: npt.NDArray[Any], given: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return two arrays without leading axes of size 1 that only one of them has."""
    while expected.ndim > given.ndim and expected.shape[0] == 1:
        expected = expected[0]
    while given.ndim > expected.ndim and given.shape[0] == 1:
        given = given[0]
    return expected, given


def _measure_numbers(expected: npt.NDArray[Any], given: npt.NDArray[Any]) -> StepDistance:
    left, right = drop_single_axes(expected, given)
    if left.shape != right.shape:
        return StepDistance(mismatch=f"shape {given.shape} instead of {expected.shape}")
    if not left.size:
        return StepDistance()
    small = "uint8" not in (left.dtype.name, right.dtype.name)
    is_signal = left.size >= _SIGNAL_SIZE and (
        left.dtype.kind == "f" or right.dtype.kind == "f" or left.dtype.name in _SIGNAL_TYPES
    )
    if not is_signal and left.dtype.kind in "biu" and right.dtype.kind in "biu" and small:
        return StepDistance(changed=float((left != right).mean()))
    before, after = left.astype(np.float64), right.astype(np.float64)
    if not (np.isfinite(before) == np.isfinite(after)).all():
        count = int((~np.isfinite(after)).sum())
        usual = int((~np.isfinite(before)).sum())
        return StepDistance(
            mismatch="NaN or infinity is at other positions: "
            f"in {count} of {after.size} values, instead of {usual}"
        )
    finite = np.isfinite(before)
    before, after = before[finite], after[finite]
    if not before.size:
        return StepDistance()
    return _measure_finite(before, after, left.dtype, right.dtype, is_signal=is_signal)


def _measure_finite(
    before: Floats, after: Floats, left: np.dtype[Any], right: np.dtype[Any], *, is_signal: bool
) -> StepDistance:
    difference = np.abs(after - before)
    scale = np.abs(before) + 0.1 * np.abs(before).max()
    error = float((difference / np.where(scale > 0, scale, 1.0)).max())
    largest = float(np.abs(before).max())
    return StepDistance(
        error=error,
        mean=float(difference.mean()),
        tail=float(np.quantile(difference, 0.99)),
        shift=float(after.mean() - before.mean()),
        span=LEVELS if "uint8" in (left.name, right.name) else float(np.ptp(before)),
        peak=float(difference.max()) / (largest or 1.0),
        is_signal=is_signal,
        is_pixel=is_signal and bool({left.name, right.name}.intersection(_SIGNAL_TYPES)),
    )


def differs_in_answer(reference: Any, value: Any, share: float = 0.05) -> bool:
    """Return whether two final answers differ.

    Texts, labels and counts must be equal. Floats and pixels can differ by `share` of the largest
    value, which covers the effect of tolerated differences of earlier steps.
    """
    distance = measure_step(reference, value)
    if distance.mismatch or distance.changed:
        return True
    return distance.peak > share
