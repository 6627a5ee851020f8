"""Data stage: load arrays from a source, with the names that the model uses."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.pipeline import DataSection, FileData, PluginData, SklearnData
from onnx_ops.domain.plan import Stage
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.row_axes import count_common_rows
from onnx_ops.domain.table_cells import find_text_among_numbers
from onnx_ops.errors import ConflictError, UserError, suggest
from onnx_ops.measure.files import put_dataset
from onnx_ops.ports import Context, Dataset

Location = tuple[str | int, ...]
"""Path of keys and indices to a value of the section."""

LocatedError = tuple[Location, UserError]

_MATRIX = "*"
"""Value of an input that joins all columns into one matrix of numbers."""


def get_source_name(section: DataSection) -> str:
    """Return the name of the data source plugin of a data set."""
    match section:
        case FileData():
            return "file"
        case SklearnData():
            return "sklearn"
        case PluginData():
            return section.source


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
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
            remedy="Run again. In DVC, set `rev` to a tag or a commit, which does not change.",
        )
    return put_dataset(context.store, build_dataset(arrays, section, stage.id))


def build_dataset(arrays: Mapping[str, Any], section: DataSection, where: str) -> Dataset:
    """Build the data set that a section defines from the arrays of its source.

    Raises:
        UserError: the arrays do not fit the section.
    """
    for _, problem in find_data_problems(arrays, section, where):
        raise problem
    # This import loads NumPy, which is not needed for planning.
    from onnx_ops.statistics.grouping import find_group_columns, number_groups

    chosen = _select_columns(arrays, section) if _uses_all_columns(section) else []
    dataset = Dataset(
        inputs=_make_inputs(arrays, section, chosen),
        label=_read_label(arrays, section),
        values=_read_values(arrays, section),
        features={
            name: tuple(chosen) for name, array in section.inputs.items() if array == _MATRIX
        },
    )
    if (group := _get_group(section)) is not None:
        return replace(dataset, group=number_groups(arrays[group]))
    used = {*chosen, *section.inputs.values(), section.label, *_list_named_values(section).values()}
    rows = len(dataset)
    unused = {
        n: array
        for n, array in arrays.items()
        if n not in used and array.ndim and len(array) == rows
    }
    return replace(dataset, columns=find_group_columns(unused))


def _make_inputs(
    arrays: Mapping[str, Any], section: DataSection, chosen: Sequence[str]
) -> dict[str, Any]:
    """Return the arrays by input; by default, each chosen column is an input."""
    if not section.inputs:
        return {name: arrays[name] for name in chosen}
    if chosen:
        import numpy as np

        columns = [
            arrays[name].reshape(len(arrays[name]), -1).astype(np.float32) for name in chosen
        ]
        arrays = {**arrays, _MATRIX: np.concatenate(columns, axis=1)}
    return {name: arrays[array] for name, array in section.inputs.items()}


def _read_label(arrays: Mapping[str, Any], section: DataSection) -> Any:
    """Return the label, of shape (rows,) for a column of a table.

    The result is None if the section names none.
    """
    if not section.label:
        return None
    label = arrays[section.label]
    is_table_column = label.ndim == 2 and label.shape[1] == 1
    return label[:, 0] if is_table_column else label


def find_data_problems(
    arrays: Mapping[str, Any], section: DataSection, where: str
) -> Iterator[LocatedError]:
    """Yield each reason why the arrays do not fit the section, with its location.

    If arrays are missing, only these problems are yielded. The arrays can be the first rows of a
    larger set.
    """
    required = _list_required_arrays(section)
    missing = [(location, name) for location, name in required if name not in arrays]
    for location, name in missing:
        remedy = suggest(name, arrays, f"It has: {', '.join(sorted(arrays))}.")
        yield location, UserError(f"the data set has no array {name!r}", where=where, remedy=remedy)
    if missing:
        return
    chosen = _select_columns(arrays, section)
    yield from _find_matrix_problems({name: arrays[name] for name in chosen}, section, where)
    group = _get_group(section)
    if group is not None:
        yield from _find_group_problems(group, arrays[group], where)
    yield from _find_value_problems(section, where)
    with_rows = {name for location, name in required if location[0] != "values"}
    if _uses_all_columns(section):
        with_rows.update(chosen)
    yield from _find_row_problems(
        {name: arrays[name] for name in sorted(with_rows)},
        {name for name in (section.label, group) if name is not None},
        where,
    )


def _list_required_arrays(section: DataSection) -> list[tuple[Location, str]]:
    """Return the arrays that a section names, each with the location of its name."""
    columns = () if isinstance(section, SklearnData) else section.columns or ()
    keys = (("label", section.label), ("group", _get_group(section)))
    return [
        *((("inputs", name), array) for name, array in section.inputs.items() if array != _MATRIX),
        *((("values", name), array) for name, array in _list_named_values(section).items()),
        *((("columns", index), name) for index, name in enumerate(columns)),
        *(((key,), name) for key, name in keys if name is not None),
    ]


def _find_group_problems(name: str, array: Any, where: str) -> Iterator[LocatedError]:
    """Yield a problem if an array does not have one group per row."""
    # This import loads NumPy, which is not needed for planning.
    from onnx_ops.statistics.grouping import number_groups

    if number_groups(array) is None:
        text = (
            "the group must be one value per row, none of them missing; "
            f"its type is {array.dtype} and its shape {tuple(array.shape)}"
        )
        remedy = "Name an array such as the id of the patient or the customer."
        yield ("group",), UserError(text, where=f"{where}: group {name!r}", remedy=remedy)


def _find_value_problems(section: DataSection, where: str) -> Iterator[LocatedError]:
    """Yield a problem for each invalid value, and each value that is also an input."""
    import numpy as np

    for name, value in _get_values(section).items():
        if name in section.inputs:
            text = f"{name!r} is named in both 'inputs' and 'values'"
            yield (
                ("values", name),
                UserError(text, where=where, remedy="Remove it from one of the two."),
            )
        try:
            kind = np.asarray(value).dtype.kind
        except ValueError:  # NumPy cannot convert lists of different lengths.
            kind = "O"
        if kind not in "biufU":
            text = (
                f"the value of {name!r} is not a number, a boolean, a list of them, or the name of "
                "an array"
            )
            yield (
                ("values", name),
                UserError(text, where=where, remedy=f"For example: values: {{{name}: 16000}}"),
            )


def _find_row_problems(
    arrays: Mapping[str, Any], keys: Collection[str], where: str
) -> Iterator[LocatedError]:
    """Yield a problem if the arrays do not have the same number of rows.

    Only the model defines the axis of the rows. The arrays are therefore accepted if any choice of
    axes gives them the same number of rows. At least one input must have its rows on axis 0.
    """
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    shapes = {name: array.shape for name, array in arrays.items() if name not in keys}
    key_lengths = {lengths[name] for name in keys}
    if len(key_lengths) < 2:
        count = count_common_rows(shapes, max(key_lengths, default=0))
        if count and any(shape[0] == count for shape in shapes.values()):
            return
    text = (
        "all arrays must have the same number of rows, at least one, and one input must have them "
        f"on axis 0; the lengths of axis 0 are {lengths}"
    )
    single = next((name for name, shape in shapes.items() if not shape), "")
    remedy = (
        f"Give an input that is the same for all rows as a value: values: {{{single}: {single}}}."
    )
    yield (), UserError(text, where=where, remedy=remedy if single else "")


def _get_group(section: DataSection) -> str | None:
    return None if isinstance(section, SklearnData) else section.group


def _get_values(section: DataSection) -> Mapping[str, Json]:
    return {} if isinstance(section, SklearnData) else section.values


def _list_named_values(section: DataSection) -> dict[str, str]:
    """Return the names of the source's arrays that are values, by input."""
    return {name: value for name, value in _get_values(section).items() if isinstance(value, str)}


