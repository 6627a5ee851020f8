"""Tensors in files, for processes that have none of this one's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.errors import MeasurementError
from onnx_ops.ports.data import Array, Tensors

PREFIX = "input/"
"""Stands before each name in a file: a tensor may be called as savez calls an argument of its own."""


def put_arrays(tensors: Tensors, path: Path) -> Path:
    """Write named tensors to an `.npz` file; texts as such, since objects would need pickle.

    Raises:
        MeasurementError: a value is no tensor.
    """
    import numpy as np

    arrays: dict[str, Any] = {PREFIX + name: _plain(name, array) for name, array in tensors.items()}
    np.savez(path, **arrays)
    return path


def get_arrays(path: Path) -> Mapping[str, Array]:
    """What `put_arrays` wrote; texts are objects again."""
    import numpy as np

    with np.load(path, allow_pickle=False) as archive:
        found = {name.removeprefix(PREFIX): archive[name] for name in archive.files}
    return {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in found.items()}


def _plain(name: str, array: Any) -> Any:
    import numpy as np

    if not isinstance(array, np.ndarray):
        remedy = "Export the model with tensors, for example without ZipMap."
        raise MeasurementError(f"{name} is no tensor, and only tensors can be compared", remedy=remedy)
    return array.astype(str) if array.dtype == object else array
