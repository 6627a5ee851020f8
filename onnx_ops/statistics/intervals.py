"""Confidence intervals of task metrics: proportions, the paired bootstrap, and ratios of losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.evidence import Interval, PairedCounts
from onnx_ops.statistics import special

CONFIDENCE = 0.90
"""Of two-sided intervals: each bound has a one-sided error rate of 5 %."""

FEW_SAMPLES = 500

_EDGE = 1e-12

Weights: TypeAlias = npt.NDArray[np.float64]
"""Shape (resamples, rows)."""

Statistic: TypeAlias = Callable[[Weights], npt.NDArray[np.float64]]
"""One value per resample; NaN where it is not defined."""

RESAMPLES = 2000
"""The 5 % quantile of so many has a standard error of 0.5 percentage points of probability."""

GROUPS = 200
"""Rows are left out in at most so many groups: the acceleration needs no finer jackknife."""

_CELLS = 1 << 21
"""Resamples times rows that are held at once."""

_TAIL = 0.9
"""With some hundred rows the interval of auc errs in up to 5.3 % in place of 5 % on one side without it."""

_UNDEFINED_SHARE = 0.01
"""Of resamples. Where more of them are undefined, an interval would tell of the lucky ones only."""

Losses: TypeAlias = npt.NDArray[np.float64]

UNSEEN_CHANGES = 2.5
"""For comparisons of two models; chosen by simulation."""

_CUT = 0.9
"""Quantile of |u| at which the harmless side is cut."""

_FAR, _HALVINGS = 128, 20
"""A limit that lies further away, in units of the first guess of it, is not sought."""


def change_interval(counts: PairedCounts) -> Interval:
    """Change of a share of right rows, candidate minus baseline; grouped rows count as fewer independent ones.

    Raises:
        ValueError: see `tango_interval`.
    """
    n, lost, won = _independent(counts)
    estimate, low, high = tango_interval(n, lost, won)
    return Interval(estimate=estimate, low=low, high=high)


def change_p_value(counts: PairedCounts, bound: float) -> float:
    """Chance of so good a change, or a better one, where the true change equals `bound`."""
    n, lost, won = _independent(counts)
    return float(special.ndtr(-_tango_score(n, lost, won, bound)))


def value_interval(counts: PairedCounts) -> Interval:
    """The candidate's share of right rows; grouped rows count as fewer independent ones."""
    right, n = _independent_value(counts)
    estimate, low, high = clopper_pearson(right, n)
    return Interval(estimate=estimate, low=low, high=high)


def value_p_value(counts: PairedCounts, bound: float) -> float:
    """Chance of so large a share, or a larger one, where the true share equals `bound`."""
    right, n = _independent_value(counts)
    return float(special.betainc(right, n - right + 1, bound)) if right > 0 else 1.0


def _independent_value(counts: PairedCounts) -> tuple[float, float]:
    """Right rows, and rows, of as much evidence without groups."""
    effect = min(counts.value_effect, max(1, counts.n))
    return (counts.both + counts.only_candidate) / effect, counts.n / effect


def _independent(counts: PairedCounts) -> tuple[float, float, float]:
    """Rows, lost and won ones of as much evidence without groups."""
    effect = min(counts.change_effect, max(1, counts.n))
    return counts.n / effect, counts.only_baseline / effect, counts.only_candidate / effect


