"""Data: arrays from a source, under the names the model uses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData, PluginData, SklearnData, Stage
from onnx_ops.errors import Conflict, UserError
from onnx_ops.ports import Dataset, Ports, TracedSource
from onnx_ops.stages.files import put_dataset

_MATRIX = "*"
"""In place of an array's name: all columns of numbers."""


def source_of(section: DataSection) -> str:
    """Name of the data source plugin that brings a data set."""
    match section:
        case FileData():
            return "file"
        case SklearnData():
            return "sklearn"
        case PluginData():
            return section.use


def execute(stage: Stage, key: Digest, inputs: Mapping[str, Manifest], ports: Ports) -> Manifest:
    del key, inputs
    section = codec.from_json(stage.settings["section"], DataSection, where=stage.id)
    source = ports.source(source_of(section))
    arrays = source.load(section, ports.root)
    if isinstance(source, TracedSource) and source.fingerprint(section, ports.root) != stage.settings["fingerprint"]:
        raise Conflict(
            "the data was changed after the run was planned",
            where=stage.id,
            why="its revision names other content now",
            remedy="Run again; a tag or commit as `rev` does not move.",
        )
    dataset = Dataset(
        inputs=_inputs(arrays, section, stage.id),
        label=_label(_pick(arrays, section.label, stage.id)) if section.label else None,
        **_grouping(arrays, section, stage.id),
    )
    others = {"label": dataset.label, "group": dataset.group}
    lengths = {name: len(array) for name, array in {**dataset.inputs, **others}.items() if array is not None}
    if len(set(lengths.values())) != 1 or not len(dataset):
        raise UserError(f"arrays must have the same number of rows, and at least one: {lengths}", where=stage.id)
    return put_dataset(ports.store, dataset)


def _takes_all(section: DataSection) -> bool:
    return not section.inputs or _MATRIX in section.inputs.values()


def _inputs(arrays: Mapping[str, Any], section: DataSection, where: str) -> dict[str, Any]:
    """The inputs that are named; where none is, each array; for `*` all columns of numbers side by side."""
    if not section.inputs:
        return {name: arrays[name] for name in _columns(arrays, section, where)}
    return {
        name: _matrix({one: arrays[one] for one in _columns(arrays, section, where)}, where)
        if array == _MATRIX
        else _pick(arrays, array, where)
        for name, array in section.inputs.items()
    }


def _columns(arrays: Mapping[str, Any], section: DataSection, where: str) -> list[str]:
    """Names of the arrays that become inputs without being named one by one."""
    chosen = None if isinstance(section, SklearnData) else section.columns
    if chosen is not None:
        return [name for name in chosen if _pick(arrays, name, where) is not None]
    aside = {section.label, None if isinstance(section, SklearnData) else section.group, *section.inputs.values()}
    return [name for name in arrays if name not in aside]


def _matrix(columns: Mapping[str, Any], where: str) -> Any:
    import numpy as np

    for name, array in columns.items():
        if array.dtype.kind not in "fiub" or array.ndim > 2:
            raise UserError(
                f"column {name!r} does not fit into a matrix of numbers: it is {array.dtype} {tuple(array.shape)}",
                where=where,
                remedy="Choose the columns (`columns: [age, income]`), or leave out `inputs`: one input a column.",
            )
    return np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in columns.values()], axis=1)


def _label(array: Any) -> Any:
    """A column of a table is one value a row."""
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _grouping(arrays: Mapping[str, Any], section: DataSection, where: str) -> dict[str, Any]:
    """The group of each row by number, or the arrays that nothing names and that may tell it."""
    from onnx_ops.analysis.grouping import group_columns, group_numbers  # numpy: what names a source needs none

    name = None if isinstance(section, SklearnData) else section.group
    if name is None:
        used = {
            *(_columns(arrays, section, where) if _takes_all(section) else ()),
            *section.inputs.values(),
            section.label,
        }
        return {"columns": group_columns({n: array for n, array in arrays.items() if n not in used})}
    numbers = group_numbers(_pick(arrays, name, where))
    if numbers is None:
        array = arrays[name]
        raise UserError(
            f"the group must be one value a row, none of them missing; it is {array.dtype} {tuple(array.shape)}",
            where=f"{where}: group {name!r}",
            remedy="Name an array such as the patient's or the customer's number.",
        )
    return {"group": numbers}


def _pick(arrays: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in arrays:
        close = difflib.get_close_matches(name, list(arrays), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has: {', '.join(sorted(arrays))}."
        raise UserError(f"the data set has no array {name!r}", where=where, remedy=hint)
    return arrays[name]
