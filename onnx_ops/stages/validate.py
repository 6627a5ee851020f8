"""Validate: is the export the same function?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.evidence import Divergence, ParityMeasurement
from onnx_ops.domain.pipeline import Export, Stage
from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementFailure, UserError
from onnx_ops.graph.check import full_check
from onnx_ops.ports import ExportRequest, Ports, Tensors, Tracer, TracingExporter
from onnx_ops.stages.divergence import Look, locate, worst_of
from onnx_ops.stages.export import MODEL_FILE
from onnx_ops.stages.files import MODEL, TRAINED, checkout, put_document, scratch
from onnx_ops.stages.parity import measure_parity
from onnx_ops.stages.reference import get_reference
from onnx_ops.stages.usercode import importable

REFERENCE_TARGET = Target(name="reference", description="One CPU thread, where every export is first compared.")


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key
    export = inputs["export"]
    divergence: tuple[Divergence, ...] = ()
    with scratch() as folder:
        path = checkout(ports.store, export, MODEL, folder) / MODEL_FILE
        try:
            full_check(path)
            runtime = ports.runtime(REFERENCE_TARGET.runtime)
            reference = get_reference(ports.store, export["reference.npz"])
            measured = measure_parity(runtime, path, REFERENCE_TARGET, reference)
        except (MeasurementFailure, UserError) as error:
            measured = (_unrunnable(str(error)),)
        else:
            if worst := worst_of(measured):
                look = Look(runtime=runtime, target=REFERENCE_TARGET, model=path, reference=reference, worst=worst)
                divergence = (locate(look, _Inside(stage, inputs["train"], ports, folder / "trained")),)
    return Manifest(
        files={
            "parity.json": put_document(ports.store, measured),
            "divergence.json": put_document(ports.store, divergence),
        }
    )


@dataclass(frozen=True, slots=True)
class _Inside:
    """Looks inside the source, which is loaded only now: an export that is sound has no use for it."""

    stage: Stage
    trained: Manifest
    ports: Ports
    folder: Path

    def __call__(self, samples: Tensors) -> Tracer | None:
        settings: Mapping[str, Any] = self.stage.settings
        section = codec.from_json(settings["export"], Export, where=self.stage.id)
        exporter = self.ports.exporter(section.framework)
        if not isinstance(exporter, TracingExporter):
            return None
        with importable(self.ports.root):
            model = exporter.load(checkout(self.ports.store, self.trained, TRAINED, self.folder))
            request = ExportRequest(section=section, samples=samples, path=self.folder / MODEL_FILE)
            return exporter.tracer(model, request)


def _unrunnable(reason: str) -> ParityMeasurement:
    """An export that the reference runtime refuses is the export's fault: the target's ceiling was checked before."""
    return ParityMeasurement(
        output="*", group="load", rows=0, error=0.0, noise=0.0, ratio=0.0, mismatch=f"it does not run: {reason}"
    )
