"""Search stage: find variants by trying recipes and exclusions within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.pipeline import Quantize
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.quantization import SEARCH_FILE, Budget
from onnx_ops.domain.target import Target
from onnx_ops.measure.files import MODEL, checkout_files, get_dataset, put_document, put_folder
from onnx_ops.measure.row_layout import arrange_context, get_layout
from onnx_ops.measure.user_functions import importable, load_functions
from onnx_ops.measure.variants.search import search
from onnx_ops.measure.variants.trials import SearchContext
from onnx_ops.ports import Context
from onnx_ops.scratch import Scratch


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Search for variants; store the model of each role, and the record of the search."""
    settings: Mapping[str, Any] = stage.settings
    hints: Mapping[str, Any] = stage.hints
    section = codec.from_json(settings["section"], Quantize, where=stage.id)
    metric = codec.from_json(settings["metric"]["definition"], MetricDefinition, where=stage.id)
    calibration = None
    if section.calibrate is not None:
        calibration = get_dataset(
            context.store, inputs[f"data/{section.calibrate.data}"], inputs["export"]
        )
        calibration = calibration.head(section.calibrate.samples)
    tuning_data = get_dataset(context.store, inputs[f"data/{settings['data']}"], inputs["export"])
    layout = get_layout(context.store, inputs["export"], tuning_data.values)
    with Scratch() as folder, importable(context.root):
        source = (
            checkout_files(context.store, inputs["export"], MODEL, folder / "source") / MODEL_FILE
        )
        search_context = SearchContext(
            project=arrange_context(context, layout),
            section=section,
            source=source,
            folder=folder / "trials",
            targets=tuple(codec.from_json(one, Target, where=stage.id) for one in hints["targets"]),
            machines=tuple(
                codec.from_json(one, Arithmetic, where=stage.id) for one in settings["machines"]
            ),
            tuning_data=tuning_data.head(settings["samples"]),
            calibration=calibration.inputs if calibration else None,
            metric=metric,
            lower=bool(settings["metric"]["lower"]),
            batch=settings["batch"],
            budget=section.budget or Budget(),
            seed=int(key[-8:], 16),
            functions=load_functions(metric.functions, "gates"),
        )
        result = search(search_context, context.journal(key), context.report_progress)
        files = {SEARCH_FILE: put_document(context.store, result.record)}
        for role, (path, trial) in result.models.items():
            files |= put_folder(context.store, path.parent, f"{role}/{MODEL}")
            files[f"{role}/trial.json"] = put_document(context.store, trial)
    return Manifest(files=files)
