"""Which inputs an export is held against, and what a target says to a file that is too new for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.reference_outputs import build_probes as probes_of
from onnx_ops.pipeline.stages.benchmark import BenchmarkContext, _check_compatibility
from onnx_ops.ports import Dataset
from onnx_ops.testing.models import rows, write_perceptron

TARGET = Target(name="cpu", max_opset=17, max_ir_version=9)


def write_recurrent(path: Path) -> None:
    """An LSTM over `x` (time, batch, 4)."""
    weights = {"w": [1, 12, 4], "r": [1, 12, 3]}
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=3)],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", 1, "batch", 3])],
        [helper.make_tensor(n, TensorProto.FLOAT, s, np.ones(int(np.prod(s)))) for n, s in weights.items()],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path.write_bytes(model.SerializeToString())


def test_a_free_batch_is_asked_at_every_size(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path)
    probes = probes_of(path, rows(40))
    assert {"real", "range", "missing", "infinite", "empty_batch", "batches:257"} <= set(probes)
    assert len(probes["real"].inputs["x"]) == 40
    inside = {name for name, probe in probes.items() if probe.inside}
    assert {"real", "range", "batches:257"} <= inside
    assert inside.isdisjoint({"missing", "infinite", "empty_batch"})


def test_a_fixed_batch_is_asked_at_its_own_size_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, batch=2)
    probes = probes_of(path, rows(40))
    assert not [name for name in probes if "batch" in name]
    feeds = tuple(probe.inputs for probe in probes.values())
    assert {tensors["x"].shape for tensors in feeds} == {(2, 8)}
    assert len(OnnxRuntime().run(path, Target(name="cpu"), feeds)) == len(probes)


def test_a_fixed_batch_larger_than_the_data_repeats_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, batch=5)
    real = probes_of(path, rows(3))["real"].inputs["x"]
    np.testing.assert_array_equal(real, rows(3)["x"][[0, 1, 2, 0, 1]])


def test_a_recurrent_model_is_not_asked_without_rows(tmp_path: Path) -> None:
    """ONNX Runtime would abort the process."""
    path = tmp_path / "model.onnx"
    write_recurrent(path)
    probes = probes_of(path, {"x": np.ones((6, 2, 4), dtype=np.float32)})
    assert "empty_batch" not in probes
    assert "batches:1" in probes


@pytest.mark.parametrize(
    ("opset", "ir_version", "message"),
    [
        (18, 9, r"accepts opset <= 17, .* this model has opset 18, IR version 9: set export.opset: 17"),
        (17, 10, r"IR version <= 9; this model has opset 17, IR version 10: set export.ir_version: 9"),
    ],
)
def test_a_file_too_new_for_a_target_is_told_with_the_remedy(
    opset: int, ir_version: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, opset=opset, ir_version=ir_version)
    bench = BenchmarkContext(
        runtime=OnnxRuntime(),
        target=TARGET,
        candidate=path,
        export=path,
        champion=None,
        dataset=Dataset(inputs=rows(4)),
        seed=0,
    )
    with pytest.raises(UserError, match=message) as caught:
        _check_compatibility(bench, "benchmark/fp32@cpu")
    assert "leave cpu out" in caught.value.remedy


def test_a_file_within_the_ceiling_passes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_perceptron(path, opset=17, ir_version=9)
    bench = BenchmarkContext(
        runtime=OnnxRuntime(),
        target=TARGET,
        candidate=path,
        export=path,
        champion=None,
        dataset=Dataset(inputs=rows(4)),
        seed=0,
    )
    _check_compatibility(bench, "benchmark/fp32@cpu")
