"""The ratio of two sums of losses on the same rows, with an interval that holds where few rows carry most of it.

A ratio `r` is held against rows by the sign of the mean of `u = mine - r * theirs` (Fieller 1954, Journal of the Royal
Statistical Society B 16:175-185), by Student's t. Resampling errs here: rows that were not drawn into the sample are in
no resample either. Two things make up for skew and heavy tails, each for one side of the interval alone:

- `unseen` more rows are reckoned with, as far to the dangerous side as the worst row that was seen.
- Losses on the harmless side may be cut: a mean that is below zero though its lowest values were raised is below zero.

`benchmarks/truth/losses.py` has its error rates beside those of the bootstrap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import Interval
from onnx_ops.statistics import special
from onnx_ops.statistics.agreement import CONFIDENCE

Losses: TypeAlias = npt.NDArray[np.float64]

UNSEEN_CHANGES = 2.5
"""For comparisons of two models; chosen by simulation."""

_CUT = 0.9
"""Quantile of |u| at which the harmless side is cut."""

_FAR, _HALVINGS = 128, 20
"""A limit that lies further away, in units of the first guess of it, is not sought."""


def ratio_interval(mine: Losses, theirs: Losses, unseen: float, confidence: float = CONFIDENCE) -> Interval:
    """Interval for the ratio of the means of two losses, one a row (or sums, one a group of rows).

    Args:
        mine: losses of shape (rows,), of any sign.
        theirs: what they are divided by; their sum is positive.
        unseen: rows of the worst kind seen that may be missing by chance.
        confidence: of the two-sided interval.
    """
    estimate = float(mine.sum() / theirs.sum())
    quantile = float(special.stdtrit(len(mine) - 1, (1 + confidence) / 2))

    cut = int(_CUT * (len(mine) - 1))

    def beyond(side: int, distance: float) -> bool:
        """Whether a ratio so far from the estimate is surely too far."""
        away = side * (mine - (estimate + side * distance) * theirs)
        raised = np.maximum(away, -np.partition(np.abs(away), cut)[cut])
        return min(_upper(away, quantile, unseen), _upper(raised, quantile, unseen)) < 0

    step = max(_upper(mine - estimate * theirs, quantile, unseen) / float(theirs.mean()), 1e-12 * abs(estimate), 1e-300)
    below, above = (_least_distance(functools.partial(beyond, side), step) for side in (-1, 1))
    return Interval(estimate=estimate, low=estimate - below, high=estimate + above)


def _upper(values: Losses, quantile: float, unseen: float) -> float:
    """Upper limit of the mean."""
    mean = float(values.mean())
    error = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean + error + unseen * (float(values.max()) - mean) / len(values)


def _least_distance(beyond: Callable[[float], bool], step: float) -> float:
    """The least distance that is beyond the interval, or a large one where none is."""
    inside, outside = 0.0, step / 8
    while not beyond(outside):
        inside, outside = outside, 2 * outside
        if inside >= _FAR * step:
            return inside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
    return outside


def few_heavy(losses: Losses) -> tuple[float, tuple[int, ...]]:
    """How many equally bad rows would carry the losses as evenly, and the numbers of those that carry half of them."""
    total, squares = float(losses.sum()), float(np.square(losses).sum())
    if squares <= 0:
        return float(len(losses)), ()
    order = np.argsort(-losses, kind="stable")
    half = int(np.searchsorted(np.cumsum(losses[order]), total / 2)) + 1
    return total**2 / squares, tuple(int(row) for row in order[:half])
