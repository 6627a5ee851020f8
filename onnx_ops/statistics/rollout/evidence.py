"""Evidence that one version has more events, valid after every interval.

Of the n requests of an interval, the candidate answered c, and x of the n requests were events
(errors or slow requests). Given these margins, the number k of events on the candidate has Fisher's
noncentral hypergeometric law, whose only parameter is the odds ratio (Fisher 1935, J. R. Stat. Soc.
98:39-82). The law depends neither on the rate of events nor on the drift of this rate. If requests
are assigned at random and the versions do not differ, k has this law for any cause of the events,
including bursts. The assignment is then the only random part.

An e-process starts at 1 and, under its null hypothesis, is at most 1 in expectation at any stopping
time. The chance that it ever reaches L is at most 1/L (Ville 1939; Ramdas, Grünwald, Vovk and
Shafer 2023, Statistical Science 38:576-601). Here, the e-process is a mixture of likelihood ratios
over odds ratios above the tolerated one (method of mixtures: Robbins 1970, Ann. Math. Stat.
41:1397-1409). The noncentral hypergeometric law has a monotone likelihood ratio. The guarantee at
the tolerated odds ratio is therefore also valid for all smaller ones. The log likelihood is divided
by the design effect of the counts (see `design_effect`), which is 1 where each request is assigned
independently.

Evidence does not depend on the order of intervals. Merging intervals changes it, since their rates
are then assumed to be equal. Evidence of merged intervals is valid under two conditions. The split
did not change between them. The merge did not depend on counts of events. More events on the
candidate never lower the evidence. Given the margins, k grows by at most one with x (Efron 1965,
Ann. Math. Stat. 36:272-279).

For an error rate s, the e-process against "the rate is s or more" is a mixture of likelihood ratios
of smaller rates to s. The rates that it does not exclude are a confidence sequence (Howard, Ramdas,
McAuliffe and Sekhon 2021, Ann. Stat. 49:1055-1080), valid after every request.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from onnx_ops.statistics.intervals import find_least

Array: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

GRID = np.geomspace(1.25, 12.0, 24)
"""Odds ratios that a guardrail tests for, as multiples of the tolerated ratio.

They have equal weights. A wider grid would waste weight, since ratios above 12 are detected within
a few events.
"""
FINE_GRID = np.geomspace(1.02, 5.0, 24)
"""Odds ratios that success metrics test for; they include small differences."""

_CELLS = 1 << 20
"""Maximum size of an intermediate array: rows times possible numbers of events.

Several arrays of this size are in memory at the same time.
"""

RISK = 0.05
"""Maximum probability of a wrong rollback, or of a wrong A/B decision.

