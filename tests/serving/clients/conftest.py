"""Two real server processes: a model of many types, and a classifier from scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import Server, deploy

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "fp64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
    "text": TensorProto.STRING,
}


def serve(root: Path, model: onnx.ModelProto) -> Iterator[Server]:
    (root / "model").mkdir()
    onnx.save_model(model, root / "model" / "model.onnx")
    with Server(folder=root / "state") as server:
        assert server.publish(state_of(deploy(root / "model"), blue=100), 1).status == 200
        yield server


@pytest.fixture(scope="session")
def types(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every input comes back as `<name>_out`."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in TYPES],
        "m",
        [helper.make_tensor_value_info(name, kind, ["n", 2]) for name, kind in TYPES.items()],
        [helper.make_tensor_value_info(f"{name}_out", kind, ["n", 2]) for name, kind in TYPES.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    yield from serve(tmp_path_factory.mktemp("types"), model)


@pytest.fixture(scope="session")
def classifier() -> tuple[LogisticRegression, np.ndarray]:
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    data = load_iris()
    rows = data.data.astype(np.float32)
    return LogisticRegression(max_iter=500).fit(rows, data.target), rows


@pytest.fixture(scope="session")
def iris(
    classifier: tuple[LogisticRegression, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from skl2onnx import to_onnx

    model, rows = classifier
    exported = to_onnx(model, rows[:1], options={"zipmap": False}, target_opset=18)
    yield from serve(tmp_path_factory.mktemp("iris"), exported)
