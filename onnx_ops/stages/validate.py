"""Validate: is the export the same function?"""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.evidence import ParityMeasurement
from onnx_ops.domain.pipeline import Stage
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure, UserError
from onnx_ops.graph.check import full_check
from onnx_ops.ports import Ports
from onnx_ops.stages.export import MODEL_FILE
from onnx_ops.stages.files import MODEL, checkout, put_document, scratch
from onnx_ops.stages.parity import measure_parity
from onnx_ops.stages.reference import get_reference

REFERENCE_TARGET = Target(name="reference", description="One CPU thread, where every export is first compared.")


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key
    export = inputs["export"]
    with scratch() as folder:
        path = checkout(ports.store, export, MODEL, folder) / MODEL_FILE
        try:
            full_check(path)
            measured = measure_parity(
                ports.runtime(REFERENCE_TARGET.runtime),
                path,
                REFERENCE_TARGET,
                get_reference(ports.store, export["reference.npz"]),
            )
        except (MeasurementFailure, UserError) as error:
            measured = (_unrunnable(str(error)),)
    del stage
    return Manifest(files={"parity.json": put_document(ports.store, measured)})


def _unrunnable(reason: str) -> ParityMeasurement:
    """An export that the reference runtime refuses is the export's fault: the target's ceiling was checked before."""
    return ParityMeasurement(
        output="*", group="load", rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=f"it does not run: {reason}"
    )
