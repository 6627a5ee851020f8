"""Keras 3 models on any backend: their files and the names of their inputs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx_ops.adapters.exporters.input_binding import bind_call, check_names
from onnx_ops.errors import UserError

_CONTEXT = ("training", "mask")
"""Parameters of `call` whose arguments Keras sets."""


_UNBUILT = "Model .* had a build config, but the model cannot be built"
"""Start of a warning of Keras 3.15.

Keras issues this warning if it recreates a subclassed model, but cannot build it.
"""


_EXPORTERS = {"tensorflow": "tensorflow", "torch": "keras"}
"""Exporter of the models of each backend of Keras."""


def import_keras(backend: str) -> Any:
    """Import Keras with a backend.

    Keras chooses its backend when it is first imported.

    Raises:
        UserError: Keras uses another backend.
    """
    os.environ.setdefault("KERAS_BACKEND", backend)
    keras = importlib.import_module("keras")
    used = keras.backend.backend()
    if used != backend:
        other = (
            f" For {used}, set export.framework: {_EXPORTERS[used]}." if used in _EXPORTERS else ""
        )
        raise UserError(
            f"Keras uses the backend {used}, not {backend}",
            where="export.framework",
            remedy=f"Set KERAS_BACKEND={backend} before Keras is imported.{other}",
        )
    return keras


def load_keras(file: Path) -> Any:
    """Return the model in a `.keras` file.

    Raises:
        UserError: the model or its weights cannot be loaded.
    """
    keras: Any = importlib.import_module("keras")
    try:
        _import_classes(file)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_UNBUILT)
            return keras.saving.load_model(file, compile=False)
    except UserWarning as error:
        raise UserError(
            "Keras did not load the weights of the model",
            where=file.name,
            why="Keras cannot build the layers of this subclassed model from its saved shapes",
            remedy="Define `build` of the model with a shape for each argument, "
            "or make `call` take the inputs in one dictionary.",
        ) from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UserError(
            "Keras could not load the model",
            where=file.name,
            why=str(error),
            remedy="Save it with `model.save` of this Keras, and define its custom classes in a "
            "module of the project.",
        ) from error


def _import_classes(path: Path) -> None:
    """Import the modules of a `.keras` file's custom classes to register the classes.

    Keras imports only its own modules.
    """
    with (
        contextlib.suppress(zipfile.BadZipFile, KeyError, ValueError),
        zipfile.ZipFile(path) as archive,
    ):
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


def check_keras_inputs(model: Any, names: Collection[str]) -> None:
    """Check that a Keras model takes inputs of these names.

    The single input of a model can have any name. The inputs of a subclassed model whose `call`
    takes a dictionary are not checked.

    Raises:
        UserError: the model does not take inputs of these names.
    """
    known = _read_names(model)
    if known is None:
        if _names_parameters(model, names):
            bind_call(model.call, names, owner=f"`call` of {type(model).__name__}", ordered=False)
    elif len(known) > 1 or len(names) > 1:
        check_names(names, known, owner=f"Keras model {model.name!r}")


def call_keras(model: Any, tensors: Mapping[str, Any]) -> Any:
    """Call a Keras model by the names of its inputs, in inference mode.

    A functional model gets a dictionary with the names of its inputs. A subclassed model gets
    keyword arguments if its `call` names the inputs, else a dictionary. Instead of a dictionary, a
    single input is passed without a name.
    """
    if _read_names(model) is None and _names_parameters(model, tensors):
        return model(**tensors, training=False)
    if len(tensors) == 1:
        return model(next(iter(tensors.values())), training=False)
    return model(dict(tensors), training=False)


def _read_names(model: Any) -> list[str] | None:
    """Return the names of the inputs of a functional or sequential model.

    The result is None for a subclassed model, which does not declare its inputs.
    """
    inputs = getattr(model, "inputs", None)
    if inputs is None:
        return None
    structure = getattr(model, "input", None)  # A sequential model can lack `input`.
    if isinstance(structure, Mapping):
        return [str(name) for name in structure]
    return [str(value.name) for value in inputs]


def _names_parameters(model: Any, names: Collection[str]) -> bool:
    """Return whether `call` of a subclassed model names its inputs.

    This is so if a parameter has the name of an input, or if `call` requires several arguments.
    """
    parameters = [
        p
        for name, p in inspect.signature(model.call).parameters.items()
        if name not in _CONTEXT and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    required = [p for p in parameters if p.default is p.empty]
    return len(required) > 1 or any(p.name in names for p in parameters)
