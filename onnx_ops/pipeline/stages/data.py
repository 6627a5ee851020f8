"""Data: arrays from a source, under the names that the model uses."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData, PluginData, SklearnData, Stage
from onnx_ops.errors import ConflictError, UserError
from onnx_ops.measure.files import put_dataset
from onnx_ops.ports import Dataset, Ports

_MATRIX = "*"
"""In place of an array's name: all columns of numbers."""


def get_source_name(section: DataSection) -> str:
    """Return the name of the data source plugin of a data set."""
    match section:
        case FileData():
            return "file"
        case SklearnData():
            return "sklearn"
        case PluginData():
            return section.use


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    """Load the arrays and store the data set."""
    del key, inputs
    section = codec.from_json(stage.settings["section"], DataSection, where=stage.id)
    source = ports.source(get_source_name(section))
    arrays = source.load(section, ports.root)
    if source.fingerprint(section, ports.root) != stage.settings["fingerprint"]:
        raise ConflictError(
            "the data was changed after the run was planned",
            where=stage.id,
            remedy="Run again. In DVC, name a tag or a commit as `rev`: it does not move.",
        )
    return put_dataset(ports.store, build_dataset(arrays, section, stage.id))


def build_dataset(arrays: Mapping[str, Any], section: DataSection, where: str) -> Dataset:
    """Build the data set that a section defines from the arrays of its source.

    Raises:
        UserError: the first of `find_data_problems`.
    """
    for _, problem in find_data_problems(arrays, section, where):
        raise problem
    label = arrays[section.label] if section.label else None
    if label is not None and label.ndim == 2 and label.shape[1] == 1:  # a column of a table is one value a row
        label = label[:, 0]
    return Dataset(inputs=_select_inputs(arrays, section), label=label, **_read_groups(arrays, section))


def find_data_problems(
    arrays: Mapping[str, Any], section: DataSection, where: str
) -> Iterator[tuple[tuple[str | int, ...], UserError]]:
    """Yield why the arrays do not fit the section, with the location.

    The arrays may be the first rows of a larger set.
    """
    grouped = None if isinstance(section, SklearnData) else section.group
    columns = () if isinstance(section, SklearnData) else section.columns or ()
    required: list[tuple[tuple[str | int, ...], str]] = [
        (("inputs", name), array) for name, array in section.inputs.items() if array != _MATRIX
    ]
    required += [(("columns", index), name) for index, name in enumerate(columns)]
    required += [((key,), name) for key, name in (("label", section.label), ("group", grouped)) if name is not None]
    missing = [(loc, name) for loc, name in required if name not in arrays]
    for loc, name in missing:
        close = difflib.get_close_matches(name, list(arrays), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has: {', '.join(sorted(arrays))}."
        yield loc, UserError(f"the data set has no array {name!r}", where=where, remedy=hint)
    if missing:
        return
    chosen = _select_columns(arrays, section)
    for name, array in section.inputs.items():
        if array == _MATRIX and (problem := _find_matrix_problem({n: arrays[n] for n in chosen}, where)):
            yield ("inputs", name), problem
    if grouped is not None and (problem := _find_group_problem(arrays[grouped], grouped, where)):
        yield ("group",), problem
    used = {name for _, name in required}.union(chosen if _uses_all_columns(section) else ())
    lengths = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in sorted(used)}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        text = f"arrays must have the same number of rows, and at least one: {lengths}"
        yield (), UserError(text, where=where)


def _uses_all_columns(section: DataSection) -> bool:
    return not section.inputs or _MATRIX in section.inputs.values()


def _select_inputs(arrays: Mapping[str, Any], section: DataSection) -> dict[str, Any]:
    """Return the named inputs; without names each array; for `*` all columns of numbers side by side."""
    if not section.inputs:
        return {name: arrays[name] for name in _select_columns(arrays, section)}
    inputs = {name: arrays[array] for name, array in section.inputs.items() if array != _MATRIX}
    if _MATRIX in section.inputs.values():
        import numpy as np

        columns = [arrays[name] for name in _select_columns(arrays, section)]
        matrix = np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in columns], axis=1)
        inputs |= {name: matrix for name, array in section.inputs.items() if array == _MATRIX}
    return {name: inputs[name] for name in section.inputs}


def _select_columns(arrays: Mapping[str, Any], section: DataSection) -> list[str]:
    """Return the names of the arrays that become inputs without being named."""
    columns = None if isinstance(section, SklearnData) else section.columns
    if columns is not None:
        return list(columns)
    excluded = {section.label, None if isinstance(section, SklearnData) else section.group, *section.inputs.values()}
    return [name for name in arrays if name not in excluded]


def _find_matrix_problem(columns: Mapping[str, Any], where: str) -> UserError | None:
    for name, array in columns.items():
        if array.dtype.kind not in "fiub" or array.ndim > 2:
            return UserError(
                f"column {name!r} does not fit into a matrix of numbers: it is {array.dtype} {tuple(array.shape)}",
                where=where,
                remedy="Choose the columns (`columns: [age, income]`), or leave out `inputs`: one input a column.",
            )
    return None if columns else UserError("there is no column to make a matrix of", where=where)


def _find_group_problem(array: Any, name: str, where: str) -> UserError | None:
    from onnx_ops.statistics.grouping import number_groups  # needs numpy, which planning does not

    if number_groups(array) is not None:
        return None
    return UserError(
        f"the group must be one value a row, none of them missing; it is {array.dtype} {tuple(array.shape)}",
        where=f"{where}: group {name!r}",
        remedy="Name an array such as the patient's or the customer's number.",
    )


def _read_groups(arrays: Mapping[str, Any], section: DataSection) -> dict[str, Any]:
    """Return the group of each row by number, or the unnamed arrays that may hold it."""
    from onnx_ops.statistics.grouping import find_group_columns, number_groups

    name = None if isinstance(section, SklearnData) else section.group
    if name is not None:
        return {"group": number_groups(arrays[name])}
    chosen = _select_columns(arrays, section) if _uses_all_columns(section) else ()
    used = {*chosen, *section.inputs.values(), section.label}
    return {"columns": find_group_columns({n: array for n, array in arrays.items() if n not in used})}