A rollback is wrong if the candidate is no worse. The probability covers the whole rollout, and all
guardrails together. Bounds, and rates that are shown to be low, have the same error rate.
"""

_CONFIDENCE_GRID = np.geomspace(0.01, 100.0, 185)
"""Odds ratios of confidence sets, in steps of 5 %."""

SplitDecision = Literal["better", "worse", "undecided"]

_SHARES = np.geomspace(0.02, 0.9, 12)
"""Alternative rates with equal weights, as shares of the rate under test."""
_LEAST = 1e-12


def compute_log_likelihood(table: npt.ArrayLike, odds_ratios: npt.ArrayLike) -> Array:
    """Return the log likelihood ratio of each odds ratio to an odds ratio of 1.

    The log likelihood ratios of independent intervals add.

    Args:
        table: (..., 4) whole numbers: the candidate's events and requests, the stable version's
            events and requests.
        odds_ratios: (m,) positive.

    Returns:
        (..., m): log P(k | odds ratio) - log P(k | 1) for each interval, where k is the number of
        events on the candidate. The value is 0 where only one outcome was possible, as without
        events or with requests on one side only.

    Raises:
        ValueError: a count is negative, or a version has more events than requests.
    """
    counts = np.asarray(table, dtype=np.int64)
    logs = np.log(np.asarray(odds_ratios, dtype=np.float64))
    rows = counts.reshape(-1, 4)
    if (rows < 0).any() or (rows[:, 0] > rows[:, 1]).any() or (rows[:, 2] > rows[:, 3]).any():
        raise ValueError("events are negative or exceed requests")
    logs_by_row = np.zeros((len(rows), len(logs)))
    rows = _scale_down(rows)
    events = rows[:, 0] + rows[:, 2]
    low = np.maximum(0, events - rows[:, 3])
    width = np.minimum(rows[:, 1], events) - low + 1
    open_ = np.flatnonzero(width > 1)
    order = open_[np.argsort(width[open_], kind="stable")]
    start = 0
    while start < len(order):
        # The widths are in ascending order, so the last row of a part determines the memory of the
        # part.
        fits = (np.arange(1, len(order) - start + 1) * width[order[start:]] <= _CELLS).sum()
        part = order[start : start + max(1, int(fits))]
        logs_by_row[part] = _likelihood(rows[part], low[part], width[part], logs)
        start += len(part)
    return logs_by_row.reshape(*counts.shape[:-1], len(logs))


def _scale_down(rows: Counts) -> Counts:
    """Scale down rows whose likelihood would not fit into memory.

    Fewer observations with the same rates are less evidence, and a million events are enough for a
    decision. Requests are rounded up, so that their number is never below the number of events.
    """
    scale = np.maximum(1, -(-np.minimum(rows[:, 0] + rows[:, 2], rows[:, 1]) // _CELLS))[:, None]
    return np.stack([rows[:, 0::2] // scale, -(-rows[:, 1::2] // scale)], axis=-1).reshape(-1, 4)


def _likelihood(rows: Counts, low: Counts, width: Counts, logs: Array) -> Array:
    k = low[:, None] + np.arange(int(width.max()))
    outside = k - low[:, None] >= width[:, None]
    k = np.where(outside, low[:, None], k)
    canary, stable = rows[:, 1:2], rows[:, 3:4]
    rest = (rows[:, 0] + rows[:, 2])[:, None] - k
    weight = -(
        gammaln(k + 1) + gammaln(canary - k + 1) + gammaln(rest + 1) + gammaln(stable - rest + 1)
    )
    weight[outside] = -np.inf
    distance = (k - rows[:, :1]).astype(np.float64)
    baseline = _log_sum(weight)
    logs_by_row = np.empty((len(rows), len(logs)))
    for column, log in enumerate(logs):
        logs_by_row[:, column] = baseline - _log_sum(weight + distance * log)
    return logs_by_row


def _log_sum(values: Array) -> Array:
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[:, None]).sum(axis=-1)))


def compute_evidence_limit(guardrails: int) -> float:
    """Return log10 of the evidence at which any one of the guardrails fires.

    It is a union bound: 60:1 for three guardrails.
    """
    return math.log10(max(1, guardrails) / RISK)


def make_alternatives(tolerated: float, grid: Array = GRID) -> Array:
    """Return the tolerated odds ratio, followed by the alternatives; shape (25,)."""
    return np.concatenate([[tolerated], tolerated * grid])


def compute_log10_evidence(summed: npt.ArrayLike) -> Array:
    """Return log10 evidence against "at most the tolerated odds ratio".

    Args:
        summed: (..., 25) log likelihoods at `make_alternatives`, added over intervals.
    """
    logs = np.asarray(summed, dtype=np.float64)
    return log_mean_exp(logs[..., 1:] - logs[..., :1]) / math.log(10)


def average_evidence(evidences: npt.ArrayLike) -> Array:
    """Return log10 of the evidence that any of several null hypotheses is false.

    It is the mean of the evidence, which is valid for any e-processes (Vovk and Wang 2021, Ann.
    Stat. 49:1736-1754).

    Args:
        evidences: (..., hypotheses) log10 of the evidence against each hypothesis.
    """
    return log_mean_exp(np.asarray(evidences, dtype=np.float64) * math.log(10)) / math.log(10)


def measure_evidence(table: npt.ArrayLike, tolerated: float, effect: float = 1.0) -> float:
    """Return log10 of the evidence of all intervals against the tolerated odds ratio.

    Args:
        table: (intervals, 4) as in `compute_log_likelihood`.
        effect: design effect of the counts.
    """
    return float(compute_log10_evidence(_summed(table, make_alternatives(tolerated)) / effect))


def bound_odds_ratio(table: npt.ArrayLike, effect: float = 1.0) -> tuple[float, float]:
    """Return 95 % bounds of the odds ratio that are jointly valid at all times.

    They enclose the odds ratios that a mixture over all ratios does not exclude by 20:1, widened to
    the next points of the grid. A bound of 0.01 represents all smaller ratios, and 100 represents
    all larger ratios.
    """
    summed = _summed(table, _CONFIDENCE_GRID) / effect
    included = np.flatnonzero(log_mean_exp(summed) - summed < math.log(1 / RISK))
    low, high = max(0, int(included[0]) - 1), min(len(summed) - 1, int(included[-1]) + 1)
    return float(_CONFIDENCE_GRID[low]), float(_CONFIDENCE_GRID[high])


def run_split_test(
    table: npt.ArrayLike, *, higher_is_better: bool, effect: float = 1.0
) -> tuple[SplitDecision, float, float]:
    """Decide which version has the better success rate, valid at any time.

    Both directions are tested at half of `RISK`: the limit is 40:1.

    Args:
        table: (intervals, 4): the candidate's successes and outcomes, the stable version's
            successes and outcomes.

    Returns:
        (decision about the candidate, log10 evidence that its rate is higher, log10 evidence that
        it is lower).
    """
    rows = np.asarray(table, dtype=np.int64).reshape(-1, 4)
    above, below = _summed(rows, make_alternatives(1.0, FINE_GRID)), _summed(rows, 1 / FINE_GRID)
    higher, lower = compute_split_evidence(above / effect, below / effect)
    return (
        decide_split(float(higher), float(lower), higher_is_better=higher_is_better),
        float(higher),
        float(lower),
    )


def compute_split_evidence(above: npt.ArrayLike, below: npt.ArrayLike) -> tuple[Array, Array]:
    """Return log10 evidence that the odds ratio is above 1, and that it is below 1.

    Args:
        above: (..., 25) summed log likelihoods at `make_alternatives(1, FINE_GRID)`.
        below: (..., 24) those at `1 / FINE_GRID`.
    """
    return compute_log10_evidence(above), log_mean_exp(
        np.asarray(below, dtype=np.float64)
    ) / math.log(10)


def decide_split(higher: float, lower: float, *, higher_is_better: bool) -> SplitDecision:
    """Return the A/B decision by the stronger of the evidence in both directions."""
    if max(higher, lower) < compute_evidence_limit(2):
        return "undecided"
    return "better" if (higher > lower) is higher_is_better else "worse"


def _summed(table: npt.ArrayLike, odds_ratios: Array) -> Array:
    rows = np.asarray(table, dtype=np.int64).reshape(-1, 4)
    return np.asarray(compute_log_likelihood(rows, odds_ratios).sum(axis=0))


def log_mean_exp(logs: Array) -> Array:
    """Return the log of the mean of exp(logs) along the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logs - top).mean(axis=-1)))


