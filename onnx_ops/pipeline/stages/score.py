"""Score stage: compute one variant's answers to a part of the rows.

The stage stores the values that the metrics read from the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.target import HardwareFingerprint, Target
from onnx_ops.errors import UserError, from_document
from onnx_ops.measure.execution import require_hardware
from onnx_ops.measure.files import (
    HARDWARE,
    MODEL,
    checkout_files,
    get_dataset,
    load_arrays,
    pack_arrays,
    put_document,
)
from onnx_ops.measure.predictions import Prediction
from onnx_ops.measure.row_layout import arrange_runtime, get_layout
from onnx_ops.measure.scoring import (
    ModelPredictions,
    ScoringRequest,
    add_default_metric,
    join_parts,
    read_predictions,
    select_measurable,
)
from onnx_ops.measure.user_functions import importable, load_functions
from onnx_ops.onnx_graph.compatibility import explain_incompatibility
from onnx_ops.pipeline.stage_settings import stage_id
from onnx_ops.ports import Context, Store
from onnx_ops.scratch import Scratch
from onnx_ops.statistics.scores import CANDIDATE

_PREDICTIONS, _ARRAYS = "predictions.json", "predictions.npz"


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Store the values that the metrics read from the answers to one shard of batches."""
    settings: Mapping[str, Any] = stage.settings
    target = codec.from_json(stage.hints["target"], Target, where=stage.id)
    data = get_dataset(context.store, inputs[f"data/{settings['data']}"], inputs["export"]).head(
        settings["limit"]
    )
    layout = get_layout(context.store, inputs["export"], data.values)
    runtime = arrange_runtime(context.runtime(target.runtime), layout)
    hardware = require_hardware(runtime, target)
    definitions = tuple(
        codec.from_json(metric, MetricDefinition) for metric in settings["definitions"]
    )
    definitions, _ = add_default_metric(definitions, data)
    decoders = [definition.decode for definition in definitions if definition.decode]
    with Scratch() as folder, importable(context.root):
        model = (
            checkout_files(context.store, inputs[settings["source"]], MODEL, folder) / MODEL_FILE
        )
        check_compatibility(model, target, stage.id)
        request = ScoringRequest(
            runtime=runtime,
            target=target,
            models={CANDIDATE: model},
            dataset=data,
            seed=0,
            functions=load_functions(decoders, "gates"),
        )
        shard = (settings["shard"] - 1, settings["shards"])
        predictions = read_predictions(
            request, CANDIDATE, select_measurable(definitions, data), shard
        )
    return Manifest(
        files={**_put(context.store, predictions), HARDWARE: put_document(context.store, hardware)}
    )


def read_shards(
    store: Store, inputs: Mapping[str, Manifest], variant: str, target: str, count: int
) -> tuple[ModelPredictions, set[HardwareFingerprint]]:
    """Return a variant's predictions for all rows, and the machines that made them.

    The predictions of all shards are joined.
    """
    parts = [
        inputs[stage_id(StageKind.SCORE, variant, target, number)] for number in range(1, count + 1)
    ]
    machines = {codec.loads(store.read(part[HARDWARE]), HardwareFingerprint) for part in parts}
    return join_parts([read for part in parts if (read := _get(store, part))]), machines


def check_compatibility(model: Path, target: Target, where: str) -> None:
    """Raise UserError if the target does not support the file.

    The reason is its opset, its IR version, its operators or their blocks of weights. The error of
    the runtime itself is unclear or missing.
    """
    if reason := explain_incompatibility(model, target):
        remedy = (
            "Export with an opset and an IR version that all targets accept, or add custom_ops to "
            "the target. Otherwise quantize with a block size that the target runs, or leave out "
            f"target {target.name}."
        )
        raise UserError(reason, where=where, remedy=remedy)


def _put(store: Store, predictions: ModelPredictions) -> dict[str, Digest]:
    """Store predictions.

    Arrays are stored by the label of their metric, and errors as JSON documents.
    """
    entries: dict[str, Mapping[str, object]] = {}
    arrays = {}
    for label, prediction in predictions.items():
        if isinstance(prediction, Prediction):
            arrays[label] = prediction.values
            entries[label] = {
                "columns": prediction.columns,
                "broken": prediction.broken,
                "outputs": list(prediction.outputs),
            }
        else:
            entries[label] = prediction.as_document()
    document = json.dumps(entries, sort_keys=True).encode("utf-8")
    return {_PREDICTIONS: store.put_bytes(document), _ARRAYS: store.put_bytes(pack_arrays(arrays))}


def _get(store: Store, manifest: Manifest) -> ModelPredictions:
    entries, arrays = (
        json.loads(store.read(manifest[_PREDICTIONS])),
        load_arrays(store, manifest[_ARRAYS]),
    )
    return {
        label: Prediction(values=arrays[label], **entry | {"outputs": tuple(entry["outputs"])})
        if label in arrays
        else from_document(entry)
        for label, entry in entries.items()
    }
