"""Named inputs of Keras 3 models, on any of its backends."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from onnx_ops.adapters.exporters.input_binding import bind_call, check_names

_CONTEXT = ("training", "mask")
"""Parameters of `call` that Keras sets."""


def check_keras_inputs(model: Any, names: Collection[str]) -> None:
    """Check that a Keras model takes inputs of these names; the one input of a model can have any name.

    Raises:
        UserError: it does not.
    """
    known = _read_names(model)
    if known is None:
        if _names_parameters(model, names):
            bind_call(model.call, names, owner=f"`call` of {type(model).__name__}", ordered=False)
    elif len(known) > 1 or len(names) > 1:
        check_names(names, known, owner=f"Keras model {model.name!r}")


def call_keras(model: Any, tensors: Mapping[str, Any]) -> Any:
    """Call a Keras model by the names of its inputs, in inference mode.

    A functional model gets a dictionary by its own names. A subclassed one gets keyword arguments where `call` names
    the inputs, else a dictionary.
    """
    if _read_names(model) is None and _names_parameters(model, tensors):
        return model(**tensors, training=False)
    if len(tensors) == 1:
        return model(next(iter(tensors.values())), training=False)
    return model(dict(tensors), training=False)


def _read_names(model: Any) -> list[str] | None:
    """Return the names of a functional or sequential model's inputs; None for a subclassed one, which has none."""
    inputs = getattr(model, "inputs", None)
    if inputs is None:
        return None
    structure = getattr(model, "input", None)  # a sequential model has no structure of inputs
    if isinstance(structure, Mapping):
        return [str(name) for name in structure]
    return [str(value.name) for value in inputs]


def _names_parameters(model: Any, names: Collection[str]) -> bool:
    """Return whether `call` of a subclassed model has a parameter of an input's name, or needs several arguments."""
    parameters = [p for name, p in inspect.signature(model.call).parameters.items() if name not in _CONTEXT]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) > 1 or any(p.name in names for p in parameters)
