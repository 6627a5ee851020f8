"""The inner side of an exporter: runs in the environment of the framework, and imports no more than that brings.

Everything that this module imports is the standard library or needs only `annotated-types`, `cattrs`, numpy and onnx.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.isolation.inside import serve
from onnx_ops.adapters.runtimes.arrays import get_arrays, put_arrays
from onnx_ops.domain.pipeline import Export
from onnx_ops.pipeline.user_code import call_training
from onnx_ops.ports.data import Dataset
from onnx_ops.ports.export import Exporter, ExportRequest


class Inside:
    """One exporter and at most one loaded model."""

    where = "export"
    refusing: tuple[str, ...] = ("answer",)

    def __init__(self) -> None:
        self._exporter: Any = None
        self._model: object = None

    def start(self, exporter: str, root: str) -> None:
        module, _, name = exporter.partition(":")
        sys.path.insert(0, root)
        made: Exporter = getattr(importlib.import_module(module), name)()
        self._exporter = made

    def train(self, run: str, data: Mapping[str, str], parameters: Mapping[str, Any], folder: str) -> None:
        sets = {name: _dataset(path) for name, path in data.items()}
        self._exporter.save(call_training(run, sets, parameters), Path(folder))

    def load(self, folder: str) -> None:
        self._model = self._exporter.load(Path(folder))

    def export(self, section: Any, samples: str, path: str) -> None:
        asked = codec.from_json(section, Export, where="export")
        self._exporter.export(
            self._model, ExportRequest(section=asked, samples=get_arrays(Path(samples)), path=Path(path))
        )

    def answer(self, inputs: str, precision: str, outputs: str) -> bool:
        answers = self._exporter.reference(self._model, get_arrays(Path(inputs)), precision)
        if answers is not None:
            put_arrays(answers, Path(outputs))
        return answers is not None


def main() -> None:
    serve(Inside())


def _dataset(path: str) -> Dataset:
    arrays = get_arrays(Path(path))
    inputs = {name.removeprefix("input/"): array for name, array in arrays.items() if name.startswith("input/")}
    return Dataset(inputs=inputs, label=arrays.get("label"))
