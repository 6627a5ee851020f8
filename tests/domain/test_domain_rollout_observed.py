"""Readings, the intervals between them, and what the ledger keeps of both.

The next driver continues from the ledger.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    ActionOutcome,
    Intent,
    MetricsRecorded,
    ThresholdsFixed,
)
from onnx_ops.domain.rollout import Action, ActionKind, GuardrailResult, Roles, build_split_state
from onnx_ops.domain.rollout_observations import (
    GenerationUnits,
    LatencyThresholds,
    MetricsReading,
    ObservationInterval,
    Observations,
    RequestCounts,
    ShadowCounts,
    diff_readings,
)
from tests.domain.test_domain_ledger import folded, version
from tests.support.golden import Golden
from tests.support.must import must

V1, V2, V3 = version(1), version(2), version(3)
LIMITS = LatencyThresholds(p50_s=0.001, p99_s=0.01, requests=500)


def reading(
    mine: int, theirs: int, *, origin: str = "a", at: float = 1e6, errors: int = 0
) -> MetricsReading:
    tallies = {
        "v2": RequestCounts(requests=mine, errors=errors),
        "v1": RequestCounts(requests=theirs),
    }
    return MetricsReading(origin=origin, at=at, tallies=tallies)


def between(before: MetricsReading | None, now: MetricsReading) -> ObservationInterval | None:
    return diff_readings(before, now, step=0, stable="v1", candidate="v2")


def test_diff_readings_returns_difference_of_counts() -> None:
    found = between(reading(10, 90), reading(30, 270, errors=2))
    assert found == ObservationInterval(
        step=0, canary=RequestCounts(requests=20, errors=2), stable=RequestCounts(requests=180)
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, reading(30, 270)),
        (reading(10, 90, origin="b"), reading(30, 270)),
        (reading(10, 90, at=5.0), reading(30, 270, at=4.0)),
        (reading(40, 90), reading(30, 270)),
        (reading(10, 90), reading(30, 270, errors=21)),
        (reading(10, 90, errors=3), reading(30, 270, errors=2)),
    ],
    ids=[
        "first",
        "restarted",
        "back in time",
        "fewer",
        "more errors than requests",
        "fewer errors",
    ],
)
def test_diff_readings_of_incomparable_readings_returns_none(
    before: MetricsReading | None, now: MetricsReading
) -> None:
    assert between(before, now) is None


def test_diff_readings_of_shadow_counts_returns_difference_or_none_if_fewer() -> None:
    more, fewer = (replace(reading(0, 10), shadow=ShadowCounts(compared=n)) for n in (20, 10))
    assert between(more, fewer) is None
    found = must(between(fewer, more))
    assert found.shadow == ShadowCounts(compared=10)


def test_request_counts_minus_subtracts_timed_requests_separately() -> None:
    before = RequestCounts(requests=100, over_p50=20, over_p99=1, timed=40)
    now = RequestCounts(requests=150, over_p50=30, over_p99=1, timed=50)
    assert now.minus(before) == RequestCounts(requests=50, over_p50=10, over_p99=0, timed=10)


def test_request_counts_measured_returns_timed_or_else_all_requests() -> None:
    assert RequestCounts(requests=150, over_p50=30, over_p99=1, timed=50).measured == 50
    assert RequestCounts(requests=7).measured == 7


def test_request_counts_minus_with_inconsistent_timed_requests_returns_none() -> None:
    before = RequestCounts(requests=100, over_p50=20, over_p99=1, timed=40)
    now = RequestCounts(requests=150, over_p50=30, over_p99=1, timed=50)
    assert replace(now, timed=45).minus(before) is None, "ten of five"
    assert replace(now, timed=None).minus(before) is None
    assert now.minus(replace(before, timed=None)) is None


def test_diff_readings_with_new_deployment_counts_from_zero() -> None:
    later = MetricsReading(
        origin="a",
        at=1.0,
        tallies={"v2": RequestCounts(requests=5, over_p50=2), "v1": RequestCounts(requests=9)},
    )
    found = must(
        between(
            MetricsReading(origin="a", at=0.0, tallies={"v1": RequestCounts(requests=4)}), later
        )
    )
    assert found.canary == RequestCounts(requests=5, over_p50=2)
    assert found.stable == RequestCounts(requests=5)
    timed = replace(
        later, tallies={**later.tallies, "v2": RequestCounts(requests=5, over_p50=2, timed=3)}
    )
    found = must(
        between(
            MetricsReading(origin="a", at=0.0, tallies={"v1": RequestCounts(requests=4)}), timed
        )
    )
    assert found.canary == RequestCounts(requests=5, over_p50=2, timed=3)


@given(steps=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_observations_intervals_sum_to_total_counts(steps: list[tuple[int, int]]) -> None:
    seen = Observations(candidate=V2.manifest).with_reading(
        reading(7, 8), stable="v1", candidate="v2"
    )
    mine, theirs = 7, 8
    for more, others in steps:
        mine, theirs = mine + more, theirs + others
        seen = seen.with_reading(reading(mine, theirs), stable="v1", candidate="v2")
    assert len(seen.intervals) == len(steps)
    assert sum(one.canary.requests for one in seen.intervals) == mine - 7
    assert sum(one.stable.requests for one in seen.intervals) == theirs - 8


def action(kind: ActionKind, candidate: Deployment | None, percent: int, step: int = 0) -> Action:
    roles = Roles(stable=V1, candidate=candidate, step=step)
    return Action(kind=kind, state=build_split_state(V1, candidate, percent), roles=roles, why="")


START, ADVANCE = action(ActionKind.START, V2, 10), action(ActionKind.ADVANCE, V2, 50, 1)
ABORT, NEXT = action(ActionKind.ABORT, None, 0), action(ActionKind.START, V3, 10)


FROZEN = ThresholdsFixed(candidate=V2.manifest, thresholds=LIMITS)


def test_observations_of_new_rollout_use_thresholds_of_candidate() -> None:
    raised = replace(LIMITS, p50_s=0.0011)
    split = GenerationUnits(generation=2, step=0, percent=10, is_drawn=False)
    begun = Observations(
        candidate=V2.manifest, started_at=3.0, split_at=3.0, thresholds=LIMITS, generations=(split,)
    )
    assert folded(replace(FROZEN, slower=raised), START).observations == replace(
        begun, slower=raised
    )
    assert folded(FROZEN, START).observations == replace(begun, slower=LIMITS), (
        "ledgers of before had one pair"
    )
    assert folded(START).observations == Observations(
        candidate=V2.manifest,
        started_at=2.0,
        split_at=2.0,
        generations=(replace(split, generation=1),),
    )
    other = must(folded(FROZEN, NEXT).observations)
    assert other.thresholds is None


def test_observations_keep_thresholds_during_rollout() -> None:
    later = ThresholdsFixed(candidate=V2.manifest, thresholds=replace(LIMITS, p50_s=9.0))
    trial = must(
        folded(FROZEN, START, later, MetricsRecorded(reading=reading(1, 9)), ADVANCE).observations
    )
    assert trial.thresholds == LIMITS


def test_observations_keep_earlier_intervals_and_start_anew_at_each_step() -> None:
    first, second = (
        MetricsRecorded(reading=reading(0, 0)),
        MetricsRecorded(reading=reading(20, 180)),
    )
    state = folded(START, first, second, ADVANCE)
    assert state.observations is not None
    assert (state.observations.step, state.observations.started_at, state.observations.reading) == (
        1,
        6.0,
        None,
    )
    assert [one.canary.requests for one in state.observations.intervals] == [20]
    on = folded(
        START,
        first,
        second,
        ADVANCE,
        MetricsRecorded(reading=reading(30, 190)),
        MetricsRecorded(reading=reading(80, 240)),
    )
    assert on.observations is not None
    assert [(one.step, one.canary.requests) for one in on.observations.intervals] == [
        (0, 20),
        (1, 50),
    ]


def test_observations_with_intent_between_readings_make_no_interval() -> None:
    first, late = MetricsRecorded(reading=reading(0, 0)), MetricsRecorded(reading=reading(20, 180))
    intent = Intent(action=ADVANCE, holder="h", expires_at=1e9)
    during = must(folded(START, first, intent, late).observations)
    assert during.intervals == ()
    assert during.reading is None
    failed = must(folded(START, first, intent, ActionOutcome(of=4, ok=False), late).observations)
    assert failed.intervals == ()
    assert (failed.step, failed.started_at) == (0, 2.0)


def test_observations_ignore_reading_from_before_split_change() -> None:
    """A monitor reports late; entry 2 is the outcome that changed the split."""
    early, first, later = (reading(n, 9 * n, at=at) for n, at in ((10, 1.0), (20, 3.0), (30, 4.0)))
    trial = must(
        folded(START, *(MetricsRecorded(reading=one) for one in (early, first, later))).observations
    )
    assert [one.canary.requests for one in trial.intervals] == [10]
    assert folded(START, MetricsRecorded(reading=early)).observations == folded(START).observations


def test_observations_end_with_rollout() -> None:
    first = MetricsRecorded(reading=reading(0, 0))
    assert folded(START, first, ABORT).observations is None
    assert folded(START, first, ABORT, first).observations is None
    assert folded(first).observations is None
    new = must(folded(START, first, MetricsRecorded(reading=reading(9, 9)), NEXT).observations)
    assert (new.candidate, new.intervals) == (V3.manifest, ())


GUARD = GuardrailResult(
    name="errors",
    canary=(28, 800),
    stable=(67, 7200),
    evidence=5.3,
    limit=1.7782,
    low=1.65,
    high=8.19,
    compared=800,
)


def test_guardrail_result_summary_shows_rates_and_evidence(golden: Golden) -> None:
    golden("reasons", GUARD.summary)
    assert replace(GUARD, evidence=0.0).summary.endswith("evidence 1:1 (limit 60:1)")
    assert "evidence 1e12:1" in replace(GUARD, evidence=12.3).summary
    assert "evidence 0.0032:1" in replace(GUARD, evidence=-2.5).summary


def test_guardrail_result_is_violated_above_limit_but_not_with_nan_evidence() -> None:
    assert GUARD.is_violated
    assert not replace(GUARD, evidence=GUARD.limit - 0.1).is_violated
    assert not replace(GUARD, evidence=float("nan")).is_violated
