"""Input rows that the user supplies, checked against a model's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.domain.row_axes import (
    find_batch_symbol,
    find_row_axes,
    find_sized_axes,
    guess_row_axes,
    is_free,
    move_axis_first,
)
from onnx_ops.errors import UserError
from onnx_ops.measure.row_layout import fit_value, read_dtype, remove_axis
from onnx_ops.ports import Tensors
from onnx_ops.statistics.probes import make_sized_inputs
from onnx_ops.tools.model_inputs import check_fixed_names, find_batch, format_shape
from onnx_ops.tools.sample_rows import SampleRows


def check_samples(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, Any],
    *,
    where: str,
    limit: int,
    fix: Mapping[str, Any] | None = None,
) -> SampleRows:
    """Return the user's rows, checked against the inputs; other arrays are ignored.

    Args:
        where: place of the arrays, for errors.
        limit: maximum number of rows.
        fix: values of inputs, in place of arrays.

    Raises:
        UserError: an input is missing, or has another shape or type. The same error is raised if
            there are no rows, or if their numbers differ although the model takes equal numbers. It
            is also raised if a value of `fix` has an unknown name or does not fit its input.
    """
    values = fix or {}
    check_fixed_names(inputs, values)
    axes = _find_supplied_axes(inputs, arrays)
    arranged = _arrange_arrays(inputs, arrays, values, axes, where)
    counts = {name: len(arranged[name]) for name in axes}
    if len(set(counts.values())) > 1 and _are_independent(inputs, axes):
        axes = {}  # The arrays form a single request, so no axis counts rows.
    else:
        _check_row_counts(counts, axes, where)
    samples = SampleRows(
        rows={name: arranged[name][:limit] for name in axes},
        fixed={name: array for name, array in arranged.items() if name not in axes},
        batch=find_batch(inputs, axes, {}),
        axes=axes,
    )
    return (
        samples if samples.large or not axes else replace(samples, further=_resize(samples, inputs))
    )


def _arrange_arrays(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, Any],
    values: Mapping[str, Any],
    axes: Mapping[str, int],
    where: str,
) -> dict[str, Any]:
    """Return the arrays with rows on axis 0, and the values of inputs.

    The value of an input with rows is repeated to the number of rows.
    """
    arranged = {
        spec.name: _read_array(spec, arrays, axes, inputs, where)
        for spec in inputs
        if spec.name not in values
    }
    count = max((len(arranged[name]) for name in axes if name in arranged), default=1)
    return arranged | _fit_values(inputs, values, axes, count)


def _find_supplied_axes(inputs: Sequence[TensorSpec], arrays: Mapping[str, Any]) -> dict[str, int]:
    """Return the axes of rows, from the dimensions' names or the arrays' sizes."""
    shapes = {spec.name: spec.shape for spec in inputs}
    if axes := find_row_axes(shapes):
        return axes
    sizes = {name: arrays[name].shape for name in shapes if name in arrays}
    have_same_ranks = all(len(shapes[name]) == len(size) for name, size in sizes.items())
    return guess_row_axes(shapes, sizes) if have_same_ranks else {}


def _are_independent(inputs: Sequence[TensorSpec], axes: Mapping[str, int]) -> bool:
    """Return whether the axes can have different numbers of rows.

    The numbers can differ if neither a name nor a fixed size makes them equal.
    """
    return not find_batch(inputs, axes, {}) and not find_batch_symbol(
        {spec.name: spec.shape for spec in inputs}
    )


def _check_row_counts(counts: Mapping[str, int], axes: Mapping[str, int], where: str) -> None:
    """Raise UserError if the arrays have different numbers of rows, or no rows."""
    if len(set(counts.values())) > 1 or 0 in counts.values():
        text = ", ".join(f"{name} {count} on axis {axes[name]}" for name, count in counts.items())
        what = "no rows" if max(counts.values()) == 0 else "different numbers of rows"
        raise UserError(f"the arrays have {what}: {text}", where=where)


def _fit_values(
    inputs: Sequence[TensorSpec], values: Mapping[str, Any], axes: Mapping[str, int], count: int
) -> dict[str, Any]:
    """Return the values as arrays of their inputs.

    Values of inputs with rows are repeated `count` times.
    """
    arranged: dict[str, Any] = {}
    for spec in inputs:
        if spec.name not in values:
            continue
        if spec.name in axes:
            row = fit_value(values[spec.name], remove_axis(spec, axes[spec.name]))
            arranged[spec.name] = np.repeat(row[None], count, axis=0)
        else:
            arranged[spec.name] = fit_value(values[spec.name], spec)
    return arranged


def _read_array(
    spec: TensorSpec,
    arrays: Mapping[str, Any],
    axes: Mapping[str, int],
    inputs: Sequence[TensorSpec],
    where: str,
) -> Any:
    """Return one array in the input's type, with rows on axis 0."""
    if spec.name not in arrays:
        raise _make_missing_error(spec, arrays, axes, inputs, where)
    kind, axis = read_dtype(spec), axes.get(spec.name)
    array = arrays[spec.name] if spec.shape else _read_scalar(spec, arrays[spec.name], where)
    if not _has_shape(spec, array, axis):
        what = (
            f"array {spec.name!r} has shape {array.shape}, but the model takes {format_shape(spec)}"
        )
        raise UserError(what, where=where)
    if kind.kind == "U" and array.dtype.kind in "USO":
        kind = array.dtype if array.dtype.kind == "O" else np.dtype(np.str_)
    elif kind.kind == "U" or not np.can_cast(array.dtype, kind, casting="same_kind"):
        what = f"array {spec.name!r} is of type {array.dtype}, but the model takes {spec.dtype}"
        raise UserError(what, where=where)
    rows = np.moveaxis(array, axis, 0) if axis else array
    # `ascontiguousarray` would convert a scalar to an array of one element.
    return np.asarray(rows, dtype=kind, order="C")


