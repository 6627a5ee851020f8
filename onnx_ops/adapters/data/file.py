"""Read arrays from .npz, .csv and .parquet files of the project."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import DataSection, FileData
from onnx_ops.errors import NotFoundError, RefusedError, UserError, describe_error, quoted
from onnx_ops.plugins import require
from onnx_ops.ports import DataSource
from onnx_ops.ports.data import Array, Sample

_SMALL_BYTES = 16 << 20
"""Files up to this size are read whole when their first rows are requested."""

_HEAD_BYTES = 8 << 20

_POINTER = b"version https://git-lfs"
"""Start of the pointer file that Git LFS leaves in place of a file."""


class FileSource(DataSource):
    """`file: PATH`. Nothing is unpickled, and the path stays below the project's root."""

    def fingerprint(self, section: DataSection, root: Path) -> str:
        """Return the digest of the file."""
        return digest_file(_path(section, root))

    def load(self, section: DataSection, root: Path) -> Mapping[str, Array]:
        """Read all arrays or columns of the file."""
        path = _path(section, root)
        return read_arrays(path, where=str(path))

    def sample(self, section: DataSection, root: Path) -> Sample:
        """Read the first rows of the file."""
        path = _path(section, root)
        return sample_arrays(path, where=str(path))


def sample_arrays(path: Path, *, where: str) -> Sample:
    """Read the first rows of a file, all if it is small; raises as `read_arrays`."""
    whole = path.stat().st_size <= _SMALL_BYTES
    return Sample(arrays=read_arrays(path, where=where, most_bytes=None if whole else _HEAD_BYTES), whole=whole)


def read_arrays(path: Path, *, where: str, name: str = "", most_bytes: int | None = None) -> Mapping[str, Array]:
    """Read the arrays of a `.npz` file or the columns of a table.

    Nothing is unpickled. The suffix of `name`, the file's original name, gives
    the format. With `most_bytes`, the first rows of each array are read.
    """
    suffix = Path(name or path).suffix.lower()
    with path.open("rb") as stream:
        head = stream.read(len(_POINTER))
    if head == _POINTER:
        remedy = "Fetch the file: git lfs pull"
        raise UserError("the file is a pointer of Git LFS, not the data", where=where, remedy=remedy)
    if not head:
        raise UserError("the file is empty", where=where, remedy="Recreate the file, or fetch it again.")
    if suffix in SUFFIXES:
        return read_table(path, suffix, where=where, most_bytes=most_bytes)
    import numpy as np

    try:
        with path.open("rb") as stream:
            if stream.peek(2)[:2] != b"PK":  # the first bytes of a zip archive; `numpy.savez` writes one
                raise ValueError(f"it is not an archive: it begins with {stream.peek(16)[:16]!r}")
            archive = np.load(stream, allow_pickle=False)
            if most_bytes is None:
                arrays = {name: archive[name] for name in archive.files}
                shapes = {name: getattr(array, "shape", ()) for name, array in arrays.items()}
            else:
                shapes, arrays = _read_head(archive, most_bytes)
            if strange := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
                raise ValueError(f"{strange[0]} in it is not an array")
    except Exception as error:  # a damaged archive makes the libraries below raise almost anything
        raise UserError(
            "not an .npz file of plain arrays",
            where=where,
            why="an array of objects, which only a pickle can hold"
            if "allow_pickle" in str(error)
            else describe_error(error),
            remedy="Write it with numpy.savez, without arrays of objects; a table must be called .csv or .parquet.",
        ) from error
    if not arrays or (empty := [name for name, shape in shapes.items() if 0 in shape]):
        what = f"its array {empty[0]!r} is empty: shape {shapes[empty[0]]}" if arrays else "it holds no array"
        raise UserError(what, where=where, remedy="Write at least one row.")
    return arrays


