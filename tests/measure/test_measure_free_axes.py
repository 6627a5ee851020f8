"""Axes that a pipeline declares free: their check, and faulty recurrent exports.

Parity must find the faulty exports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_ops import codec
from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Manifest, ModelInfo, TensorSpec, digest_bytes
from onnx_ops.domain.evidence import SourceLimits
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.files import TRAINED, put_dataset, put_folder
from onnx_ops.measure.free_axes import check_free_axes
from onnx_ops.measure.parity import find_worst, measure_parity
from onnx_ops.measure.reference_outputs import (
    ReferenceGroup,
    ReferenceOutputs,
    collect_reference_outputs,
)
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.pipeline.stages import export
from onnx_ops.ports import Dataset, ExportRequest, Tensors
from onnx_ops.testing.fakes import FakeWorld

TARGET = Target(name="cpu")
LENGTH = 8
ROWS: Tensors = {"x": np.zeros((2, 8), np.float32)}
FREE = Export(framework="torch", dynamic={"x": {0: "batch", 1: "length"}})


def make_reference(answered: tuple[str, ...], refused: dict[str, str]) -> ReferenceOutputs:
    groups = [
        ReferenceGroup(name=name, inputs=ROWS, single=ROWS, double=None)
        for name in ("real", *answered)
    ]
    return ReferenceOutputs(groups=groups, limits=SourceLimits(refused=refused))


def make_info(*shape: int | str) -> ModelInfo:
    inputs = (TensorSpec(name="x", dtype="float32", shape=shape),)
    return ModelInfo(
        ir_version=10, opsets={"": 18}, inputs=inputs, outputs=(), nodes=1, size_bytes=1
    )


def test_check_free_axes_of_axis_fixed_in_model_raises_user_error() -> None:
    with pytest.raises(UserError, match=r"axis 1 of x \(length\) fixed at 8"):
        check_free_axes(FREE, make_info("batch", 8), make_reference(("batches:1",), {}))


@pytest.mark.parametrize(
    "answered", [(), ("lengths:length=1,width=1",), ("lengths:lengths=1",), ("batches:1",)]
)
def test_check_free_axes_without_reference_at_other_size_raises_user_error(
    answered: tuple[str, ...],
) -> None:
    refused = {"lengths:length=1": "too short", "lengths:length=16": "too long"}
    with pytest.raises(
        UserError,
        match=r"all other sizes of axis 1 of x \(length\) that were tried.*sizes 1, 16;.*too short",
    ):
        check_free_axes(FREE, make_info("batch", "length"), make_reference(answered, refused))


def test_check_free_axes_with_other_size_answered_or_none_tried_passes() -> None:
    reference = make_reference(("lengths:length=16",), {"lengths:length=1": "too short"})
    check_free_axes(FREE, make_info("batch", "length"), reference)
    check_free_axes(FREE, make_info("batch", "length"), make_reference((), {}))


class RejectingExporter(TorchExporter):
    """An exporter of torch whose source rejects every length but that of the samples."""

    def reference(
        self, model: object, inputs: Tensors, precision: Literal["float32", "float64"]
    ) -> Tensors | None:
        if inputs["x"].shape[1] != LENGTH:
            raise ValueError("the source is made for one length")
        return super().reference(model, inputs, precision)


def test_export_stage_with_free_axis_whose_other_sizes_source_rejects_raises_user_error(
    tmp_path: Path,
) -> None:
    from tests.support.recurrent_modules import Recurrent, sequences

    exporter, module = RejectingExporter(), Recurrent("GRU")
    context = replace(FakeWorld().context(root=tmp_path), exporter=lambda *_: exporter)
    trained = tmp_path / "trained"
    trained.mkdir()
    exporter.save(module, trained)
    inputs = {
        "train": Manifest(files=put_folder(context.store, trained, TRAINED)),
        "data/test": put_dataset(context.store, Dataset(inputs=sequences(module, 8, LENGTH))),
    }
    settings: dict[str, Any] = {
        "section": codec.to_json(FREE),
        "data": "test",
        "limit": 8,
        "inputs": {},
    }
    settings |= {"source_time": 10.0, "pipeline": "p", "ordered": True}
    stage = Stage(id="export", kind=StageKind.EXPORT, settings=settings)
    with pytest.raises(
        UserError,
        match=r"all other sizes of axis 1 of x \(length\) that were tried.*made for one length",
    ):
        export.execute(stage, digest_bytes(b""), inputs, context)


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceOutputs]:
    """Return a bidirectional LSTM with its state as input, and its source's outputs.

    It is exported with a free length.
    """
    from tests.support.recurrent_modules import StatefulLstm, sequences

    module = StatefulLstm("LSTM", bidirectional=True)
    samples = sequences(module, 40, LENGTH)
    dynamic = {name: {0: "batch"} for name in samples} | {"x": {0: "batch", 1: "length"}}
    path = tmp_path_factory.mktemp("lstm") / "model.onnx"
    exporter, section = TorchExporter(), Export(framework="torch", dynamic=dynamic)
    exporter.export(module, ExportRequest(section=section, samples=samples, path=path))
    reference = collect_reference_outputs(exporter, module, path, samples)
    check_free_axes(section, read_model_info(path), reference)
    return path, reference


def is_wrong(path: Path, reference: ReferenceOutputs) -> bool:
    return find_worst(measure_parity(OnnxRuntime(), path, TARGET, reference.groups)) is not None


def forget_state(model: ModelProto, node: NodeProto) -> None:
    node.input[5] = ""


def exchange_states(model: ModelProto, node: NodeProto) -> None:
    node.input[5], node.input[6] = node.input[6], node.input[5]


def exchange_directions(model: ModelProto, node: NodeProto) -> None:
    for initializer in model.graph.initializer:
        if initializer.name in node.input[1:4]:
            swapped = numpy_helper.to_array(initializer)[::-1].copy()
            initializer.CopyFrom(numpy_helper.from_array(swapped, initializer.name))


def cut_length(model: ModelProto, node: NodeProto) -> None:
    """Drop the steps beyond the length of the samples, and return zeros there."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(LENGTH, np.int64), "cut.most"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "cut.place"))
    nodes = [
        helper.make_node("Shape", ["x"], ["cut.batch"], start=0, end=1),
        helper.make_node("Shape", ["x"], ["cut.length"], start=1, end=2),
        helper.make_node("Min", ["cut.length", "cut.most"], ["cut.some"]),
        helper.make_node("Expand", ["cut.some", "cut.batch"], ["cut.wide"]),
        helper.make_node("Cast", ["cut.wide"], ["cut.lengths"], to=onnx.TensorProto.INT32),
    ]
    node.input[4] = "cut.lengths"
    for place, new in enumerate(nodes):
        model.graph.node.insert(place, new)


