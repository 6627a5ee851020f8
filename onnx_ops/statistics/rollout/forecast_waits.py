"""How long a healthy candidate waits for each requirement of a step.

A step ends at the first look after its last requirement is met. Waiting times for counts are
quantiles of a Gamma distribution, the law of the n-th event of a Poisson process (see
`forecast_units`). Requirements that count the same requests are drawn with the same quantile, so
that they agree in each simulated rollout. A measured rate is drawn as a Gamma number (Poisson
counts with Jeffreys' prior). Only a service level has no closed form: intervals are drawn, and
judged by `is_rate_certified` with the design effect of the judge. The time of a service level
depends much on properties of the traffic that are not measured. Simulated rollouts therefore differ
in these properties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, gammaincinv, pdtrc

from onnx_ops.domain.rollout_forecast import Cadence, Traffic, WaitKind
from onnx_ops.domain.rollout_observations import USER_BLOCKS
from onnx_ops.domain.rollout_policy import PlannedStep, RolloutPolicy, ShadowTrial
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.evidence import Array
from onnx_ops.statistics.rollout.forecast_units import model_units, wait_for_count

SEED = 20_240_229
ROLLOUTS = 200
"""Number of simulated rollouts."""
LOOKS = 40
"""Maximum number of times at which evidence is evaluated, in a geometric sequence."""
_LEVEL_ROLLOUTS = 96
"""Number of simulated rollouts for a service level."""
_UNKNOWN_SHARE = 0.25
"""Share of simulated rollouts with an uneven rate, and share with bunched errors.

