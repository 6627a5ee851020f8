"""Fresh processes: how long a model takes to load and to answer first, and how much memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.evidence import PairedRatios, Starts
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.timing import Figure, Race, Raw, figure_of, look_by_look, rows_of
from onnx_ops.ports import Runtime, StartSamples, StartSchedule, Tensors

Counts = npt.NDArray[np.int64]

HEATS_ALONE = 5
REQUESTS = 20
FIGURES = ("load", "first", "peak")


def starts_alone(runtime: Runtime, model: Path, target: Target, feed: Tensors, seed: int) -> tuple[Starts, Raw]:
    """Fresh processes of one model.

    Raises:
        MeasurementError: a process crashed, or could not run the model.
    """
    schedule = StartSchedule(heats=HEATS_ALONE, requests=REQUESTS, seed=seed)
    samples = runtime.starts((model, model), target, feed, schedule)
    load, first, peak = (_joined([samples], figure).ravel() for figure in FIGURES)
    found = Starts(
        batch=rows_of(feed),
        requests=REQUESTS,
        load_s=tuple(float(ns) / 1e9 for ns in load),
        first_s=tuple(float(ns) / 1e9 for ns in first),
        peak_bytes=tuple(int(size) for size in peak) if (peak > 0).all() else (),
    )
    return found, _raw("starts/alone", [samples])


def starts_against(race: Race) -> tuple[tuple[PairedRatios, ...], Raw]:
    """Fresh processes of the baseline, of the baseline again and of the candidate in turns, look by look.

    Memory has no entry where the system does not tell it.

    Raises:
        MeasurementError: a process crashed, or could not run its model.
    """

    def measure(heats: int, seed: int) -> StartSamples:
        schedule = StartSchedule(heats=heats, requests=REQUESTS, seed=seed)
        return race.runtime.starts(race.models, race.target, race.feed, schedule)

    def figures(samples: Sequence[StartSamples]) -> tuple[Figure, ...]:
        return tuple(_figure(_joined(samples, figure)) for figure in FIGURES)

    cold, memory = race.tolerances.get("cold_start", ()), race.tolerances.get("memory", ())
    looks = look_by_look(race, "pairs of fresh processes", measure, figures, (cold, cold, memory))
    baseline = digest_file(race.baseline)
    found = tuple(
        PairedRatios(figure=figure, against=race.against, baseline=baseline, log_ratios=own, self_log_ratios=itself)
        for figure, (own, itself) in zip(FIGURES, figures(looks), strict=True)
        if own
    )
    return found, _raw(f"starts/{race.against}", looks)


def _joined(samples: Sequence[StartSamples], figure: str) -> Counts:
    """One figure of all processes, of shape (heats, models)."""
    names = {"load": "load_ns", "first": "first_ns", "peak": "peak_bytes"}
    values = np.concatenate([getattr(s, names[figure]) for s in samples]).astype(np.int64)
    if figure != "peak" and not (values > 0).all():
        raise MeasurementError(f"{figure} of a fresh process took no measurable time")
    return values


def _figure(values: Counts) -> Figure:
    """One block a heat; nothing where a value is not known."""
    if not (values > 0).all():
        return (), ()
    return figure_of(np.log(values.astype(np.float64))[:, np.newaxis])


def _raw(where: str, samples: Sequence[StartSamples]) -> Raw:
    return {f"{where}/{figure}": _joined(samples, figure) for figure in FIGURES}
