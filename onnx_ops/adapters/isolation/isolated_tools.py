"""Exporters and optimizers whose packages are in an isolated environment: both sides of the process boundary.

This module imports only what every environment has: the standard library, annotated-types, cattrs, numpy and onnx.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onnx_ops import codec
from onnx_ops.adapters.isolation.process import IsolatedProcess, ProcessLimits, build_interpreter_command
from onnx_ops.adapters.isolation.worker_main import load_arrays, save_arrays, serve
from onnx_ops.domain.pipeline import Export, Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.quantization import Arithmetic
from onnx_ops.errors import NotFoundError
from onnx_ops.measure.user_functions import call_training
from onnx_ops.ports.data import Array, Dataset, Tensors
from onnx_ops.ports.export import ExportRequest, TrainingExporter
from onnx_ops.ports.optimize import Optimizer, OptimizeRequest

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds for an export or an answer where `env.timeout` is not set. Training has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model in another process, and the folder that it was loaded from."""

    folder: Path
    process: IsolatedProcess


@dataclass(slots=True, kw_only=True)
class IsolatedExporter(TrainingExporter):
    """Runs an exporter in another process, which ends with the loaded model.

    Args:
        exporter: `module:Class`, as in its entry point.
        python: returns the interpreter of the environment, which is created if missing.
        root: the project's folder, whose modules training imports.
        limits: of each process.
    """

    exporter: str
    python: Callable[[], Path]
    root: Path
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    tools: tuple[str, ...] = ()
    """None of this installation."""

    def train(self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Json], folder: Path) -> None:
        """Run the training function in the environment and save its model."""
        process = self._start("train")
        try:
            files = {}
            for name, rows in data.items():
                arrays: dict[str, Any] = {f"input/{key}": array for key, array in rows.inputs.items()}
                arrays |= {} if rows.label is None else {"label": rows.label}
                files[name] = str(save_arrays(arrays, process.folder / f"{name}.npz"))
            process.ask(
                "train",
                timeout=self.limits.timeout,
                run=run,
                data=files,
                parameters=parameters,
                folder=str(folder.resolve()),
            )
        finally:
            process.stop()

    def save(self, model: object, folder: Path) -> None:
        """Copy a loaded model, or a model that the user supplied as a file or folder."""
        source = model.folder if isinstance(model, RemoteModel) else Path(str(model))
        if source.is_dir():
            shutil.copytree(source, folder, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, folder / source.name)
        else:
            raise NotFoundError("no such model", where=str(source))

    def load(self, folder: Path) -> object:
        """Load the model in a new process of the environment."""
        process = self._start("export")
        process.ask("load", timeout=self._timeout, folder=str(folder.resolve()))
        return RemoteModel(folder=folder, process=process)

    def export(self, model: object, request: ExportRequest) -> None:
        """Export the loaded model in its process."""
        process = _process_of(model)
        with process.shared_folder() as folder:
            process.ask(
                "export",
                timeout=self._timeout,
                section=codec.to_json(request.section),
                samples=str(save_arrays(request.samples, folder / "samples.npz")),
                path=str(request.path.resolve()),
            )

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        """Run the loaded model in its process; None where the precision is not available."""
        process = _process_of(model)
        with process.shared_folder() as folder:
            given, answers = save_arrays(inputs, folder / "inputs.npz"), folder / "answers.npz"
            arguments = {"inputs": str(given), "precision": precision, "outputs": str(answers)}
            if not process.ask("answer", timeout=self._timeout, **arguments):
                return None
            return load_arrays(answers)

    @property
    def _timeout(self) -> float:
        return self.limits.timeout or DEFAULT_TIMEOUT_S

    def _start(self, where: str) -> IsolatedProcess:
        process = _start_worker("run_exporter", self.exporter, self.python(), self.limits, where)
        process.ask("start", timeout=self._timeout, exporter=self.exporter, root=str(self.root.resolve()))
        return process


def _process_of(model: object) -> IsolatedProcess:
    if not isinstance(model, RemoteModel):
        raise TypeError(f"{type(model).__name__} was not loaded by this exporter")
    return model.process


def _start_worker(entry: str, tool: str, python: Path, limits: ProcessLimits, where: str) -> IsolatedProcess:
    """Start a function of this module in an environment that also sees the package of `tool` (`module:Class`)."""
    package = tool.partition(".")[0].partition(":")[0]
    return IsolatedProcess(build_interpreter_command(python, f"{__name__}:{entry}", (package,)), limits, where)


