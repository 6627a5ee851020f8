"""A model's answers to all rows of a data set, in batches that it takes and that memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.files import rows
from onnx_ops.onnx_graph.inspect import info
from onnx_ops.ports import Runtime, Tensors

T = TypeVar("T")

_INPUT_BYTES = 1 << 24
"""Of one batch; what a model holds on the way may be a hundred times as much."""

_OUTPUT_BYTES = 1 << 28
"""Of the batches that one session answers before they are read and let go."""


def read_answers(
    runtime: Runtime, model: Path, target: Target, inputs: Tensors, read: Callable[[Tensors], T]
) -> list[T]:
    """What `read` makes of each batch of answers, in the order of the rows.

    A model with a fixed batch gets its last one filled up with the first rows, and answers to those are cut off.

    Args:
        runtime: runs the model.
        model: an ONNX file.
        target: where it runs.
        inputs: at least one row.
        read: takes the outputs of some rows and keeps what is needed of them.

    Raises:
        MeasurementError: the model does not run there.
        UserError: an output does not have one entry a row.
    """
    batches = list(batches_of(model, inputs))
    found: list[T] = []
    at_once = 1
    while batches:
        now, batches = batches[:at_once], batches[at_once:]
        answers = runtime.run(model, target, tuple(feed for feed, _ in now))
        found += [read(_cut(outputs, feed, count)) for outputs, (feed, count) in zip(answers, now, strict=True)]
        largest = max(sum(array.nbytes for array in outputs.values()) for outputs in answers)
        at_once = max(1, _OUTPUT_BYTES // max(1, largest))
    return found


def batches_of(model: Path, inputs: Tensors) -> Iterator[tuple[Tensors, int]]:
    """Feeds that the model takes, and how many rows of each count."""
    fixed = info(model).fixed_batch
    total = len(next(iter(inputs.values())))
    row_bytes = sum(array.nbytes for array in inputs.values()) // total
    size = fixed or max(1, _INPUT_BYTES // max(1, row_bytes))
    for start in range(0, total, size):
        count = min(size, total - start)
        if fixed and count < size:
            chosen = np.arange(start, start + size) % total
            yield {name: array[chosen] for name, array in inputs.items()}, count
        else:
            yield rows(inputs, start, start + count), count


def _cut(outputs: Tensors, feed: Tensors, count: int) -> Tensors:
    """The outputs that have one entry a row, for the rows that count."""
    fed = len(next(iter(feed.values())))
    kept = {name: array[:count] for name, array in outputs.items() if array.ndim and len(array) == fed}
    if not kept:
        shapes = {name: tuple(array.shape) for name, array in outputs.items()}
        raise UserError(f"no output has one entry for each of {fed} rows: {shapes}")
    return kept
