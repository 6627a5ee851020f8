"""Keras 3 on its PyTorch backend, where a model is a torch module."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.torch import TorchExporter
from onnx_ops.errors import NotFound, UserError

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
            raise NotFound(f"{len(files)} .keras files there", where=str(folder), remedy="There must be exactly one.")
        try:
            model = _keras().saving.load_model(files[0], compile=False)
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"cannot load the model: {error}", where=files[0].name) from error
        return model.eval()


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
