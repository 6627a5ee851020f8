"""Run a model on rows and groups of inputs, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError, UserError
from onnx_ops.measure.files import slice_rows
from onnx_ops.onnx_graph.instrumentation import write_with_outputs
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.probes import REAL

T = TypeVar("T")

_INPUT_BYTES = 1 << 22
"""Maximum bytes of the inputs of several rows in a batch that is not fixed.

The intermediate values of a model can take a hundred times as much memory.
"""

_OUTPUT_BYTES = 1 << 28
"""Approximate maximum of the bytes of the answers of one call of the runtime.

The answers are read and released before the next call.
"""

GroupAnswers = Mapping[str, tuple[Tensors, ...] | MeasurementError]
"""By group: the answers to each run, or the error if the model rejects the group."""


def read_answers(
    runtime: Runtime,
    model: Path,
    target: Target,
    inputs: Tensors,
    read: Callable[[Tensors], T],
    shard: tuple[int, int] = (0, 1),
) -> list[T]:
    """Return the results of `read` for each batch of answers, in row order.

    If a model has a fixed batch, the first rows fill up the last batch, and their answers are
    removed. A `shard` (number, count) selects part of the same batches. A model therefore gives the
    same answers in shards as to all rows together.

    Raises:
        MeasurementError: the model does not run on the target.
        UserError: no output has one entry per row.
    """
    number, count = shard
    batches = list(split_batches(model, inputs))
    batches = batches[len(batches) * number // count : len(batches) * (number + 1) // count]
    results: list[T] = []
    at_once = 1
    while batches:
        current, batches = batches[:at_once], batches[at_once:]
        answers = runtime.run(model, target, tuple(feed for feed, _ in current))
        largest = 1
        for answer, (feed, count) in zip(answers, current, strict=True):
            outputs = _cut_rows(answer, len(next(iter(feed.values()))), count)
            results.append(read(outputs))
            largest = max(largest, sum(getattr(array, "nbytes", 0) for array in answer.values()))
        at_once = max(1, _OUTPUT_BYTES // largest)
    return results


def _cut_rows(outputs: Tensors, fed: int, count: int) -> Tensors:
    """Return the first `count` rows of the outputs that have one entry per row.

    `fed` is the number of rows in the model's input. A map for each row (ZipMap) becomes a row of a
    matrix.
    """
    arrays = {
        name: join_maps(value)[0] if are_maps(value) else value for name, value in outputs.items()
    }
    shapes = {name: getattr(array, "shape", ()) for name, array in arrays.items()}
    by_row = {name: arrays[name][:count] for name, shape in shapes.items() if shape[:1] == (fed,)}
    if not by_row:
        raise UserError(f"no output has one entry for each of {fed} rows; the shapes are {shapes}")
    return by_row


def are_maps(value: Any) -> TypeGuard[list[Mapping[Any, Any]]]:
    """Return whether an output is a sequence with one map per row, as of ZipMap."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def join_maps(maps: Sequence[Mapping[Any, Any]]) -> tuple[Array, Array]:
    """Return a matrix with a row per map and a column per key, and the keys.

    The keys are sorted and have the shape (1, keys). A missing entry is NaN.
    """
    keys = sorted({key for entry in maps for key in entry})
    table = np.array([[entry.get(key, np.nan) for key in keys] for entry in maps])
    return table.astype(np.float32) if table.dtype.kind == "f" else table, np.array([keys])


def split_batches(
    model: Path, inputs: Tensors, at_once: int | None = None
) -> Iterator[tuple[Tensors, int]]:
    """Yield batches for a model, each with its number of rows to evaluate.

    A batch has at most `at_once` rows, unless the model has a fixed batch.
    """
    return cut_batches(inputs, read_model_info(model).fixed_batch, _INPUT_BYTES, at_once)


def cut_batches(
    rows: Tensors, fixed: int, most_bytes: int, at_once: int | None = None
) -> Iterator[tuple[Tensors, int]]:
    """Yield batches, each with its number of rows to evaluate.

    If `fixed` is 0, a batch has at most `at_once` rows and about `most_bytes` bytes. Otherwise,
    each batch has `fixed` rows, and the first rows fill up the last batch.
    """
    total = len(next(iter(rows.values())))
    row_bytes = sum(array.nbytes for array in rows.values()) // max(1, total)
    size = fixed or max(1, min(at_once or total, most_bytes // max(1, row_bytes)))
    for start in range(0, total, size):
        count = min(size, total - start)
        if fixed and count < size:
            chosen = np.arange(start, start + size) % total
            yield {name: array[chosen] for name, array in rows.items()}, count
        else:
            yield slice_rows(rows, start, start + count), count


def read_values(
    runtime: Runtime, model: Path, target: Target, names: Sequence[str], feeds: tuple[Tensors, ...]
) -> list[dict[str, Array]]:
    """Return the named intermediate values of a model for each input.

    Sequences and maps are omitted. A temporary copy with these values as outputs is written beside
    the model.
    """
    with temporary_copy(model, "inside") as copy:
        write_with_outputs(model, names, copy)
        answers = runtime.run(copy, target, feeds)
    return [
        {name: value for name, value in answer.items() if hasattr(value, "dtype")}
        for answer in answers
    ]


@contextmanager
def temporary_copy(model: Path, name: str) -> Iterator[Path]:
    """Yield a path beside a model for a temporary model, and delete it afterwards.

    The weights of the temporary model are deleted too.
    """
    path = model.with_name(f"{model.stem}-{name}.onnx")
    try:
        yield path
    finally:
        for file in (path, path.with_name(f"{path.name}.data")):
            file.unlink(missing_ok=True)


def run_groups(
    runtime: Runtime, target: Target, model: Path, groups: Mapping[str, tuple[Tensors, ...]]
) -> GroupAnswers:
    """Run the model on groups of inputs.

    All groups run in one session if the model accepts them. Otherwise, the real rows run alone
    first. The other groups then run together. If they fail, they are split into halves until a half
    runs or has one group only.

    Returns:
        The answers of each group, or the MeasurementError of a group that does not run.

    Raises:
        MeasurementError: the model does not run on real rows.
    """
    try:
        answers = iter(
            runtime.run(model, target, tuple(feed for runs in groups.values() for feed in runs))
        )
        return {name: tuple(next(answers) for _ in runs) for name, runs in groups.items()}
    except MeasurementError as error:
        if len(groups) < 2:
            if REAL in groups:
                raise
            return dict.fromkeys(groups, error)
        # The real rows run alone first, so that a model that does not run fails immediately.
        if REAL in groups:
            plain: GroupAnswers = {REAL: runtime.run(model, target, groups[REAL])}
            others = {name: runs for name, runs in groups.items() if name != REAL}
            return {**plain, **run_groups(runtime, target, model, others)}
    first, second = _halve(groups)
    return {
        **run_groups(runtime, target, model, first),
        **run_groups(runtime, target, model, second),
    }


def _halve(groups: Mapping[str, tuple[Tensors, ...]]) -> tuple[dict[str, tuple[Tensors, ...]], ...]:
    entries = list(groups.items())
    return dict(entries[: len(entries) // 2]), dict(entries[len(entries) // 2 :])


def explain_rejection(error: MeasurementError) -> str:
    """Return the reason of an error, without the prefix of ONNX Runtime's messages."""
    return (error.why or error.what).rpartition("Status Message: ")[2]
