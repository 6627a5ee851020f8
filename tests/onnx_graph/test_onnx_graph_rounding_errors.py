"""Rounding errors of outputs, computed by a copy of the graph.

They are compared with float64 and with calculations by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.onnx_graph.rounding_errors import (
    RoundingOutputs,
    list_ranked_outputs,
    write_with_rounding_errors,
)
from onnx_ops.onnx_graph.rounding_operators import EPSILON, KERNEL_ERRORS

Array = npt.NDArray[Any]
ROUNDOFF = EPSILON / 2
"""Largest relative error of one rounding to float32."""
ROWS, FEATURES = 64, 12
WEIGHT = np.random.default_rng(1).normal(size=(FEATURES, 3)).astype(np.float32)
X = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)


def write(
    path: Path,
    body: str,
    *,
    outputs: str = "float[N, M] y",
    opset: int = 18,
    ml: bool = False,
    **tensors: Any,
) -> Path:
    """Write a graph of one input `x [N, 12]` from the text of its nodes."""
    domains = f'"": {opset}' + (', "ai.onnx.ml": 3' if ml else "")
    text = (
        f"<ir_version: 9, opset_import: [{domains}]> g (float[N, {FEATURES}] x) "
        f"=> ({outputs}) {{ {body} }}"
    )
    model = parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in tensors.items()
    )
    onnx.save(model, path)
    return path


def run(path: Path, x: Array = X) -> tuple[dict[str, RoundingOutputs], dict[str, Array]]:
    """Return the description of each output, and all outputs of the copy."""
    copy = path.with_name("copy.onnx")
    described = write_with_rounding_errors(path, copy)
    (answers,) = OnnxRuntime().run(copy, Target(name="cpu"), ({"x": x},))
    return described, dict(answers)


def error_of(path: Path, x: Array = X) -> Array:
    described, answers = run(path, x)
    error = answers[described["y"].error]
    assert error.shape == answers["y"].shape
    return error


PRODUCT = "y = MatMul(x, w)"


def test_rounding_error_of_product_is_one_roundoff_of_absolute_sum(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "m.onnx", PRODUCT, w=WEIGHT))
    np.testing.assert_allclose(error, ROUNDOFF * (np.abs(X) @ np.abs(WEIGHT)), rtol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_rounding_error_of_gemm_includes_bias_and_factors(tmp_path: Path, turned: bool) -> None:
    bias = np.array([0.0, -5.0, 1e4], dtype=np.float32)
    body = f"y = Gemm<alpha=-2.0, beta=0.5, transB={int(turned)}>(x, w, b)"
    path = write(tmp_path / "m.onnx", body, w=WEIGHT.T.copy() if turned else WEIGHT, b=bias)
    expected = ROUNDOFF * (2 * np.abs(X) @ np.abs(WEIGHT) + 0.5 * np.abs(bias))
    np.testing.assert_allclose(error_of(path), expected, rtol=1e-5)


def test_rounding_error_of_product_scales_with_weights_of_each_column(tmp_path: Path) -> None:
    scales = np.array([2e4, 15.0, 0.3], dtype=np.float32)
    error = error_of(write(tmp_path / "m.onnx", PRODUCT, w=WEIGHT * scales)).max(axis=0)
    assert np.all(error < 1e-5 * scales)
    assert np.all(error > 1e-8 * scales)


@pytest.mark.parametrize("shift", [0.0, -5.0, -14.0])
def test_rounding_error_of_sigmoid_includes_kernel_error(tmp_path: Path, shift: float) -> None:
    path = write(
        tmp_path / "m.onnx",
        "z = MatMul(x, w) s = Add(z, b) y = Sigmoid(s)",
        w=WEIGHT,
        b=np.array([shift], dtype=np.float32),
    )
    described, answers = run(path)
    error, y = answers[described["y"].error], answers["y"].astype(np.float64)
    kernel = KERNEL_ERRORS["Sigmoid"] * EPSILON
    slope = y * (1 - y) * EPSILON * (np.abs(X) @ np.abs(WEIGHT) + 2 * abs(shift) + 10)
    assert np.all(error >= kernel)
    assert np.all(error <= kernel + 2 * slope + EPSILON * y)


def normalize(z: Array) -> Array:
    return np.asarray((z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5))


@pytest.mark.parametrize(
    ("body", "exact"),
    [
        ("y = Tanh(z)", np.tanh),
        ("y = Softmax<axis=-1>(z)", lambda z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)),
        ("y = LogSoftmax<axis=-1>(z)", lambda z: z - np.log(np.exp(z).sum(axis=1, keepdims=True))),
        ("y = Exp(z)", np.exp),
        ("a = Abs(z) y = Log(a)", lambda z: np.log(np.abs(z))),
        ("a = Abs(z) y = Sqrt(a)", lambda z: np.sqrt(np.abs(z))),
        ("y = Relu(z)", lambda z: np.maximum(z, 0)),
        ("y = Mul(z, z)", lambda z: z * z),
        ("e = Exp(z) y = Div(z, e)", lambda z: z / np.exp(z)),
        ("e = Exp(z) y = Reciprocal(e)", lambda z: np.exp(-z)),
        ("y = Pow(z, two)", lambda z: z**2),
        ("y = CumSum(z, last)", lambda z: z.cumsum(axis=1)),
        ("c = Greater(z, zero) y = Where(c, z, zero)", lambda z: np.maximum(z, 0)),
        ("y = ReduceMean<keepdims=1>(z, axes)", lambda z: z.mean(axis=1, keepdims=True)),
        ("y = LayerNormalization<axis=-1>(z, g)", normalize),
        (
            "y = ReduceLogSumExp<keepdims=1>(z, axes)",
            lambda z: np.log(np.exp(z).sum(axis=1, keepdims=True)),
        ),
    ],
    ids=lambda value: value.rpartition("= ")[2].partition("(")[0] if isinstance(value, str) else "",
)
def test_rounding_error_is_between_quarter_of_float32_loss_and_200_times_it(
    tmp_path: Path, body: str, exact: Any
) -> None:
    """The bounds are neither much too small nor many times too large.

    Too small bounds would reject correct exports.
    """
    tensors: dict[str, Any] = {
        "w": WEIGHT,
        "two": np.array(2, dtype=np.float32),
        "zero": np.array(0, dtype=np.float32),
        "last": np.array(1),
        "axes": np.array([1]),
        "g": np.ones(3, dtype=np.float32),
    }
    path = write(
        tmp_path / "m.onnx",
        f"z = MatMul(x, w) {body}",
        **{k: v for k, v in tensors.items() if k in body + "w"},
    )
    described, answers = run(path)
    error = answers[described["y"].error].astype(np.float64)
    lost = np.abs(answers["y"] - exact(X.astype(np.float64) @ WEIGHT.astype(np.float64)))
    assert np.all(lost <= 4 * error + 1e-12)
    assert lost.max() >= error.max() / 200


@pytest.mark.parametrize("opset", [9, 13, 18, 20])
def test_write_with_rounding_errors_of_softmax_supports_opsets_from_9(
    tmp_path: Path, opset: int
) -> None:
    path = write(
        tmp_path / "m.onnx", "z = MatMul(x, w) y = Softmax<axis=1>(z)", opset=opset, w=WEIGHT
    )
    assert error_of(path).max() < 1e-5


def test_write_with_rounding_errors_before_opset_9_returns_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", PRODUCT, opset=8, w=WEIGHT)
    assert write_with_rounding_errors(path, tmp_path / "copy.onnx") == {}
    assert not (tmp_path / "copy.onnx").exists()


def test_rounding_error_of_convolution_has_channel_axis_and_kernel_bound(tmp_path: Path) -> None:
    kernels = np.random.default_rng(2).normal(size=(5, 1, 3)).astype(np.float32)
    path = write(
        tmp_path / "m.onnx",
        "i = Unsqueeze(x, one) c = Conv<pads=[1, 1]>(i, k) y = Relu(c)",
        outputs="float[N, 5, M] y",
        k=kernels,
        one=np.array([1]),
    )
    described, answers = run(path)
    assert described["y"].axis == 1
    assert (
        answers[described["y"].error].max()
        <= 1.01 * ROUNDOFF * np.abs(X).max() * np.abs(kernels).sum(axis=2).max()
    )


@pytest.mark.parametrize(
    ("pad", "opset"),
    [("Pad<pads=[0, 1, 0, 1], value=7.0>(z)", 10), ("Pad(z, pads, value)", 18)],
)
def test_rounding_error_of_pad_value_is_zero(tmp_path: Path, pad: str, opset: int) -> None:
    path = write(
        tmp_path / "m.onnx",
        f"z = MatMul(x, w) y = {pad}",
        opset=opset,
        w=WEIGHT,
        pads=np.array([0, 1, 0, 1]),
        value=np.array(7, dtype=np.float32),
    )
    error = error_of(path)
    assert not error[:, [0, -1]].any()
    assert error[:, 1:-1].all()


def test_rounding_outputs_of_transposed_channels_return_moved_axis(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.onnx",
        "i = Unsqueeze(x, one) c = Conv(i, k) y = Transpose<perm=[0, 2, 1]>(c)",
        outputs="float[N, M, 5] y",
        k=np.ones((5, 1, 3), dtype=np.float32),
        one=np.array([1]),
    )
    assert run(path)[0]["y"].axis == 2


def test_rounding_outputs_of_concatenation_number_its_parts(tmp_path: Path) -> None:
    body = "a = MatMul(x, w) b = MatMul(x, v) j = Concat<axis=1>(a, b) y = Sigmoid(j)"
    described, answers = run(write(tmp_path / "m.onnx", body, w=WEIGHT, v=1e3 * WEIGHT[:, :2]))
    assert answers[described["y"].segments].tolist() == [[0, 0, 0, 1, 1]] * ROWS


def test_rounding_error_of_instance_norm_grows_for_constant_row(tmp_path: Path) -> None:
    """The channels of a constant row have no variance.

    The rounding error of their mean is divided by sqrt(epsilon).
    """
    body = (
        "i = Unsqueeze(x, one) n = InstanceNormalization(i, s, b) m = Squeeze(n, one) "
        "y = MatMul(m, w)"
    )
    path = write(
        tmp_path / "m.onnx",
        body,
        w=WEIGHT,
        one=np.array([1]),
        s=np.array([2], dtype=np.float32),
        b=np.array([0], dtype=np.float32),
    )
    constant = np.full_like(X, 3.3)
    assert error_of(path, constant).max() > 20 * error_of(path).max()


def test_rounding_error_of_operator_without_rule_is_two_epsilon_of_largest_answer(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "m.onnx", "z = MatMul(x, w) y = Hardmax(z)", w=WEIGHT)
    np.testing.assert_allclose(error_of(path), np.full((ROWS, 3), 2 * EPSILON), rtol=1e-5)


def test_rounding_outputs_of_copied_values_have_no_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", "y = Gather<axis=1>(x, i)", i=np.array([3, 1]))
    assert run(path)[0]["y"].error == ""


@pytest.mark.parametrize(
    ("body", "outputs", "axis"),
    [
        ("z = MatMul(x, w) i = ArgMax<axis=1, keepdims=0>(z)", "int64[N] i", 1),
        ("z = MatMul(x, w) a = ArgMin<axis=-1>(z) i = Cast<to=6>(a)", "int32[N, 1] i", -1),
        ("z = MatMul(x, w) v, i = TopK(z, k)", "int64[N, K] i", -1),
    ],
    ids=["argmax", "cast argmin", "topk"],
)
def test_rounding_outputs_of_indices_include_ranked_scores(
    tmp_path: Path, body: str, outputs: str, axis: int
) -> None:
    count: dict[str, Any] = {"k": np.array([2])} if "TopK" in body else {}
    path = write(tmp_path / "m.onnx", body, outputs=outputs, w=WEIGHT, **count)
    described, answers = run(path)
    ranking = described["i"]
    assert (ranking.scores_axis, ranking.error) == (axis, "")
    np.testing.assert_allclose(answers[ranking.scores], X @ WEIGHT, rtol=1e-4, atol=1e-5)
    assert answers[ranking.scores_error].shape == (ROWS, 3)
    assert list_ranked_outputs(path) == frozenset()


def test_rounding_outputs_of_classes_include_labels(tmp_path: Path) -> None:
    body = "z = MatMul(x, w) a = ArgMax<axis=1>(z) i = ai.onnx.ml.ArrayFeatureExtractor(c, a)"
    path = write(
        tmp_path / "m.onnx", body, outputs="int64[A, B] i", ml=True, w=WEIGHT, c=np.array([7, 8, 9])
    )
    labels = run(path)[0]["i"].labels
    assert labels is not None
    assert labels.tolist() == [7, 8, 9]


def test_list_ranked_outputs_returns_outputs_in_ranked_order(tmp_path: Path) -> None:
    body = "z = MatMul(x, w) v, i = TopK(z, k) y = GatherElements<axis=1>(x, i)"
    path = write(
        tmp_path / "m.onnx",
        body,
        outputs="float[N, K] v, int64[N, K] i, float[N, K] y",
        w=WEIGHT,
        k=np.array([2]),
    )
    assert list_ranked_outputs(path) == {"y"}


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX"])
def test_rounding_error_of_linear_classifier_is_bounded_by_coefficients(
    tmp_path: Path, transform: str
) -> None:
    node = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        coefficients=WEIGHT.T.reshape(-1).tolist(),
        intercepts=[0.0, 1.0, 2.0],
        classlabels_ints=[0, 1, 2],
        post_transform=transform,
    )
    path = write(tmp_path / "m.onnx", "y = Identity(x)", ml=True)
    model = onnx.load(path)
    del model.graph.node[:]
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"]))
    onnx.save(model, path)
    described, answers = run(path)
    error = answers[described["y"].error]
    limit = ROUNDOFF * (np.abs(X) @ np.abs(WEIGHT) + np.array([0.0, 1.0, 2.0]))
    if transform == "NONE":
        np.testing.assert_allclose(error, limit, rtol=1e-4)
    assert error.max() <= limit.max() + 4 * EPSILON
    assert described["label"].scores


def test_rounding_error_of_long_chain_is_finite(tmp_path: Path) -> None:
    steps = " ".join(f"a{i + 1} = Add(a{i}, x)" for i in range(400))
    path = write(tmp_path / "m.onnx", f"a0 = Neg(x) {steps} y = Neg(a400)")
    assert np.isfinite(error_of(path)).all()
