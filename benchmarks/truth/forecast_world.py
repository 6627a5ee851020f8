"""Rollouts simulated request by request, to compare them with their forecasts.

Each world has its own policy and traffic. Users are hashed to cells, and each epoch assigns cells
anew. The counts are given to the product's own judge and state machine as `Observations`. Until
a rollout has taken a while, there is a look several times in each epoch. Later, a look comes after
each thirtieth of the elapsed time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from benchmarks.truth.rollout_world import CANDIDATE, STABLE
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    Roles,
    Wait,
    WaitKind,
    build_split_state,
    choose_next_action,
)
from onnx_ops.domain.rollout_forecast import Harm, Traffic
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    GenerationCounts,
    GenerationUnits,
    LatencyThresholds,
    ObservationInterval,
    Observations,
    RequestCounts,
    UnitCounts,
)
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ServiceLevel
from onnx_ops.serving.metrics import BOUNDS_S, WARM_UP_REQUESTS
from onnx_ops.statistics.rollout.forecast_units import CELLS
from onnx_ops.statistics.rollout.forecast_waits import INTERVAL_S
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.statistics.rollout.judge import analyze

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

TIMEOUT_S, LEVEL_TIMEOUT_S = 10 * 86_400.0, 86_400.0
"""`step_timeout` of worlds without and with a service level."""
SPREAD = 0.5
"""Standard deviation of log latency."""
MEDIAN_S = 0.01
LOOK_S, LAG_S = 5.0, 1.0
_SUB_LOOKS = 6
"""Looks per epoch, until a thirtieth of the elapsed time reaches two epochs."""
_THIN = 30
_MOST_REQUESTS = 200_000
"""Number of requests that are drawn together."""
_KINDS = ("errors", "latency_p50", "latency_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A policy, its traffic, and what the forecast does not know about the traffic.

    Attributes:
        traffic: true rate, users and errors.
        skew: exponent of Zipf's law by which users send requests.
        uneven: coefficient of variation of the rate between epochs.
        bunch: failed requests of a user that come together.
        harm: what the candidate does; None: it equals the stable version.
    """

    policy: RolloutPolicy
    traffic: Traffic
    skew: float
    uneven: float
    bunch: int
    harm: Harm | None = None

    @property
    def name(self) -> str:
        """Return the kind of traffic, for tables."""
        if self.uneven:
            return "uneven rate"
        return "errors in bunches" if self.bunch > 1 else "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a rollout, its duration, and the duration of each complete step."""

    end: str
    elapsed_s: float
    steps_s: tuple[float, ...]


def draw_world(random: np.random.Generator, *, is_harmful: bool) -> World:
    """Draw a policy and its traffic."""
    steps = np.unique(np.round(np.exp(random.uniform(0, math.log(50), random.integers(1, 4)))))
    rails = [
        Guardrail(name=name)  # type: ignore[arg-type]  # the names are those of guardrails
        for name, chance in zip(_KINDS, (0.9, 0.3, 0.3), strict=True)
        if random.random() < chance
    ] or [Guardrail(name="errors")]
    errors = float(_draw_between(random, 1e-4, 1e-1))
    level = max(3 * errors, float(_draw_between(random, 0.01, 0.1)))
    has_level = random.random() < 0.12 and level < 0.5
    policy = RolloutPolicy(
        steps=(*(float(step) / 100 for step in steps), 1.0),
        guardrails=tuple(rails),
        min_requests=tuple(round(_draw_between(random, 50, 5000)) for _ in steps),
        min_units=round(_draw_between(random, 5, 100)),
        slo=ServiceLevel(error_rate=level) if has_level else None,
        epoch=float(random.choice([30.0, 60.0, 120.0])),
        min_step_duration=_draw_between(random, 60, 7200) if random.random() < 0.2 else None,
        step_timeout=LEVEL_TIMEOUT_S if has_level else TIMEOUT_S,
    )
    users = 0 if random.random() < 0.3 else round(_draw_between(random, 1, 1e6))
    traffic = Traffic(rate=_draw_between(random, 1e-2, 1e4), errors=errors, users=users)
    kind = random.random()
    harm = None
    if is_harmful:
        rail = rails[random.integers(len(rails))]
        value = min(0.9, errors * _draw_between(random, 2, 20))
        harm = Harm(name="errors", value=value)
        if rail.name != "errors":
            harm = Harm(name=rail.name, value=random.uniform(1.2, 2.0))
    return World(
        policy=policy,
        traffic=traffic,
        skew=random.uniform(0, 1.1),
        uneven=random.uniform(0.2, 1.0) if kind < 0.25 else 0.0,
        bunch=int(random.integers(2, 5)) if kind > 0.75 else 1,
        harm=harm,
    )


