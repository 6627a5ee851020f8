"""Tiny ONNX files to test with, written without any framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FEATURES, HIDDEN, CLASSES = 8, 16, 3
"""Sizes of the perceptron of `write_perceptron`."""

SIDE = 8
"""Rows and columns of the images of `write_convolution`."""


def rows(count: int, *, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of the perceptron: `x`, float32 of shape (count, FEATURES)."""
    return {"x": np.random.default_rng(seed).standard_normal((count, FEATURES)).astype(np.float32)}


def images(count: int, *, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of the convolution.

    `image` is float32 of shape (count, 1, SIDE, SIDE).
    """
    return {"image": np.random.default_rng(seed).random((count, 1, SIDE, SIDE), dtype=np.float32)}


def write_perceptron(
    path: Path, *, batch: int | str = "batch", opset: int = 18, ir_version: int = 10
) -> Path:
    """Write a perceptron of three layers with layouts that are hard to rewrite.

    It maps `x` (batch, FEATURES) to `scores` (batch, CLASSES). `first` is a MatMul and an Add whose
    bias is a row (1, HIDDEN). `second` and `third` are Gemms with transposed weights; the weight of
    `second` is square.
    """
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["first.product"], name="first"),
        helper.make_node("Add", ["first.product", "first.bias"], ["first.sum"], name="first_bias"),
        helper.make_node("Relu", ["first.sum"], ["first.out"], name="first_relu"),
        helper.make_node(
            "Gemm",
            ["first.out", "second.weight", "second.bias"],
            ["second.sum"],
            name="second",
            transB=1,
        ),
        helper.make_node("Relu", ["second.sum"], ["second.out"], name="second_relu"),
        helper.make_node(
            "Gemm", ["second.out", "third.weight", "third.bias"], ["scores"], name="third", transB=1
        ),
    ]
    shapes = {
        "first.weight": (FEATURES, HIDDEN),
        "first.bias": (1, HIDDEN),
        "second.weight": (HIDDEN, HIDDEN),
        "second.bias": (HIDDEN,),
        "third.weight": (CLASSES, HIDDEN),
        "third.bias": (CLASSES,),
    }
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, FEATURES])
    return _write(path, "perceptron", nodes, taken, shapes, seed=1, versions=(opset, ir_version))


def write_convolution(path: Path, *, opset: int = 18, ir_version: int = 10) -> Path:
    """Write a model of two convolutions and a mean, without a matrix product.

    It maps `image` (batch, 1, SIDE, SIDE) to `scores` (batch, CLASSES).
    """
    nodes = [
        helper.make_node(
            "Conv", ["image", "first.weight"], ["first.sum"], name="first", pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["first.sum"], ["first.out"], name="first_relu"),
        helper.make_node(
            "Conv", ["first.out", "second.weight", "second.bias"], ["second.sum"], name="second"
        ),
        helper.make_node("GlobalAveragePool", ["second.sum"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["scores"], name="flat"),
    ]
    shapes = {
        "first.weight": (4, 1, 3, 3),
        "second.weight": (CLASSES, 4, 3, 3),
        "second.bias": (CLASSES,),
    }
    taken = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])
    return _write(path, "convolution", nodes, taken, shapes, seed=2, versions=(opset, ir_version))


def _write(
    path: Path,
    name: str,
    nodes: Any,
    taken: Any,
    shapes: dict[str, Any],
    *,
    seed: int,
    versions: tuple[int, int],
) -> Path:
    draw, batch = np.random.default_rng(seed), taken.type.tensor_type.shape.dim[0]
    weights = [
        numpy_helper.from_array(draw.standard_normal(size).astype(np.float32), n)
        for n, size in shapes.items()
    ]
    size = [batch.dim_param or batch.dim_value, CLASSES]
    given = helper.make_tensor_value_info("scores", TensorProto.FLOAT, size)
    graph = helper.make_graph(nodes, name, [taken], [given], weights)
    model = helper.make_model(
        graph, ir_version=versions[1], opset_imports=[helper.make_opsetid("", versions[0])]
    )
    model.metadata_props.add(key="origin", value="testing")
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
