"""Quantization and calibration stages.

A quantization stage derives a variant, and measures its quantization error. A calibration stage
computes ranges from a part of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.quantization import AUTO, SEARCH_FILE, SearchRecord, Trial
from onnx_ops.domain.target import AS_WRITTEN
from onnx_ops.measure.files import (
    MODEL,
    RANGES,
    checkout_files,
    get_dataset,
    put_document,
    put_folder,
)
from onnx_ops.measure.quantization import ACTIVATION_ROWS, measure_activations, measure_weights
from onnx_ops.measure.row_layout import arrange_runtime, get_layout
from onnx_ops.measure.variants.answer_distance import describe_far_answers
from onnx_ops.measure.variants.search import describe_recipe
from onnx_ops.onnx_graph.compatibility import copy_libraries
from onnx_ops.onnx_graph.model_info import read_model_info, write_lineage
from onnx_ops.pipeline.stage_settings import read_environment, read_operators
from onnx_ops.pipeline.stages.export import require_loadable
from onnx_ops.ports import Context, Dataset, OptimizeRequest, Tensors
from onnx_ops.scratch import Scratch


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Derive a variant, copy one from a search, or compute the ranges of a shard."""
    if stage.kind is StageKind.CALIBRATE:
        return _calibrate(stage, inputs, context)
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    calibrate = section.calibrate
    searched: dict[str, Digest] = {}
    with Scratch() as folder:
        request, dataset = _build_request(stage, inputs, context, folder)
        source = request.source
        if "search" in settings:  # A search has already created this variant.
            manifest, role = inputs[settings["search"]], settings["role"]
            trial = codec.loads(context.store.read(manifest[f"{role}/trial.json"]), Trial)
            record = codec.loads(context.store.read(manifest[SEARCH_FILE]), SearchRecord)
            path = (
                checkout_files(context.store, manifest, f"{role}/{MODEL}", folder / "found")
                / MODEL_FILE
            )
            excluded, recipe = trial.excluded, tuple(describe_recipe(record, trial))
            searched = {SEARCH_FILE: manifest[SEARCH_FILE]}
        else:
            path, excluded = request.path, section.exclude
            path.parent.mkdir()
            recipe = context.optimizer(section.method, read_environment(stage)).optimize(request)
        write_lineage(path, {"onnx-ops.variant": stage.variant or section.name})
        copy_libraries(path, read_operators(stage))
        if _runs_on_cpu(settings):
            remedy = _suggest_method(section.method)
            require_loadable(path, stage, context, written="quantized", remedy=remedy)
        files = put_folder(context.store, path.parent, MODEL)
        layout = get_layout(context.store, inputs["export"], dataset.values if dataset else None)
        runtime = arrange_runtime(context.runtime(AS_WRITTEN.runtime), layout)
        unseen = _select_unseen(dataset, calibrate.samples) if dataset and calibrate else None
        activations = measure_activations(runtime, source, path, unseen) if unseen else ()
        if (
            unseen
            and _runs_on_cpu(settings)
            and (far := describe_far_answers(runtime, source, path, unseen))
        ):
            recipe = (*recipe, far)
        return Manifest(
            files={
                **files,
                **searched,
                "info.json": put_document(context.store, read_model_info(path)),
                "weights.json": put_document(
                    context.store, measure_weights(source, path, runtime, unseen)
                ),
                "activations.json": put_document(context.store, activations),
                "excluded.json": put_document(context.store, excluded),
                "recipe.json": put_document(context.store, recipe),
            }
        )


_WITHOUT_EXCLUDE = (AUTO, "graph", "onnxslim", "onnxoptimizer", "fixed-shapes")
"""Methods that refuse `exclude`, or whose result does not depend on it."""


def _suggest_method(method: str) -> str:
    """Return the remedy for a variant that the runtime cannot load."""
    if method in _WITHOUT_EXCLUDE:
        return "Use another method."
    return "Exclude the layer that the reason names (`exclude: [NAME]`), or use another method."


def _runs_on_cpu(settings: Mapping[str, Any]) -> bool:
    """Return whether a target of the variant can be a CPU.

    The result is True for a variant of a search, whose stage does not list machines. A model that
    only accelerators can load is loaded later, when it is measured.
    """
    machines = settings.get("machines", ())
    return not machines or any(machine["family"] != "accelerator" for machine in machines)


def _calibrate(stage: Stage, inputs: Mapping[str, Manifest], context: Context) -> Manifest:
    """Store the ranges of one shard of the batches; an empty shard has no ranges."""
    settings: Mapping[str, Any] = stage.settings
    with Scratch() as folder:
        request, _ = _build_request(stage, inputs, context, folder)
        path = folder / "ranges"
        optimizer = context.optimizer(request.section.method, read_environment(stage))
        optimizer.read_ranges(request, path, (settings["shard"] - 1, settings["shards"]))
        return Manifest(files={RANGES: context.store.put_file(path)} if path.exists() else {})


def _build_request(
    stage: Stage, inputs: Mapping[str, Manifest], context: Context, folder: Path
) -> tuple[OptimizeRequest, Dataset | None]:
    """Return the request for the optimizer, and the whole calibration set.

    The source model of the request is written to `folder`.
    """
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    calibrate, dataset = section.calibrate, None
    if calibrate:
        dataset = get_dataset(context.store, inputs[f"data/{calibrate.data}"], inputs["export"])
    ranges = [manifest[RANGES] for name, manifest in sorted(inputs.items()) if RANGES in manifest]
    request = OptimizeRequest(
        section=section,
        source=checkout_files(context.store, inputs["export"], MODEL, folder / "source")
        / MODEL_FILE,
        path=folder / "onnx" / MODEL_FILE,
        calibration=dataset.head(calibrate.samples).inputs if dataset and calibrate else None,
        machines=tuple(
            codec.from_json(machine, Arithmetic) for machine in settings.get("machines", ())
        ),
        ranges=tuple(context.store.path(digest) for digest in ranges),
        values=dataset.values if dataset else {},
    )
    return request, dataset


def _select_unseen(dataset: Dataset, calibrated: int) -> Tensors:
    """Return rows of the calibration set for measuring the quantization error.

    Rows that were not used for calibration come first.
    """
    count = len(dataset)
    order = [*range(min(calibrated, count), count), *range(min(calibrated, count))]
    return {name: array[order[:ACTIVATION_ROWS]] for name, array in dataset.inputs.items()}
