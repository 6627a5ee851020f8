"""How long it takes until a rollout finds a given harm.

This time has no closed form. It is simulated (Monte Carlo). Units of both versions are drawn on a
grid of epochs. They are judged by the functions of the judge, with its limits:

- `sum_log_factors` for units
- `compute_log_likelihood` with the dispersion of intervals for sources without units
- `compute_evidence_above` for copies
- `compute_split_evidence` for an A/B test

A step can end before it finds the harm. The next step then continues with the evidence of units.
The generator has a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.rollout_forecast import Harm, HarmForecast, Traffic
from onnx_ops.domain.rollout_policy import (
    LATENCY_PLACES,
    LATENCY_QUANTILES,
    Guardrail,
    PlannedStep,
    RolloutPolicy,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.statistics.rollout import design_effect, guardrails, unit_evidence
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.evidence import Array
from onnx_ops.statistics.rollout.forecast_waits import (
    INTERVAL_S,
    ROLLOUTS,
    SEED,
    WaitSimulation,
    find_quantile,
    space_looks,
)
from onnx_ops.statistics.rollout.judge import compute_firing_limit

Flags: TypeAlias = npt.NDArray[np.bool_]

_BEYOND = 30.0
"""Multiple of a step's duration up to which the harm is searched for."""
_SAME_S = 1e-3
"""Difference below which two times are those of one look."""
_FEW = 40
"""Number of simulated rollouts if evidence takes long to compute.

Only the evidence of units is computed fast.
"""
_MAX_EVENTS = 1000
"""Events of an interval above which its counts are scaled down.

Fewer observations with the same rates are less evidence, and this number suffices for a decision.
"""
_PLACES = 4
"""Maximum number of simulated places of a guardrail; the harm changes these most."""
SPREAD = 0.5
"""Standard deviation of log latency that is assumed without a usable histogram.

A histogram is usable from `guardrails.FEWEST_REQUESTS` requests.
"""


@dataclass(slots=True, eq=False)
class _Search:
    """The search for a harm over the steps of simulated rollouts.

    `is_open` is False for rollouts that have found the harm or have paused. `begun_s` is when the
    present step of a rollout began, and `found_s` when the harm was found. `wealth` is the log
    wealth of the gamblers (see `unit_evidence`) at each place, before the present step.
    """

    is_open: Flags
    begun_s: Array
    found_s: Array
    wealth: dict[str, Array] = field(default_factory=dict)


