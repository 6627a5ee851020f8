"""From the counts of a rollout to what they say, and from there to the next action.

What a policy will take, told before any rollout begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.rollout import (
    Action,
    AnalysisResult,
    GuardrailResult,
    OperatorCommand,
    Roles,
    Wait,
    choose_next_action,
)
from onnx_ops.domain.rollout_observations import ObservationInterval, Observations, RequestCounts, ShadowCounts
from onnx_ops.domain.rollout_policy import Guardrail, PlannedStep, RolloutPolicy, ServiceLevel, ShadowTrial, SplitTest
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.evidence import compute_clean_requests
from onnx_ops.statistics.rollout.guardrails import evaluate_cold_start

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
    word: OperatorCommand | None,
    now: float,
) -> Action | Wait:
    """`choose_next_action` by what was observed; the arguments are those of `choose_next_action`.

    Observations of another candidate or step than `roles` says count for nothing.
    """
    judged = None
    if observations is not None and roles.candidate is not None and policy.judged:
        ours = observations.candidate == roles.candidate.manifest and observations.step == roles.step
        judged = judge(observations, policy) if ours else None
    return choose_next_action(
        wanted=wanted,
        actual=actual,
        roles=roles,
        policy=policy,
        target=target,
        word=word,
        now=now,
        judged=judged,
    )


def judge(observations: Observations, policy: RolloutPolicy) -> AnalysisResult:
    """What the counts say about the present step. Guardrails look at the whole rollout, all else at the step."""
    planned = policy.planned()
    step = planned[min(observations.step, len(planned) - 1)]
    here = [one for one in observations.intervals if one.step == observations.step]
    canary, stable = _total([one.canary for one in here]), _total([one.stable for one in here])
    rails = [one for one in policy.guardrails if one is not policy.cold]
    guards = [evaluate_guardrail(one, observations, here, step, policy) for one in rails]
    requests, short, mismatch = canary.requests, "", ""
    if step.kind == "cold" and policy.cold is not None:
        guards.append(evaluate_cold_start(policy.cold, *observations.cold_s, compute_firing_limit(policy)))
    elif step.kind == "shadow" and policy.shadow is not None:
        copies = _copies(here)
        guards.append(_answers(copies, policy.shadow, compute_firing_limit(policy)))
        requests, short = copies.seen, _not_alike(copies, policy.shadow)
    else:
        short = explain_missing_evidence(canary, policy.slo, _bunching(observations)) or _few(
            observations, here, policy
        )
        crowded = design_effect.compute_request_effect(observations.units_of("errors"))
        mismatch = explain_traffic_mismatch(canary.requests, canary.requests + stable.requests, step, crowded)
    outcome: ev.SplitDecision = "undecided"
    line = ""
    if step.kind == "ab" and policy.ab is not None:
        outcome, line = judge_split_test(observations, here, policy.ab)
    return AnalysisResult(
        began=observations.began,
        requests=requests,
        guards=tuple(guards),
        short=short,
        mismatch=mismatch,
        broken=_broken(here, canary, stable, _effect(observations, "errors", ())),
        outcome=outcome,
        outcome_line=line,
    )


def compute_firing_limit(policy: RolloutPolicy) -> float:
    """log10 of the evidence at which any of the policy's guardrails fires."""
    return ev.compute_evidence_limit(len(policy.guardrails) + (policy.shadow is not None))


def evaluate_guardrail(
    rail: Guardrail,
    observations: Observations,
    here: Sequence[ObservationInterval],
    step: PlannedStep,
    policy: RolloutPolicy,
) -> GuardrailResult:
    """One guardrail over all intervals of the rollout; `here` are those of the present step."""
    limit, intervals = compute_firing_limit(policy), observations.intervals
    counted = {place: count_events(place, intervals) for place in rail.places}
    if not any(counted.values()) and any(one.canary_latency for one in intervals):
        return _by_signs(rail, intervals, here, step, limit)
    needed = step.minimum if step.percent else 0
    if not all(counted.values()):
        return GuardrailResult(name=rail.name, limit=limit, needed=needed, holds=rail.on_violation == "hold")
    effects = {place: _effect(observations, place, rows) for place, rows in counted.items()}
    found = {place: ev.measure_evidence(rows, rail.tolerated(place), effects[place]) for place, rows in counted.items()}
    worst = max(found, key=lambda place: found[place])
    rows, alone = counted[worst], len(found) == 1
    # Bounds of the place that was chosen for being the worst would not hold.
    low, high = ev.bound_odds_ratio(rows, effects[worst]) if alone else (None, None)
    seen = sum(row[1] for row in count_events(worst, here) if row[3])
    return GuardrailResult(
        name=rail.name,
        place="" if alone else worst.partition("@")[2],
        canary=(sum(row[0] for row in rows), sum(row[1] for row in rows)),
        stable=(sum(row[2] for row in rows), sum(row[3] for row in rows)),
        evidence=float(ev.average_evidence(list(found.values()))),
        limit=limit,
        low=low,
        high=high,
        effect=effects[worst],
        holds=rail.on_violation == "hold",
        seen=seen,
        needed=needed,
    )


