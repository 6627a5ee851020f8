"""Traffic of users who differ from each other.

Some send more than others, fail more often, send larger inputs, or retry. Both versions are alike
unless a world specifies a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from onnx_ops.domain.rollout_observations import BADNESS_EDGES, USER_BLOCKS
from onnx_ops.serving.metrics import WARM_UP_REQUESTS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLACK = 2 ** (2 / 16)
"""Factor by which the candidate's thresholds are higher.

It is 10 %, at the nearest bound of the server's histogram.
"""
SPREAD = 0.5
"""Standard deviation of log latency."""
_BEFORE = 4000
"""Number of requests before the rollout from which thresholds are computed."""
_COLD = 3.0
"""Factor by which the first requests to a cold candidate take longer."""
_DAY = 24
"""Number of looks from one night to the next."""
_FAULT_AT = 15
"""Epoch in which clients begin to fail by their own fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """The users who send the requests of a world.

    Args:
        count: number of users; 0 for requests without a key, each of which is assigned separately,
            retries included.
        skew: exponent of Zipf's law, by which users send requests.
        errors: chance of an error, of either version.
        worse: factor by which an error is more likely on the candidate.
        failing: share of users that make all errors; 0: all users do.
        spread: standard deviation of log latency between users, by what they send.
        times: factor by which the candidate takes longer.
        retried: chance that a failed request is sent once more by its user, and fails once more.
        bunch: number of errors that come together, of one user.
        tails: degrees of freedom of Student's t from which log latency is drawn; 0: normal.
        correlated: correlation of log latency from one request to the next, whichever version
            answers.
        daily: whether errors and latency rise and fall together by day and night.
        between: factor by which the candidate takes longer for requests between the 80th and the
            90th percentile.
        cold: number of first requests to the candidate that take three times as long.
        beta: parameters of the distribution from which the users' success rates are drawn, in an
            A/B test.
        success: the candidate's success rate as a multiple of the stable version's.
        heavy: share of all requests that one additional user sends.
        faulty: share of users whose requests begin to fail, whichever version answers.
        outages: share of looks in which `outage` of all requests fail, instead of `errors`.
    """

    count: int = 0
    skew: float = 0.0
    errors: float = 0.01
    worse: float = 1.0
    failing: float = 0.0
    spread: float = 0.0
    times: float = 1.0
    between: float = 1.0
    retried: float = 0.0
    bunch: int = 1
    tails: int = 0
    correlated: float = 0.0
    daily: bool = False
    cold: int = 0
    beta: tuple[float, float] | None = None
    success: float = 1.0
    heavy: float = 0.0
    faulty: float = 0.0
    outages: float = 0.0
    outage: float = 0.3


