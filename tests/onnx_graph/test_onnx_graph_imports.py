"""Operator sets are imported once each, in a fixed order, whatever a converter wrote."""

from __future__ import annotations

from pathlib import Path

from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.testing.models import write_perceptron


def test_an_operator_set_that_is_imported_twice_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    model = read_model(path)
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    model.opset_import.add(domain="", version=18)
    write_model(model, path)
    assert [(entry.domain, entry.version) for entry in read_model(path).opset_import] == [("", 18), ("ai.onnx.ml", 1)]
