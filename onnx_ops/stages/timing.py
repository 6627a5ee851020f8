"""Times a variant: alone, and side by side with what it is compared with, until the limits can be decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from onnx_ops.analysis.blocks import block_logs
from onnx_ops.analysis.latency import LOOKS, needs_more, next_look
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import LatencyComparison, LatencySamples
from onnx_ops.domain.target import Target
from onnx_ops.ports import RaceSamples, RaceSchedule, Runtime, Tensors
from onnx_ops.ports.data import Array

RUNS_ALONE = 800
"""Enough for a 99th percentile to pass with up to three runs above its limit."""

WARMUP_ALONE = 50
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Raw = Mapping[str, Array]
"""The samples behind figures, by array name."""

LogRatios = tuple[tuple[float, ...], ...]
"""log(B / A) of the blocks of each pair."""

Figure = tuple[LogRatios, LogRatios]
"""Ratios of the candidate, and of the baseline again, to the baseline."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two models on one target, fed with the same rows.

    `against` is what the baseline is called. `tolerances` are the limits that must be decided, by kind of gate. `tell`
    hears what is at work.
    """

    runtime: Runtime
    target: Target
    baseline: Path
    candidate: Path
    against: str
    feed: Tensors
    seed: int
    tolerances: Mapping[str, Sequence[float]]
    tell: Callable[[str], None] = lambda _: None

    @property
    def models(self) -> tuple[Path, Path, Path]:
        """Measured in turns: the baseline, again the baseline, which tells the machine's noise, and the candidate."""
        return self.baseline, self.baseline, self.candidate


def feed_of(inputs: Tensors, batch: int) -> Tensors:
    """One request of `batch` real rows; rows repeat if there are fewer."""
    rows = np.arange(batch) % len(next(iter(inputs.values())))
    return {name: array[rows] for name, array in inputs.items()}


def rows_of(feed: Tensors) -> int:
    """Rows of one request."""
    return max((len(array) for array in feed.values() if array.ndim), default=1)


def time_alone(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, *, runs: int = RUNS_ALONE
) -> tuple[LatencySamples, Raw]:
    """Single runs of one session.

    Raises:
        MeasurementFailure: the model does not run there.
    """
    samples = runtime.sample(model, target, feed, runs=runs, warmup=WARMUP_ALONE)
    lost = samples.preempted.astype(bool)
    kept = np.sort(samples.nanoseconds[~lost]) if (~lost).any() else np.sort(samples.nanoseconds)
    latency = LatencySamples(
        batch=rows_of(feed),
        runs=int(samples.nanoseconds.size),
        preempted=int(lost.sum()),
        quantiles_ns={name: float(np.quantile(kept, q)) for name, q in QUANTILES.items()},
        sorted_ns=tuple(int(ns) for ns in kept),
    )
    return latency, {"alone/nanoseconds": samples.nanoseconds, "alone/preempted": samples.preempted}


def time_against(race: Race) -> tuple[LatencyComparison, Raw]:
    """Fresh sessions of the baseline, of the baseline again and of the candidate, in turns, look by look.

    Raises:
        MeasurementFailure: one of the models does not run there.
    """

    def measure(heats: int, seed: int) -> RaceSamples:
        schedule = RaceSchedule(heats=heats, seed=seed)
        return race.runtime.race(race.models, race.target, race.feed, schedule)

    def figures(looks: Sequence[RaceSamples]) -> tuple[Figure]:
        logs = [block_logs(look.nanoseconds, look.preempted, look.probe) for look in looks]
        return (figure_of(np.concatenate(logs)),)

    looks = look_by_look(race, "session pairs", measure, figures, (race.tolerances.get("latency", ()),))
    ((own, itself),) = figures(looks)
    comparison = LatencyComparison(
        against=race.against,
        baseline=digest_file(race.baseline),
        log_ratios=own,
        self_log_ratios=itself,
        runs=sum(int(look.nanoseconds.size) for look in looks),
        preempted=sum(int(look.preempted.sum()) for look in looks),
        calls=max(look.calls for look in looks),
    )
    return comparison, {
        f"{race.against}/look-{number}/{name}": array
        for number, look in enumerate(looks, start=1)
        for name, array in (("nanoseconds", look.nanoseconds), ("preempted", look.preempted), ("probe", look.probe))
        if array is not None
    }


def look_by_look(
    race: Race,
    noun: str,
    measure: Callable[[int, int], S],
    figures: Callable[[Sequence[S]], Sequence[Figure]],
    tolerances: Sequence[Sequence[float]],
) -> list[S]:
    """Measure `race.models` up to each look, until every figure is decided.

    Args:
        race: the two models.
        noun: what is measured in pairs, for whoever is told.
        measure: measures in so many heats, with that seed.
        figures: the figures of all samples so far; one that cannot be known is empty, and not waited for.
        tolerances: the limits of each figure, in the order of `figures`.
    """
    samples: list[S] = []
    measured = 0
    looks = ", ".join(map(str, LOOKS))
    while measured < LOOKS[-1]:
        goal = next_look(measured)
        race.tell(f"{goal - measured} {noun}, B and A again against A (looks after {looks})")
        samples.append(measure(goal - measured, race.seed + measured))
        measured = goal
        found = zip(figures(samples), tolerances, strict=True)
        if not any(needs_more(own, itself, limits) for (own, itself), limits in found if own):
            break
    return samples


def figure_of(logs: npt.NDArray[np.float64]) -> Figure:
    """Log ratios of the candidate, and of the baseline again, to the baseline.

    One session of the baseline stands against one of each, not the mean of both against the candidate: noise that is
    skewed, as that of run times is, cancels in a difference of two that are alike, and leaves a bias in the other.

    Args:
        logs: shape (heats, blocks, models), the models being `Race.models`.
    """
    first, again, candidate = np.moveaxis(logs, -1, 0)
    return _rows(candidate - first), _rows(again - first)


def ratios_of(samples: RaceSamples) -> LogRatios:
    """log(B / A) of a race of two models: the blocks of each heat."""
    logs = block_logs(samples.nanoseconds, samples.preempted, samples.probe)
    return _rows(logs[..., 1] - logs[..., 0])


def _rows(values: npt.NDArray[np.float64]) -> LogRatios:
    return tuple(tuple(float(x) for x in row) for row in values)
