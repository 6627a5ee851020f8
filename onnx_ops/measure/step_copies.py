"""Copy values of a system's steps, and convert them for the next step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def copy_value(value: Any) -> Any:
    """Return a copy of a value, with tensors of other libraries as NumPy arrays."""
    if isinstance(value, Mapping):
        return {key: copy_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_value(part) for part in value]
    if isinstance(value, (str, bytes, int, float, bool)) or value is None:
        return value
    if hasattr(value, "detach"):
        # The value is a tensor of torch or Paddle, which can need gradients or be on a GPU.
        return np.array(value.detach().cpu().numpy())
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        return value.copy()
    if hasattr(value, "numpy"):
        # The value is an eager tensor of TensorFlow.
        return np.array(value.numpy())
    return copy.deepcopy(value)


def read_array(value: Any) -> Any:
    """Return a value with pictures and tensors as arrays, for a comparison."""
    if isinstance(value, Mapping):
        return {key: read_array(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [read_array(part) for part in value]
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    if hasattr(value, "__array_interface__") or isinstance(value, np.generic):
        return np.asarray(value)
    if hasattr(value, "numpy"):
        return value.numpy()
    return value


def adapt_value(reference: Any, own: Any) -> Any | None:
    """Return the source's value in the candidate's form; None if it does not fit.

    The next step of the candidate gets this value. The difference of the next step is then measured
    without the differences of earlier steps.
    """
    if isinstance(own, Mapping):
        if not isinstance(reference, Mapping) or reference.keys() != own.keys():
            return None
        parts = {key: adapt_value(reference[key], own[key]) for key in own}
        return None if any(part is None for part in parts.values()) else parts
    if isinstance(own, np.ndarray):
        return _adapt_array(read_array(reference), own)
    if hasattr(own, "detach"):
        array = _adapt_array(read_array(reference), own.detach().cpu().numpy())
        return None if array is None else sys.modules["torch"].from_numpy(array)
    if hasattr(own, "__array_interface__"):
        return _adapt_picture(reference, own)
    if isinstance(own, (list, tuple)):
        plain = reference.tolist() if isinstance(reference, np.ndarray) else reference
        return type(own)(plain) if isinstance(plain, (list, tuple)) else None
    return reference if isinstance(reference, type(own)) else None


def _adapt_array(reference: Any, own: Any) -> Any | None:
    try:
        array = np.asarray(reference)
    except ValueError:
        # The value is a list of arrays with different shapes.
        return None
    while array.ndim > own.ndim and array.shape[0] == 1:
        array = array[0]
    while array.ndim < own.ndim and own.shape[own.ndim - array.ndim - 1] == 1:
        array = array[None]
    kinds = array.dtype.kind, own.dtype.kind
    is_number = kinds[0] in "biuf" and kinds[1] in "biuf"
    if array.ndim != own.ndim or not (is_number or kinds[0] == kinds[1]):
        return None
    if kinds[1] in "biu" and kinds[0] == "f":
        return None
    return np.array(array, dtype=own.dtype) if is_number else array


def _adapt_picture(reference: Any, own: Any) -> Any | None:
    """Return the source's value as a Pillow picture; None if it does not fit."""
    if type(reference).__module__.startswith("PIL."):
        return reference.copy() if reference.mode == own.mode else None
    array = np.asarray(reference)
    if array.dtype != np.uint8 or array.ndim != np.asarray(own).ndim:
        return None
    return sys.modules["PIL.Image"].fromarray(array, own.mode) if _has_pillow() else None


def _has_pillow() -> bool:
    return "PIL.Image" in sys.modules