These shares and the ranges below are those of the rollouts of `benchmarks.forecast_truth`.
"""
_UNEVEN = 0.2, 1.0
"""Range of the coefficient of variation of an uneven rate between epochs."""
_BUNCH = 2, 4
"""Range of the number of failed requests of a user that come together."""
_SKEWS = 0.05, 0.35, 0.65, 0.95
"""Exponents of Zipf's law by which users send requests."""
_MAX_INTERVALS = 4000
_MERGED_REQUESTS = 2.0
"""Maximum expected number of the candidate's requests in a merged interval.

Intervals are merged only if `step_timeout` has more than `_MAX_INTERVALS` of them.
"""
_LEVEL_BEYOND = 4.0
"""Multiple of the shortest time up to which a service level is searched for.

At least `_MAX_INTERVALS` are searched, if the step does not pause before.
"""
INTERVAL_S = 60.0
"""Time between two recorded readings of a metrics source, in seconds."""
WARM_UP_REQUESTS = 64
"""Number of first requests to a candidate whose latencies servers discard.

A server with more than four workers discards more. The forecast does not consider this.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedWait:
    """A requirement of a step, and its time in each simulated rollout.

    `needed` and `per_s` are as in `StepWait`.
    """

    kind: WaitKind
    needed: float
    times: Array
    per_s: float = 0.0


class WaitSimulation:
    """The waits of simulated rollouts of one policy, with one traffic."""

    def __init__(self, policy: RolloutPolicy, traffic: Traffic, cadence: Cadence) -> None:
        self.policy, self.traffic, self.cadence = policy, traffic, cadence
        self.steps = policy.planned()[:-1]
        order = np.random.default_rng(SEED)
        strata = (np.arange(ROLLOUTS) + 0.5) / ROLLOUTS
        self._chances = [order.permutation(strata) for _ in self.steps]
        self.offsets = [order.permutation(strata) for _ in self.steps]
        """Part of an epoch from the beginning of each step to the first whole epoch."""
        self._delays = [cadence.look_s * order.permutation(strata) for _ in self.steps]
        self.rates = np.ones(ROLLOUTS)
        if traffic.counted:
            shape = traffic.counted + 0.5
            self.rates = order.permutation(gammaincinv(shape, strata)) / shape
        self.epoch = model_units(traffic.rate * policy.epoch, traffic.users)
        self._certified: dict[tuple[int, float], Array] = {}

    def find_limit(self, step: PlannedStep) -> float:
        """Return the time after which a step pauses; infinite without such a limit.

        Cold starts and A/B tests have no limit. The forecast does not compute the time of a cold
        start, and an A/B test ends with its duration.
        """
        return math.inf if step.kind in ("cold", "ab_test") else self.policy.step_timeout

    def find_ends(self, index: int, waits: Sequence[SimulatedWait]) -> Array:
        """Return when a step ends in each rollout: at the first look after its last wait."""
        if not waits:
            return np.zeros(ROLLOUTS)
        return np.asarray(np.max([each.times for each in waits], axis=0) + self.find_delay(index))

    def find_delay(self, index: int) -> Array:
        """Return the time from a count until the next look, in each rollout."""
        return self._delays[index]

    def begin_after(self, index: int, ends: Array) -> None:
        """Set where in an epoch the next step begins, from the ends of a step.

        The offsets change only if the step ends in every rollout.
        """
        if index + 1 < len(self.steps) and np.isfinite(ends).all():
            begun = 1 - self.offsets[index] + ends / self.policy.epoch
            self.offsets[index + 1] = 1 - np.mod(begun, 1.0)

    def list_waits(self, index: int, errors: float) -> Iterator[SimulatedWait]:
        """Yield the requirements of a step.

        Args:
            errors: share of the candidate's requests that fail.
        """
        step, policy = self.steps[index], self.policy
        if step.kind == "cold":
            return
        if step.kind == "shadow" and policy.shadow is not None:
            yield self._wait_for_copies(index, policy.shadow)
        elif step.kind == "ab_test" and policy.ab_test is not None:
            # A test of equal versions rarely finds a difference, so the forecast uses its full
            # duration.
            duration = policy.ab_test.duration
            yield SimulatedWait("duration", duration, np.full(ROLLOUTS, duration))
            yield from self.wait_for_users(step)
        else:
            yield from self._wait_for_traffic(index)
            if policy.slo is not None:
                key = (step.percent, errors)
                if key not in self._certified:
                    self._certified[key] = self._certify(step, errors, policy.slo.error_rate)
                times = self._certified[key]
                yield SimulatedWait(
                    "service level", ev.compute_clean_requests(policy.slo.error_rate), times
                )
        if policy.min_step_duration:
            duration = policy.min_step_duration
            yield SimulatedWait("min_step_duration", duration, np.full(ROLLOUTS, duration))

    def _wait_for_copies(self, index: int, trial: ShadowTrial) -> SimulatedWait:
        step = self.steps[index]
        needed = max(trial.min_requests, ev.compute_clean_requests(trial.max_differing))
        rate = self.traffic.rate * step.mirror_percent / 100
        times = wait_for_count(needed, rate, 1.0, self._chances[index]) / self.rates
        return SimulatedWait("copies", needed, times, rate)

    def wait_for_users(self, step: PlannedStep) -> Iterator[SimulatedWait]:
        """Yield an infinite wait if a version of an A/B test gets too few users.

        The test then stays undecided: users stay with a version, so that their number does not
        grow.
        """
        model = self.epoch
        if model.has_users and self.cadence.source == "units":
            smaller = min(step.percent, 100 - step.percent) / 100
            weights = model.members * model.activity**2
            users = smaller * model.requests**2 / weights.sum()
            effective = 1 / (1 / users + 1 / USER_BLOCKS)
            if effective < self.policy.min_units:
                yield SimulatedWait(
                    "users", self.policy.min_units, np.full(ROLLOUTS, np.inf), effective
                )

    def _wait_for_traffic(self, index: int) -> Iterator[SimulatedWait]:
        """Yield the waits of a canary step for requests, units and intervals."""
        step, chances = self.steps[index], self._chances[index]
        share, rate = step.percent / 100, self.traffic.rate * step.percent / 100
        is_drawn = self.cadence.source == "units"
        clumps = self.epoch.measure_clumps(share) if is_drawn else 1.0
        times = wait_for_count(step.minimum, rate, clumps, chances) / self.rates
        yield SimulatedWait("requests", step.minimum, times, rate)
        if self.cadence.source == "percentiles" and self.policy.has_latency:
            yield self._wait_for_percentiles(rate, chances)
        elif self.policy.has_latency:
            timed = rate * self._find_compared(share)
            warm = WARM_UP_REQUESTS if is_drawn and self._is_first(index) else 0
            needed = step.minimum + warm
            times = wait_for_count(needed, timed, clumps, chances) / self.rates
            yield SimulatedWait("timed requests", needed, times, timed)
            if 0 < sum(self.traffic.latencies) < guardrails.FEWEST_REQUESTS:
                never = np.full(ROLLOUTS, np.inf)
                yield SimulatedWait("thresholds", guardrails.FEWEST_REQUESTS, never)
        if is_drawn:
            yield self._wait_for_units(index)
        elif self.policy.guardrails:
            # The first reading does not end an interval: it only marks where the first interval
            # begins. The last interval ends when the step is analyzed, and can be shorter than
            # `INTERVAL_S`.
            begun = self.cadence.look_s * self.offsets[index] + self.cadence.lag_s
            times = begun + (design_effect.MIN_INTERVALS - 1) * INTERVAL_S
            yield SimulatedWait("intervals", design_effect.MIN_INTERVALS, times, 1 / INTERVAL_S)

    def _wait_for_percentiles(self, rate: float, chances: Array) -> SimulatedWait:
        """Return the wait for intervals with enough requests to compare their percentiles."""

        fewest = max(
            (guardrails.MIN_SIGN_REQUESTS.get(rail.name, 0) for rail in self.policy.guardrails),
            default=0,
        )
        chance = float(pdtrc(fewest - 1, rate * INTERVAL_S))
        needed = guardrails.MIN_SIGN_INTERVALS
        per_s = chance / INTERVAL_S
        times = np.full(ROLLOUTS, np.inf)
        if chance > 1e-9:
            times = wait_for_count(needed, per_s, max(0.02, 1 - chance), chances)
            times = np.maximum(times, needed * INTERVAL_S)
        return SimulatedWait("comparisons", needed, times, per_s)

    def _wait_for_units(self, index: int) -> SimulatedWait:
        """Return the wait for units, which are counted at the ends of whole epochs."""
        step, needed, epoch_s = self.steps[index], self.policy.min_units, self.policy.epoch
        share = step.percent / 100
        compared = self._find_compared(share) if self.policy.has_latency else 1.0
        per_epoch = self.epoch.units * share * compared
        spread = self.epoch.measure_unit_spread(share * compared)
        epochs = wait_for_count(needed, per_epoch, spread, self._chances[index]) / self.rates
        if self.policy.has_latency:
            epochs = epochs + self.count_warm_epochs(index)
        whole = np.maximum(1.0, np.ceil(epochs - 1e-9))
        times = (self.offsets[index] + whole) * epoch_s + self.cadence.lag_s
        return SimulatedWait("units", needed, times, per_epoch / epoch_s)

    def count_warm_epochs(self, index: int) -> int:
        """Return the number of whole epochs whose latencies servers discard.

        Half an epoch, the average part before the first whole epoch, is not counted.
        """
        if not self._is_first(index) or self.cadence.source != "units":
            return 0
        per_epoch = self.epoch.requests * self.steps[index].percent / 100
        return math.ceil(max(0.0, WARM_UP_REQUESTS / per_epoch - 0.5))

    def _is_first(self, index: int) -> bool:
        """Return whether a step is the first one in which the candidate gets traffic."""
        return not any(step.percent for step in self.steps[:index])

    def _find_compared(self, share: float) -> float:
        """Return the share of the candidate's requests whose latency is compared."""
        return min(1.0, (1 - share) / share) if self.cadence.source == "units" else 1.0

    def _certify(self, step: PlannedStep, errors: float, level: float) -> Array:
        """Return when a service level is shown in each rollout; infinite where it is not."""
        times = np.full(ROLLOUTS, np.inf)
        share = step.percent / 100
        per_interval = self.traffic.rate * INTERVAL_S * share
        clean = ev.compute_clean_requests(level)
        first = max(clean * design_effect.OUTAGE_SHARE, clean / per_interval)
        last = self.policy.step_timeout / INTERVAL_S
        if errors >= level or first > last:
            return times
        # `OUTAGE_SHARE` does not limit the test of intervals with so few requests, so they can be
        # merged.
        merged = max(1.0, min(_MERGED_REQUESTS / per_interval, last / _MAX_INTERVALS))
        horizon = min(last, max(_MAX_INTERVALS, _LEVEL_BEYOND * first))
        count, mean = math.ceil(horizon / merged), per_interval * merged
        random = np.random.default_rng(SEED)
        unknown = self._draw_unknown(random, merged)
        shape = (_LEVEL_ROLLOUTS, count)
        busy = unknown.rate * _draw_factors(random, unknown.uneven**2, shape)
        clumped = busy
        if self.cadence.source == "units" and self.epoch.has_users:
            clumped = busy * _draw_factors(random, (1 - share) * unknown.clumps / mean, shape)
        mine = random.poisson(mean * clumped)
        theirs = random.poisson(mean * (1 - share) / share * busy)
        is_healthy = errors == self.traffic.errors
        chance = unknown.errors if is_healthy else np.full_like(unknown.errors, errors)
        bad = _draw_bunches(random, mine, chance, unknown.bunch)
        others = _draw_bunches(random, theirs, unknown.errors, unknown.bunch)
        rows = np.stack([bad, mine, others, theirs], axis=-1)
        shown, before = np.full(_LEVEL_ROLLOUTS, np.inf), 0
        for looked in space_looks(math.ceil(first / merged), count):
            part = rows[:, :looked]
            effects = design_effect.estimate_error_effect(part)
            is_shown = ev.is_rate_certified(
                part[..., 0].sum(axis=1), part[..., 1].sum(axis=1), level, effects
            )
            # The rule was met between the previous look and this look. The geometric mean of the
            # times of both looks estimates this moment.
            intervals = math.sqrt(looked * (before or looked)) * merged
            shown = np.where(is_shown & np.isinf(shown), intervals * INTERVAL_S, shown)
            before = looked
        places = np.random.default_rng(SEED).permutation(np.arange(ROLLOUTS) % _LEVEL_ROLLOUTS)
        return np.asarray(np.sort(shown)[places])

    def _draw_unknown(self, random: np.random.Generator, minutes: float) -> _UnknownTraffic:
        """Draw unknown properties of the traffic, for intervals of this many minutes."""
        column = _LEVEL_ROLLOUTS, 1
        strata = (np.arange(_LEVEL_ROLLOUTS) + 0.5) / _LEVEL_ROLLOUTS

        def draw(values: Array) -> Array:
            return random.permutation(values).reshape(column)

        rate, errors = np.ones(column), np.full(column, self.traffic.errors)
        if self.traffic.counted:
            shape = self.traffic.counted + 0.5
            bad = self.traffic.errors * self.traffic.counted
            rate = draw(np.asarray(gammaincinv(shape, strata) / shape, dtype=np.float64))
            errors = draw(betaincinv(bad + 0.5, self.traffic.counted - bad + 0.5, strata))
        kinds = draw(strata)
        is_uneven, is_bunched = kinds < _UNKNOWN_SHARE, kinds > 1 - _UNKNOWN_SHARE
        averaged = min(1.0, self.policy.epoch / (INTERVAL_S * minutes))
        uneven = math.sqrt(averaged) * random.uniform(*_UNEVEN, column)
        squares = np.zeros(len(_SKEWS))
        if self.traffic.users:
            models = [model_units(1.0, self.traffic.users, skew) for skew in _SKEWS]
            squares = np.array([(each.members * each.activity**2).sum() for each in models])
        return _UnknownTraffic(
            rate=rate,
            errors=errors,
            uneven=np.where(is_uneven, uneven, 0.0),
            bunch=np.where(is_bunched, random.integers(_BUNCH[0], _BUNCH[1] + 1, column), 1),
            clumps=self.epoch.requests * draw(np.resize(squares, _LEVEL_ROLLOUTS)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _UnknownTraffic:
    """Unknown properties of the traffic in each simulated rollout.

    All arrays have the shape (rollouts, 1). `rate` is a factor on the measured rate, and `errors`
    is the share of failed requests. `uneven` is the coefficient of variation of the rate. `bunch`
    is the number of failed requests that come together. `clumps` is the index of dispersion of a
    version's requests in an epoch less one, for a version with hardly any traffic.
    """

    rate: Array
    errors: Array
    uneven: Array
    bunch: Array
    clumps: Array


def _draw_factors(
    random: np.random.Generator, variance: Array, shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """Return Gamma numbers with mean 1 and a variance for each rollout."""
    variance = np.maximum(variance, 1e-9)
    return np.asarray(random.gamma(1 / variance, variance, shape))


def _draw_bunches(
    random: np.random.Generator, requests: npt.NDArray[np.int64], chances: Array, bunch: Array
) -> npt.NDArray[np.int64]:
    """Return numbers of failed requests, which come in bunches."""
    single = random.binomial(requests, chances)
    together = bunch * random.poisson(requests * chances / bunch)
    return np.asarray(np.where(bunch == 1, single, np.minimum(requests, together)))


def space_looks(first: int, last: int, count: int = LOOKS) -> npt.NDArray[np.int64]:
    """Return at most `count` whole numbers from `first` to `last`, about geometric."""
    return np.unique(np.round(np.geomspace(max(1, first), max(first, last), count)).astype(int))


def find_quantile(times: Array, share: float) -> float | None:
    """Return a quantile of times in seconds; None if it is infinite."""
    time_s = float(np.quantile(times, share, method="inverted_cdf"))
    return time_s if math.isfinite(time_s) else None
