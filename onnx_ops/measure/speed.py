"""Speed of a variant: latency, throughput under load, cold start and memory.

Functions that measure a model raise the errors of `Runtime`. They also raise MeasurementError if a
duration is too short to be measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import (
    EXPORT,
    ColdStartMeasurement,
    LatencyComparison,
    LatencySamples,
    PairedRatios,
    SchedulingMeasurement,
    ThroughputMeasurement,
    throughput_metric_name,
)
from onnx_ops.domain.execution import INLINE_S
from onnx_ops.domain.gate import MeasurementRequest
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.timing import (
    PairedBenchmark,
    RatioSamples,
    RawSamples,
    build_feed,
    compare_latency,
    count_rows,
    measure_latency,
    measure_until_decided,
    split_log_ratios,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import LoadSamples, LoadSchedule, Runtime, StartSamples, StartSchedule, Tensors
from onnx_ops.ports.data import Array

Floats = npt.NDArray[np.float64]

WINDOW_S, SIDE_S = 0.01, 0.3
"""Seconds of a window, and of all windows of one session, for sequential requests.

Many short alternating windows distinguish two models better than a few long windows of the same
total time. A short disturbance affects only few of them. On a busy machine, the ratio of a model to
itself varied by 6 % from pair to pair with 40 windows of 8 ms. With 6 windows of 50 ms, it varied
by 11 % (docs/adr/0006-statistics-first-version.md).
"""

FEWEST_WINDOWS, MOST_WINDOWS = 4, 32
FEWEST_EACH, MOST_REQUESTS = 4, 20_000
"""Minimum requests of a window for each thread, and maximum requests of a window.

With enough requests for each thread, the last requests of a window have little weight.
"""

CLIENTS = 32
"""Number of clients of a busy server; each client waits for its answer."""
_WAY_S, _TURNS = 0.1, 3
"""Seconds of a window, and number of sessions, of each configuration.

