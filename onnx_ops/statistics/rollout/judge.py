"""Evaluate the counts of a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from onnx_ops.domain.rollout import AnalysisResult, GuardrailResult, Roles
from onnx_ops.domain.rollout_observations import (
    EvidencePath,
    ObservationInterval,
    Observations,
    RequestCounts,
    ShadowCounts,
)
from onnx_ops.domain.rollout_policy import Guardrail, PlannedStep, RolloutPolicy, SplitTest
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev

Row = tuple[int, int, int, int]


def analyze(observations: Observations | None, roles: Roles, policy: RolloutPolicy) -> AnalysisResult | None:
    """Judge the counts of the rollout in progress; None where there are none of its candidate and step."""
    if observations is None or roles.candidate is None or not policy.is_analyzed:
        return None
    ours = observations.candidate == roles.candidate.manifest and observations.step == roles.step
    return judge(observations, policy) if ours else None


def judge(observations: Observations, policy: RolloutPolicy) -> AnalysisResult:
    """Judge the counts of the present step. Guardrails cover the whole rollout."""
    planned = policy.planned()
    step = planned[min(observations.step, len(planned) - 1)]
    here = [each for each in observations.intervals if each.step == observations.step]
    canary, stable = _sum_tallies([each.canary for each in here]), _sum_tallies([each.stable for each in here])
    rails = [rail for rail in policy.guardrails if rail is not policy.cold]
    guards = [evaluate_guardrail(rail, observations, here, step, policy) for rail in rails]
    requests, short, mismatch = canary.requests, "", ""
    if step.kind == "cold" and policy.cold is not None:
        guards.append(guardrails.evaluate_cold_start(policy.cold, *observations.cold_s, compute_firing_limit(policy)))
    elif step.kind == "shadow" and policy.shadow is not None:
        copies = ShadowCounts(
            compared=sum(each.shadow.compared for each in here),
            differing=sum(each.shadow.differing for each in here),
            failed=sum(each.shadow.failed for each in here),
        )
        share = policy.shadow.max_differing
        rule = f"{copies.differing} of {copies.compared} differ, {copies.failed} failed, {100 * share:g} % may"
        guards.append(
            GuardrailResult(
                name="shadow answers",
                evidence=ev.compute_evidence_above(copies.wrong, copies.seen, share),
                limit=compute_firing_limit(policy),
                compared=copies.seen,
                required=policy.shadow.min_requests,
                rule=rule,
            )
        )
        requests = copies.seen
        short = _explain_uncertified(copies.wrong, copies.seen, share, "answers differ or failed", "share")
    else:
        if policy.slo is not None:
            effect = _compute_error_effect(observations)
            rate = policy.slo.error_rate
            short = _explain_uncertified(canary.errors, canary.requests, rate, "requests failed", "rate", effect)
        fewest = design_effect.MIN_INTERVALS
        if not short and not observations.units and policy.guardrails and len(here) < fewest:
            # Without counts by user, one interval's counts may be of one user.
            short = f"{len(here)} of {fewest} intervals, which a source takes that does not count by user"
        crowded = design_effect.compute_request_effect(observations.units_of("errors"))
        mismatch = explain_traffic_mismatch(canary.requests, canary.requests + stable.requests, step, crowded)
    outcome: ev.SplitDecision = "undecided"
    line = ""
    if step.kind == "ab_test" and policy.ab_test is not None:
        outcome, line = judge_split_test(observations, here, policy.ab_test)
    return AnalysisResult(
        started_at=observations.started_at,
        requests=requests,
        guardrails=tuple(guards),
        unmet_target=short,
        split_mismatch=mismatch,
        gross_failure=_describe_failure(here, canary, stable, _compute_effect(observations, "errors", ())),
        ab_outcome=outcome,
        ab_summary=line,
    )


def compute_firing_limit(policy: RolloutPolicy) -> float:
    """Return log10 of the evidence at which any of the policy's guardrails fires."""
    return ev.compute_evidence_limit(len(policy.guardrails) + (policy.shadow is not None))


