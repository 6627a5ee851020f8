"""The validate stage: what it stores about an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.pipeline import Stage, StageKind
from onnx_ops.stages.reference import put_reference
from onnx_ops.stages.validate import execute
from onnx_ops.testing.fakes import FakeWorld


def test_an_export_that_does_not_run_has_a_mismatch(tmp_path: Path) -> None:
    ports = replace(FakeWorld().ports(root=tmp_path), runtime=lambda *_: OnnxRuntime())
    export = Manifest(
        files={"onnx/model.onnx": ports.store.put_bytes(b"no model"), "reference.npz": put_reference(ports.store, [])}
    )
    stage = Stage(id="validate", kind=StageKind.VALIDATE, settings={})
    result = execute(stage, digest_bytes(b"key"), {"export": export, "train": Manifest(files={})}, ports)
    (measured,) = codec.loads(ports.store.read(result["parity.json"]), tuple[ParityMeasurement, ...])
    assert measured.mismatch
