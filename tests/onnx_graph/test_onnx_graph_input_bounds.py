"""The bounds of input values that a graph shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_ops.onnx_graph.input_bounds import InputBounds, read_index_bounds, read_input_bounds
from tests.support.graphs import write_graph
from tests.support.voice import write_voice_detector

STORED = {
    "table": np.zeros((7, 2), np.float32),
    "small": np.zeros((3, 2), np.float32),
    "depth": 5,
    "flat": [-1],
}


def write(folder: Path, nodes: str, kind: str = "int64") -> Path:
    text = f"({kind}[n,4] x) => (float y) {{ {nodes} }}"
    return write_graph(folder / "m.onnx", text, domains={"ai.onnx.ml": 3}, **STORED)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Gather(table, x)", (0, 6)),
        ("y = Gather<axis = 1>(table, x)", (0, 1)),
        ("a = Gather(table, x) y = Gather(small, x)", (0, 2)),
        ("a = Cast<to = 6>(x) b = Reshape(a, flat) y = Gather(table, b)", (0, 6)),
        ("y = OneHot(x, depth, table)", (0, 4)),
        ("a = Add(x, depth) y = Gather(table, a)", None),
        ("y = Gather(x, depth)", None),
    ],
)
def test_read_input_bounds_returns_range_of_unchanged_index_and_none_for_other_inputs(
    nodes: str, expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    path = write(tmp_path, nodes)
    assert read_input_bounds(path)["x"].index == expected
    assert read_index_bounds(path) == ({} if expected is None else {"x": expected})


TREE = "y = ai.onnx.ml.TreeEnsembleRegressor<nodes_missing_value_tracks_true = [0, {}]>(x)"
COLOURS = (
    'y = ai.onnx.ml.LabelEncoder<keys_strings = ["red", "blue"], values_floats = [1.0, 2.0]>(x)'
)


@pytest.mark.parametrize(
    ("nodes", "kind", "expected"),
    [
        ("a = Add(x, depth) y = ConstantOfShape(a)", "int64", InputBounds(size=True)),
        ("a = Add(x, depth) y = Cast<to = 1>(a)", "int64", InputBounds()),
        (COLOURS, "string", InputBounds(texts=("blue", "red"))),
        (TREE.format(1), "float", InputBounds(missing=True)),
        (TREE.format(0), "float", InputBounds()),
    ],
    ids=["size through a computation", "no size", "texts", "missing values", "no missing values"],
)
def test_read_input_bounds_reports_sizes_texts_and_missing_values(
    nodes: str, kind: str, expected: InputBounds, tmp_path: Path
) -> None:
    assert read_input_bounds(write(tmp_path, nodes, kind))["x"] == expected


@pytest.mark.parametrize(
    ("shape", "expected"), [("n,seq,3", "seq"), ("n,,3", "values[1]"), ("n,5,3", 5)]
)
def test_read_input_bounds_of_index_into_each_row_returns_row_length(
    shape: str, expected: int | str, tmp_path: Path
) -> None:
    nodes = "i = Unsqueeze(x, one) y = GatherND<batch_dims = 1>(values, i)"
    text = f"(int64[n] x, float[{shape}] values) => (float y) {{ {nodes} }}"
    path = write_graph(tmp_path / "m.onnx", text.replace("n,,3", "n,unnamed,3"), one=np.array([1]))
    if ",," in shape:
        model = onnx.load(path)
        model.graph.input[1].type.tensor_type.shape.dim[1].ClearField("dim_param")
        onnx.save(model, path)
    assert read_input_bounds(path)["x"].tables == (expected,)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Gather(nodes, x)", ("num_nodes",)),
        ("y = Gather<axis = 1>(nodes, x)", (3,)),
        ("a = Tanh(nodes) b = Gather(x, zero) y = Gather(a, b)", ("num_nodes",)),
        ("a = Where(mask, x, x) y = Gather(nodes, a)", ("num_nodes",)),
        ("y = GatherND(nodes, x)", ("?",)),
        ("y = Gather(table, x)", ()),
        ("a = Add(x, depth) y = Gather(nodes, a)", ()),
    ],
)
def test_read_input_bounds_returns_dimension_of_input_that_unchanged_index_selects_from(
    nodes: str, expected: tuple[int | str, ...], tmp_path: Path
) -> None:
    text = f"(int64[n,4] x, float[num_nodes,3] nodes, bool[n,4] mask) => (float y) {{ {nodes} }}"
    path = write_graph(tmp_path / "m.onnx", text, **STORED, zero=np.int64(0))
    assert read_input_bounds(path)["x"].tables == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Equal(x, depth)", (5, 6)),
        ("y = Greater(depth, x)", (5, 6, 4)),
        ("a = Cast<to = 6>(x) b = Cast<to = 7>(a) y = LessOrEqual(b, depth)", (5, 6, 4)),
        ("a = Add(x, depth) y = Equal(a, depth)", ()),
        ("y = Equal(x, flat_table)", ()),
    ],
)
def test_read_input_bounds_returns_scalars_compared_with_unchanged_input_and_neighbours(
    nodes: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    text = f"(int64[n,4] x) => (bool y) {{ {nodes} }}"
    path = write_graph(tmp_path / "m.onnx", text, **STORED, flat_table=[1, 2, 3, 4])
    assert read_input_bounds(path)["x"].compared == expected


def test_read_input_bounds_includes_constants_of_branches(tmp_path: Path) -> None:
    assert read_input_bounds(write_voice_detector(tmp_path / "m.onnx"))["sr"].compared == (
        16000,
        16001,
        8000,
        8001,
    )
