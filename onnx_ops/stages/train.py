"""Train: a Python function by reference, or a model that the pipeline brings."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.errors import NotFound, OnnxOpsError, StageFailure
from onnx_ops.ports import Ports
from onnx_ops.stages.files import TRAINED, get_dataset, put_folder, scratch
from onnx_ops.stages.usercode import importable, load_function


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key
    settings: Mapping[str, Any] = stage.settings
    exporter = ports.exporter(settings["framework"])
    with scratch() as folder, importable(ports.root):
        if "run" in settings:
            data = {name.removeprefix("data/"): get_dataset(ports.store, inputs[name]) for name in inputs}
            exporter.save(_train(settings["run"], data, settings["with_"]), folder)
        elif settings["framework"] == "onnx":
            exporter.save(ports.root / settings["model"], folder)
        else:
            _copy(ports.root / settings["model"], folder)
        return Manifest(files=put_folder(ports.store, folder, TRAINED))


def _train(reference: str, data: Mapping[str, Any], parameters: Mapping[str, Any]) -> object:
    function = load_function(reference, "train.run")
    try:
        return function(data, **parameters)
    except OnnxOpsError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise StageFailure(
            f"{reference} raised {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}",
            remedy="The training function is the project's own; mend it and run again.",
        ) from error


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copyfile(source, folder / source.name)
    else:
        raise NotFound("no such model", where=str(source), remedy="`model:` is relative to the project's root.")
