"""Confidence intervals of proportions, bootstrapped statistics and loss ratios.

`tango_interval` and `clopper_pearson` are for shares of right rows. The paired bootstrap
(`replicate`, `bca_interval`) draws the same rows or groups for all models, so that variation common
to the models cancels out. A statistic is a function of weights, the number of times that each row
is drawn. It can therefore be computed for many resamples in one step. `ratio_interval` is for the
ratio of two sums of losses on the same rows. It is valid where few rows have most of the loss.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy

from onnx_ops.domain.evidence import Interval, PairedCounts
from onnx_ops.metric_formulas import Statistic

CONFIDENCE = 0.90
"""Confidence of two-sided intervals: each bound has a one-sided error rate of 5 %."""

FEW_SAMPLES = 500
"""Number of rows below which `advise_sample_size` gives advice."""

_EDGE = 1e-12
"""Tolerance of the ends of `tango_interval`.

It is also the distance of the search from its limits.
"""

RESAMPLES = 2000
"""Number of resamples.

Their 5 % quantile has a standard error of 0.5 percentage points of probability.
"""

GROUPS = 200
"""Maximum number of parts of the rows that the jackknife leaves out in turn.

The acceleration does not need more parts.
"""

_CELLS = 1 << 21
"""Maximum product of resamples and rows in one step of at least one resample."""

_TAIL = 0.9
"""Factor on the nominal size of the tails of `bca_interval`.

Without this factor, an auc interval from a few hundred rows is too often wrong on one side. This
occurs in up to 5.3 % of samples instead of 5 %.
"""

_UNDEFINED_SHARE = 0.01
"""Share of undefined resamples above which no interval is returned.

The interval would be biased.
"""

Losses: TypeAlias = npt.NDArray[np.float64]

UNSEEN_CHANGES = 2.5
"""The argument `unseen` of `ratio_interval` for comparisons of two models.

`benchmarks/truth/losses.py` measures the error rates with this value.
"""

_CUT = 0.9
"""Quantile of |u| that limits the lower tail of `u` in `ratio_interval`."""

_FAR, _HALVINGS = 2.0**60, 20
"""Limits of the search for the ends of an interval.

The distance from the estimate is doubled until it is rejected, or is `_FAR` times the estimated
half width. This width is very small where one row has nearly all loss of both models. The bracket
of a rejected distance is then halved `_HALVINGS` times.
"""


def change_interval(counts: PairedCounts) -> Interval:
    """Return the interval of the candidate's share of right rows minus the baseline's.

    Raises:
        ValueError: the models differ, and there is no row or the counts are impossible.
    """
    if counts.equal:
        return Interval.point(0.0)
    n, lost, won = count_independent(counts)
    estimate, low, high = tango_interval(n, lost, won)
    return Interval(estimate=estimate, low=low, high=high)


def change_p_value(counts: PairedCounts, bound: float) -> float:
    """Return the p-value of "the true change is at most `bound`"."""
    if counts.equal:
        return 0.0 if bound < 0 else 1.0
    n, lost, won = count_independent(counts)
    return float(scipy.special.ndtr(-_tango_score(n, lost, won, bound)))


def value_interval(counts: PairedCounts) -> Interval:
    """Return the interval of the candidate's share of right rows.

    Raises:
        ValueError: there is no row, or the counts exceed the rows.
    """
    right, n = count_independent_right(counts)
    estimate, low, high = clopper_pearson(right, n)
    return Interval(estimate=estimate, low=low, high=high)


def value_p_value(counts: PairedCounts, bound: float) -> float:
    """Return the p-value of "the true share is at most `bound`"."""
    right, n = count_independent_right(counts)
    return float(scipy.special.betainc(right, n - right + 1, bound)) if right > 0 else 1.0


def count_independent_right(counts: PairedCounts) -> tuple[float, float]:
    """Return (right rows, rows) of an independent sample with as much evidence."""
    effect = min(counts.value_effect, max(1, counts.n))
    return (counts.both + counts.only_candidate) / effect, counts.n / effect


def count_independent(counts: PairedCounts) -> tuple[float, float, float]:
    """Return (rows, lost, won) of an independent sample with as much evidence.

    Lost rows are right only with the baseline, won rows only with the candidate.
    """
    effect = min(counts.change_effect, max(1, counts.n))
    return counts.n / effect, counts.only_baseline / effect, counts.only_candidate / effect


@functools.lru_cache(maxsize=4096)
def tango_interval(
    n: float, only_baseline: float, only_candidate: float, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return a score interval of the difference of two proportions on the same rows.

    Tango 1998, Statistics in Medicine 17:891-908, eqs. (24)-(27). The interval has its nominal
    level even where few or no rows are discordant. An interval from the normal approximation is far
    too narrow there.

    Args:
        n: number of rows, at least one; a fraction where grouped rows are worth fewer rows.
        only_baseline: rows that only the baseline got right.
        only_candidate: rows that only the candidate got right.

    Returns:
        (estimate, low, high) of candidate minus baseline, between -1 and 1.

    Raises:
        ValueError: a count is negative, there is less than one row, or the counts exceed the rows.
    """
    if min(only_baseline, only_candidate) < 0 or only_baseline + only_candidate > n or n < 1:
        raise ValueError(f"counts {only_baseline} and {only_candidate} do not fit {n} rows")
    estimate = (only_candidate - only_baseline) / n
    z = float(scipy.special.ndtri((1 + confidence) / 2))

    def score(difference: float, level: float) -> float:
        return _tango_score(n, only_baseline, only_candidate, difference) - level

    from scipy.optimize import brentq  # The import is local, since few stages need it.

    low, high = -1.0, 1.0
    if estimate - _EDGE > -1 + _EDGE:
        low = float(brentq(score, -1 + _EDGE, estimate - _EDGE, args=(z,), xtol=_EDGE))
    if estimate + _EDGE < 1 - _EDGE:
        high = float(brentq(score, estimate + _EDGE, 1 - _EDGE, args=(-z,), xtol=_EDGE))
    return estimate, low, high


