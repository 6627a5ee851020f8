"""The validate stage: its stored findings about an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from onnx_ops import codec
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.measure.parity import REFERENCE_TARGET, measure_parity
from onnx_ops.measure.reference_outputs import ReferenceGroup, put_reference
from onnx_ops.pipeline.stages.validate import execute
from onnx_ops.statistics.probes import REAL
from onnx_ops.testing.fakes import FakeWorld
from tests.support.graphs import write_graph


def test_validate_of_unloadable_export_records_mismatch(tmp_path: Path) -> None:
    context = replace(FakeWorld().context(root=tmp_path), runtime=lambda *_: OnnxRuntime())
    export = Manifest(
        files={
            "onnx/model.onnx": context.store.put_bytes(b"no model"),
            "reference.npz": put_reference(context.store, []),
        }
    )
    stage = Stage(id="validate", kind=StageKind.VALIDATE, settings={})
    result = execute(
        stage, digest_bytes(b"key"), {"export": export, "train": Manifest(files={})}, context
    )
    (measured,) = codec.loads(
        context.store.read(result["parity.json"]), tuple[ParityMeasurement, ...]
    )
    assert measured.mismatch


def test_measure_parity_of_nan_outputs_records_nan_mismatch_and_of_finite_outputs_none(
    tmp_path: Path,
) -> None:
    path = write_graph(
        tmp_path / "m.onnx", "(float[batch,2] x) => (float[batch,2] y) { y = Log(x) }"
    )
    for value, mismatches in ((-1, 1), (1, 0)):
        rows = np.full((3, 2), value, np.float32)
        with np.errstate(invalid="ignore"):
            group = ReferenceGroup(
                name=REAL, inputs={"x": rows}, single={"y": np.log(rows)}, double=None
            )
        found = measure_parity(OnnxRuntime(), path, REFERENCE_TARGET, [group])
        assert len([one for one in found if "NaN" in one.mismatch]) == mismatches
