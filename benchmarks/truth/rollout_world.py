"""Many rollouts at once: traffic that is drawn, counted, judged by the product's functions and moved by its machine.

The evidence of all rollouts is computed together (`compute_log_likelihood`, `log10_evidence`, `certified`, `mismatch`,
`grossly_failing`); what follows from it is asked of `choose_next_action` for each rollout at each look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.truth.rollout_users import Users, UserTraffic
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    AnalysisResult,
    GuardrailResult,
    Roles,
    Wait,
    WaitKind,
    build_split_state,
    choose_next_action,
)
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES, RolloutPolicy
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.evidence import FINE_GRID, compute_log_likelihood
from onnx_ops.statistics.rollout.judge import compute_firing_limit

Ints = npt.NDArray[np.int64]
Rates = Callable[[int], tuple[tuple[float, ...], tuple[float, ...]]]
"""Look -> (candidate's, stable version's) chance of each guardrail's event."""

LOOK_S = 60.0
_SUCCESSES = 1
"""Number of the event; errors are 0, and slow requests come behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What one scenario is like. `requests` come between two looks; `routed` is the candidate's true share of them
    as a multiple of its weight; `successes` are the two success rates of an A/B test, one outcome a request. `users`
    say how often what happens instead of these; `blind` sources cannot distinguish them."""

    policy: RolloutPolicy
    rates: Rates = lambda _: ((), ())
    requests: int = 200
    looks: int = 100
    routed: float = 1.0
    successes: tuple[float, float] | None = None
    users: Users | None = None
    blind: bool = False


@dataclass(slots=True, kw_only=True)
class Result:
    """By rollout: how it ended, and how many requests the candidate had got by then."""

    ends: list[str] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)

    def count(self, end: str) -> int:
        return self.ends.count(end)

    def median(self, end: str) -> str:
        found = [n for n, how in zip(self.exposed, self.ends, strict=True) if how == end]
        return f"{np.median(found):.0f}" if found else "-"


def version(number: int) -> Deployment:
    return Deployment(
        name=f"v{number}",
        model="m",
        version=str(number),
        variant="fp32",
        release=digest_bytes(f"release {number}".encode()),
        manifest=digest_bytes(f"manifest {number}".encode()),
        location="",
    )


STABLE, CANDIDATE = version(1), version(2)


