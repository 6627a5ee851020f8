"""Data: arrays from a source, under the names that the model uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData, PluginData, SklearnData, Stage
from onnx_ops.errors import ConflictError, UserError, suggest
from onnx_ops.measure.files import put_dataset
from onnx_ops.ports import Context, Dataset

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


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context) -> Manifest:
    """Load the arrays and store the data set."""
    settings: Mapping[str, Any] = stage.settings
    section = codec.from_json(settings["section"], DataSection, where=stage.id)
    section = replace(section, inputs={name: section.inputs[name] for name in settings["inputs"]})
    source = context.source(get_source_name(section))
    arrays = source.load(section, context.root)
    if source.fingerprint(section, context.root) != settings["fingerprint"]:
        raise ConflictError(
            "the data was changed after the run was planned",
            where=stage.id,
            remedy="Run again. In DVC, name a tag or a commit as `rev`: it does not move.",
        )
    return put_dataset(context.store, build_dataset(arrays, section, stage.id))


def build_dataset(arrays: Mapping[str, Any], section: DataSection, where: str) -> Dataset:
    """Build the data set that a section defines from the arrays of its source."""
    for _, problem in find_data_problems(arrays, section, where):
        raise problem
    from onnx_ops.statistics.grouping import find_group_columns, number_groups  # needs numpy, which planning does not

    label = arrays[section.label] if section.label else None
    if label is not None and label.ndim == 2 and label.shape[1] == 1:  # a column of a table is one value per row
        label = label[:, 0]
    chosen = _select_columns(arrays, section) if _uses_all_columns(section) else []
    inputs = {name: arrays[name] for name in chosen}
    features = {name: tuple(chosen) for name, array in section.inputs.items() if array == _MATRIX}
    if section.inputs:
        if chosen:
            import numpy as np

            columns = [array.reshape(len(array), -1).astype(np.float32) for array in inputs.values()]
            arrays = {**arrays, _MATRIX: np.concatenate(columns, axis=1)}
        inputs = {name: arrays[array] for name, array in section.inputs.items()}
    if (group := _get_group(section)) is not None:
        return Dataset(inputs=inputs, label=label, group=number_groups(arrays[group]), features=features)
    used = {*chosen, *section.inputs.values(), section.label}
    unused = {name: array for name, array in arrays.items() if name not in used}
    return Dataset(inputs=inputs, label=label, columns=find_group_columns(unused), features=features)


def find_data_problems(
    arrays: Mapping[str, Any], section: DataSection, where: str
) -> Iterator[tuple[tuple[str | int, ...], UserError]]:
    """Yield each reason why the arrays do not fit the section, with its location.

    The arrays can be the first rows of a larger set.
    """
    grouped = _get_group(section)
    columns = () if isinstance(section, SklearnData) else section.columns or ()
    required: list[tuple[tuple[str | int, ...], str]] = [
        (("inputs", name), array) for name, array in section.inputs.items() if array != _MATRIX
    ]
    required += [(("columns", index), name) for index, name in enumerate(columns)]
    required += [((key,), name) for key, name in (("label", section.label), ("group", grouped)) if name is not None]
    missing = [(loc, name) for loc, name in required if name not in arrays]
    for loc, name in missing:
        remedy = suggest(name, arrays, f"It has: {', '.join(sorted(arrays))}.")
        yield loc, UserError(f"the data set has no array {name!r}", where=where, remedy=remedy)
    if missing:
        return
    chosen = _select_columns(arrays, section)
    for name, array in section.inputs.items():
        if array == _MATRIX and (problem := _find_matrix_problem({n: arrays[n] for n in chosen}, where)):
            yield ("inputs", name), problem
    if grouped is not None:
        from onnx_ops.statistics.grouping import number_groups  # needs numpy, which planning does not

        array = arrays[grouped]
        if number_groups(array) is None:
            text = f"it is {array.dtype} {tuple(array.shape)}"
            remedy = "Name an array such as the id of the patient or the customer."
            yield (
                ("group",),
                UserError(
                    f"the group must be one value per row, none of them missing; {text}",
                    where=f"{where}: group {grouped!r}",
                    remedy=remedy,
                ),
            )
    used = {name for _, name in required}.union(chosen if _uses_all_columns(section) else ())
    lengths = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in sorted(used)}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        text = f"arrays must have the same number of rows, and at least one: {lengths}"
        yield (), UserError(text, where=where)


def _get_group(section: DataSection) -> str | None:
    return None if isinstance(section, SklearnData) else section.group


def _uses_all_columns(section: DataSection) -> bool:
    return not section.inputs or _MATRIX in section.inputs.values()


def _select_columns(arrays: Mapping[str, Any], section: DataSection) -> list[str]:
    """Return the names of the arrays that become inputs without being named."""
    columns = None if isinstance(section, SklearnData) else section.columns
    if columns is not None:
        return list(columns)
    excluded = {section.label, _get_group(section), *section.inputs.values()}
    return [name for name in arrays if name not in excluded]


def _find_matrix_problem(columns: Mapping[str, Any], where: str) -> UserError | None:
    for name, array in columns.items():
        if array.dtype.kind not in "fiub" or array.ndim > 2:
            return UserError(
                f"column {name!r} does not fit into a matrix of numbers: it is {array.dtype} {tuple(array.shape)}",
                where=where,
                remedy="Choose the columns (`columns: [age, income]`), or leave out `inputs`: one input per column.",
            )
    return None if columns else UserError("there is no column for the matrix", where=where)
