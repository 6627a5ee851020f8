"""The units of an endpoint's traffic, as the judge of a rollout counts them.

Users send requests by Zipf's law with exponent `SKEW`, each as a Poisson process. Requests fail, or
are slow, independently. In an epoch, a user with at least one request is a unit, whose badness is
the share of its bad requests. Requests without a key are units themselves. The number of units in
an epoch is a sum of independent Bernoulli trials. It is replaced by a binomial number with the same
mean and variance. Waiting times for counts are Gamma distributed (Poisson process). Where requests
come in clumps of one user, mean and variance of the counts are matched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincc, gammaincinv, ndtri

from onnx_ops.domain.rollout_observations import BADNESS_EDGES
from onnx_ops.statistics.rollout.evidence import Array, Counts

SKEW = 0.8
"""Exponent of Zipf's law by which users are assumed to send requests.

It is that of the simulations behind the published error rates. `benchmarks.forecast_truth` compares
forecasts with traffic of exponents from 0 to 1.1.
"""
CELLS = 16_000
"""Number of cells of users; the users of a cell are one unit."""
_HEAD = 256
"""Number of users with most requests that are modelled one by one."""
_GROUPS = 32
"""Number of groups of the other users; the users of a group are equally active."""
_STRATA = 33
"""Number of quantiles that represent the bad requests of a user in an epoch."""
_GOLDEN = 0.6180339887498949
"""Golden ratio minus 1; the fractional parts of its multiples are spread evenly."""
_LARGE = 20.0
"""Mean above which a Poisson quantile is that of a normal distribution."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitModel:
    """The units of one epoch.

    `activity` are the requests in an epoch of one user in each group, and `members` the numbers of
    users in the groups. Without users, each of the `requests` is a unit.
    """

    requests: float
    members: Array
    activity: Array

    @property
    def has_users(self) -> bool:
        """Return whether users with keys send the requests."""
        return len(self.members) > 0

    @property
    def units(self) -> float:
        """Return the expected number of units in an epoch."""
        if not self.has_users:
            return self.requests
        return float((self.members * -np.expm1(-self.activity)).sum())

    def measure_clumps(self, share: float) -> float:
        """Return the index of dispersion of a version's requests in an epoch.

        All requests of a user in an epoch go to one version, which has this share.
        """
        if not self.has_users:
            return 1.0
        squares = float((self.members * self.activity**2).sum())
        return 1.0 + (1 - share) * squares / self.requests

    def measure_unit_spread(self, share: float) -> float:
        """Return the index of dispersion of a version's units in an epoch."""
        if not self.has_users:
            return 1.0
        active = -np.expm1(-self.activity)
        return float(max(0.02, 1 - share * (self.members * active**2).sum() / self.units))

    def draw_units(self, epochs: Array, random: np.random.Generator) -> Counts:
        """Draw the number of units in each number of epochs, which can be a fraction."""
        if not self.has_users:
            return np.asarray(random.poisson(self.requests * epochs), dtype=np.int64)
        active = -np.expm1(-self.activity)
        chance = float((self.members * active**2).sum() / self.units)
        trials = np.ceil(self.units / chance * epochs).astype(np.int64)
        chances = np.minimum(1.0, self.units * epochs / np.maximum(trials, 1))
        return np.asarray(random.binomial(trials, chances), dtype=np.int64)

    def bin_badness(self, chance: float) -> Array:
        """Return the distribution of a unit's badness, shape (bins,).

        Args:
            chance: chance that a request is bad.
        """
        shares = np.zeros(len(BADNESS_EDGES))
        if not self.has_users:
            shares[0], shares[-1] = 1 - chance, chance
            return shares
        bad, good = self.activity * chance, self.activity * (1 - chance)
        none = np.exp(-bad)
        shares[0] = (self.members * none * -np.expm1(-good)).sum()
        places = (np.arange(_STRATA) + 0.5) / _STRATA
        others = np.modf(np.arange(1, _STRATA + 1) * _GOLDEN)[0]
        events = np.maximum(1, _find_poisson(none[:, None] + places * (1 - none[:, None]), bad))
        rest = _find_poisson(np.broadcast_to(others, events.shape), good)
        bins = np.searchsorted(BADNESS_EDGES, events / (events + rest))
        weights = np.broadcast_to((self.members * (1 - none) / _STRATA)[:, None], events.shape)
        shares += np.bincount(bins.ravel(), weights.ravel(), minlength=len(shares))
        return np.asarray(shares / shares.sum())


def model_units(requests: float, users: int, skew: float = SKEW) -> UnitModel:
    """Return the units of an epoch with this expected number of requests.

    Args:
        users: number of users; 0 if requests have no key.
        skew: exponent of Zipf's law, other than 1.
    """
    if not users:
        return UnitModel(requests, np.zeros(0), np.zeros(0))
    ranks = np.unique(
        np.round(np.geomspace(min(users, _HEAD), users, _GROUPS + 1)).astype(np.int64)
    )
    weights = np.arange(1, min(users, _HEAD) + 1, dtype=np.float64) ** -skew
    members = np.ones(len(weights))
    if users > _HEAD:
        # Each group has too many users for a sum over its ranks, so an integral replaces the sum.
        edges = ranks + 0.5
        sums = np.diff(edges ** (1 - skew)) / (1 - skew)
        counts = np.diff(ranks).astype(np.float64)
        members, weights = np.append(members, counts), np.append(weights, sums / counts)
    if users > CELLS:
        tail = (members * weights)[_HEAD:].sum() / CELLS
        members, weights = np.append(np.ones(_HEAD), CELLS), np.append(weights[:_HEAD], tail)
    return UnitModel(requests, members, requests * weights / (members * weights).sum())


def wait_for_count(count: float, rate: float, dispersion: float, chances: Array) -> Array:
    """Return quantiles of the time until a number of events was counted.

    For a Poisson process, this is the Gamma distribution. With another index of dispersion, events
    are counted in clumps of that size. On average, half a clump more than necessary is counted.
    """
    if count <= 0:
        return np.zeros_like(chances)
    if rate <= 0:
        return np.full_like(chances, np.inf)
    shape = count / dispersion + max(0.0, 0.5 * (1 - 1 / dispersion))
    return np.asarray(gammaincinv(shape, chances) * dispersion / rate)


def _find_poisson(chances: Array, means: Array) -> Array:
    """Return Poisson quantiles, (groups, strata); `means` has the shape (groups,).

    Those of large means are normal, with a correction for skewness (Cornish and Fisher 1937, Rev.
    Inst. Int. Stat. 5:307-320).
    """
    small = means < _LARGE
    quantiles = np.zeros(chances.shape)
    reached = gammaincc(np.arange(1, 4 * int(_LARGE)), means[small, None])
    quantiles[small] = (reached[:, None, :] < chances[small, :, None]).sum(axis=-1)
    scores, large = ndtri(np.clip(chances[~small], 1e-12, 1 - 1e-12)), means[~small, None]
    quantiles[~small] = np.round(large + np.sqrt(large) * scores + (scores**2 - 1) / 6)
    return np.maximum(0.0, quantiles)
