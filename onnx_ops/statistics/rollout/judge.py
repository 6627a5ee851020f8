"""From the counts of a rollout to what they say, and from there to the next action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.rollout import Action, Roles, Wait, Word, next_action
from onnx_ops.domain.rollout_judged import Guard, Judged
from onnx_ops.domain.rollout_observed import Interval, Observations, ShadowTally, Tally
from onnx_ops.domain.rollout_policy import Guardrail, PlannedStep, RolloutPolicy, ServiceLevel, ShadowTrial, SplitTest
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout import quantiles, share, slo, units
from onnx_ops.statistics.rollout.cold import cold_start

Row = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePath:
    """One guardrail for a plot: log10 evidence against requests to the candidate, and the limit as a line."""

    name: str
    requests: tuple[int, ...]
    log10_evidence: tuple[float, ...]
    limit: float


def decide(
    *,
    wanted: Deployment | None,
    actual: EndpointState | None,
    roles: Roles,
    observations: Observations | None,
    policy: RolloutPolicy,
    target: str,
    word: Word | None,
    now: float,
) -> Action | Wait:
    """`next_action` by what was observed; the arguments are those of `next_action`.

    Observations of another candidate or step than `roles` says count for nothing.
    """
    judged = None
    if observations is not None and roles.candidate is not None and policy.judged:
        ours = observations.candidate == roles.candidate.manifest and observations.step == roles.step
        judged = judge(observations, policy) if ours else None
    return next_action(
        wanted=wanted,
        actual=actual,
        roles=roles,
        policy=policy,
        target=target,
        word=word,
        now=now,
        judged=judged,
    )


def judge(observations: Observations, policy: RolloutPolicy) -> Judged:
    """What the counts say about the present step. Guardrails look at the whole rollout, all else at the step."""
    planned = policy.planned()
    step = planned[min(observations.step, len(planned) - 1)]
    here = [one for one in observations.intervals if one.step == observations.step]
    canary, stable = _total([one.canary for one in here]), _total([one.stable for one in here])
    rails = [one for one in policy.guardrails if one is not policy.cold]
    guards = [guard(one, observations, here, step, policy) for one in rails]
    requests, short, mismatch = canary.requests, "", ""
    if step.kind == "cold" and policy.cold is not None:
        guards.append(cold_start(policy.cold, *observations.cold_s, limit_of(policy)))
    elif step.kind == "shadow" and policy.shadow is not None:
        copies = _copies(here)
        guards.append(_answers(copies, policy.shadow, limit_of(policy)))
        requests, short = copies.seen, _not_alike(copies, policy.shadow)
    else:
        short = service_level(canary, policy.slo, _bunching(observations)) or _few(observations, here, policy)
        crowded = units.crowding(observations.units_of("errors"))
        mismatch = traffic(canary.requests, canary.requests + stable.requests, step, crowded)
    outcome: ev.Decision = "undecided"
    line = ""
    if step.kind == "ab" and policy.ab is not None:
        outcome, line = outcomes(observations, here, policy.ab)
    return Judged(
        began=observations.began,
        requests=requests,
        guards=tuple(guards),
        short=short,
        mismatch=mismatch,
        broken=_broken(here, canary, stable, _effect(observations, "errors", ())),
        outcome=outcome,
        outcome_line=line,
    )


def limit_of(policy: RolloutPolicy) -> float:
    """log10 of the evidence at which any of the policy's guardrails fires."""
    return ev.limit(len(policy.guardrails) + (policy.shadow is not None))


def guard(
    rail: Guardrail, observations: Observations, here: Sequence[Interval], step: PlannedStep, policy: RolloutPolicy
) -> Guard:
    """One guardrail over all intervals of the rollout; `here` are those of the present step."""
    limit, intervals = limit_of(policy), observations.intervals
    counted = {place: rows_of(place, intervals) for place in rail.places}
    if not any(counted.values()) and any(one.canary_latency for one in intervals):
        return _by_signs(rail, intervals, here, step, limit)
    needed = step.minimum if step.percent else 0
    if not all(counted.values()):
        return Guard(name=rail.name, limit=limit, needed=needed, holds=rail.on_violation == "hold")
    effects = {place: _effect(observations, place, rows) for place, rows in counted.items()}
    found = {place: ev.evidence(rows, rail.tolerated(place), effects[place]) for place, rows in counted.items()}
    worst = max(found, key=lambda place: found[place])
    rows, alone = counted[worst], len(found) == 1
    # Bounds of the place that was chosen for being the worst would not hold.
    low, high = ev.odds_ratio_bounds(rows, effects[worst]) if alone else (None, None)
    seen = sum(row[1] for row in rows_of(worst, here) if row[3])
    return Guard(
        name=rail.name,
        place="" if alone else worst.partition("@")[2],
        canary=(sum(row[0] for row in rows), sum(row[1] for row in rows)),
        stable=(sum(row[2] for row in rows), sum(row[3] for row in rows)),
        evidence=float(ev.average(list(found.values()))),
        limit=limit,
        low=low,
        high=high,
        effect=effects[worst],
        holds=rail.on_violation == "hold",
        seen=seen,
        needed=needed,
    )