def evaluate_guardrail(
    rail: Guardrail,
    observations: Observations,
    here: Sequence[ObservationInterval],
    step: PlannedStep,
    policy: RolloutPolicy,
) -> GuardrailResult:
    """Evaluate one guardrail over all intervals; `here` are those of the present step."""
    limit, intervals = compute_firing_limit(policy), observations.intervals
    counted = {place: count_events(place, intervals) for place in rail.places}
    if not any(counted.values()) and any(one.canary_latency for one in intervals):
        if rail.name not in guardrails.MIN_SIGN_REQUESTS:
            return GuardrailResult(name=rail.name, limit=limit, required=1)
        slower, compared = guardrails.count_slower_intervals(intervals, rail.name)
        margin = f"{100 * (guardrails.SLOWER_MARGIN - 1):.0f} %"
        return GuardrailResult(
            name=rail.name,
            evidence=guardrails.compute_sign_evidence(slower, compared),
            limit=limit,
            holds=rail.on_violation == "hold",
            compared=guardrails.count_slower_intervals(here, rail.name)[1],
            required=guardrails.MIN_SIGN_INTERVALS if step.percent else 0,
            rule=f"the candidate was over {margin} slower in {slower} of {compared} intervals",
        )
    needed = step.minimum if step.percent else 0
    if not all(counted.values()):
        return GuardrailResult(name=rail.name, limit=limit, required=needed, holds=rail.on_violation == "hold")
    effects = {place: _compute_effect(observations, place, rows) for place, rows in counted.items()}
    evidences = {
        place: ev.measure_evidence(rows, rail.tolerated(place), effects[place]) for place, rows in counted.items()
    }
    worst = max(evidences, key=lambda place: evidences[place])
    rows, alone = counted[worst], len(evidences) == 1
    # Bounds of the place that was chosen for being the worst would not hold.
    low, high = ev.bound_odds_ratio(rows, effects[worst]) if alone else (None, None)
    requests = sum(row[1] for row in count_events(worst, here) if row[3])
    return GuardrailResult(
        name=rail.name,
        percentile="" if alone else worst.partition("@")[2],
        canary=(sum(row[0] for row in rows), sum(row[1] for row in rows)),
        stable=(sum(row[2] for row in rows), sum(row[3] for row in rows)),
        evidence=float(ev.average_evidence(list(evidences.values()))),
        limit=limit,
        low=low,
        high=high,
        design_effect=effects[worst],
        holds=rail.on_violation == "hold",
        compared=requests,
        required=needed,
    )


def count_events(place: str, intervals: Sequence[ObservationInterval]) -> list[Row]:
    """Return events and requests of both versions by interval; `place` is a guardrail, or one of its places."""
    rows = []
    for interval in intervals:
        mine, of_mine = _get_events(place, interval.canary)
        theirs, of_theirs = _get_events(place, interval.stable)
        if mine is not None and theirs is not None:
            rows.append((mine, of_mine, theirs, of_theirs))
    return rows


def trace_guardrails(observations: Observations, policy: RolloutPolicy) -> tuple[EvidencePath, ...]:
    """Return the evidence after each interval, for a plot."""
    paths = []
    for rail in policy.guardrails:
        counted = {place: count_events(place, observations.intervals) for place in rail.places}
        rows = counted[rail.places[0]]
        sums = [sum(row[1] for row in rows[: index + 1]) for index in range(len(rows))]
        lines = [
            ev.trace_evidence(rows, rail.tolerated(place), _compute_effect(observations, place, rows))
            for place, rows in counted.items()
        ]
        values = ev.average_evidence(np.stack(lines, axis=-1))
        limit = compute_firing_limit(policy)
        path = EvidencePath(name=rail.name, requests=tuple(sums), log10_evidence=tuple(values.tolist()), limit=limit)
        paths.append(path)
    return tuple(paths)


def _explain_uncertified(bad: int, total: int, share: float, what: str, noun: str, effect: float = 1.0) -> str:
    """Return what a share of failures has not shown yet; empty if nothing is missing."""
    if bool(ev.is_rate_certified(bad, total, share, effect)):
        return ""
    shown = ev.bound_error_rate(bad, total, effect)
    return f"{bad} of {total} {what}, which shows a {noun} below {100 * shown:.3g} %, not below {100 * share:g} %"


def explain_traffic_mismatch(canary: int, requests: int, step: PlannedStep, effect: float = 1.0) -> str:
    """Return why the split of requests cannot be the requested one; empty if it can."""
    if not 0 < step.percent < 100:
        return ""
    if float(guardrails.compute_mismatch_evidence(canary, requests, step.percent, effect)) < guardrails.MISMATCH_LIMIT:
        return ""
    return f"{canary} of {requests} requests ({100 * canary / requests:.1f} %) went to the candidate"


