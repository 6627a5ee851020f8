"""From counts to actions: rollback, pause, hold, or the end of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    Wait,
    WaitKind,
    build_split_state,
    choose_next_action,
)
from onnx_ops.domain.rollout_observations import (
    GenerationCounts,
    LatencyQuantiles,
    MetricsReading,
    ObservationInterval,
    Observations,
    RequestCounts,
    ShadowCounts,
)
from onnx_ops.domain.rollout_policy import (
    LATENCY_PLACES,
    Guardrail,
    PlannedStep,
    RolloutPolicy,
    ServiceLevel,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.statistics.rollout.guardrails import evaluate_cold_start
from onnx_ops.statistics.rollout.judge import (
    analyze,
    compute_firing_limit,
    count_events,
    judge,
    trace_guardrails,
)
from tests.support.endpoints import fileless_deployment

RAILS = (Guardrail(name="errors"), Guardrail(name="latency_p50"), Guardrail(name="latency_p99"))
CANARY = RolloutPolicy(
    steps=(0.1, 0.5, 1.0), guardrails=RAILS, min_requests=(300,), step_timeout=3600.0
)


STABLE, CANDIDATE = fileless_deployment("v1"), fileless_deployment("v2")


def counted(
    requests: int = 50,
    errors: int = 0,
    over_p50: int | None = 25,
    over_p99: int | None = 0,
    good: int = 0,
) -> RequestCounts:
    feedback = requests if good else 0
    return RequestCounts(
        requests=requests,
        errors=errors,
        over_p50=over_p50,
        over_p99=over_p99,
        feedback=feedback,
        successes=good,
    )


def healthy() -> ObservationInterval:
    """Return an interval of 500 requests at 10 %."""
    return ObservationInterval(step=0, canary=counted(), stable=counted(450, 1, 225, 4))


def seen(*intervals: ObservationInterval, step: int = 0) -> Observations:
    return Observations(
        candidate=CANDIDATE.manifest, step=step, started_at=0.0, intervals=intervals
    )


def test_guardrail_of_latency_counts_timed_requests_and_of_errors_all() -> None:
    one = ObservationInterval(
        step=0,
        canary=replace(counted(), timed=40),
        stable=replace(counted(450, 1, 25, 4), timed=42),
    )
    rows = {rail.name: count_events(rail.name, [one]) for rail in CANARY.guardrails}
    assert rows["errors"] == [(0, 50, 1, 450)]
    assert rows["latency_p50"] == [(25, 40, 25, 42)]
    judged = judge(seen(one), CANARY)
    counts = {
        guard.name: (guard.canary, guard.stable, guard.compared) for guard in judged.guardrails
    }
    assert counts["latency_p50"] == ((25, 40), (25, 42), 40)
    assert counts["errors"] == ((0, 50), (1, 450), 50)


def due(
    observations: Observations | None,
    policy: RolloutPolicy = CANARY,
    command: OperatorCommand | None = None,
    now: float = 60.0,
    *,
    roles: Roles | None = None,
    observed: EndpointState | None = None,
) -> Action | Wait:
    step = 0 if observations is None else observations.step
    planned = policy.planned()[step]
    roles = roles or Roles(stable=STABLE, candidate=CANDIDATE, step=step)
    return choose_next_action(
        desired=CANDIDATE,
        observed=observed
        or build_split_state(
            STABLE, CANDIDATE, planned.percent, mirror_percent=planned.mirror_percent
        ),
        roles=roles,
        policy=policy,
        target="t",
        command=command,
        now=now,
        analysis=analyze(observations, roles, policy),
    )


def waits(found: Action | Wait, kind: WaitKind, *words: str) -> None:
    assert isinstance(found, Wait), found
    assert (found.kind, [word for word in words if word not in found.why]) == (kind, []), found.why


def acts(found: Action | Wait, kind: ActionKind, *words: str) -> None:
    assert isinstance(found, Action), found
    assert (found.kind, [word for word in words if word not in found.why]) == (kind, []), found.why
    assert (CANDIDATE.release in found.reject) == (kind is ActionKind.ABORT)


def with_broken_replica(observations: Observations) -> Observations:
    """Return the observations with counts of replicas; only r3 has errors."""
    tallies = [
        {"v1": counted(450), "v2": counted(500, 250 if number == 3 else 0)}
        for number in range(1, 4)
    ]
    counts = [
        GenerationCounts(origin=f"start{number}", generation=7, tallies=tally, server=f"r{number}")
        for number, tally in enumerate(tallies, 1)
    ]
    return replace(observations, counts=tuple(counts))


def test_judge_with_outlier_replica_names_it_without_deciding() -> None:
    observations = with_broken_replica(seen(*[healthy()] * 6))
    judged, without = judge(observations, CANARY), judge(seen(*[healthy()] * 6), CANARY)
    (outlier,) = judged.outliers
    assert (outlier.server, outlier.deployment, outlier.place) == ("r3", "v2", "errors")
    assert (judged.abort_reason, judged.hold_reason, judged.guardrails) == (
        "",
        "",
        without.guardrails,
    )
    # With counts of servers, a step also needs some users, and these counts name no users.
    waits(due(observations), WaitKind.ANALYZING)


def test_guardrail_abort_with_outlier_replica_names_it() -> None:
    bad = replace(healthy(), canary=counted(errors=10))
    observations = with_broken_replica(seen(*[bad] * 20))
    acts(
        due(observations),
        ActionKind.ABORT,
        "-> ROLL BACK; replica r3: 250/500 (50.00%) requests to v2 failed",
    )


def test_rollout_with_enough_clean_requests_advances_and_finishes() -> None:
    waits(
        due(seen(*[healthy()] * 5)),
        WaitKind.ANALYZING,
        "v2 has 10 % of traffic",
        "250 of 300 requests",
    )
    acts(
        due(seen(*[healthy()] * 6)),
        ActionKind.ADVANCE,
        "step 2 of 3: 50 % to v2",
        "no regression detected in 300 requests",
    )
    less = replace(healthy(), canary=counted(requests=49))
    waits(due(seen(*[healthy()] * 5, less)), WaitKind.ANALYZING, "299 of 300 requests")
    before = [healthy()] * 6
    waits(due(seen(*before, step=1)), WaitKind.ANALYZING, "0 of 300 requests")
    half = ObservationInterval(step=1, canary=counted(over_p99=1), stable=counted(over_p99=1))
    acts(due(seen(*before, *[half] * 6, step=1)), ActionKind.FINISH, "100 % to v2")


def test_rollout_without_counts_waits_and_after_timeout_is_inconclusive() -> None:
    waits(due(None), WaitKind.ANALYZING, "its counts are not available")
    waits(due(seen()), WaitKind.ANALYZING, "0 of 300")
    waits(due(seen(), now=3600.0), WaitKind.INCONCLUSIVE, "step_timeout is over", "0 of 300")
    waits(due(seen(ObservationInterval(step=0)), now=1e9), WaitKind.INCONCLUSIVE)


def test_rollout_with_counts_of_other_candidate_or_step_ignores_them() -> None:
    other = replace(seen(*[healthy()] * 9), candidate=STABLE.manifest)
    waits(due(other), WaitKind.ANALYZING, "its counts are not available")
    roles, observed = (
        Roles(stable=STABLE, candidate=CANDIDATE, step=1),
        build_split_state(STABLE, CANDIDATE, 50),
    )
    waits(
        due(seen(*[healthy()] * 9), roles=roles, observed=observed),
        WaitKind.ANALYZING,
        "its counts are not available",
    )


@pytest.mark.parametrize("command", [None, OperatorCommand.ADVANCE, OperatorCommand.PAUSE])
def test_error_guardrail_violation_aborts_with_or_without_operator_command(
    command: OperatorCommand | None,
) -> None:
    bad = replace(healthy(), canary=counted(errors=3))
    acts(
        due(seen(*[bad] * 4), command=command),
        ActionKind.ABORT,
        "errors: canary 12/200 (6.00%)",
        "(limit 60:1) -> ROLL BACK",
    )


def test_guardrail_with_hold_pauses_until_operator_advances_or_other_guardrail_aborts() -> None:
    bad = replace(healthy(), canary=counted(errors=3))
    policy = replace(CANARY, guardrails=(Guardrail(name="errors", on_violation="hold"), *RAILS[1:]))
    waits(due(seen(*[bad] * 20), policy), WaitKind.PAUSED, "errors: canary", "-> HOLD")
    acts(due(seen(*[bad] * 20), policy, command=OperatorCommand.ADVANCE), ActionKind.ADVANCE)
    slow = replace(bad, canary=counted(errors=3, over_p50=40, over_p99=3))
    acts(due(seen(*[slow] * 20), policy), ActionKind.ABORT, "latency_p", "-> ROLL BACK")


def test_latency_guardrails_of_p90_and_p95_use_counts_over_their_thresholds() -> None:
    policy = replace(
        CANARY, guardrails=(Guardrail(name="latency_p90"), Guardrail(name="latency_p95"))
    )
    alike = ObservationInterval(
        step=0,
        canary=counted().with_over({"latency_p90": 5, "latency_p95": 2}),
        stable=counted(450).with_over({"latency_p90": 45, "latency_p95": 20}),
    )
    acts(due(seen(*[alike] * 10), policy), ActionKind.ADVANCE)
    slow = replace(alike, canary=counted().with_over({"latency_p90": 15, "latency_p95": 2}))
    acts(due(seen(*[slow] * 10), policy), ActionKind.ABORT, "latency_p90: canary", "-> ROLL BACK")
    untold = [replace(healthy(), canary=counted(90), stable=counted(810))] * 4
    waits(due(seen(*untold), policy), WaitKind.ANALYZING, "latency_p90 has 0 of")


def test_latency_guardrail_without_quantile_judges_worst_quantile() -> None:
    policy = replace(CANARY, guardrails=(Guardrail(name="latency"),))
    usual = {place: 1 - share for place, share in LATENCY_PLACES.items()}

    def counts(shares: Mapping[str, float]) -> ObservationInterval:
        mine, theirs = (
            {k: round(n * s) for k, s in of.items()} for n, of in ((100, shares), (900, usual))
        )
        return ObservationInterval(
            step=0, canary=counted(100).with_over(mine), stable=counted(900).with_over(theirs)
        )

    acts(due(seen(*[counts(usual)] * 40), policy), ActionKind.ADVANCE)
    bulge = {**usual, "latency@p80": 0.3, "latency@p85": 0.28, "latency@p90": 0.2}
    acts(
        due(seen(*[counts(bulge)] * 10), policy),
        ActionKind.ABORT,
        "latency: above p85 canary 280/1000",
        "-> ROLL BACK",
    )
    (guard,) = judge(seen(*[counts(bulge)] * 10), policy).guardrails
    (path,) = trace_guardrails([seen(*[counts(bulge)] * n) for n in range(1, 11)], policy)
    assert path.log10_evidence[-1] == pytest.approx(guard.evidence)
    assert guard.low is None, "bounds of a place that was chosen as the worst are not valid"
    waits(due(seen(healthy()), policy), WaitKind.ANALYZING)


def test_latency_guardrail_with_slow_answers_aborts() -> None:
    slow = replace(healthy(), canary=counted(over_p50=40, over_p99=3))
    acts(due(seen(*[slow] * 6)), ActionKind.ABORT, "latency_p", "odds ratio")


def test_latency_guardrail_advances_only_within_tolerated_odds_ratio() -> None:
    """The odds ratio compares how often each version exceeds its threshold.

    The candidate has its own, raised thresholds, and the stable version its lower ones. A policy
    can tolerate a higher ratio.
    """
    slow = replace(healthy(), canary=counted(over_p50=27))
    acts(due(seen(*[slow] * 200)), ActionKind.ABORT)
    lenient = replace(CANARY, guardrails=(Guardrail(name="latency_p50", odds_ratio=1.2),))
    acts(due(seen(*[slow] * 200), lenient), ActionKind.ADVANCE)
    acts(due(seen(*[healthy()] * 200)), ActionKind.ADVANCE)


def test_guardrail_evidence_of_earlier_step_counts_in_later_step() -> None:
    bad = replace(healthy(), canary=counted(errors=3))
    acts(due(seen(bad, bad, bad, bad, step=1)), ActionKind.ABORT, "12/200")


def test_gross_failure_without_stable_traffic_aborts() -> None:
    alone = ObservationInterval(step=0, canary=counted(40, errors=40))
    acts(due(seen(alone)), ActionKind.ABORT, "gross failure: 40 of the candidate's 40")


def test_rollout_without_comparable_requests_waits_or_pauses() -> None:
    blind = ObservationInterval(
        step=0, canary=counted(400, over_p50=None), stable=counted(3600, over_p50=None)
    )
    waits(due(seen(blind)), WaitKind.ANALYZING, "latency_p50 has 0 of 300 comparisons")
    lonely = ObservationInterval(step=0, canary=counted(400))
    waits(due(seen(lonely)), WaitKind.PAUSED)
    assert [guard.compared for guard in judge(seen(lonely), CANARY).guardrails] == [0, 0, 0]


def test_split_mismatch_pauses_until_operator_advances() -> None:
    skewed = ObservationInterval(step=0, canary=counted(200), stable=counted(450, 1, 225, 4))
    waits(due(seen(skewed)), WaitKind.PAUSED, "200 of 650 requests (30.8 %)")
    acts(due(seen(skewed), command=OperatorCommand.ADVANCE), ActionKind.ADVANCE)


def test_rollout_waits_until_service_level_is_certified() -> None:
    policy = replace(CANARY, slo=ServiceLevel(error_rate=0.02))
    interval = replace(healthy(), seconds=60.0)
    waits(
        due(seen(*[interval] * 53), policy),
        WaitKind.ANALYZING,
        "53 intervals (53 min)",
        "not below 2 %; at least 54 i",
    )
    acts(due(seen(*[interval] * 54), policy), ActionKind.ADVANCE)
    crowded = replace(interval, canary=counted(5400), stable=counted(48_600, 1))
    waits(due(seen(crowded), policy), WaitKind.ANALYZING, "in 1 interval (1 min) failed")
    waits(due(seen(crowded)), WaitKind.ANALYZING)


def test_rollout_step_with_min_duration_or_approval_waits_for_it() -> None:
    baking = replace(CANARY, min_step_duration=600.0)
    waits(
        due(seen(*[healthy()] * 6), baking), WaitKind.ANALYZING, "60 s of min_step_duration (600 s)"
    )
    acts(due(seen(*[healthy()] * 6), baking, now=600.0), ActionKind.ADVANCE)
    asked = replace(CANARY, approval_steps=(0.1,))
    waits(due(seen(*[healthy()] * 6), asked), WaitKind.APPROVAL, "waits for approval")
    acts(due(seen(*[healthy()] * 6), asked, command=OperatorCommand.ADVANCE), ActionKind.ADVANCE)


SHADOW = replace(CANARY, shadow=ShadowTrial(fraction=0.2, min_requests=400))


def copies(compared: int = 400, differing: int = 0, failed: int = 0) -> ObservationInterval:
    return ObservationInterval(
        step=0, shadow=ShadowCounts(compared=compared, differing=differing, failed=failed)
    )


def test_shadow_step_precedes_traffic_and_aborts_on_differences_or_failures() -> None:
    started = due(
        None, SHADOW, roles=Roles(stable=STABLE), observed=build_split_state(STABLE, None, 0)
    )
    acts(started, ActionKind.START, "step 1 of 4: a copy of 20 % to v2")
    assert isinstance(started, Action)
    assert dict(started.state.split.weights) == {"v2": 0, "v1": 100}
    assert dict(started.state.split.shadow) == {"v2": 20}
    waits(due(seen(), SHADOW), WaitKind.ANALYZING, "gets a copy of 20 %")
    acts(due(seen(copies()), SHADOW), ActionKind.ADVANCE, "step 2 of 4: 10 %")
    acts(
        due(seen(copies(differing=40)), SHADOW),
        ActionKind.ABORT,
        "shadow answers: 40 of 400 answers differ",
    )
    acts(due(seen(copies(failed=40)), SHADOW), ActionKind.ABORT, "40 copies failed")
    waits(due(seen(copies(differing=3)), SHADOW), WaitKind.ANALYZING, "not below 1 %")


AB = RolloutPolicy(ab_test=SplitTest(duration=7200.0), min_requests=(100,), step_timeout=60.0)


def reported(mine: int, theirs: int) -> list[ObservationInterval]:
    """Return 500 entries of feedback of each version, in five intervals.

    One interval alone cannot show a burst.
    """
    part = ObservationInterval(
        step=0, canary=counted(100, good=mine // 5), stable=counted(100, good=theirs // 5)
    )
    return [part] * 5


def test_ab_test_finishes_if_better_aborts_if_worse_and_waits_if_undecided() -> None:
    acts(due(seen(*reported(100, 50)), AB), ActionKind.FINISH, "-> BETTER")
    acts(due(seen(*reported(50, 100)), AB), ActionKind.ABORT, "-> WORSE")
    waits(due(seen(*reported(50, 50)), AB, now=7199.0), WaitKind.ANALYZING, "-> UNDECIDED")
    waits(due(seen(*reported(50, 50)), AB, now=7200.0), WaitKind.INCONCLUSIVE, "undecided")
    waits(
        due(seen(ObservationInterval(step=0, canary=counted(500), stable=counted(500))), AB),
        WaitKind.ANALYZING,
        "no feedback",
    )


def test_ab_test_applies_on_inconclusive_only_with_enough_feedback() -> None:
    finish = replace(AB, ab_test=SplitTest(duration=1.0, on_inconclusive="finish"))
    acts(due(seen(*reported(50, 50)), finish), ActionKind.FINISH)
    waits(due(seen(), finish), WaitKind.INCONCLUSIVE, "no feedback was reported")
    few = ObservationInterval(step=0, canary=counted(40, good=5), stable=counted(40, good=5))
    waits(due(seen(few), finish), WaitKind.INCONCLUSIVE)
    acts(
        due(
            seen(*reported(50, 50)),
            replace(AB, ab_test=SplitTest(duration=1.0, on_inconclusive="abort")),
        ),
        ActionKind.ABORT,
    )


def test_ab_test_with_lower_goal_finishes_if_candidate_has_fewer_successes() -> None:
    lower = replace(AB, ab_test=SplitTest(duration=1.0, goal="lower"))
    acts(due(seen(*reported(50, 100)), lower), ActionKind.FINISH)


def test_latency_guardrail_without_threshold_counts_compares_percentiles() -> None:
    def counts(times: float) -> ObservationInterval:
        return ObservationInterval(
            step=0,
            canary=counted(50, over_p50=None),
            stable=counted(450, over_p50=None),
            canary_latency=LatencyQuantiles(p50_s=0.002 * times, p99_s=0.01),
            stable_latency=LatencyQuantiles(p50_s=0.002, p99_s=0.01),
        )

    policy = replace(CANARY, guardrails=RAILS[:2])
    acts(
        due(seen(*[counts(1.3)] * 10), policy),
        ActionKind.ABORT,
        "over 10 % slower in 10 of 10 intervals",
    )
    waits(due(seen(*[counts(1.0)] * 9), policy), WaitKind.ANALYZING, "has 9 of 10 comparisons")
    acts(due(seen(*[counts(1.0)] * 10), policy), ActionKind.ADVANCE)


def test_trace_guardrails_ends_at_judged_evidence() -> None:
    bad = replace(healthy(), canary=counted(errors=2))
    intervals = [healthy(), bad, healthy()]
    history = [seen(*intervals[:n]) for n in range(1, 4)]
    judged = judge(history[-1], CANARY)
    for path, guard in zip(trace_guardrails(history, CANARY), judged.guardrails, strict=True):
        assert path.name == guard.name
        assert path.requests == (50, 100, 150)
        assert path.log10_evidence[-1] == pytest.approx(guard.evidence)
        assert path.limit == guard.limit


def test_rollout_without_guardrails_waits_for_approval() -> None:
    manual = RolloutPolicy(steps=(0.1, 1.0))
    bad = replace(healthy(), canary=counted(errors=50))
    waits(
        due(seen(*[bad] * 9), manual),
        WaitKind.APPROVAL,
        "v2 has 10 % of traffic and waits for approval",
    )
    acts(due(seen(*[bad] * 9), manual, command=OperatorCommand.ADVANCE), ActionKind.FINISH)


@pytest.mark.parametrize(("steps", "percent"), [((0.3, 1.0), 30), ((1.0,), 0)])
def test_restore_after_shortened_policy_never_gives_candidate_all_traffic(
    steps: tuple[float, ...], percent: int
) -> None:
    roles, observed = (
        Roles(stable=STABLE, candidate=CANDIDATE, step=1),
        build_split_state(STABLE, CANDIDATE, 50),
    )
    found = due(None, replace(CANARY, steps=steps), roles=roles, observed=observed)
    acts(found, ActionKind.RESTORE)
    assert isinstance(found, Action)
    assert found.state.split.weights["v2"] == percent


def cold(candidate_s: float, stable_s: float, *, loads: int = 8) -> Observations:
    mine, theirs = (
        [each * (1 + 0.01 * number) for number in range(loads)] for each in (candidate_s, stable_s)
    )
    reading = MetricsReading(origin="o", at=1.0, cold_s={"v2": tuple(mine), "v1": tuple(theirs)})
    return Observations(candidate=CANDIDATE.manifest).with_reading(
        reading, stable="v1", candidate="v2"
    )


SLOWER, AT_MOST = (
    Guardrail(name="cold_start", max_latency_increase=0.5),
    Guardrail(name="cold_start", max=2.0),
)


@pytest.mark.parametrize(
    ("rail", "candidate_s", "stable_s", "fires"),
    [
        (SLOWER, 1.4, 1.0, False),
        (SLOWER, 1.8, 1.0, True),
        (Guardrail(name="cold_start"), 1.3, 1.0, True),
        (AT_MOST, 1.9, 0.1, False),
        (AT_MOST, 2.1, 3.0, True),
    ],
)
def test_cold_start_guardrail_is_judged_before_traffic(
    rail: Guardrail, candidate_s: float, stable_s: float, fires: bool
) -> None:
    policy = replace(
        CANARY,
        guardrails=(*RAILS, rail),
        slo=ServiceLevel(error_rate=0.02),
        min_step_duration=600.0,
    )
    assert policy.planned()[:2] == (
        PlannedStep(kind="cold", percent=0),
        replace(CANARY.planned()[0]),
    )
    found = due(cold(candidate_s, stable_s), policy)
    if fires:
        acts(found, ActionKind.ABORT, "cold_start: candidate", "-> ROLL BACK")
        held = replace(policy, guardrails=(*RAILS, replace(rail, on_violation="hold")))
        waits(due(cold(candidate_s, stable_s), held), WaitKind.PAUSED, "-> HOLD")
        acts(
            due(cold(candidate_s, stable_s), held, command=OperatorCommand.ADVANCE),
            ActionKind.ADVANCE,
        )
    else:
        acts(found, ActionKind.ADVANCE, "10 % to v2; cold_start: candidate")
    waits(
        due(cold(candidate_s, stable_s, loads=7), policy), WaitKind.ANALYZING, "cold_start has 7 of"
    )
    later = replace(cold(candidate_s, stable_s), step=1)
    waits(due(later, policy), WaitKind.ANALYZING, "0 of 300 requests")


def test_evaluate_cold_start_at_tolerated_increase_rarely_fires() -> None:
    random = np.random.default_rng(0)
    fired = 0
    for loads in np.exp(0.3 * random.standard_t(2, (600, 16))):
        mine, theirs = loads[:8] * 1.1, loads[8:]
        fired += evaluate_cold_start(
            Guardrail(name="cold_start"),
            mine.tolist(),
            theirs.tolist(),
            compute_firing_limit(CANARY),
        ).is_violated
    assert fired <= 600 / 60 + 8
