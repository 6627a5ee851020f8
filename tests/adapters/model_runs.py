"""Exports of models, and the outputs of exports and sources."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.signature import Precision
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.target import Target
from onnx_ops.ports import Runtime
from onnx_ops.ports.data import Tensors
from onnx_ops.ports.export import Exporter, ExportRequest

CPU = Target(name="cpu")


def sk(place: str, *arguments: object, **settings: object) -> Any:
    """Return an estimator of scikit-learn by its module and class.

    The package is imported here because the import is slow.
    """
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"sklearn.{module}"), name)(*arguments, **settings)


def piped(*steps: object) -> Any:
    return importlib.import_module("sklearn.pipeline").make_pipeline(*steps)


def run(
    path: Path, feed: Tensors, target: Target = CPU, runtime: Runtime | None = None
) -> dict[str, Any]:
    return dict((runtime or OnnxRuntime()).run(path, target, (feed,))[0])


def export(
    exporter: Exporter, model: object, samples: Tensors, path: Path, section: Export
) -> dict[str, Any]:
    """Export the model, and run the export on the samples."""
    exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
    return run(path, samples)


def reference(
    exporter: Exporter, model: object, feed: Tensors, precision: Precision = "float32"
) -> dict[str, Any]:
    answers = exporter.reference(model, feed, precision)
    assert answers is not None
    return dict(answers)