class Rollouts:
    """`trials` rollouts in one world."""

    def __init__(self, world: World, trials: int, seed: int) -> None:
        self._world = world
        self._random = np.random.default_rng(seed)
        begun = self._ask(build_split_state(STABLE, None, 0), Roles(stable=STABLE), None, 0.0)
        assert isinstance(begun, Action), begun
        self._states = [begun.state] * trials
        self._roles = [begun.roles] * trials
        self._began = [0.0] * trials
        self._places = [(rail, place) for rail in world.policy.guardrails for place in rail.places]
        """What is counted for each guardrail, in order: the columns of all tables."""
        timed = [place for _, place in self._places if place != "errors"]
        self._event = {"errors": 0, **{place: 2 + index for index, place in enumerate(timed)}}
        self._sums = np.zeros((trials, len(self._places), 25))
        self._above = np.zeros((trials, 25))
        self._below = np.zeros((trials, 24))
        self._step = np.zeros((trials, 4), dtype=np.int64)
        """Of the present step: the candidate's errors and requests, the stable version's."""
        self._rows: list[Ints] = []
        """At each look: (trials, events, 4)."""
        self._users = None
        if world.users is not None:
            quantiles = [{**LATENCY_QUANTILES, **LATENCY_PLACES}[place] for place in timed]
            self._users = UserTraffic(world.users, world.requests, trials, self._random, quantiles)
        self.exposed = np.zeros(trials, dtype=np.int64)
        self.ends = ["open"] * trials

    def run(self) -> Result:
        for look in range(self._world.looks):
            active = np.array([index for index, end in enumerate(self.ends) if end in ("open", "paused")])
            if not len(active):
                break
            self._look(look, active)
        return Result(ends=self.ends, exposed=[int(n) for n in self.exposed])

    def _ask(self, actual: EndpointState, roles: Roles, judged: AnalysisResult | None, now: float) -> Action | Wait:
        return choose_next_action(
            desired=CANDIDATE,
            observed=actual,
            roles=roles,
            policy=self._world.policy,
            target="t",
            command=None,
            now=now,
            analysis=judged,
        )

    def _look(self, look: int, active: Ints) -> None:
        world, policy = self._world, self._world.policy
        planned = policy.planned()
        percent = np.array([planned[self._roles[index].step].percent for index in active])
        errors, rows, outcomes = self._drawn(look, active, percent)
        for column, (rail, place) in enumerate(self._places):
            self._sums[active, column] += compute_log_likelihood(
                rows[:, column], ev.make_alternatives(rail.tolerated(place))
            )
        if world.users is not None:
            seen = np.zeros((len(self.ends), 1 + len(self._event), 4), dtype=np.int64)
            seen[active, 0], seen[active, _SUCCESSES] = errors, outcomes
            for column, (_, place) in enumerate(self._places):
                seen[active, self._event[place]] = rows[:, column]
            self._rows.append(seen)
        self._step[active] += errors
        self.exposed[active] += errors[:, 1]
        self._decide(active, errors, percent, self._better(active, outcomes), (look + 1) * LOOK_S)

    def _drawn(self, look: int, active: Ints, percent: Ints) -> tuple[Ints, Ints, Ints]:
        """Counts since the last look: errors, each place's events as (active, places, 4), and outcomes."""
        world, rails = self._world, self._world.policy.guardrails
        shares = np.minimum(percent / 100 * world.routed, 1)
        if self._users is not None:
            counts = self._users.draw(active, shares, look)
            rows = np.moveaxis(counts[[self._event[place] for _, place in self._places]], 0, 1)
            return counts[0], rows, counts[_SUCCESSES]
        canary = self._random.binomial(world.requests, shares)
        stable = world.requests - canary
        rows = np.empty((len(active), len(rails), 4), dtype=np.int64)
        timed = self._timed(canary, stable, percent)
        for column, (mine, theirs) in enumerate(zip(*world.rates(look), strict=True)):
            rows[:, column] = self._events(
                *((canary, stable) if rails[column].name == "errors" else timed), mine, theirs
            )
        outcomes = self._events(canary, stable, *(world.successes or (0.0, 0.0)))
        return rows[:, 0] if len(rails) else outcomes * (0, 1, 0, 1), rows, outcomes

    def _events(self, canary: Ints, stable: Ints, mine: float, theirs: float) -> Ints:
        counts = [self._random.binomial(canary, mine), canary, self._random.binomial(stable, theirs), stable]
        return np.stack(counts, axis=-1)

    def _effect(self, event: int, active: Ints) -> npt.NDArray[np.float64]:
        """Design effect of an event, by rollout."""
        if self._world.blind:
            return design_effect.estimate_dispersion(np.stack([rows[active, event] for rows in self._rows], axis=1))
        if self._users is None:
            return np.ones(len(active))
        # `design_effect.bound_design_effect` of one epoch, for many rollouts at once.
        n, e, n_squared, e_squared, products = self._users.sums[event, active].T
        rate = e / np.maximum(n, 1)
        expected = rate * (1 - rate) * n
        varied = e_squared - 2 * rate * products + rate**2 * n_squared
        return np.asarray(np.maximum(1.0, varied / np.where(expected > 0, expected, np.inf)))

    def _timed(self, canary: Ints, stable: Ints, percent: Ints) -> tuple[Ints, Ints]:
        """Return the compared requests: of the version with more traffic those of its control replica."""
        replica = np.minimum(percent, 100 - percent) / np.maximum(percent, 100 - percent)
        found = self._random.binomial(np.where(percent < 50, stable, canary), replica)
        return np.where(percent < 50, canary, found), np.where(percent < 50, found, stable)

    def _better(self, active: Ints, rows: Ints) -> list[ev.SplitDecision]:
        if self._world.policy.ab_test is None:
            return ["undecided"] * len(active)
        self._above[active] += compute_log_likelihood(rows, ev.make_alternatives(1.0, FINE_GRID))
        self._below[active] += compute_log_likelihood(rows, 1 / FINE_GRID)
        effect = self._effect(_SUCCESSES, active)[:, None]
        higher, lower = ev.compute_split_evidence(self._above[active] / effect, self._below[active] / effect)
        return [ev.decide_split(float(h), float(w), higher_is_better=True) for h, w in zip(higher, lower, strict=True)]

    def _decide(self, active: Ints, last: Ints, percent: Ints, decisions: list[ev.SplitDecision], now: float) -> None:
        policy, step = self._world.policy, self._step[active]
        effects = np.ones((len(active), len(self._places), 1))
        for column, (_, place) in enumerate(self._places):
            effects[:, column, 0] = self._effect(self._event[place], active)
        by_place = ev.compute_log10_evidence(self._sums[active] / effects)
        owners = [rail for rail, _ in self._places]
        found = [ev.average_evidence(by_place[:, [one is rail for one in owners]]) for rail in policy.guardrails]
        promised = policy.slo.error_rate if policy.slo else None
        bunched, crowded, gross = np.ones((3, len(active)))
        if promised and self._rows:
            bunched = design_effect.estimate_burstiness(np.stack([rows[active, 0] for rows in self._rows], axis=1))
        if self._users is not None and not self._world.blind:
            n, e, squared, bad, _ = self._users.sums[0, active].T
            crowded, gross = np.maximum(1, squared / n), self._effect(0, active)
            bunched = np.maximum(bunched, design_effect.compute_error_effect(e, bad, crowded))
        shown = np.ones(len(active), dtype=bool)
        if promised:
            shown = ev.is_rate_certified(step[:, 0], step[:, 1], promised, bunched)
        split = (
            guardrails.compute_mismatch_evidence(step[:, 1], step[:, 1] + step[:, 3], percent, crowded)
            >= guardrails.MISMATCH_LIMIT
        )
        limit, planned = compute_firing_limit(policy), policy.planned()
        for row, index in enumerate(active):
            total = (int(step[row, 1]), planned[self._roles[index].step].minimum)
            judged = AnalysisResult(
                started_at=self._began[index],
                requests=total[0],
                guardrails=tuple(
                    GuardrailResult(
                        name=rail.name,
                        evidence=float(found[column][row]),
                        limit=limit,
                        compared=total[0],
                        required=total[1],
                    )
                    for column, rail in enumerate(policy.guardrails)
                ),
                unmet_target="" if shown[row] else "not shown yet",
                split_mismatch="mismatch" if split[row] else "",
                gross_failure="gross failure" if any(_gross(r[row], float(gross[row])) for r in (last, step)) else "",
                ab_outcome=decisions[row],
                ab_summary="the A/B test" if policy.ab_test else "",
            )
            self._follow(int(index), judged, now)

    def _follow(self, index: int, judged: AnalysisResult, now: float) -> None:
        action = self._ask(self._states[index], self._roles[index], judged, now)
        if isinstance(action, Wait):
            held = action.kind in (WaitKind.PAUSED, WaitKind.INCONCLUSIVE)
            self.ends[index] = "paused" if held or self.ends[index] == "paused" else "open"
            return
        self._roles[index], self._states[index] = action.roles, action.state
        self._began[index], self._step[index] = now, 0
        self.ends[index] = {ActionKind.ABORT: "rolled back", ActionKind.FINISH: "finished"}.get(action.kind, "open")


def _gross(row: Ints, effect: float) -> bool:
    return guardrails.is_grossly_failing((int(row[0]), int(row[1])), (int(row[2]), int(row[3])), effect)
