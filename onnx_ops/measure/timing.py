"""Times a variant: alone, and side by side with what it is compared with, until the limits can be decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import LatencyComparison, LatencySamples
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.model_info import info
from onnx_ops.ports import PairedBenchmarkSamples, PairedBenchmarkSchedule, Runtime, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.latency import LOOKS, compute_block_logs, get_next_look, should_continue

RUNS_ALONE = 800
"""Enough for a 99th percentile to pass with up to three runs above its limit."""

WARMUP_ALONE = 50

LONGEST_S = 120.0
"""Time of a comparison. One that is undecided then stays so, and says what would decide it."""

HEAT_S = 0.6
"""Time that the runs of a heat should take; four times as long before blocks become short."""

WARMUP_S = 0.02
"""Runs before those that count, at most `2 * RUNS` and at least `SHORT`."""

BLOCKS, RUNS, SHORT = 12, 10, 3
"""Rounds of a heat, runs of a block, and the fewest of them."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

RawSamples = Mapping[str, Array]
"""The samples behind figures, by array name."""

LogRatios = tuple[tuple[float, ...], ...]
"""log(B / A) of the blocks of each pair."""

RatioSamples = tuple[LogRatios, LogRatios]
"""Ratios of the candidate, and of the baseline again, to the baseline."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedBenchmark:
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


def build_feed(model: Path, inputs: Tensors, batch: int) -> Tensors:
    """One request of `batch` real rows, or of the batch that the model insists on; rows repeat if there are fewer."""
    rows = np.arange(info(model).fixed_batch or batch) % len(next(iter(inputs.values())))
    return {name: array[rows] for name, array in inputs.items()}


def count_rows(feed: Tensors) -> int:
    """Rows of one request."""
    return max((len(array) for array in feed.values() if array.ndim), default=1)


def measure_latency(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, *, runs: int = RUNS_ALONE
) -> tuple[LatencySamples, RawSamples]:
    """Single runs of one session.

    Raises:
        MeasurementError: the model does not run there.
    """
    samples = runtime.sample(model, target, feed, runs=runs, warmup=WARMUP_ALONE)
    lost = samples.preempted.astype(bool)
    kept = np.sort(samples.nanoseconds[~lost]) if (~lost).any() else np.sort(samples.nanoseconds)
    latency = LatencySamples(
        batch=count_rows(feed),
        runs=int(samples.nanoseconds.size),
        preempted=int(lost.sum()),
        quantiles_ns={name: float(np.quantile(kept, q)) for name, q in QUANTILES.items()},
        sorted_ns=tuple(int(ns) for ns in kept),
    )
    return latency, {"alone/nanoseconds": samples.nanoseconds, "alone/preempted": samples.preempted}


def compare_latency(race: PairedBenchmark) -> tuple[LatencyComparison, RawSamples]:
    """Fresh sessions of the baseline, of the baseline again and of the candidate, in turns, look by look.

    Raises:
        MeasurementError: one of the models does not run there.
    """

    alone = race.runtime.sample(race.baseline, race.target, race.feed, runs=5, warmup=1)
    schedule = plan_schedule(float(np.median(alone.nanoseconds.astype(np.float64))) / 1e9)

    def measure(heats: int, seed: int) -> PairedBenchmarkSamples:
        return race.runtime.race(race.models, race.target, race.feed, replace(schedule, heats=heats, seed=seed))

    def figures(looks: Sequence[PairedBenchmarkSamples]) -> tuple[RatioSamples]:
        return (split_log_ratios(_logs(looks)),)

    looks = measure_until_decided(race, "session pairs", measure, figures, (race.tolerances.get("latency", ()),))
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


def plan_schedule(run_s: float) -> PairedBenchmarkSchedule:
    """Heats of about `HEAT_S`, with fewer rounds for slow models and shorter blocks for very slow ones: long runs vary
    less, and the noise between sessions only more heats average."""
    affordable = HEAT_S / (3 * RUNS * max(run_s, 1e-9))
    blocks = int(np.clip(affordable, BLOCKS // 2, BLOCKS))
    runs = int(np.clip(4 * affordable * RUNS / blocks, SHORT, RUNS))
    warmup = int(np.clip(WARMUP_S / max(run_s, 1e-9), SHORT, 2 * RUNS))
    return PairedBenchmarkSchedule(heats=LOOKS[0], blocks=blocks, runs=runs, warmup=warmup)


def _logs(looks: Sequence[PairedBenchmarkSamples]) -> npt.NDArray[np.float64]:
    """Of the heats of all looks together: what a probe tells is read off as many runs as there are."""
    probes = [look.probe for look in looks if look.probe is not None]
    return compute_block_logs(
        np.concatenate([look.nanoseconds for look in looks]),
        np.concatenate([look.preempted for look in looks]),
        np.concatenate(probes) if len(probes) == len(looks) else None,
    )


def measure_until_decided(
    race: PairedBenchmark,
    noun: str,
    measure: Callable[[int, int], S],
    figures: Callable[[Sequence[S]], Sequence[RatioSamples]],
    tolerances: Sequence[Sequence[float]],
) -> list[S]:
    """Measure `race.models` up to each look, until every figure is decided or the next look would end too late.

    Args:
        race: the two models.
        noun: what is measured in pairs, for whoever is told.
        measure: measures in so many heats, with that seed.
        figures: the figures of all samples so far; one that cannot be known is empty, and not waited for.
        tolerances: the limits of each figure, in the order of `figures`.
    """
    samples: list[S] = []
    measured, begun = 0, time.monotonic()
    looks = ", ".join(map(str, LOOKS))
    while measured < LOOKS[-1]:
        goal = get_next_look(measured)
        race.tell(f"up to {goal} {noun}, B and A again against A (looks after {looks})")
        samples.append(measure(goal - measured, race.seed + measured))
        measured = goal
        spent = time.monotonic() - begun
        if spent * get_next_look(measured) / measured > LONGEST_S:
            break
        found = zip(figures(samples), tolerances, strict=True)
        if not any(should_continue(own, itself, limits) for (own, itself), limits in found if own):
            break
    return samples


def split_log_ratios(logs: npt.NDArray[np.float64]) -> RatioSamples:
    """Log ratios of the candidate, and of the baseline again, to the baseline.

    One session of the baseline stands against one of each, not the mean of both against the candidate: noise that is
    skewed, as that of run times is, cancels in a difference of two that are alike, and leaves a bias in the other.

    Args:
        logs: shape (heats, blocks, models), the models being `Race.models`.
    """
    first, again, candidate = np.moveaxis(logs, -1, 0)
    return _rows(candidate - first), _rows(again - first)


def compute_log_ratios(samples: PairedBenchmarkSamples) -> LogRatios:
    """log(B / A) of a race of two models: the blocks of each heat."""
    logs = compute_block_logs(samples.nanoseconds, samples.preempted, samples.probe)
    return _rows(logs[..., 1] - logs[..., 0])


def _rows(values: npt.NDArray[np.float64]) -> LogRatios:
    return tuple(tuple(float(x) for x in row) for row in values)
