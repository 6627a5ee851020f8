"""The kind of a candidate, found by comparing two files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.onnx_graph.model_kind import read_candidate_kind
from onnx_ops.testing.models import write_perceptron
from tests.support.graphs import write_graph
from tests.support.pairs import derive


@pytest.mark.parametrize(
    ("method", "options", "precision", "why"),
    [
        ("static", {}, "int8", "static, QuantizeLinear pairs: 3 of 3 MatMul/Conv/Gemm in int8"),
        ("dynamic", {}, "int8", "dynamic: 3 of 3 MatMul/Conv/Gemm in int8"),
        ("fp16", {}, "float16", "467 of 467 float weights are float16"),
        (
            "weight-only",
            {"bits": 4, "block": 16},
            "weight-only",
            "3 of 3 matrix products and convolutions have 4-bit weights",
        ),
    ],
)
def test_read_candidate_kind_of_variant_returns_its_precision(
    perceptron: Path, method: str, options: dict[str, int], precision: str, why: str
) -> None:
    found = read_candidate_kind(perceptron, derive(perceptron, method, options))
    assert (found.candidate.precision, found.candidate.why, found.is_rounded) == (
        precision,
        why,
        True,
    )


def test_read_candidate_kind_of_same_file_reports_same_file_as_change(perceptron: Path) -> None:
    found = read_candidate_kind(perceptron, perceptron)
    assert (found.candidate.precision, found.changes, found.is_rounded) == (
        "float32",
        ("the same file",),
        False,
    )


def test_read_candidate_kind_of_other_opset_and_graph_lists_both(
    perceptron: Path, tmp_path: Path
) -> None:
    other = write_perceptron(tmp_path / "other.onnx", opset=19)
    assert read_candidate_kind(perceptron, other).changes == ("opset 19, was 18",)
    model = onnx.load(other)
    model.graph.node[2].op_type = "FusedRelu"
    model.graph.node[2].domain = "com.microsoft"
    onnx.save(model, other)
    changes = read_candidate_kind(perceptron, other).changes
    assert changes == ("opset 19, was 18", "graph-optimized (FusedRelu 1; 6 nodes, was 6)")


@pytest.mark.parametrize(
    ("operator", "more", "why"),
    [
        ("DynamicQuantizeMatMul", "", "dynamic: 1 of 2 MatMul/Conv/Gemm in int8"),
        (
            "MatMulIntegerToFloat",
            "s, ",
            "static, integer operators: 1 of 2 MatMul/Conv/Gemm in int8",
        ),
    ],
)
def test_read_candidate_kind_counts_fused_matrix_products_as_int8(
    operator: str, more: str, why: str, tmp_path: Path
) -> None:
    inputs = f"{'int8' if more else 'float'}[N,4] x, int8[4,4] w, float s, float[4,4] f"
    nodes = f"y = com.microsoft.{operator}(x, w, {more}s) z = MatMul(y, f)"
    path = write_graph(tmp_path / "fused.onnx", f"({inputs}) => (float[N,4] z) {{ {nodes} }}")
    found = read_candidate_kind(path, path)
    assert (found.candidate.precision, found.candidate.why) == ("int8", why)


@pytest.mark.parametrize(
    ("kind", "bits"), [(TensorProto.INT4, 4), (TensorProto.UINT8, 8), (TensorProto.INT16, 16)]
)
def test_read_candidate_kind_of_weight_only_file_names_bits(
    kind: int, bits: int, tmp_path: Path
) -> None:
    nodes = "r = DequantizeLinear<axis = 0, block_size = 2>(w, s) p = MatMul(x, r) y = MatMul(p, f)"
    stored = {
        "w": helper.make_tensor("w", kind, [4, 4], [1, 2, 3, 4] * 4),
        "s": np.ones((2, 4), np.float32),
        "f": np.ones((4, 4), np.float32),
    }
    path = write_graph(
        tmp_path / "m.onnx", f"(float[N,4] x) => (float[N,4] y) {{ {nodes} }}", opset=21, **stored
    )
    found = read_candidate_kind(path, path).candidate
    assert (found.precision, found.why) == (
        "weight-only",
        f"1 of 2 matrix products and convolutions have {bits}-bit weights",
    )


def test_read_candidate_kind_of_partly_float16_file_is_float16(tmp_path: Path) -> None:
    nodes = "h = Cast<to = 10>(x) p = MatMul(h, w) q = Cast<to = 1>(p) y = MatMul(q, f)"
    stored = {"w": np.ones((4, 4), np.float16), "f": np.ones((4, 9), np.float32)}
    path = write_graph(
        tmp_path / "m.onnx", f"(float[N,4] x) => (float[N,9] y) {{ {nodes} }}", **stored
    )
    found = read_candidate_kind(path, path)
    assert (found.candidate.precision, found.candidate.why) == (
        "float16",
        "16 of 52 float weights are float16",
    )


def test_read_candidate_kind_without_weights_uses_type_of_inputs(tmp_path: Path) -> None:
    text = (
        "(float16[N,4] x) => (float16[N,4] y) { one = Constant<value_float = 1.0>() "
        "half = Cast<to = 10>(one)"
    )
    path = write_graph(tmp_path / "half.onnx", f"{text} y = Add(x, half) }}")
    found = read_candidate_kind(path, path)
    assert (found.candidate.precision, found.candidate.why) == ("float16", "its inputs are float16")
