"""Columns of a CSV or Parquet file as arrays of shape (rows, 1), read by pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx_ops.errors import UserError, quoted
from onnx_ops.plugins import require
from onnx_ops.ports.data import Array

SUFFIXES = (".csv", ".parquet")

_MOST_BYTES = (1 << 31) - 1
"""pyarrow learns the types of a CSV file's columns from one block, which is the whole file here."""

_MOST_COLUMNS = 4096
_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]


def read_table(path: Path, suffix: str, *, where: str, most_bytes: int | None = None) -> Mapping[str, Array]:
    """All columns of a table, by name; with `most_bytes` so much of its first rows.

    Whole numbers are int64, fractions float32, truth values bool, everything else text; categories are text. A missing
    value is NaN, which makes a column of numbers or truth values float32; in a column of text it is the empty text.

    Raises:
        MissingPackageError: pyarrow is not installed.
        UserError: it is no such table, or holds a column of another type.
    """
    require("pyarrow", where=where)
    arrow = importlib.import_module("pyarrow")
    try:
        table = _read_csv(arrow, path, most_bytes) if suffix == ".csv" else _read_parquet(arrow, path, most_bytes)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"not a table in {suffix.removeprefix('.').upper()}",
            where=where,
            why=quoted(error),
            remedy="The first line of a CSV file names the columns, every other has as many cells, in UTF-8."
            if suffix == ".csv"
            else "",
        ) from error
    names = table.column_names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"the table repeats the column {repeated[0]!r}", where=where)
    if "" in names:
        raise UserError(f"column {names.index('') + 1} of the table has no name", where=where)
    if not table.num_rows:
        raise UserError("the table has no rows", where=where)
    return {name: _array(arrow, table.column(name), f"{where}: column {name!r}") for name in names}


def _read_csv(arrow: Any, path: Path, most_bytes: int | None) -> Any:
    csv = importlib.import_module("pyarrow.csv")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"it has {size / 1e9:.3g} GB; a CSV file may have 2, so write it as Parquet")
    with path.open("rb") as stream:
        names = stream.readline(1 << 20).decode("utf-8-sig", "replace").count(",")
    if names >= _MOST_COLUMNS:
        raise ValueError(f"its first line names {names + 1} columns; a table may have {_MOST_COLUMNS}")

    def read(texts: list[str]) -> Any:
        call = csv.read_csv if most_bytes is None else csv.open_csv
        found = call(
            path,
            read_options=csv.ReadOptions(
                block_size=max(min(size + 1, most_bytes or size + 1), 1 << 16), use_threads=False
            ),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                true_values=_TRUE, false_values=_FALSE, column_types={name: arrow.string() for name in texts}
            ),
        )
        if most_bytes is None:
            return found
        with found:
            return arrow.Table.from_batches([found.read_next_batch()])

    table = read([])
    dates = [f.name for f in table.schema if arrow.types.is_temporal(f.type)]
    return read(dates) if dates else table  # a date stays the text that callers send


def _read_parquet(arrow: Any, path: Path, most_bytes: int | None) -> Any:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        if len(file.schema_arrow.names) > _MOST_COLUMNS:
            raise ValueError(f"it has {len(file.schema_arrow.names)} columns; a table may have {_MOST_COLUMNS}")
        if most_bytes is None or not file.metadata.num_rows:
            table = file.read()
        else:
            row_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            rows = max(1, most_bytes * file.metadata.num_rows // max(1, row_bytes))
            table = arrow.Table.from_batches([next(file.iter_batches(batch_size=rows))])
    return table.drop_columns([name for name in table.column_names if name.startswith("__index_level_")])


def _array(arrow: Any, column: Any, where: str) -> Array:
    import numpy as np

    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if kinds.is_temporal(kind) and not kinds.is_duration(kind):
        column, kind = column.cast(arrow.string()), arrow.string()
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        texts = ["" if value is None else value for value in column.to_pylist()]
        if any("\0" in text for text in texts):
            raise UserError("a text holds a zero byte", where=where)
        return np.array(texts, dtype=np.str_)[:, None]
    if kinds.is_decimal(kind):
        column, kind = column.cast(arrow.float64()), arrow.float64()
    if kinds.is_floating(kind) or kinds.is_null(kind) or (column.null_count and _is_whole(kinds, kind)):
        values = column.cast(arrow.float64() if not kinds.is_boolean(kind) else arrow.int8())
        return np.asarray(values.cast(arrow.float64()).to_numpy(), dtype=np.float32)[:, None]
    if kinds.is_boolean(kind):
        return np.asarray(column.to_numpy(), dtype=np.bool_)[:, None]
    if kinds.is_integer(kind):
        return np.asarray(column.cast(arrow.int64()).to_numpy(), dtype=np.int64)[:, None]
    raise UserError(
        f"the column is of type {kind}",
        where=where,
        remedy="Columns hold numbers, truth values, texts, categories or dates; leave this one out of the file.",
    )


def _is_whole(kinds: Any, kind: Any) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_boolean(kind))
