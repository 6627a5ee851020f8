"""Weights that moved further than rounding are judged by their layer's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.evidence import WeightMeasurement
from onnx_ops.measure.quantization import measure_weights
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.testing.models import write_perceptron

SCALE = np.float32(0.05)


def samples(seed: int) -> Any:
    """Rows whose features go together, which is what compensation lives on."""
    draw = np.random.default_rng(seed)
    return {"x": (draw.standard_normal((256, 1)) + 0.2 * draw.standard_normal((256, 8))).astype(np.float32)}


def derive(folder: Path, levels: Any) -> tuple[Path, Path]:
    """The perceptron with the levels (8, 16) in place of its first weight."""
    source, derived = folder / "source.onnx", folder / "derived.onnx"
    write_perceptron(source)
    model = read_model(source)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = numpy_helper.to_array(stored["first.weight"]).astype(np.float64)
    model.graph.initializer.remove(stored["first.weight"])
    for name, array in (("first.weight_quantized", levels(weight / SCALE).astype(np.int8)), ("s", SCALE)):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", ["first.weight_quantized", "s"], ["first.weight"]))
    write_model(model, derived)
    return source, derived


def compensated(steps: Any) -> Any:
    """Each row takes over what all rows before it lost: the sum over features stays within half a step."""
    levels, owed = np.empty_like(steps), np.zeros(steps.shape[1])
    for row in range(len(steps)):
        levels[row] = np.rint(steps[row] + owed)
        owed += steps[row] - levels[row]
    return levels


def measured(folder: Path, levels: Any, **more: Any) -> WeightMeasurement:
    return next(w for w in measure_weights(*derive(folder, levels), **more) if w.tensor == "first.weight")


@pytest.mark.parametrize(
    ("levels", "sound"),
    [
        (compensated, True),
        (np.floor, False),
        (lambda steps: np.rint(steps) + 1, False),
        (lambda steps: np.rint(1.03 * steps), False),
    ],
)
def test_only_what_makes_up_for_rounding_brings_answers_nearer(tmp_path: Path, levels: Any, sound: bool) -> None:
    found = measured(tmp_path, levels, runtime=OnnxRuntime(), samples=samples(1))
    assert found.steps > 0.6
    assert found.output_error is not None
    assert (found.output_error < 0.9) == sound
    assert not list(tmp_path.glob("*-layers.onnx*"))


def test_rounding_and_weights_without_rows_are_not_asked(tmp_path: Path) -> None:
    assert measured(tmp_path, np.rint, runtime=OnnxRuntime(), samples=samples(1)).output_error is None
    assert measured(tmp_path, np.floor).output_error is None


def test_levels_left_unused_are_seen(tmp_path: Path) -> None:
    found = measured(tmp_path, np.rint)
    assert found.stretch is not None
    assert found.stretch == pytest.approx(127 / 60, rel=0.5)
