"""The effective number of independent units behind the counts of a rollout.

The split assigns users, not requests. Ten errors of one user reached one version by a single assignment, and count as
one. The *design effect* D is how much more the candidate's share of the events varies than if each request were
assigned independently (Kish 1965, Survey Sampling; for a split by users: Deng, Lu and Litz 2017, WSDM, 641-649). The
log likelihood is divided by it, as for any overdispersed count (quasi-likelihood: Wedderburn 1974, Biometrika
61:439-447), so counts are never worth more than those of as many independent requests.

A user's counts grow during the rollout, and stay on one side. The summed evidence of fixed users is then more alike
from look to look than that of a martingale with the same variance, and crosses a boundary no more often (Slepian 1962,
Bell Syst. Tech. J. 41:463-501).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout_observations import UnitSums
from onnx_ops.statistics.rollout.evidence import Array

MIN_INTERVALS = 3
"""Minimum number of intervals of a step whose source does not count by user."""
_FEW = 2.0
"""Allowance for few intervals: a dispersion estimated from n of them counts 1 + 2 / n times."""
_ADDED_ERRORS = 0.5
"""Errors that a service level adds to the observed ones, each in a burst as large as its user's requests."""


def bound_design_effect(epochs: Sequence[UnitSums]) -> float:
    """Return the design effect of events counted by user in each epoch; at least 1.

    With x = e - R n for each user and the pooled rate R, it is the sum of x squared over its expectation if each
    request is a unit.
    The identity of users across epochs is unknown. The root of the sum of squares of a user's total is at most the sum
    of the roots (Minkowski), so the bound holds even if all users returned.
    """
    n, e = sum(epoch.requests for epoch in epochs), sum(epoch.events for epoch in epochs)
    if not 0 < e < n:
        return 1.0
    rate = e / n
    varied = (
        epoch.events_squared - 2 * rate * epoch.products + rate**2 * epoch.requests_squared
        for epoch in epochs
        if epoch.requests
    )
    return float(max(1.0, sum(max(0.0, x) ** 0.5 for x in varied) ** 2 / (rate * (1 - rate) * n)))


def compute_request_effect(epochs: Sequence[UnitSums]) -> float:
    """Return the design effect of the requests themselves."""
    n = sum(epoch.requests for epoch in epochs)
    return float(max(1.0, sum(epoch.requests_squared**0.5 for epoch in epochs) ** 2 / n)) if n else 1.0


def compute_error_effect(events: npt.ArrayLike, events_squared: npt.ArrayLike, crowded: npt.ArrayLike) -> Array:
    """Return the design effect of errors for a service level.

    It is the mean size of the burst that an error comes in. A few errors are added, in bursts as large as a user's
    requests, since errors that were not observed may be as bad.

    Args:
        events_squared: the sum over units of their squares.
        crowded: see `compute_request_effect`.
    """
    e = np.asarray(events, dtype=np.float64)
    with_added = np.asarray(events_squared, dtype=np.float64) + _ADDED_ERRORS * np.asarray(crowded, dtype=np.float64)
    return np.asarray(np.maximum(1.0, with_added / (e + _ADDED_ERRORS)))


def estimate_dispersion(table: npt.ArrayLike) -> Array:
    """Estimate the design effect of counts without users; at least 1.

    The candidate's events of each interval are compared with the odds ratio of all other intervals, since the ratio of
    an interval fits its own events. This detects bursts and retries, but not users who differ for the whole rollout.

    Args:
        table: (..., intervals, 4): the candidate's events and requests, the stable version's events and requests.
    """
    rows = np.asarray(table, dtype=np.float64)
    events, canary, stable = rows[..., 0], rows[..., 1], rows[..., 3]
    total, n = events + rows[..., 2], canary + stable
    usable = (total > 0) & (total < n) & (canary > 0) & (stable > 0)
    if not usable.any():
        return np.ones(rows.shape[:-2])

    def summed(values: Array) -> Array:
        return np.asarray(np.where(usable, values, 0.0).sum(axis=-1, keepdims=True))

    part = canary / np.maximum(n, 1)

    def others(values: Array, half: Array) -> Array:
        return np.asarray(summed(values) - np.where(usable, values, 0.0) + half / 2)

    fitted = others(events, part) * others(total * (1 - part), 1 - part)
    odds = fitted / np.maximum(others(total - events, 1 - part) * others(total * part, part), 1e-12)
    share = odds * canary / np.maximum(odds * canary + stable, 1e-12)
    expected = summed(total * share * (1 - share) * (n - total) / np.maximum(n - 1, 1))
    squares = (events - total * share) ** 2
    varied = summed(squares) / np.maximum(expected, 1e-12)
    effective_intervals = summed(squares) ** 2 / np.maximum(summed(squares**2), 1e-12)
    dispersion = np.where(varied > 1, varied * (1 + _FEW / np.maximum(effective_intervals, 1)), 1.0)
    return np.asarray(dispersion[..., 0])


def estimate_burstiness(table: npt.ArrayLike) -> Array:
    """Estimate the index of dispersion of events over intervals; at least 1.

    The argument is that of `estimate_dispersion`.
    """
    rows = np.asarray(table, dtype=np.float64)
    events, n = rows[..., 0] + rows[..., 2], rows[..., 1] + rows[..., 3]
    rate = events.sum(-1, keepdims=True) / np.maximum(n.sum(-1, keepdims=True), 1)
    varied = ((events - rate * n) ** 2).sum(-1)
    return np.asarray(np.maximum(1.0, (varied + _FEW) / ((rate * (1 - rate) * n).sum(-1) + _FEW)))