def _read_head(archive: Any, most_bytes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of all arrays, and their first rows: as many as fit into so many bytes, at least one."""
    import numpy as np
    from numpy.lib import format as npy

    headers: dict[str, tuple[tuple[int, ...], bool, Any]] = {}
    for name in archive.files:
        with archive.zip.open(f"{name}.npy") as stream:
            headers[name] = _header(npy, stream)
    row_bytes = sum(int(np.prod(shape[1:], dtype=object)) * dtype.itemsize for shape, _, dtype in headers.values())
    rows = max(1, most_bytes // max(1, row_bytes))
    arrays: dict[str, Any] = {}
    for name, (shape, by_column, dtype) in headers.items():
        first = (min(rows, shape[0]), *shape[1:]) if shape else ()
        if by_column and len(shape) > 1:  # its first rows are spread over the whole file
            arrays[name] = np.zeros(first, dtype)
            continue
        with archive.zip.open(f"{name}.npy") as stream:
            _header(npy, stream)
            wanted = int(np.prod(first, dtype=object)) * dtype.itemsize
            arrays[name] = np.frombuffer(stream.read(wanted), dtype).reshape(first)
    return {name: shape for name, (shape, _, _) in headers.items()}, arrays


def _header(npy: Any, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, Any]:
    """Read shape, Fortran order and type of an array up to the start of its values."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
    return shape, by_column, dtype


def _path(section: DataSection, root: Path) -> Path:
    if not isinstance(section, FileData):
        raise UserError("this data source reads `file: PATH`", where=type(section).__name__)
    try:
        path = (root / section.file).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte
        raise NotFoundError("no such file", where=section.file, why=str(error)) from error
    if not path.is_relative_to(root.resolve()):
        raise RefusedError("data must lie below the project's root", where=section.file)
    if os.path.isdir(path):
        raise NotFoundError("a folder, not a file", where=str(path), remedy="Name one .npz, .csv or .parquet file.")
    if os.path.isfile(path):  # unlike Path.is_file, it takes a name that is too long
        return path
    remedy = "`file:` is relative to the project's root."
    with contextlib.suppress(OSError):
        names = {Path(name).stem: name for name in sorted(os.listdir(path.parent))}
        if close := difflib.get_close_matches(path.stem, names, n=1, cutoff=0.7):
            remedy = f"Did you mean {names[close[0]]!r}?"
    if os.path.isfile(f"{path}.dvc"):
        remedy = f"Fetch it: dvc pull {path.name}.dvc; or read it from DVC: `use: dvc`."
    raise NotFoundError("no such file", where=str(path), remedy=remedy)


SUFFIXES = (".csv", ".parquet")

_MOST_COLUMNS = 4096


def read_table(path: Path, suffix: str, *, where: str, most_bytes: int | None = None) -> Mapping[str, Array]:
    """Read the columns of a table by name; `most_bytes` limits the rows.

    Whole numbers are int64, fractions float32, booleans bool, everything else text; categories are text. A missing
    value is NaN, which makes a column of numbers or booleans float32; in a column of text it is the empty text.
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
    # pyarrow learns the types of the columns from one block, which is the whole file here.
    if size >= 1 << 31:
        raise ValueError(f"it has {size / 1e9:.3g} GB; a CSV file may have 2 GB; write it as Parquet")
    with path.open("rb") as stream:
        names = stream.readline(1 << 20).decode("utf-8-sig", "replace").count(",")
    if names >= _MOST_COLUMNS:
        raise ValueError(f"its first line names {names + 1} columns; a table may have {_MOST_COLUMNS}")

    def read(texts: list[str]) -> Any:
        call = csv.read_csv if most_bytes is None else csv.open_csv
        result = call(
            path,
            read_options=csv.ReadOptions(
                block_size=max(min(size + 1, most_bytes or size + 1), 1 << 16), use_threads=False
            ),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
                column_types={name: arrow.string() for name in texts},
            ),
        )
        if most_bytes is None:
            return result
        with result:
            return arrow.Table.from_batches([result.read_next_batch()])

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
    has_gaps = column.null_count and (kinds.is_integer(kind) or kinds.is_boolean(kind))
    if kinds.is_floating(kind) or kinds.is_null(kind) or has_gaps:
        values = column.cast(arrow.float64() if not kinds.is_boolean(kind) else arrow.int8())
        return np.asarray(values.cast(arrow.float64()).to_numpy(), dtype=np.float32)[:, None]
    if kinds.is_boolean(kind):
        return np.asarray(column.to_numpy(), dtype=np.bool_)[:, None]
    if kinds.is_integer(kind):
        return np.asarray(column.cast(arrow.int64()).to_numpy(), dtype=np.int64)[:, None]
    remedy = "Columns hold numbers, booleans, texts, categories or dates; leave this one out of the file."
    raise UserError(f"the column is of type {kind}", where=where, remedy=remedy)
