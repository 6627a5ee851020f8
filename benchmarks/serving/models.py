"""Three small classifiers and a dense model of 50 MB for comparing servers.

Each has the same bytes in every run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

CLASSES = 10
_ROWS = 256
_ROWS_BYTES = 4 << 20
"""Most bytes that the rows of a model take; larger rows are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model with input `x` (float32) and output `y`, and the rows to send.

    The shapes leave out the batch. `batchable` and `threads` are those of its deployment, as a
    release decides them.
    """

    name: str
    shape: tuple[int, ...]
    outputs: int = CLASSES
    batchable: bool = False
    threads: int = 0

    def path(self, folder: Path) -> Path:
        return folder / "models" / self.name / "model.onnx"

    def rows(self) -> NDArray[np.float32]:
        """Return different inputs, each a batch of one.

        The numbers have four decimals and are the same for every contestant.
        """
        count = min(_ROWS, max(1, _ROWS_BYTES // (4 * math.prod(self.shape))))
        draw = np.random.default_rng(7).random((count, 1, *self.shape))
        return draw.round(4).astype(np.float32)

    def nested(self) -> list[str]:
        """Return each row as nested lists in JSON."""
        return [json.dumps(row.tolist()) for row in self.rows().astype(np.float64).round(4)]

    def flat(self) -> list[str]:
        """Return each row as one list in JSON."""
        return [json.dumps(row.ravel().tolist()) for row in self.rows().astype(np.float64).round(4)]


MLP = Model(name="mlp", shape=(16,))
CNN = Model(name="cnn", shape=(1, 8, 8))
IMAGE = Model(name="image", shape=(3, 224, 224))
DENSE = Model(name="dense", shape=(2048,), outputs=2048, batchable=True)


def write_all(folder: Path) -> None:
    """Write the models below `folder`."""
    _write(
        folder, MLP, _mlp(), {"w1": (16, 32), "b1": (32,), "w2": (32, CLASSES), "b2": (CLASSES,)}
    )
    shapes = {
        "w1": (32, 1, 3, 3),
        "b1": (32,),
        "w2": (32, 32, 3, 3),
        "b2": (32,),
        "w3": (32, CLASSES),
        "b3": (CLASSES,),
    }
    _write(folder, CNN, _cnn(), shapes)
    _write(folder, DENSE, _dense(), {"w1": (2048, 2048), "w2": (2048, 2048), "w3": (2048, 2048)})
    _write(
        folder,
        IMAGE,
        _patches(),
        {"w1": (8, 3, 16, 16), "b1": (8,), "w2": (8, CLASSES), "b2": (CLASSES,)},
    )


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


def _dense() -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("MatMul", ["x", "w1"], ["first"]),
        node("Relu", ["first"], ["active"]),
        node("MatMul", ["active", "w2"], ["second"]),
        node("Relu", ["second"], ["features"]),
        node("MatMul", ["features", "w3"], ["third"]),
        node("Relu", ["third"], ["y"]),
    ]


def _write(
    folder: Path, model: Model, nodes: Sequence[onnx.NodeProto], shapes: dict[str, tuple[int, ...]]
) -> None:
    draw = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array((0.1 * draw.standard_normal(shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(
        list(nodes),
        model.name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *model.shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", model.outputs])],
        weights,
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = model.path(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(made.SerializeToString(deterministic=True))