def reverse_steps(model: ModelProto, node: NodeProto) -> None:
    for name, value in (
        ("starts", -1),
        ("ends", np.iinfo(np.int64).min),
        ("axes", 0),
        ("steps", -1),
    ):
        model.graph.initializer.append(
            numpy_helper.from_array(np.array([value], np.int64), f"turned.{name}")
        )
    inputs = [node.input[0], *(f"turned.{name}" for name in ("starts", "ends", "axes", "steps"))]
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place, helper.make_node("Slice", inputs, ["turned"]))
    node.input[0] = "turned"


def test_measure_parity_of_recurrent_export_passes_at_shorter_and_longer_lengths(
    lstm: tuple[Path, ReferenceOutputs],
) -> None:
    path, reference = lstm
    lengths = {group.inputs["x"].shape[1] for group in reference.groups}
    assert {1, 4, 5, 8, 9, 16} <= lengths
    assert not [name for name in reference.limits.refused if name.startswith("lengths:")]
    assert not is_wrong(path, reference)


@pytest.mark.parametrize(
    "plant", [forget_state, exchange_states, exchange_directions, cut_length, reverse_steps]
)
def test_measure_parity_of_faulty_recurrent_export_fails(
    lstm: tuple[Path, ReferenceOutputs], plant: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    model = onnx.load(lstm[0])
    (node,) = [node for node in model.graph.node if node.op_type == "LSTM"]
    plant(model, node)
    onnx.save(model, tmp_path / "wrong.onnx")
    assert is_wrong(tmp_path / "wrong.onnx", lstm[1])
