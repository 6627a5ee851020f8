"""Keras 3 on its PyTorch backend, where a model is a torch module."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.errors import NotFoundError, UserError

FILE = "model.keras"
BACKEND = "torch"


class KerasExporter(TorchExporter):
    """Inputs are passed in the order of the data set's `inputs:`. Models of other backends are read too: a `.keras`
    file knows none."""

    tools = ("keras", *TorchExporter.tools)

    def save(self, model: object, folder: Path) -> None:
        keras = _keras()
        if not isinstance(model, keras.Model):
            raise UserError(
                f"{type(model).__name__} is no keras.Model", where="train.run", remedy="It must return a Keras model."
            )
        model.save(folder / FILE)

    def load(self, folder: Path) -> object:
        files = sorted(folder.glob("*.keras"))
        if len(files) != 1:
            raise NotFoundError(
                f"{len(files)} .keras files there", where=str(folder), remedy="There must be exactly one."
            )
        keras = _keras()
        try:
            import_classes(files[0])
            model = keras.saving.load_model(files[0], compile=False)
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise UserError(f"cannot load the model: {error}", where=files[0].name) from error
        return model.eval()


def import_classes(path: Path) -> None:
    """Import the modules of a `.keras` file's own classes, which register them there: Keras imports none but its own.

    Raises:
        ImportError: a module cannot be imported.
    """
    with contextlib.suppress(zipfile.BadZipFile, KeyError, ValueError), zipfile.ZipFile(path) as archive:
        for module in sorted(set(_own_modules(json.loads(archive.read("config.json"))))):
            importlib.import_module(module)


def _own_modules(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if config.get("module") and config.get("registered_name"):
            yield config["module"]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _own_modules(part)


def _keras() -> Any:
    """Keras chooses its backend when it is first imported."""
    os.environ.setdefault("KERAS_BACKEND", BACKEND)
    keras = importlib.import_module("keras")
    if keras.backend.backend() != BACKEND:
        raise UserError(
            f"Keras runs on {keras.backend.backend()} here",
            where="export.framework",
            remedy="Set KERAS_BACKEND=torch before Keras is imported, or set export.framework: tensorflow.",
        )
    return keras
