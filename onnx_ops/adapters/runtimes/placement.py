"""Runtimes that run ONNX Runtime where the target requires it.

ONNX Runtime runs in this process, in a forked process that guards against crashes, or in an
isolated environment.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from onnx_ops import codec
from onnx_ops.adapters.isolation.crash_guard import (
    DEFAULT_TIMEOUT_S,
    ProcessCrashError,
    prepare,
    run_guarded,
)
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.ort_format import prepare_model_file
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.execution import RuntimeFacts
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
)

if TYPE_CHECKING:
    from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes

_T = TypeVar("_T")


def _place(method: Callable[..., Any]) -> Any:
    """Return a method that calls `method` in this process or an isolated environment."""
    signature, hints = inspect.signature(method), get_type_hints(method)

    @functools.wraps(method)
    def call(self: TargetedRuntime, *positional: Any, **named: Any) -> Any:
        arguments = dict(signature.bind(self, *positional, **named).arguments)
        del arguments["self"]
        target = arguments["target"]
        if not _is_isolated(target):
            return getattr(self.here, method.__name__)(**arguments)
        for name, value in arguments.items():
            if hints[name] is Path:
                arguments[name] = value.resolve()
            elif hints[name] == Sequence[Path]:
                arguments[name] = [path.resolve() for path in value]
        answer = self.isolated(target).call(method.__name__, **arguments)
        return None if answer is None else codec.from_json(answer, hints["return"])

    return call


@dataclass(slots=True, kw_only=True)
class TargetedRuntime(Runtime):
    """Runtime that runs ONNX Runtime in this process or in an isolated environment."""

    tools = ("onnxruntime",)

    here: OnnxRuntime = field(default_factory=OnnxRuntime)
    folder: Path | None = None
    """Folder of isolated environments; None if no target can have an environment."""

    elsewhere: IsolatedRuntimes | None = None

    def with_environments(self, folder: Path) -> TargetedRuntime:
        """Return the same runtime with its environments below `folder`."""
        return TargetedRuntime(here=self.here, folder=folder)

    def fingerprint(self, target: Target) -> HardwareFingerprint:
        """Return the hardware and runtime for which measurements on the target are valid."""
        if not _is_isolated(target):
            return self.here.fingerprint(target)
        from onnx_ops.adapters.runtimes.isolated import read_runtime_build

        name, version = read_runtime_build(target)
        return read_hardware(target.runtime, f"{version} ({name})")

    facts = _place(OnnxRuntime.facts)
    rewritten = _place(OnnxRuntime.rewritten)
    package = _place(OnnxRuntime.package)
    run = _place(OnnxRuntime.run)
    sample = _place(OnnxRuntime.sample)
    benchmark = _place(OnnxRuntime.benchmark)
    under_load = _place(OnnxRuntime.under_load)
    starts = _place(OnnxRuntime.starts)

    def isolated(self, target: Target) -> IsolatedRuntimes:
        """Return the caller of runtimes in isolated environments.

        Raises:
            UserError: there is no folder for the target's environment.
        """
        if self.elsewhere is None:
            # Only isolated targets need these modules.
            from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
            from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes

            if self.folder is None:
                raise UserError(
                    "the target needs an isolated environment, and this command has no folder for "
                    "environments",
                    where=f"target {target.name}: env",
                )
            self.elsewhere = IsolatedRuntimes(
                python=PythonEnvironments(folder=self.folder, uv=find_uv()).python
            )
        return self.elsewhere


def _is_isolated(target: Target) -> bool:
    if (
        target.env is not None
        and not target.env.isolated
        and (target.env.requirements or target.env.python)
    ):
        raise UserError(
            "`isolated: false` uses this Python installation, in which onnx-ops installs nothing",
            where=f"target {target.name}: env",
            remedy="Leave out `requirements` and `python`, or leave out `isolated`.",
        )
    return target.env is not None and target.env.isolated


class GuardedRuntime(OnnxRuntime):
    """Runtime in forked processes, each with at most `timeout` seconds.

    `sample`, `benchmark` and `under_load` run in this process without this limit, after a forked
    process has run the model once. `package` converts the model in a forked process with the
    default limit. `starts` uses fresh processes with a separate limit.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        prepare(OnnxRuntime.__module__)
        self._timeout = timeout
        self._ran: set[tuple[Path, str]] = set()
        self._facts: dict[tuple[str, int, Digest], RuntimeFacts] = {}

    def facts(self, model: Path, target: Target) -> RuntimeFacts:
        """Return the facts of a session that is built in a forked process.

        The facts of an unchanged file are cached, since a verdict requests them several times.
        """
        key = (str(model.resolve()), model.stat().st_mtime_ns, target.digest())
        if key not in self._facts:
            self._facts[key] = self._guard(OnnxRuntime().facts, model, target)
        return self._facts[key]

    def rewritten(self, model: Path, target: Target, copy: Path) -> None:
        """Write the optimized graph in a forked process."""
        self._guard(OnnxRuntime().rewritten, model, target, copy)

    def run(
        self, model: Path, target: Target, batches: tuple[Tensors, ...]
    ) -> tuple[Mapping[str, Array], ...]:
        """Run all batches in one forked process; return each batch's outputs by name."""
        # A forked process must not fork again, so the file is prepared in this process.
        loaded = prepare_model_file(model, target)
        answers = self._guard(OnnxRuntime().run, loaded, target, batches)
        self._ran.add((model, target.name))
        return answers

    def sample(
        self, model: Path, target: Target, feed: Tensors, *, runs: int, warmup: int
    ) -> RunSamples:
        """Time runs of a model that a forked process has run before."""
        self._run_once([model], target, feed)
        return super().sample(model, target, feed, runs=runs, warmup=warmup)

    def benchmark(
        self,
        models: Sequence[Path],
        target: Target,
        feed: Tensors,
        schedule: PairedBenchmarkSchedule,
    ) -> PairedBenchmarkSamples:
        """Time models that a forked process has run before."""
        self._run_once(models, target, feed)
        return super().benchmark(models, target, feed, schedule)

    def under_load(
        self, models: Sequence[Path], target: Target, feed: Tensors, schedule: LoadSchedule
    ) -> LoadSamples:
        """Measure concurrent requests to models that a forked process has run before."""
        self._run_once(models, target, feed)
        return super().under_load(models, target, feed, schedule)

    def _run_once(self, models: Sequence[Path], target: Target, feed: Tensors) -> None:
        for model in dict.fromkeys(models):
            if (model, target.name) not in self._ran:
                self.run(model, target, (feed,))

    def _guard(
        self, work: Callable[..., _T], model: Path, target: Target, *arguments: object
    ) -> _T:
        try:
            return run_guarded(work, model, target, *arguments, timeout=self._timeout)
        except ProcessCrashError as crash:
            what = "ONNX Runtime crashed"
            remedy = (
                "Export the model with other operators or shapes, set a lower "
                "`session.graph_level` in the target, or use a machine with more memory."
            )
            if crash.timed_out:
                what, remedy = (
                    "ONNX Runtime did not finish in time",
                    "Use a smaller model or fewer rows; `onnx-ops judge` has option --timeout N.",
                )
            raise MeasurementError(
                what, where=model.name, why=crash.reason, remedy=remedy
            ) from None


def guard_runtime(runtime: Runtime, timeout: float | None = None) -> Runtime:
    """Return a runtime that runs each model in a forked process first.

    A crash there ends only the forked process, which has at most `timeout` seconds (by default
    `DEFAULT_TIMEOUT_S`). For the calls that run in this process afterwards, see `GuardedRuntime`. A
    runtime of another type than ONNX Runtime in this process is returned unchanged.
    """
    guarded = GuardedRuntime(timeout or DEFAULT_TIMEOUT_S)
    if isinstance(runtime, TargetedRuntime) and type(runtime.here) is OnnxRuntime:
        return replace(runtime, here=guarded)
    return guarded if type(runtime) is OnnxRuntime else runtime
