"""Find inputs that change no answer of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from onnx_ops.domain.target import Target
from onnx_ops.errors import MeasurementError
from onnx_ops.measure.files import slice_rows
from onnx_ops.measure.reference_outputs import ReferenceGroup, find_real_group
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.ports import Runtime, Tensors
from onnx_ops.ports.data import Array
from onnx_ops.statistics.probes import REAL

_ROWS = 512
_BYTES = 1 << 26
"""Approximate maximum of the bytes of the inputs and answers of all runs together.

A model with large inputs or answers runs on fewer rows, but on at least two. A fixed batch is not
limited.
"""


def find_unused_inputs(
    runtime: Runtime, model: Path, target: Target, groups: Sequence[ReferenceGroup]
) -> tuple[str, ...]:
    """Return the inputs whose values change no answer to real rows.

    Each input in turn is replaced by its values from other rows, and by those from another group.
    Only an input with different values is returned. The result is empty if the model rejects the
    real rows or a replacement.
    """
    real = find_real_group(groups)
    if real is None:
        return ()
    rows = real.inputs if read_model_info(model).fixed_batch else _select_rows(real)
    replaced = [(name, array) for name in rows for array in _list_replacements(name, rows, groups)]
    try:
        plain, *others = runtime.run(
            model, target, (rows, *({**rows, name: array} for name, array in replaced))
        )
    except MeasurementError:
        return ()
    names = [name for name, _ in replaced]
    changing = {
        name for name, answers in zip(names, others, strict=True) if not _are_equal(plain, answers)
    }
    return tuple(name for name in dict.fromkeys(names) if name not in changing)


def _select_rows(real: ReferenceGroup) -> Tensors:
    """Return as many real rows as fit into `_BYTES`.

    The model runs with these rows, and then up to twice for each input with replaced values. At
    most `_ROWS` rows are returned, and at least 2 if the group has 2.
    """
    total = len(next(iter(real.inputs.values())))
    tensors = [*real.inputs.values(), *(real.single or real.double or {}).values()]
    row_bytes = sum(array.nbytes for array in tensors) // max(1, total)
    affordable = max(2, min(_ROWS, _BYTES // max(1, row_bytes * (1 + 2 * len(real.inputs)))))
    return slice_rows(real.inputs, 0, min(total, affordable))


def _list_replacements(
    name: str, rows: Tensors, groups: Sequence[ReferenceGroup]
) -> Iterator[Array]:
    """Yield other values of an input that callers can send.

    They are the values of the previous row, and those of one other group.
    """
    array = rows[name]
    others = [np.roll(array, 1, axis=0)]
    for group in (group for group in groups if group.inside):
        if (
            group.name != REAL
            and group.inputs[name].shape[1:] == array.shape[1:]
            and len(group.inputs[name])
        ):
            others.append(np.resize(group.inputs[name], array.shape))
            break
    yield from (other for other in others if not _is_same(other, array))


def _are_equal(one: Tensors, other: Tensors) -> bool:
    return all(_is_same(array, other[name]) for name, array in one.items())


def _is_same(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
