"""A normalization with outlier channels, and the outputs of its products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.onnx_graph.files import write_model

CHANNELS, OUTPUTS, LOUD = 32, 8, (3, 20)


def write_norm(path: Path, form: str = "norm", *, loud: float = 60.0) -> Path:
    """Write a normalization with two outlier channels.

    A MatMul and a Gemm multiply its output, with small weights for these channels. `form` is how
    the file stores the normalization: `norm` (one node), `steps`, or `no shift` (steps without a
    shift).
    """
    draw = np.random.default_rng(0)
    gain = np.ones(CHANNELS, dtype=np.float32)
    gain[list(LOUD)] = loud
    shift = draw.standard_normal(CHANNELS).astype(np.float32) * gain
    first, second = (
        draw.standard_normal((CHANNELS, OUTPUTS)).astype(np.float32) / gain[:, None]
        for _ in range(2)
    )
    weights = {"gain": gain, "shift": shift, "first": first, "second": second.T.copy()}
    norm = [helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], axis=-1)]
    if form == "steps":
        norm = [
            helper.make_node("LpNormalization", ["x"], ["u"], axis=-1),
            helper.make_node("Mul", ["gain", "u"], ["m"]),
            helper.make_node("Add", ["m", "shift"], ["n"]),
        ]
    elif form == "no shift":
        norm = [
            helper.make_node("LpNormalization", ["x"], ["u"]),
            helper.make_node("Mul", ["u", "gain"], ["n"]),
        ]
    nodes = [
        *norm,
        helper.make_node("MatMul", ["n", "first"], ["a"], name="a"),
        helper.make_node("Gemm", ["n", "second"], ["b"], name="b", transB=1),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", CHANNELS])]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", OUTPUTS]) for name in "ab"
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "norm", ends, outputs, initializers)
    write_model(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path
    )
    return path


def answers(path: Path) -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = np.random.default_rng(1).standard_normal((64, CHANNELS)).astype(np.float32)
    return list(ort.InferenceSession(str(path), options).run(["a", "b"], {"x": x}))
