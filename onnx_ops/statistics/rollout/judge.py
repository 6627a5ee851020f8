"""Verdicts on a rollout, from the counts of its metrics source."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnx_ops.domain.rollout import AnalysisResult, GuardrailResult, Roles
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    EvidencePath,
    GenerationUnits,
    ObservationInterval,
    Observations,
    RequestCounts,
    ShadowCounts,
    UnitCounts,
)
from onnx_ops.domain.rollout_policy import Guardrail, PlannedStep, RolloutPolicy, ShadowTrial
from onnx_ops.statistics.rollout import design_effect, guardrails
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.guardrails import (
    BREAKER_LIMIT,
    BREAKER_SHARE,
    BREAKER_TIMES,
    REFUSED_SHARE,
)
from onnx_ops.statistics.rollout.outliers import find_outliers
from onnx_ops.statistics.rollout.unit_evidence import measure_unit_evidence, to_array

Row = tuple[int, int, int, int]
MAX_POINTS = 60
"""Maximum number of evenly spaced points of a plot; the last observation is added."""


def analyze(
    observations: Observations | None, roles: Roles, policy: RolloutPolicy
) -> AnalysisResult | None:
    """Judge the counts of the rollout in progress.

    Return None if the policy has no analysis, or if the candidate or the counts are missing. Also
    return None if the counts are those of another candidate or step.
    """
    if observations is None or roles.candidate is None or not policy.is_analyzed:
        return None
    ours = observations.candidate == roles.candidate.manifest and observations.step == roles.step
    return judge(observations, policy) if ours else None


def judge(observations: Observations, policy: RolloutPolicy) -> AnalysisResult:
    """Judge the counts of the present step, and guardrails over the whole rollout."""
    planned = policy.planned()
    step = planned[min(observations.step, len(planned) - 1)]
    here = [each for each in observations.intervals if each.step == observations.step]
    canary, stable = _sum_versions(here)
    guards = [
        evaluate_guardrail(rail, observations, here, step, policy)
        for rail in _list_traffic_rails(policy)
    ]
    requests, short, mismatch = canary.requests, "", ""
    if step.kind == "cold" and policy.cold is not None:
        guards.append(
            guardrails.evaluate_cold_start(
                policy.cold, *observations.cold_s, compute_firing_limit(policy)
            )
        )
    elif step.kind == "shadow" and policy.shadow is not None:
        copies = _sum_copies(here)
        guards.append(_evaluate_shadow(copies, policy.shadow, compute_firing_limit(policy)))
        requests = copies.seen
        share = policy.shadow.max_differing
        short = _explain_uncertified(
            copies.wrong, copies.seen, share, "answers differ or failed", "share"
        )
    else:
        short = _find_shortage(observations, here, step, policy)
        mismatch = _find_mismatch(
            observations, canary.requests, canary.requests + stable.requests, step
        )
    if (ends := guardrails.evaluate_ends(*observations.split_uptimes())) is not None:
        guards.insert(0, ends)
    outcome: ev.SplitDecision = "undecided"
    line = ""
    if step.kind == "ab_test":
        outcome, line = judge_split_test(observations, here, policy)
    return AnalysisResult(
        started_at=observations.started_at,
        requests=requests,
        guardrails=tuple(guards),
        unmet_target=short,
        split_mismatch=mismatch,
        gross_failure=_describe_failure(observations, here),
        ab_outcome=outcome,
        ab_summary=line,
        outliers=find_outliers(observations.counts),
    )


def _list_traffic_rails(policy: RolloutPolicy) -> list[Guardrail]:
    """Return the guardrails on traffic.

    A cold start is measured before any traffic.
    """
    return [rail for rail in policy.guardrails if rail is not policy.cold]


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
    """Evaluate one guardrail over the whole rollout.

    `here` contains the intervals of the present step.
    """
    limit, intervals = compute_firing_limit(policy), observations.intervals
    counted = {place: count_events(place, intervals) for place in rail.places}
    if not any(counted.values()) and any(each.canary_latency for each in intervals):
        return _evaluate_percentiles(rail, observations, here, step, limit)
    result = GuardrailResult(
        name=rail.name,
        limit=limit,
        required=step.minimum if step.percent else 0,
        holds=rail.on_violation == "hold",
    )
    return (
        _add_evidence(result, rail, counted, observations, here)
        if all(counted.values())
        else result
    )


def _add_evidence(
    result: GuardrailResult,
    rail: Guardrail,
    counted: Mapping[str, Sequence[Row]],
    observations: Observations,
    here: Sequence[ObservationInterval],
) -> GuardrailResult:
    """Return the result with its places' mean evidence and the worst place's counts."""
    measured = {
        place: _measure_place(place, rail.tolerated(place), observations) for place in rail.places
    }
    worst = max(measured, key=lambda place: measured[place][0])
    rows, effect = counted[worst], measured[worst][1]
    mine, of_mine, theirs, of_theirs = (sum(column) for column in zip(*rows, strict=True))
    result = replace(
        result,
        canary=(mine, of_mine),
        stable=(theirs, of_theirs),
        units=_count_bad_units(observations, worst),
        evidence=float(ev.average_evidence([evidence for evidence, _ in measured.values()])),
        design_effect=effect,
        compared=sum(row[1] for row in count_events(worst, here) if row[3]),
    )
    # The percentile was chosen because it is the worst, so bounds for it would be too narrow.
    if len(measured) > 1:
        return replace(result, percentile=worst.partition("@")[2])
    if observations.drawn:  # Counts by unit have no odds ratio.
        return result
    low, high = ev.bound_odds_ratio(rows, effect)
    return replace(result, low=low, high=high)


def count_events(place: str, intervals: Sequence[ObservationInterval]) -> list[Row]:
    """Return events and requests of candidate and stable version, by interval.

    `place` is one of `Guardrail.places`: `errors`, or requests above a threshold of latency.
    Intervals without counts of these events are left out.
    """
    rows = []
    for interval in intervals:
        mine, of_mine = _get_events(place, interval.canary)
        theirs, of_theirs = _get_events(place, interval.stable)
        if mine is not None and theirs is not None:
            rows.append((mine, of_mine, theirs, of_theirs))
    return rows


def trace_guardrails(
    history: Sequence[Observations], policy: RolloutPolicy
) -> tuple[EvidencePath, ...]:
    """Return each guardrail's evidence after successive observations, oldest first.

    At most `MAX_POINTS` evenly spaced observations and the last one are evaluated, for a plot.
    Guardrails on other values than counts, such as a cold start, have no points.
    """
    step, last = max(1, math.ceil(len(history) / MAX_POINTS)), len(history) - 1
    points = [
        judge(each, policy)
        for index, each in enumerate(history)
        if index == last or index % step == 0
    ]
    limit = compute_firing_limit(policy)
    return tuple(_trace_guardrail(rail.name, points, limit) for rail in policy.guardrails)


def _trace_guardrail(name: str, points: Sequence[AnalysisResult], limit: float) -> EvidencePath:
    guards = [
        guard
        for point in points
        for guard in point.guardrails
        if guard.name == name and not guard.rule
    ]
    return EvidencePath(
        name=name,
        requests=tuple(guard.canary[1] for guard in guards),
        log10_evidence=tuple(guard.evidence for guard in guards),
        limit=limit,
    )


def _measure_place(place: str, tolerated: float, observations: Observations) -> tuple[float, float]:
    """Return log10 of the evidence of the whole rollout, and a design effect.

    The design effect is that of the counts without units. The evidence of units is multiplied by
    that of a later A/B test, which is an e-process given the earlier evidence.
    """
    evidence, effect = measure_unit_evidence(observations.drawn, place, tolerated), 1.0
    steps = {split.step for split in observations.drawn}
    if rows := count_events(
        place, [each for each in observations.intervals if each.step not in steps]
    ):
        effect = _compute_effect(observations, place, rows)
        evidence += ev.measure_evidence(rows, tolerated, effect)
    return evidence, effect


def _is_drawn(observations: Observations) -> bool:
    """Return whether the present step has units that each epoch assigns anew."""
    return any(split.step == observations.step for split in observations.drawn)


def _count_bad_units(
    observations: Observations, place: str
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return for each version the number of units with any event, and of all units.

    Return None if the source counts no units.
    """
    if not observations.drawn:
        return None
    counts = _sum_units(observations.drawn, place).astype(int)
    (good, mine), (fine, theirs) = ((int(row[0]), int(row.sum())) for row in counts)
    return (mine - good, mine), (theirs - fine, theirs)