class HarmSearch:
    """The search for harms in simulated rollouts, whose steps wait as in `waits`."""

    def __init__(self, waits: WaitSimulation) -> None:
        self._waits, self._policy, self._traffic = waits, waits.policy, waits.traffic
        self._steps, self._epoch, self._rates = waits.steps, waits.epoch, waits.rates
        self._cadence, self._limit = waits.cadence, compute_firing_limit(waits.policy)
        self._places = _find_places(waits.policy, waits.traffic)
        self._badness: dict[float, Array] = {}

    def find_harm(self, harm: Harm) -> tuple[Mapping[int, HarmForecast], HarmForecast]:
        """Return when a harm is found in each step that can find it, and in the rollout."""
        never = np.full(ROLLOUTS, np.inf)
        search = _Search(np.ones(ROLLOUTS, dtype=bool), np.zeros(ROLLOUTS), never)
        by_step: dict[int, HarmForecast] = {}
        errors = harm.value if harm.name == "errors" else self._traffic.errors
        for index, step in enumerate(self._steps):
            if search.is_open.sum() < ROLLOUTS // 20:
                break
            waits = list(self._waits.list_waits(index, errors))
            ends, open_before = self._waits.find_ends(index, waits), search.is_open.copy()
            found = self._search_step(index, harm, ends, search)
            # The look that finds the harm does not advance the step.
            limits = np.minimum(ends + _SAME_S, self._waits.find_limit(step))
            is_found = open_before & (found <= limits)
            search.found_s = np.where(is_found, search.begun_s + found, search.found_s)
            passes = open_before & ~is_found & (ends <= self._waits.find_limit(step))
            if np.isfinite(found).any():
                by_step[index] = self._describe_harm(
                    harm, found[open_before], passes.sum() / open_before.sum(), step
                )
            search.begun_s = search.begun_s + np.where(np.isfinite(ends), ends, 0.0)
            search.is_open = passes
        whole = self._describe_harm(harm, search.found_s, float(search.is_open.mean()), None)
        return by_step, whole

    def _describe_harm(
        self, harm: Harm, found: Array, undetected: float, step: PlannedStep | None
    ) -> HarmForecast:
        median, most = (find_quantile(found, share) for share in (0.5, 0.95))
        requests = None
        if step is not None and most is not None:
            percent = step.percent or step.mirror_percent
            requests = math.ceil(most * self._traffic.rate * percent / 100)
        return HarmForecast(
            harm=harm,
            median_s=median,
            most_s=most,
            undetected=float(undetected),
            needed_requests=requests,
        )

    def _search_step(self, index: int, harm: Harm, ends: Array, search: _Search) -> Array:
        """Return when a step finds the harm in each rollout, whether it has ended or not."""
        step, policy = self._steps[index], self._policy
        if harm.name == "shadow" and step.kind == "shadow" and policy.shadow is not None:
            return self._search_copies(step, policy.shadow, harm, ends)
        if harm.name == "feedback" and step.kind == "ab_test" and policy.ab_test is not None:
            return self._search_feedback(step, policy.ab_test, harm)
        rails = self._list_rails(harm) if step.kind == "canary" else []
        if not rails:
            return np.full(ROLLOUTS, np.inf)
        if self._cadence.source == "units":
            return self._search_units(index, rails, harm, ends, search)
        return self._search_intervals(index, rails, harm, ends)

    def _list_rails(self, harm: Harm) -> list[Guardrail]:
        """Return the guardrails that compare what the harm changes.

        The time to find a slower candidate is forecast only for sources that count slow requests.
        """
        rails = [rail for rail in self._policy.guardrails if rail.name != "cold_start"]
        if self._cadence.source == "percentiles":
            rails = [rail for rail in rails if rail.name == "errors"]
        if harm.name == "latency":
            return [rail for rail in rails if rail.name != "errors"]
        return [rail for rail in rails if rail.name == harm.name]

    def _search_units(
        self, index: int, rails: Sequence[Guardrail], harm: Harm, ends: Array, search: _Search
    ) -> Array:
        epoch_s = self._policy.epoch
        offsets = self._waits.offsets[index] * epoch_s + self._cadence.lag_s
        closed = np.floor((ends - offsets) / epoch_s)
        grid = _make_grid(closed)
        random = np.random.default_rng([SEED, index])
        last = np.maximum(0, np.searchsorted(grid, closed, side="right") - 1)
        is_after = closed >= grid[0]
        fired = np.zeros((ROLLOUTS, len(grid)), dtype=bool)
        for rail in rails:
            chosen = self._choose_places(rail, harm)
            evidences = []
            for place in chosen:
                logs = self._gamble(index, place, harm, rail.tolerated(place), grid, random)
                past = search.wealth.setdefault(place, np.zeros((ROLLOUTS, logs.shape[-1])))
                logs += past[:, None, :]
                evidences.append(ev.log_mean_exp(logs) / math.log(10))
                at_end = logs[np.arange(ROLLOUTS), last]
                search.wealth[place] = np.where(is_after[:, None], at_end, past)
            shares = math.log10(len(chosen) / len(rail.places))
            evidence = ev.average_evidence(np.stack(evidences, axis=-1)) + shares
            fired |= evidence >= self._limit
        times = (offsets + self._waits.find_delay(index))[:, None] + grid * epoch_s
        return _find_first(fired, times)

    def _choose_places(self, rail: Guardrail, harm: Harm) -> Sequence[str]:
        """Return the places of a guardrail to simulate: those that the harm changes most."""

        def measure(place: str) -> float:
            stable, candidate = self._find_chances(place, harm)
            return abs(_log_odds(candidate) - _log_odds(stable)) * math.sqrt(
                stable * (1 - stable) + 1e-12
            )

        return sorted(rail.places, key=measure, reverse=True)[:_PLACES]

    def _find_chances(self, place: str, harm: Harm) -> tuple[float, float]:
        """Return the chances of an event for the stable version and for the candidate."""
        if place == "errors":
            return self._traffic.errors, harm.value
        return self._places[place].compute_chances(harm.value)

    def _gamble(
        self,
        index: int,
        place: str,
        harm: Harm,
        tolerated: float,
        grid: npt.NDArray[np.int64],
        random: np.random.Generator,
    ) -> Array:
        """Draw units up to each epoch of the grid; return the log wealth of the gamblers.

        The shape is (rollouts, grid, gamblers).
        """
        percent = self._steps[index].percent
        share, compared, warm = percent / 100, 1.0, 0
        if place != "errors":
            compared, warm = 2 * min(share, 1 - share), self._waits.count_warm_epochs(index)
            share = 0.5
        counted = np.maximum(0, grid - warm)
        epochs = np.diff(counted, prepend=0) * self._rates[:, None]
        units = self._epoch.draw_units(epochs, random)
        if compared < 1:
            units = np.asarray(random.binomial(units, compared), dtype=np.int64)
        mine = np.asarray(random.binomial(units, share), dtype=np.int64)
        chances = self._find_chances(place, harm)
        counts = np.stack(
            [
                _draw_bins(number, self._bin_badness(chance), random)
                for number, chance in ((mine, chances[1]), (units - mine, chances[0]))
            ],
            axis=2,
        ).cumsum(axis=1)
        flat = counts.reshape(-1, *counts.shape[2:])
        logs = unit_evidence.sum_log_factors(flat, place, np.full(len(flat), percent), tolerated)
        return logs.reshape(*counts.shape[:2], -1)

    def _bin_badness(self, chance: float) -> Array:
        if chance not in self._badness:
            self._badness[chance] = self._epoch.bin_badness(chance)
        return self._badness[chance]

    def _search_intervals(
        self, index: int, rails: Sequence[Guardrail], harm: Harm, ends: Array
    ) -> Array:
        """Search with the evidence of a source that counts no units, in each step alone."""
        begun = self._cadence.look_s * self._waits.offsets[index] + self._cadence.lag_s
        grid = _make_grid(np.floor((ends - begun) / INTERVAL_S))
        share, random = self._steps[index].percent / 100, np.random.default_rng([SEED, index])
        per_interval = self._rates[:_FEW, None] * self._traffic.rate * INTERVAL_S
        means = np.diff(grid, prepend=0) * per_interval
        fired = np.zeros(means.shape, dtype=bool)
        for rail in rails:
            chosen, evidences = self._choose_places(rail, harm), []
            for place in chosen:
                stable, candidate = self._find_chances(place, harm)
                events = means * (share * candidate + (1 - share) * stable)
                scale = np.minimum(1.0, _MAX_EVENTS / np.maximum(events, 1e-9))
                mine = random.poisson(means * share * scale)
                theirs = random.poisson(means * (1 - share) * scale)
                bad, others = random.binomial(mine, candidate), random.binomial(theirs, stable)
                rows = np.stack([bad, mine, others, theirs], axis=-1)
                alternatives = ev.make_alternatives(rail.tolerated(place))
                logs = ev.compute_log_likelihood(rows, alternatives).cumsum(axis=1)
                effects = np.stack(
                    [
                        design_effect.estimate_dispersion(rows[:, : looked + 1])
                        for looked in range(len(grid))
                    ],
                    axis=1,
                )
                evidences.append(ev.compute_log10_evidence(logs / effects[..., None]))
            shares = math.log10(len(chosen) / len(rail.places))
            fired |= ev.average_evidence(np.stack(evidences, axis=-1)) + shares >= self._limit
        times = (begun + self._waits.find_delay(index))[:, None] + grid * INTERVAL_S
        return _find_first(np.resize(fired, times.shape), times)

    def _search_copies(
        self, step: PlannedStep, trial: ShadowTrial, harm: Harm, ends: Array
    ) -> Array:
        rate = self._traffic.rate * step.mirror_percent / 100
        most = int(_BEYOND * max(trial.min_requests, float(np.median(ends)) * rate)) + _FEW
        grid = space_looks(1, most)
        random = np.random.default_rng(SEED)
        wrong = random.binomial(np.diff(grid, prepend=0), harm.value, (_FEW, len(grid)))
        evidence = np.array(
            [
                [
                    ev.compute_evidence_above(int(bad), int(seen), trial.max_differing)
                    for bad, seen in zip(row, grid, strict=True)
                ]
                for row in wrong.cumsum(axis=1)
            ]
        )
        times = grid / rate + self._cadence.look_s / 2
        found = _find_first(evidence >= self._limit, np.broadcast_to(times, evidence.shape))
        return np.asarray(np.resize(found, ROLLOUTS) / self._rates)

    def _search_feedback(self, step: PlannedStep, test: SplitTest, harm: Harm) -> Array:
        """Search for another success rate in an A/B test of equally successful users."""
        traffic = self._traffic
        if not traffic.feedback * traffic.success or any(self._waits.wait_for_users(step)):
            return np.full(ROLLOUTS, np.inf)
        share, random = step.percent / 100, np.random.default_rng(SEED)
        grid, rates = np.geomspace(test.duration / 1e3, test.duration), self._rates[:_FEW]
        means = np.diff(grid, prepend=0) * traffic.rate * traffic.feedback * rates[:, None]
        means = np.minimum(means, _MAX_EVENTS / traffic.success)
        mine, theirs = random.poisson(means * share), random.poisson(means * (1 - share))
        good = random.binomial(mine, min(1.0, traffic.success * harm.value))
        rows = np.stack([good, mine, random.binomial(theirs, traffic.success), theirs], axis=-1)
        above = ev.compute_log_likelihood(rows, ev.make_alternatives(1.0, ev.FINE_GRID))
        below = ev.compute_log_likelihood(rows, 1 / ev.FINE_GRID)
        evidences = ev.compute_split_evidence(above.cumsum(axis=1), below.cumsum(axis=1))
        fired = np.maximum(*evidences) >= ev.compute_evidence_limit(2)
        return np.resize(_find_first(fired, np.broadcast_to(grid, fired.shape)), ROLLOUTS)


