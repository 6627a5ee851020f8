"""A runtime whose measurements follow a script."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.errors import MeasurementError
from onnx_ops.ports import (
    LoadSamples,
    LoadSchedule,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    StartSamples,
    StartSchedule,
)


class Scripted(OnnxRuntime):
    """The real runtime, with scripted times: a request takes `cost` times `unit_ns`.

    Sessions differ by noise. Models that are `refused` are not timed. Without `peak`, memory is
    unknown. `asked` lists the schedules.
    """

    def __init__(
        self,
        cost: Mapping[Path, float],
        *,
        noise: float = 0.005,
        unit_ns: float = 1e6,
        used: tuple[str, ...] = (),
        refused: Collection[Path] = (),
        peak: bool = True,
    ) -> None:
        self._cost, self._noise, self._unit_ns = cost, noise, unit_ns
        self._used, self._refused, self._peak = used, refused, peak
        self._draw = np.random.default_rng(5)
        self.asked: list[Any] = []

    def facts(self, model: Path, target: Any) -> Any:
        found = super().facts(model, target)
        return (
            replace(found, used=self._used, nodes=dict.fromkeys(self._used, 3))
            if self._used
            else found
        )

    def sample(self, model: Path, target: Any, feed: Any, *, runs: int, warmup: int) -> RunSamples:
        return RunSamples(
            nanoseconds=np.full(runs, self._unit_ns), preempted=np.zeros(runs, dtype=bool)
        )

    def benchmark(
        self, models: Sequence[Path], target: Any, feed: Any, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        sessions = self._drawn(models, (schedule.rounds, len(models)), schedule)[
            :, np.newaxis, :, np.newaxis
        ]
        shape = (schedule.rounds, schedule.blocks, len(models), schedule.runs)
        times = sessions * np.exp(0.01 * self._draw.standard_normal(shape))
        return PairedBenchmarkSamples(
            nanoseconds=times.astype(np.int64), preempted=np.zeros(shape, dtype=bool)
        )

    def under_load(
        self, models: Sequence[Path], target: Any, feed: Any, schedule: LoadSchedule
    ) -> LoadSamples:
        times = self._drawn(models, (schedule.rounds, schedule.windows, len(models)), schedule)
        return LoadSamples(nanoseconds=times * schedule.requests, requests=schedule.requests)

    def starts(
        self, models: Sequence[Path], target: Any, feed: Any, schedule: StartSchedule
    ) -> StartSamples:
        shape = (schedule.rounds, len(models))
        load, first, peak = (
            self._drawn(models, shape, schedule).astype(np.int64) for _ in range(3)
        )
        return StartSamples(
            load_ns=load, first_ns=first, peak_bytes=peak if self._peak else np.full(shape, -1)
        )

    def _drawn(self, models: Sequence[Path], shape: tuple[int, ...], schedule: Any) -> Any:
        if set(models) & set(self._refused):
            raise MeasurementError("it takes other inputs")
        self.asked.append(schedule)
        cost = self._unit_ns * np.array([self._cost[model] for model in models])
        return cost * np.exp(self._noise * self._draw.standard_normal(shape))