def _make_missing_error(
    spec: TensorSpec,
    arrays: Mapping[str, Any],
    axes: Mapping[str, int],
    inputs: Sequence[TensorSpec],
    where: str,
) -> UserError:
    remedy = "Save the arrays under the names of the model's inputs: numpy.savez(FILE, NAME=array)."
    return UserError(
        f"the file has no array {spec.name!r}",
        where=where,
        why=f"the model takes {', '.join(s.name for s in inputs)}; "
        f"the file has {', '.join(arrays) or 'none'}",
        remedy=remedy
        if spec.name in axes
        else f"Set the value for all rows: --fix {spec.name}=VALUE.",
    )


def _read_scalar(spec: TensorSpec, array: Any, where: str) -> Any:
    """Return the only value of an array; a table repeats it in each row."""
    values = np.unique(array)
    if len(values) == 1:
        return values[0]
    raise UserError(
        f"array {spec.name!r} has {len(values)} different values, but the model takes a scalar",
        where=where,
        why="a scalar has no rows: one request has one value",
        remedy="Judge the rows of each value separately, or set one value: "
        f"--fix {spec.name}=VALUE.",
    )


def _resize(samples: SampleRows, inputs: Sequence[TensorSpec]) -> dict[str, Tensors]:
    """Return real rows, cut or repeated to other sizes, by the name of the sizes."""
    shapes = {
        s.name: move_axis_first(s.shape, samples.axes[s.name])
        for s in inputs
        if s.name in samples.axes
    }
    return make_sized_inputs(samples.rows, find_sized_axes(shapes))


def find_input_problems(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield why a model cannot accept these arrays, by input.

    Missing inputs are yielded alone, with an empty name. Only `values` are converted, unlike in
    `check_samples`: a pipeline passes the data set's arrays on unchanged.
    """
    if missing := [spec.name for spec in inputs if spec.name not in (*arrays, *values)]:
        names = ", ".join(map(repr, missing))
        yield (
            "",
            f"the model takes {names}, but the data set supplies {', '.join(map(repr, arrays))}",
        )
        return
    axes = find_row_axes({spec.name: spec.shape for spec in inputs})
    for spec in inputs:
        if spec.name in values:
            yield from _find_value_problems(spec, values[spec.name], axes.get(spec.name))
        else:
            yield from _find_array_problems(spec, arrays[spec.name], axes.get(spec.name, 0))
    known = [spec.name for spec in inputs]
    for name in (*arrays, *values):
        if name not in known:
            yield name, f"the model has no input {name!r}; its inputs: {', '.join(known)}"


def _find_array_problems(spec: TensorSpec, array: Any, axis: int) -> Iterator[tuple[str, str]]:
    """Yield why an array with rows on this axis does not fit an input."""
    if not _has_shape(spec, array, axis):
        shape = " × ".join(
            "rows" if place == axis else str(size) for place, size in enumerate(array.shape)
        )
        text = f"{spec.name!r} is of shape {shape}, but the model takes {format_shape(spec)}"
        yield spec.name, text if spec.shape else f"{text}. Set its value under `values:`"
        return
    has_type = (
        array.dtype.kind in "USO" if spec.dtype == "string" else array.dtype == read_dtype(spec)
    )
    if has_type:
        return
    text = f"{spec.name!r} is of type {array.dtype}, but the model takes {spec.dtype}"
    are_numbers = array.dtype.kind in "biuf" and spec.dtype != "string"
    yield spec.name, f"{text}. Convert it: array.astype({spec.dtype!r})" if are_numbers else text


def _find_value_problems(
    spec: TensorSpec, value: Any, axis: int | None
) -> Iterator[tuple[str, str]]:
    """Yield why a value that is the same in every row does not fit an input."""
    try:
        fit_value(value, spec if axis is None else remove_axis(spec, axis))
    except UserError as error:
        yield spec.name, error.without_place()


def _has_shape(spec: TensorSpec, array: Any, rows: int | None) -> bool:
    """Return whether an array has the shape of an input.

    The size of axis `rows` is the number of rows, which can differ.
    """
    if len(spec.shape) != array.ndim:
        return False
    pairs = enumerate(zip(spec.shape, array.shape, strict=True))
    return all(axis == rows or is_free(size) or size == actual for axis, (size, actual) in pairs)
