"""Which rows a classifier gets right, and how two of them compare on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_ops.domain.evidence import PairedCounts
from onnx_ops.errors import UserError


def correct_rows(outputs: Mapping[str, Any], label: Any) -> Any:
    """Boolean array of shape (rows,).

    Predictions are the first output of integers or strings with one value a row, else the arg max over the last
    axis of the first output of shape (rows, classes).

    Raises:
        UserError: no output can be read as a classification.
    """
    import numpy as np

    for array in outputs.values():
        if array.ndim == 1 and array.dtype.kind in "iuUSO":
            return array == np.asarray(label)
    for array in outputs.values():
        if array.ndim == 2:
            return array.argmax(axis=-1) == np.asarray(label)
    shapes = {name: tuple(array.shape) for name, array in outputs.items()}
    raise UserError(f"no output can be read as classes: {shapes}", remedy="Accuracy needs labels or scores per class.")


def paired(metric: str, against: str, baseline: Any, candidate: Any) -> PairedCounts:
    """Counts of rows right in both, in one, in neither. Both arrays are boolean of shape (rows,)."""
    return PairedCounts(
        metric=metric,
        against=against,
        n=len(candidate),
        both=int((baseline & candidate).sum()),
        only_baseline=int((baseline & ~candidate).sum()),
        only_candidate=int((~baseline & candidate).sum()),
    )
