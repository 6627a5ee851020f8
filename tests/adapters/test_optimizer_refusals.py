"""Recipes that libraries offer and that cannot work are not on offer here: refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.optimizers import low_precision
from onnx_ops.adapters.optimizers.low_precision import Fp16Optimizer, WeightOnlyQuantizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.ports import Optimizer, OptimizeRequest
from onnx_ops.testing.models import rows
from tests.support.graphs import write_graph


def request_for(source: Path, method: str = "dynamic", **section: Any) -> OptimizeRequest:
    return OptimizeRequest(
        section=Quantize(name="v", method=method, **section),
        source=source,
        path=source.with_name(f"v-{source.name}"),
        calibration=rows(32) if method == "static" else None,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activations": "float8e4m3fn"}, "activations: expected one of 'uint8', 'int8', 'uint16'"),
        ({"weights": "float8e4m3fn"}, "weights: expected one of 'int8', 'uint8'"),
        ({"activations": "bfloat16"}, "activations: expected one of"),
        ({"smooth": True}, "unknown key 'smooth'"),
        ({"format": "QOperator"}, "unknown key 'format'"),
    ],
    ids=[
        "fp8 that does not load",
        "fp8 weights",
        "bf16 without kernels",
        "SmoothQuant without its module",
        "QOperator",
    ],
)
def test_what_builds_and_does_not_run_is_refused(file: Path, options: dict[str, Json], said: str) -> None:
    request = request_for(file, method="static", calibrate=Calibrate(), options=options)
    with pytest.raises(UserError, match=said):
        StaticQuantizer().optimize(request)
    assert not request.path.exists()


def write_products(path: Path, kind: str) -> None:
    """One product with a weight of that type, and one of two inputs."""
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype(kind)
    form = {"float32": "float", "float64": "double"}.get(kind, kind)
    nodes = "mixed = MatMul(x, w) scores = MatMul(x, y)"
    write_graph(path, f"({form}[4,4] x, {form}[4,4] y) => ({form} mixed, {form} scores) {{ {nodes} }}", w=weight)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (DynamicQuantizer(), "float16"),
        (DynamicQuantizer(), "float64"),
        (Fp16Optimizer(), "float16"),
        (Fp16Optimizer(), "float64"),
        (WeightOnlyQuantizer(), "float64"),
    ],
)
def test_weights_of_another_precision_are_named(tmp_path: Path, optimizer: Optimizer, kind: str) -> None:
    write_products(tmp_path / "model.onnx", kind)
    request = request_for(tmp_path / "model.onnx")
    with pytest.raises(UserError, match=r"nothing was (quantized|converted)") as caught:
        optimizer.optimize(request)
    assert f"1 MatMul: weights in {kind}, and only float32 is quantized" in caught.value.why
    assert "1 MatMul: no constant weights" in caught.value.why
    assert "in float32" in caught.value.remedy
    assert not request.path.exists()


def test_a_quantized_model_is_not_quantized_again(file: Path) -> None:
    request = request_for(file)
    DynamicQuantizer().optimize(request)
    with pytest.raises(UserError, match="quantized already") as caught:
        DynamicQuantizer().optimize(request_for(request.path))
    assert caught.value.remedy == "Give the float model that it was made from."


def test_a_model_that_no_protobuf_holds_is_not_halved(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "PROTOBUF_LIMIT", 100)
    with pytest.raises(TooLargeError, match="more than 2 GiB") as caught:
        Fp16Optimizer().optimize(request_for(file, "fp16"))
    assert caught.value.remedy
