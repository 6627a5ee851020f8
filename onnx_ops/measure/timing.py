"""Time one model, or two models alternately until the limits are decided.

Functions that measure a model raise the errors of `Runtime`. Comparisons also raise
MeasurementError if a block of runs takes no measurable time.
"""

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
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import PairedBenchmarkSamples, PairedBenchmarkSchedule, Runtime, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.latency import (
    LOOKS,
    compute_block_logs,
    get_next_look,
    load_functions,
    should_continue,
)

RUNS_ALONE = 800
"""Number of runs of one model.

With this number, a 99th percentile can pass with up to three runs above the limit.
"""

WARMUP_ALONE = 50

LONGEST_S = 120.0
"""Time limit of a comparison in seconds.

A gate's limit that is undecided by then remains undecided.
"""

ROUND_S = 0.05
"""Target time of the runs of a round in seconds.

Rounds of fast models are shorter, and those of slow models are longer (see `BLOCKS`).
"""

LONGEST_ROUND_S = 2.4
"""Time limit of the runs of a round in seconds.

The blocks of slower models have fewer runs.
"""

WARMUP_S = 0.02
"""Time of the warm-up runs in seconds, which are not evaluated.

There are at least `SHORT` and at most `2 * RUNS` warm-up runs.
"""

BLOCKS = (6, 12)
"""Minimum and maximum blocks of a round."""

RUNS, SHORT = 10, 3
"""Maximum and minimum runs of a block."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

RawSamples = Mapping[str, Array]
"""The raw samples of measurements, by array name."""

LogRatios = tuple[tuple[float, ...], ...]
"""log(B / A) of each block, by pair of sessions; A is the baseline."""

RatioSamples = tuple[LogRatios, LogRatios]
"""Log ratios of the candidate, and of a repeated baseline, to the baseline."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedBenchmark:
    """Two models on one target, with the same request.

    `against` names the baseline in results. `seed` determines the order of runs. `tolerances` are
    the limits to decide, by kind of gate.
    """

    runtime: Runtime
    target: Target
    baseline: Path
    candidate: Path
    against: str
    feed: Tensors
    seed: int
    tolerances: Mapping[str, Sequence[float]]
    report: Callable[[str], None] = lambda _: None

    @property
    def models(self) -> tuple[Path, Path, Path]:
        """Return the models of a round: the baseline twice, and the candidate."""
        return self.baseline, self.baseline, self.candidate


def build_feed(model: Path, inputs: Tensors, batch: int) -> Tensors:
    """Return the inputs of one request, of `batch` real rows or of the fixed batch."""
    rows = np.arange(read_model_info(model).fixed_batch or batch) % len(next(iter(inputs.values())))
    return {name: array[rows] for name, array in inputs.items()}


def count_rows(feed: Tensors) -> int:
    """Return the number of rows of a request."""
    return max((len(array) for array in feed.values() if array.ndim), default=1)


def measure_latency(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, *, runs: int = RUNS_ALONE
) -> tuple[LatencySamples, RawSamples]:
    """Measure single runs of one model in one session.

    The quantiles are of runs that were not preempted, or of all runs if all were preempted.
    """
    samples = runtime.sample(model, target, feed, runs=runs, warmup=WARMUP_ALONE)
    preempted = samples.preempted.astype(bool)
    usable = (
        np.sort(samples.nanoseconds[~preempted])
        if (~preempted).any()
        else np.sort(samples.nanoseconds)
    )
    latency = LatencySamples(
        batch=count_rows(feed),
        runs=int(samples.nanoseconds.size),
        preempted=int(preempted.sum()),
        quantiles_ns={name: float(np.quantile(usable, q)) for name, q in QUANTILES.items()},
        sorted_ns=tuple(int(ns) for ns in usable),
    )
    return latency, {"alone/nanoseconds": samples.nanoseconds, "alone/preempted": samples.preempted}


