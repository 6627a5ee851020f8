"""Weights and activations of a quantized variant, compared with the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.evidence import WeightMeasurement
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.quantization import measure_activations, measure_weights
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.pipeline.stages.quantize import _select_unseen
from onnx_ops.ports import Dataset
from onnx_ops.statistics.rules.parity import is_compensating
from onnx_ops.testing.models import rows, write_perceptron
from tests.onnx_graph.norms import CHANNELS, answers, write_norm
from tests.support.pairs import derive, write_changed

pytestmark = pytest.mark.processor


@pytest.fixture
def variant(tmp_path: Path) -> tuple[Path, Path]:
    source = write_perceptron(tmp_path / "source.onnx")
    return source, derive(source, "static")


def measured(variant: tuple[Path, Path], count: int = 256) -> dict[str, Any]:
    found = measure_activations(OnnxRuntime(), *variant, rows(count, seed=1))
    return {one.tensor: one for one in found}


def test_measure_activations_of_correct_variant_keeps_limits(variant: tuple[Path, Path]) -> None:
    found = measured(variant)
    assert {"x", "scores"} <= set(found)
    assert max(one.noise for one in found.values()) <= 1.74
    assert max(one.saturated for one in found.values()) < 0.03
    assert all(one.departure is not None and one.departure < 20 for one in found.values())
    assert not list(variant[0].parent.glob("*-inside.onnx"))


def test_measure_activations_with_reduced_range_reports_saturation(
    variant: tuple[Path, Path],
) -> None:
    source, derived = variant
    assert (
        measured((source, write_changed(derived, "x_scale", lambda scale: scale / 3)))[
            "x"
        ].saturated
        > 0.1
    )


def test_measure_activations_with_different_zero_point_on_read_reports_noise(
    variant: tuple[Path, Path],
) -> None:
    model = read_model(variant[1])
    zero = next(t for t in model.graph.initializer if t.name == "x_zero_point")
    other = np.asarray(numpy_helper.to_array(zero) + 1, np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(other, "other"))
    readers = [
        n
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and n.input[2] == "x_zero_point"
    ]
    readers[0].input[2] = "other"
    write_model(model, variant[1])
    found = measured(variant)
    assert found.pop("x").noise > 3
    assert all(one.noise <= 1.74 for one in found.values())


def test_measure_activations_of_dynamic_quantization_returns_nothing(tmp_path: Path) -> None:
    source = write_perceptron(tmp_path / "source.onnx")
    assert measure_activations(OnnxRuntime(), source, derive(source, "dynamic"), rows(8)) == ()


def test_select_unseen_returns_rows_unused_in_calibration_first() -> None:
    dataset = Dataset(inputs={"x": np.arange(10)})
    np.testing.assert_array_equal(_select_unseen(dataset, 4)["x"], [4, 5, 6, 7, 8, 9, 0, 1, 2, 3])
    np.testing.assert_array_equal(_select_unseen(dataset, 40)["x"], np.arange(10))


SCALE = np.float32(0.05)


def samples(seed: int) -> Any:
    """Return rows with correlated features, which compensation depends on."""
    draw = np.random.default_rng(seed)
    return {
        "x": (draw.standard_normal((256, 1)) + 0.2 * draw.standard_normal((256, 8))).astype(
            np.float32
        )
    }


def with_levels(folder: Path, levels: Any) -> tuple[Path, Path]:
    """Write the perceptron with levels (8, 16) in place of its first weight."""
    folder.mkdir(exist_ok=True)
    source, derived = write_perceptron(folder / "source.onnx"), folder / "derived.onnx"
    model = read_model(source)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = numpy_helper.to_array(stored["first.weight"]).astype(np.float64)
    model.graph.initializer.remove(stored["first.weight"])
    for name, array in (
        ("first.weight_quantized", levels(weight / SCALE).astype(np.int8)),
        ("s", SCALE),
    ):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    model.graph.node.insert(
        0, helper.make_node("DequantizeLinear", ["first.weight_quantized", "s"], ["first.weight"])
    )
    write_model(model, derived)
    return source, derived


def compensated(steps: Any) -> Any:
    """Round each row with the error that the rows before it have left.

    The sum over the features stays within half a step.
    """
    levels, owed = np.empty_like(steps), np.zeros(steps.shape[1])
    for row in range(len(steps)):
        levels[row] = np.rint(steps[row] + owed)
        owed += steps[row] - levels[row]
    return levels


def measured_weights(folder: Path, levels: Any, **more: Any) -> WeightMeasurement:
    return next(
        w
        for w in measure_weights(*with_levels(folder, levels), **more)
        if w.tensor == "first.weight"
    )


@pytest.mark.parametrize(
    ("levels", "sound"),
    [
        (compensated, True),
        (np.floor, False),
        (lambda steps: np.rint(steps) + 1, False),
        (lambda steps: np.rint(1.03 * steps), False),
    ],
)
def test_measure_weights_output_error_is_small_for_compensated_rounding_only(
    tmp_path: Path, levels: Any, sound: bool
) -> None:
    found = measured_weights(tmp_path, levels, runtime=OnnxRuntime(), samples=samples(1))
    assert found.steps > 0.6
    assert found.output_error is not None
    assert (found.output_error < 0.9) == sound
    assert not list(tmp_path.glob("*-layers.onnx*"))


def test_measure_weights_of_plain_rounding_or_without_rows_omits_output_error(
    tmp_path: Path,
) -> None:
    assert (
        measured_weights(tmp_path, np.rint, runtime=OnnxRuntime(), samples=samples(1)).output_error
        is None
    )
    assert measured_weights(tmp_path, np.floor).output_error is None


def test_measure_weights_with_one_weight_of_unknown_origin_raises_measurement_error(
    tmp_path: Path,
) -> None:
    """Other weights that can be compared do not hide it."""
    source, derived = with_levels(tmp_path, np.rint)
    model = read_model(derived)
    for name, array in (("stray_quantized", np.ones((3, 5), np.int8)), ("stray_scale", SCALE)):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    model.graph.node.insert(
        0, helper.make_node("DequantizeLinear", ["stray_quantized", "stray_scale"], ["stray"])
    )
    model.graph.node.insert(1, helper.make_node("Identity", ["stray"], ["used"]))
    model.graph.output.append(helper.make_tensor_value_info("used", 1, (3, 5)))
    write_model(model, derived)
    assert measured_weights(tmp_path / "plain", np.rint).tensor == "first.weight"
    with pytest.raises(MeasurementError, match="stray"):
        measure_weights(source, derived)


def test_measure_weights_with_unused_levels_reports_stretch(tmp_path: Path) -> None:
    found = measured_weights(tmp_path, np.rint)
    assert found.stretch is not None
    assert found.stretch == pytest.approx(127 / 60, rel=0.5)


class TestBalancedChannels:
    """The channels with large values of a normalization are balanced with their weights.

    The checks take the balancing into account.
    """

    @pytest.fixture(params=["dynamic", "static"])
    def variant(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
        source = write_norm(tmp_path / "source.onnx")
        return source, derive(source, request.param, calibration=self.rows(0))

    @staticmethod
    def rows(seed: int) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": np.random.default_rng(seed).standard_normal((64, CHANNELS)).astype(np.float32)}

    def test_quantization_with_balanced_channels_keeps_answers_close(
        self, variant: tuple[Path, Path]
    ) -> None:
        for exact, found in zip(*map(answers, variant), strict=True):
            assert float(np.sqrt(np.mean((found - exact) ** 2)) / exact.std()) < 0.05, (
                "without: a quarter to a third"
            )

    def test_measure_weights_and_activations_of_balanced_variant_keep_limits(
        self, variant: tuple[Path, Path]
    ) -> None:
        assert max(one.steps for one in measure_weights(*variant)) <= 0.51
        for one in measure_activations(OnnxRuntime(), *variant, self.rows(1)):
            assert one.noise <= 1.74
            assert one.departure is None or one.departure < 20
        assert not list(variant[0].parent.glob("*-balanced.onnx*"))

    @pytest.mark.parametrize("constant", ["n_balanced_scale", "first_scale"])
    def test_measure_weights_of_faulty_balanced_variant_exceeds_limit(
        self, variant: tuple[Path, Path], constant: str
    ) -> None:
        source, derived = variant
        tensors = read_model(derived).graph.initializer
        name = next(t.name for t in tensors if t.name in (constant, f"{constant}_quantized"))
        changed = write_changed(derived, name, lambda values: (values * 2).astype(values.dtype))
        assert max(one.steps for one in measure_weights(source, changed)) > 1


@pytest.mark.parametrize(("share", "sound"), [(1.0, True), (-1.0, False), (3.0, False)])
def test_is_compensating_of_bias_accepts_only_mean_error_of_its_weight(
    tmp_path: Path, share: float, sound: bool
) -> None:
    """Quantizers subtract the mean rounding error from the bias.

    Rows with a mean of 1 show that error.
    """
    feeds = {"x": samples(1)["x"] + 1}
    source, derived = with_levels(tmp_path, np.rint)
    weights = {t.name: numpy_helper.to_array(t) for t in read_model(source).graph.initializer}
    error = np.rint(weights["first.weight"] / SCALE) * SCALE - weights["first.weight"]
    shift = share * feeds["x"].mean(0) @ error
    changed = write_changed(derived, "first.bias", lambda bias: bias - shift)
    found = {one.tensor: one for one in measure_weights(source, changed, OnnxRuntime(), feeds)}[
        "first.bias"
    ]
    assert found.bias
    assert found.steps > 100
    assert is_compensating(found) is sound