@dataclass(frozen=True, slots=True, eq=False)
class _LatencyPlace:
    """A place of the latency distribution.

    `tail` has the log odds that a request of the stable version exceeds each of `logs_s`, log
    seconds, which ascend. `stable_s` and `candidate_s` are the thresholds.
    """

    logs_s: Array
    tail: Array
    stable_s: float
    candidate_s: float

    def compute_chances(self, slower: float) -> tuple[float, float]:
        """Return the share of slow requests of the stable version, and of a slower one."""
        stable, candidate = (
            1 / (1 + math.exp(-float(np.interp(math.log(limit_s), self.logs_s, self.tail))))
            for limit_s in (self.stable_s, self.candidate_s / slower)
        )
        return stable, candidate


def _find_places(policy: RolloutPolicy, traffic: Traffic) -> Mapping[str, _LatencyPlace]:
    """Return the places of latency guardrails, by histogram or log-normal law."""
    bounds_s, counts = traffic.bounds_s, traffic.latencies
    increases = policy.max_latency_increases()
    if sum(counts) < guardrails.FEWEST_REQUESTS:
        from scipy.special import ndtr

        # The spacing is that of the server's histogram: 16 bounds for each doubling of the latency.
        bounds_s = tuple(2.0 ** (k / 16) for k in range(-64, 65))
        below = np.round(1e9 * ndtr(np.log(bounds_s) / SPREAD))
        counts = tuple(int(n) for n in np.diff(below, prepend=0, append=1e9))
    stable, candidate = guardrails.fix_thresholds(bounds_s, counts, increases)
    if stable is None or candidate is None:
        return {}
    total = sum(counts)
    over = (total - np.cumsum(counts[:-1])) / total
    tail = np.array([_log_odds(float(share)) for share in over])
    limits = candidate.by_guardrail()
    return {
        place: _LatencyPlace(np.log(bounds_s), tail, limit_s, limits[place])
        for place, limit_s in stable.by_guardrail().items()
        if place in LATENCY_QUANTILES or place in LATENCY_PLACES
    }


