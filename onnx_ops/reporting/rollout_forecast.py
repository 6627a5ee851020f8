"""Describe the forecast of a rollout as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.rollout_forecast import (
    Duration,
    Harm,
    HarmForecast,
    RolloutForecast,
    StepForecast,
    StepWait,
    Traffic,
    WaitKind,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy

LONG_S = 7 * 86_400.0
"""Duration of a step above which `check` warns, if `step_timeout` is longer."""
_UNDETECTED = 0.05
"""Share of undetected harms above which a longer step is proposed."""
_TIMES = ((2 * 86_400.0, 86_400.0, "d"), (5400.0, 3600.0, "h"), (90.0, 60.0, "min"))
_WHAT: Mapping[WaitKind, str] = {
    "requests": "{needed} requests of the candidate",
    "timed requests": "{needed} requests of the candidate whose latency is compared",
    "units": "{needed} independent units of the candidate",
    "intervals": "{needed} intervals of a minute",
    "comparisons": "{needed} minutes with enough requests to compare percentiles",
    "service level": "the service level, for which {needed} independent requests are needed",
    "copies": "{needed} compared answers",
    "users": "{needed} users of each version",
    "thresholds": "{needed} timed requests of the stable version before the rollout",
    "min_step_duration": "min_step_duration",
    "duration": "the end of the A/B test",
}
_LIMITS: Mapping[WaitKind, str] = {
    "requests": "min_requests",
    "timed requests": "min_requests",
    "units": "min_units",
    "copies": "shadow.min_requests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointForecast:
    """The forecast of one endpoint's next rollout, and where its traffic is from.

    `forecast` is None if the rollout cannot be forecast; `why` then has the reason.
    """

    endpoint: str
    policy: RolloutPolicy
    origin: str = ""
    forecast: RolloutForecast | None = None
    why: str = ""


def describe_forecast(result: EndpointForecast) -> Iterator[tuple[int, str]]:
    """Yield the lines that describe a forecast, each with its depth of indentation."""
    forecast, policy = result.forecast, result.policy
    if forecast is None:
        yield 0, f"{result.endpoint}: {result.why}"
        return
    yield 0, f"{result.endpoint}: {_describe_traffic(forecast.traffic)} ({result.origin})"
    for number, step in enumerate(forecast.steps, 1):
        yield 1, f"step {number}, {_name_step(step)}: {_describe_step(step, forecast.traffic)}"
        if warning := warn_of_step(step, policy, forecast.traffic, policy.step_timeout):
            yield 2, warning
        for each in step.harms:
            yield 2, _describe_step_harm(each, step, policy)
    yield 1, f"until the candidate has all traffic: {format_duration(forecast.total)}"
    for each in forecast.harms:
        yield 1, _describe_whole_harm(each)
    yield from ((1, line) for line in _list_assumptions(result, forecast))


def summarize_forecast(result: EndpointForecast) -> str:
    """Return one line about the rollout of an endpoint."""
    forecast = result.forecast
    if forecast is None:
        return f"rollout of {result.endpoint}: {result.why}"
    if result.origin:
        traffic = f"{_describe_traffic(forecast.traffic)}, {result.origin}"
        text = f"{format_duration(forecast.total)} with {traffic}"
    else:
        low_s = forecast.total.low_s
        least = "does not end" if low_s is None else f"at least {format_time(low_s)}"
        text = (
            f"{least} regardless of traffic; onnx-ops forecast {result.endpoint} measures the "
            "traffic"
        )
    return "; ".join([f"rollout of {result.endpoint}: {text}", *list_warnings(result)[:1]])


def document_forecast(result: EndpointForecast) -> dict[str, Any]:
    """Return the JSON document of a forecast."""
    return {
        "endpoint": result.endpoint,
        "origin": result.origin,
        "why": result.why,
        "warnings": list_warnings(result),
        "forecast": codec.to_json(result.forecast),
    }


def list_warnings(result: EndpointForecast) -> list[str]:
    """Return a warning for each step that exceeds `step_timeout` or `LONG_S`.

    A step that does not end in most simulated rollouts exceeds every limit. An A/B test that ends
    in at least half of them gets no warning.
    """
    forecast, policy = result.forecast, result.policy
    if forecast is None:
        return []
    limit_s = min(policy.step_timeout, LONG_S)
    return [
        f"step {number}, {_name_step(step)}: {warning}"
        for number, step in enumerate(forecast.steps, 1)
        if (warning := warn_of_step(step, policy, forecast.traffic, limit_s))
    ]


def warn_of_step(
    step: StepForecast, policy: RolloutPolicy, traffic: Traffic, limit_s: float
) -> str:
    """Return why a step takes longer than `limit_s`, and what to change.

    The text is empty if the step is within the limit, or lacks a forecast. It is also empty for an
    A/B test that ends in at least half of the simulated rollouts.
    """
    median_s = step.duration.median_s
    if not step.waits or (step.step.kind == "ab_test" and median_s is not None):
        return ""
    if median_s is not None and median_s <= limit_s:
        return ""
    low_s = step.duration.low_s
    what = (
        "this step does not end in most simulated rollouts"
        if median_s is None
        else "this step takes too long"
    )
    if low_s is not None and low_s > limit_s:
        what = f"this step takes at least {format_time(low_s)} in 95 % of simulated rollouts"
    if limit_s >= policy.step_timeout and step.step.kind != "ab_test":
        what = f"{what}, and pauses after {format_time(policy.step_timeout)} (step_timeout)"
    return f"{what}: {'; or '.join(_list_remedies(step, policy, traffic, limit_s))}"


def _list_remedies(
    step: StepForecast, policy: RolloutPolicy, traffic: Traffic, limit_s: float
) -> list[str]:
    wait = step.waits[0]
    unable: dict[WaitKind, Callable[[], str]] = {
        "users": lambda: (
            f"the test has {wait.per_s:.0f} users of a version and needs "
            f"{wait.needed:.0f}: lower min_units"
        ),
        "thresholds": lambda: (
            f"wait until the stable version has answered {wait.needed:.0f} timed requests"
        ),
        "comparisons": lambda: (
            "raise the share or the traffic, or use a metrics source that counts slow requests"
        ),
        "service level": lambda: _advise_level(policy, traffic),
        "min_step_duration": lambda: "lower min_step_duration",
    }
    if wait.kind in unable:
        return [unable[wait.kind]()]
    median_s = wait.duration.median_s
    if median_s is None:
        return ["raise the share or the traffic"]
    factor, remedies = median_s / limit_s, []
    share = step.step.percent or step.step.mirror_percent
    most = 50 if step.step.percent else 100
    if share < most:
        raised = math.ceil(share * factor)
        few = " at least" if wait.kind == "units" and traffic.users else ""
        if raised <= most:
            remedies.append(f"raise the share to{few} {raised} %")
    # The warm-up requests are not timed, so they are needed in addition to the minimum.
    warm = max(0.0, wait.needed - step.step.minimum) if wait.kind == "timed requests" else 0.0
    if wait.kind in _LIMITS and (fewest := math.floor(wait.needed / factor - warm)) >= 1:
        remedies.append(f"lower {_LIMITS[wait.kind]} to {fewest:,}")
    if wait.kind == "units" and traffic.users:
        remedies.append("use a shorter epoch")
    else:
        remedies.append(f"send {format_rate(traffic.rate * factor)}")
    return remedies


def _advise_level(policy: RolloutPolicy, traffic: Traffic) -> str:
    level = 0.0 if policy.slo is None else policy.slo.error_rate
    if traffic.errors >= level:
        return (
            f"{100 * traffic.errors:.2g} % of requests fail, and slo.error_rate is "
            f"{100 * level:g} %: raise slo.error_rate"
        )
    return "raise slo.error_rate or step_timeout, or give the candidate more requests"


def format_time(seconds: float) -> str:
    """Return a duration in days, hours, minutes or seconds.

    Hours and days below 10 have one decimal, all other values have none.
    """
    for least_s, unit_s, name in _TIMES:
        if seconds >= least_s:
            value = seconds / unit_s
            return f"{value:.1f} {name}" if value < 10 and name != "min" else f"{value:.0f} {name}"
    return f"{seconds:.0f} s"


def format_duration(duration: Duration) -> str:
    """Return the median of a duration, and its 5th and 95th percentile."""
    if duration.median_s is None:
        return "does not end"
    low = "?" if duration.low_s is None else format_time(duration.low_s)
    high = "no end" if duration.high_s is None else format_time(duration.high_s)
    median = format_time(duration.median_s)
    return median if low == high == median else f"{median} (90 %: {low} to {high})"


def format_rate(per_s: float) -> str:
    """Return a rate of requests in a readable unit."""
    if per_s >= 1:
        return f"{per_s:,.3g} requests/s" if per_s < 1000 else f"{per_s:,.0f} requests/s"
    if per_s >= 1 / 60:
        return f"{60 * per_s:.3g} requests/min"
    return f"{3600 * per_s:.3g} requests/h"


def _describe_traffic(traffic: Traffic) -> str:
    users = f"{traffic.users:,} users" if traffic.users else "requests without a key"
    if traffic.users == 1:
        users = "1 user"
    return f"{format_rate(traffic.rate)}, {users}, {100 * traffic.errors:.2g} % errors"


def _name_step(step: StepForecast) -> str:
    planned = step.step
    if planned.kind == "shadow":
        return f"shadow {planned.mirror_percent} %"
    if planned.kind == "ab_test":
        return f"A/B test {planned.percent} %"
    return "cold start" if planned.kind == "cold" else f"{planned.percent} %"


def _describe_step(step: StepForecast, traffic: Traffic) -> str:
    if not step.waits:
        return "8 loads of each version; their time is not forecast"
    wait = step.waits[0]
    text = f"{format_duration(step.duration)}; it waits for {_describe_wait(wait, step, traffic)}"
    if step.step.kind == "ab_test":
        text += ", unless a version is shown to be better before"
    return f"{text}; then it waits for approval" if step.step.approval else text


def _describe_wait(wait: StepWait, step: StepForecast, traffic: Traffic) -> str:
    what = _WHAT[wait.kind].format(needed=f"{wait.needed:,.0f}")
    if wait.kind not in ("requests", "timed requests", "copies"):
        return what
    share = step.step.percent or step.step.mirror_percent
    return f"{what}, at {share} % of {format_rate(traffic.rate)}"


def describe_harm(harm: Harm) -> str:
    """Return a harm as it is written in an option."""
    if harm.name in ("errors", "shadow"):
        return f"{harm.name}={100 * harm.value:.3g}%"
    return f"{harm.name}={harm.value:.3g}x"


def _describe_step_harm(found: HarmForecast, step: StepForecast, policy: RolloutPolicy) -> str:
    name = describe_harm(found.harm)
    if found.median_s is None:
        return f"{name}: most rollouts do not detect it in this step"
    text = f"{name}: detected after {format_time(found.median_s)}"
    if found.most_s is not None:
        text += f", in 95 % of rollouts after {format_time(found.most_s)}"
    text += f"; {100 * found.undetected:.0f} % leave the step without detection"
    limit = "shadow.min_requests" if step.step.kind == "shadow" else "min_requests"
    if found.undetected > _UNDETECTED and found.needed_requests is not None:
        return (
            f"{text}: {limit} {_round_up(found.needed_requests):,} detects it in 95 % of rollouts"
        )
    return text


def _round_up(number: int) -> int:
    """Return the number rounded up to two significant digits."""
    unit = int("1".ljust(len(str(number)) - 1, "0"))
    return -(-number // unit) * unit


def _describe_whole_harm(found: HarmForecast) -> str:
    name = describe_harm(found.harm)
    shown = f"{100 * found.undetected:.0f} %"
    if found.undetected == 0:
        shown = "fewer than 1 %"
    text = f"{name}: {shown} of such candidates get all traffic"
    if found.median_s is not None:
        text += (
            f"; half of the rollouts detect it within {format_time(found.median_s)} of the start"
        )
    return text


def _list_assumptions(result: EndpointForecast, forecast: RolloutForecast) -> Iterator[str]:
    traffic, policy = forecast.traffic, result.policy
    if not sum(traffic.latencies) and any("latency" in rail.name for rail in policy.guardrails):
        yield (
            "the latencies are not known: a log-normal distribution is assumed, whose logarithm "
            "has a standard deviation of .5"
        )
    if policy.ab_test is not None and not traffic.feedback:
        yield "the feedback of clients is unknown, so the duration of the A/B test is not forecast"
