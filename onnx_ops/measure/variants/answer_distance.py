"""Compare a new variant's answers with those of its source, on a few rows.

The result is a warning before any measurement.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onnx_ops.domain.target import SIMPLIFIED
from onnx_ops.measure.answers import split_batches
from onnx_ops.measure.quantization import ROWS_AT_ONCE
from onnx_ops.metric_formulas import cosine_rows
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.ports.data import Array

_ROWS = 32

_CLOSE = 0.9
"""Minimum median cosine of a variant that is worth measuring.

int8 variants have 0.98 to 1; random answers have about 0.
"""

_AGREEMENT = 0.8
"""Minimum share of rows with the same largest column."""


def describe_far_answers(runtime: Runtime, source: Path, variant: Path, rows: Tensors) -> str:
    """Return which output of the variant is missing or far from the source's.

    The text also states how far. Only float outputs with two or more axes are compared, in batches
    that give the same shape. The text is empty if no output is missing or far.

    Raises:
        MeasurementError: one of the two models does not run on the rows.
    """
    first = {name: array[:_ROWS] for name, array in rows.items()}
    feeds = tuple(feed for feed, _ in split_batches(source, first, ROWS_AT_ONCE))
    expected, given = (runtime.run(path, SIMPLIFIED, feeds) for path in (source, variant))
    scores = [
        name for name, array in expected[0].items() if array.dtype.kind == "f" and array.ndim > 1
    ]
    for name in scores:
        if name not in given[0]:
            return f"the variant lacks output {name} of its source"
        shape = expected[0][name].shape[1:]
        pairs = [
            (one[name], other[name])
            for one, other in zip(expected, given, strict=True)
            if one[name].size and (len(one[name]), *shape) == one[name].shape == other[name].shape
        ]
        if pairs and (distance := _describe_distance(pairs)):
            count = sum(len(one) for one, _ in pairs)
            return (
                f"output {name} is far from the source's: {distance} on {count} rows; "
                "the variant can hardly pass a gate on a metric"
            )
    return ""


def _describe_distance(pairs: list[tuple[Array, Array]]) -> str:
    """Return how the rows of two answers differ; empty if they are similar enough."""
    one, other = (
        np.concatenate([pair[side].reshape(len(pair[side]), -1) for pair in pairs])
        for side in (0, 1)
    )
    cosine = float(np.median(cosine_rows(one, other)))
    if not cosine >= _CLOSE:
        return f"median cosine {cosine:.2f}"
    if pairs[0][0].ndim == 2 and one.shape[1] > 1:
        agreement = float((one.argmax(axis=1) == other.argmax(axis=1)).mean())
        is_class = np.median(np.abs(one.sum(axis=1) - 1)) < 1e-3
        if is_class and agreement < _AGREEMENT:
            return f"{agreement:.0%} of the classes agree"
    return ""
