"""Training functions that fail in their framework's own environment."""

from __future__ import annotations

import tempfile
from typing import Any


def train(data: Any) -> int:
    return 7


def abort_at_opset_23(data: Any) -> None:
    import paddle
    import paddle2onnx
    from paddle.static import InputSpec

    spec = [InputSpec([None, 4], "float32", "x")]
    layer = paddle.jit.to_static(paddle.nn.Linear(4, 2), input_spec=spec, full_graph=True)
    with tempfile.TemporaryDirectory() as folder:
        paddle.jit.save(layer, f"{folder}/m")
        paddle2onnx.export(
            f"{folder}/m.json", f"{folder}/m.pdiparams", f"{folder}/m.onnx", opset_version=23
        )