def _read_values(arrays: Mapping[str, Any], section: DataSection) -> dict[str, Any]:
    """Return the values as arrays; float64 becomes float32, as is usual in frameworks."""
    import numpy as np

    values = {
        name: arrays[value] if isinstance(value, str) else np.asarray(value)
        for name, value in _get_values(section).items()
    }
    return {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in values.items()
    }


def _uses_all_columns(section: DataSection) -> bool:
    return not section.inputs or _MATRIX in section.inputs.values()


def _select_columns(arrays: Mapping[str, Any], section: DataSection) -> list[str]:
    """Return the names of the columns.

    They are those of `columns`, or else all arrays that the section does not name.
    """
    columns = None if isinstance(section, SklearnData) else section.columns
    if columns is not None:
        return list(columns)
    excluded = {section.label, _get_group(section), *section.inputs.values()}
    excluded |= {*_get_values(section), *_list_named_values(section).values()}
    return [name for name in arrays if name not in excluded]


def _find_matrix_problems(
    columns: Mapping[str, Any], section: DataSection, where: str
) -> Iterator[LocatedError]:
    """Yield a problem for each matrix input if the columns do not fit into a matrix."""
    for name, array in section.inputs.items():
        if array == _MATRIX and (problem := _find_matrix_problem(columns, where)):
            yield ("inputs", name), problem


def describe_text_cell(column: Any) -> str:
    """Describe the text cell in a column whose other cells are mostly numbers.

    The result is empty if there is no such cell.
    """
    if column.dtype.kind not in "UO" or column.ndim != 2:
        return ""
    cell = find_text_among_numbers(column[:, 0].tolist())
    return (
        f"row {cell[0]} has {textwrap.shorten(cell[1], 60)!r}, and most other rows have numbers"
        if cell
        else ""
    )


def _find_matrix_problem(columns: Mapping[str, Any], where: str) -> UserError | None:
    for name, array in columns.items():
        if array.dtype.kind not in "fiub" or array.ndim > 2:
            return UserError(
                f"column {name!r} does not fit into a matrix of numbers: "
                f"its type is {array.dtype} and its shape {tuple(array.shape)}",
                where=where,
                why=describe_text_cell(array),
                remedy="Choose the columns (`columns: [age, income]`), or leave out `inputs`, "
                "so that each column is an input.",
            )
    return None if columns else UserError("there is no column for the matrix", where=where)
