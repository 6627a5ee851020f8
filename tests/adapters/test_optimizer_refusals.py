"""Recipes that libraries offer and that cannot work are not on offer here: refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnx_ops.adapters.optimizers.onnxruntime import StaticQuantizer
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import UserError
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activations": "float8e4m3fn"}, "activations must be one of uint8, int8, uint16"),
        ({"weights": "float8e4m3fn"}, "weights must be one of int8, uint8"),
        ({"activations": "bfloat16"}, "activations must be one of"),
        ({"smooth": True}, "no option is called 'smooth'"),
        ({"format": "QOperator"}, "no option is called 'format'"),
    ],
    ids=[
        "fp8 that does not load",
        "fp8 weights",
        "bf16 without kernels",
        "SmoothQuant without its module",
        "QOperator",
    ],
)
def test_what_builds_and_does_not_run_is_refused(tmp_path: Path, options: dict[str, Json], said: str) -> None:
    write_perceptron(tmp_path / "model.onnx")
    request = OptimizeRequest(
        section=Quantize(name="v", method="static", calibrate=Calibrate(), options=options),
        source=tmp_path / "model.onnx",
        path=tmp_path / "v.onnx",
        calibration=rows(32),
    )
    with pytest.raises(UserError, match=said):
        StaticQuantizer().optimize(request)
    assert not request.path.exists()
