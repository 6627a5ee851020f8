"""Explain the difference of two values of one step by hypotheses about its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_ops.statistics.differences.detections import explain_detections, explain_labels
from onnx_ops.statistics.differences.pictures import explain_arrays
from onnx_ops.statistics.differences.sequences import (
    explain_texts,
    explain_tokens,
    name_text_difference,
)
from onnx_ops.statistics.step_values import list_leaves

_SMALL = 64
"""Maximum number of elements of an array or list that is kept for every file."""


def explain_difference(reference: Any, value: Any, source: Any = None) -> str:
    """Return the likely cause of the difference of two values; empty if unclear.

    Args:
        source: the reference's value before the step.
    """
    if found := explain_detections(reference, value):
        return found
    pair = _find_differing_pair(reference, value)
    if pair is None:
        return ""
    expected, given = pair
    if isinstance(expected, str) and isinstance(given, str):
        return explain_texts(expected, given)
    if isinstance(expected, np.ndarray) and isinstance(given, np.ndarray):
        return _explain_numbers(expected, given, source)
    return f"kind: {_name_kind(given)} instead of {_name_kind(expected)}"


def _find_differing_pair(reference: Any, value: Any) -> tuple[Any, Any] | None:
    """Return the first differing parts at the same place in both values.

    If each value has one part only, these parts are returned, even if they are equal.
    """
    expected, given = dict(list_leaves(reference)), dict(list_leaves(value))
    if len(expected) == len(given) == 1:
        return next(iter(expected.values())), next(iter(given.values()))
    for name, part in expected.items():
        if name not in given or name.endswith("[]"):
            continue
        other = given[name]
        if isinstance(part, np.ndarray) and isinstance(other, np.ndarray):
            if part.shape != other.shape or not np.array_equal(part, other):
                return part, other
        elif type(part) is not type(other) or part != other:
            return part, other
    return None


def _explain_numbers(expected: Any, given: Any, source: Any) -> str:
    kinds = expected.dtype.kind, given.dtype.kind
    if kinds[0] in "USO" or kinds[1] in "USO":
        return _explain_text_arrays(expected, given)
    wide = all(
        array.dtype.kind in "iu" and array.dtype.itemsize >= 4 for array in (expected, given)
    )
    if wide and max(expected.size, given.size) > 1 and max(expected.ndim, given.ndim) <= 2:
        return explain_tokens(expected, given)
    if max(expected.size, given.size) <= 1:
        return ""
    before = source if isinstance(source, np.ndarray) else None
    return explain_arrays(expected, given, before)


def _explain_text_arrays(expected: Any, given: Any) -> str:
    """Return the likely cause of the first difference of two arrays of texts."""
    if expected.size != given.size:
        return ""
    for one, other in zip(expected.ravel().tolist(), given.ravel().tolist(), strict=True):
        if one != other and isinstance(one, str) and isinstance(other, str):
            return explain_texts(one, other)
    return ""


def _name_kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return {"str": "a text", "NoneType": "nothing"}.get(type(value).__name__, type(value).__name__)


def explain_answers(pairs: Sequence[tuple[Any, Any]]) -> str:
    """Return the cause that several small values show together; empty if unclear.

    An example is another label map.

    Args:
        pairs: the source's and the candidate's value of each file.
    """
    labels = [(a, b) for pair in pairs for a, b in _list_labels(*pair)]
    changed = [(a, b) for a, b in labels if a != b]
    if not changed or _are_texts_alike(changed):
        return ""
    # Labels show another label map only if a pair of labels occurs more than once.
    return explain_labels(labels) if len(set(labels)) < len(labels) else ""


def _are_texts_alike(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether all pairs are texts that differ in case, white space or the like."""
    return all(
        isinstance(a, str) and isinstance(b, str) and bool(name_text_difference(a, b))
        for a, b in pairs
    )


def _list_labels(reference: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return pairs of the texts, whole numbers and booleans of two values.

    Values of different forms have no pairs.
    """
    expected, given = dict(list_leaves(reference)), dict(list_leaves(value))
    if expected.keys() != given.keys():
        return []
    found = []
    for name, part in expected.items():
        ours, theirs = _read_label(part), _read_label(given[name])
        if not name.endswith("[]") and ours is not None and theirs is not None:
            found.append((ours, theirs))
    return found


def _read_label(part: Any) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, np.ndarray) and part.size == 1 and part.dtype.kind in "biuUSO":
        return part.reshape(-1)[0].item() if part.dtype.kind != "O" else part.reshape(-1)[0]
    return None


def is_small(value: Any) -> bool:
    """Return whether a value is small enough to be kept for every file."""
    if isinstance(value, Mapping):
        return all(is_small(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) <= _SMALL and all(is_small(part) for part in value)
    return isinstance(value, (str, int, float)) or (
        isinstance(value, (np.ndarray, np.generic)) and value.size <= _SMALL
    )