def _sum_units(splits: Sequence[GenerationUnits], place: str) -> ev.Array:
    return np.asarray(
        sum(
            (to_array(split.units.get(place, UnitCounts())) for split in splits),
            to_array(UnitCounts()),
        )
    )


def _evaluate_percentiles(
    rail: Guardrail,
    observations: Observations,
    here: Sequence[ObservationInterval],
    step: PlannedStep,
    limit: float,
) -> GuardrailResult:
    """Evaluate a guardrail for a source that only reports percentiles.

    A guardrail that is not in `MIN_SIGN_REQUESTS` stays unmeasured.
    """
    if rail.name not in guardrails.MIN_SIGN_REQUESTS:
        return GuardrailResult(name=rail.name, limit=limit, required=1)
    slower, compared = guardrails.count_slower_intervals(observations.intervals, rail.name)
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


def _evaluate_shadow(copies: ShadowCounts, trial: ShadowTrial, limit: float) -> GuardrailResult:
    share = trial.max_differing
    return GuardrailResult(
        name="shadow answers",
        evidence=ev.compute_evidence_above(copies.wrong, copies.seen, share),
        limit=limit,
        compared=copies.seen,
        required=trial.min_requests,
        rule=f"{copies.differing} of {copies.compared} answers differ, "
        f"{copies.failed} copies failed, at most {100 * share:g} % are tolerated",
    )


