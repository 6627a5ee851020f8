"""Olive in an isolated environment: the suite, and passes that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onnx_ops import plugins
from onnx_ops.adapters.isolation.environments import PythonEnvironments
from onnx_ops.adapters.isolation.isolated_tools import IsolatedOptimizer
from onnx_ops.adapters.isolation.process import ProcessLimits
from onnx_ops.domain.execution import Environment
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.errors import StageError, UserError
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.ports import Optimizer, OptimizeRequest
from onnx_ops.testing.models import rows, write_perceptron
from onnx_ops.testing.optimizers import OptimizerSuite

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="session")
def olive(environments: PythonEnvironments) -> IsolatedOptimizer:
    here = plugins.load("optimizers", "olive")
    return IsolatedOptimizer(
        here=here,
        place=plugins.find("optimizers", "olive").value,
        python=lambda: environments.python(Environment(requirements=here.requirements)),
        limits=ProcessLimits(timeout=300.0),
    )


def section_of(one: dict[str, Any]) -> Quantize:
    config = {"passes": {"only": one}}
    return Quantize(
        name="narrow", method="olive", calibrate=Calibrate(samples=40), options={"config": config}
    )


class TestOliveDynamic(OptimizerSuite):
    one: ClassVar[dict[str, Any]] = {
        "type": "OnnxDynamicQuantization",
        # Without VNNI, sums of 8-bit products saturate.
        "reduce_range": True,
        "quant_preprocess": False,
    }

    @pytest.fixture
    def optimizer(self, olive: IsolatedOptimizer) -> IsolatedOptimizer:
        return olive

    @pytest.fixture
    def section(self) -> Quantize:
        return section_of(self.one)


class TestOliveStatic(TestOliveDynamic):
    one: ClassVar[dict[str, Any]] = {
        "type": "OnnxStaticQuantization",
        "data_config": "theirs",
        "quant_preprocess": False,
    }

    def test_optimize_without_calibration_raises_user_error_if_it_is_needed(
        self, optimizer: Optimizer, request_: OptimizeRequest
    ) -> None:
        with pytest.raises(UserError, match="calibration rows"):
            optimizer.optimize(replace(request_, calibration=None))


def request_for(folder: Path, one: dict[str, Any]) -> OptimizeRequest:
    write_perceptron(folder / "source.onnx")
    return OptimizeRequest(
        section=section_of(one),
        source=folder / "source.onnx",
        path=folder / "made.onnx",
        calibration=rows(37),
    )


def test_olive_float_pass_quantizes_no_weight(olive: IsolatedOptimizer, tmp_path: Path) -> None:
    request = request_for(tmp_path, {"type": "OnnxPeepholeOptimizer"})
    olive.optimize(request)
    assert read_quantized_weights(request.source, request.path) == ()


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        ({"type": "Nonsense"}, "'nonsense' not found"),
        ({"type": "OnnxDynamicQuantization", "precision": "int3"}, "precision"),
        # For a bias that is one row of a matrix, the quantizer of ONNX Runtime 1.31 takes the truth
        # value of an array, which fails.
        (
            {"type": "OnnxStaticQuantization", "data_config": "x", "per_channel": True},
            "The truth value of an array",
        ),
        (
            {"type": "DynamicToFixedShape", "dim_param": ["batch"], "dim_value": [5]},
            "changed the model's inputs",
        ),
    ],
)
def test_olive_pass_that_fails_or_changes_interface_raises_stage_error(
    olive: IsolatedOptimizer, tmp_path: Path, one: dict[str, Any], expected: str
) -> None:
    with pytest.raises(StageError, match=expected):
        olive.optimize(request_for(tmp_path, one))


def test_olive_that_quantizes_excluded_node_raises_user_error(
    olive: IsolatedOptimizer, tmp_path: Path
) -> None:
    # Olive's preparation fuses the product and the sum, so the excluded node disappears.
    request = request_for(tmp_path, {"type": "OnnxDynamicQuantization"})
    with pytest.raises(UserError, match="excluding first had no effect"):
        olive.optimize(replace(request, section=replace(request.section, exclude=("first",))))
