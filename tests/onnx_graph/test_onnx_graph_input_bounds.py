"""What a graph shows about its inputs' values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.onnx_graph.input_bounds import InputBounds, read_index_bounds, read_input_bounds

TABLE = numpy_helper.from_array(np.zeros((7, 2), dtype=np.float32), "table")
SMALL = numpy_helper.from_array(np.zeros((3, 2), dtype=np.float32), "small")


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    domain = "ai.onnx.ml" if kind in ("LabelEncoder", "TreeEnsembleRegressor", "Imputer") else ""
    return helper.make_node(kind, inputs.split(), [output], domain=domain, **attributes)


def write(path: Path, nodes: list[onnx.NodeProto], kind: int = TensorProto.INT64) -> Path:
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", kind, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [TABLE, SMALL, numpy_helper.from_array(np.array(5), "depth"), numpy_helper.from_array(np.array([-1]), "flat")],
    )
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("Gather", "table x", "y")], (0, 6)),
        ([node("Gather", "table x", "y", axis=1)], (0, 1)),
        ([node("Gather", "table x", "a"), node("Gather", "small x", "y")], (0, 2)),
        ([node("Cast", "x", "a", to=TensorProto.INT32), node("Reshape", "a flat", "b"), node("Gather", "table b", "y")],
         (0, 6)),
        ([node("OneHot", "x depth table", "y")], (0, 4)),
        ([node("Add", "x depth", "a"), node("Gather", "table a", "y")], None),
        ([node("Gather", "x depth", "y")], None),
    ],
)  # fmt: skip
def test_an_index_has_the_bounds_of_what_it_chooses_from(
    nodes: list[onnx.NodeProto], expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    assert read_input_bounds(write(tmp_path / "m.onnx", nodes))["x"].index == expected
    assert read_index_bounds(tmp_path / "m.onnx") == ({} if expected is None else {"x": expected})


def test_what_sets_a_size_is_told_through_any_computation(tmp_path: Path) -> None:
    sized = [node("Add", "x depth", "a"), node("ConstantOfShape", "a", "y")]
    assert read_input_bounds(write(tmp_path / "a.onnx", sized))["x"].size
    plain = [node("Add", "x depth", "a"), node("Cast", "a", "y", to=TensorProto.FLOAT)]
    assert read_input_bounds(write(tmp_path / "b.onnx", plain))["x"] == InputBounds()


def test_texts_and_missing_values_that_operators_know(tmp_path: Path) -> None:
    encoder = node("LabelEncoder", "x", "y", keys_strings=["red", "blue"], values_floats=[1.0, 2.0])
    assert read_input_bounds(write(tmp_path / "a.onnx", [encoder], TensorProto.STRING))["x"].texts == ("blue", "red")
    tree = node("TreeEnsembleRegressor", "x", "y", nodes_missing_value_tracks_true=[0, 1])
    assert read_input_bounds(write(tmp_path / "b.onnx", [tree], TensorProto.FLOAT))["x"].missing
    plain = node("TreeEnsembleRegressor", "x", "y", nodes_missing_value_tracks_true=[0, 0])
    assert not read_input_bounds(write(tmp_path / "c.onnx", [plain], TensorProto.FLOAT))["x"].missing
