"""Search for quantized weights and their originals.

The weights are found in the layouts that quantizers write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.quantized_weights import (
    pair_quantized_weights,
    read_float_weights,
    read_quantized_weights,
)
from onnx_ops.statistics.quantization import compute_weight_error
from onnx_ops.testing.models import HIDDEN
from tests.measure.search_parts import write_words
from tests.support.pairs import write_changed


def quantize(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    other = tuple(i for i in range(weight.ndim) if i != axis)
    scale = (np.abs(weight).max(axis=other) / 127).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    return np.round(weight / scale.reshape(shape)).astype(np.int8), scale


def derive(
    source: Path,
    *,
    transposed: bool,
    factor: float = 1.0,
    shift: int = 0,
    dtype: type[np.integer[Any]] = np.int8,
) -> Path:
    """Write the perceptron with `second.weight` in int8 or uint8.

    It is behind a DequantizeLinear in its layout, or transposed for a MatMulInteger. The zero point
    is in the middle of the type, or `shift` beside it.
    """
    model = read_model(source)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = numpy_helper.to_array(stored["second.weight"])
    levels, scale = quantize(weight.T if transposed else weight, 1 if transposed else 0)
    middle = 128 if dtype is np.uint8 else 0
    model.graph.initializer.remove(stored["second.weight"])
    for name, array in (
        ("second.weight_quantized", (levels.astype(np.int16) + middle).astype(dtype)),
        ("second.weight_scale", scale * np.float32(factor)),
        ("second.weight_zero_point", np.full(scale.shape, middle + shift, dtype)),
    ):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    gemm = next(node for node in model.graph.node if node.name == "second")
    parts = ["second.weight_quantized", "second.weight_scale", "second.weight_zero_point"]
    if transposed:
        gemm.op_type = "MatMulInteger"
        del gemm.attribute[:]
        gemm.input[:] = ["first.out", parts[0], "", parts[2]]
    else:
        gemm.input[1] = "second.weight_float"
        node = helper.make_node("DequantizeLinear", parts, ["second.weight_float"], axis=0)
        model.graph.node.insert(0, node)
    path = source.parent / "derived.onnx"
    write_model(model, path)
    return path


def steps(source: Path, derived: Path) -> float:
    (pair,) = read_quantized_weights(source, derived)
    assert pair.name == "second.weight"
    assert pair.original.shape == pair.dequantized.shape == (HIDDEN, HIDDEN)
    return float((np.abs(pair.original - pair.dequantized) / pair.scale).max())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_read_quantized_weights_of_correct_weight_is_within_half_step(
    perceptron: Path, transposed: bool, dtype: type[np.integer[Any]]
) -> None:
    assert 0.3 < steps(perceptron, derive(perceptron, transposed=transposed, dtype=dtype)) <= 0.501


@pytest.mark.parametrize("transposed", [False, True])
def test_read_quantized_weights_of_wrong_zero_point_or_scale_exceeds_half_step(
    perceptron: Path, transposed: bool
) -> None:
    assert steps(perceptron, derive(perceptron, transposed=transposed, shift=1)) > 0.9
    assert steps(perceptron, derive(perceptron, transposed=transposed, factor=1.02)) > 1.5


def test_read_quantized_weights_pairs_numbered_copy_with_original(perceptron: Path) -> None:
    """A quantizer copies a bias that several nodes share, and numbers the copies."""
    derived = derive(perceptron, transposed=False)
    model = read_model(derived)
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("second.weight_", "second.weight12_")
    for node in model.graph.node:
        node.input[:] = [name.replace("second.weight_", "second.weight12_") for name in node.input]
        node.output[:] = [
            name.replace("second.weight_", "second.weight12_") for name in node.output
        ]
    write_model(model, derived)
    (pair,) = read_quantized_weights(perceptron, derived)
    assert pair.name == "second.weight12"
    assert np.abs(pair.original - pair.dequantized).max() <= 0.501 * pair.scale.max()


def rename(derived: Path, before: str, after: str) -> None:
    model = read_model(derived)
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace(before, after)
    for node in model.graph.node:
        node.input[:] = [name.replace(before, after) for name in node.input]
    write_model(model, derived)


def test_read_quantized_weights_pairs_renamed_weight_by_its_place(perceptron: Path) -> None:
    derived = derive(perceptron, transposed=False, factor=40.0)
    rename(derived, "second.weight_quantized", "folded_quantized")
    (pair,) = read_quantized_weights(perceptron, derived)
    assert (pair.name, pair.origin, pair.transposed) == ("folded", "second.weight", False)


def test_read_quantized_weights_without_original_raises_measurement_error(perceptron: Path) -> None:
    derived = derive(perceptron, transposed=False)
    model = read_model(derived)
    model.graph.initializer.append(
        numpy_helper.from_array(np.ones((5, 7), np.int8), "other_quantized")
    )
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(1, np.float32), "one"))
    model.graph.node.insert(
        0, helper.make_node("DequantizeLinear", ["other_quantized", "one"], ["other"])
    )
    write_model(model, derived)
    paired = pair_quantized_weights(perceptron, derived)
    assert ([pair.origin for pair in paired.pairs], paired.unpaired) == (
        ["second.weight"],
        ("other",),
    )
    with pytest.raises(MeasurementError, match="other"):
        read_quantized_weights(perceptron, derived)


def test_read_quantized_weights_in_unknown_layout_raises_measurement_error(
    perceptron: Path,
) -> None:
    model = read_model(perceptron)
    model.graph.initializer.append(
        helper.make_tensor("strange_quantized", TensorProto.INT8, [2], [1, 2])
    )
    derived = perceptron.parent / "derived.onnx"
    write_model(model, derived)
    with pytest.raises(MeasurementError, match="strange"):
        read_quantized_weights(perceptron, derived)


def test_read_quantized_weights_of_float_model_returns_nothing(perceptron: Path) -> None:
    assert read_quantized_weights(perceptron, perceptron) == ()


def test_read_quantized_weights_scale_is_at_least_float32_resolution(perceptron: Path) -> None:
    model = read_model(perceptron)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    bias = numpy_helper.to_array(stored["second.bias"])
    scale = np.float32(1e-9)
    levels = np.clip(np.round(bias.astype(np.float64) / scale), -(2**31), 2**31 - 1).astype(
        np.int32
    )
    levels[np.abs(bias) > 2] = 0
    model.graph.initializer.remove(stored["second.bias"])
    model.graph.initializer.append(numpy_helper.from_array(levels, "second.bias_quantized"))
    model.graph.initializer.append(
        numpy_helper.from_array(scale.reshape(1), "second.bias_quantized_scale")
    )
    parts = ["second.bias_quantized", "second.bias_quantized_scale"]
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", parts, ["second.bias"]))
    derived = perceptron.parent / "derived.onnx"
    write_model(model, derived)
    (pair,) = read_quantized_weights(perceptron, derived)
    small = np.abs(pair.original) <= 2
    assert small.any()
    assert float((np.abs(pair.original - pair.dequantized) / pair.scale)[small].max()) <= 0.51
    assert (pair.scale > scale).any()


def other_steps(source: Path, derived: Path) -> dict[str, float]:
    return {
        w.name: compute_weight_error(w.original, w.dequantized, w.scale)
        for w in read_float_weights(source, derived)
    }


def test_read_float_weights_pairs_constants_with_originals(perceptron: Path) -> None:
    derived = derive(perceptron, transposed=True)
    assert other_steps(perceptron, derived) == dict.fromkeys(
        ["first.bias", "first.weight", "second.bias", "third.bias", "third.weight"], 0.0
    )
    found = other_steps(perceptron, write_changed(derived, "third.bias", np.zeros_like))
    assert found.pop("third.bias") > 1000
    assert set(found.values()) == {0.0}


def test_read_quantized_weights_of_embedding_table_behind_gather_returns_it(tmp_path: Path) -> None:
    source, derived = tmp_path / "words.onnx", tmp_path / "int8.onnx"
    write_words(source)
    model = read_model(source)
    stored = next(t for t in model.graph.initializer if t.name == "table_w")
    table = numpy_helper.to_array(stored)
    step = np.float32(np.abs(table).max() / 127)
    stored.CopyFrom(
        numpy_helper.from_array(np.round(table / step).astype(np.int8), "table_w_quantized")
    )
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(step), "table_w_scale"))
    model.graph.node[0].input[0], model.graph.node[0].output[0] = (
        "table_w_quantized",
        "rows_quantized",
    )
    read = helper.make_node("DequantizeLinear", ["rows_quantized", "table_w_scale"], ["rows"])
    model.graph.node.insert(1, read)
    write_model(model, derived)
    (weight,) = read_quantized_weights(source, derived)
    assert weight.name == "table_w"
    assert compute_weight_error(weight.original, weight.dequantized, weight.scale) <= 0.51
