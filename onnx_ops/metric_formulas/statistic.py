"""A metric as a function of row weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Weights: TypeAlias = npt.NDArray[np.float64]
"""Weights of the rows in each resample, of shape (resamples, rows)."""

Statistic: TypeAlias = Callable[[Weights], npt.NDArray[np.float64]]
"""A metric as a function of row weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricStatistic:
    """A task metric of one model's answers, with the allowances of its interval.

    Args:
        statistic: the metric as a function of row weights.
        reads: the values that the metric reads, one entry per row.
        bias: the largest amount by which chance alone raises the value on average; 0 if chance does
            not raise it.
        step: how much worse one more wrong row can make the metric; for some metrics, a wrong row
            of average size. None for losses and custom metrics, which have no known range.
        jump: the size of a sudden change of the value that a slight change of the rows can cause.
            Intervals are wider by this amount.
        plain: a form of the metric without bias in small samples, with the same limit in large
            ones. Intervals then cover the intervals of both forms. None without such a form.
    """

    statistic: Statistic
    reads: Array
    step: float | None = None
    bias: float = 0.0
    jump: float = 0.0
    plain: Statistic | None = None


def mean(values: Array) -> Statistic:
    """Return the statistic for the mean of one value per row."""
    return lambda weights: weights @ values / weights.sum(axis=1)


def make_mean_statistic(values: Array) -> MetricStatistic:
    """Return the metric that averages one value per row, at most 1.

    Its step is that of a row whose value falls from 1 to 0.
    """
    return MetricStatistic(statistic=mean(values), reads=values, step=1 / len(values))


def find_class_step(rows: int, holders: Array) -> float:
    """Estimate how much one more wrong row can decrease a mean over classes.

    The result is 1 / (classes * rows of the rarest class), and at least 1 / `rows`. The rarest
    class is used, since all wrong rows that a sample lacks by chance can belong to it.

    Args:
        rows: number of rows.
        holders: number of rows with each class; classes with 0 rows do not count.
    """
    known = holders[holders > 0]
    return max(1 / rows, 1 / (len(known) * int(known.min()))) if len(known) else 1 / rows
