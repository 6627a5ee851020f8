"""Small real models, and a server process to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import scaling_deployment
from tests.serving.serving_process import Server, deploy

Tensor = tuple[str, int, list[Any]]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Deployment]:
    """Builds a model from nodes, inputs and outputs, and gives its deployment."""

    def make(
        nodes: list[onnx.NodeProto], inputs: list[Tensor], outputs: list[Tensor], *, name: str = "blue"
    ) -> Deployment:
        graph = helper.make_graph(
            nodes,
            "m",
            [helper.make_tensor_value_info(*tensor) for tensor in inputs],
            [helper.make_tensor_value_info(*tensor) for tensor in outputs],
        )
        folder = tmp_path / f"built-{name}"
        folder.mkdir()
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.save_model(model, folder / "model.onnx")
        return deploy(folder, name=name)

    return make


@pytest.fixture
def blue(tmp_path: Path) -> Deployment:
    return scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0, model="m")


@pytest.fixture
def green(tmp_path: Path) -> Deployment:
    return scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0, model="m")


@pytest.fixture
def slow(build: Callable[..., Deployment]) -> Deployment:
    """A model that counts to `n` in a loop: the larger, the slower."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_on"], ["still"]), helper.make_node("Add", ["sum", "one"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.INT64, []),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, []),
        ],
        [helper.make_tensor("one", TensorProto.INT64, [], [1])],
    )
    return build(
        [
            helper.make_node("Constant", [], ["zero"], value=helper.make_tensor("z", TensorProto.INT64, [], [0])),
            helper.make_node("Loop", ["n", "", "zero"], ["count"], body=body),
        ],
        [("n", TensorProto.INT64, [])],
        [("count", TensorProto.INT64, [])],
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "state"
    folder.mkdir()
    server = Server(folder)
    server.start()
    yield server
    server.kill_all()


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[Server]:
    """A server with two workers."""
    folder = tmp_path / "state"
    folder.mkdir()
    server = Server(folder, flags=["--workers=2", "--drain=5 s"])
    server.start()
    yield server
    server.kill_all()