def _find_shortage(
    observations: Observations,
    here: Sequence[ObservationInterval],
    step: PlannedStep,
    policy: RolloutPolicy,
) -> str:
    """Return which traffic the step still lacks, apart from guardrails.

    The text is empty if nothing is missing.
    """
    if policy.slo is not None and (short := _explain_service_level(here, policy.slo.error_rate)):
        return short
    if _is_drawn(observations):
        return _find_few_units(observations, step, policy)
    if observations.counts:
        users = _count_users(observations, "feedback" if step.kind == "ab_test" else "errors")
        return "" if users >= policy.min_units else _explain_few_users(users, policy)
    fewest = 0 if observations.is_independent else design_effect.MIN_INTERVALS
    if policy.guardrails and len(here) < fewest:
        # Without units, all events of an interval may come from the same user.
        return (
            f"{len(here)} of the {fewest} intervals that a source needs if it does not count by "
            "user"
        )
    return ""


def _find_few_units(observations: Observations, step: PlannedStep, policy: RolloutPolicy) -> str:
    """Return a text on the place with the fewest units, if they are too few.

    Otherwise, the text is empty.
    """
    places = ("errors", *(rail.places[0] for rail in _list_traffic_rails(policy)))
    counted = {place: _count_units(observations, step, place)[0] for place in places}
    place = min(counted, key=lambda place: counted[place])
    if counted[place] < policy.min_units:
        return (
            f"{place} has {counted[place]} of {policy.min_units} independent units of the "
            "candidate (a user in an epoch, or a request without a key)"
        )
    return ""


def _count_units(observations: Observations, step: PlannedStep, place: str) -> tuple[int, int]:
    """Return the candidate's number of units at a place, and that of both versions.

    Only units in closed epochs of the present step are counted.
    """
    splits = [
        s for s in observations.drawn if (s.step, s.percent) == (observations.step, step.percent)
    ]
    counts = _sum_units(splits, place)
    return int(counts[0].sum()), int(counts.sum())


def _count_users(observations: Observations, place: str) -> float:
    """Return the effective number of users of the version that has fewer of them.

    The result is 0 if a version has no results.
    """
    blocks = observations.sum_blocks(place)
    return min(map(design_effect.count_effective_users, blocks)) if len(blocks) > 1 else 0.0


def _explain_few_users(users: float, policy: RolloutPolicy) -> str:
    if not users:
        return (
            f"at least one version has no results yet; results of {policy.min_units} users of "
            "each version are needed"
        )
    missing = math.ceil(policy.min_units - users)
    verb = "is" if missing == 1 else "are"
    return (
        f"the results of each version come from at least {math.floor(users)} equally active users, "
        f"and {policy.min_units} are needed: {missing} {verb} missing"
    )


