"""An exporter whose framework lives in an environment of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from onnx_ops import codec
from onnx_ops.adapters.isolation.interpreter import interpreter
from onnx_ops.adapters.isolation.process import Limits, Process
from onnx_ops.adapters.runtimes.arrays import get_arrays, put_arrays
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import NotFoundError
from onnx_ops.ports.data import Array, Dataset, Tensors
from onnx_ops.ports.export import ExportRequest

INSIDE = "onnx_ops.adapters.isolation.inside_exporter"

PATIENCE_S = 1800.0
"""Seconds for an export or an answer where `env.timeout` says nothing. Training takes as long as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A model that was loaded elsewhere: the folder it was saved in, and the process that holds it."""

    folder: Path
    process: Process


@dataclass(slots=True, kw_only=True)
class IsolatedExporter:
    """Does in another process what an exporter does here. The process lives as long as the model that it holds.

    Args:
        exporter: `module:Class`, as its entry point says.
        python: makes the environment if it must, and gives its interpreter.
        root: the project's folder, whose modules training imports.
        limits: of each process.
    """

    exporter: str
    python: Callable[[], Path]
    root: Path
    limits: Limits = field(default_factory=Limits)
    tools: tuple[str, ...] = ()
    """None of this installation."""

    def train(self, run: str, data: Mapping[str, Dataset], parameters: Mapping[str, Json], folder: Path) -> None:
        process = self._start("train")
        try:
            files = {
                name: str(put_arrays(_with_label(rows), process.folder / f"{name}.npz")) for name, rows in data.items()
            }
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
        """What was loaded, or a model that was brought as a file or folder."""
        source = model.folder if isinstance(model, Remote) else Path(str(model))
        if source.is_dir():
            shutil.copytree(source, folder, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, folder / source.name)
        else:
            raise NotFoundError("no such model", where=str(source))

    def load(self, folder: Path) -> object:
        process = self._start("export")
        process.ask("load", timeout=self._timeout, folder=str(folder.resolve()))
        return Remote(folder=folder, process=process)

    def export(self, model: object, request: ExportRequest) -> None:
        remote = _remote(model)
        with _scratch(remote.process) as folder:
            remote.process.ask(
                "export",
                timeout=self._timeout,
                section=codec.to_json(request.section),
                samples=str(put_arrays(request.samples, folder / "samples.npz")),
                path=str(request.path.resolve()),
            )

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Mapping[str, Array] | None:
        remote = _remote(model)
        with _scratch(remote.process) as folder:
            given, answers = put_arrays(inputs, folder / "inputs.npz"), folder / "answers.npz"
            asked = {"inputs": str(given), "precision": precision, "outputs": str(answers)}
            if not remote.process.ask("answer", timeout=self._timeout, **asked):
                return None
            return get_arrays(answers)

    @property
    def _timeout(self) -> float:
        return self.limits.timeout or PATIENCE_S

    def _start(self, where: str) -> Process:
        package = self.exporter.partition(".")[0].partition(":")[0]
        process = Process(interpreter(self.python(), INSIDE, (package,)), self.limits, where)
        process.ask("start", timeout=self._timeout, exporter=self.exporter, root=str(self.root.resolve()))
        return process


def _remote(model: object) -> Remote:
    if not isinstance(model, Remote):
        raise TypeError(f"{type(model).__name__} was not loaded by this exporter")
    return model


def _with_label(rows: Dataset) -> dict[str, Any]:
    label = {} if rows.label is None else {"label": rows.label}
    return {**{f"input/{name}": array for name, array in rows.inputs.items()}, **label}


@contextmanager
def _scratch(process: Process) -> Iterator[Path]:
    """A folder that both sides see, gone after the answer: arrays may be large."""
    with tempfile.TemporaryDirectory(dir=process.folder) as folder:
        yield Path(folder)
