"""Forecasts of rollouts: closed forms, properties, and the evidence of harms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.domain.rollout_forecast import Cadence, Harm, RolloutForecast, Traffic
from onnx_ops.domain.rollout_policy import (
    Guardrail,
    GuardrailName,
    RolloutPolicy,
    ServiceLevel,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.serving import metrics
from onnx_ops.statistics.rollout import forecast_waits
from onnx_ops.statistics.rollout.evidence import compute_clean_requests
from onnx_ops.statistics.rollout.forecast import choose_harms, forecast_rest, forecast_rollout
from onnx_ops.statistics.rollout.forecast_units import model_units, wait_for_count
from onnx_ops.statistics.rollout.guardrails import FEWEST_REQUESTS


def make_policy(*names: GuardrailName, **keys: object) -> RolloutPolicy:
    rails = tuple(Guardrail(name=name) for name in names or ("errors",))
    policy = RolloutPolicy(steps=(0.1, 0.5, 1.0), guardrails=rails, min_requests=(300, 1000))
    return replace(policy, **keys)  # type: ignore[arg-type]  # keys of the policy


def median(forecast: RolloutForecast) -> float:
    value = forecast.total.median_s
    return math.inf if value is None else value


STEADY = Traffic(rate=2.0, errors=0.001)


def test_forecast_step_waits_for_requests_as_poisson_process() -> None:
    step = forecast_rollout(make_policy(), STEADY).steps[0]
    assert step.waits[0].kind == "requests"
    assert step.waits[0].per_s == pytest.approx(0.2)
    # 300 requests at 0.2 a second: mean 1,500 s, standard deviation sqrt(300) / 0.2 s.
    times = (step.duration.low_s, step.duration.median_s, step.duration.high_s)
    deviation = math.sqrt(300) / 0.2
    assert times == pytest.approx((1500 - 1.645 * deviation, 1500, 1500 + 1.645 * deviation), 0.01)


def test_forecast_of_equal_inputs_is_equal() -> None:
    policy = make_policy("errors", "latency_p99")
    harms = choose_harms(policy, STEADY)
    assert forecast_rollout(policy, STEADY, harms) == forecast_rollout(policy, STEADY, harms)


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(0.01, 1e4),
    times=st.floats(1, 100),
    users=st.sampled_from([0, 1, 3, 50, 2000, 10**6]),
    latency=st.booleans(),
)
def test_forecast_with_more_traffic_is_never_slower(
    rate: float, times: float, users: int, latency: bool
) -> None:
    policy = make_policy(*(("errors", "latency_p50") if latency else ("errors",)))
    less = forecast_rollout(policy, Traffic(rate=rate, users=users))
    more = forecast_rollout(policy, Traffic(rate=rate * times, users=users))
    # With more traffic, a step can begin later within its epoch, so the tolerance is two epochs.
    assert median(more) <= median(less) * 1.001 + 2 * policy.epoch


@pytest.mark.parametrize("users", [0, 20])
@pytest.mark.parametrize("name", ["errors", "latency_p50"])
def test_forecast_of_larger_harm_detects_it_no_later(name: GuardrailName, users: int) -> None:
    policy, traffic = make_policy("errors", "latency_p50"), replace(STEADY, users=users)
    values = (0.01, 0.03, 0.1, 0.5) if name == "errors" else (1.2, 1.5, 2.0, 4.0)
    harms = [Harm(name=name, value=value) for value in values]
    found = [
        math.inf if (each.median_s is None) else each.median_s
        for each in forecast_rollout(policy, traffic, harms).steps[0].harms
    ]
    assert len(found) == len(values)
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]


def test_forecast_with_larger_min_requests_detects_more_harm() -> None:
    harm = Harm(name="errors", value=0.01)
    few = forecast_rollout(make_policy(min_requests=(100,)), STEADY, [harm]).harms[0]
    many = forecast_rollout(make_policy(min_requests=(5000,)), STEADY, [harm]).harms[0]
    assert few.undetected > 0.3
    assert many.undetected < 0.02


def test_forecast_with_few_users_waits_for_units() -> None:
    one = forecast_rollout(make_policy(), replace(STEADY, rate=20, users=1)).steps[0]
    assert one.waits[0].kind == "units"
    # The candidate needs 20 epochs, and gets one epoch in ten.
    assert one.duration.median_s == pytest.approx(200 * 60, rel=0.1)
    assert forecast_rollout(make_policy(), replace(STEADY, rate=20)).steps[0].waits[0].kind != (
        "units"
    )


def test_forecast_of_latency_step_above_half_waits_for_requests_of_control_replica() -> None:
    policy = make_policy("latency_p50", steps=(0.9, 1.0))
    step = forecast_rollout(policy, STEADY).steps[0]
    assert step.waits[0].kind == "timed requests"
    assert step.waits[0].needed == 300 + metrics.WARM_UP_REQUESTS
    assert step.waits[0].per_s == pytest.approx(0.2)


def test_forecast_with_few_latencies_before_rollout_never_ends() -> None:
    traffic = replace(STEADY, bounds_s=(0.01, 0.02), latencies=(FEWEST_REQUESTS // 2, 1, 0))
    forecast = forecast_rollout(make_policy("latency_p50"), traffic)
    assert forecast.total.median_s is None
    assert forecast.steps[0].timeout == 1
    assert "thresholds" in {wait.kind for wait in forecast.steps[0].waits}


def test_forecast_of_service_level_needs_minutes_and_with_higher_error_rate_never_ends() -> None:
    policy = make_policy(slo=ServiceLevel(error_rate=0.02))
    step = forecast_rollout(policy, Traffic(rate=1000.0, errors=1e-4)).steps[0]
    assert step.waits[0].kind == "service level"
    assert step.duration.median_s == pytest.approx(54 * 60, rel=0.2)
    bad = forecast_rollout(policy, Traffic(rate=1000.0, errors=0.03)).steps[0]
    assert bad.duration.median_s is None


def test_forecast_of_shadow_step_waits_for_equal_answers() -> None:
    policy = make_policy(shadow=ShadowTrial(fraction=0.2, min_requests=10))
    step = forecast_rollout(policy, STEADY, choose_harms(policy, STEADY)).steps[0]
    assert step.waits[0].needed == compute_clean_requests(0.01)
    assert step.duration.median_s == pytest.approx(step.waits[0].needed / 0.4, rel=0.05)
    assert step.harms[0].harm == Harm(name="shadow", value=0.03)
    assert step.harms[0].median_s is not None


def test_forecast_of_split_test_takes_its_duration_and_needs_users() -> None:
    policy = RolloutPolicy(ab_test=SplitTest(duration=86_400.0))
    traffic = Traffic(rate=0.2, users=2000, feedback=0.5, success=0.2)
    harms = [Harm(name="feedback", value=value) for value in (0.95, 0.5)]
    step = forecast_rollout(policy, traffic, harms).steps[0]
    assert step.duration.median_s == pytest.approx(86_400, rel=0.001)
    small, large = step.harms[0].median_s, step.harms[-1].median_s
    assert large is not None
    assert small is None or large < small
    assert forecast_rollout(policy, replace(traffic, users=5)).total.median_s is None


@pytest.mark.parametrize("name", ["errors", "latency_p50"])
def test_forecast_with_source_without_units_detects_harm(name: GuardrailName) -> None:
    policy, cadence = make_policy("errors", "latency_p50"), Cadence(source="intervals")
    harm = Harm(name=name, value=0.2 if name == "errors" else 2.0)
    step = forecast_rollout(policy, STEADY, [harm], cadence).steps[0]
    assert {wait.kind for wait in step.waits} == {"requests", "timed requests", "intervals"}
    assert step.harms[0].median_s is not None


def test_forecast_with_percentiles_needs_requests_in_each_interval() -> None:
    policy, cadence = make_policy("latency_p99"), Cadence(source="percentiles")
    slow = forecast_rollout(policy, Traffic(rate=1.0), cadence=cadence)
    assert slow.total.median_s is None
    fast = forecast_rollout(policy, Traffic(rate=100.0), cadence=cadence)
    assert fast.steps[0].duration.median_s == pytest.approx(600, rel=0.1)


def test_forecast_with_measured_rate_widens_interval() -> None:
    exact = forecast_rollout(make_policy(), STEADY).total
    measured = forecast_rollout(make_policy(), replace(STEADY, counted=20)).total
    assert None not in (exact.low_s, exact.high_s, measured.low_s, measured.high_s)
    assert (measured.high_s or 0) / (measured.low_s or 1) > 1.5 * (exact.high_s or 0) / (
        exact.low_s or 1
    )


def test_forecast_of_harm_that_first_step_detects_omits_it_in_later_steps() -> None:
    harm = Harm(name="errors", value=1.0)
    forecast = forecast_rollout(make_policy(), replace(STEADY, rate=20), [harm])
    assert [len(step.harms) for step in forecast.steps] == [1, 0]
    assert forecast.harms[0].undetected == 0


@pytest.mark.parametrize(
    ("policy", "traffic", "harms"),
    [
        (RolloutPolicy(steps=(0.1, 1.0)), STEADY, []),
        (make_policy(), Traffic(rate=0.0), []),
        (make_policy(), Traffic(rate=math.nan), []),
        (make_policy(), Traffic(rate=1.0, errors=1.0), []),
        (make_policy(), STEADY, [Harm(name="errors", value=1.5)]),
    ],
)
def test_forecast_without_analysis_or_of_impossible_numbers_raises_value_error(
    policy: RolloutPolicy, traffic: Traffic, harms: list[Harm]
) -> None:
    with pytest.raises(ValueError, match=r"( is |must be |analysis)"):
        forecast_rollout(policy, traffic, harms)


def test_choose_harms_follows_tolerance_of_policy() -> None:
    policy = RolloutPolicy(
        steps=(0.1, 1.0),
        guardrails=(
            Guardrail(name="errors", odds_ratio=2.0),
            Guardrail(name="latency", max_latency_increase=0.5),
            Guardrail(name="cold_start"),
        ),
    )
    errors, latency = choose_harms(policy, Traffic(rate=1.0, errors=0.1))
    # The value has six times the odds of 0.1, which are 1 to 9.
    assert errors.value == pytest.approx(0.4)
    assert latency.name == "latency"
    assert latency.value == pytest.approx(1.65)
    assert choose_harms(policy, Traffic(rate=1.0))[0].value == 0.01


def test_forecast_rest_extrapolates_elapsed_time_or_returns_none() -> None:
    rest = forecast_rest(100, 300, 500.0)
    assert rest is not None
    assert rest.median_s == pytest.approx(1000, rel=0.02)
    assert rest.low_s is not None
    assert rest.high_s is not None
    assert rest.low_s < 1000 < rest.high_s
    assert forecast_rest(0, 300, 500.0) is None
    assert forecast_rest(300, 300, 500.0) is None


@pytest.mark.parametrize("users", [0, 1, 30, 5000, 200_000])
@pytest.mark.parametrize("chance", [1e-4, 0.02, 0.5])
def test_model_units_agrees_with_drawn_users(users: int, chance: float) -> None:
    model = model_units(200.0, users)
    shares = model.bin_badness(chance)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert (model.members * model.activity).sum() == pytest.approx(200 if users else 0)
    drawn = model.draw_units(np.full(4000, 1.0), np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(model.units, rel=0.05)
    if users == 30:
        weights = np.arange(1, 31) ** -0.8
        requests = np.random.default_rng(2).poisson(200 * weights / weights.sum(), (20_000, 30))
        assert (requests > 0).sum(axis=1).mean() == pytest.approx(model.units, rel=0.01)
        bad = np.random.default_rng(3).binomial(requests, chance)
        none = (bad == 0)[requests > 0].mean()
        assert shares[0] == pytest.approx(none, abs=0.01)


def test_wait_for_count_without_rate_is_infinite_unless_count_is_zero() -> None:
    chances = np.array([0.1, 0.9])
    assert np.isinf(wait_for_count(5, 0.0, 1.0, chances)).all()
    assert (wait_for_count(0, 0.0, 1.0, chances) == 0).all()


def test_forecast_warm_up_equals_warm_up_of_server() -> None:
    assert forecast_waits.WARM_UP_REQUESTS == metrics.WARM_UP_REQUESTS


def find_level_interval(traffic: Traffic) -> tuple[float, float, float]:
    policy = make_policy(slo=ServiceLevel(error_rate=0.05), step_timeout=30 * 86_400.0)
    (wait,) = (
        each
        for each in forecast_rollout(policy, traffic).steps[0].waits
        if each.kind == "service level"
    )
    known = (wait.duration.low_s, wait.duration.median_s, wait.duration.high_s)
    return tuple(math.inf if each is None else each for each in known)  # type: ignore[return-value]  # three


def test_forecast_interval_of_service_level_allows_for_uneven_traffic() -> None:
    low_s, median_s, high_s = find_level_interval(Traffic(rate=500.0, errors=0.001))
    # At this rate, the required number of one-minute intervals determines the duration. With steady
    # traffic, all simulated rollouts need about the same number.
    assert low_s <= median_s < 1.1 * low_s
    assert high_s > 1.3 * low_s


def test_forecast_interval_of_service_level_is_wider_for_few_measured_errors() -> None:
    exact = find_level_interval(Traffic(rate=2.0, errors=0.01))
    measured = find_level_interval(Traffic(rate=2.0, errors=0.01, counted=200))
    assert measured[0] <= exact[0]
    assert measured[2] > 1.2 * exact[2]