@dataclass(slots=True, kw_only=True)
class IsolatedOptimizer(Optimizer):
    """Runs an optimizer in another process; `here` does in this one what needs none of its packages.

    Args as of `IsolatedExporter`; `place` is `module:Class`.
    """

    here: Optimizer
    place: str
    python: Callable[[], Path]
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    tools: tuple[str, ...] = ()
    """None of this installation."""

    quantized: bool = field(init=False)
    needs_calibration: bool = field(init=False)

    def __post_init__(self) -> None:
        self.quantized, self.needs_calibration = self.here.quantized, self.here.needs_calibration

    def files(self, section: Quantize) -> tuple[str, ...]:
        """Return the files that the section names."""
        return self.here.files(section)

    def inline_files(self, section: Quantize, root: Path) -> Quantize:
        """Return the section with the content of its files in place of their names."""
        return self.here.inline_files(section, root)

    def quantizes(self, section: Quantize) -> bool:
        """Return whether the section changes the computation."""
        return self.here.quantizes(section)

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        """Run the optimizer in a process of the environment."""
        where = f"variant {request.section.name}"
        process = _start_worker("run_optimizer", self.place, self.python(), self.limits, where)
        try:
            with process.shared_folder() as folder:
                given = request.calibration
                rows = None if given is None else str(save_arrays(given, folder / "calibration.npz"))
                notes = process.ask(
                    "optimize",
                    timeout=self.limits.timeout or DEFAULT_TIMEOUT_S,
                    optimizer=self.place,
                    section=codec.to_json(request.section),
                    source=str(request.source.resolve()),
                    path=str(request.path.resolve()),
                    calibration=rows,
                    machines=[codec.to_json(machine) for machine in request.machines],
                )
        finally:
            process.stop()
        return tuple(notes)


class ExporterWorker:
    """One exporter and at most one loaded model."""

    where = "export"
    refusing: tuple[str, ...] = ("answer",)

    def __init__(self) -> None:
        self._exporter: Any = None
        self._model: object = None

    def start(self, exporter: str, root: str) -> None:
        """Import the project's exporter."""
        module, _, name = exporter.partition(":")
        sys.path.insert(0, root)
        self._exporter = getattr(importlib.import_module(module), name)()

    def train(self, run: str, data: Mapping[str, str], parameters: Mapping[str, Any], folder: str) -> None:
        """Call the training function and save its model."""
        sets = {}
        for name, path in data.items():
            arrays = load_arrays(Path(path))
            inputs = {key.removeprefix("input/"): array for key, array in arrays.items() if key.startswith("input/")}
            sets[name] = Dataset(inputs=inputs, label=arrays.get("label"))
        self._exporter.save(call_training(run, sets, parameters), Path(folder))

    def load(self, folder: str) -> None:
        """Load the model."""
        self._model = self._exporter.load(Path(folder))

    def export(self, section: Any, samples: str, path: str) -> None:
        """Export the loaded model."""
        request_section = codec.from_json(section, Export, where="export")
        self._exporter.export(
            self._model, ExportRequest(section=request_section, samples=load_arrays(Path(samples)), path=Path(path))
        )

    def answer(self, inputs: str, precision: str, outputs: str) -> bool:
        """Write the reference outputs of the loaded model; return whether there are any."""
        answers = self._exporter.reference(self._model, load_arrays(Path(inputs)), precision)
        if answers is not None:
            save_arrays(answers, Path(outputs))
        return answers is not None


def run_exporter() -> None:
    """Serve one exporter."""
    serve(ExporterWorker())


class OptimizerWorker:
    """One optimizer."""

    where = "quantize"
    refusing: tuple[str, ...] = ()

    def optimize(
        self, optimizer: str, section: Any, source: str, path: str, calibration: str | None, machines: Any
    ) -> list[str]:
        """Run the optimizer and return its notes."""
        module, _, name = optimizer.partition(":")
        request = OptimizeRequest(
            section=codec.from_json(section, Quantize, where=self.where),
            source=Path(source),
            path=Path(path),
            calibration=None if calibration is None else load_arrays(Path(calibration)),
            machines=tuple(codec.from_json(machine, Arithmetic, where=self.where) for machine in machines),
        )
        return list(getattr(importlib.import_module(module), name)().optimize(request))


def run_optimizer() -> None:
    """Serve one optimizer."""
    serve(OptimizerWorker())
