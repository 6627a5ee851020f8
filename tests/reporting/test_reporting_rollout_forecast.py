"""Texts about the forecast of a rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.domain.rollout_forecast import Cadence, Duration, Harm, Traffic
from onnx_ops.domain.rollout_policy import (
    Guardrail,
    RolloutPolicy,
    ServiceLevel,
    ShadowTrial,
    SplitTest,
)
from onnx_ops.reporting.rollout_forecast import (
    EndpointForecast,
    describe_forecast,
    describe_harm,
    document_forecast,
    format_duration,
    format_rate,
    format_time,
    list_warnings,
    summarize_forecast,
)
from onnx_ops.statistics.rollout.forecast import choose_harms, forecast_rollout
from tests.support.golden import Golden

CANARY = RolloutPolicy(
    steps=(0.1, 0.5, 1.0),
    guardrails=(Guardrail(name="errors"), Guardrail(name="latency_p50")),
    min_requests=(300, 1000),
)
CASES = {
    "canary": (CANARY, Traffic(rate=2.0, errors=0.001), "units"),
    "little traffic": (CANARY, Traffic(rate=10 / 3600, errors=0.001), "units"),
    "one user": (replace(CANARY, step_timeout=3600.0), Traffic(rate=5.0, users=1), "units"),
    "all checks": (
        replace(
            CANARY,
            guardrails=(*CANARY.guardrails, Guardrail(name="cold_start")),
            slo=ServiceLevel(error_rate=0.02),
            shadow=ShadowTrial(fraction=0.2),
            approval_steps=(0.5,),
        ),
        Traffic(rate=5.0, users=2000, errors=0.03),
        "units",
    ),
    "long service level": (
        replace(CANARY, slo=ServiceLevel(error_rate=1e-4)),
        Traffic(rate=100.0),
        "units",
    ),
    "A/B test": (
        RolloutPolicy(ab_test=SplitTest(duration=7 * 86_400.0)),
        Traffic(rate=2.0, users=2000),
        "units",
    ),
    "A/B test of few users": (
        RolloutPolicy(ab_test=SplitTest(duration=7 * 86_400.0)),
        Traffic(rate=2.0, users=10),
        "units",
    ),
    "percentiles": (CANARY, Traffic(rate=0.2), "percentiles"),
    "few latencies": (
        CANARY,
        Traffic(rate=2.0, bounds_s=(0.01, 0.02), latencies=(20, 1, 0)),
        "units",
    ),
    "long minimum": (
        replace(CANARY, min_step_duration=2 * 86_400.0),
        Traffic(rate=2.0),
        "intervals",
    ),
}


def make_forecast(name: str) -> EndpointForecast:
    policy, traffic, source = CASES[name]
    cadence = Cadence(source=source)  # type: ignore[arg-type]  # the cases have its values
    forecast = forecast_rollout(policy, traffic, choose_harms(policy, traffic), cadence)
    return EndpointForecast(endpoint="digits", policy=policy, origin="given", forecast=forecast)


@pytest.mark.parametrize("name", CASES)
def test_describe_forecast_of_policy_returns_lines_of_each_step(name: str, golden: Golden) -> None:
    result = make_forecast(name)
    lines = [f"{'  ' * depth}{line}" for depth, line in describe_forecast(result)]
    golden("forecasts", "\n".join([*lines, "", summarize_forecast(result)]))


def test_list_warnings_with_little_traffic_returns_two_and_with_enough_traffic_none() -> None:
    assert list_warnings(make_forecast("canary")) == []
    assert list_warnings(make_forecast("A/B test")) == []
    assert len(list_warnings(make_forecast("little traffic"))) == 2


def test_describe_forecast_without_forecast_shows_reason() -> None:
    result = EndpointForecast(endpoint="digits", policy=CANARY, why="no analysis")
    assert list(describe_forecast(result)) == [(0, "digits: no analysis")]
    assert summarize_forecast(result) == "rollout of digits: no analysis"
    assert list_warnings(result) == []
    assert document_forecast(result)["forecast"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h"), (172_800, "2.0 d"), (9e5, "10 d")],
)
def test_format_time_uses_readable_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (12_345.6, "12,346 requests/s"),
        (2.5, "2.5 requests/s"),
        (0.5, "30 requests/min"),
        (0.01, "36 requests/h"),
    ],
)
def test_format_rate_uses_readable_unit(per_s: float, text: str) -> None:
    assert format_rate(per_s) == text


def test_format_duration_without_end_shows_no_end() -> None:
    assert format_duration(Duration(median_s=None, low_s=60.0, high_s=None)) == "does not end"
    shown = format_duration(Duration(median_s=600.0, low_s=300.0, high_s=None))
    assert shown == "10 min (90 %: 5 min to no end)"


def test_describe_harm_returns_its_option() -> None:
    assert describe_harm(Harm(name="errors", value=0.01)) == "errors=1%"
    assert describe_harm(Harm(name="latency_p99", value=1.2)) == "latency_p99=1.2x"
