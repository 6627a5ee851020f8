"""The inner side of ONNX Runtime in an environment of its own: the same adapter, with whatever build lies there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops import codec
from onnx_ops.adapters.isolation.inside import serve
from onnx_ops.adapters.runtimes.arrays import get_arrays, put_arrays
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.ports.runtime import LoadSchedule, PairedBenchmarkSchedule, StartSchedule


class Inside:
    """Fulfils what `IsolatedRuntime` asks; samples go back as arrays in a file."""

    where = "benchmark"
    refusing: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._runtime = OnnxRuntime()

    def facts(self, model: str, target: Any) -> Any:
        return codec.to_json(self._runtime.facts(Path(model), _target(target)))

    def rewritten(self, model: str, target: Any, copy: str) -> None:
        self._runtime.rewritten(Path(model), _target(target), Path(copy))

    def package(self, model: str, target: Any, folder: str) -> None:
        self._runtime.package(Path(model), _target(target), Path(folder))

    def run(self, model: str, target: Any, feeds: list[str], answers: list[str]) -> None:
        batches = tuple(get_arrays(Path(feed)) for feed in feeds)
        found = self._runtime.run(Path(model), _target(target), batches)
        for answer, path in zip(found, answers, strict=True):
            put_arrays(answer, Path(path))

    def sample(self, model: str, target: Any, feed: str, answers: str, runs: int, warmup: int) -> None:
        found = self._runtime.sample(Path(model), _target(target), get_arrays(Path(feed)), runs=runs, warmup=warmup)
        _save(answers, {"nanoseconds": found.nanoseconds, "preempted": found.preempted})

    def race(self, models: list[str], target: Any, feed: str, answers: str, schedule: Any) -> None:
        asked = codec.from_json(schedule, PairedBenchmarkSchedule)
        found = self._runtime.race(_paths(models), _target(target), get_arrays(Path(feed)), asked)
        probe = {} if found.probe is None else {"probe": found.probe}
        _save(answers, {"nanoseconds": found.nanoseconds, "preempted": found.preempted, **probe})

    def under_load(self, models: list[str], target: Any, feed: str, answers: str, schedule: Any) -> None:
        asked = codec.from_json(schedule, LoadSchedule)
        found = self._runtime.under_load(_paths(models), _target(target), get_arrays(Path(feed)), asked)
        _save(answers, {"nanoseconds": found.nanoseconds})

    def starts(self, models: list[str], target: Any, feed: str, answers: str, schedule: Any) -> None:
        # Fresh processes are found by the path of visible packages, which an isolated interpreter does not pass on.
        os.environ["PYTHONPATH"] = sys.argv[1]
        asked = codec.from_json(schedule, StartSchedule)
        found = self._runtime.starts(_paths(models), _target(target), get_arrays(Path(feed)), asked)
        _save(answers, {"load": found.load_ns, "first": found.first_ns, "peak": found.peak_bytes})


def main() -> None:
    serve(Inside())


def _target(document: Any) -> Target:
    return codec.from_json(document, Target)


def _paths(models: list[str]) -> list[Path]:
    return [Path(model) for model in models]


def _save(path: str, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **arrays)
