"""A small perceptron on handwritten digits, with PaddlePaddle. It runs in Paddle's own environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle.static import InputSpec

from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], *, width: int = 64, epochs: int = 60, seed: int = 7) -> Any:
    """One hidden layer, fitted on the whole set `train` at each step; made static, since only that can be saved.

    Its activation is tanh: Paddle's ReLU makes 0 of NaN, which ONNX passes on, and parity detects
    that.
    """
    paddle.seed(seed)
    rows = data["train"]
    x = paddle.to_tensor(rows.inputs["x"] / 16)
    y = paddle.to_tensor(rows.label)
    inner = paddle.nn.Sequential(
        paddle.nn.Linear(64, width), paddle.nn.Tanh(), paddle.nn.Linear(width, 10)
    )
    optimizer = paddle.optimizer.Adam(0.02, parameters=inner.parameters())
    for _ in range(epochs):
        loss = paddle.nn.functional.cross_entropy(inner(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return paddle.jit.to_static(
        Scaled(inner), input_spec=[InputSpec([None, 64], "float32", "x")], full_graph=True
    )


class Scaled(paddle.nn.Layer):
    """Pixels from 0 to 16 in, a score for each digit out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x / 16)
