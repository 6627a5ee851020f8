"""A runtime whose figures follow a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
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
    """The real runtime, with times that follow a script: `cost` units for each model, and noise between sessions."""

    def __init__(self, cost: Mapping[Path, float], *, noise: float = 0.005, used: tuple[str, ...] = ()) -> None:
        self._cost, self._noise, self._used = cost, noise, used
        self._draw = np.random.default_rng(5)

    def facts(self, model: Path, target: Any) -> Any:
        found = super().facts(model, target)
        return replace(found, used=self._used, nodes=dict.fromkeys(self._used, 3)) if self._used else found

    def sample(self, model: Path, target: Any, feed: Any, *, runs: int, warmup: int) -> RunSamples:
        return RunSamples(nanoseconds=np.full(runs, 1_000_000), preempted=np.zeros(runs, dtype=bool))

    def race(
        self, models: Sequence[Path], target: Any, feed: Any, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        shape = (schedule.rounds, schedule.blocks, len(models), schedule.runs)
        cost = np.array([self._cost[model] for model in models])[:, np.newaxis]
        session = np.exp(self._noise * self._draw.standard_normal((schedule.rounds, 1, len(models), 1)))
        times = 1e6 * cost * session * np.exp(0.01 * self._draw.standard_normal(shape))
        return PairedBenchmarkSamples(nanoseconds=times.astype(np.int64), preempted=np.zeros(shape, dtype=bool))

    def under_load(self, models: Sequence[Path], target: Any, feed: Any, schedule: LoadSchedule) -> LoadSamples:
        times = self._drawn(models, (schedule.rounds, schedule.windows, len(models)))
        return LoadSamples(nanoseconds=times * schedule.requests, requests=schedule.requests)

    def starts(self, models: Sequence[Path], target: Any, feed: Any, schedule: StartSchedule) -> StartSamples:
        load, first, peak = (self._drawn(models, (schedule.rounds, len(models))) for _ in range(3))
        return StartSamples(load_ns=load, first_ns=first, peak_bytes=peak)

    def _drawn(self, models: Sequence[Path], shape: tuple[int, ...]) -> Any:
        cost = 1e6 * np.array([self._cost[model] for model in models])
        return (cost * np.exp(self._noise * self._draw.standard_normal(shape))).astype(np.int64)
