"""Times a variant: alone, and side by side with what it is compared with, until the limits can be decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnx_ops.analysis.latency import LOOKS, block_log_ratios, blocks_needed, needs_more, next_look
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import LatencyComparison, LatencySamples
from onnx_ops.domain.target import Target
from onnx_ops.ports import PairSamples, PairSchedule, Runtime, Tensors
from onnx_ops.ports.models import Array

RUNS_ALONE = 800
"""Enough for a 99th percentile to pass with up to three runs above its limit."""

WARMUP_ALONE = 50
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Raw = Mapping[str, Array]
"""The samples behind figures, by array name."""

LogRatios = tuple[tuple[float, ...], ...]
"""log(B / A) of the blocks of each pair."""

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
    """Session pairs of baseline and candidate, and of the baseline against itself, look by look.

    Raises:
        MeasurementFailure: one of the models does not run there.
    """

    def measure(candidate: Path, pairs: int, seed: int, selves: Sequence[PairSamples]) -> PairSamples:
        schedule = PairSchedule(pairs=pairs, blocks=blocks_needed(ratios(selves)[0]), seed=seed)
        return race.runtime.pair(race.baseline, candidate, race.target, race.feed, schedule)

    def ratios(samples: Sequence[PairSamples]) -> tuple[LogRatios, ...]:
        return (tuple(pair for look in samples for pair in _pairs(look)),)

    own, selves = look_by_look(race, "session pairs", measure, ratios, (race.tolerances.get("latency", ()),))
    comparison = LatencyComparison(
        against=race.against,
        baseline=digest_file(race.baseline),
        log_ratios=ratios(own)[0],
        self_log_ratios=ratios(selves)[0],
        runs=sum(int(look.nanoseconds.size) for look in own),
        preempted=sum(int(look.preempted.sum()) for look in own),
    )
    return comparison, {
        f"{race.against}{side}/look-{number}/{name}": array
        for side, looks in (("", own), ("/self", selves))
        for number, look in enumerate(looks, start=1)
        for name, array in (("nanoseconds", look.nanoseconds), ("preempted", look.preempted.astype(bool)))
    }


def look_by_look(
    race: Race,
    noun: str,
    measure: Callable[[Path, int, int, Sequence[S]], S],
    ratios: Callable[[Sequence[S]], tuple[LogRatios, ...]],
    tolerances: Sequence[Sequence[float]],
) -> tuple[list[S], list[S]]:
    """Measure the candidate and the baseline against the baseline, up to each look, until every figure is decided.

    Args:
        race: the two models.
        noun: what is measured in pairs, for whoever is told.
        measure: measures the model of that path against the baseline, in so many pairs, with that seed, knowing what
            the baseline showed against itself so far.
        ratios: the figures of all samples so far; a figure that cannot be known is empty, and not waited for.
        tolerances: the limits of each figure, in the order of `ratios`.

    Returns:
        Samples of the candidate, and of the baseline against itself.
    """
    own: list[S] = []
    selves: list[S] = []
    measured = 0
    looks = ", ".join(map(str, LOOKS))
    while measured < LOOKS[-1]:
        goal = next_look(measured)
        for samples, model, who in ((own, race.candidate, "B against A"), (selves, race.baseline, "A against itself")):
            race.tell(f"{goal - measured} {noun}, {who} (looks after {looks})")
            samples.append(measure(model, goal - measured, race.seed + measured, tuple(selves)))
        measured = goal
        found = zip(ratios(own), ratios(selves), tolerances, strict=True)
        if not any(needs_more(x, noise, limits) for x, noise, limits in found if x):
            break
    return own, selves


def _pairs(look: PairSamples) -> LogRatios:
    log_ratios = block_log_ratios(look.nanoseconds, look.preempted.astype(bool))
    return tuple(tuple(float(x) for x in pair) for pair in log_ratios)