def _explain_service_level(here: Sequence[ObservationInterval], rate: float) -> str:
    """Return why the service level is not shown yet; empty if it is shown.

    The text states the time that the intervals cover.
    """
    rows = [row for row in count_events("errors", here) if row[1]]
    if not rows:
        return "no request to the candidate was counted, so its service level is still unknown"
    errors, requests = sum(row[0] for row in rows), sum(row[1] for row in rows)
    effect = float(design_effect.estimate_error_effect(rows))
    intervals = "1 interval" if len(rows) == 1 else f"{len(rows)} intervals"
    minutes = sum(each.seconds for each in here if each.canary.requests) / 60
    covered = f"requests in {intervals} ({minutes:.0f} min) failed"
    missing = _explain_uncertified(errors, requests, rate, covered, "rate", effect)
    fewest = _compute_fewest_intervals(rate)
    return (
        f"{missing}; at least {fewest} intervals of a minute are needed"
        if missing and len(rows) < fewest
        else missing
    )


def _compute_fewest_intervals(rate: float) -> int:
    """Return the minimum number of intervals that can show a rate of errors.

    The number assumes that no request fails.
    """
    return math.ceil(ev.compute_clean_requests(rate) * design_effect.OUTAGE_SHARE)


def _explain_uncertified(
    bad: int, total: int, share: float, what: str, noun: str, effect: float = 1.0
) -> str:
    """Return why a share of failures is not shown to be low; empty if it is shown."""
    if bool(ev.is_rate_certified(bad, total, share, effect)):
        return ""
    shown = ev.bound_error_rate(bad, total, effect)
    return (
        f"{bad} of {total} {what}, which shows a {noun} below {100 * shown:.3g} %, "
        f"not below {100 * share:g} %"
    )


def _find_mismatch(
    observations: Observations, canary: int, requests: int, step: PlannedStep
) -> str:
    """Return evidence of a wrong traffic split as a text; empty without evidence."""
    if not 0 < step.percent < 100:
        return ""
    noun, effect = "requests", 1.0
    if _is_drawn(observations):
        noun, (canary, requests) = "units", _count_units(observations, step, "errors")
    elif blocks := observations.sum_blocks("errors"):
        effect = design_effect.compute_split_effect(blocks)
    if (
        float(guardrails.compute_mismatch_evidence(canary, requests, step.percent, effect))
        < guardrails.MISMATCH_LIMIT
    ):
        return ""
    return f"{canary} of {requests} {noun} ({100 * canary / requests:.1f} %) went to the candidate"


def judge_split_test(
    observations: Observations, here: Sequence[ObservationInterval], policy: RolloutPolicy
) -> tuple[ev.SplitDecision, str]:
    """Return the decision of the A/B test, and its description in one line."""
    test = policy.ab_test
    canary, stable = _sum_versions(here)
    if test is None or not canary.feedback or not stable.feedback:
        return "undecided", ""
    rows = [
        (o.canary.successes, o.canary.feedback, o.stable.successes, o.stable.feedback) for o in here
    ]
    effect = _compute_effect(observations, "feedback", rows)
    decision, higher, lower = ev.run_split_test(
        rows, higher_is_better=test.goal == "higher", effect=effect
    )
    low, high = ev.bound_odds_ratio(rows, effect)
    guard = GuardrailResult(
        name="feedback",
        canary=(canary.successes, canary.feedback),
        stable=(stable.successes, stable.feedback),
        evidence=max(higher, lower),
        limit=ev.compute_evidence_limit(2),
        low=low,
        high=high,
        design_effect=effect,
    )
    line = guard.summary.removesuffix(" -> ROLL BACK")
    if observations.counts and (users := _count_users(observations, "feedback")) < policy.min_units:
        return "undecided", f"{line}; {_explain_few_users(users, policy)} -> UNDECIDED"
    return decision, f"{line} -> {decision.upper()}"


def _compute_effect(observations: Observations, place: str, rows: Sequence[Row]) -> float:
    """Return the design effect of events.

    It is computed from blocks of users if the source counts them, otherwise from intervals. It is 1
    if each request was assigned independently.
    """
    if observations.is_independent:
        return 1.0
    if blocks := observations.sum_blocks(place):
        return design_effect.compute_block_effect(blocks)
    return float(design_effect.estimate_dispersion(rows)) if rows else 1.0


def _get_events(place: str, tally: RequestCounts) -> tuple[int | None, int]:
    """Return the number of events at a place, and of the requests that include them."""
    if place == "errors":
        return tally.errors, tally.requests
    return tally.over().get(place), tally.measured


