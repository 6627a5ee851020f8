"""A variant without its rounding equals its source with the variant's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import AS_WRITTEN
from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.dequantization import write_dequantized, write_with_weights
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.testing.models import rows, write_perceptron
from tests.support.graphs import write_graph
from tests.support.pairs import derive, write_changed

METHODS: dict[str, dict[str, int]] = {
    "static": {},
    "dynamic": {},
    "fp16": {},
    "weight-only": {"bits": 4, "block": 16},
}


def distance(source: Path, derived: Path) -> float:
    """Return the largest difference of the functions, relative to the largest output."""
    plain, exact = source.with_name("plain.onnx"), source.with_name("exact.onnx")
    write_with_weights(source, read_quantized_weights(source, derived), plain)
    write_dequantized(source, derived, exact)
    # The rows include values beyond the calibrated ranges.
    feed = {"x": 3 * rows(64, seed=9)["x"]}
    one, other = (
        np.asarray(OnnxRuntime().run(path, AS_WRITTEN, (feed,))[0]["scores"], dtype=np.float64)
        for path in (plain, exact)
    )
    return float(np.abs(one - other).max() / np.abs(one).max())


@pytest.mark.parametrize("method", METHODS)
def test_write_dequantized_of_variant_matches_source_with_its_weights(
    perceptron: Path, method: str
) -> None:
    assert distance(perceptron, derive(perceptron, method, METHODS[method])) < 1e-5


def _transpose_once(model: onnx.ModelProto) -> None:
    """Exchange two columns of the input."""
    order = numpy_helper.from_array(np.array([1, 0, *range(2, 8)]), "order")
    model.graph.initializer.append(order)
    for node in model.graph.node:
        node.input[:] = ["x.swapped" if name == "x" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Gather", ["x", "order"], ["x.swapped"], axis=1))


def _negate(model: onnx.ModelProto) -> None:
    last = next(node for node in model.graph.node if "scores" in node.output)
    last.output[0] = "scores.before"
    model.graph.node.append(helper.make_node("Neg", ["scores.before"], ["scores"]))


@pytest.mark.parametrize("fault", [_transpose_once, _negate])
@pytest.mark.parametrize("method", METHODS)
def test_write_dequantized_of_faulty_graph_differs_from_source(
    perceptron: Path, method: str, fault: Callable[[onnx.ModelProto], None]
) -> None:
    derived = derive(perceptron, method, METHODS[method])
    model = onnx.load(derived)
    fault(model)
    onnx.save(model, derived)
    assert distance(perceptron, derived) > 0.1


def test_write_dequantized_with_relu_missing_from_range_differs_from_source(
    perceptron: Path,
) -> None:
    """The range of a variant without that ReLU reaches below 0."""
    derived = derive(perceptron, "static")
    nodes = onnx.load(derived).graph.node
    pair = next(
        node for node in nodes if node.op_type == "QuantizeLinear" and "first" in node.input[0]
    )
    changed = write_changed(derived, pair.input[2], lambda _: np.array(128, np.uint8))
    assert distance(perceptron, changed) > 0.1


def test_write_dequantized_of_unknown_operator_raises_measurement_error(perceptron: Path) -> None:
    derived = derive(perceptron, "dynamic")
    model = onnx.load(derived)
    model.graph.node[0].op_type = "QAttention"
    onnx.save(model, derived)
    with pytest.raises(MeasurementError, match="QAttention"):
        write_dequantized(perceptron, derived, perceptron.with_name("exact.onnx"))


def write_branches(path: Path) -> Path:
    """Write a model whose If multiplies by its inner constant, and by one of the main graph."""
    text = """(float[N,8] x) => (float[N,4] scores) {
        total = ReduceSum<keepdims=0>(x)
        is_positive = Greater(total, zero)
        scores = If(is_positive) <
            then_branch = doubled () => (float[N,4] a) {
                two = Constant<value = float {2.0}>()
                x2 = Mul(x, two)
                a = MatMul(x2, w)
            },
            else_branch = plain () => (float[N,4] b) { b = MatMul(x, w) }
        >
    }"""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    return write_graph(path, text, w=weights, zero=np.float32(0))


def test_write_dequantized_of_float16_subgraph_matches_source_with_its_weights(
    tmp_path: Path,
) -> None:
    source = write_branches(tmp_path / "source.onnx")
    assert distance(source, derive(source, "fp16")) < 1e-5


@pytest.mark.parametrize("operator", ["MatMulNBits", "MatMulInteger", "QLinearMul"])
def test_write_dequantized_of_rounding_in_subgraph_raises_measurement_error(
    tmp_path: Path, operator: str
) -> None:
    source = write_branches(tmp_path / "source.onnx")
    model = onnx.load(source)
    model.graph.node[2].attribute[0].g.node[0].op_type = operator
    onnx.save(model, tmp_path / "derived.onnx")
    with pytest.raises(MeasurementError, match=f"{operator} in a subgraph"):
        write_dequantized(source, tmp_path / "derived.onnx", tmp_path / "exact.onnx")


@pytest.mark.parametrize("format_", ["QDQ", "QOperator"])
def test_write_dequantized_of_clip_folded_into_range_restores_it(
    tmp_path: Path, format_: str
) -> None:
    """The bound of the Clip is a constant that the variant no longer has."""
    from onnxruntime.quantization import QuantFormat, quantize_static

    from onnx_ops.adapters.optimizers.library import BatchReader
    from onnx_ops.onnx_graph.model_info import read_model_info

    source, derived = write_perceptron(tmp_path / "source.onnx"), tmp_path / "derived.onnx"
    model = onnx.load(source)
    for node in model.graph.node:
        if node.name == "second_relu":
            node.op_type = "Clip"
            node.input.extend(["least", "most"])
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.float32), name)
        for name, value in (("least", 0), ("most", 6))
    )
    onnx.save(model, source)
    reader = BatchReader(rows(256), read_model_info(source))
    quantize_static(str(source), str(derived), reader, quant_format=QuantFormat[format_])
    assert not any(node.op_type == "Clip" for node in onnx.load(derived).graph.node)
    assert distance(source, derived) < 1e-5
