"""What the counts of users who stick to a version are worth, by their sums or by how intervals vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.rollout_observations import (
    MetricsReading,
    ObservationInterval,
    Observations,
    RequestCounts,
    UnitSums,
)
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy, ServiceLevel
from onnx_ops.statistics.rollout import design_effect, guardrails, judge
from onnx_ops.statistics.rollout import evidence as ev
from tests.statistics.test_statistics_rollout_judge import CANDIDATE

quickly = settings(max_examples=60, deadline=None)
users = st.lists(
    st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=2, max_size=12
)


def sums(n: Any, e: Any) -> UnitSums:
    n, e = np.asarray(n), np.asarray(e)
    values = (n.sum(), e.sum(), (n * n).sum(), (e * e).sum(), (n * e).sum())
    return UnitSums(**dict(zip(UnitSums.__slots__, map(int, values), strict=True)))


@quickly
@given(users=users)
def test_effect_is_the_variance_of_the_events_share_over_that_of_single_requests(users: list[tuple[int, int]]) -> None:
    n, e = np.array(users).T
    found = design_effect.bound_design_effect([sums(n, e)])
    rate = e.sum() / n.sum()
    if not 0 < rate < 1:
        assert found == 1
        return
    expected = ((e - rate * n) ** 2).sum() / (rate * (1 - rate) * n.sum())
    assert found == pytest.approx(max(1.0, expected))
    assert found == pytest.approx(
        float(design_effect.compute_design_effect(n.sum(), e.sum(), (n * n).sum(), (e * e).sum(), (n * e).sum()))
    )


def test_effect_of_requests_without_keys_is_one() -> None:
    assert design_effect.bound_design_effect([sums([1] * 1000, [1] * 10 + [0] * 990)]) == pytest.approx(1)
    assert design_effect.bound_design_effect([]) == design_effect.compute_request_effect([]) == 1


def test_ten_errors_of_one_user_are_worth_one() -> None:
    alone = sums([1] * 990 + [10], [0] * 990 + [10])
    assert design_effect.bound_design_effect([alone]) == pytest.approx(10, rel=0.02)
    rows = [(10, 100, 0, 900)]
    assert ev.measure_evidence(rows, 1.0) > 6
    assert ev.measure_evidence(rows, 1.0, design_effect.bound_design_effect([alone])) < 1


@quickly
@given(users=users, parts=st.integers(0, 2**32 - 1))
def test_counting_that_began_anew_is_never_worth_more(users: list[tuple[int, int]], parts: int) -> None:
    n, e = np.array(users).T
    random = np.random.default_rng(parts)
    bad = random.binomial(e, 0.5)
    good = random.binomial(n - e, 0.5)
    epochs = [sums(bad + good, bad), sums(n - bad - good, e - bad)]
    assert design_effect.bound_design_effect(epochs) >= design_effect.bound_design_effect([sums(n, e)]) - 1e-9
    assert design_effect.compute_request_effect(epochs) >= design_effect.compute_request_effect([sums(n, e)]) - 1e-9


def test_a_service_level_holds_unseen_errors_for_bunches() -> None:
    assert float(design_effect.compute_error_effect(0, 0, 8.0)) == 8
    assert float(design_effect.compute_error_effect(100, 100, 8.0)) == pytest.approx(1, abs=0.05)
    assert float(design_effect.compute_error_effect(100, 1000, 1.0)) == pytest.approx(10, abs=0.1)
    assert ev.is_rate_certified(0, 200, 0.02)
    assert not ev.is_rate_certified(0, 200, 0.02, 8.0)


def test_intervals_tell_bunches_and_no_dispersion_of_what_is_steadily_worse() -> None:
    random = np.random.default_rng(1)
    canary = np.full(60, 100)
    steady = np.stack([random.binomial(100, 0.1, 60), canary, random.binomial(900, 0.01, 60), canary * 9], axis=-1)
    assert float(design_effect.estimate_dispersion(steady)) < 2
    bunched = np.stack([10 * random.binomial(10, 0.02, 60), canary, 10 * random.binomial(90, 0.02, 60), canary * 9], -1)
    assert 4 < float(design_effect.estimate_dispersion(bunched)) < 25
    assert float(design_effect.estimate_burstiness(bunched)) > 4
    assert float(design_effect.estimate_dispersion([(0, 5, 0, 50)])) == 1


def test_a_bunch_of_one_interval_is_no_evidence() -> None:
    rows = [(10, 100, 0, 900)]
    assert ev.measure_evidence(rows, 1.0, float(design_effect.estimate_dispersion(rows))) < 0.5


def test_a_right_split_of_a_heavy_user_is_no_mismatch() -> None:
    n = [1] * 600 + [400]
    crowded = design_effect.compute_request_effect([sums(n, n)])
    assert float(guardrails.compute_mismatch_evidence(460, 1000, 10)) > guardrails.MISMATCH_LIMIT
    assert float(guardrails.compute_mismatch_evidence(460, 1000, 10, crowded)) < 2


def test_every_judgement_takes_the_users_sums() -> None:
    policy = RolloutPolicy(
        steps=(0.1, 1.0), guardrails=(Guardrail(name="errors"),), slo=ServiceLevel(error_rate=0.02), min_requests=(1,)
    )
    counted = ObservationInterval(
        step=0, canary=RequestCounts(requests=200, errors=15), stable=RequestCounts(requests=900, errors=1)
    )
    bare = Observations(candidate=CANDIDATE.manifest, intervals=(counted, counted))
    alone = {"a": {"errors": sums([1] * 1970 + [115, 115], [1, 1] + [0] * 1968 + [15, 15])}}
    assert judge(bare, policy).alarm
    judged = judge(replace(bare, units=alone), policy)
    assert not judged.alarm
    assert judged.guards[0].effect > 10
    assert "requests count as one" in judged.guards[0].line


def test_sums_are_kept_for_each_origin() -> None:
    first, second = sums([2], [1]), sums([3], [0])
    seen = Observations(candidate=CANDIDATE.manifest)
    for origin, found in (("a", sums([1], [0])), ("a", first), ("b", second)):
        seen = seen.after(MetricsReading(origin=origin, at=1.0, units={"errors": found}), stable="v1", candidate="v2")
    assert seen.units_of("errors") == (first, second)
    assert seen.units_of("latency_p50") == ()
