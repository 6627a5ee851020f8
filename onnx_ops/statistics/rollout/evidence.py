"""Evidence that one version has more events than the other, which may be looked at after every interval.

An e-process starts at 1 and, while its null hypothesis holds, is 1 or less in expectation whenever one stops looking;
the chance that it ever reaches L is at most 1/L (Ville 1939; Ramdas, Grünwald, Vovk and Shafer 2023, Statistical
Science 38:576-601). Here it is a mixture of likelihood ratios over odds ratios above the tolerated one (method of
mixtures: Robbins 1970, Ann. Math. Stat. 41:1397-1409). The noncentral hypergeometric law has a monotone likelihood
ratio, so what holds at the tolerated odds ratio holds for all below it. The log likelihood is divided by the design
effect of the counts (see `units`), which is 1 where each request is assigned on its own.

Evidence does not depend on the order of intervals. Merging intervals changes it, since their rates are then taken to
be one; it stays valid where the split did not change between them and counts of events did not decide what to merge.
More events on the candidate never lower it: given the margins, k grows by at most one with x (Efron 1965, Ann. Math.
Stat. 36:272-279).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from onnx_ops.statistics.rollout.likelihood import FINE_GRID, GRID, Array, log_likelihood

RISK = 0.05
"""Chance that a candidate that is no worse is ever rolled back, over all guardrails; and of a wrong A/B decision."""

_CONFIDENCE_GRID = np.geomspace(0.01, 100.0, 185)
"""Odds ratios of which a confidence set is made; 5 % apart."""

Decision = Literal["better", "worse", "undecided"]


def limit(guardrails: int) -> float:
    """log10 of the evidence at which one of so many guardrails fires: 60:1 for three (union bound)."""
    return math.log10(max(1, guardrails) / RISK)


def alternatives(tolerated: float, grid: Array = GRID) -> Array:
    """The tolerated odds ratio, then those that are looked for; (25,)."""
    return np.concatenate([[tolerated], tolerated * grid])


def log10_evidence(summed: npt.ArrayLike) -> Array:
    """log10 of the evidence against "the odds ratio is at most the tolerated one".

    Args:
        summed: (..., 25) log likelihoods at `alternatives`, added over intervals.

    Returns:
        (...).
    """
    logs = np.asarray(summed, dtype=np.float64)
    return _log_mean(logs[..., 1:] - logs[..., :1]) / math.log(10)


def average(evidences: npt.ArrayLike) -> Array:
    """log10 of the evidence that any of several null hypotheses is false: their mean, as e-processes have (Vovk and
    Wang 2021, Ann. Stat. 49:1736-1754). The arguments' last axis is that of the hypotheses."""
    return _log_mean(np.asarray(evidences, dtype=np.float64) * math.log(10)) / math.log(10)


def evidence(table: npt.ArrayLike, tolerated: float, effect: float = 1.0) -> float:
    """log10 of the evidence of all intervals, each a row as `log_likelihood` takes them."""
    return float(log10_evidence(_summed(table, alternatives(tolerated)) / effect))


def evidence_path(table: npt.ArrayLike, tolerated: float, effect: float = 1.0) -> Array:
    """log10 of the evidence after each interval; (intervals,)."""
    rows = np.asarray(table, dtype=np.int64).reshape(-1, 4)
    return log10_evidence(np.cumsum(log_likelihood(rows, alternatives(tolerated)), axis=0) / effect)


def odds_ratio_bounds(table: npt.ArrayLike, effect: float = 1.0) -> tuple[float, float]:
    """Bounds of the odds ratio that hold at all times together with a chance of 95 %.

    The set of odds ratios that a mixture over all of them does not speak against by 20:1, widened to the grid's next
    points. Bounds of 0.01 and 100 mean "and beyond".
    """
    summed = _summed(table, _CONFIDENCE_GRID) / effect
    kept = np.flatnonzero(_log_mean(summed) - summed < math.log(1 / RISK))
    low, high = max(0, int(kept[0]) - 1), min(len(summed) - 1, int(kept[-1]) + 1)
    return float(_CONFIDENCE_GRID[low]), float(_CONFIDENCE_GRID[high])


def split_test(table: npt.ArrayLike, *, higher_is_better: bool, effect: float = 1.0) -> tuple[Decision, float, float]:
    """Which version has the better success rate, at any time.

    Both directions are tested at half of `RISK`: the limit is 40:1.

    Args:
        table: (intervals, 4): the candidate's successes and outcomes, the stable version's successes and outcomes.
        higher_is_better: whether a success is good.
        effect: design effect of the successes.

    Returns:
        (decision about the candidate, log10 evidence that its rate is higher, log10 evidence that it is lower).
    """
    rows = np.asarray(table, dtype=np.int64).reshape(-1, 4)
    above, below = _summed(rows, alternatives(1.0, FINE_GRID)), _summed(rows, 1 / FINE_GRID)
    higher, lower = split_evidence(above / effect, below / effect)
    return decided(float(higher), float(lower), higher_is_better=higher_is_better), float(higher), float(lower)


def split_evidence(above: npt.ArrayLike, below: npt.ArrayLike) -> tuple[Array, Array]:
    """log10 evidence that the odds ratio is above 1, and that it is below 1.

    Args:
        above: (..., 25) summed log likelihoods at `alternatives(1, FINE_GRID)`.
        below: (..., 24) those at `1 / FINE_GRID`.
    """
    return log10_evidence(above), _log_mean(np.asarray(below, dtype=np.float64)) / math.log(10)


def decided(higher: float, lower: float, *, higher_is_better: bool) -> Decision:
    """From log10 evidence in both directions; the stronger counts."""
    if max(higher, lower) < limit(2):
        return "undecided"
    return "better" if (higher > lower) is higher_is_better else "worse"


def _summed(table: npt.ArrayLike, odds_ratios: Array) -> Array:
    rows = np.asarray(table, dtype=np.int64).reshape(-1, 4)
    return np.asarray(log_likelihood(rows, odds_ratios).sum(axis=0))


def _log_mean(logs: Array) -> Array:
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logs - top).mean(axis=-1)))