def compute_evidence_below(
    errors: npt.ArrayLike, requests: npt.ArrayLike, rate: npt.ArrayLike, effect: npt.ArrayLike = 1.0
) -> Array:
    """Return the natural log of the evidence against an error share of `rate` or more."""
    bad = np.asarray(errors, dtype=np.float64)[..., None]
    good = np.asarray(requests, dtype=np.float64)[..., None] - bad
    against = np.asarray(rate, dtype=np.float64)[..., None]
    logs = bad * np.log(_SHARES) + good * (np.log1p(-against * _SHARES) - np.log1p(-against))
    logs = logs / np.asarray(effect, dtype=np.float64)[..., None]
    return log_mean_exp(logs)


def compute_evidence_above(errors: int, requests: int, rate: float) -> float:
    """Return log10 evidence against "the share of errors is `rate` or less"."""
    odds = GRID * rate / (1 - rate)
    rates = odds / (1 + odds)
    logs = errors * np.log(rates / rate) + (requests - errors) * (
        np.log1p(-rates) - math.log1p(-rate)
    )
    return float(log_mean_exp(logs)) / math.log(10)


def is_rate_certified(
    errors: npt.ArrayLike, requests: npt.ArrayLike, rate: float, effect: npt.ArrayLike = 1.0
) -> npt.NDArray[np.bool_]:
    """Return whether the evidence shows a share of errors below `rate`."""
    return np.asarray(compute_evidence_below(errors, requests, rate, effect) >= math.log(1 / RISK))


def bound_error_rate(errors: int, requests: int, effect: float = 1.0) -> float:
    """Return the upper confidence bound of the share of errors; 1 without requests."""

    def short(rate: float) -> float:
        return float(compute_evidence_below(errors, requests, rate, effect)) - math.log(1 / RISK)

    least = max(errors / requests, _LEAST) if requests else 1.0
    if least >= 1 - _LEAST or short(1 - _LEAST) < 0:
        return 1.0
    if short(least) >= 0:
        return least

    # The import is local, since only service levels and shadow trials need it.
    from scipy.optimize import brentq

    return float(brentq(short, least, 1 - _LEAST, xtol=1e-9))


def compute_clean_requests(rate: float) -> int:
    """Return the minimum number of error-free requests that show a rate below `rate`.

    Raises:
        ValueError: `rate` is not between 0 and 1 (exclusive).
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate {rate} is not between 0 and 1")
    return find_least(lambda requests: bool(is_rate_certified(0, requests, rate)))
