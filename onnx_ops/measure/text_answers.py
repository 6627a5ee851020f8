"""Texts in outputs and labels."""

from __future__ import annotations

import numpy as np

from onnx_ops.errors import UserError
from onnx_ops.metric_formulas import Array


def is_texts(array: Array) -> bool:
    """Return whether an output has the shape and type of one text per row."""
    column = array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)
    return column and array.dtype.kind in "USO"


def read_texts(array: Array, where: str) -> Array:
    """Return texts as NumPy strings of the same shape.

    Raises:
        UserError: an entry is not a text, or has another encoding than UTF-8.
    """
    if array.dtype.kind == "U":
        return array
    entries = array.ravel().tolist()
    for number, entry in enumerate(entries):
        if not isinstance(entry, str | bytes):
            row = number // max(1, array.size // max(1, len(array)))
            raise UserError(
                f"row {row} must be a text, not {type(entry).__name__} {entry!r}",
                where=where,
                remedy="Fill the row with a text, or leave it out.",
            )
    try:
        texts = [entry.decode() if isinstance(entry, bytes) else entry for entry in entries]
    except UnicodeDecodeError as error:
        raise UserError("a text is not encoded in UTF-8", where=where, why=str(error)) from error
    return np.array(texts, dtype=np.str_).reshape(array.shape)