The seconds are for sequential requests.
"""
_MOST_RUN_S = 0.1
_SERVED_RUNTIME = "onnxruntime"
"""Name of the runtime that the endpoint server uses."""

ROUNDS_ALONE = 5
_PROBES = 20

Counts = npt.NDArray[np.int64]

REQUESTS = 20
FIGURES = {"load": "load_ns", "first": "first_ns", "peak": "peak_bytes"}
"""Fields of the samples of fresh processes, by the name of the quantity."""

FASTER = 0.0
"""Tolerance of a comparison that tests whether a variant is faster."""


def measure_throughput(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int, seed: int
) -> tuple[ThroughputMeasurement, RawSamples]:
    """Measure the requests per second of one model in fresh sessions."""
    schedule = replace(_plan_windows(runtime, model, target, feed, concurrency), seed=seed)
    samples = runtime.under_load((model, model), target, feed, schedule)
    per_second = samples.requests * 1e9 / np.median(_join_windows([samples]), axis=1)
    throughput = ThroughputMeasurement(
        concurrency=concurrency,
        batch=count_rows(feed),
        requests=samples.requests * int(samples.nanoseconds.size),
        per_second=tuple(float(rate) for rate in per_second.ravel()),
    )
    return throughput, {f"throughput/{concurrency}/alone/nanoseconds": samples.nanoseconds}


def measure_scheduling(
    runtime: Runtime,
    model: Path,
    target: Target,
    inputs: Tensors,
    latency: LatencySamples,
    cores: int,
    seed: int,
) -> tuple[SchedulingMeasurement, ...]:
    """Measure how fast a server answers with different numbers of threads and batches.

    A configuration is a number of concurrent requests, as single runs or in batches. The requests
    of `CLIENTS` clients are shared among the threads; one share is in transit from and to the
    clients. Configurations alternate, each time in a fresh session.

    Returns:
        Median rates in rows per second. The result is empty if servers run the model on the event
        loop, or do not support the target's runtime. It is also empty if the model is too slow to
        be measured this often. The same is true if a MeasurementError occurs, for example because
        the model rejects these batches.
    """
    run_s = latency.quantiles_ns["p50"] / 1e9 / latency.batch
    if target.runtime != _SERVED_RUNTIME or not INLINE_S <= run_s <= _MOST_RUN_S:
        return ()
    most = max(1, cores // (target.session.intra_op_threads or cores))
    ways = _list_ways(most, read_model_info(model).fixed_batch)
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in sorted(ways)}
    with contextlib.suppress(MeasurementError):
        for turn in range(_TURNS):
            for (count, rows), measured in rates.items():
                requests = count * max(2, round(_WAY_S / (run_s * rows * count)))
                schedule = LoadSchedule(
                    concurrency=count, requests=requests, rounds=1, windows=2, seed=seed + turn
                )
                samples = runtime.under_load(
                    (model,), target, build_feed(model, inputs, rows), schedule
                )
                measured.extend(
                    float(rows * requests * 1e9 / ns) for ns in _join_windows([samples]).ravel()
                )
        return tuple(
            SchedulingMeasurement(threads=count, rows=rows, rows_per_s=float(np.median(measured)))
            for (count, rows), measured in rates.items()
        )
    return ()


def _list_ways(most: int, fixed: int) -> list[tuple[int, int]]:
    """Return the configurations, as pairs of threads and rows of a run.

    The numbers of threads are `most` and the powers of 2 up to it. The rows are those of a single
    run and of a batch, or the fixed batch.
    """
    threads = sorted({most, *(2**n for n in range(most.bit_length()))})
    return [
        (count, rows)
        for count in threads
        for rows in ({fixed} if fixed else {1, max(1, CLIENTS // (count + 1))})
    ]


def compare_throughput(pair: PairedBenchmark, concurrency: int) -> tuple[PairedRatios, RawSamples]:
    """Compare the throughput of baseline and candidate in alternating windows.

    For the end of the measurement, see `measure_until_decided`.
    """
    schedule = _plan_windows(pair.runtime, pair.baseline, pair.target, pair.feed, concurrency)

    def measure(rounds: int, seed: int) -> LoadSamples:
        return pair.runtime.under_load(
            pair.models, pair.target, pair.feed, replace(schedule, rounds=rounds, seed=seed)
        )

    def figures(samples: Sequence[LoadSamples]) -> tuple[RatioSamples]:
        return (split_log_ratios(np.log(_join_windows(samples))),)

    noun = f"session pairs under {concurrency} concurrent requests"
    looks = measure_until_decided(
        pair, noun, measure, figures, (pair.tolerances.get("throughput", ()),)
    )
    ((log_ratios, self_ratios),) = figures(looks)
    comparison = PairedRatios(
        figure=throughput_metric_name(concurrency),
        against=pair.against,
        baseline=digest_file(pair.baseline),
        log_ratios=log_ratios,
        self_log_ratios=self_ratios,
    )
    where = f"throughput/{concurrency}/{pair.against}"
    return comparison, {
        f"{where}/nanoseconds": _join_windows(looks),
        f"{where}/requests": np.array(schedule.requests),
    }


def _plan_windows(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int
) -> LoadSchedule:
    """Return a schedule with the same number of requests per window for both models.

    The last requests of a window, when some threads are idle, then affect both models equally.
    """
    samples = runtime.sample(model, target, feed, runs=_PROBES, warmup=_PROBES)
    typical = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-9)
    fewest = FEWEST_EACH * concurrency
    requests = int(np.clip(WINDOW_S / typical, fewest, max(fewest, MOST_REQUESTS)))
    windows = int(np.clip(SIDE_S / (requests * typical), FEWEST_WINDOWS, MOST_WINDOWS))
    return LoadSchedule(
        concurrency=concurrency, requests=requests, rounds=ROUNDS_ALONE, windows=windows
    )


def _join_windows(samples: Sequence[LoadSamples]) -> Floats:
    nanoseconds = np.concatenate([s.nanoseconds for s in samples]).astype(np.float64)
    if not (nanoseconds > 0).all():
        raise MeasurementError("a window of requests took no measurable time")
    return nanoseconds


def measure_starts(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, seed: int
) -> tuple[ColdStartMeasurement, RawSamples]:
    """Measure load time, first inference and peak memory of fresh processes."""
    schedule = StartSchedule(rounds=ROUNDS_ALONE, requests=REQUESTS, seed=seed)
    samples = runtime.starts((model, model), target, feed, schedule)
    load, first, peak = (_join_starts([samples], figure).ravel() for figure in FIGURES)
    starts = ColdStartMeasurement(
        batch=count_rows(feed),
        requests=REQUESTS,
        load_s=tuple(float(ns) / 1e9 for ns in load),
        first_s=tuple(float(ns) / 1e9 for ns in first),
        peak_bytes=tuple(int(size) for size in peak) if (peak > 0).all() else (),
    )
    return starts, _name_samples("starts/alone", [samples])


def compare_starts(pair: PairedBenchmark) -> tuple[tuple[PairedRatios, ...], RawSamples]:
    """Compare fresh processes of baseline and candidate.

    For the end of the measurement, see `measure_until_decided`. Peak memory is left out if a value
    is unknown or 0.
    """

    def measure(rounds: int, seed: int) -> StartSamples:
        schedule = StartSchedule(rounds=rounds, requests=REQUESTS, seed=seed)
        return pair.runtime.starts(pair.models, pair.target, pair.feed, schedule)

    def figures(samples: Sequence[StartSamples]) -> tuple[RatioSamples, ...]:
        counts = [_join_starts(samples, figure) for figure in FIGURES]
        return tuple(
            # Each round is one block. A peak that is unknown (-1) or 0 has no logarithm.
            split_log_ratios(np.log(values.astype(np.float64))[:, np.newaxis])
            if (values > 0).all()
            else ((), ())
            for values in counts
        )

    cold, memory = pair.tolerances.get("cold_start", ()), pair.tolerances.get("memory", ())
    looks = measure_until_decided(
        pair, "pairs of fresh processes", measure, figures, (cold, cold, memory)
    )
    baseline = digest_file(pair.baseline)
    comparisons = tuple(
        PairedRatios(
            figure=figure,
            against=pair.against,
            baseline=baseline,
            log_ratios=log_ratios,
            self_log_ratios=self_ratios,
        )
        for figure, (log_ratios, self_ratios) in zip(FIGURES, figures(looks), strict=True)
        if log_ratios
    )
    return comparisons, _name_samples(f"starts/{pair.against}", looks)


def _join_starts(samples: Sequence[StartSamples], figure: str) -> Counts:
    """Return one quantity of all processes, of shape (rounds, models)."""
    values = np.concatenate([getattr(s, FIGURES[figure]) for s in samples]).astype(np.int64)
    if figure != "peak" and not (values > 0).all():
        raise MeasurementError(
            f"the time {figure!r} of a fresh process is not above the resolution of the clock"
        )
    return values


def _name_samples(where: str, samples: Sequence[StartSamples]) -> RawSamples:
    return {f"{where}/{figure}": _join_starts(samples, figure) for figure in FIGURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasurements:
    """Measurements for the evidence, and their raw samples by array name."""

    latency: LatencySamples
    comparisons: tuple[LatencyComparison, ...]
    throughput: tuple[ThroughputMeasurement, ...]
    starts: ColdStartMeasurement | None
    ratios: tuple[PairedRatios, ...]
    raw: RawSamples


def measure_speed(
    runtime: Runtime,
    target: Target,
    candidate: Path,
    baselines: Mapping[str, Path],
    feed: Tensors,
    request: MeasurementRequest,
    *,
    seed: int,
) -> SpeedMeasurements:
    """Measure the variant alone, and compare it with each of its baselines.

    Only the last baseline is compared in throughput, starts and memory. A champion can have other
    inputs, which these rows do not fit. Failed comparisons with a champion are omitted; the gates
    report that they are missing.
    """
    latency, raw = measure_latency(runtime, candidate, target, feed)
    samples: dict[str, Array] = dict(raw)
    throughput = []
    for level in request.throughput:
        level_throughput, raw = measure_throughput(runtime, candidate, target, feed, level, seed)
        throughput.append(level_throughput)
        samples |= raw
    starts = None
    if request.starts:
        starts, raw = measure_starts(runtime, candidate, target, feed, seed)
        samples |= raw
    comparisons: list[LatencyComparison] = []
    ratios: tuple[PairedRatios, ...] = ()
    for against, baseline in baselines.items():
        pair = PairedBenchmark(
            runtime=runtime,
            target=target,
            baseline=baseline,
            candidate=candidate,
            against=against,
            feed=feed,
            seed=seed,
            tolerances=request.tolerances,
        )
        with (
            contextlib.nullcontext() if against == EXPORT else contextlib.suppress(MeasurementError)
        ):
            limits = request.tolerances.get("latency", ())
            # The choice of a variant also depends on whether it is faster than the export.
            if against == EXPORT:
                limits = (FASTER, *limits, *request.tolerances.get("speedup", ()))
            comparison, raw = compare_latency(replace(pair, tolerances={"latency": limits}))
            comparisons.append(comparison)
            samples |= raw
            if against == list(baselines)[-1]:
                ratios, raw = compare_resources(pair, request)
                samples |= raw
    return SpeedMeasurements(
        latency=latency,
        comparisons=tuple(comparisons),
        throughput=tuple(throughput),
        starts=starts,
        ratios=ratios,
        raw=samples,
    )


def compare_resources(
    pair: PairedBenchmark, request: MeasurementRequest
) -> tuple[tuple[PairedRatios, ...], RawSamples]:
    """Compare throughput, starts and memory, as far as they are requested.

    Measurements of the candidate and the baseline alternate.
    """
    ratios: list[PairedRatios] = []
    samples: dict[str, Array] = {}
    for level in request.throughput:
        ratio, raw = compare_throughput(pair, level)
        ratios.append(ratio)
        samples |= raw
    if request.starts:
        figures, raw = compare_starts(pair)
        ratios += figures
        samples |= raw
    return tuple(ratios), samples
