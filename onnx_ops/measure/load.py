"""Throughput: a session that several threads call at once, alone and in turns with that of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import PairedRatios, Throughput, throughput_figure
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.timing import Figure, Race, Raw, figure_of, look_by_look, rows_of
from onnx_ops.ports import LoadSamples, LoadSchedule, Runtime, Tensors

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

HEATS_ALONE = 5
_PROBES = 20


def throughput_alone(
    runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int, seed: int
) -> tuple[Throughput, Raw]:
    """Requests per second of fresh sessions of one model.

    Raises:
        MeasurementError: the model does not run there.
    """
    schedule = replace(_schedule(runtime, model, target, feed, concurrency), seed=seed)
    samples = runtime.under_load((model, model), target, feed, schedule)
    per_second = samples.requests * 1e9 / np.median(_positive([samples]), axis=1)
    found = Throughput(
        concurrency=concurrency,
        batch=rows_of(feed),
        requests=samples.requests * int(samples.nanoseconds.size),
        per_second=tuple(float(rate) for rate in per_second.ravel()),
    )
    return found, {f"throughput/{concurrency}/alone/nanoseconds": samples.nanoseconds}


def throughput_against(race: Race, concurrency: int) -> tuple[PairedRatios, Raw]:
    """Windows of the baseline, of the baseline again and of the candidate in turns, look by look.

    Raises:
        MeasurementError: one of the models does not run there.
    """
    schedule = _schedule(race.runtime, race.baseline, race.target, race.feed, concurrency)

    def measure(heats: int, seed: int) -> LoadSamples:
        return race.runtime.under_load(race.models, race.target, race.feed, replace(schedule, heats=heats, seed=seed))

    def figures(samples: Sequence[LoadSamples]) -> tuple[Figure]:
        return (figure_of(np.log(_positive(samples))),)

    noun = f"session pairs under {concurrency} requests at once"
    looks = look_by_look(race, noun, measure, figures, (race.tolerances.get("throughput", ()),))
    ((own, itself),) = figures(looks)
    found = PairedRatios(
        figure=throughput_figure(concurrency),
        against=race.against,
        baseline=digest_file(race.baseline),
        log_ratios=own,
        self_log_ratios=itself,
    )
    where = f"throughput/{concurrency}/{race.against}"
    return found, {f"{where}/nanoseconds": _joined(looks), f"{where}/requests": np.array(schedule.requests)}


def _schedule(runtime: Runtime, model: Path, target: Target, feed: Tensors, concurrency: int) -> LoadSchedule:
    """Windows of as many requests on both sides, so that they end alike."""
    samples = runtime.sample(model, target, feed, runs=_PROBES, warmup=_PROBES)
    typical = max(float(np.median(samples.nanoseconds.astype(np.float64))) / 1e9, 1e-9)
    fewest = FEWEST_EACH * concurrency
    requests = int(np.clip(WINDOW_S / typical, fewest, max(fewest, MOST_REQUESTS)))
    windows = int(np.clip(SIDE_S / (requests * typical), FEWEST_WINDOWS, MOST_WINDOWS))
    return LoadSchedule(concurrency=concurrency, requests=requests, heats=HEATS_ALONE, windows=windows)


def _joined(samples: Sequence[LoadSamples]) -> Floats:
    return np.concatenate([s.nanoseconds for s in samples]).astype(np.float64)


def _positive(samples: Sequence[LoadSamples]) -> Floats:
    nanoseconds = _joined(samples)
    if not (nanoseconds > 0).all():
        raise MeasurementError("a window of requests took no measurable time")
    return nanoseconds
