"""Speed of a variant: latency, throughput under load, cold start and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import (
    ColdStartMeasurement,
    LatencyComparison,
    LatencySamples,
    PairedRatios,
    ThroughputMeasurement,
    throughput_metric_name,
)
from onnx_ops.domain.gate import MeasurementRequest
from onnx_ops.domain.pipeline import EXPORT
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.timing import (
    PairedBenchmark,
    RatioSamples,
    RawSamples,
    compare_latency,
    count_rows,
    measure_latency,
    measure_until_decided,
    split_log_ratios,
)
from onnx_ops.ports import LoadSamples, LoadSchedule, Runtime, StartSamples, StartSchedule, Tensors
from onnx_ops.ports.data import Array

Floats = npt.NDArray[np.float64]

WINDOW_S, SIDE_S = 0.01, 0.3
"""Length of a window, and of all windows of one session, if their requests were sent one after the other.

Many short windows in turns tell two models apart better than a few long ones of the same sum: what disturbs the
machine for a moment meets few of them. Measured on a busy machine, the ratio of a model to itself varied by 6 % from
pair to pair with 40 windows of 8 ms, and by 11 % with 6 of 50 ms.
"""

FEWEST_WINDOWS, MOST_WINDOWS = 4, 32
FEWEST_EACH, MOST_REQUESTS = 4, 20_000
"""Requests of a window: for each thread at least, so that those that end last weigh little, and in all at most."""

ROUNDS_ALONE = 5
_PROBES = 20

Counts = npt.NDArray[np.int64]

REQUESTS = 20
FIGURES = ("load", "first", "peak")

FASTER = 0.0
"""The limit that asks whether a variant is faster at all."""


def measure_throughput(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int, seed: int
) -> tuple[ThroughputMeasurement, RawSamples]:
    """Requests per second of fresh sessions of one model.

    Raises:
        MeasurementError: the model does not run there.
    """
    schedule = replace(_schedule(runtime, model, target, feed, concurrency), seed=seed)
    samples = runtime.under_load((model, model), target, feed, schedule)
    per_second = samples.requests * 1e9 / np.median(_positive([samples]), axis=1)
    found = ThroughputMeasurement(
        concurrency=concurrency,
        batch=count_rows(feed),
        requests=samples.requests * int(samples.nanoseconds.size),
        per_second=tuple(float(rate) for rate in per_second.ravel()),
    )
    return found, {f"throughput/{concurrency}/alone/nanoseconds": samples.nanoseconds}


def compare_throughput(race: PairedBenchmark, concurrency: int) -> tuple[PairedRatios, RawSamples]:
    """Windows of the baseline, of the baseline again and of the candidate in turns, look by look.

    Raises:
        MeasurementError: one of the models does not run there.
    """
    schedule = _schedule(race.runtime, race.baseline, race.target, race.feed, concurrency)

    def measure(heats: int, seed: int) -> LoadSamples:
        return race.runtime.under_load(race.models, race.target, race.feed, replace(schedule, heats=heats, seed=seed))

    def figures(samples: Sequence[LoadSamples]) -> tuple[RatioSamples]:
        return (split_log_ratios(np.log(_positive(samples))),)

    noun = f"session pairs under {concurrency} requests at once"
    looks = measure_until_decided(race, noun, measure, figures, (race.tolerances.get("throughput", ()),))
    ((own, itself),) = figures(looks)
    found = PairedRatios(
        figure=throughput_metric_name(concurrency),
        against=race.against,
        baseline=digest_file(race.baseline),
        log_ratios=own,
        self_log_ratios=itself,
    )
    where = f"throughput/{concurrency}/{race.against}"
    return found, {f"{where}/nanoseconds": _join_windows(looks), f"{where}/requests": np.array(schedule.requests)}


def _schedule(runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int) -> LoadSchedule:
    """Windows of as many requests on both sides, so that they end alike."""
    samples = runtime.sample(model, target, feed, runs=_PROBES, warmup=_PROBES)
    typical = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-9)
    fewest = FEWEST_EACH * concurrency
    requests = int(np.clip(WINDOW_S / typical, fewest, max(fewest, MOST_REQUESTS)))
    windows = int(np.clip(SIDE_S / (requests * typical), FEWEST_WINDOWS, MOST_WINDOWS))
    return LoadSchedule(concurrency=concurrency, requests=requests, heats=ROUNDS_ALONE, windows=windows)


def _join_windows(samples: Sequence[LoadSamples]) -> Floats:
    return np.concatenate([s.nanoseconds for s in samples]).astype(np.float64)


def _positive(samples: Sequence[LoadSamples]) -> Floats:
    nanoseconds = _join_windows(samples)
    if not (nanoseconds > 0).all():
        raise MeasurementError("a window of requests took no measurable time")
    return nanoseconds


def measure_starts(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, seed: int
) -> tuple[ColdStartMeasurement, RawSamples]:
    """Fresh processes of one model.

    Raises:
        MeasurementError: a process crashed, or could not run the model.
    """
    schedule = StartSchedule(heats=ROUNDS_ALONE, requests=REQUESTS, seed=seed)
    samples = runtime.starts((model, model), target, feed, schedule)
    load, first, peak = (_joined([samples], figure).ravel() for figure in FIGURES)
    found = ColdStartMeasurement(
        batch=count_rows(feed),
        requests=REQUESTS,
        load_s=tuple(float(ns) / 1e9 for ns in load),
        first_s=tuple(float(ns) / 1e9 for ns in first),
        peak_bytes=tuple(int(size) for size in peak) if (peak > 0).all() else (),
    )
    return found, _name_samples("starts/alone", [samples])


def compare_starts(race: PairedBenchmark) -> tuple[tuple[PairedRatios, ...], RawSamples]:
    """Fresh processes of the baseline, of the baseline again and of the candidate in turns, look by look.

    Memory has no entry where the system does not tell it.

    Raises:
        MeasurementError: a process crashed, or could not run its model.
    """

    def measure(heats: int, seed: int) -> StartSamples:
        schedule = StartSchedule(heats=heats, requests=REQUESTS, seed=seed)
        return race.runtime.starts(race.models, race.target, race.feed, schedule)

    def figures(samples: Sequence[StartSamples]) -> tuple[RatioSamples, ...]:
        return tuple(_figure(_joined(samples, figure)) for figure in FIGURES)

    cold, memory = race.tolerances.get("cold_start", ()), race.tolerances.get("memory", ())
    looks = measure_until_decided(race, "pairs of fresh processes", measure, figures, (cold, cold, memory))
    baseline = digest_file(race.baseline)
    found = tuple(
        PairedRatios(figure=figure, against=race.against, baseline=baseline, log_ratios=own, self_log_ratios=itself)
        for figure, (own, itself) in zip(FIGURES, figures(looks), strict=True)
        if own
    )
    return found, _name_samples(f"starts/{race.against}", looks)


def _joined(samples: Sequence[StartSamples], figure: str) -> Counts:
    """One figure of all processes, of shape (heats, models)."""
    names = {"load": "load_ns", "first": "first_ns", "peak": "peak_bytes"}
    values = np.concatenate([getattr(s, names[figure]) for s in samples]).astype(np.int64)
    if figure != "peak" and not (values > 0).all():
        raise MeasurementError(f"{figure} of a fresh process took no measurable time")
    return values


def _figure(values: Counts) -> RatioSamples:
    """One block a heat; nothing where a value is not known."""
    if not (values > 0).all():
        return (), ()
    return split_log_ratios(np.log(values.astype(np.float64))[:, np.newaxis])


def _name_samples(where: str, samples: Sequence[StartSamples]) -> RawSamples:
    return {f"{where}/{figure}": _joined(samples, figure) for figure in FIGURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSpec:
    """A variant on one target, and the models it is measured against by name; the last one is its baseline."""

    runtime: Runtime
    target: Target
    candidate: Path
    rivals: Mapping[str, Path]
    feed: Tensors
    seed: int

    def race(self, against: str, tolerances: Mapping[str, Sequence[float]]) -> PairedBenchmark:
        return PairedBenchmark(
            runtime=self.runtime,
            target=self.target,
            baseline=self.rivals[against],
            candidate=self.candidate,
            against=against,
            feed=self.feed,
            seed=self.seed,
            tolerances=tolerances,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasurements:
    """Figures for the evidence, and the raw samples behind them by array name."""

    latency: LatencySamples
    comparisons: tuple[LatencyComparison, ...]
    throughput: tuple[ThroughputMeasurement, ...]
    starts: ColdStartMeasurement | None
    ratios: tuple[PairedRatios, ...]
    raw: RawSamples


def measure_speed(contest: ComparisonSpec, asked: MeasurementRequest) -> SpeedMeasurements:
    """The variant alone, its latency against every rival, and what else was asked against its baseline.

    A rival other than the export may be a model with other inputs, which cannot be fed with these rows: what could
    not be measured against it is left out, and its gate says so.

    Raises:
        MeasurementError: the variant does not run there.
    """
    feed, seed, place = contest.feed, contest.seed, (contest.runtime, contest.candidate, contest.target)
    latency, raw = measure_latency(*place, feed)
    samples: dict[str, Array] = dict(raw)
    throughput = []
    for level in asked.throughput:
        found, raw = measure_throughput(*place, feed, level, seed)
        throughput.append(found)
        samples |= raw
    starts = None
    if asked.starts:
        starts, raw = measure_starts(*place, feed, seed)
        samples |= raw
    comparisons: list[LatencyComparison] = []
    ratios: list[PairedRatios] = []
    for against in contest.rivals:
        with contextlib.nullcontext() if against == EXPORT else contextlib.suppress(MeasurementError):
            comparison, raw = compare_latency(contest.race(against, _limits(against, asked.tolerances)))
            comparisons.append(comparison)
            samples |= raw
            if against == list(contest.rivals)[-1]:
                found_ratios, raw = compare_resources(contest.race(against, asked.tolerances), asked)
                ratios += found_ratios
                samples |= raw
    return SpeedMeasurements(
        latency=latency,
        comparisons=tuple(comparisons),
        throughput=tuple(throughput),
        starts=starts,
        ratios=tuple(ratios),
        raw=samples,
    )


def compare_resources(race: PairedBenchmark, asked: MeasurementRequest) -> tuple[tuple[PairedRatios, ...], RawSamples]:
    """What was asked for beside latency, of candidate and baseline in turns.

    Raises:
        MeasurementError: one of the models does not run there.
    """
    ratios: list[PairedRatios] = []
    samples: dict[str, Array] = {}
    for level in asked.throughput:
        found, raw = compare_throughput(race, level)
        ratios.append(found)
        samples |= raw
    if asked.starts:
        figures, raw = compare_starts(race)
        ratios += figures
        samples |= raw
    return tuple(ratios), samples


def _limits(against: str, tolerances: Mapping[str, Sequence[float]]) -> Mapping[str, Sequence[float]]:
    """The export is also asked whether the variant is faster, which the choice between variants needs."""
    if against != EXPORT:
        return tolerances
    latency = (FASTER, *tolerances.get("latency", ()), *tolerances.get("speedup", ()))
    return {**tolerances, "latency": latency}