def judge_split_test(
    observations: Observations, here: Sequence[ObservationInterval], test: SplitTest
) -> tuple[ev.SplitDecision, str]:
    """Return the decision of the A/B test, and its description in one line."""
    canary, stable = _sum_tallies([each.canary for each in here]), _sum_tallies([each.stable for each in here])
    if not canary.feedback or not stable.feedback:
        return "undecided", ""
    rows = [(o.canary.successes, o.canary.feedback, o.stable.successes, o.stable.feedback) for o in here]
    effect = _compute_effect(observations, "feedback", rows)
    decision, higher, lower = ev.run_split_test(rows, higher_is_better=test.goal == "higher", effect=effect)
    low, high = ev.bound_odds_ratio(rows, effect)
    guard = GuardrailResult(
        name=test.metric,
        canary=(canary.successes, canary.feedback),
        stable=(stable.successes, stable.feedback),
        evidence=max(higher, lower),
        limit=ev.compute_evidence_limit(2),
        low=low,
        high=high,
        design_effect=effect,
    )
    return decision, f"{guard.summary.removesuffix(' -> ROLL BACK')} -> {decision.upper()}"


def _compute_effect(observations: Observations, name: str, rows: Sequence[Row]) -> float:
    """Return the design effect of a guardrail's events: by user if the source counts users, else by interval."""
    if epochs := observations.units_of(name):
        return design_effect.bound_design_effect(epochs)
    return float(design_effect.estimate_dispersion(rows)) if rows else 1.0


def _compute_error_effect(observations: Observations) -> float:
    """Return the design effect of errors for the service level.

    By user, and by the variation of intervals for requests without a key.
    """
    rows = [
        (interval.canary.errors, interval.canary.requests, interval.stable.errors, interval.stable.requests)
        for interval in observations.intervals
    ]
    varied = float(design_effect.estimate_burstiness(rows)) if rows else 1.0
    epochs = observations.units_of("errors")
    if not epochs:
        return varied
    events, squared = sum(epoch.events for epoch in epochs), sum(epoch.events_squared**0.5 for epoch in epochs) ** 2
    crowded = design_effect.compute_request_effect(epochs)
    return max(varied, float(design_effect.compute_error_effect(events, squared, crowded)))


def _get_events(place: str, tally: RequestCounts) -> tuple[int | None, int]:
    """Return events, and the requests that they are counted among."""
    if place == "errors":
        return tally.errors, tally.requests
    return tally.over().get(place), tally.measured


def _describe_failure(
    here: Sequence[ObservationInterval], canary: RequestCounts, stable: RequestCounts, effect: float
) -> str:
    """Describe a gross failure of the last interval or the step as a whole; empty if there is none."""
    if guardrails.is_refusing((canary.refused, canary.requests), (stable.refused, stable.requests)):
        return (
            f"refusals: the candidate refused {canary.refused} of {canary.requests} requests, "
            f"the stable version {stable.refused} of {stable.requests} -> ROLL BACK"
        )
    for mine, theirs in (*((each.canary, each.stable) for each in here[-1:]), (canary, stable)):
        if guardrails.is_grossly_failing((mine.failed, mine.requests), (theirs.failed, theirs.requests), effect):
            return (
                f"gross failure: {mine.failed} of the candidate's {mine.requests} requests failed, "
                f"{theirs.failed} of the stable version's {theirs.requests} -> ROLL BACK"
            )
    return ""


def _sum_tallies(tallies: Sequence[RequestCounts]) -> RequestCounts:
    return RequestCounts(
        requests=sum(one.requests for one in tallies),
        errors=sum(one.errors for one in tallies),
        refused=sum(one.refused for one in tallies),
        feedback=sum(one.feedback for one in tallies),
        successes=sum(one.successes for one in tallies),
    )


def describe_policy(policy: RolloutPolicy, capabilities: frozenset[str]) -> Iterator[str]:
    """Yield the requirements of a valid policy, one line each."""
    if policy.shadow:
        rate = policy.shadow.max_differing
        needed = max(policy.shadow.min_requests, ev.compute_clean_requests(rate))
        yield f"shadow: to show that less than {100 * rate:g}% of answers differ takes {needed:,} equal answers"
    for step in policy.planned():
        if policy.slo and step.kind in ("canary", "ab_test"):
            rate = policy.slo.error_rate
            clean = ev.compute_clean_requests(rate)
            in_all = math.ceil(100 * max(clean, step.minimum) / step.percent)
            yield (
                f"step {step.percent}%: to show an error rate below {100 * rate:g}% takes {clean:,} error-free "
                f"requests to the candidate; with min_requests {step.minimum:,} that is about {in_all:,} in total"
            )
    if any(rail.name != "errors" for rail in policy.guardrails) and "exceedances" not in capabilities:
        yield "latency is judged by percentiles: the provider does not count requests over a threshold"
