"""Traffic of users: who sends more than others, fails more often or sends larger inputs, retries, and sticks to a
version. Both versions are alike unless a world says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from onnx_ops.serving.metrics import WARM_UP_REQUESTS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLACK = 2 ** (2 / 16)
"""How much higher the candidate's thresholds lie: 10 %, at the nearest bound of the server's histogram."""
SPREAD = 0.5
"""Standard deviation of log latency."""
_BEFORE = 4000
"""Requests before the rollout that the thresholds are read off."""
_COLD = 3.0
"""How many times longer the first requests to a cold candidate take."""
_DAY = 24
"""Looks from one night to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Who sends the requests of a world.

    Args:
        count: of users; 0 for requests without a key, of which each is assigned on its own, retries too.
        skew: exponent of Zipf's law of who sends how much.
        errors: chance of one, of either version.
        worse: how many times more likely it is on the candidate.
        failing: share of users that make all errors; 0: everybody does.
        spread: standard deviation of log latency between users, by what they send.
        times: how many times longer the candidate takes.
        retried: chance that a failed request is sent once more by its user, and fails once more.
        bunch: errors that come together, of one user.
        tails: degrees of freedom of Student's t that log latency is drawn from; 0: normal.
        correlated: correlation of log latency from one request to the next, whichever version answers.
        daily: whether errors and latency rise and fall together by day and night.
        between: how many times longer the candidate takes for what lies between the 80th and the 90th percentile.
        cold: first requests to the candidate that take three times as long.
        beta: of which the users' own success rates are drawn, in an A/B test.
        success: the candidate's success rate as a multiple of the stable version's.
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


