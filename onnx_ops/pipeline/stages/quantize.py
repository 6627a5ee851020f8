"""Quantize: derive a variant, and measure its quantization error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.pipeline import Quantize, Stage
from onnx_ops.domain.quantization import SEARCH_FILE, Arithmetic, SearchRecord, Trial
from onnx_ops.measure.files import MODEL, checkout_files, get_dataset, put_document, put_folder
from onnx_ops.measure.quantization import ACTIVATION_ROWS, AS_WRITTEN, measure_activations, measure_weights
from onnx_ops.measure.search import describe_recipe
from onnx_ops.onnx_graph.compatibility import copy_libraries
from onnx_ops.onnx_graph.model_info import read_model_info, write_lineage
from onnx_ops.pipeline.stage_settings import read_environment, read_operators
from onnx_ops.ports import Dataset, OptimizeRequest, Ports, Tensors
from onnx_ops.scratch import Scratch


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Derive a variant, or take the one that the search found."""
    del key
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    dataset = (
        get_dataset(ports.store, inputs[f"data/{section.calibrate.data}"], inputs["export"])
        if section.calibrate
        else None
    )
    with Scratch() as folder:
        source = checkout_files(ports.store, inputs["export"], MODEL, folder / "source") / MODEL_FILE
        made = _take_found(settings, inputs, ports, folder) if "search" in settings else None
        made = made or _derive(section, stage, dataset, source, folder, ports)
        write_lineage(made.path, {"onnx-ops.variant": stage.variant or section.name})
        copy_libraries(made.path, read_operators(stage))
        files = put_folder(ports.store, made.path.parent, MODEL)
        runtime = ports.runtime(AS_WRITTEN.runtime)
        unseen = _select_unseen(dataset, section.calibrate.samples) if dataset and section.calibrate else None
        activations = measure_activations(runtime, source, made.path, unseen) if unseen else ()
        searched = {SEARCH_FILE: inputs[settings["search"]][SEARCH_FILE]} if "search" in settings else {}
        return Manifest(
            files={
                **files,
                **searched,
                "info.json": put_document(ports.store, read_model_info(made.path)),
                "weights.json": put_document(ports.store, measure_weights(source, made.path, runtime, unseen)),
                "activations.json": put_document(ports.store, activations),
                "excluded.json": put_document(ports.store, made.excluded),
                "recipe.json": put_document(ports.store, made.recipe),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """A variant, the nodes that stay in float, and how it was made."""

    path: Path
    excluded: tuple[str, ...]
    recipe: tuple[str, ...]


def _derive(
    section: Quantize,
    stage: Stage,
    dataset: Dataset | None,
    source: Path,
    folder: Path,
    ports: Ports,
) -> _Variant:
    derived = folder / "onnx"
    derived.mkdir()
    settings: Mapping[str, Any] = stage.settings
    machines = tuple(codec.from_json(machine, Arithmetic) for machine in settings["machines"])
    calibration = dataset.head(section.calibrate.samples).inputs if dataset and section.calibrate else None
    request = OptimizeRequest(
        section=section, source=source, path=derived / MODEL_FILE, calibration=calibration, machines=machines
    )
    recipe = ports.optimizer(section.method, read_environment(stage)).optimize(request)
    return _Variant(path=request.path, excluded=section.exclude, recipe=recipe)


def _take_found(settings: Mapping[str, Any], inputs: Mapping[str, Manifest], ports: Ports, folder: Path) -> _Variant:
    """Return the variant that the search found for the role."""
    manifest, role = inputs[settings["search"]], settings["role"]
    trial = codec.loads(ports.store.read(manifest[f"{role}/trial.json"]), Trial)
    record = codec.loads(ports.store.read(manifest[SEARCH_FILE]), SearchRecord)
    path = checkout_files(ports.store, manifest, f"{role}/{MODEL}", folder / "found") / MODEL_FILE
    return _Variant(path=path, excluded=trial.excluded, recipe=tuple(describe_recipe(record, trial)))


def _select_unseen(dataset: Dataset, calibrated: int) -> Tensors:
    """Return rows of the calibration set, first those that no range was computed from; never scored rows."""
    count = len(dataset)
    order = [*range(min(calibrated, count), count), *range(min(calibrated, count))]
    return {name: array[order[:ACTIVATION_ROWS]] for name, array in dataset.inputs.items()}
