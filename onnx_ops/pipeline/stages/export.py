"""Export stage: write the model as ONNX, with the outputs of the source model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import MODEL_FILE, Digest, Manifest
from onnx_ops.domain.evidence import NAN_PROPERTY
from onnx_ops.domain.input_values import InputValues
from onnx_ops.domain.pipeline import Export
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.release import Lineage, flatten_origins
from onnx_ops.domain.row_axes import find_declared_axes, find_row_axes
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.files import (
    FEATURES,
    FRACTIONS,
    MODEL,
    TRAINED,
    VALUES,
    arrange_features,
    checkout_files,
    get_dataset,
    pack_arrays,
    put_document,
    put_folder,
    read_features,
    widen_columns,
)
from onnx_ops.measure.free_axes import check_free_axes
from onnx_ops.measure.parity import REFERENCE_TARGET
from onnx_ops.measure.reference_outputs import collect_reference_outputs, put_reference
from onnx_ops.measure.row_layout import RowLayout, build_export_request, read_layout
from onnx_ops.measure.user_functions import importable
from onnx_ops.onnx_graph.compatibility import copy_libraries
from onnx_ops.onnx_graph.files import find_model_file
from onnx_ops.onnx_graph.model_info import read_model_info, write_lineage
from onnx_ops.pipeline.stage_settings import get_exporter, read_operators, read_reference_operators
from onnx_ops.ports import Context, Dataset
from onnx_ops.scratch import Scratch

AXES_REMEDY = "Name the axis of the rows as in other inputs: export.dynamic: {INPUT: {1: batch}}."
"""Remedy for rows that are not on the declared axis."""


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Export the model; the key of the stage is the id of the release."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], Export, where=stage.id)
    exporter = get_exporter(stage, context, section.framework)
    dataset = get_dataset(context.store, inputs[f"data/{settings['data']}"])
    dataset = arrange_features(dataset, read_features(context.store, inputs["train"]))
    if FRACTIONS in inputs["train"].files:
        fractions = codec.loads(context.store.read(inputs["train"][FRACTIONS]), tuple[str, ...])
        dataset = replace(dataset, inputs=widen_columns(dataset.inputs, fractions))
    lineage = Lineage(
        pipeline=settings["pipeline"],
        release=key,
        git_sha=str(stage.hints.get("commit", ""))
        # The checkout of a worker can have another commit than the machine that requested the run.
        or context.git_sha(),
        data={
            name.removeprefix("data/"): m.digest()
            for name, m in inputs.items()
            if name.startswith("data/")
        },
        origins=codec.from_json(
            stage.hints.get("origins", {}), Mapping[str, Mapping[str, str]], where=stage.id
        ),
    )
    with Scratch() as folder, importable(context.root):
        trained = checkout_files(context.store, inputs["train"], TRAINED, folder / "trained")
        axes = _find_axes(section, dataset, trained)
        dataset = dataset.put_rows_first(axes, AXES_REMEDY).head(settings["limit"])
        model = exporter.load(trained)
        exported = folder / "onnx"
        exported.mkdir()
        path = exported / MODEL_FILE
        request = build_export_request(
            section,
            dataset.inputs,
            RowLayout(inputs=axes, values=dataset.values),
            path,
            ordered=settings["ordered"],
            features=dataset.features,
        )
        exporter.export(model, request)
        layout = read_layout(read_model_info(path), dataset.values)
        declared = codec.from_json(settings["inputs"], Mapping[str, InputValues], where=stage.id)
        reference = collect_reference_outputs(
            exporter,
            model,
            path,
            dataset.inputs,
            declared,
            seconds=settings["source_time"],
            layout=layout,
        )
        check_free_axes(section, read_model_info(path), reference)
        properties = {"onnx-ops.pipeline": lineage.pipeline, "onnx-ops.release": lineage.release}
        if lineage.git_sha:
            properties["onnx-ops.git.sha"] = lineage.git_sha
        if reference.limits.nan:
            properties[NAN_PROPERTY] = reference.limits.nan
        properties |= {
            f"onnx-ops.origin.{key}": value for key, value in flatten_origins(lineage).items()
        }
        properties |= {f"onnx-ops.data.{name}": digest for name, digest in lineage.data.items()}
        write_lineage(path, properties)
        copy_libraries(path, read_operators(stage))
        require_loadable(path, stage, context)
        return Manifest(
            files={
                **put_folder(context.store, exported, MODEL),
                FEATURES: put_document(context.store, dataset.features),
                "info.json": put_document(context.store, read_model_info(path)),
                **(
                    {VALUES: context.store.put_bytes(pack_arrays(dataset.values))}
                    if dataset.values
                    else {}
                ),
                "lineage.json": put_document(context.store, lineage),
                "reference.npz": put_reference(context.store, reference.groups),
                "source.json": put_document(context.store, reference.limits),
            }
        )


def require_loadable(
    path: Path,
    stage: Stage,
    context: Context,
    *,
    written: str = "exported",
    remedy: str = "Change the layer or column that the reason names, or try another opset.",
) -> None:
    """Load the file as validation does, in a separate process that can crash.

    Args:
        written: word for how the file was written, for the message.
        remedy: remedy of the error.

    Raises:
        MeasurementError: the runtime cannot load the file; the error has the runtime's reason.
    """
    target = replace(REFERENCE_TARGET, custom_ops=read_reference_operators(stage))
    try:
        context.runtime(target.runtime).facts(path, target)
    except MeasurementError as error:
        raise MeasurementError(
            f"{target.runtime} cannot load the {written} file",
            where=stage.id,
            why=str(error),
            remedy=remedy,
        ) from error


def _find_axes(section: Export, dataset: Dataset, trained: Path) -> dict[str, int]:
    """Return the axis of the rows of each input.

    The axes are read from an existing ONNX file, or from the free axes that the section declares.
    """
    if section.framework == "onnx":
        return find_row_axes(
            {spec.name: spec.shape for spec in read_model_info(find_model_file(trained)).inputs}
        )
    return find_declared_axes(
        section.dynamic, {name: array.shape for name, array in dataset.inputs.items()}
    )
