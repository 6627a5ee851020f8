"""Train stage: call the training function, or copy an existing model."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import UserError, describe_error
from onnx_ops.measure.files import (
    FEATURES,
    FRACTIONS,
    TRAINED,
    arrange_features,
    get_dataset,
    is_float_column,
    put_document,
    put_folder,
    widen_columns,
)
from onnx_ops.measure.user_functions import call_training, importable
from onnx_ops.pipeline.stage_settings import get_exporter
from onnx_ops.ports import Context, Exporter, TrainingExporter
from onnx_ops.scratch import Scratch


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Train or copy the model, and store its files."""
    settings: Mapping[str, Any] = stage.settings
    exporter = get_exporter(stage, context, settings["framework"])
    files: dict[str, Digest] = {}
    with Scratch() as folder, importable(context.root):
        if "run" in settings:
            data = {
                name.removeprefix("data/"): get_dataset(context.store, inputs[name])
                for name in inputs
            }
            fractions = {
                name
                for rows in data.values()
                for name, array in rows.inputs.items()
                if is_float_column(array)
            }
            data = {
                name: replace(rows, inputs=widen_columns(rows.inputs, fractions))
                for name, rows in data.items()
            }
            features: dict[str, tuple[str, ...]] = {}
            for name, rows in sorted(data.items()):
                data[name] = arranged = arrange_features(rows, features)
                features |= arranged.features
            files[FEATURES] = put_document(context.store, features)
            files[FRACTIONS] = put_document(context.store, tuple(sorted(fractions)))
            if isinstance(exporter, TrainingExporter):
                exporter.train(settings["run"], data, settings["with_"], folder)
            else:
                _save(exporter, call_training(settings["run"], data, settings["with_"]), folder)
        else:
            with Scratch() as aside:
                brought = context.models.path(settings["model"], aside / "brought")
                if settings["framework"] == "onnx":
                    exporter.save(brought, folder)
                elif brought.is_dir():
                    shutil.copytree(brought, folder, dirs_exist_ok=True)
                else:
                    shutil.copyfile(brought, folder / brought.name)
        return Manifest(files=files | put_folder(context.store, folder, TRAINED))


def _save(exporter: Exporter, model: object, folder: Path) -> None:
    """Write the model that the training function returned.

    Raises:
        UserError: the model cannot be saved. For example, pickle refuses a lambda or an instance of
            a local class.
    """
    try:
        exporter.save(model, folder)
    # pickle raises these types of errors for objects that it cannot serialize.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"the returned {type(model).__name__} cannot be saved",
            where="train.run",
            why=describe_error(error),
            remedy="If pickle cannot write an object, define its class or function at the top "
            "level of a module, and leave out lambdas and open files.",
        ) from error