def _draw_between(random: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(random.uniform(math.log(low), math.log(high))))


class SimulatedRollout:
    """One rollout of a world."""

    def __init__(self, world: World, random: np.random.Generator) -> None:
        self._world, self._random = world, random
        self._policy = world.policy
        self._epoch_s = world.policy.epoch
        self._shares = self._draw_cells()
        before = MEDIAN_S * np.exp(SPREAD * random.standard_normal(50_000))
        counts = np.bincount(np.searchsorted(BOUNDS_S, before), minlength=len(BOUNDS_S) + 1)
        self.latencies: tuple[int, ...] = tuple(counts.tolist())
        limits = fix_thresholds(BOUNDS_S, self.latencies, self._policy.max_latency_increases())
        self._thresholds: LatencyThresholds | None = limits[0]
        self._slower: LatencyThresholds | None = limits[1]
        self._chances = self._find_chances()
        self._now = random.uniform(0, self._epoch_s)
        self._answered = 0
        self._units: dict[int, dict[str, Floats]] = {}
        self._rows: list[tuple[int, dict[str, Ints], float]] = []
        """Step, counts by place, and seconds of each interval."""

    def run(self) -> Outcome:
        """Run the rollout until it ends or pauses."""
        begun_s = self._now
        roles = Roles(stable=STABLE)
        times: list[float] = []
        action = self._decide(roles, None, None)
        assert isinstance(action, Action)
        while True:
            roles, step_s = action.roles, self._now
            if roles.candidate is None:
                end = "finished" if action.kind is ActionKind.FINISH else "rolled back"
                return Outcome(end=end, elapsed_s=self._now - begun_s, steps_s=tuple(times))
            decided = self._run_step(roles, step_s, action)
            if isinstance(decided, Wait):
                elapsed_s = self._now - begun_s
                return Outcome(end="paused", elapsed_s=elapsed_s, steps_s=tuple(times))
            if decided.kind in (ActionKind.ADVANCE, ActionKind.FINISH):
                times.append(self._now - step_s)
            action = decided

    def _decide(
        self, roles: Roles, action: Action | None, seen: Observations | None
    ) -> Action | Wait:
        state = build_split_state(STABLE, None, 0) if action is None else action.state
        return choose_next_action(
            desired=CANDIDATE,
            observed=state,
            roles=roles,
            policy=self._policy,
            target="t",
            command=None,
            now=self._now,
            analysis=None if seen is None else analyze(seen, roles, self._policy),
        )

    def _run_step(self, roles: Roles, begun_s: float, action: Action) -> Action | Wait:
        percent = self._policy.planned()[roles.step].percent
        self._units[roles.step] = {}
        # The split changed within the current epoch, so units of this epoch are not counted.
        is_partial = True
        while True:
            length_s = self._epoch_s - self._now % self._epoch_s
            elapsed_s = self._now - begun_s
            epochs = 1
            if not is_partial:
                per_epoch = max(1e-9, self._world.traffic.rate * self._epoch_s)
                epochs = int(max(1, elapsed_s / _THIN / self._epoch_s))
                epochs = min(epochs, max(1, int(_MOST_REQUESTS / per_epoch)))
                length_s = epochs * self._epoch_s
            counts, units = self._draw(percent, epochs, length_s)
            decided = self._look_within(roles, action, counts, length_s, begun_s)
            if decided is not None:
                return decided
            if not is_partial:
                for place, added in units.items():
                    before = self._units[roles.step].get(place, 0)
                    self._units[roles.step][place] = before + added
            is_partial = False
            decided = self._look(roles, action, begun_s, LAG_S + self._random.uniform(0, LOOK_S))
            if decided is not None:
                return decided

    def _look_within(
        self,
        roles: Roles,
        action: Action,
        counts: Mapping[str, Ints],
        length_s: float,
        begun_s: float,
    ) -> Action | Wait | None:
        """Add the counts of a period in parts, and look after each part but the last.

        The counts of a period of several epochs are added without a look.
        """
        if length_s > self._epoch_s:
            self._add(roles.step, counts, length_s, parts=round(length_s / INTERVAL_S))
            return None
        left = dict(counts)
        for part in range(_SUB_LOOKS, 1, -1):
            taken = {
                place: self._random.binomial(number, 1 / part) for place, number in left.items()
            }
            left = {place: number - taken[place] for place, number in left.items()}
            self._add(roles.step, taken, length_s / _SUB_LOOKS)
            decided = self._look(roles, action, begun_s, 0.0)
            if decided is not None:
                return decided
        self._add(roles.step, left, length_s / _SUB_LOOKS)
        return None

    def _add(self, step: int, counts: Mapping[str, Ints], seconds: float, parts: int = 1) -> None:
        """Add the counts of a period to intervals of a minute, or to one interval.

        Only a service level depends on intervals.
        """
        self._now += seconds
        parts = parts if self._policy.slo else 1
        for part in range(max(1, parts), 0, -1):
            taken = {
                place: self._random.binomial(number, 1 / part) for place, number in counts.items()
            }
            counts = {place: number - taken[place] for place, number in counts.items()}
            length_s = seconds / max(1, parts)
            last = self._rows[-1] if self._rows else None
            is_full = last is None or last[0] != step
            is_full |= self._policy.slo is not None and (last is None or last[2] >= INTERVAL_S)
            if is_full or last is None:
                self._rows.append((step, taken, length_s))
            else:
                summed = {place: number + taken[place] for place, number in last[1].items()}
                self._rows[-1] = (step, summed, last[2] + length_s)

    def _look(
        self, roles: Roles, action: Action, begun_s: float, delay_s: float
    ) -> Action | Wait | None:
        """Return the action or pause that is due now; None if the step waits."""
        before, self._now = self._now, self._now + delay_s
        decided = self._decide(roles, action, self._observe(roles.step, begun_s))
        if isinstance(decided, Wait) and decided.kind is WaitKind.ANALYZING:
            self._now = before
            return None
        return decided

    def _observe(self, step: int, begun_s: float) -> Observations:
        planned = self._policy.planned()
        generations = tuple(
            GenerationUnits(
                generation=1 + index,
                step=index,
                percent=planned[index].percent,
                is_drawn=True,
                units={place: _to_units(counts) for place, counts in units.items()},
            )
            for index, units in self._units.items()
        )
        return Observations(
            candidate=CANDIDATE.manifest,
            step=step,
            started_at=begun_s,
            thresholds=self._thresholds,
            slower=self._slower,
            intervals=tuple(_to_interval(*row) for row in self._rows),
            counts=(GenerationCounts(origin="server", generation=1 + step, tallies={}),),
            generations=generations,
        )

    def _draw_cells(self) -> Floats:
        """Return the share of requests of each user; empty without keys.

        Many users are combined to cells.
        """
        users = self._world.traffic.users
        weights: Floats = np.arange(1, users + 1, dtype=np.float64) ** -self._world.skew
        if users > CELLS // 20:
            cells = self._random.integers(0, CELLS, users)
            weights = np.bincount(cells, weights, minlength=CELLS).astype(np.float64)
            weights = weights[weights > 0]
        return np.asarray(weights / weights.sum()) if users else np.zeros(0)

    def _find_chances(self) -> Mapping[str, tuple[float, float]]:
        """Return the chances of an event of the candidate and of the stable version."""
        traffic, harm = self._world.traffic, self._world.harm
        bad = harm.value if harm is not None and harm.name == "errors" else traffic.errors
        chances = {"errors": (bad, traffic.errors)}
        slower = harm.value if harm is not None and harm.name != "errors" else 1.0
        assert self._thresholds is not None
        assert self._slower is not None
        for place in ("latency_p50", "latency_p99"):
            chances[place] = (
                _exceed(self._slower, place, slower),
                _exceed(self._thresholds, place, 1.0),
            )
        return chances

    def _draw(
        self, percent: int, epochs: int, length_s: float
    ) -> tuple[Mapping[str, Ints], Mapping[str, Floats]]:
        """Draw a period's counts, and the units of whole epochs, by place."""
        world, random = self._world, self._random
        busy = np.ones(epochs)
        if world.uneven:
            shape = world.uneven**-2
            busy = random.gamma(shape, 1 / shape, epochs)
        mean = world.traffic.rate * length_s / epochs
        requests, place = self._draw_units(mean * busy)
        mine, compared = place < percent / 100, place < 2 * percent / 100
        total = int(requests[mine].sum())
        is_warm = self._answered >= WARM_UP_REQUESTS
        cold = 0 if is_warm else min(total, WARM_UP_REQUESTS - self._answered)
        self._answered += total
        counts: dict[str, Ints] = {}
        units: dict[str, Floats] = {}
        for name, (candidate, stable) in self._chances.items():
            is_errors = name == "errors"
            used = np.ones(len(requests), dtype=bool) if is_errors else compared
            n, ours = requests[used], mine[used]
            events = self._draw_events(n, np.where(ours, candidate, stable), is_errors=is_errors)
            bins = np.searchsorted(BADNESS_EDGES, events / n)
            if is_errors or is_warm:
                flat = np.bincount(
                    np.where(ours, 0, len(BADNESS_EDGES)) + bins, minlength=2 * len(BADNESS_EDGES)
                )
                units[name] = flat.reshape(2, -1).astype(np.float64)
            row = [events[ours].sum(), n[ours].sum(), events[~ours].sum(), n[~ours].sum()]
            if not is_errors:
                row[1] -= cold
                row[0] = min(row[0], row[1])
            counts[name] = np.array(
                [row[0], row[1] - row[0], row[2], row[3] - row[2]], dtype=np.int64
            )
        return counts, units

    def _draw_units(self, means: Floats) -> tuple[Ints, Floats]:
        """Return the requests of each unit of some epochs, and its place in the split."""
        random, shares = self._random, self._shares
        totals = random.poisson(means)
        if not len(shares):
            count = int(totals.sum())
            return np.ones(count, dtype=np.int64), random.random(count)
        if totals.sum() < 3 * len(shares) * len(means):
            user = np.searchsorted(np.cumsum(shares)[:-1], random.random(totals.sum()))
            epoch = np.repeat(np.arange(len(means)), totals)
            _, requests = np.unique(epoch * len(shares) + user, return_counts=True)
        else:
            requests = random.poisson(means[:, None] * shares).ravel()
            requests = requests[requests > 0]
        return np.asarray(requests, dtype=np.int64), random.random(len(requests))

    def _draw_events(self, requests: Ints, chances: Floats, *, is_errors: bool) -> Ints:
        if not is_errors or self._world.bunch == 1:
            return np.asarray(self._random.binomial(requests, chances))
        # A bunch of more requests than the unit has would lower the share of failed requests.
        bunch = np.minimum(requests, self._world.bunch)
        events = bunch * self._random.poisson(requests * chances / bunch)
        return np.asarray(np.minimum(requests, events))


