"""Run another build of ONNX Runtime in an isolated environment: both sides of the process boundary."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np

from onnx_ops import codec
from onnx_ops.adapters.isolation.process import (
    IsolatedProcess,
    ProcessLimits,
    RetainedProcess,
    build_interpreter_command,
)
from onnx_ops.adapters.isolation.worker_main import load_arrays, save_arrays, serve
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import UserError
from onnx_ops.ports import Runtime
from onnx_ops.ports.data import Array, Tensors
from onnx_ops.ports.runtime import (
    LoadSamples,
    LoadSchedule,
    PairedBenchmarkSamples,
    PairedBenchmarkSchedule,
    RunSamples,
    StartSamples,
    StartSchedule,
)

_WORKER = "onnx_ops.adapters.runtimes.isolated:run_runtime"

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds for an answer where `env.timeout` is not set."""

_BUILD = re.compile(r"(?P<name>onnxruntime[a-z0-9_.-]*)(\[[^]]*\])?==(?P<version>\d[\w.+!-]*)", re.ASCII)


@dataclass(slots=True, kw_only=True)
class IsolatedRuntime(Runtime):
    """Runs ONNX Runtime of another build in an isolated environment.

    The process is reused by later calls, and replaced when it has ended or the target changes.
    """

    python: Callable[[Environment], Path]
    """The interpreter of an environment, which is created if missing."""

    _held: RetainedProcess = field(default_factory=RetainedProcess)

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the hardware and runtime that measurements on the target are bound to."""
        name, version = read_runtime_build(target)
        return read_hardware(target.runtime, f"{version} ({name})")

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Build a session and report its providers and which nodes they run."""
        return codec.from_json(self._ask("facts", target, model=str(model.resolve())), RuntimeFacts)

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the graph as the runtime has optimized it."""
        self._ask("rewritten", target, model=str(model.resolve()), copy=str(copy.resolve()))

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write what a device needs to run the model into a folder."""
        self._ask("package", target, model=str(model.resolve()), folder=str(folder.resolve()))

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        """Run each batch and return its outputs by name."""
        with self._process(target).shared_folder() as folder:
            feeds = [save_arrays(feed, folder / f"feed-{number}.npz") for number, feed in enumerate(batches)]
            answers = [folder / f"answer-{number}.npz" for number in range(len(batches))]
            files = {"feeds": [str(path) for path in feeds], "answers": [str(path) for path in answers]}
            self._ask("run", target, model=str(model.resolve()), **files)
            return tuple(load_arrays(path) for path in answers)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        """Time `runs` runs of one feed after `warmup` runs that are not timed."""
        return RunSamples(**self._measure("sample", target, feed, model=str(model.resolve()), runs=runs, warmup=warmup))

    def benchmark(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        """Time several models in alternating order by the schedule."""
        return PairedBenchmarkSamples(**self._measure_by("benchmark", models, target, feed, schedule))

    def under_load(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule) -> LoadSamples:
        """Time windows of concurrent requests to each model."""
        return LoadSamples(**self._measure_by("under_load", models, target, feed, schedule), requests=schedule.requests)

    def starts(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule) -> StartSamples:
        """Measure cold starts of each model in fresh processes."""
        return StartSamples(**self._measure_by("starts", models, target, feed, schedule))

    def _measure_by(
        self, do: str, models: Sequence[Path], target: Target, feed: Tensors, schedule: object
    ) -> dict[str, Any]:
        names = [str(model.resolve()) for model in models]
        return self._measure(do, target, feed, models=names, schedule=codec.to_json(schedule))

    def _measure(self, do: str, target: Target, feed: Tensors, **arguments: object) -> dict[str, Any]:
        with self._process(target).shared_folder() as folder:
            stored, answers = save_arrays(feed, folder / "feed.npz"), folder / "answers.npz"
            self._ask(do, target, feed=str(stored), answers=str(answers), **arguments)
            with np.load(answers, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}

    def _ask(self, do: str, target: Target, **arguments: object) -> Any:
        document = codec.to_json(replace(target, env=None))
        return self._process(target).ask(do, timeout=_limits(target).timeout, target=document, **arguments)

    def _process(self, target: Target) -> IsolatedProcess:
        def start() -> IsolatedProcess:
            read_runtime_build(target)
            python = self.python(target.env or Environment())
            return IsolatedProcess(build_interpreter_command(python, _WORKER), _limits(target), f"target {target.name}")

        return self._held.get(target.digest(), start)


def read_runtime_build(target: Target) -> tuple[str, str]:
    """Return name and version of the build of ONNX Runtime in a target's environment."""
    for requirement in target.env.requirements if target.env else ():
        if build := _BUILD.fullmatch(requirement.replace(" ", "").partition(";")[0]):
            return build["name"], build["version"]
    raise UserError(
        "its environment does not say which build of ONNX Runtime it measures",
        where=f"target {target.name}: env.requirements",
        remedy="Name exactly one version, such as `onnxruntime-openvino==1.24.1`.",
    )


def _limits(target: Target) -> ProcessLimits:
    env = target.env or Environment()
    return ProcessLimits(memory=env.memory, timeout=env.timeout or DEFAULT_TIMEOUT_S)


class RuntimeWorker:
    """Serves the requests of `IsolatedRuntime`; samples are returned as arrays in a file."""

    where = "benchmark"
    refusing: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._runtime = OnnxRuntime()

    def facts(self, model: str, target: Any) -> Any:
        """Build a session and report its providers and which nodes they run."""
        return codec.to_json(self._runtime.facts(Path(model), _target(target)))

    def rewritten(self, model: str, target: Any, copy: str) -> None:
        """Write the graph as the runtime has optimized it."""
        self._runtime.rewritten(Path(model), _target(target), Path(copy))

    def package(self, model: str, target: Any, folder: str) -> None:
        """Write what a device needs to run the model into a folder."""
        self._runtime.package(Path(model), _target(target), Path(folder))

    def run(self, model: str, target: Any, feeds: list[str], answers: list[str]) -> None:
        """Run each batch and return its outputs by name."""
        batches = tuple(load_arrays(Path(feed)) for feed in feeds)
        outputs = self._runtime.run(Path(model), _target(target), batches)
        for answer, path in zip(outputs, answers, strict=True):
            save_arrays(answer, Path(path))

    def sample(self, model: str, target: Any, feed: str, answers: str, runs: int, warmup: int) -> None:
        """Time `runs` runs of one feed after `warmup` runs that are not timed."""
        samples = self._runtime.sample(Path(model), _target(target), load_arrays(Path(feed)), runs=runs, warmup=warmup)
        _save(answers, samples)

    def _measure(
        self, do: str, kind: type, *, models: list[str], target: Any, feed: str, answers: str, schedule: Any
    ) -> None:
        request: Any = codec.from_json(schedule, kind)
        paths, rows = [Path(model) for model in models], load_arrays(Path(feed))
        _save(answers, getattr(self._runtime, do)(paths, _target(target), rows, request))

    benchmark = partialmethod(_measure, "benchmark", PairedBenchmarkSchedule)
    under_load = partialmethod(_measure, "under_load", LoadSchedule)
    starts = partialmethod(_measure, "starts", StartSchedule)


def run_runtime() -> None:
    """Serve the runtime of the environment."""
    # Fresh processes are found by the path of visible packages, which an isolated interpreter does not pass on.
    os.environ["PYTHONPATH"] = sys.argv[1]
    serve(RuntimeWorker())


def _target(document: Any) -> Target:
    return codec.from_json(document, Target)


def _save(path: str, samples: Any) -> None:
    """Write the arrays of samples by the names of their fields."""
    values = {entry.name: getattr(samples, entry.name) for entry in fields(samples)}
    arrays: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    np.savez(path, **arrays)
