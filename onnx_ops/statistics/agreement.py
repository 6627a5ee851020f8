"""Agreement: how a task metric of two models differs on the same rows, and how good one model is by itself."""

from __future__ import annotations

import math

from onnx_ops.domain.evidence import Interval, PairedCounts
from onnx_ops.statistics import special

CONFIDENCE = 0.90
"""Of two-sided intervals: each bound has a one-sided error rate of 5 %."""

FEW_SAMPLES = 500

_EDGE = 1e-12


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


def sample_advice(n: int) -> str:
    """What to tell a person about the number of rows; empty if there is nothing to tell."""
    return f"below {FEW_SAMPLES} samples expect inconclusive" if n < FEW_SAMPLES else ""
