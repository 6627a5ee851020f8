"""Ties of a ranking.

A tie is a different index or class that rounding of the scores can explain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onnx_ops.ports.data import Array
from onnx_ops.statistics.output_columns import (
    TOLERANCE_FACTOR,
    Bools,
    Floats,
    Rounding,
    any_by_row,
    is_text,
)

_FEW_TIES, _OFTEN_UNSURE = 0.5, 0.05
"""Two limits of `is_ranked_by_scores`.

The first is the share of rows whose scores may all tie. The second is the share of rows in which
the source's two answers must otherwise differ. It is also the share of values that can differ from
its most frequent answer.
"""


def find_ties(onnx: Array, expected: Array, rounding: Rounding) -> Bools:
    """Return where rounding of the scores can exchange the two indices or classes.

    Equal ones count as tied; callers select the places that differ. A ranking with a repeated index
    can have ties only if the expected ranking also repeats an index.
    """
    none = np.zeros(onnx.shape, dtype=bool)
    ranking = _read_scores(rounding)
    if ranking is None or not onnx.size or not onnx.ndim:
        return none
    scores, limits = ranking
    axis = rounding.scores_axis
    if rounding.labels is not None:
        onnx, expected = (_find_places(a, rounding.labels) for a in (onnx, expected))
    if onnx.dtype.kind not in "iu":
        return none
    count, rest = divmod(onnx.size * scores.shape[axis], scores.size)
    if rest or len(onnx) != len(scores):
        return none
    shape = list(scores.shape)
    shape[axis] = count
    chosen, wanted = (
        np.clip(a.reshape(shape), 0, scores.shape[axis] - 1).astype(np.intp)
        for a in (onnx, expected)
    )
    gaps = np.abs(_take(scores, chosen, axis) - _take(scores, wanted, axis))
    allowed = np.maximum(_take(limits, chosen, axis), _take(limits, wanted, axis))
    twice = _has_duplicates(chosen, axis) & ~_has_duplicates(wanted, axis)
    inside = onnx.astype(np.int64).reshape(shape) == chosen
    return np.asarray(((gaps <= allowed) & ~twice & inside).reshape(onnx.shape))


def _take(values: Floats, indices: npt.NDArray[np.intp], axis: int) -> Floats:
    return np.asarray(np.take_along_axis(values, indices, axis))


def _find_places(classes: Array, labels: Array) -> Array:
    """Return the position of each class in `labels`; -1 for unknown classes."""
    classes, labels = (a.astype(np.str_) for a in (classes, labels))
    order = np.argsort(labels)
    places = order[np.searchsorted(labels, classes, sorter=order).clip(max=len(labels) - 1)]
    return np.asarray(np.where(labels[places] == classes, places, -1))


def _has_duplicates(indices: Array, axis: int) -> Bools:
    ordered = np.sort(indices, axis=axis)
    return np.asarray((np.diff(ordered, axis=axis) == 0).any(axis=axis, keepdims=True))


def is_ranked_by_scores(single: Array, double: Array, rounding: Rounding) -> bool:
    """Return whether the scores of real rows differ enough to determine a ranking.

    If they do, ties of the scores can explain a difference. A wrong export may give all classes the
    same score. If most rows have such scores, the result is True in two cases only. In the first,
    the two answers of the source differ in at least 5 % of rows. In the second, the source has
    practically one answer, and the scores differ between rows.
    """
    ranking = _read_scores(rounding)
    if ranking is None:
        return False
    scores, limits = ranking
    axis = rounding.scores_axis
    if (np.ptp(scores, axis=axis) <= limits.max(axis=axis)).mean() <= _FEW_TIES:
        return True
    if single.shape != double.shape or not single.size:
        return False
    _, counts = np.unique(double.astype(np.str_) if is_text(double) else double, return_counts=True)
    varies = float(np.ptp(scores, axis=0).max()) > float(limits.max())
    one_answer = counts.max() >= (1 - _OFTEN_UNSURE) * double.size
    return bool(any_by_row(single != double).mean() >= _OFTEN_UNSURE or (one_answer and varies))


def _read_scores(rounding: Rounding) -> tuple[Floats, Floats] | None:
    """Return the scores, and by how much rounding may change each score.

    Return None if the output lacks scores, or an error for each score.
    """
    scores, errors = rounding.scores, rounding.scores_error
    if scores is None or errors is None or errors.shape != scores.shape or not scores.size:
        return None
    finite = np.where(np.isfinite(scores), scores, 0.0).astype(np.float64)
    limits = TOLERANCE_FACTOR * np.where(np.isfinite(errors), errors, 0.0).astype(np.float64)
    return finite, limits