def _tango_score(n: float, b: float, c: float, difference: float) -> float:
    """Return the score of `compute_tango_scores` for one pair of counts.

    It uses plain numbers, since `brentq` needs one score after the other, about 20 for an interval.
    A score takes 0.7 µs, and with NumPy's arrays 25 µs.
    """
    linear = (2 * n - c + b) * difference - b - c
    constant = -b * difference * (1 - difference)
    only_b = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * only_b + difference * (1 - difference))
    distance = c - b - n * difference
    if variance > 0:
        return distance / math.sqrt(variance)
    return math.copysign(math.inf, distance) if distance else 0.0


def compute_tango_scores(
    n: float, b: Any, c: Any, difference: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return Tango's scores of many pairs of counts.

    A score is (c - b) / n minus `difference`, divided by its standard error. The variance is
    estimated under the hypothesis that the difference is `difference`.

    Args:
        n: number of rows.
        b: rows that only the baseline got right.
        c: rows that only the candidate got right.

    Returns:
        The scores, and the probability of a row of `b` under the hypothesis.
    """
    linear = (2 * n - c + b) * difference - b - c
    constant = -b * difference * (1 - difference)
    only_b = (np.sqrt(np.maximum(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * only_b + difference * (1 - difference))
    distance = np.asarray(c - b - n * difference, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(
            variance > 0,
            distance / np.sqrt(np.maximum(variance, 0.0)),
            np.where(distance == 0, 0.0, np.copysign(math.inf, distance)),
        )
    return scores, np.asarray(only_b, dtype=np.float64)


def clopper_pearson(
    successes: float, n: float, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return (estimate, low, high) of a proportion, from the exact binomial test.

    Clopper and Pearson 1934, Biometrika 26:404-413.

    Raises:
        ValueError: `n` is below 1, or `successes` is not between 0 and `n`.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n} is not a proportion")
    tail = (1 - confidence) / 2
    low = float(scipy.special.betaincinv(successes, n - successes + 1, tail)) if successes else 0.0
    high = (
        float(scipy.special.betaincinv(successes + 1, n - successes, 1 - tail))
        if successes < n
        else 1.0
    )
    return successes / n, low, high


def find_least(is_enough: Callable[[int], bool], above: int = 0) -> int:
    """Return the smallest integer above `above` for which `is_enough` is true.

    `is_enough` must be true for all larger integers too.
    """
    short, enough = above, above + 1
    while not is_enough(enough):
        short, enough = enough, 2 * enough
    between = range(short + 1, enough)
    return short + 1 + bisect.bisect_left(between, True, key=is_enough)


def advise_sample_size(n: int) -> str:
    """Return advice on a number of rows that is too small; otherwise an empty string."""
    return f"expect INCONCLUSIVE below {FEW_SAMPLES} samples" if n < FEW_SAMPLES else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicates:
    """Values of a statistic: of all rows, of each resample, and without each part."""

    observed: float
    resampled: npt.NDArray[np.float64]
    left_out: npt.NDArray[np.float64]

    @property
    def spread(self) -> bool:
        """Return whether the resamples differ by more than rounding."""
        values = self.resampled[np.isfinite(self.resampled)]
        return bool(values.size and np.ptp(values) > 1e-12 * max(1.0, abs(self.observed)))

    def centre(self) -> Replicates:
        """Return replicates whose resamples have the observed value as their mean."""
        shift = self.observed - float(self.resampled[np.isfinite(self.resampled)].mean())
        return replace(self, resampled=self.resampled + shift)

    def __sub__(self, other: Replicates) -> Replicates:
        """Return the replicates of the difference of two statistics."""
        return _combine(np.subtract, self, other)

    def __truediv__(self, other: Replicates) -> Replicates:
        """Return the replicates of the ratio of two statistics."""
        return _combine(np.divide, self, other)


def replicate(
    statistics: Mapping[str, Statistic],
    groups: npt.NDArray[np.int64],
    seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Replicates]:
    """Return the replicates of all statistics, from the same resamples.

    Args:
        groups: group number of each row; each group is drawn or left out as a whole. `arange` makes
            each row a group.
    """
    draw = np.random.default_rng(seed)
    rows, units = len(groups), int(groups.max()) + 1
    at_once = max(1, _CELLS // rows)
    values: dict[str, list[Any]] = {name: [] for name in statistics}
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = draw.integers(0, units, (count, units)) + units * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)
        weights = counts.astype(np.float64)[:, groups]
        for name, statistic in statistics.items():
            values[name].append(statistic(weights))
    folds = min(GROUPS, units)
    left_out = (np.arange(units)[None, :] % folds != np.arange(folds)[:, None]).astype(np.float64)[
        :, groups
    ]
    return {
        name: Replicates(
            observed=float(statistic(np.ones((1, rows)))[0]),
            resampled=np.concatenate(values[name]),
            left_out=np.concatenate(
                [statistic(left_out[i : i + at_once]) for i in range(0, len(left_out), at_once)]
            ),
        )
        for name, statistic in statistics.items()
    }


def bca_interval(replicates: Replicates) -> Interval | None:
    """Return the BCa bootstrap interval; None if too many resamples are undefined.

    The result is also None if the statistic of all rows is not finite. Source: Efron 1987, Journal
    of the American Statistical Association 82:171-185, with tails of `_TAIL` times the nominal
    size. The acceleration is that of the jackknife over parts of the rows. This jackknife has the
    same expectation as the jackknife over single rows. The levels are those of Student's t. Its
    degrees of freedom are the effective number of parts minus 1 (Satterthwaite 1946, Biometrics
    Bulletin 2:110-114). For example, if ten rows cause a change, its spread is an estimate from ten
    values.
    """
    values = replicates.resampled[np.isfinite(replicates.resampled)]
    if values.size < (1 - _UNDEFINED_SHARE) * replicates.resampled.size or not np.isfinite(
        replicates.observed
    ):
        return None
    below = np.mean(values < replicates.observed) + np.mean(values == replicates.observed) / 2
    bias = scipy.special.ndtri(
        np.clip(below, 1 / (values.size + 1), values.size / (values.size + 1))
    )
    left_out = replicates.left_out[np.isfinite(replicates.left_out)]
    influences = left_out.mean() - left_out if left_out.size else left_out
    fourth, size = float(np.sum(influences**4)), float(influences.size)
    degrees = max(1.0, float(np.sum(influences**2)) ** 2 / fourth - 1 if fourth > 0 else size)
    far = scipy.special.stdtrit(degrees, 1 - _TAIL * (1 - CONFIDENCE) / 2)
    levels = bias + np.array([-far, far])
    squares = float(np.sum(influences**2))
    acceleration = float(np.sum(influences**3)) / (6 * squares**1.5) if squares > 0 else 0.0
    levels = scipy.special.ndtr(bias + levels / np.maximum(1 - acceleration * levels, 0.1))
    low, high = np.quantile(values, levels, method="weibull")
    return Interval(
        estimate=replicates.observed,
        low=min(float(low), replicates.observed),
        high=max(float(high), replicates.observed),
    )


def _combine(operation: Any, one: Replicates, other: Replicates) -> Replicates:
    with np.errstate(all="ignore"):
        return Replicates(
            observed=float(operation(np.float64(one.observed), np.float64(other.observed))),
            resampled=operation(one.resampled, other.resampled),
            left_out=operation(one.left_out, other.left_out),
        )


def ratio_interval(mine: Losses, theirs: Losses, unseen: float) -> Interval:
    """Return an interval of the ratio of the means of two losses.

    A ratio `r` is tested by Student's t, as the sign of the mean of `u = mine - r * theirs`
    (Fieller 1954, Journal of the Royal Statistical Society B 16:175-185). The bootstrap is not
    suitable: a row that is missing from the sample is in no resample.

    Each end of the interval has two corrections for skew and heavy tails. In the upper tail of `u`,
    `unseen` additional rows as bad as the worst row are assumed. In the lower tail, the test is
    repeated with values raised to a cut-off, since very low values inflate the deviation. Raised
    values only increase the mean, so that a rejection with the cut-off is valid without it.
    `benchmarks/truth/losses.py` measures the error rates.

    Args:
        mine: losses of shape (rows,), one per row or summed by group, of any sign.
        theirs: losses of the other model, or weights, of the same shape, with a positive sum.
        unseen: number of rows of the worst kind that may be missing by chance.
    """
    estimate = float(mine.sum() / theirs.sum())
    quantile = float(scipy.special.stdtrit(len(mine) - 1, (1 + CONFIDENCE) / 2))
    cut = int(_CUT * (len(mine) - 1))

    def beyond(side: int, distance: float) -> bool:
        """Return whether the test rejects the ratio at this distance from the estimate."""
        away = side * (mine - (estimate + side * distance) * theirs)
        raised = np.maximum(away, -np.partition(np.abs(away), cut)[cut])
        return min(_bound_mean(away, quantile, unseen), _bound_mean(raised, quantile, unseen)) < 0

    step = max(
        _bound_mean(mine - estimate * theirs, quantile, unseen) / float(theirs.mean()),
        1e-12 * abs(estimate),
        1e-300,
    )
    below, above = (_find_least_distance(functools.partial(beyond, side), step) for side in (-1, 1))
    return Interval(estimate=estimate, low=estimate - below, high=estimate + above)


def _bound_mean(values: Losses, quantile: float, unseen: float) -> float:
    """Return an upper confidence limit of the mean."""
    mean = float(values.mean())
    error = quantile * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean + error + unseen * (float(values.max()) - mean) / len(values)


def _find_least_distance(beyond: Callable[[float], bool], step: float) -> float:
    """Return the smallest rejected distance, or a large distance if none is rejected."""
    inside, outside = 0.0, step / 8
    while not beyond(outside):
        inside, outside = outside, 2 * outside
        if inside >= _FAR * step:
            return inside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
    return outside


def find_carrying_rows(losses: Losses, enough: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the heaviest rows; the loss of the others is evenly spread.

    A loss is evenly spread if its effective number of rows is at least `enough`. No row is True if
    the loss of all rows is evenly spread. All rows are True if no part of the rows has an evenly
    spread loss.
    """
    order = np.argsort(-losses, kind="stable")
    totals = np.cumsum(losses[order][::-1])[::-1]
    squares = np.cumsum(np.square(losses[order][::-1]))[::-1]
    left = np.arange(len(losses), 0, -1.0)
    effective = np.divide(totals**2, squares, out=left, where=squares > 0)
    even = np.flatnonzero(effective >= enough)
    carrying = np.zeros(len(losses), dtype=np.bool_)
    carrying[order[: even[0] if even.size else len(losses)]] = True
    return carrying


def find_heavy_rows(losses: Losses) -> tuple[float, tuple[int, ...]]:
    """Return the effective number of rows, and the worst rows with half of the loss."""
    total, squares = float(losses.sum()), float(np.square(losses).sum())
    if squares <= 0:
        return float(len(losses)), ()
    order = np.argsort(-losses, kind="stable")
    half = int(np.searchsorted(np.cumsum(losses[order]), total / 2)) + 1
    return total**2 / squares, tuple(int(row) for row in order[:half])
