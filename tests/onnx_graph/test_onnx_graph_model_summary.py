"""What a model costs by its shapes, held against what a person counts."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.onnx_graph.model_summary import estimate_cost
from onnx_ops.testing.models import CLASSES, FEATURES, HIDDEN, SIDE, write_convolution, write_perceptron
from tests.support.external import write_external

X: list[int | str] = ["batch", 4, 6]
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]


def write(path: Path, nodes: list[onnx.NodeProto], weights: dict[str, list[int]], shape: list[int | str] = X) -> Path:
    """A model of those nodes from `x` to `y`; weights are zeros."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            helper.make_tensor(name, TensorProto.FLOAT, dims, bytes(4 * _size(dims)), raw=True)
            for name, dims in weights.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSETS, ir_version=10), path)
    return path


def _size(dims: list[int]) -> int:
    total = 1
    for size in dims:
        total *= size
    return total


@pytest.mark.parametrize("batch", [1, 5])
def test_a_perceptron(tmp_path: Path, batch: int) -> None:
    write_perceptron(tmp_path / "m.onnx")
    found = estimate_cost(tmp_path / "m.onnx", batch=batch)
    assert found.macs == {"MatMul": batch * FEATURES * HIDDEN, "Gemm": batch * (HIDDEN * HIDDEN + HIDDEN * CLASSES)}
    assert found.flops == 2 * batch * (FEATURES * HIDDEN + HIDDEN * HIDDEN + HIDDEN * CLASSES)
    assert found.weight_bytes == 4 * 467
    assert found.activation_bytes == 4 * batch * 2 * HIDDEN
    assert (found.uncounted, found.unknown_values, found.problem, found.dims) == ({}, 0, "", {"batch": batch})


def test_a_convolution(tmp_path: Path) -> None:
    write_convolution(tmp_path / "m.onnx")
    inner = SIDE - 2
    assert estimate_cost(tmp_path / "m.onnx").macs == {"Conv": SIDE * SIDE * 4 * 9 + inner * inner * CLASSES * 4 * 9}


def test_other_operators_that_multiply(tmp_path: Path) -> None:
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3)
    found = estimate_cost(write(tmp_path / "lstm.onnx", [lstm], {"w": [1, 12, 6], "r": [1, 12, 3]}), batch=2)
    assert found.macs == {"LSTM": 2 * 4 * (12 * 6 + 12 * 3)}
    turned = helper.make_node("ConvTranspose", ["x", "w"], ["y"])
    assert estimate_cost(write(tmp_path / "t.onnx", [turned], {"w": [4, 2, 3]})).macs == {
        "ConvTranspose": 4 * 6 * 2 * 3
    }
    gemm = helper.make_node("Gemm", ["x", "w"], ["y"], transA=1)
    assert estimate_cost(write(tmp_path / "g.onnx", [gemm], {"w": [7, 3]}, [7, 2])).macs == {"Gemm": 7 * 2 * 3}


def test_what_is_not_counted_is_told(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Einsum", ["x", "x"], ["z"], equation="bij,bij->b"),
        helper.make_node("Secret", ["z"], ["y"], domain="own"),
    ]
    found = estimate_cost(write(tmp_path / "m.onnx", nodes, {}))
    assert found.uncounted == {"Einsum": 1, "Secret": 1}
    assert (found.macs, found.unknown_values) == ({}, 1)


def test_named_dimensions_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    matmul = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = write(tmp_path / "m.onnx", [matmul], {"w": [6, 2]}, ["batch", "length", 6])
    assert estimate_cost(path).macs == {"MatMul": 8 * 6 * 2}
    assert estimate_cost(path, dims={"length": 100}).macs == {"MatMul": 100 * 6 * 2}
    assert estimate_cost(path, dims={"length": 100}).dims == {"batch": 1, "length": 100}


def test_functions_are_looked_into(tmp_path: Path) -> None:
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    function = helper.make_function("own", "F", ["a", "b"], ["c"], body, [helper.make_opsetid("", 18)])
    path = write(tmp_path / "m.onnx", [helper.make_node("F", ["x", "w"], ["y"], domain="own")], {"w": [6, 2]})
    model = onnx.load(path)
    model.functions.append(function)
    onnx.save(model, path)
    assert estimate_cost(path).macs == {"MatMul": 4 * 6 * 2}


def test_shapes_that_do_not_fit_give_no_figures_and_a_reason(tmp_path: Path) -> None:
    gemm = helper.make_node("Gemm", ["x", "w"], ["y"])
    found = estimate_cost(write(tmp_path / "m.onnx", [gemm], {"w": [9, 2]}))
    assert found.macs == {}
    assert found.uncounted == {"Gemm": 1}


def test_external_weights_are_counted_and_not_read(tmp_path: Path) -> None:
    write_external(tmp_path / "m.onnx", "weights.bin")
    assert estimate_cost(tmp_path / "m.onnx").weight_bytes == 8
