"""Weights whose products saturate without VNNI are found.

The tests also compare this machine's products with its detected saturation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.saturation import find_saturating_weights
from onnx_ops.testing.models import images, write_convolution, write_perceptron
from tests.support.graphs import parse_graph
from tests.support.kernels import multiply
from tests.support.pairs import derive
from tests.support.processor import saturates_here

Array = npt.NDArray[Any]

levels = st.lists(st.integers(-128, 127), min_size=2, max_size=8).map(
    lambda found: np.array(found, np.int8)[:, None]
)


def build(text: str, weight: Array, **stored: Any) -> onnx.ModelProto:
    return parse_graph(text, domains={"com.microsoft": 1}, w=weight, **stored)


PRODUCT = "(uint8[N,K] x) => (int32[N,M] y) { y = MatMulInteger(x, w) }"


@pytest.mark.processor
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("inner", [1, 2, 3, 64])
@pytest.mark.parametrize("weight", [64, 65, 127, -64, -65, -128])
def test_processor_product_matches_detected_saturation(
    tmp_path: Path, weight: int, inner: int, rows: int
) -> None:
    weights = np.full((inner, 16), weight, np.int8)
    write_model(build(PRODUCT, weights), tmp_path / "product.onnx")
    x = np.full((rows, inner), 255, np.uint8)
    (answer,) = OnnxRuntime().run(tmp_path / "product.onnx", Target(name="here"), ({"x": x},))
    np.testing.assert_array_equal(answer["y"], multiply(x, weights, saturates=saturates_here()))


@pytest.mark.processor
@pytest.mark.parametrize(
    ("operator", "shape", "groups", "saturates"),
    [
        ("QLinearConv", (4, 2), 1, True),
        ("QLinearConv", (4, 2), 2, True),
        ("QLinearConv", (4, 1), 1, True),
        ("QLinearConv", (4, 1), 2, True),
        ("QLinearConv", (4, 1), 4, False),
        ("QLinearConv", (1, 1), 1, False),
        ("ConvInteger", (4, 2), 1, False),
        ("ConvInteger", (4, 1), 4, False),
    ],
)
def test_find_saturating_weights_of_convolution_agrees_with_processor(
    tmp_path: Path, operator: str, shape: tuple[int, int], groups: int, saturates: bool
) -> None:
    x = np.full((1, shape[1] * groups, 3, 3), 255, np.uint8)
    exact, expected = 255 * 127 * shape[1] * 9, 200
    kind, inputs = "uint8", "x, s, z, w, s, n, t, z"
    if operator == "ConvInteger":
        expected, kind, inputs = exact, "int32", "x, w"
    model = build(
        f"(uint8[1,C,3,3] x) => ({kind} y) {{ y = {operator}<group={groups}>({inputs}) }}",
        np.full((*shape, 3, 3), 127, np.int8),
        s=np.float32(1),
        z=np.uint8(0),
        n=np.int8(0),
        t=np.float32(exact / 200),
    )
    write_model(model, tmp_path / "model.onnx")
    (answer,) = OnnxRuntime().run(tmp_path / "model.onnx", Target(name="here"), ({"x": x},))
    assert bool(np.all(answer["y"] == expected)) is not (saturates and saturates_here())
    assert find_saturating_weights(model) == (("w",) if saturates else ())


@settings(max_examples=300)
@given(weights=levels, seed=st.integers(0, 99))
def test_find_saturating_weights_returns_weight_with_inexact_sums(
    weights: Array, seed: int
) -> None:
    x = np.random.default_rng(seed).choice([0, 1, 254, 255], (4, len(weights))).astype(np.uint8)
    exact, computed = (multiply(x, weights, saturates=saturates) for saturates in (False, True))
    if not np.array_equal(exact, computed):
        assert find_saturating_weights(build(PRODUCT, weights)) == ("w",)


PAIR = "a = DequantizeLinear(x, s, z)\n b = DequantizeLinear(w, s)\n"
FLAT, IMAGE = "(uint8[2,2] x) => (float[2,2] y)", "(uint8[1,2,1,1] x) => (float y)"


@pytest.mark.parametrize(
    ("text", "shape", "saturates"),
    [
        (f"{FLAT} {{ {PAIR} y = MatMul(a, b) }}", (2, 2), True),
        (f"{FLAT} {{ {PAIR} c = Transpose(b)\n y = Gemm(a, c) }}", (2, 2), True),
        (f"{FLAT} {{ {PAIR} y = Add(a, b) }}", (2, 2), False),
        (f"{IMAGE} {{ {PAIR} y = Conv(a, b) }}", (2, 2, 1, 1), True),
        (f"{IMAGE} {{ {PAIR} y = Conv<group = 2>(a, b) }}", (2, 1, 1, 1), False),
        ("(uint8[2,2] x) => (uint8 y) { y = QLinearMatMul(x, s, z, w, s, t, s, z) }", (2, 2), True),
        (
            "(uint8[2,2] x) => (uint8 y) { y = com.microsoft.QGemm(x, s, z, w, s, t, , s, z) }",
            (2, 2),
            True,
        ),
        (
            "(uint8[1,2,1,1] x) => (uint8 y) { y = QLinearConv(x, s, z, w, s, t, s, z) }",
            (2, 2, 1, 1),
            True,
        ),
        (
            "(float[2,2] x) => (float y) { y = com.microsoft.DynamicQuantizeMatMul(x, w, s) }",
            (2, 2),
            True,
        ),
        ("(float[2,2] x, float[2,2] w) => (float y) { y = MatMul(x, w) }", (2, 2), False),
    ],
)
def test_find_saturating_weights_returns_weight_only_if_products_are_added_in_pairs(
    text: str, shape: tuple[int, ...], saturates: bool
) -> None:
    model = build(text, np.full(shape, 127, np.int8), s=np.float32(1), z=np.uint8(0), t=np.int8(0))
    assert find_saturating_weights(model) == (("w",) if saturates else ())


def test_find_saturating_weights_of_int8_activations_or_uint8_weights_is_empty() -> None:
    product = (
        "=> (float[2,2] y) { a = DequantizeLinear(x, s, z)\n b = DequantizeLinear(w, s)\n "
        "y = MatMul(a, b) }"
    )
    for zero, weight in ((np.int8(0), np.int8(127)), (np.uint8(0), np.uint8(255))):
        model = build(
            f"({zero.dtype}[2,2] x) {product}", np.full((2, 2), weight), s=np.float32(1), z=zero
        )
        assert find_saturating_weights(model) == ()


@pytest.mark.parametrize(
    ("write", "method", "calibration"),
    [
        (write_perceptron, "dynamic", None),
        (write_perceptron, "static", None),
        (write_convolution, "static", images(64)),
    ],
)
def test_find_saturating_weights_returns_8_bit_but_no_7_bit_weights(
    tmp_path: Path, write: Any, method: str, calibration: Any
) -> None:
    source = write(tmp_path / "source.onnx")
    for reduce_range in (True, False):
        variant = derive(source, method, {"reduce_range": reduce_range}, calibration=calibration)
        assert bool(find_saturating_weights(read_model(variant))) is not reduce_range
