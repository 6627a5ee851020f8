"""A file that the runtime cannot load fails the stage that wrote it.

The error names the node or the input that causes it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.adapters.runtimes.placement import guard_runtime
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.files import MODEL, put_document, put_folder
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.pipeline.planning import plan
from onnx_ops.pipeline.stages import quantize
from onnx_ops.pipeline.stages.export import require_loadable
from onnx_ops.ports import Context, OptimizeRequest
from onnx_ops.testing.fakes import FakeWorld
from onnx_ops.testing.models import write_perceptron
from tests.pipeline.plan_parts import PIPELINE, TARGETS, TableProbe


def open_context(root: Path) -> Context:
    return replace(FakeWorld().context(root=root), runtime=lambda _: guard_runtime(OnnxRuntime()))


@pytest.fixture
def stage() -> Stage:
    return next(
        stage for stage in plan(PIPELINE, TARGETS, TableProbe()).stages if stage.id == "export"
    )


def test_require_loadable_with_valid_file_passes(tmp_path: Path, stage: Stage) -> None:
    write_perceptron(tmp_path / "model.onnx")
    require_loadable(tmp_path / "model.onnx", stage, open_context(tmp_path))


@pytest.mark.parametrize("fault", ["unknown input", "types", "no kernel"])
def test_require_loadable_with_invalid_file_names_node_or_input(
    tmp_path: Path, stage: Stage, fault: str
) -> None:
    kind = TensorProto.BFLOAT16 if fault == "no kernel" else TensorProto.FLOAT
    operator = "Det" if fault == "no kernel" else "Sub"
    given = {
        "unknown input": ["x", "Tenure__months_"],
        "types": ["x", "whole"],
        "no kernel": ["x"],
    }[fault]
    whole = helper.make_tensor("whole", TensorProto.INT64, [1], np.array([1], np.int64))
    graph = helper.make_graph(
        [helper.make_node(operator, given, ["y"], name="column_3")],
        "g",
        [helper.make_tensor_value_info("x", kind, [2, 2])],
        [helper.make_tensor_value_info("y", kind, None)],
        [whole],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(MeasurementError, match="cannot load the exported file") as caught:
        require_loadable(tmp_path / "model.onnx", stage, open_context(tmp_path))
    assert "column_3" in caught.value.why or "Tenure__months_" in caught.value.why
    assert caught.value.where == "export"


class BrokenOptimizer:
    """An optimizer that writes a variant with a node whose input does not exist."""

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        model = onnx.load(request.source)
        model.graph.node[0].input[0] = "lost"
        onnx.save(model, str(request.path))
        return ()


def quantize_with_a_lost_input(tmp_path: Path, family: str, method: str = "static") -> Manifest:
    """Run the stage of a variant for one kind of machine.

    Its optimizer writes a file that does not load.
    """
    context = replace(open_context(tmp_path), optimizer=lambda *_: cast("Any", BrokenOptimizer()))
    (tmp_path / "onnx").mkdir()
    write_perceptron(tmp_path / "onnx" / "model.onnx")
    export = Manifest(
        files={
            **put_folder(context.store, tmp_path / "onnx", MODEL),
            "info.json": put_document(
                context.store, read_model_info(tmp_path / "onnx" / "model.onnx")
            ),
        }
    )
    stages = plan(PIPELINE, TARGETS, TableProbe()).stages
    stage = next(stage for stage in stages if stage.id == "quantize/int8-static")
    written = cast("dict[str, Any]", stage.settings["section"])
    settings = {
        **stage.settings,
        "section": {**written, "calibrate": None, "method": method},
        "machines": [{"family": family}],
    }
    return quantize.execute(
        replace(stage, settings=settings), digest_bytes(b"key"), {"export": export}, context
    )


def test_quantize_with_unloadable_variant_names_input_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot load the quantized file") as caught:
        quantize_with_a_lost_input(tmp_path, "x86")
    assert "lost" in caught.value.why
    assert "exclude: [NAME]" in caught.value.remedy


@pytest.mark.parametrize("method", ["auto", "graph", "onnxslim", "onnxoptimizer", "fixed-shapes"])
def test_quantize_by_method_without_exclusions_suggests_other_method(
    method: str, tmp_path: Path
) -> None:
    with pytest.raises(MeasurementError, match="cannot load the quantized file") as caught:
        quantize_with_a_lost_input(tmp_path, "x86", method)
    assert caught.value.remedy == "Use another method."


def test_quantize_for_accelerator_does_not_load_variant(tmp_path: Path) -> None:
    assert f"{MODEL}model.onnx" in quantize_with_a_lost_input(tmp_path, "accelerator").files
