"""Models with two inputs, of frameworks in isolated environments.

Inputs are bound by name, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.isolation.isolated_tools import IsolatedExporter
from onnx_ops.domain.pipeline import Export
from onnx_ops.errors import UserError
from onnx_ops.ports import ExportRequest
from tests.adapters.model_runs import reference, run

pytestmark = pytest.mark.nightly

DRAW = np.random.default_rng(0)
ROWS: dict[str, Any] = {name: DRAW.random((8, 3)).astype(np.float32) for name in ("user", "item")}
ANSWERS = (ROWS["user"] - 2 * ROWS["item"]).sum(axis=1, keepdims=True)
MODELS = {
    "tensorflow_signature": "tensorflow",
    "tensorflow_call": "tensorflow",
    "keras_functional": "tensorflow",
    "tflite": "tflite",
    "tflite_without_signature": "tflite",
    "paddle": "paddle",
}


@pytest.mark.parametrize("name", MODELS)
def test_export_of_two_inputs_in_any_order_binds_names_and_refuses_other_inputs(
    isolated: Callable[[str], IsolatedExporter], name: str, tmp_path: Path
) -> None:
    exporter = isolated(MODELS[name])
    exporter.train(f"tests.nightly.two_inputs:{name}", {}, {}, tmp_path)
    model = exporter.load(tmp_path)
    section = Export(framework=MODELS[name])
    for order in (["user", "item"], ["item", "user"]):
        samples, path = {name: ROWS[name] for name in order}, tmp_path / f"{order[0]}.onnx"
        exporter.export(model, ExportRequest(section=section, samples=samples, path=path))
        (answers,) = run(path, samples).values()
        (expected,) = reference(exporter, model, samples).values()
        np.testing.assert_allclose(answers, ANSWERS, atol=1e-6)
        np.testing.assert_allclose(expected, ANSWERS, atol=1e-6)
    for wrong in ({"user": ROWS["user"], "itm": ROWS["item"]}, {"user": ROWS["user"]}):
        request = ExportRequest(
            section=section, samples=wrong, path=tmp_path / "wrong.onnx", ordered=True
        )
        with pytest.raises(UserError, match="'item'"):
            exporter.export(model, request)


def test_export_of_subclassed_keras_model_with_dictionary_input_keeps_weights(
    isolated: Callable[[str], IsolatedExporter], tmp_path: Path
) -> None:
    exporter = isolated("tensorflow")
    exporter.train("tests.nightly.keras_dictionary:train", {}, {}, tmp_path)
    model, path = exporter.load(tmp_path), tmp_path / "model.onnx"
    exporter.export(
        model, ExportRequest(section=Export(framework="tensorflow"), samples=ROWS, path=path)
    )
    for answers in (run(path, ROWS), reference(exporter, model, ROWS)):
        (array,) = answers.values()
        np.testing.assert_allclose(array, ANSWERS / 2, atol=1e-6)
