"""Quantize: a variant derived from the export, with the error of each quantized weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.analysis.parity import weight_error
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.evidence import WeightMeasurement
from onnx_ops.domain.pipeline import Quantize, Stage
from onnx_ops.graph.inspect import info
from onnx_ops.graph.metadata import write_lineage
from onnx_ops.graph.weights import other_weights, quantized_weights
from onnx_ops.ports import OptimizeRequest, Ports
from onnx_ops.stages.export import MODEL_FILE
from onnx_ops.stages.files import MODEL, checkout, get_dataset, put_document, put_folder, scratch


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    calibration = None
    if section.calibrate is not None:
        dataset = get_dataset(ports.store, inputs[f"data/{section.calibrate.data}"])
        calibration = dataset.head(section.calibrate.samples).inputs
    with scratch() as folder:
        source = checkout(ports.store, inputs["export"], MODEL, folder / "source") / MODEL_FILE
        derived = folder / "onnx"
        derived.mkdir()
        path = derived / MODEL_FILE
        ports.optimizer(section.method).optimize(
            OptimizeRequest(section=section, source=source, path=path, calibration=calibration)
        )
        write_lineage(path, {"onnx-ops.variant": section.name})
        return Manifest(
            files={
                **put_folder(ports.store, derived, MODEL),
                "info.json": put_document(ports.store, info(path)),
                "weights.json": put_document(ports.store, measure_weights(source, path)),
            }
        )


def measure_weights(source: Path, derived: Path) -> tuple[WeightMeasurement, ...]:
    """Distance of every constant of a quantized variant from its original, and of activations from what was meant.

    Raises:
        MeasurementFailure: a quantized weight cannot be compared.
    """
    return tuple(
        WeightMeasurement(
            tensor=pair.name,
            steps=weight_error(pair.original, pair.dequantized, pair.scale),
            elements=int(pair.original.size),
        )
        for pair in (*quantized_weights(source, derived), *other_weights(source, derived))
    )