def _log_odds(share: float) -> float:
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))


def _draw_bins(
    units: npt.NDArray[np.int64], shares: Array, random: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw the number of units in each bin, shape (*units.shape, bins).

    A bin contains the units with a similar share of events among their requests. `shares` has the
    probability of each bin.
    """
    used = np.flatnonzero(shares > 0)
    counts = np.zeros((*units.shape, len(shares)), dtype=np.int64)
    counts[..., used] = random.multinomial(units, shares[used] / shares[used].sum())
    return counts


def _make_grid(ends: Array) -> npt.NDArray[np.int64]:
    """Return ascending numbers of epochs or intervals to evaluate.

    They are a geometric sequence, and quantiles of the ends.
    """
    finite = ends[np.isfinite(ends)]
    middle = float(np.median(finite)) if len(finite) else _BEYOND
    most = int(min(1e7, max(_BEYOND, _BEYOND * middle)))
    marks = np.quantile(finite, np.linspace(0, 1, 12)) if len(finite) else np.zeros(0)
    grid = np.union1d(space_looks(1, most), np.floor(marks).astype(np.int64))
    return np.asarray(grid[grid >= 1])


def _find_first(fired: Flags, times: Array) -> Array:
    """Return the first time at which each row fired; infinite where none did."""
    first = times[np.arange(len(fired)), fired.argmax(axis=1)]
    return np.asarray(np.where(fired.any(axis=1), first, np.inf))