def tango_interval(
    n: float, only_baseline: float, only_candidate: float, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Score interval for the difference of two proportions on the same rows, candidate minus baseline.

    Tango 1998, Statistics in Medicine 17:891-908, eqs. (24)-(27). It keeps its level where few rows or none are
    discordant, where an interval from the normal approximation collapses.

    Args:
        n: rows, at least one; not a whole number where grouped rows count as fewer.
        only_baseline: rows that only the baseline got right.
        only_candidate: rows that only the candidate got right.
        confidence: of the two-sided interval.

    Returns:
        (estimate, low, high) between -1 and 1.

    Raises:
        ValueError: the counts are negative or exceed n, or n is 0.
    """
    if min(only_baseline, only_candidate) < 0 or only_baseline + only_candidate > n or n < 1:
        raise ValueError(f"counts {only_baseline} and {only_candidate} do not fit {n} rows")
    estimate = (only_candidate - only_baseline) / n
    z = float(special.ndtri((1 + confidence) / 2))

    def score(difference: float, level: float) -> float:
        return _tango_score(n, only_baseline, only_candidate, difference) - level

    from scipy.optimize import brentq  # a stage in a process of its own starts sooner without it

    low, high = -1.0, 1.0
    if estimate - _EDGE > -1 + _EDGE:
        low = float(brentq(score, -1 + _EDGE, estimate - _EDGE, args=(z,), xtol=_EDGE))
    if estimate + _EDGE < 1 - _EDGE:
        high = float(brentq(score, estimate + _EDGE, 1 - _EDGE, args=(-z,), xtol=_EDGE))
    return estimate, low, high


def _tango_score(n: float, b: float, c: float, difference: float) -> float:
    """Standardised distance of (c - b) / n from `difference`, the variance estimated under that difference."""
    linear = (2 * n - c + b) * difference - b - c
    constant = -b * difference * (1 - difference)
    only_b = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * only_b + difference * (1 - difference))
    distance = c - b - n * difference
    if variance > 0:
        return distance / math.sqrt(variance)
    return math.copysign(math.inf, distance) if distance else 0.0


def clopper_pearson(successes: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Exact interval for a proportion (Clopper and Pearson 1934, Biometrika 26:404-413).

    Returns:
        (estimate, low, high).

    Raises:
        ValueError: the counts do not fit each other, or n is 0.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} of {n} is no proportion")
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(successes, n - successes + 1, tail)) if successes else 0.0
    high = float(special.betaincinv(successes + 1, n - successes, 1 - tail)) if successes < n else 1.0
    return successes / n, low, high


def advise_sample_size(n: int) -> str:
    """What to tell a person about the number of rows; empty if there is nothing to tell."""
    return f"below {FEW_SAMPLES} samples expect inconclusive" if n < FEW_SAMPLES else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicates:
    """A statistic of the rows as they are, of each resample, and with each group of rows left out."""

    observed: float
    resampled: npt.NDArray[np.float64]
    left_out: npt.NDArray[np.float64]

    @property
    def spread(self) -> bool:
        """Whether the resamples differ by more than rounding."""
        values = self.resampled[np.isfinite(self.resampled)]
        return bool(values.size and np.ptp(values) > 1e-12 * max(1.0, abs(self.observed)))

    def minus(self, other: Replicates) -> Replicates:
        return _joined(np.subtract, self, other)

    def over(self, other: Replicates) -> Replicates:
        return _joined(np.divide, self, other)


def replicate(
    statistics: Mapping[str, Statistic], groups: npt.NDArray[np.int64], seed: int, resamples: int = RESAMPLES
) -> dict[str, Replicates]:
    """All statistics on the same resamples, drawn from the seed.

    Args:
        statistics: of the rows.
        groups: number of each row's group; groups are drawn and left out as wholes. `arange` draws rows.
        seed: of the draws.
        resamples: how many.
    """
    draw = np.random.default_rng(seed)
    rows, units = len(groups), int(groups.max()) + 1
    at_once = max(1, _CELLS // rows)
    found: dict[str, list[Any]] = {name: [] for name in statistics}
    for start in range(0, resamples, at_once):
        weights = _draw(draw, min(at_once, resamples - start), units)[:, groups]
        for name, statistic in statistics.items():
            found[name].append(statistic(weights))
    kept = _left_out(units)[:, groups]
    return {
        name: Replicates(
            observed=float(statistic(np.ones((1, rows)))[0]),
            resampled=np.concatenate(found[name]),
            left_out=np.concatenate([statistic(kept[i : i + at_once]) for i in range(0, len(kept), at_once)]),
        )
        for name, statistic in statistics.items()
    }


def bca_interval(replicates: Replicates, confidence: float = CONFIDENCE) -> Interval | None:
    """Bias-corrected and accelerated bootstrap interval; None where too many resamples are undefined.

    Efron 1987, Journal of the American Statistical Association 82:171-185, with tails of `_TAIL` times the nominal
    size. The acceleration is that of the jackknife over groups of rows, which has the same expectation as over single
    ones. The levels are those of Student's t with as many degrees of freedom as rows of equal influence would have
    (Satterthwaite 1946, Biometrics Bulletin 2:110-114): where ten rows carry a change, its spread is known from ten.
    """
    values = replicates.resampled[np.isfinite(replicates.resampled)]
    if values.size < (1 - _UNDEFINED_SHARE) * replicates.resampled.size or not np.isfinite(replicates.observed):
        return None
    below = np.mean(values < replicates.observed) + np.mean(values == replicates.observed) / 2
    bias = special.ndtri(np.clip(below, 1 / (values.size + 1), values.size / (values.size + 1)))
    influences = _influences(replicates.left_out)
    far = special.stdtrit(_degrees(influences), 1 - _TAIL * (1 - confidence) / 2)
    levels = bias + np.array([-far, far])
    levels = special.ndtr(bias + levels / np.maximum(1 - _acceleration(influences) * levels, 0.1))
    low, high = np.quantile(values, levels, method="weibull")
    return Interval(
        estimate=replicates.observed,
        low=min(float(low), replicates.observed),
        high=max(float(high), replicates.observed),
    )


def _influences(left_out: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values = left_out[np.isfinite(left_out)]
    return values.mean() - values if values.size else values


def _acceleration(influences: npt.NDArray[np.float64]) -> float:
    squares = float(np.sum(influences**2))
    return float(np.sum(influences**3)) / (6 * squares**1.5) if squares > 0 else 0.0


def _degrees(influences: npt.NDArray[np.float64]) -> float:
    """Degrees of freedom of the variance that the influences add up to; 1 at least."""
    fourth = float(np.sum(influences**4))
    return max(1.0, float(np.sum(influences**2)) ** 2 / fourth - 1 if fourth > 0 else float(influences.size))


def _draw(draw: np.random.Generator, resamples: int, rows: int) -> Weights:
    chosen = draw.integers(0, rows, (resamples, rows)) + rows * np.arange(resamples)[:, None]
    return np.bincount(chosen.ravel(), minlength=resamples * rows).reshape(resamples, rows).astype(np.float64)


def _left_out(rows: int) -> Weights:
    groups = min(GROUPS, rows)
    return np.asarray(np.arange(rows)[None, :] % groups != np.arange(groups)[:, None], dtype=np.float64)


def _joined(operation: Any, one: Replicates, other: Replicates) -> Replicates:
    with np.errstate(all="ignore"):
        return Replicates(
            observed=float(operation(np.float64(one.observed), np.float64(other.observed))),
            resampled=operation(one.resampled, other.resampled),
            left_out=operation(one.left_out, other.left_out),
        )


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


def find_heavy_rows(losses: Losses) -> tuple[float, tuple[int, ...]]:
    """How many equally bad rows would carry the losses as evenly, and the numbers of those that carry half of them."""
    total, squares = float(losses.sum()), float(np.square(losses).sum())
    if squares <= 0:
        return float(len(losses)), ()
    order = np.argsort(-losses, kind="stable")
    half = int(np.searchsorted(np.cumsum(losses[order]), total / 2)) + 1
    return total**2 / squares, tuple(int(row) for row in order[:half])