def count_events(place: str, intervals: Sequence[ObservationInterval]) -> list[Row]:
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


def trace_guardrails(observations: Observations, policy: RolloutPolicy) -> tuple[EvidencePath, ...]:
    """The evidence after each interval, for a plot."""
    found = []
    for rail in policy.guardrails:
        counted = {place: count_events(place, observations.intervals) for place in rail.places}
        rows = counted[rail.places[0]]
        sums = [sum(row[1] for row in rows[: index + 1]) for index in range(len(rows))]
        lines = [
            ev.trace_evidence(rows, rail.tolerated(place), _effect(observations, place, rows))
            for place, rows in counted.items()
        ]
        values = ev.average_evidence(np.stack(lines, axis=-1))
        limit = compute_firing_limit(policy)
        path = EvidencePath(name=rail.name, requests=tuple(sums), log10_evidence=tuple(values.tolist()), limit=limit)
        found.append(path)
    return tuple(found)


def explain_missing_evidence(canary: RequestCounts, promised: ServiceLevel | None, effect: float = 1.0) -> str:
    """What is still to be shown of the error rate; empty if nothing is."""
    if promised is None or bool(ev.is_rate_certified(canary.errors, canary.requests, promised.error_rate, effect)):
        return ""
    shown = ev.bound_error_rate(canary.errors, canary.requests, effect)
    return (
        f"{canary.errors} of {canary.requests} requests failed, which shows a rate below {100 * shown:.3g} %, "
        f"not below {100 * promised.error_rate:g} %"
    )


def explain_traffic_mismatch(canary: int, requests: int, step: PlannedStep, effect: float = 1.0) -> str:
    """Why the split of requests cannot be what was asked for; empty if it can."""
    if not 0 < step.percent < 100:
        return ""
    if float(guardrails.compute_mismatch_evidence(canary, requests, step.percent, effect)) < guardrails.MISMATCH_LIMIT:
        return ""
    return f"{canary} of {requests} requests ({100 * canary / requests:.1f} %) went to the candidate"


def judge_split_test(
    observations: Observations, here: Sequence[ObservationInterval], test: SplitTest
) -> tuple[ev.SplitDecision, str]:
    """The A/B test's decision and its line for a person."""
    mine, theirs = _total([one.canary for one in here]), _total([one.stable for one in here])
    if not mine.outcomes or not theirs.outcomes:
        return "undecided", ""
    rows = [(o.canary.successes, o.canary.outcomes, o.stable.successes, o.stable.outcomes) for o in here]
    effect = _effect(observations, "outcomes", rows)
    decision, higher, lower = ev.run_split_test(rows, higher_is_better=test.goal == "higher", effect=effect)
    low, high = ev.bound_odds_ratio(rows, effect)
    told = GuardrailResult(
        name=test.metric,
        canary=(mine.successes, mine.outcomes),
        stable=(theirs.successes, theirs.outcomes),
        evidence=max(higher, lower),
        limit=ev.compute_evidence_limit(2),
        low=low,
        high=high,
        effect=effect,
    )
    return decision, f"{told.line.removesuffix(' -> ROLL BACK')} -> {decision.upper()}"


def _effect(observations: Observations, name: str, rows: Sequence[Row]) -> float:
    """Design effect of a guardrail's events: by user where the source tells users, else by how intervals vary."""
    epochs = observations.units_of(name)
    return (
        design_effect.bound_design_effect(epochs)
        if epochs
        else float(design_effect.estimate_dispersion(rows))
        if rows
        else 1.0
    )


def _bunching(observations: Observations) -> float:
    """Design effect of errors for the service level: by user, and by how intervals vary where requests have no key."""
    rows = [(o.canary.errors, o.canary.requests, o.stable.errors, o.stable.requests) for o in observations.intervals]
    varied = float(design_effect.estimate_burstiness(rows)) if rows else 1.0
    epochs = observations.units_of("errors")
    if not epochs:
        return varied
    events, squared = sum(one.events for one in epochs), sum(one.events_squared**0.5 for one in epochs) ** 2
    return max(
        varied, float(design_effect.compute_error_effect(events, squared, design_effect.compute_request_effect(epochs)))
    )


def _events(place: str, tally: RequestCounts) -> tuple[int | None, int]:
    """Events, and the requests that they are events of."""
    if place == "errors":
        return tally.errors, tally.requests
    return tally.over().get(place), tally.measured