class UserTraffic:
    """Requests of `trials` rollouts in one world, and the sums over their users. Latency is held against thresholds at
    these `quantiles`, those of the guardrails."""

    def __init__(
        self, users: Users, requests: int, trials: int, random: np.random.Generator, quantiles: Sequence[float]
    ) -> None:
        self._users, self._requests, self._random = users, requests, random
        many = max(users.count, 1)
        weights = np.arange(1, many + 1) ** -users.skew
        self._shares = np.cumsum(weights / weights.sum())
        self._shares[-1] = 1.0
        self._places = random.random((trials, many))
        """Of each user on the line that the split cuts."""
        self._shift = users.spread * random.standard_normal((trials, many))
        self._fails = random.random((trials, many)) < (users.failing or 1.0)
        good, bad = users.beta or (1.0, 1.0)
        self._success = random.beta(good, bad, (trials, many))
        self._state = random.standard_normal((trials, 1))
        self._answered = np.zeros(trials, dtype=np.int64)
        """Requests, by the candidate."""
        self._n = np.zeros((2, trials * 2 * many), dtype=np.int64)
        self._events = 2 + len(quantiles)
        self._e = np.zeros((self._events, trials * 2 * many), dtype=np.int32)
        self.sums = np.zeros((self._events, trials, 5))
        """By event (errors, successes, over each threshold): the fields of `UnitSums`."""
        user = np.searchsorted(self._shares, random.random((trials, _BEFORE)))
        before = self._latency(np.arange(trials), user)
        self._limits = np.quantile(before, quantiles, axis=1)
        self._between = np.quantile(before, (0.8, 0.9), axis=1)

    def draw(self, active: Ints, shares: Floats, look: int) -> Ints:
        """Counts between two looks: (events, active, 4 counts), each the candidate's events and requests, the stable
        version's events and requests."""
        users, random = self._users, self._random
        shape = (len(active), self._requests)
        user = np.searchsorted(self._shares, random.random(shape))
        place = np.take_along_axis(self._places[active], user, 1) if users.count else random.random(shape)
        mine = place < shares[:, None]
        wave = np.sin(2 * np.pi * look / _DAY) if users.daily else 0.0
        many, bad = self._failures(active, user, mine, 1 + 0.8 * wave)
        log = self._latency(active, user)
        low, high = (limit[active][:, None] for limit in self._between)
        log += np.where(mine & (log > low) & (log < high), np.log(users.between), 0.0)
        log += 0.3 * wave + np.where(mine, np.log(users.times / SLACK), 0.0)
        number = self._answered[active][:, None] + np.cumsum(mine, axis=1)
        self._answered[active] = number[:, -1]
        log += np.where(mine & (number <= users.cold), np.log(_COLD), 0.0)
        timed = ~mine | (number > WARM_UP_REQUESTS)
        slow = [log > limit[active][:, None] for limit in self._limits]
        rate = np.take_along_axis(self._success[active], user, 1) * np.where(mine, users.success, 1.0)
        flags = [bad, random.random(shape) < rate, *(one & timed for one in slow)]
        requests = [many, many, *[many * timed] * len(slow)]
        self._add(active, user, mine, (many, many * timed), [many * flag for flag in flags])
        part = many * mine if users.count else random.binomial(many, np.where(many > 1, shares[:, None], mine))
        found = []
        for flag, n in zip(flags, requests, strict=True):
            ours, theirs = np.minimum(part, n), np.minimum(many - part, n)
            found.append([(ours * flag).sum(1), ours.sum(1), (theirs * flag).sum(1), theirs.sum(1)])
        return np.moveaxis(np.array(found), 1, -1)

    def _failures(
        self, active: Ints, user: Ints, mine: npt.NDArray[np.bool_], busy: float
    ) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """How many requests each one is, with its retries or its bunch, and whether they fail."""
        users, random = self._users, self._random
        together = users.bunch / (1 - users.retried)
        chance = np.where(mine, users.errors * users.worse, users.errors) * busy / together
        if users.failing:
            chance = np.where(np.take_along_axis(self._fails[active], user, 1), chance / users.failing, 0.0)
        bad = random.random(user.shape) < chance
        again = random.geometric(1 - users.retried, user.shape) if users.retried else users.bunch
        return np.where(bad, again, 1).astype(np.int64), bad

    def _latency(self, active: Ints, user: Ints) -> Floats:
        users, random = self._users, self._random
        noise = random.standard_t(users.tails, user.shape) if users.tails else random.standard_normal(user.shape)
        if users.correlated:
            rho = users.correlated
            noise, _ = lfilter([np.sqrt(1 - rho**2)], [1, -rho], noise, axis=1, zi=rho * self._state[active])
            self._state[active] = noise[:, -1:]
        return np.asarray(SPREAD * noise + np.take_along_axis(self._shift[active], user, 1))

    def _add(
        self,
        active: Ints,
        user: Ints,
        mine: npt.NDArray[np.bool_],
        requests: tuple[Ints, Ints],
        events: list[Ints],
    ) -> None:
        trials = np.broadcast_to(np.arange(len(active))[:, None], user.shape).ravel()
        if not self._users.count:
            for kind, e in enumerate(events):
                n = requests[kind > 1]
                added = np.stack([x.sum(1) for x in (n, e, n, e, e)], axis=-1)
                self.sums[kind, active] += added
            return
        flat = ((active[:, None] * 2 + mine) * len(self._shares) + user).ravel()
        touched, where = np.unique(flat, return_inverse=True)
        owner = np.zeros(len(touched), dtype=np.int64)
        owner[where] = trials
        more_n = [np.bincount(where, weights=n.ravel()) for n in requests]
        for kind, e in enumerate(events):
            group = int(kind > 1)
            n0, e0 = self._n[group, touched], self._e[kind, touched]
            dn, de = more_n[group], np.bincount(where, weights=e.ravel())
            grown = (dn, de, dn * (2 * n0 + dn), de * (2 * e0 + de), dn * e0 + de * n0 + dn * de)
            for field, values in enumerate(grown):
                self.sums[kind, active, field] += np.bincount(owner, weights=values, minlength=len(active))
            self._e[kind, touched] += de.astype(np.int32)
        for group in (0, 1):
            self._n[group, touched] += more_n[group].astype(np.int64)
