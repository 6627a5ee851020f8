"""Times a variant: alone, and side by side with what it is compared with, until the limits can be decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.analysis.latency import LOOKS, block_log_ratios, blocks_needed, needs_more, next_look
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import LatencyComparison, LatencySamples
from onnx_ops.domain.target import Target
from onnx_ops.ports import PairSamples, PairSchedule, Runtime, Tensors

RUNS_ALONE = 800
"""Enough for a 99th percentile to pass with up to three runs above its limit."""

WARMUP_ALONE = 50
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Figures for the evidence, and the raw samples behind them by array name."""

    latency: LatencySamples
    comparisons: tuple[LatencyComparison, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two models on one target, fed with the same rows. `tolerances` are the limits that must be decided."""

    runtime: Runtime
    target: Target
    baseline: Path
    candidate: Path
    feed: Tensors
    seed: int
    tolerances: Sequence[float]


def feed_of(inputs: Tensors, batch: int) -> Tensors:
    """One request of `batch` real rows; rows repeat if there are fewer."""
    rows = np.arange(batch) % len(next(iter(inputs.values())))
    return {name: array[rows] for name, array in inputs.items()}


def time_alone(runtime: Runtime, model: Path, target: Target, feed: Tensors, batch: int) -> Timing:
    """Single runs of one session.

    Raises:
        MeasurementFailure: the model does not run there.
    """
    samples = runtime.sample(model, target, feed, runs=RUNS_ALONE, warmup=WARMUP_ALONE)
    lost = samples.preempted.astype(bool)
    kept = np.sort(samples.nanoseconds[~lost]) if (~lost).any() else np.sort(samples.nanoseconds)
    latency = LatencySamples(
        batch=batch,
        runs=int(samples.nanoseconds.size),
        preempted=int(lost.sum()),
        quantiles_ns={name: float(np.quantile(kept, q)) for name, q in QUANTILES.items()},
        sorted_ns=tuple(int(ns) for ns in kept),
    )
    raw = {"alone/nanoseconds": samples.nanoseconds, "alone/preempted": samples.preempted}
    return Timing(latency=latency, raw=raw)


def time_against(timing: Timing, race: Race, against: str) -> Timing:
    """Session pairs of baseline and candidate, and of the baseline against itself, look by look.

    Raises:
        MeasurementFailure: one of the models does not run there.
    """
    pairs: list[PairSamples] = []
    selves: list[PairSamples] = []
    measured = 0
    while measured < LOOKS[-1]:
        goal = next_look(measured)
        schedule = PairSchedule(pairs=goal - measured, blocks=blocks_needed(_ratios(selves)), seed=race.seed + measured)
        pairs.append(race.runtime.pair(race.baseline, race.candidate, race.target, race.feed, schedule))
        selves.append(race.runtime.pair(race.baseline, race.baseline, race.target, race.feed, schedule))
        measured = goal
        if not needs_more(_ratios(pairs), _ratios(selves), race.tolerances):
            break
    comparison = LatencyComparison(
        against=against,
        baseline=digest_file(race.baseline),
        log_ratios=_ratios(pairs),
        self_log_ratios=_ratios(selves),
        runs=sum(int(s.nanoseconds.size) for s in pairs),
        preempted=sum(int(s.preempted.sum()) for s in pairs),
    )
    raw = {
        f"{against}{side}/look-{look}/{name}": array
        for side, measured_pairs in (("", pairs), ("/self", selves))
        for look, samples in enumerate(measured_pairs, start=1)
        for name, array in (("nanoseconds", samples.nanoseconds), ("preempted", samples.preempted.astype(bool)))
    }
    return replace(timing, comparisons=(*timing.comparisons, comparison), raw={**timing.raw, **raw})


def _ratios(samples: Sequence[PairSamples]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(float(x) for x in pair)
        for look in samples
        for pair in block_log_ratios(look.nanoseconds, look.preempted.astype(bool))
    )
