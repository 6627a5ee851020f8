"""Exporters and optimizers whose packages are in an isolated environment.

The module contains both sides of the process boundary. Besides this package, it imports only what
every environment has: the standard library, annotated-types, cattrs, numpy and onnx.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from onnx_ops.adapters.isolation.process import (
    DEFAULT_TIMEOUT_S,
    IsolatedProcess,
    ProcessLimits,
    build_interpreter_command,
)
from onnx_ops.adapters.isolation.worker_main import require_tensors, serve
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError
from onnx_ops.measure.user_functions import call_training
from onnx_ops.ports.data import Array, Dataset, Tensors
from onnx_ops.ports.export import ExportRequest, TrainingExporter
from onnx_ops.ports.optimize import Optimizer, OptimizeRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model in another process, and the folder from which it was loaded."""

    folder: Path
    process: IsolatedProcess


@dataclass(kw_only=True)
class IsolatedTool:
    """Base of the tools that run in processes of an isolated environment."""

    place: str
    """Class of the tool as `module:Class`, as in its entry point."""
    python: Callable[[], Path]
    """Function that returns the interpreter of the environment.

    A missing environment is created.
    """
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    tools: tuple[str, ...] = ()
    """Packages that the tool requires in this installation; none, by default."""

    @property
    def timeout(self) -> float:
        """Return the seconds within which the process must answer."""
        return self.limits.timeout or DEFAULT_TIMEOUT_S

    def start(self, worker: str, where: str) -> IsolatedProcess:
        """Start a process of the environment that calls a function of this module.

        The environment can also import the tool's package.
        """
        packages = (self.place.partition(".")[0].partition(":")[0],)
        command = build_interpreter_command(self.python(), f"{__name__}:{worker}", packages)
        return IsolatedProcess(command, self.limits, where)


@dataclass(kw_only=True)
class IsolatedExporter(IsolatedTool, TrainingExporter):
    """Exporter that runs in another process.

    The process of a loaded model is stopped when the model is freed. The process can import the
    modules of `root`, the project's folder.
    """

    root: Path

    def train(
        self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Json], folder: Path
    ) -> None:
        """Run the training function in the environment and save its model."""
        process = self._start_exporter("train")
        try:
            arguments = {
                "run": run,
                "data": data,
                "parameters": parameters,
                "folder": folder.resolve(),
            }
            process.ask("train", timeout=self.limits.timeout, **arguments)
        finally:
            process.stop()

    def save(self, model: object, folder: Path) -> None:
        """Copy a loaded model, or the file or folder of a model that the user supplied.

        Raises:
            NotFoundError: the file or folder does not exist.
        """
        source = model.folder if isinstance(model, RemoteModel) else Path(str(model))
        if source.is_dir():
            shutil.copytree(source, folder, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, folder / source.name)
        else:
            raise NotFoundError("no such model", where=str(source))

    def load(self, folder: Path) -> object:
        """Load the model in a new process of the environment."""
        process = self._start_exporter("export")
        process.ask("load", timeout=self.timeout, folder=folder.resolve())
        return RemoteModel(folder=folder, process=process)

    def export(self, model: object, request: ExportRequest) -> None:
        """Export the loaded model in its process."""
        request = replace(request, path=request.path.resolve())
        _process_of(model).ask("export", timeout=self.timeout, request=request)

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """Return the loaded model's answers; None if the precision is not available.

        Raises:
            ValueError: the model refuses the inputs.
            MeasurementError: an answer of the model is not a tensor.
            StageError: the process failed, or did not answer in time.
        """
        process, arguments = _process_of(model), {"inputs": inputs, "precision": precision}
        answers: Mapping[str, Array] | None = process.ask(
            "answer", timeout=self.timeout, **arguments
        )
        return answers

    def _start_exporter(self, where: str) -> IsolatedProcess:
        process = self.start("run_exporter", where)
        process.ask(
            "start", timeout=self.timeout, exporter=self.place, root=str(self.root.resolve())
        )
        return process


def _process_of(model: object) -> IsolatedProcess:
    if not isinstance(model, RemoteModel):
        raise TypeError(f"{type(model).__name__} was not loaded by this exporter")
    return model.process


@dataclass(kw_only=True)
class IsolatedOptimizer(IsolatedTool, Optimizer):
    """Optimizer that runs in another process.

    Methods that require no package of the environment call `here`, which runs in this process.
    """

    here: Optimizer

    def __post_init__(self) -> None:
        self.quantized, self.needs_calibration = self.here.quantized, self.here.needs_calibration
        self.reads_ranges = self.here.reads_ranges

    def files(self, section: Quantize) -> tuple[str, ...]:
        """Return the files that the section names."""
        return self.here.files(section)

    def inline_files(self, section: Quantize, root: Path) -> Quantize:
        """Return the section with the content of its files in place of their names."""
        return self.here.inline_files(section, root)

    def quantizes(self, section: Quantize) -> bool:
        """Return whether the section makes a quantized variant."""
        return self.here.quantizes(section)

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Run the optimizer in a process of the environment; return its notes."""
        return tuple(self._ask("optimize", request))

    def read_ranges(self, request: OptimizeRequest, path: Path, shard: tuple[int, int]) -> None:
        """Write the ranges of a part of the batches in a process of the environment."""
        self._ask("read_ranges", request, path=path.resolve(), shard=shard)

    def _ask(self, method: str, request: OptimizeRequest, **arguments: object) -> Any:
        process = self.start("run_optimizer", f"variant {request.section.name}")
        try:
            request = replace(request, source=request.source.resolve(), path=request.path.resolve())
            return process.ask(
                method, timeout=self.timeout, optimizer=self.place, request=request, **arguments
            )
        finally:
            process.stop()


class ExporterWorker:
    """Worker with one exporter and at most one loaded model."""

    def __init__(self) -> None:
        self._exporter: Any = None
        self._model: object = None

    def start(self, exporter: str, root: str) -> None:
        """Import and create an exporter, whose module can be in the project."""
        sys.path.insert(0, root)
        self._exporter = _make(exporter)

    def train(
        self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Any], folder: Path
    ) -> None:
        """Call the training function and save its model."""
        self._exporter.save(call_training(run, data, parameters), folder)

    def load(self, folder: Path) -> None:
        """Load the model."""
        self._model = self._exporter.load(folder)

    def export(self, request: ExportRequest) -> None:
        """Export the loaded model."""
        self._exporter.export(self._model, request)

    def answer(self, inputs: Mapping[str, Any], precision: str) -> Mapping[str, Any] | None:
        """Return the loaded model's reference outputs; None if the precision is missing."""
        answers: Mapping[str, Any] | None = self._exporter.reference(self._model, inputs, precision)
        require_tensors(answers or {})
        return answers


def run_exporter() -> None:
    """Run the server loop of an `ExporterWorker`."""
    serve(ExporterWorker(), "export", refusing=("answer",))


class OptimizerWorker:
    """Worker with one optimizer."""

    def optimize(self, optimizer: str, request: OptimizeRequest) -> tuple[str, ...]:
        """Run the optimizer and return its notes."""
        notes: tuple[str, ...] = _make(optimizer).optimize(request)
        return notes

    def read_ranges(
        self, optimizer: str, request: OptimizeRequest, path: Path, shard: tuple[int, int]
    ) -> None:
        """Write the ranges of one part of the calibration batches."""
        _make(optimizer).read_ranges(request, path, shard)


def run_optimizer() -> None:
    """Run the server loop of an `OptimizerWorker`."""
    serve(OptimizerWorker(), "quantize")


def _make(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)()