def compare_latency(pair: PairedBenchmark) -> tuple[LatencyComparison, RawSamples]:
    """Compare fresh sessions of baseline and candidate.

    For the end of the measurement, see `measure_until_decided`.
    """
    alone = pair.runtime.sample(pair.baseline, pair.target, pair.feed, runs=5, warmup=1)
    schedule = plan_schedule(float(np.median(alone.nanoseconds.astype(np.float64))) / 1e9)

    def measure(rounds: int, seed: int) -> PairedBenchmarkSamples:
        return pair.runtime.benchmark(
            pair.models, pair.target, pair.feed, replace(schedule, rounds=rounds, seed=seed)
        )

    def figures(looks: Sequence[PairedBenchmarkSamples]) -> tuple[RatioSamples]:
        """Return the log ratios of all samples so far.

        The effect of the probe is estimated from all runs.
        """
        probes = [look.probe for look in looks if look.probe is not None]
        logs = compute_block_logs(
            np.concatenate([look.nanoseconds for look in looks]),
            np.concatenate([look.preempted for look in looks]),
            np.concatenate(probes) if len(probes) == len(looks) else None,
        )
        return (split_log_ratios(logs),)

    looks = measure_until_decided(
        pair, "session pairs", measure, figures, (pair.tolerances.get("latency", ()),)
    )
    ((ratios, self_ratios),) = figures(looks)
    comparison = LatencyComparison(
        against=pair.against,
        baseline=digest_file(pair.baseline),
        log_ratios=ratios,
        self_log_ratios=self_ratios,
        runs=sum(int(look.nanoseconds.size) for look in looks),
        preempted=sum(int(look.preempted.sum()) for look in looks),
        calls=max(look.calls for look in looks),
    )
    return comparison, {
        f"{pair.against}/look-{number}/{name}": array
        for number, look in enumerate(looks, start=1)
        for name, array in (
            ("nanoseconds", look.nanoseconds),
            ("preempted", look.preempted),
            ("probe", look.probe),
        )
        if array is not None
    }


def plan_schedule(run_s: float) -> PairedBenchmarkSchedule:
    """Plan the rounds of a model, with fewer and shorter blocks if it is slow.

    Long runs vary less, so that fewer blocks suffice. The noise between sessions is averaged only
    over rounds. With half the blocks, a round takes about two thirds of the time. A verdict then
    needs 8 to 19 % more rounds for a model of 0.25 ms. For a model of 1 ms, it needs 18 to 36 %
    more (docs/adr/0014-latency-on-shared-machines.md).
    """
    run_s = max(run_s, 1e-9)
    blocks = int(np.clip(ROUND_S / (3 * RUNS * run_s), *BLOCKS))
    runs = int(np.clip(LONGEST_ROUND_S / (3 * BLOCKS[0] * run_s), SHORT, RUNS))
    warmup = int(np.clip(WARMUP_S / run_s, SHORT, 2 * RUNS))
    return PairedBenchmarkSchedule(rounds=LOOKS[0], blocks=blocks, runs=runs, warmup=warmup)


def measure_until_decided(
    pair: PairedBenchmark,
    noun: str,
    measure: Callable[[int, int], S],
    figures: Callable[[Sequence[S]], Sequence[RatioSamples]],
    tolerances: Sequence[Sequence[float]],
) -> list[S]:
    """Measure until all limits are decided or time runs out.

    The samples are evaluated at each look: when the number of rounds reaches the next entry of
    `LOOKS`. The measurement also ends at the last look, or if later looks can decide no further
    limit (see `should_continue`). `measure` takes the number of rounds and a seed. `figures`
    computes the ratios of all samples so far; unknown ratios are empty and do not extend the
    measurement. `tolerances` are the limits of each of these ratios, in the same order. `noun`
    names the pairs in progress messages.
    """
    load_functions()  # Loading the functions during the first measurement would slow it down.
    samples: list[S] = []
    measured, begun = 0, time.monotonic()
    looks = ", ".join(map(str, LOOKS))
    while measured < LOOKS[-1]:
        goal = get_next_look(measured)
        pair.report(
            f"up to {goal} {noun}: candidate against baseline, and baseline against itself "
            f"(evaluated after {looks})"
        )
        samples.append(measure(goal - measured, pair.seed + measured))
        measured = goal
        spent = time.monotonic() - begun
        if spent * get_next_look(measured) / measured > LONGEST_S:
            break
        undecided = zip(figures(samples), tolerances, strict=True)
        if not any(
            should_continue(own, itself, limits) for (own, itself), limits in undecided if own
        ):
            break
    return samples


def split_log_ratios(logs: npt.NDArray[np.float64]) -> RatioSamples:
    """Return log ratios of the candidate and of the repeated baseline to the baseline.

    The first session of the baseline is compared with its second session, and with the session of
    the candidate. In a difference of two sessions, skewed noise like that of run times cancels. If
    the mean of both baseline sessions were compared with the candidate, a bias would remain.

    Args:
        logs: shape (rounds, blocks, models), in the order of `PairedBenchmark.models`.
    """
    first, again, candidate = np.moveaxis(logs, -1, 0)
    return _as_tuples(candidate - first), _as_tuples(again - first)


def compute_log_ratios(samples: PairedBenchmarkSamples) -> LogRatios:
    """Return log(B / A) of two models for each block of each round."""
    logs = compute_block_logs(samples.nanoseconds, samples.preempted, samples.probe)
    return _as_tuples(logs[..., 1] - logs[..., 0])


def _as_tuples(values: npt.NDArray[np.float64]) -> LogRatios:
    return tuple(tuple(float(x) for x in row) for row in values)
