"""Service levels simulated by interval, to compare their times with forecasts.

The worlds are those of `forecast_world`. Only the requests and errors of intervals of a minute are
drawn, which is a thousand times faster than a whole rollout. The judge's rule decides after each
minute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.truth.draws import make_generator
from benchmarks.truth.forecast_world import Floats, Ints, World, draw_world, measure
from onnx_ops.domain.rollout_forecast import Cadence, Duration, Traffic
from onnx_ops.domain.rollout_policy import Guardrail
from onnx_ops.serving.metrics import BOUNDS_S
from onnx_ops.statistics.rollout import design_effect
from onnx_ops.statistics.rollout import evidence as ev
from onnx_ops.statistics.rollout.forecast_units import CELLS
from onnx_ops.statistics.rollout.forecast_waits import (
    INTERVAL_S,
    WaitSimulation,
    find_quantile,
    space_looks,
)

MINUTES = 1440
"""Length of a simulation; the step pauses after it."""
_LOOKS = 120
_KIND = 2
_RESOLUTION_S = INTERVAL_S + 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTrial:
    """A service level that is a step's slowest requirement: its forecast and its time."""

    world: World
    traffic: Traffic
    forecast: Duration
    elapsed_s: float

    @property
    def is_covered(self) -> bool:
        """Return whether the time is in the forecast interval, up to `_RESOLUTION_S`."""
        low_s, high_s = self.forecast.low_s or 0.0, self.forecast.high_s
        is_late = high_s is not None and self.elapsed_s > high_s + _RESOLUTION_S
        return self.elapsed_s >= low_s - _RESOLUTION_S and not is_late


def run_level_trials(count: int) -> list[LevelTrial]:
    """Return trials of worlds in which a service level is slowest."""
    trials: list[LevelTrial] = []
    number = 0
    while len(trials) < count:
        trial = _run_trial(number)
        trials += [trial] if trial else []
        number += 1
    return trials


def _run_trial(number: int) -> LevelTrial | None:
    random = make_generator(_KIND, number)
    world = draw_world(random, is_harmful=False)
    if world.policy.slo is None:
        return None
    policy = replace(world.policy, guardrails=(Guardrail(name="errors"),))
    traffic = measure(world, random, [0] * (len(BOUNDS_S) + 1))
    simulation = WaitSimulation(policy, traffic, Cadence())
    index = int(random.integers(len(simulation.steps)))
    waits = sorted(
        simulation.list_waits(index, traffic.errors), key=lambda each: float(np.median(each.times))
    )
    low_s, median_s, high_s = (find_quantile(waits[-1].times, p) for p in (0.05, 0.5, 0.95))
    if waits[-1].kind != "service level" or median_s is None:
        return None
    share = simulation.steps[index].percent / 100
    elapsed_s = _show_level(world, random, share, world.policy.slo.error_rate)
    forecast = Duration(median_s=median_s, low_s=low_s, high_s=high_s)
    return LevelTrial(world=world, traffic=traffic, forecast=forecast, elapsed_s=elapsed_s)


def _show_level(world: World, random: np.random.Generator, share: float, level: float) -> float:
    """Return the time until a service level is shown, in seconds."""
    rows = _draw_rows(world, random, share)
    before = 0
    for looked in space_looks(1, MINUTES, _LOOKS).tolist():
        if _is_shown(rows[:looked], level):
            first = (end for end in range(before + 1, looked + 1) if _is_shown(rows[:end], level))
            return INTERVAL_S * next(first)
        before = looked
    return math.inf


def _is_shown(rows: Ints, level: float) -> bool:
    effect = design_effect.estimate_error_effect(rows)
    return bool(ev.is_rate_certified(rows[:, 0].sum(), rows[:, 1].sum(), level, effect))


def _draw_rows(world: World, random: np.random.Generator, share: float) -> Ints:
    """Return errors and requests of both versions in each minute, shape (minutes, 4)."""
    epoch_s = world.policy.epoch
    epochs = round(MINUTES * INTERVAL_S / epoch_s)
    busy = np.ones(epochs)
    if world.uneven:
        shape = world.uneven**-2
        busy = random.gamma(shape, 1 / shape, epochs)
    mean = world.traffic.rate * epoch_s * busy
    mine = _draw_shares(world, random, share, epochs)
    candidate, stable = (_count(random, mean * part, epoch_s) for part in (mine, 1 - mine))
    events = [_fail(world, random, requests) for requests in (candidate, stable)]
    return np.stack([events[0], candidate, events[1], stable], axis=-1)


def _draw_shares(world: World, random: np.random.Generator, share: float, epochs: int) -> Floats:
    """Return the candidate's share of requests in each epoch, with new assignments."""
    users = world.traffic.users
    if not users:
        return np.full(epochs, share)
    weights: Floats = np.arange(1, users + 1, dtype=np.float64) ** -world.skew
    if users > CELLS // 20:
        cells = random.integers(0, CELLS, users)
        weights = np.bincount(cells, weights, minlength=CELLS).astype(np.float64)
    squares = min(0.98, float((weights**2).sum() / weights.sum() ** 2))
    size = 1 / squares - 1
    return np.asarray(random.beta(share * size, (1 - share) * size, epochs))


def _count(random: np.random.Generator, means: Floats, epoch_s: float) -> Ints:
    """Return the requests of each minute, from the means of epochs."""
    if epoch_s > INTERVAL_S:
        parts = round(epoch_s / INTERVAL_S)
        return np.asarray(random.poisson(np.repeat(means / parts, parts)))
    return np.asarray(random.poisson(means).reshape(MINUTES, -1).sum(axis=1))


def _fail(world: World, random: np.random.Generator, requests: Ints) -> Ints:
    bunch, errors = world.bunch, world.traffic.errors
    if bunch == 1:
        return np.asarray(random.binomial(requests, errors))
    return np.minimum(requests, bunch * random.poisson(requests * errors / bunch))
