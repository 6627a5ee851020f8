"""Do two deployments give the same answer to one request? Told from the bytes that went out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from onnx_ops.protocol.messages import BINARY_LENGTH_HEADER
from onnx_ops.serving.answers import Answer

_LENGTH = re.compile(rb"(?:%b: |json-header-size=)([0-9]+)" % BINARY_LENGTH_HEADER.encode())
_FLOATS: Mapping[str, str] = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


def differs(expected: Answer, found: Answer, tolerance: float) -> bool:
    """Whether an output is missing, of another shape, or off.

    A floating-point number is off if it differs by more than `tolerance` times the largest finite number of its output
    in `expected`; infinities and NaN must stand in the same places. Everything else must be equal.
    """
    before, after = _outputs(expected), _outputs(found)
    return before.keys() != after.keys() or any(_off(before[name], after[name], tolerance) for name in before)


def _outputs(answer: Answer) -> dict[str, Any]:
    """Values by output: arrays of the binary form as arrays, all else as JSON has it."""
    match = _LENGTH.search(answer.lines)
    size = len(answer.body) if match is None else int(match[1])
    document = orjson.loads(answer.body[:size])
    if "predictions" in document:
        return _named(document["predictions"])
    found: dict[str, Any] = {}
    place = size
    for output in document["outputs"]:
        length = output.get("parameters", {}).get("binary_data_size")
        if length is None:
            found[output["name"]] = (output["shape"], output["data"])
        else:
            raw, place = answer.body[place : place + length], place + length
            kind = _FLOATS.get(output["datatype"])
            found[output["name"]] = (output["shape"], raw if kind is None else np.frombuffer(raw, kind))
    return found


def _named(predictions: Any) -> dict[str, Any]:
    """Columns of a table, outputs by name, or a single list."""
    if isinstance(predictions, dict):
        return predictions
    if isinstance(predictions, list) and predictions and all(isinstance(row, dict) for row in predictions):
        return {name: [row.get(name) for row in predictions] for name in predictions[0]}
    return {"": predictions}


def _off(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, tuple):
        return bool(expected[0] != found[0]) or _off(expected[1], found[1], tolerance)
    before, after = _numbers(expected), _numbers(found)
    if before is None or after is None:
        return bool(expected != found)
    if before.shape != after.shape:
        return True
    finite = np.isfinite(before)
    scale = float(np.abs(before[finite]).max()) if finite.any() else 0.0
    return not np.allclose(after, before, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _numbers(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Floating-point numbers, null being NaN; None for anything that must be equal."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind == "f" else None
