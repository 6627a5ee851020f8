"""What runs in int8 after the runtime's own rewriting, and why the rest does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.target import Target
from onnx_ops.measure.execution import inspect_execution
from onnx_ops.onnx_graph.int8_coverage import measure_int8_coverage
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron

TARGET = Target(name="cpu")


def quantized(source: Path, method: str, samples: Any, exclude: tuple[str, ...] = ()) -> Path:
    path = source.with_name(f"{method}.onnx")
    section = Quantize(name=method, method=method, calibrate=Calibrate(), exclude=exclude)
    request = OptimizeRequest(section=section, source=source, path=path, calibration=samples)
    (StaticQuantizer() if method == "static" else DynamicQuantizer()).optimize(request)
    return path


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_a_perceptron_is_covered_but_for_what_is_excluded(method: str, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    write_perceptron(source)
    variant = quantized(source, method, rows(64), ("third",))
    found = inspect_execution(OnnxRuntime(), source, variant, TARGET, ("third",)).coverage
    assert found is not None
    assert found.int8 == ("first", "second")
    assert [(one.name, one.op_type, one.reason) for one in found.floats] == [("third", "Gemm", "excluded")]
    assert found.unheeded == ()


def test_convolutions_are_covered(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    write_convolution(source)
    found = inspect_execution(OnnxRuntime(), source, quantized(source, "static", images(32)), TARGET).coverage
    assert found is not None
    assert found.int8 == ("first", "second")


def test_an_excluded_node_that_the_runtime_quantizes_itself_is_told(tmp_path: Path) -> None:
    """ONNX Runtime quantizes the weights of a Gemm between two QuantizeLinear pairs on its own."""
    source = tmp_path / "model.onnx"
    write_perceptron(source)
    found = inspect_execution(
        OnnxRuntime(), source, quantized(source, "static", rows(64), ("second",)), TARGET, ["second"]
    ).coverage
    assert found is not None
    assert found.unheeded == ("second",)


def test_without_optimization_no_pair_is_fused(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    write_perceptron(source)
    plain = Target(name="plain", session=SessionSettings(graph_level="disabled"))
    found = inspect_execution(OnnxRuntime(), source, quantized(source, "static", rows(64)), plain).coverage
    assert found is not None
    assert found.int8 == ()
    assert all("not fused" in one.reason for one in found.floats)
    assert [one.name for one in found.floats] == ["first", "second", "third"]


def graph_of(nodes: list[Any], path: Path, zero: Any) -> Path:
    stored = {"w": np.ones((4, 4), dtype=np.float32), "s": np.float32(0.1), "z": zero, "k": np.ones((4, 4, 1, 1), "f4")}
    graph = helper.make_graph(
        nodes,
        "rewritten",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path.write_bytes(model.SerializeToString())
    return path


PAIR = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
]
BACK = [
    helper.make_node("QuantizeLinear", ["o", "s", "z"], ["p"]),
    helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"]),
]


@pytest.mark.parametrize(
    ("nodes", "zero", "reason"),
    [
        (
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            np.uint8(0),
            "not quantized: it comes in float from the model",
        ),
        (
            [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Gemm", ["r", "w"], ["y"])],
            np.uint8(0),
            "from Relu",
        ),
        ([helper.make_node("MatMul", ["x", "x"], ["y"])], np.uint8(0), "no constant weight"),
        ([*PAIR, helper.make_node("MatMul", ["d", "w"], ["y"])], np.uint8(0), "the model output follows instead"),
        ([*PAIR, helper.make_node("MatMul", ["d", "w"], ["o"]), *BACK], np.uint8(0), "though input and output"),
        ([*PAIR, helper.make_node("MatMul", ["d", "w"], ["y"])], np.int8(0), "activations are int8"),
        ([*PAIR, helper.make_node("MatMul", ["d", "x"], ["y"])], np.uint8(0), "no constant weight"),
        ([helper.make_node("ConvTranspose", ["x", "k"], ["y"])], np.uint8(0), "no int8 kernel"),
    ],
)
def test_each_reason_is_told(nodes: list[Any], zero: Any, reason: str, tmp_path: Path) -> None:
    path = graph_of(nodes, tmp_path / "rewritten.onnx", zero)
    (found,) = measure_int8_coverage(path, path).floats
    assert reason in found.reason
