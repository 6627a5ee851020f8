"""How many independent units the counts of a rollout are worth.

The split assigns users, not requests. Ten errors of one user went to one version by one draw, and are evidence of one.
The *design effect* D says how much more the candidate's share of the events varies than it would if each request were
assigned independently (Kish 1965, Survey Sampling; for a split by users: Deng, Lu and Litz 2017, WSDM, 641-649). The
log likelihood is divided by it, as for any overdispersed count (quasi-likelihood: Wedderburn 1974, Biometrika
61:439-447), so counts are never worth more than those of as many independent requests.

A user's counts grow while the rollout goes on, and they stay on one side. The summed evidence of fixed users is then
more alike from look to look than that of a martingale with the same variance, and so crosses a boundary no more often
(Slepian 1962, Bell Syst. Tech. J. 41:463-501).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout_observations import UnitSums
from onnx_ops.statistics.rollout.evidence import Array

MIN_INTERVALS = 3
"""That a step takes at least where no users are told."""
_FEW = 2.0
"""What few intervals are held for: a dispersion that n of them tell counts 1 + 2 / n times."""
_ERRORS_BELIEVED = 0.5
"""Errors that a service level adds to those seen, each in a bunch as large as its user's requests."""


def compute_design_effect(
    requests: npt.ArrayLike,
    events: npt.ArrayLike,
    requests_squared: npt.ArrayLike,
    events_squared: npt.ArrayLike,
    products: npt.ArrayLike,
) -> Array:
    """Return the design effect of events among requests, at least 1. The arguments broadcast; see `UnitSums`.

    With x = e - R n for each unit, R being the pooled rate, it is the sum of x squared, over what that sum is expected
    to be if each request is a unit.
    """
    n, e = np.asarray(requests, dtype=np.float64), np.asarray(events, dtype=np.float64)
    rate = e / np.maximum(n, 1)
    varied = np.asarray(events_squared) - 2 * rate * np.asarray(products) + rate**2 * np.asarray(requests_squared)
    expected = rate * (1 - rate) * n
    return np.asarray(np.maximum(1.0, varied / np.where(expected > 0, expected, np.inf)))


def bound_design_effect(epochs: Sequence[UnitSums]) -> float:
    """Return the design effect of events that were counted by user anew in each epoch; 1 where none were.

    Who was who in which epoch is lost. The root of the sum of squares of a user's total is at most the sum of the roots
    (Minkowski), so the bound holds if all users came back.
    """
    n, e = sum(one.requests for one in epochs), sum(one.events for one in epochs)
    if not 0 < e < n:
        return 1.0
    rate = e / n
    varied = (
        one.events_squared - 2 * rate * one.products + rate**2 * one.requests_squared for one in epochs if one.requests
    )
    return float(max(1.0, sum(max(0.0, x) ** 0.5 for x in varied) ** 2 / (rate * (1 - rate) * n)))


def compute_request_effect(epochs: Sequence[UnitSums]) -> float:
    """Return the design effect of the requests themselves: how many of a user's the split moves at once."""
    n = sum(one.requests for one in epochs)
    return float(max(1.0, sum(one.requests_squared**0.5 for one in epochs) ** 2 / n)) if n else 1.0


def compute_error_effect(events: npt.ArrayLike, events_squared: npt.ArrayLike, crowded: npt.ArrayLike) -> Array:
    """Return the design effect of errors for a service level, where few errors or none may have been seen.

    It is the mean size of the bunch that an error comes in. A few errors are added that come in bunches as large as a
    user's requests: what was not seen yet may be as bad.

    Args:
        events: errors of both versions.
        events_squared: the sum over units of their squares.
        crowded: see `compute_request_effect`.
    """
    e = np.asarray(events, dtype=np.float64)
    believed = np.asarray(events_squared, dtype=np.float64) + _ERRORS_BELIEVED * np.asarray(crowded, dtype=np.float64)
    return np.asarray(np.maximum(1.0, believed / (e + _ERRORS_BELIEVED)))


def estimate_dispersion(table: npt.ArrayLike) -> Array:
    """Return the design effect of counts that no unit is known of, from how they vary over intervals; at least 1.

    The candidate's events of each interval are held against the odds ratio of all other intervals, as one alone fits
    itself. Bunches and retries show here; users who differ for as long as the rollout lasts do not.

    Args:
        table: (..., intervals, 4): the candidate's events and requests, the stable version's events and requests.

    Returns:
        (...).
    """
    rows = np.asarray(table, dtype=np.float64)
    mine, canary, stable = rows[..., 0], rows[..., 1], rows[..., 3]
    total, n = mine + rows[..., 2], canary + stable
    able = (total > 0) & (total < n) & (canary > 0) & (stable > 0)
    if not able.any():
        return np.ones(rows.shape[:-2])

    def summed(values: Array) -> Array:
        return np.asarray(np.where(able, values, 0.0).sum(axis=-1, keepdims=True))

    part = canary / np.maximum(n, 1)

    def others(values: Array, half: Array) -> Array:
        return np.asarray(summed(values) - np.where(able, values, 0.0) + half / 2)

    fitted = others(mine, part) * others(total * (1 - part), 1 - part)
    odds = fitted / np.maximum(others(total - mine, 1 - part) * others(total * part, part), 1e-12)
    share = odds * canary / np.maximum(odds * canary + stable, 1e-12)
    expected = summed(total * share * (1 - share) * (n - total) / np.maximum(n - 1, 1))
    squares = (mine - total * share) ** 2
    varied = summed(squares) / np.maximum(expected, 1e-12)
    telling = summed(squares) ** 2 / np.maximum(summed(squares**2), 1e-12)
    found = np.where(varied > 1, varied * (1 + _FEW / np.maximum(telling, 1)), 1.0)
    return np.asarray(found[..., 0])


def estimate_burstiness(table: npt.ArrayLike) -> Array:
    """Return the index of dispersion of both versions' events over intervals; at least 1.

    The argument is that of `estimate_dispersion`.
    """
    rows = np.asarray(table, dtype=np.float64)
    events, n = rows[..., 0] + rows[..., 2], rows[..., 1] + rows[..., 3]
    rate = events.sum(-1, keepdims=True) / np.maximum(n.sum(-1, keepdims=True), 1)
    varied = ((events - rate * n) ** 2).sum(-1)
    return np.asarray(np.maximum(1.0, (varied + _FEW) / ((rate * (1 - rate) * n).sum(-1) + _FEW)))
