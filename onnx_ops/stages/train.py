"""Train: a Python function by reference, or a model that the pipeline brings."""

from __future__ import annotations

import importlib
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx_ops import plugins
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import Stage
from onnx_ops.errors import MissingPackage, NotFound, OnnxOpsError, StageFailure
from onnx_ops.ports import Ports
from onnx_ops.stages.files import TRAINED, get_dataset, put_folder, scratch


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


@contextmanager
def importable(root: Path) -> Iterator[None]:
    """Lets the project's own modules be imported, for training and for reading what training pickled."""
    text = str(root)
    added = text not in sys.path
    if added:
        sys.path.insert(0, text)
    try:
        yield
    finally:
        if added:
            sys.path.remove(text)


def _train(reference: str, data: Mapping[str, Any], parameters: Mapping[str, Any]) -> object:
    module_name, _, function_name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        package = (error.name or module_name).partition(".")[0]
        raise MissingPackage(
            f"cannot import {reference}: there is no module {error.name}",
            where="train.run",
            remedy=plugins.install_hint(package),
        ) from error
    except Exception as error:  # a module's own code runs when it is imported
        why = f"{type(error).__name__}: {error}"
        raise NotFound(f"cannot import {reference}", where="train.run", why=why) from error
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
