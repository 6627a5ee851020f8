"""Quantize: a variant derived from the export, how it was made, and the error of each weight and activation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.analysis.parity import weight_error
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.evidence import WeightMeasurement
from onnx_ops.domain.pipeline import Quantize, Stage
from onnx_ops.domain.recipes import Arithmetic
from onnx_ops.graph.inspect import info
from onnx_ops.graph.metadata import write_lineage
from onnx_ops.graph.weights import kept_weights, quantized_weights
from onnx_ops.ports import Dataset, OptimizeRequest, Ports, Tensors
from onnx_ops.stages.activations import AS_WRITTEN, ROWS, measure_activations
from onnx_ops.stages.files import MODEL, checkout, get_dataset, put_document, put_folder, scratch


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    machines = tuple(codec.from_json(one, Arithmetic, where=stage.id) for one in settings["machines"])
    calibration = unseen = None
    if section.calibrate is not None:
        dataset = get_dataset(ports.store, inputs[f"data/{section.calibrate.data}"])
        calibration = dataset.head(section.calibrate.samples).inputs
        unseen = _unseen(dataset, section.calibrate.samples)
    with scratch() as folder:
        source = checkout(ports.store, inputs["export"], MODEL, folder / "source") / MODEL_FILE
        derived = folder / "onnx"
        derived.mkdir()
        path = derived / MODEL_FILE
        recipe = ports.optimizer(section.method).optimize(
            OptimizeRequest(section=section, source=source, path=path, calibration=calibration, machines=machines)
        )
        write_lineage(path, {"onnx-ops.variant": section.name})
        files = put_folder(ports.store, derived, MODEL)
        runtime = ports.runtime(AS_WRITTEN.runtime)
        activations = measure_activations(runtime, source, path, unseen) if unseen else ()
        return Manifest(
            files={
                **files,
                "info.json": put_document(ports.store, info(path)),
                "weights.json": put_document(ports.store, measure_weights(source, path)),
                "activations.json": put_document(ports.store, activations),
                "excluded.json": put_document(ports.store, section.exclude),
                "recipe.json": put_document(ports.store, recipe),
            }
        )


def _unseen(dataset: Dataset, calibrated: int) -> Tensors:
    """Rows of the calibration set that no range was read off, before those that were: never rows that are scored."""
    count = len(dataset)
    order = [*range(min(calibrated, count), count), *range(min(calibrated, count))]
    return {name: array[order[:ROWS]] for name, array in dataset.inputs.items()}


def measure_weights(source: Path, derived: Path) -> tuple[WeightMeasurement, ...]:
    """Distance of every constant of a quantized variant from its original.

    Raises:
        MeasurementFailure: a quantized weight cannot be compared.
    """
    return tuple(
        WeightMeasurement(
            tensor=pair.name,
            steps=weight_error(pair.original, pair.dequantized, pair.scale),
            elements=int(pair.original.size),
        )
        for pair in (*quantized_weights(source, derived), *kept_weights(source, derived))
    )
