"""Many rollouts that are simulated together.

Their traffic is drawn, counted, judged by the product's functions and moved by its state machine.
The evidence of all rollouts is computed together, by the functions that `statistics.rollout.judge`
calls for one. `choose_next_action` returns what follows from it, for each rollout at each look. A
look is an epoch.
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
from onnx_ops.domain.rollout_observations import BADNESS_EDGES, USER_BLOCKS, UserBlocks
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES, RolloutPolicy
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout import unit_evidence as units
from onnx_ops.statistics.rollout.evidence import FINE_GRID, compute_log_likelihood
from onnx_ops.statistics.rollout.judge import compute_firing_limit

Ints = npt.NDArray[np.int64]
Rates = Callable[[int], tuple[tuple[float, ...], tuple[float, ...]]]
"""Look -> (candidate's, stable version's) chance of each guardrail's event."""

LOOK_S = 60.0
_SUCCESSES = 1
"""Index of the event; errors are 0, and slow requests follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One scenario of rollouts.

    `requests` come between two looks. `routed` is the candidate's true share of them as a multiple
    of its weight. `successes` are the two success rates of an A/B test, with one outcome for each
    request. If there are `users`, they determine the events instead of `rates` and `successes`.
    They are assigned anew at each look, except in an A/B test, and for `blind` sources, which count
    neither units nor users.
    """

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
    """The results of all rollouts.

    They are how each ended, how many requests the candidate had got by then, and after how many
    looks.
    """

    ends: list[str] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)

    def count(self, end: str | tuple[str, ...]) -> int:
        ends = (end,) if isinstance(end, str) else end
        return sum(how in ends for how in self.ends)

    def quantile(self, share: float) -> str:
        """Return the looks after which this share of all rollouts had ended in any way."""
        found = sorted(
            n if how in ("rolled back", "finished") else 10**9
            for n, how in zip(self.looks, self.ends, strict=True)
        )
        at = found[min(len(found) - 1, int(share * len(found)))]
        return f"{at}" if at < 10**9 else "-"

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
        self._is_drawn = not world.blind and world.policy.ab_test is None
        self._sums = np.zeros((trials, len(self._places), 25))
        self._wealth: dict[int, npt.NDArray[np.float64]] = {}
        """Log wealth of gamblers after the steps before the present one, by column."""
        self._above = np.zeros((trials, 25))
        self._below = np.zeros((trials, 24))
        self._step = np.zeros((trials, 4), dtype=np.int64)
        """Errors and requests in the present step: the candidate's, the stable version's."""
        self._units = np.zeros((trials, 1 + len(self._places), 2, len(BADNESS_EDGES)))
        """Units of the present step, by errors and by the events of each place."""
        self._step_from = np.zeros(trials, dtype=np.int64)
        self._rows: list[Ints] = []
        """Counts at each look: (trials, events, 4)."""
        self._users = None
        if world.users is not None:
            quantiles = [{**LATENCY_QUANTILES, **LATENCY_PLACES}[place] for place in timed]
            is_sticky = not self._is_drawn
            self._users = UserTraffic(
                world.users, world.requests, trials, self._random, quantiles, sticky=is_sticky
            )
        self.exposed = np.zeros(trials, dtype=np.int64)
        self.looks = np.zeros(trials, dtype=np.int64)
        self.ends = ["open"] * trials

    def run(self) -> Result:
        for look in range(self._world.looks):
            active = np.array(
                [index for index, end in enumerate(self.ends) if end in ("open", "paused")]
            )
            if not len(active):
                break
            self._look(look, active)
        return Result(ends=self.ends, exposed=self.exposed.tolist(), looks=self.looks.tolist())

    def _ask(
        self, actual: EndpointState, roles: Roles, judged: AnalysisResult | None, now: float
    ) -> Action | Wait:
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
        planned = self._world.policy.planned()
        percent = np.array([planned[self._roles[index].step].percent for index in active])
        errors, rows, outcomes = self._drawn(look, active, percent)
        if self._is_drawn:
            self._count_units(active, rows, errors)
        else:
            for column, (rail, place) in enumerate(self._places):
                self._sums[active, column] += compute_log_likelihood(
                    rows[:, column], ev.make_alternatives(rail.tolerated(place))
                )
        seen = np.zeros((len(self.ends), 1 + len(self._event), 4), dtype=np.int64)
        seen[active, 0], seen[active, _SUCCESSES] = errors, outcomes
        for column, (_, place) in enumerate(self._places):
            seen[active, self._event[place]] = rows[:, column]
        self._rows.append(seen)
        self._step[active] += errors
        self.exposed[active] += errors[:, 1]
        self.looks[active] = look + 1
        self._decide(active, errors, percent, self._better(active, outcomes), (look + 1) * LOOK_S)

    def _count_units(self, active: Ints, rows: Ints, errors: Ints) -> None:
        """Add the units of this epoch to those of the present step."""
        self._units[active, 0] += self._find_units(0, active, errors)
        for column, (_, place) in enumerate(self._places):
            self._units[active, 1 + column] += self._find_units(
                self._event[place], active, rows[:, column]
            )

    def _sum_wealth(self, active: Ints, column: int) -> npt.NDArray[np.float64]:
        """Return the log wealth of a place's gamblers, (active, gamblers).

        Column 0 belongs to the breaker.
        """
        rail, place = (None, "errors") if column == 0 else self._places[column - 1]
        tolerated = 1.0 if rail is None else rail.tolerated(place)
        planned = self._world.policy.planned()
        percents = np.array([planned[self._roles[index].step].percent for index in active])
        present = units.sum_log_factors(self._units[active, column], place, percents, tolerated)
        past = self._wealth.setdefault(column, np.zeros((len(self.ends), present.shape[-1])))
        return np.asarray(past[active] + present)

    def _end_step(self, index: int) -> None:
        if self._is_drawn:
            for column in range(1 + len(self._places)):
                self._wealth[column][index] = self._sum_wealth(np.array([index]), column)[0]
            self._units[index] = 0

    def _find_units(self, event: int, active: Ints, table: Ints) -> npt.NDArray[np.float64]:
        """Return units by badness, (active, 2, bins).

        Without users, each request of the table is one unit.
        """
        if self._users is not None:
            return np.asarray(self._users.units[event, active])
        counts = np.zeros((len(active), 2, len(BADNESS_EDGES)))
        counts[..., 0], counts[..., -1] = table[:, 1::2] - table[:, 0::2], table[:, 0::2]
        return counts

    def _drawn(self, look: int, active: Ints, percent: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the counts since the last look: errors, events and outcomes.

        The events of each place have the shape (active, places, 4).
        """
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
        counts = [
            self._random.binomial(canary, mine),
            canary,
            self._random.binomial(stable, theirs),
            stable,
        ]
        return np.stack(counts, axis=-1)

    def _effect(self, event: int, active: Ints) -> npt.NDArray[np.float64]:
        """Return the design effect of an event, by rollout."""
        if self._is_drawn:
            return np.ones(len(active))
        if self._world.blind:
            return design_effect.estimate_dispersion(
                np.stack([rows[active, event] for rows in self._rows], axis=1)
            )
        return np.array(
            [design_effect.compute_block_effect(self._blocks(event, index)) for index in active]
        )

    def _blocks(self, event: int, index: int) -> list[UserBlocks]:
        """Return the counts by block of users of both versions.

        Without users, all requests are in the last block.
        """
        if self._users is not None:
            n, e = self._users.blocks[event, :, index]
        else:
            table = sum(rows[index, event] for rows in self._rows)
            n, e = np.zeros((2, 2, USER_BLOCKS + 1))
            n[:, -1], e[:, -1] = table[1::2], table[0::2]
        return [UserBlocks(requests=tuple(n[side]), events=tuple(e[side])) for side in (0, 1)]

    def _timed(self, canary: Ints, stable: Ints, percent: Ints) -> tuple[Ints, Ints]:
        """Return the compared requests of the candidate and of the stable version.

        For the version with more traffic, these are the requests of its control replica.
        """
        replica = np.minimum(percent, 100 - percent) / np.maximum(percent, 100 - percent)
        found = self._random.binomial(np.where(percent < 50, stable, canary), replica)
        return np.where(percent < 50, canary, found), np.where(percent < 50, found, stable)

    def _better(self, active: Ints, rows: Ints) -> list[ev.SplitDecision]:
        if self._world.policy.ab_test is None:
            return ["undecided"] * len(active)
        self._above[active] += compute_log_likelihood(rows, ev.make_alternatives(1.0, FINE_GRID))
        self._below[active] += compute_log_likelihood(rows, 1 / FINE_GRID)
        effect = self._effect(_SUCCESSES, active)[:, None]
        higher, lower = ev.compute_split_evidence(
            self._above[active] / effect, self._below[active] / effect
        )
        found = [
            ev.decide_split(float(h), float(w), higher_is_better=True)
            for h, w in zip(higher, lower, strict=True)
        ]
        return [
            decision if decision == "undecided" or self._has_users(index) else "undecided"
            for index, decision in zip(active, found, strict=True)
        ]

    def _has_users(self, index: int) -> bool:
        users = min(map(design_effect.count_effective_users, self._blocks(_SUCCESSES, index)))
        return users >= self._world.policy.min_units

    def _decide(
        self, active: Ints, last: Ints, percent: Ints, decisions: list[ev.SplitDecision], now: float
    ) -> None:
        policy, step = self._world.policy, self._step[active]
        found = self._measure(active)
        shown = np.ones(len(active), dtype=bool)
        if policy.slo:
            looks = np.arange(len(self._rows))[:, None] >= self._step_from[active]
            rows = np.stack([table[active, 0] for table in self._rows]) * looks[..., None]
            bunched = design_effect.estimate_error_effect(np.moveaxis(rows, 0, 1))
            shown = ev.is_rate_certified(step[:, 0], step[:, 1], policy.slo.error_rate, bunched)
        split = self._find_mismatch(active, step, percent) >= guardrails.MISMATCH_LIMIT
        gross = self._find_gross(active, last, step)
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
                unmet_target="" if shown[row] and self._has_units(index) else "not shown yet",
                split_mismatch="mismatch" if split[row] else "",
                gross_failure="gross failure" if gross[row] else "",
                ab_outcome=decisions[row],
                ab_summary="the A/B test" if policy.ab_test else "",
            )
            self._follow(int(index), judged, now)

    def _measure(self, active: Ints) -> list[npt.NDArray[np.float64]]:
        """Return log10 evidence of each guardrail, by rollout."""
        if not self._places:
            return []
        if self._is_drawn:
            columns = range(1, 1 + len(self._places))
            logs = np.stack(
                [ev.log_mean_exp(self._sum_wealth(active, at)) for at in columns], axis=-1
            ) / np.log(10)
        else:
            effects = np.stack(
                [self._effect(self._event[place], active) for _, place in self._places], axis=-1
            )
            logs = ev.compute_log10_evidence(self._sums[active] / effects[..., None])
        owners = [rail for rail, _ in self._places]
        return [
            ev.average_evidence(logs[:, [one is rail for one in owners]])
            for rail in self._world.policy.guardrails
        ]

    def _has_units(self, index: int) -> bool:
        return not self._is_drawn or self._units[index, 0, 0].sum() >= self._world.policy.min_units

    def _find_mismatch(self, active: Ints, step: Ints, percent: Ints) -> npt.NDArray[np.float64]:
        if self._is_drawn:
            seen = self._units[active, 0].sum(axis=-1)
            return guardrails.compute_mismatch_evidence(seen[:, 0], seen.sum(axis=-1), percent)
        effect = np.ones(len(active))
        if self._users is not None and not self._world.blind:
            effect = np.array(
                [design_effect.compute_split_effect(self._blocks(0, index)) for index in active]
            )
        return guardrails.compute_mismatch_evidence(
            step[:, 1], step[:, 1] + step[:, 3], percent, effect
        )

    def _find_gross(self, active: Ints, last: Ints, step: Ints) -> npt.NDArray[np.bool_]:
        if self._is_drawn:
            counts = self._units[active, 0]
            mine, theirs = (counts @ BADNESS_EDGES / np.maximum(1, counts.sum(axis=-1))).T
            is_gross = mine >= np.maximum(
                guardrails.BREAKER_SHARE, guardrails.BREAKER_TIMES * theirs
            )
            evidence = ev.log_mean_exp(self._sum_wealth(active, 0)) / np.log(10)
            return np.asarray(is_gross & (evidence >= guardrails.BREAKER_LIMIT))
        effects = (
            self._effect(0, active)
            if self._users is not None and not self._world.blind
            else np.ones(len(active))
        )
        return np.array(
            [
                any(_is_gross(rows[row], float(effect)) for rows in (last, step))
                for row, effect in enumerate(effects)
            ]
        )

    def _follow(self, index: int, judged: AnalysisResult, now: float) -> None:
        action = self._ask(self._states[index], self._roles[index], judged, now)
        if isinstance(action, Wait):
            held = action.kind in (WaitKind.PAUSED, WaitKind.INCONCLUSIVE)
            self.ends[index] = "paused" if held or self.ends[index] == "paused" else "open"
            return
        if action.roles.candidate is not None:
            self._end_step(index)
        self._roles[index], self._states[index] = action.roles, action.state
        self._began[index], self._step[index] = now, 0
        self._step_from[index] = len(self._rows)
        self.ends[index] = {ActionKind.ABORT: "rolled back", ActionKind.FINISH: "finished"}.get(
            action.kind, "open"
        )


def _is_gross(row: Ints, effect: float) -> bool:
    return guardrails.is_grossly_failing(
        (int(row[0]), int(row[1])), (int(row[2]), int(row[3])), effect
    )
