"""Three small classifiers, the same bytes at every run: what is compared is what surrounds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model with input `x` (float32) and output `y`, and one row to send. `shape` leaves out the batch."""

    name: str
    shape: tuple[int, ...]

    def path(self, folder: Path) -> Path:
        return folder / "models" / self.name / "model.onnx"

    def row(self) -> NDArray[np.float32]:
        """One input, batch included. Numbers of four decimals, which every contestant is sent as the same text."""
        draw = np.random.default_rng(7).random((1, *self.shape))
        return draw.round(4).astype(np.float32)

    def nested(self) -> str:
        return json.dumps(np.round(self.row().astype(np.float64), 4).tolist())

    def flat(self) -> str:
        return json.dumps(np.round(self.row().astype(np.float64), 4).reshape(-1).tolist())


MLP = Model(name="mlp", shape=(16,))
CNN = Model(name="cnn", shape=(1, 8, 8))
IMAGE = Model(name="image", shape=(3, 224, 224))


def write_all(folder: Path) -> None:
    """Write the models below `folder`."""
    _write(folder, MLP, _mlp(), {"w1": (16, 32), "b1": (32,), "w2": (32, CLASSES), "b2": (CLASSES,)})
    shapes = {
        "w1": (32, 1, 3, 3),
        "b1": (32,),
        "w2": (32, 32, 3, 3),
        "b2": (32,),
        "w3": (32, CLASSES),
        "b3": (CLASSES,),
    }
    _write(folder, CNN, _cnn(), shapes)
    _write(folder, IMAGE, _patches(), {"w1": (8, 3, 16, 16), "b1": (8,), "w2": (8, CLASSES), "b2": (CLASSES,)})


def _mlp() -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("Gemm", ["x", "w1", "b1"], ["hidden"]),
        node("Relu", ["hidden"], ["active"]),
        node("Gemm", ["active", "w2", "b2"], ["logits"]),
        node("Softmax", ["logits"], ["y"]),
    ]


def _cnn() -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("Conv", ["x", "w1", "b1"], ["first"], pads=[1, 1, 1, 1]),
        node("Relu", ["first"], ["active"]),
        node("MaxPool", ["active"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["pooled", "w2", "b2"], ["second"], pads=[1, 1, 1, 1]),
        node("Relu", ["second"], ["features"]),
        node("GlobalAveragePool", ["features"], ["mean"]),
        node("Flatten", ["mean"], ["flat"]),
        node("Gemm", ["flat", "w3", "b3"], ["logits"]),
        node("Softmax", ["logits"], ["y"]),
    ]


def _patches() -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("Conv", ["x", "w1", "b1"], ["patches"], kernel_shape=[16, 16], strides=[16, 16]),
        node("Relu", ["patches"], ["active"]),
        node("GlobalAveragePool", ["active"], ["mean"]),
        node("Flatten", ["mean"], ["flat"]),
        node("Gemm", ["flat", "w2", "b2"], ["y"]),
    ]


def _write(folder: Path, model: Model, nodes: Sequence[onnx.NodeProto], shapes: dict[str, tuple[int, ...]]) -> None:
    draw = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array((0.1 * draw.standard_normal(shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(
        list(nodes),
        model.name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *model.shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = model.path(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(made.SerializeToString(deterministic=True))