def _exceed(thresholds: LatencyThresholds, place: str, slower: float) -> float:
    limit_s = thresholds.by_guardrail()[place] / slower
    return float(ndtr(-math.log(limit_s / MEDIAN_S) / SPREAD))


def _to_units(counts: Floats) -> UnitCounts:
    mine, theirs = counts.astype(int).tolist()
    return UnitCounts(candidate=tuple(mine), stable=tuple(theirs))


def _to_interval(step: int, counts: Mapping[str, Ints], seconds: float) -> ObservationInterval:
    sides: list[RequestCounts] = []
    for side in (0, 2):
        (bad, good), slow = counts["errors"][side : side + 2], {}
        timed = int(counts["latency_p50"][side : side + 2].sum())
        for place in ("latency_p50", "latency_p99"):
            slow[place] = min(timed, int(counts[place][side]))
        row = RequestCounts(requests=int(bad + good), errors=int(bad), timed=timed)
        sides.append(row.with_over(slow))
    return ObservationInterval(step=step, canary=sides[0], stable=sides[1], seconds=seconds)


def measure(world: World, random: np.random.Generator, latencies: Sequence[int]) -> Traffic:
    """Return the traffic that a forecast gets: exact in half of worlds, else measured."""
    known = replace(world.traffic, bounds_s=tuple(BOUNDS_S), latencies=tuple(latencies))
    if random.random() < 0.5:
        return known
    window_s = max(60.0, 30 / known.rate)
    counted = max(1, int(random.poisson(known.rate * window_s)))
    errors = int(random.binomial(counted, known.errors)) / counted
    return replace(known, rate=counted / window_s, errors=errors, counted=counted)


def get_resolution(elapsed_s: float, epoch_s: float) -> float:
    """Return the largest time between two looks of the simulation."""
    return max(elapsed_s / _THIN, epoch_s / _SUB_LOOKS) + LOOK_S + LAG_S
