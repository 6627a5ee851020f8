"""Forecast how long each step of a rollout takes, before the rollout.

`forecast_waits` has the waits of a healthy candidate, in closed form where it is exact.
`forecast_harm` simulates the search for a harm with the functions of the judge. Generators
have a fixed seed, so that equal inputs give equal forecasts.

The forecast assumes a constant rate, users by Zipf's law, and requests that fail independently.
Only the wait for a service level also considers an uneven rate and failures that come together.
`benchmarks.forecast_truth` compares forecasts with rollouts that are simulated request by request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.special import betaincinv

from onnx_ops.domain.rollout_forecast import (
    Cadence,
    Duration,
    Harm,
    RolloutForecast,
    StepForecast,
    StepWait,
    Traffic,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.statistics.rollout.evidence import Array
from onnx_ops.statistics.rollout.forecast_harm import HarmSearch
from onnx_ops.statistics.rollout.forecast_waits import ROLLOUTS, WaitSimulation, find_quantile

LEAST_HARM = 0.01
"""Minimum share of errors of the default harm."""
HARM_TIMES = 3.0
"""Factor on the tolerated odds of an error for the default harm.

For a shadow trial, it is the factor on the tolerated share of differing answers.
"""
HARM_SLOWER = 1.1
"""Factor on the tolerated ratio of latencies for the default harm."""


def choose_harms(policy: RolloutPolicy, traffic: Traffic) -> tuple[Harm, ...]:
    """Return the harms that are searched for by default.

    They are what the guardrails and the shadow trial of the policy tolerate, times `HARM_TIMES` or
    `HARM_SLOWER`. A harm by errors is at least `LEAST_HARM`. A cold start has no default harm.
    """
    harms = []
    for rail in policy.guardrails:
        if rail.name == "errors":
            odds = (
                HARM_TIMES
                * rail.tolerated("errors")
                * traffic.errors
                / max(1e-9, 1 - traffic.errors)
            )
            harms.append(Harm(name="errors", value=max(LEAST_HARM, odds / (1 + odds))))
        elif rail.name != "cold_start":
            slower = policy.max_latency_increases()[rail.places[-1]]
            harms.append(Harm(name=rail.name, value=HARM_SLOWER * (1 + slower)))
    if policy.shadow:
        wrong = min(1.0, HARM_TIMES * policy.shadow.max_differing)
        harms.append(Harm(name="shadow", value=wrong))
    return tuple(harms)


def forecast_rollout(
    policy: RolloutPolicy,
    traffic: Traffic,
    harms: Sequence[Harm] = (),
    cadence: Cadence | None = None,
) -> RolloutForecast:
    """Forecast the durations of a rollout's steps, and when each harm is found.

    Raises:
        ValueError: the policy has no analysis, or the traffic or a harm is out of range.
    """
    _check(policy, traffic, harms)
    simulation = WaitSimulation(policy, traffic, cadence or Cadence())
    steps, total = [], np.zeros(ROLLOUTS)
    for index, step in enumerate(policy.planned()[:-1]):
        waits = list(simulation.list_waits(index, traffic.errors))
        times = simulation.find_ends(index, waits)
        simulation.begin_after(index, times)
        total += times
        steps.append(
            StepForecast(
                step=step,
                duration=_summarize(times),
                waits=tuple(
                    StepWait(
                        kind=each.kind,
                        needed=each.needed,
                        per_s=each.per_s,
                        duration=_summarize(each.times),
                    )
                    for each in sorted(waits, key=lambda each: -float(np.median(each.times)))
                ),
                timeout=float((times > simulation.find_limit(step)).mean()),
            )
        )
    whole, search = [], HarmSearch(simulation)
    for harm in harms:
        by_step, one = search.find_harm(harm)
        whole.append(one)
        for index, found in by_step.items():
            steps[index] = replace(steps[index], harms=(*steps[index].harms, found))
    return RolloutForecast(
        traffic=traffic, steps=tuple(steps), total=_summarize(total), harms=tuple(whole)
    )


def forecast_rest(counted: int, needed: int, elapsed_s: float) -> Duration | None:
    """Forecast how long a step still waits for requests, from those it has counted.

    The counts are assumed to be a Poisson process. The ratio of the remaining to the elapsed time
    then has a beta prime distribution. The result is None if the counted requests, the missing
    requests or the elapsed time are 0 or less.
    """
    if counted <= 0 or needed <= counted or elapsed_s <= 0:
        return None
    shares = betaincinv(needed - counted, counted, np.array([0.05, 0.5, 0.95]))
    low, median, high = (elapsed_s * float(share / (1 - share)) for share in shares)
    return Duration(median_s=median, low_s=low, high_s=high)


def _check(policy: RolloutPolicy, traffic: Traffic, harms: Sequence[Harm]) -> None:
    if not policy.is_analyzed:
        raise ValueError("the policy has no analysis")
    if not (traffic.rate > 0 and math.isfinite(traffic.rate)):
        raise ValueError(f"the rate of requests must be positive and finite, and is {traffic.rate}")
    if not 0 <= traffic.errors < 1:
        raise ValueError(
            f"the share of errors must be at least 0 and less than 1, not {traffic.errors:g}"
        )
    if traffic.users < 0:
        raise ValueError(f"the number of users must not be negative: {traffic.users}")
    for harm in harms:
        is_share = harm.name in ("errors", "shadow")
        if not (0 < harm.value <= 1 if is_share else 0 < harm.value < math.inf):
            allowed = "above 0 and at most 1" if is_share else "positive and finite"
            raise ValueError(f"harm {harm.name} must be {allowed}, and is {harm.value}")


def _summarize(times: Array) -> Duration:
    low_s, median_s, high_s = (find_quantile(times, share) for share in (0.05, 0.5, 0.95))
    return Duration(median_s=median_s, low_s=low_s, high_s=high_s)
