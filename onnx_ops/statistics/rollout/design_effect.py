"""The effective number of independent observations behind counts of requests.

Canary steps on servers of onnx-ops do not need this number, since they assign versions at random in
each epoch (see `unit_evidence`). The number is needed in three cases:

- A/B tests, in which a user stays on one version
- sources that count no units
- service levels, which involve no comparison with another version

The *design effect* D is how much more counts vary than if each request were assigned, or failed,
independently (Kish 1965, Survey Sampling; for a split by users: Deng, Lu and Litz 2017, WSDM,
641-649). The log likelihood is divided by D, as for any overdispersed count (quasi-likelihood:
Wedderburn 1974, Biometrika 61:439-447). Counts are therefore never more evidence than those of as
many independent requests.

In an A/B test, a user's counts grow and stay on one side. The summed evidence of fixed users is
then more alike from look to look than that of a martingale with the same variance. Therefore it
crosses a boundary at most as often (Slepian 1962, Bell Syst. Tech. J. 41:463-501).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout_observations import UserBlocks
from onnx_ops.statistics.rollout.evidence import Array

MIN_INTERVALS = 3
"""Minimum number of intervals of a step whose source counts no units."""
_FEW = 2.0
"""Correction for few intervals.

A dispersion from n intervals is multiplied by 1 + 2 / n. For a service level, 2 is added to both
parts of the ratio.
"""
OUTAGE_SHARE = 0.3
"""Share of an interval's requests that a future outage can cause to fail.

For a service level, an interval is worth at most 1 / 0.3 independent requests.
"""


def compute_block_effect(blocks: Sequence[UserBlocks]) -> float:
    """Return the design effect of events counted by block of users, at least 1.

    A block with n requests and e events has x = e - R n, where R is the rate over all blocks and
    versions. The effect is the sum of x^2, divided by R (1 - R) times the number of requests. The
    numerator of a block equals that of its users in expectation, since users are independent. Any
    server can therefore count a block. Each request without a key is a unit.

    Args:
        blocks: one element for each version.
    """
    n, e = (
        np.array([values(one) for one in blocks], dtype=np.float64)
        for values in (_requests, _events)
    )
    total, events = n.sum(), e.sum()
    if not 0 < events < total:
        return 1.0
    rate = events / total
    varied = ((e - rate * n)[:, :-1] ** 2).sum() + rate * (1 - rate) * n[:, -1].sum()
    return float(max(1.0, varied / (rate * (1 - rate) * total)))


def count_effective_users(blocks: UserBlocks) -> float:
    """Return the effective number of users behind the requests of one version.

    As many equally active users would be worth the same. The number is (sum of n)^2 / sum of n^2
    over blocks with n requests (Kish), at most `USER_BLOCKS` for requests with a key. Each request
    without a key is one user.
    """
    n = np.array(blocks.requests, dtype=np.float64)
    squares = (n[:-1] ** 2).sum() + n[-1:].sum()
    return float(n.sum() ** 2 / squares) if squares else 0.0


def compute_split_effect(blocks: Sequence[UserBlocks]) -> float:
    """Return the design effect of the traffic split between two versions, at least 1.

    The first version has the share p of all N requests. A block of users has n requests, of which
    the first version got a. The effect is the sum of (a - p n)^2 over blocks, divided by
    p (1 - p) N. Each request without a key is a unit.

    Args:
        blocks: one element for each of the two versions.
    """
    n = np.array([values.requests for values in blocks], dtype=np.float64)
    total = n.sum()
    share = n[:1].sum() / total if total else 0.0
    if not 0 < share < 1:
        return 1.0
    varied = ((n[0] - share * n.sum(axis=0))[:-1] ** 2).sum() + share * (1 - share) * n[:, -1].sum()
    return float(max(1.0, varied / (share * (1 - share) * total)))


def _requests(blocks: UserBlocks) -> tuple[int, ...]:
    return blocks.requests


def _events(blocks: UserBlocks) -> tuple[int, ...]:
    return blocks.events


def estimate_dispersion(table: npt.ArrayLike) -> Array:
    """Estimate the design effect of counts without users, at least 1.

    The candidate's events of an interval are compared with the odds ratio of all other intervals.
    An odds ratio that includes the interval fits its events too well. The comparison detects bursts
    and retries, but not users who differ for the whole rollout.

    Args:
        table: (..., intervals, 4): the candidate's events and requests, the stable version's events
            and requests.
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


def estimate_error_effect(table: npt.ArrayLike) -> Array:
    """Return the design effect of the candidate's errors, at least 1.

    The effect is used for service levels. It is the index of dispersion of the errors over
    intervals, of the candidate or of both versions, whichever is larger. An outage may still
    occur. The requests of an interval are therefore worth at most 1 / `OUTAGE_SHARE` independent
    requests.

    Args:
        table: as in `estimate_dispersion`.
    """
    rows = np.asarray(table, dtype=np.float64)
    n = rows[..., 1]
    total = n.sum(axis=-1)
    intervals = total**2 / np.maximum((n**2).sum(axis=-1), 1)
    unseen = OUTAGE_SHARE * total / np.maximum(intervals, 1)
    pooled = _estimate_burstiness(rows[..., 0] + rows[..., 2], n + rows[..., 3])
    return np.asarray(
        np.maximum.reduce(
            [np.ones_like(unseen), unseen, _estimate_burstiness(rows[..., 0], n), pooled]
        )
    )


def _estimate_burstiness(events: Array, n: Array) -> Array:
    """Return the index of dispersion of events over the last axis, the intervals."""
    rate = events.sum(-1, keepdims=True) / np.maximum(n.sum(-1, keepdims=True), 1)
    varied = ((events - rate * n) ** 2).sum(-1)
    return np.asarray((varied + _FEW) / ((rate * (1 - rate) * n).sum(-1) + _FEW))
