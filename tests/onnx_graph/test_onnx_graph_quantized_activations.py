"""Integer operators, read as the pairs of nodes that they replace.

A pair is a QuantizeLinear and a DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from onnx_ops.adapters.optimizers.library import BatchReader
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import AS_WRITTEN
from onnx_ops.errors import MeasurementError
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.quantized_activations import (
    expand_integer_operators,
    read_quantized_activations,
)
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.onnx_graph.rewrites import flatten_biases
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron
from tests.support.graphs import parse_graph
from tests.support.processor import detect_here

pytestmark = pytest.mark.processor


def quantized(
    folder: Path, write: Callable[[Path], Any], feed: Any, *, per_channel: bool = True
) -> tuple[Path, Path]:
    source, plain, derived = folder / "source.onnx", folder / "plain.onnx", folder / "derived.onnx"
    write(source)
    model = read_model(source)
    flatten_biases(model)
    write_model(model, plain)
    quantize_static(
        str(plain),
        str(derived),
        BatchReader(feed(64), read_model_info(plain)),
        quant_format=QuantFormat.QOperator,
        per_channel=per_channel,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=detect_here().saturates,
    )
    return source, derived


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("write", "feed"), [(write_perceptron, rows), (write_convolution, images)])
def test_expand_integer_operators_keeps_outputs_within_two_steps_and_weights_within_half(
    tmp_path: Path, write: Any, feed: Any, per_channel: bool
) -> None:
    source, derived = quantized(tmp_path, write, feed, per_channel=per_channel)
    assert any(node.op_type.startswith("QLinear") for node in read_model(derived).graph.node)
    write_model(expand_integer_operators(read_model(derived), ""), tmp_path / "pairs.onnx")
    runtime = OnnxRuntime()
    (before,), (after,) = (
        runtime.run(path, AS_WRITTEN, (feed(32, seed=1),))
        for path in (derived, tmp_path / "pairs.onnx")
    )
    step = max(activation.step for activation in read_quantized_activations(derived))
    assert (
        np.abs(before["scores"].astype(np.float64) - after["scores"].astype(np.float64)).max()
        <= 2.1 * step
    )
    weights = read_quantized_weights(source, derived)
    assert weights
    for weight in weights:
        assert (np.abs(weight.original - weight.dequantized) <= 0.51 * weight.scale).all()
        assert weight.stretch is None or weight.stretch < 1.1 * (
            2 if detect_here().saturates else 1
        )


def test_expand_integer_operators_with_other_scale_keeps_it_for_consumer(tmp_path: Path) -> None:
    _, derived = quantized(tmp_path, write_perceptron, rows)
    model = read_model(derived)
    node = next(n for n in model.graph.node if n.op_type == "QGemm")
    scale = next(
        numpy_helper.to_array(t) for t in model.graph.initializer if t.name == node.input[1]
    )
    model.graph.initializer.append(
        numpy_helper.from_array(np.asarray(scale * np.float32(1.1)), "other")
    )
    value, node.input[1] = node.input[0], "other"
    found = expand_integer_operators(model, "")
    readers = [
        n for n in found.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == value
    ]
    assert [n.input[1] for n in readers] == ["other"]


def test_expand_integer_operators_of_unknown_kind_or_old_opset_raises_measurement_error() -> None:
    text = "(uint8[1] x) => (uint8[1] y) { y = com.microsoft.QLinearReduceMean(x, s, z, s, z) }"
    for opset, message in ((18, "QLinearReduceMean"), (12, "opset 12")):
        with pytest.raises(MeasurementError, match=message):
            expand_integer_operators(
                parse_graph(text, opset=opset, domains={"com.microsoft": 1}), "model.onnx"
            )


def test_expand_integer_operators_without_any_returns_same_model(perceptron: Path) -> None:
    model = read_model(perceptron)
    assert expand_integer_operators(model, "") is model