def rows_of(place: str, intervals: Sequence[Interval]) -> list[Row]:
    """Events and requests of either version in each interval in which the source could tell them.

    Args:
        place: what the events are: the name of a guardrail, or one of its places.
        intervals: what was counted.
    """
    found = []
    for one in intervals:
        (mine, of_mine), (theirs, of_theirs) = _events(place, one.canary), _events(place, one.stable)
        if mine is not None and theirs is not None:
            found.append((mine, of_mine, theirs, of_theirs))
    return found


def paths(observations: Observations, policy: RolloutPolicy) -> tuple[EvidencePath, ...]:
    """The evidence after each interval, for a plot."""
    found = []
    for rail in policy.guardrails:
        counted = {place: rows_of(place, observations.intervals) for place in rail.places}
        rows = counted[rail.places[0]]
        sums = [sum(row[1] for row in rows[: index + 1]) for index in range(len(rows))]
        lines = [
            ev.evidence_path(rows, rail.tolerated(place), _effect(observations, place, rows))
            for place, rows in counted.items()
        ]
        values = ev.average(np.stack(lines, axis=-1))
        limit = limit_of(policy)
        path = EvidencePath(name=rail.name, requests=tuple(sums), log10_evidence=tuple(values.tolist()), limit=limit)
        found.append(path)
    return tuple(found)


def service_level(canary: Tally, promised: ServiceLevel | None, effect: float = 1.0) -> str:
    """What is still to be shown of the error rate; empty if nothing is."""
    if promised is None or bool(slo.certified(canary.errors, canary.requests, promised.error_rate, effect)):
        return ""
    shown = slo.upper_bound(canary.errors, canary.requests, effect)
    return (
        f"{canary.errors} of {canary.requests} requests failed, which shows a rate below {100 * shown:.3g} %, "
        f"not below {100 * promised.error_rate:g} %"
    )


def traffic(canary: int, requests: int, step: PlannedStep, effect: float = 1.0) -> str:
    """Why the split of requests cannot be what was asked for; empty if it can."""
    if not 0 < step.percent < 100:
        return ""
    if float(share.mismatch(canary, requests, step.percent, effect)) < share.MISMATCH_LIMIT:
        return ""
    return f"{canary} of {requests} requests ({100 * canary / requests:.1f} %) went to the candidate"


def outcomes(observations: Observations, here: Sequence[Interval], test: SplitTest) -> tuple[ev.Decision, str]:
    """The A/B test's decision and its line for a person."""
    mine, theirs = _total([one.canary for one in here]), _total([one.stable for one in here])
    if not mine.outcomes or not theirs.outcomes:
        return "undecided", ""
    rows = [(o.canary.successes, o.canary.outcomes, o.stable.successes, o.stable.outcomes) for o in here]
    effect = _effect(observations, "outcomes", rows)
    decision, higher, lower = ev.split_test(rows, higher_is_better=test.goal == "higher", effect=effect)
    low, high = ev.odds_ratio_bounds(rows, effect)
    told = Guard(
        name=test.metric,
        canary=(mine.successes, mine.outcomes),
        stable=(theirs.successes, theirs.outcomes),
        evidence=max(higher, lower),
        limit=ev.limit(2),
        low=low,
        high=high,
        effect=effect,
    )
    return decision, f"{told.line.removesuffix(' -> ROLL BACK')} -> {decision.upper()}"


def _effect(observations: Observations, name: str, rows: Sequence[Row]) -> float:
    """Design effect of a guardrail's events: by user where the source tells users, else by how intervals vary."""
    epochs = observations.units_of(name)
    return units.effect_of(epochs) if epochs else float(units.dispersion(rows)) if rows else 1.0


