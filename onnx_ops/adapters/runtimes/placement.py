"""Run ONNX Runtime where a target places it: in this process, in a crash guard, or in an isolated environment."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from onnx_ops import codec
from onnx_ops.adapters.isolation.crash_guard import DEFAULT_TIMEOUT_S, ProcessCrashError, run_guarded
from onnx_ops.adapters.runtimes.hardware import read_hardware
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.ort_format import prepare_model_file
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.ports import Runtime
from onnx_ops.ports.data import Array, Tensors

if TYPE_CHECKING:
    from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes


def _place(method: Callable[..., Any]) -> Any:
    """Return the method of OnnxRuntime for a runtime that calls it where the target places it."""
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

    facts = _place(OnnxRuntime.facts)
    rewritten = _place(OnnxRuntime.rewritten)
    package = _place(OnnxRuntime.package)
    run = _place(OnnxRuntime.run)
    sample = _place(OnnxRuntime.sample)
    benchmark = _place(OnnxRuntime.benchmark)
    under_load = _place(OnnxRuntime.under_load)
    starts = _place(OnnxRuntime.starts)

    def isolated(self, target: Target) -> IsolatedRuntimes:
        """Return the runtimes of isolated environments, for one of this target."""
        if self.elsewhere is None:
            # Most runs have no such target, and need not import the code that starts processes.
            from onnx_ops.adapters.isolation.environments import PythonEnvironments, find_uv
            from onnx_ops.adapters.runtimes.isolated import IsolatedRuntimes

            if self.folder is None:
                raise UserError("there is no folder for its environment here", where=f"target {target.name}: env")
            self.elsewhere = IsolatedRuntimes(python=PythonEnvironments(folder=self.folder, uv=find_uv()).python)
        return self.elsewhere


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
        loaded = prepare_model_file(model, target)  # a guarded process starts no other
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
    guarded = GuardedRuntime(timeout or DEFAULT_TIMEOUT_S)
    if isinstance(runtime, TargetedRuntime) and type(runtime.here) is OnnxRuntime:
        return replace(runtime, here=guarded)
    return guarded if type(runtime) is OnnxRuntime else runtime
