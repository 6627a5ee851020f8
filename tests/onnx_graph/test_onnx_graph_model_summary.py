"""The computational cost of a model by its shapes, against counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.onnx_graph.model_summary import ModelCost, estimate_cost, summarize_model
from onnx_ops.testing.models import CLASSES, FEATURES, HIDDEN, SIDE, write_convolution
from tests.support.external import write_external
from tests.support.graphs import write_graph


def cost_of(
    folder: Path, nodes: str, shape: str = "batch,4,6", batch: int = 1, **sizes: tuple[int, ...]
) -> ModelCost:
    """Return the cost of nodes from `x` to `y`; weights are zeros."""
    stored: dict[str, Any] = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    text = f"(float[{shape}] x) => (float y) {{ {nodes} }}"
    if "own.F" in nodes:
        text += ' <domain: "own", opset_import: ["" : 18]> F (a, b) => (c) { c = MatMul(a, b) }'
    return estimate_cost(
        write_graph(folder / "m.onnx", text, domains={"own": 1}, **stored), batch=batch
    )


@pytest.mark.parametrize("batch", [1, 5])
def test_estimate_cost_of_perceptron_counts_macs_flops_and_bytes(
    perceptron: Path, batch: int
) -> None:
    found = estimate_cost(perceptron, batch=batch)
    assert found.macs == {
        "MatMul": batch * FEATURES * HIDDEN,
        "Gemm": batch * (HIDDEN * HIDDEN + HIDDEN * CLASSES),
    }
    assert found.flops == 2 * batch * (FEATURES * HIDDEN + HIDDEN * HIDDEN + HIDDEN * CLASSES)
    assert found.weight_bytes == 4 * 467
    assert found.activation_bytes == 4 * batch * 2 * HIDDEN
    assert (found.uncounted, found.unknown_values, found.problem, found.dims) == (
        {},
        0,
        "",
        {"batch": batch},
    )


def test_estimate_cost_of_convolution_counts_macs(tmp_path: Path) -> None:
    inner = SIDE - 2
    found = estimate_cost(write_convolution(tmp_path / "m.onnx"))
    assert found.macs == {"Conv": SIDE * SIDE * 4 * 9 + inner * inner * CLASSES * 4 * 9}


def test_estimate_cost_of_lstm_transposed_product_and_function_counts_macs(tmp_path: Path) -> None:
    lstm = cost_of(
        tmp_path, "y = LSTM<hidden_size = 3>(x, w, r)", batch=2, w=(1, 12, 6), r=(1, 12, 3)
    )
    assert lstm.macs == {"LSTM": 2 * 4 * (12 * 6 + 12 * 3)}
    assert cost_of(tmp_path, "y = ConvTranspose(x, w)", w=(4, 2, 3)).macs == {
        "ConvTranspose": 4 * 6 * 2 * 3
    }
    assert cost_of(tmp_path, "y = Gemm<transA = 1>(x, w)", "7,2", w=(7, 3)).macs == {
        "Gemm": 7 * 2 * 3
    }
    in_a_function = cost_of(tmp_path, "y = own.F(x, w)", w=(6, 2))
    assert in_a_function.macs == {"MatMul": 4 * 6 * 2}


def test_estimate_cost_of_unsupported_or_misshapen_operators_lists_them(tmp_path: Path) -> None:
    found = cost_of(tmp_path, 'z = Einsum<equation = "bij,bij->b">(x, x) y = own.Secret(z)')
    assert (found.macs, found.uncounted, found.unknown_values) == (
        {},
        {"Einsum": 1, "Secret": 1},
        1,
    )
    unfit = cost_of(tmp_path, "y = Gemm(x, w)", w=(9, 2))
    assert (unfit.macs, unfit.uncounted) == ({}, {"Gemm": 1})


def test_estimate_cost_with_given_dimension_uses_its_size(tmp_path: Path) -> None:
    text = "(float[batch,length,6] x) => (float y) { y = MatMul(x, w) }"
    path = write_graph(tmp_path / "m.onnx", text, w=np.zeros((6, 2), np.float32))
    assert estimate_cost(path).macs == {"MatMul": 8 * 6 * 2}
    found = estimate_cost(path, dims={"length": 100})
    assert (found.macs, found.dims) == ({"MatMul": 100 * 6 * 2}, {"batch": 1, "length": 100})


def test_estimate_cost_of_external_weights_counts_their_bytes(tmp_path: Path) -> None:
    write_external(tmp_path / "m.onnx", "weights.bin")
    assert estimate_cost(tmp_path / "m.onnx").weight_bytes == 8


def test_summarize_model_counts_constants_of_nodes_and_subgraphs(tmp_path: Path) -> None:
    text = (
        "(float[4] x, bool c) => (float[4] y) { w = Constant<value = float[4] {1.0, 2.0, "
        "3.0, 4.0}>() y = If(c) <then_branch = t () => (float[4] a) "
        "{ v = Constant<value = float[1] {2.0}>() a = Mul(x, v) }, else_branch = e () "
        "=> (float[4] b) { b = Add(x, w) }> }"
    )
    assert summarize_model(write_graph(tmp_path / "m.onnx", text)).parameters == {"float": 5}


def test_summarize_model_lists_input_without_declared_shape(tmp_path: Path) -> None:
    found = summarize_model(
        write_graph(tmp_path / "m.onnx", "(float[N,4] x, float[] s) => (float y) { y = Mul(x, s) }")
    )
    assert found.unranked == ("s",)


@pytest.mark.parametrize(("block", "runs"), [(32, True), (48, False), (8, False)])
def test_summarize_model_lists_block_sizes_without_kernel(
    tmp_path: Path, block: int, runs: bool
) -> None:
    node = f"y = com.microsoft.MatMulNBits<K = 96, N = 2, bits = 4, block_size = {block}>(x, w, s)"
    stored = {
        "w": np.zeros((2, 96 // block, block // 2), np.uint8),
        "s": np.ones(2 * 96 // block, np.float32),
    }
    found = summarize_model(
        write_graph(
            tmp_path / "m.onnx", f"(float[N,96] x) => (float[N,2] y) {{ {node} }}", **stored
        )
    )
    assert (found.blocks == {}) is runs


def test_summarize_model_reads_default_block_size_of_gather(tmp_path: Path) -> None:
    node = "y = com.microsoft.GatherBlockQuantized<bits = 4>(w, i, s)"
    stored = {"w": np.zeros((6, 64), np.uint8), "s": np.ones((6, 1), np.float32)}
    graph = f"(int64[N] i) => (float[N,128] y) {{ {node} }}"
    assert summarize_model(write_graph(tmp_path / "m.onnx", graph, **stored)).blocks == {}
