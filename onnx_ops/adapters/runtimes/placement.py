"""Run ONNX Runtime where a target places it: in this process, in a crash guard, or in an isolated environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import TypeForm

from onnx_ops import codec
from onnx_ops.adapters.isolation.crash_guard import DEFAULT_TIMEOUT_S, ProcessCrashError, run_guarded
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.ort_format import prepare_model_file
from onnx_ops.domain.evidence import RuntimeFacts
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
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

if TYPE_CHECKING:
    from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class TargetedRuntime(Runtime):
    """Runs ONNX Runtime where each target places it."""

    tools: ClassVar[tuple[str, ...]] = ("onnxruntime",)

    here: OnnxRuntime = field(default_factory=OnnxRuntime)
    folder: Path | None = None
    """Folder of environments; None where there are none."""

    elsewhere: IsolatedRuntimes | None = None

    def with_environments(self, folder: Path) -> TargetedRuntime:
        """Return the same runtime with its environments below `folder`."""
        return TargetedRuntime(here=self.here, folder=folder)

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the hardware and runtime that measurements on the target are bound to."""
        if not _is_isolated(target):
            return self.here.fingerprint(target)
        from onnx_ops.adapters.runtimes.isolated import read_runtime_build

        name, version = read_runtime_build(target)
        return read_hardware(target.runtime, f"{version} ({name})")

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Build a session and report its providers and which nodes they run."""
        return self._call("facts", RuntimeFacts, target, model=model)

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the graph as the runtime has optimized it."""
        self._call("rewritten", Any, target, model=model, copy=copy)

    def package(self, model: Path, target: Target, folder: Path) -> None:
        """Write what a device needs to run the model into a folder."""
        self._call("package", Any, target, model=model, folder=folder)

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        """Run each batch and return its outputs by name."""
        return self._call("run", tuple[Mapping[str, Any], ...], target, model=model, batches=batches)

    def sample(self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int) -> RunSamples:
        """Time `runs` runs of one feed after `warmup` runs that are not timed."""
        return self._call("sample", RunSamples, target, model=model, feed=feed, runs=runs, warmup=warmup)

    def race(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: PairedBenchmarkSchedule
    ) -> PairedBenchmarkSamples:
        """Time several models in alternating order by the schedule."""
        return self._call("race", PairedBenchmarkSamples, target, models=models, feed=feed, schedule=schedule)

    def under_load(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule) -> LoadSamples:
        """Time windows of concurrent requests to each model."""
        return self._call("under_load", LoadSamples, target, models=models, feed=feed, schedule=schedule)

    def starts(self, models: Sequence[Path], target: Target, feed: Tensors, schedule: StartSchedule) -> StartSamples:
        """Measure cold starts of each model in fresh processes."""
        return self._call("starts", StartSamples, target, models=models, feed=feed, schedule=schedule)

    def _call(self, method: str, kind: TypeForm[T], target: Target, **arguments: Any) -> T:
        """Call a method of OnnxRuntime where the target places it."""
        if not _is_isolated(target):
            result: T = getattr(self.here, method)(target=target, **arguments)
            return result
        if self.elsewhere is None:
            # Most runs have no such target, and need not import the code that starts processes.
            from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
            from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes

            if self.folder is None:
                raise UserError("there is no folder for its environment here", where=f"target {target.name}: env")
            self.elsewhere = IsolatedRuntimes(python=PythonEnvironments(folder=self.folder, uv=find_uv()).python)
        for name in {"model", "copy", "folder"} & arguments.keys():
            arguments[name] = arguments[name].resolve()
        if "models" in arguments:
            arguments["models"] = [model.resolve() for model in arguments["models"]]
        return codec.from_json(self.elsewhere.call(method, target, **arguments), kind)


def _is_isolated(target: Target) -> bool:
    if target.env is not None and not target.env.isolated and (target.env.requirements or target.env.python):
        raise UserError(
            "`isolated: false` runs in this installation, which is never changed",
            where=f"target {target.name}: env",
            remedy="Leave out `requirements` and `python`, or `isolated`.",
        )
    return target.env is not None and target.env.isolated


class GuardedRuntime(OnnxRuntime):
    """Runs each call of `run` in a separate process, limited to `timeout` seconds."""

    def __init__(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self._timeout = timeout

    def run(self, model: Path, target: Target, batches: tuple[Tensors, ...]) -> tuple[Mapping[str, Array], ...]:
        """Run each batch in a forked process and return its outputs by name."""
        loaded = prepare_model_file(model, target)  # a shielded process starts no other
        try:
            run = OnnxRuntime().run
            return run_guarded(run, loaded, target, batches, timeout=self._timeout)
        except ProcessCrashError as crash:
            what, remedy = "ONNX Runtime crashed", "Export the model with other operators or shapes."
            if crash.timed_out:
                what, remedy = "ONNX Runtime hangs", "Give it more time: --timeout."
            raise MeasurementError(what, where=model.name, why=crash.reason, remedy=remedy) from None


def guard_runtime(runtime: Runtime, timeout: float | None = None) -> Runtime:
    """Return the runtime with a crash guard around runs in this process, of `timeout` seconds per call."""
    shield = GuardedRuntime(timeout or DEFAULT_TIMEOUT_S)
    if isinstance(runtime, TargetedRuntime) and type(runtime.here) is OnnxRuntime:
        return replace(runtime, here=shield)
    return shield if type(runtime) is OnnxRuntime else runtime