def _by_signs(
    rail: Guardrail,
    intervals: Sequence[ObservationInterval],
    here: Sequence[ObservationInterval],
    step: PlannedStep,
    limit: float,
) -> GuardrailResult:
    if rail.name not in guardrails.MIN_SIGN_REQUESTS:
        return GuardrailResult(name=rail.name, limit=limit, needed=1)
    slower, compared = guardrails.count_slower_intervals(intervals, rail.name)
    return GuardrailResult(
        name=rail.name,
        evidence=guardrails.compute_sign_evidence(slower, compared),
        limit=limit,
        holds=rail.on_violation == "hold",
        seen=guardrails.count_slower_intervals(here, rail.name)[1],
        needed=guardrails.MIN_SIGN_INTERVALS if step.percent else 0,
        rule=f"the candidate was over {100 * (guardrails.SLOWER_MARGIN - 1):.0f} % slower "
        f"in {slower} of {compared} intervals",
    )


def _answers(copies: ShadowCounts, trial: ShadowTrial, limit: float) -> GuardrailResult:
    return GuardrailResult(
        name="shadow answers",
        evidence=ev.compute_evidence_above(copies.wrong, copies.seen, trial.max_differing),
        limit=limit,
        seen=copies.seen,
        needed=trial.min_requests,
        rule=f"{copies.differing} of {copies.compared} differ, {copies.failed} failed, "
        f"{100 * trial.max_differing:g} % may",
    )


def _not_alike(copies: ShadowCounts, trial: ShadowTrial) -> str:
    if bool(ev.is_rate_certified(copies.wrong, copies.seen, trial.max_differing)):
        return ""
    shown = ev.bound_error_rate(copies.wrong, copies.seen)
    return (
        f"{copies.wrong} of {copies.seen} answers differ or failed, which shows a share below {100 * shown:.3g} %, "
        f"not below {100 * trial.max_differing:g} %"
    )


def _few(observations: Observations, here: Sequence[ObservationInterval], policy: RolloutPolicy) -> str:
    """Why a step may not be left: what a source that tells no users counted in one interval may be of one user."""
    if observations.units or not policy.guardrails or len(here) >= design_effect.MIN_INTERVALS:
        return ""
    return f"{len(here)} of {design_effect.MIN_INTERVALS} intervals, which a source takes that does not count by user"


def _broken(here: Sequence[ObservationInterval], canary: RequestCounts, stable: RequestCounts, effect: float) -> str:
    """The last interval, and the step as a whole."""
    if guardrails.is_refusing((canary.refused, canary.requests), (stable.refused, stable.requests)):
        return (
            f"refusals: the candidate refused {canary.refused} of {canary.requests} requests, "
            f"the stable version {stable.refused} of {stable.requests} -> ROLL BACK"
        )
    for mine, theirs in (*((one.canary, one.stable) for one in here[-1:]), (canary, stable)):
        if guardrails.is_grossly_failing((mine.failed, mine.requests), (theirs.failed, theirs.requests), effect):
            return (
                f"gross failure: {mine.failed} of the candidate's {mine.requests} requests failed, "
                f"{theirs.failed} of the stable version's {theirs.requests} -> ROLL BACK"
            )
    return ""


def _total(tallies: Sequence[RequestCounts]) -> RequestCounts:
    return RequestCounts(
        requests=sum(one.requests for one in tallies),
        errors=sum(one.errors for one in tallies),
        refused=sum(one.refused for one in tallies),
        outcomes=sum(one.outcomes for one in tallies),
        successes=sum(one.successes for one in tallies),
    )


def _copies(here: Sequence[ObservationInterval]) -> ShadowCounts:
    return ShadowCounts(
        compared=sum(one.shadow.compared for one in here),
        differing=sum(one.shadow.differing for one in here),
        failed=sum(one.shadow.failed for one in here),
    )


def describe_policy(policy: RolloutPolicy, capabilities: frozenset[str]) -> Iterator[str]:
    """What a person should know of a policy that is right, one line each."""
    if policy.shadow:
        rate = policy.shadow.max_differing
        needed = max(policy.shadow.min_requests, compute_clean_requests(rate))
        yield f"shadow: to show that less than {100 * rate:g}% of answers differ takes {needed:,} equal ones"
    for step in policy.planned():
        if policy.slo and step.kind in ("canary", "ab"):
            rate = policy.slo.error_rate
            clean = compute_clean_requests(rate)
            in_all = math.ceil(100 * max(clean, step.minimum) / step.percent)
            yield (
                f"step {step.percent}%: to show an error rate below {100 * rate:g}% takes {clean:,} clean requests "
                f"to the candidate; with min_requests {step.minimum:,} that is about {in_all:,} in all"
            )
    if any(rail.name != "errors" for rail in policy.guardrails) and "exceedances" not in capabilities:
        yield "latency is judged by percentiles: the provider does not count requests over a threshold"
