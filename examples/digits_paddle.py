"""A small perceptron on handwritten digits, with PaddlePaddle.

It runs in Paddle's own environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle.static import InputSpec

from onnx_ops.ports import Dataset


def train(data: Mapping[str, Dataset], *, width: int = 64, epochs: int = 60, seed: int = 7) -> Any:
    """Fit one hidden layer, on the whole set `train` at each step.

    The model is made static, since only a static model can be saved. Its activation is tanh:
    Paddle's ReLU turns NaN into 0, while ONNX passes NaN on, and parity detects that.
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
    """A model from pixels from 0 to 16 to a score for each digit."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x / 16)