def _bunching(observations: Observations) -> float:
    """Design effect of errors for the service level: by user, and by how intervals vary where requests have no key."""
    rows = [(o.canary.errors, o.canary.requests, o.stable.errors, o.stable.requests) for o in observations.intervals]
    varied = float(units.burstiness(rows)) if rows else 1.0
    epochs = observations.units_of("errors")
    if not epochs:
        return varied
    events, squared = sum(one.events for one in epochs), sum(one.events_squared**0.5 for one in epochs) ** 2
    return max(varied, float(units.bunching(events, squared, units.crowding(epochs))))


def _events(place: str, tally: Tally) -> tuple[int | None, int]:
    """Events, and the requests that they are events of."""
    if place == "errors":
        return tally.errors, tally.requests
    return tally.over().get(place), tally.measured


def _by_signs(
    rail: Guardrail, intervals: Sequence[Interval], here: Sequence[Interval], step: PlannedStep, limit: float
) -> Guard:
    if rail.name not in quantiles.FEWEST:
        return Guard(name=rail.name, limit=limit, needed=1)
    slower, compared = quantiles.signs(intervals, rail.name)
    return Guard(
        name=rail.name,
        evidence=quantiles.sign_evidence(slower, compared),
        limit=limit,
        holds=rail.on_violation == "hold",
        seen=quantiles.signs(here, rail.name)[1],
        needed=quantiles.NEEDED if step.percent else 0,
        rule=f"the candidate was over {100 * (quantiles.MARGIN - 1):.0f} % slower in {slower} of {compared} intervals",
    )


def _answers(copies: ShadowTally, trial: ShadowTrial, limit: float) -> Guard:
    return Guard(
        name="shadow answers",
        evidence=slo.above(copies.wrong, copies.seen, trial.max_differing),
        limit=limit,
        seen=copies.seen,
        needed=trial.min_requests,
        rule=f"{copies.differing} of {copies.compared} differ, {copies.failed} failed, "
        f"{100 * trial.max_differing:g} % may",
    )


def _not_alike(copies: ShadowTally, trial: ShadowTrial) -> str:
    if bool(slo.certified(copies.wrong, copies.seen, trial.max_differing)):
        return ""
    shown = slo.upper_bound(copies.wrong, copies.seen)
    return (
        f"{copies.wrong} of {copies.seen} answers differ or failed, which shows a share below {100 * shown:.3g} %, "
        f"not below {100 * trial.max_differing:g} %"
    )


def _few(observations: Observations, here: Sequence[Interval], policy: RolloutPolicy) -> str:
    """Why a step may not be left: what a source that tells no users counted in one interval may be of one user."""
    if observations.units or not policy.guardrails or len(here) >= units.INTERVALS:
        return ""
    return f"{len(here)} of {units.INTERVALS} intervals, which a source takes that does not count by user"


def _broken(here: Sequence[Interval], canary: Tally, stable: Tally, effect: float) -> str:
    """The last interval, and the step as a whole."""
    if share.refusing((canary.refused, canary.requests), (stable.refused, stable.requests)):
        return (
            f"refusals: the candidate refused {canary.refused} of {canary.requests} requests, "
            f"the stable version {stable.refused} of {stable.requests} -> ROLL BACK"
        )
    for mine, theirs in (*((one.canary, one.stable) for one in here[-1:]), (canary, stable)):
        if share.grossly_failing((mine.failed, mine.requests), (theirs.failed, theirs.requests), effect):
            return (
                f"gross failure: {mine.failed} of the candidate's {mine.requests} requests failed, "
                f"{theirs.failed} of the stable version's {theirs.requests} -> ROLL BACK"
            )
    return ""


def _total(tallies: Sequence[Tally]) -> Tally:
    return Tally(
        requests=sum(one.requests for one in tallies),
        errors=sum(one.errors for one in tallies),
        refused=sum(one.refused for one in tallies),
        outcomes=sum(one.outcomes for one in tallies),
        successes=sum(one.successes for one in tallies),
    )


def _copies(here: Sequence[Interval]) -> ShadowTally:
    return ShadowTally(
        compared=sum(one.shadow.compared for one in here),
        differing=sum(one.shadow.differing for one in here),
        failed=sum(one.shadow.failed for one in here),
    )