class UserTraffic:
    """Requests of `trials` rollouts in one world, by unit and by block of users.

    Latency is compared with thresholds at these `quantiles`, which are those of the guardrails.
    Users are assigned anew at each look, unless they are `sticky`. A look is an epoch.
    """

    def __init__(
        self,
        users: Users,
        requests: int,
        trials: int,
        random: np.random.Generator,
        quantiles: Sequence[float],
        *,
        sticky: bool,
    ) -> None:
        self._users, self._requests, self._random, self._sticky = users, requests, random, sticky
        many = max(users.count, 1)
        weights = np.arange(1, many + 1) ** -users.skew
        weights /= weights.sum()
        if users.heavy:
            many, weights = many + 1, np.append(users.heavy, (1 - users.heavy) * weights)
        self._shares = np.cumsum(weights)
        self._shares[-1] = 1.0
        self._places = random.random((trials, many))
        """Place of each user on the line that the split cuts."""
        self._shift = users.spread * random.standard_normal((trials, many))
        self._fails = random.random((trials, many)) < (users.failing or 1.0)
        self._faulty = random.random((trials, many)) < users.faulty
        good, bad = users.beta or (1.0, 1.0)
        self._success = random.beta(good, bad, (trials, many))
        self._state = random.standard_normal((trials, 1))
        self._answered = np.zeros(trials, dtype=np.int64)
        """Number of requests that the candidate has answered."""
        events = 2 + len(quantiles)
        self.units = np.zeros((events, trials, 2, len(BADNESS_EDGES)))
        """Units of the last look, of either version, by event.

        The events are errors, successes, and latencies over each threshold.
        """
        self._block = random.integers(0, USER_BLOCKS, (trials, many))
        self.blocks = np.zeros((events, 2, trials, 2, USER_BLOCKS + 1))
        """Requests and events of both versions, by event and by block of users.

        Users are counted only if they are sticky.
        """
        user = np.searchsorted(self._shares, random.random((trials, _BEFORE)))
        before = self._latency(np.arange(trials), user)
        self._limits = np.quantile(before, quantiles, axis=1)
        self._between = np.quantile(before, (0.8, 0.9), axis=1)

    def draw(self, active: Ints, shares: Floats, look: int) -> Ints:
        """Draw the counts between two looks: (events, active, 4 counts).

        The counts are the candidate's events and requests, and the stable version's events and
        requests.
        """
        users, random = self._users, self._random
        shape = (len(active), self._requests)
        user = np.searchsorted(self._shares, random.random(shape))
        if not self._sticky:
            self._places[active] = random.random((len(active), len(self._shares)))
        place = (
            np.take_along_axis(self._places[active], user, 1)
            if users.count
            else random.random(shape)
        )
        share = shares[:, None]
        mine = place < share
        # The control replica serves some users of the version that has more traffic: the users with
        # the lowest places.
        compared = np.where(share <= 0.5, place < 2 * share, (place >= share) | (place < 1 - share))
        wave = np.sin(2 * np.pi * look / _DAY) if users.daily else 0.0
        many, bad = self._failures(active, user, mine, 1 + 0.8 * wave, look)
        log = self._latency(active, user)
        low, high = (limit[active][:, None] for limit in self._between)
        log += np.where(mine & (log > low) & (log < high), np.log(users.between), 0.0)
        log += 0.3 * wave + np.where(mine, np.log(users.times / SLACK), 0.0)
        number = self._answered[active][:, None] + np.cumsum(mine, axis=1)
        self._answered[active] = number[:, -1]
        log += np.where(mine & (number <= users.cold), np.log(_COLD), 0.0)
        warm = number > WARM_UP_REQUESTS
        # Only the candidate has warm-up requests. In an epoch with such requests, the server does
        # not compare latencies by unit.
        timed = compared & (
            (warm | ~mine) if self._sticky else (warm | ~mine).all(axis=1, keepdims=True)
        )
        slow = [log > limit[active][:, None] for limit in self._limits]
        rate = np.take_along_axis(self._success[active], user, 1) * np.where(
            mine, users.success, 1.0
        )
        flags = [bad, random.random(shape) < rate, *(one & timed for one in slow)]
        requests = [many, many, *[many * timed] * len(slow)]
        if users.count:
            self._add(active, user, mine, requests, [many * flag for flag in flags])
        # Each request without a key is assigned separately, retries included.
        part = (
            many * mine if users.count else random.binomial(many, np.where(many > 1, share, mine))
        )
        found = []
        for flag, n in zip(flags, requests, strict=True):
            ours, theirs = np.minimum(part, n), np.minimum(many - part, n)
            found.append([(ours * flag).sum(1), ours.sum(1), (theirs * flag).sum(1), theirs.sum(1)])
        counts = np.moveaxis(np.array(found), 1, -1)
        if not users.count:
            self._add_requests(active, counts)
        return counts

    def _failures(
        self, active: Ints, user: Ints, mine: npt.NDArray[np.bool_], busy: float, look: int
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return how many requests each draw stands for, and whether they fail.

        A failed request counts with its retries or its bunch.
        """
        users, random = self._users, self._random
        together = users.bunch / (1 - users.retried)
        chance = np.where(mine, users.errors * users.worse, users.errors) * busy / together
        if users.failing:
            chance = np.where(
                np.take_along_axis(self._fails[active], user, 1), chance / users.failing, 0.0
            )
        if users.outages:
            chance = np.where(random.random((len(active), 1)) < users.outages, users.outage, chance)
        if users.faulty and look >= _FAULT_AT:
            chance = np.where(np.take_along_axis(self._faulty[active], user, 1), 1.0, chance)
        bad = random.random(user.shape) < chance
        again = random.geometric(1 - users.retried, user.shape) if users.retried else users.bunch
        return np.where(bad, again, 1).astype(np.int64), bad

    def _latency(self, active: Ints, user: Ints) -> Floats:
        users, random = self._users, self._random
        noise = (
            random.standard_t(users.tails, user.shape)
            if users.tails
            else random.standard_normal(user.shape)
        )
        if users.correlated:
            rho = users.correlated
            noise, _ = lfilter(
                [np.sqrt(1 - rho**2)], [1, -rho], noise, axis=1, zi=rho * self._state[active]
            )
            self._state[active] = noise[:, -1:]
        return np.asarray(SPREAD * noise + np.take_along_axis(self._shift[active], user, 1))

    def _add(
        self,
        active: Ints,
        user: Ints,
        mine: npt.NDArray[np.bool_],
        requests: Sequence[Ints],
        events: Sequence[Ints],
    ) -> None:
        """Count users as units."""
        side = np.where(mine, 0, 1)
        row = np.arange(len(active))[:, None]
        flat = (row * len(self._shares) + user).ravel()
        units, where = np.unique(flat, return_inverse=True)
        owner, version = np.zeros((2, len(units)), dtype=np.int64)
        owner[where], version[where] = np.broadcast_to(row, user.shape).ravel(), side.ravel()
        bins, unit = len(BADNESS_EDGES), owner * 2 + version
        for kind, (n, e) in enumerate(zip(requests, events, strict=True)):
            total, bad = (np.bincount(where, weights=x.ravel()) for x in (n, e))
            seen = total > 0
            badness = np.searchsorted(BADNESS_EDGES, bad[seen] / total[seen])
            counts = np.bincount(unit[seen] * bins + badness, minlength=len(active) * 2 * bins)
            self.units[kind, active] = counts.reshape(len(active), 2, bins)
            if self._sticky:
                block = np.take_along_axis(self._block[active], user, 1)
                place = ((row * 2 + side) * (USER_BLOCKS + 1) + block).ravel()
                for field, x in enumerate((n, e)):
                    added = np.bincount(
                        place, weights=x.ravel(), minlength=len(active) * 2 * (USER_BLOCKS + 1)
                    )
                    self.blocks[kind, field, active] += added.reshape(len(active), 2, -1)

    def _add_requests(self, active: Ints, counts: Ints) -> None:
        """Count requests without a key as units: (events, active, 4 counts)."""
        bad, requests = counts[..., 0::2], counts[..., 1::2]
        units = np.zeros((*bad.shape, len(BADNESS_EDGES)))
        units[..., 0], units[..., -1] = requests - bad, bad
        self.units[:, active] = units
        for field, x in enumerate((requests, bad)):
            self.blocks[:, field, :, :, -1][:, active] += x
