"""Tensors as JavaScript takes them: little-endian values in files, with a type and dimensions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx_ops.errors import MeasurementError
from onnx_ops.ports.data import Array, Tensors

_TYPES = {
    "bool": "bool",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "int8": "i1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "uint8": "u1",
}
"""Layouts by the name that JavaScript and numpy share."""


def put_tensors(tensors: Tensors, stem: Path) -> list[dict[str, Any]]:
    """Write each tensor to a file `stem-<number>`, and tell what a worker must know of them.

    Raises:
        MeasurementError: a tensor has a type that JavaScript has not.
    """
    found = []
    for number, (name, array) in enumerate(tensors.items()):
        file = stem.with_name(f"{stem.name}-{number}")
        kind = "string" if array.dtype.kind in "OUS" else array.dtype.name
        if kind == "string":
            file.write_text(json.dumps([_text(value) for value in array.ravel().tolist()]), encoding="utf-8")
        elif kind in _TYPES:
            file.write_bytes(array.astype(_TYPES[kind]).tobytes())
        else:
            raise MeasurementError(f"input {name} is of type {kind}, which tensors of JavaScript cannot hold")
        found.append({"name": name, "type": kind, "dims": list(array.shape), "file": str(file)})
    return found


def get_tensors(entries: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """What a worker wrote."""
    import numpy as np

    found: dict[str, Any] = {}
    for entry in entries:
        data, dims = Path(entry["file"]).read_bytes(), tuple(entry["dims"])
        if entry["type"] == "string":
            found[entry["name"]] = np.array(json.loads(data), dtype=object).reshape(dims)
        else:
            values = np.frombuffer(data, dtype=_TYPES[entry["type"]])
            found[entry["name"]] = values.astype(values.dtype.newbyteorder("=")).reshape(dims)
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