def _describe_failure(observations: Observations, here: Sequence[ObservationInterval]) -> str:
    """Describe a gross failure or refusals of the candidate; empty without either."""
    if _is_drawn(observations):
        return _describe_failing_units(observations)
    canary, stable = _sum_versions(here)
    if guardrails.is_refusing((canary.refused, canary.requests), (stable.refused, stable.requests)):
        return (
            f"refusals: the candidate refused {canary.refused} of {canary.requests} requests, "
            f"the stable version {stable.refused} of {stable.requests} -> ROLL BACK"
        )
    blocks = observations.sum_blocks("errors")
    effect = design_effect.compute_block_effect(blocks) if blocks else 1.0
    for mine, theirs in (*((each.canary, each.stable) for each in here[-1:]), (canary, stable)):
        if guardrails.is_grossly_failing(
            (mine.failed, mine.requests), (theirs.failed, theirs.requests), effect
        ):
            return (
                f"gross failure: {mine.failed} of the candidate's {mine.requests} requests failed, "
                f"{theirs.failed} of the stable version's {theirs.requests} -> ROLL BACK"
            )
    return ""


def _describe_failing_units(observations: Observations) -> str:
    """Describe a gross failure or refusals by units; empty without either.

    Units of the epoch in progress are included. Evidence is not valid within an epoch, where the
    same assignments are evaluated again. A higher limit compensates for this.
    """
    latest, splits = observations.open_epoch, list(observations.drawn)
    if latest is not None:
        splits = [
            each.with_epoch(latest) if each.generation == latest.generation else each
            for each in splits
        ]
    here = [each for each in splits if each.step == observations.step]
    for place, share, name, what in (
        ("errors", BREAKER_SHARE, "gross failure", "failed"),
        ("refused", REFUSED_SHARE, "refusals", "were refused"),
    ):
        counts = _sum_units(here, place)
        mine, theirs = counts @ BADNESS_EDGES / np.maximum(1, counts.sum(axis=1))
        if mine < max(share, BREAKER_TIMES * theirs):
            continue
        if measure_unit_evidence(splits, place, 1.0) >= BREAKER_LIMIT:
            return (
                f"{name}: on average about {100 * mine:.0f} % of a unit's requests {what} in "
                f"{counts[0].sum():.0f} units of the candidate, {100 * theirs:.2g} % in "
                f"{counts[1].sum():.0f} of the stable version -> ROLL BACK"
            )
    return ""


def _sum_versions(intervals: Sequence[ObservationInterval]) -> tuple[RequestCounts, RequestCounts]:
    """Return the counts of the candidate and of the stable version over the intervals."""
    canary = functools.reduce(
        RequestCounts.plus, (each.canary for each in intervals), RequestCounts()
    )
    stable = functools.reduce(
        RequestCounts.plus, (each.stable for each in intervals), RequestCounts()
    )
    return canary, stable


def _sum_copies(intervals: Sequence[ObservationInterval]) -> ShadowCounts:
    return functools.reduce(ShadowCounts.plus, (each.shadow for each in intervals), ShadowCounts())


def describe_policy(policy: RolloutPolicy, capabilities: frozenset[str]) -> Iterator[str]:
    """Yield lines on what the steps of a valid policy need, and on judging latency."""
    if policy.shadow:
        rate = policy.shadow.max_differing
        needed = max(policy.shadow.min_requests, ev.compute_clean_requests(rate))
        yield (
            f"shadow: {needed:,} equal answers are needed to show that less than {100 * rate:g}% "
            "of answers differ"
        )
    for step in policy.planned():
        if policy.slo and step.kind in ("canary", "ab_test"):
            rate = policy.slo.error_rate
            clean = ev.compute_clean_requests(rate)
            in_all = math.ceil(100 * max(clean, step.minimum) / step.percent)
            intervals = _compute_fewest_intervals(rate)
            yield (
                f"step {step.percent}%: {clean:,} error-free requests to the candidate in at "
                f"least {intervals:,} intervals of a minute are needed to show an error rate below "
                f"{100 * rate:g}%; with min_requests {step.minimum:,}, these are about "
                f"{in_all:,} requests in total"
            )
    if policy.has_latency and "exceedances" not in capabilities:
        yield (
            "latency is judged by percentiles: the metrics source does not count requests over "
            "a threshold"
        )
