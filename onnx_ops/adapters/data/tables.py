"""Readers of the columns of tables.

Formats are CSV in the dialects that spreadsheets write, Parquet, and JSON Lines.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib
import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_ops.errors import UserError, quoted
from onnx_ops.plugins import require
from onnx_ops.ports.data import Array

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".jsonl", ".ndjson")
"""Suffixes of the names of files that contain a table."""

_MOST_COLUMNS = 4096

_MOST_CSV_BYTES = 1 << 31
"""Size in bytes that a CSV or JSON Lines file must not reach.

pyarrow infers the types of the columns from one block. Without `most_bytes`, this block is the
whole file. The limit for a compressed file is on its decompressed size.
"""

_HEAD_BYTES = 1 << 20
"""Bytes at the start of a file that determine its dialect.

The dialect is the encoding, the separator and the decimal mark.
"""

_HEAD_RECORDS = 50
"""Maximum number of records that show the separator and the decimal mark."""

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}

_MISSING = (
    *(
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "N/A",
        "NA",
    ),
    *("NULL", "NaN", "n/a", "nan", "null", "None", "none", "?", "-", "--", ".", " ", "  ", "   "),
)
"""Cells that mean a missing value in a column of numbers or booleans.

In a column of text, they are texts.
"""

_INDEX_NAMES = ("", "Unnamed: 0")
"""Names that pandas and R give to a first column of row labels."""

_CHUNK_ROWS = 1 << 16

_WIDTH_RATIO = 6
"""Largest ratio of the bytes of a fixed-width array to the bytes of its texts.

Above this ratio, and above 1 MiB, texts are stored as Python objects.
"""

_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as Excel writes it; save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old Excel file; save the sheet as CSV",
    b"PAR1": "a Parquet file; rename it to end in .parquet",
    b"\x1f\x8b\x08\x00": "compressed with gzip; rename it to end in .csv.gz",
}
"""First bytes of files that are often renamed to CSV."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def find_table_suffix(name: str) -> str:
    """Return the suffix of `SUFFIXES` that a file name has; empty if it has none."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def read_table(
    path: Path, suffix: str, *, where: str, most_bytes: int | None = None
) -> Mapping[str, Array]:
    """Read the columns of a table by name; `most_bytes` limits the rows.

    Each array has the shape (rows, 1). Whole numbers are int64, fractions are float32, and booleans
    are bool. Dates and identifiers are text, and categories have the type of their values.
    Identifiers are whole numbers with a leading zero or beyond int64, or beyond 53 bits in a column
    with a missing value. Decimals of scale 0 are whole numbers.

    A missing value is NaN, which makes a column of numbers or booleans float32. In a column of
    text, it is the empty text. Texts are `np.str_`, or Python objects where a fixed width would
    waste memory.

    Raises:
        UserError: the file is not a valid table with rows, or a column has an unsupported type or
            value. The error names the line or column if possible.
        MissingPackageError: pyarrow is not installed.
    """
    require("pyarrow", where=where)
    arrow = importlib.import_module("pyarrow")
    try:
        if suffix == ".parquet":
            table = _read_parquet(arrow, path, most_bytes)
        elif suffix in (".jsonl", ".ndjson"):
            table = _read_json(arrow, path, most_bytes)
        else:
            table = _read_csv(arrow, path, suffix, most_bytes)
        names = table.column_names
        _require_names(names, range(len(names)))
    except (arrow.ArrowException, OSError, EOFError, ValueError) as error:
        table_format = suffix.removeprefix(".").partition(".")[0].upper()
        raise UserError(
            f"the file cannot be read as a table in {table_format}",
            where=where,
            why=quoted(error),
            remedy="Write the table as Parquet."
            if isinstance(error, _TooLargeTextError)
            else _describe_format(suffix),
        ) from error
    if not table.num_rows:
        raise UserError("the table has no rows", where=where, remedy="Write at least one row.")
    columns = dict(zip(names, table.columns, strict=True))
    # Without this reference, each column is freed after its conversion.
    del table
    # This call frees the memory of the parsed text.
    arrow.default_memory_pool().release_unused()
    return {
        name: _convert_column(arrow, columns.pop(name), f"{where}: column {name!r}")
        for name in names
    }


class _TooLargeTextError(ValueError):
    """A table in text form that exceeds `_MOST_CSV_BYTES`."""


def _describe_format(suffix: str) -> str:
    """Return the remedy for an unreadable table; empty for Parquet."""
    if suffix == ".parquet":
        return ""
    if suffix in (".jsonl", ".ndjson"):
        return "Write one JSON object per line, with a value for each column, in UTF-8."
    return (
        "Write the CSV file in UTF-8: the first line names the columns, and every other line has "
        "one cell for each column."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """Encoding, separator and decimal mark of a CSV file."""

    encoding: str
    separator: str
    decimal_mark: str


def _read_csv(arrow: Any, path: Path, suffix: str, most_bytes: int | None) -> Any:
    """Read a CSV file.

    Columns that would lose information in pyarrow's types are read a second time as text.

    Raises:
        ValueError: the file is too large, has no usable column names, or is in another format or
            encoding.
    """
    content = _read_compressed(path, most_bytes) if suffix.endswith(".gz") else None
    size = path.stat().st_size if content is None else len(content)
    if size >= _MOST_CSV_BYTES:
        raise _TooLargeTextError(
            f"it has at least {size / (1 << 30):.3g} GiB without compression, and a CSV file must "
            "be smaller than 2 GiB"
        )
    head = _read_head(path) if content is None else content[:_HEAD_BYTES]
    dialect = _find_dialect(head)
    source = str(path) if content is None else content
    table = _parse_csv(arrow, source, size, dialect, most_bytes)
    if any(arrow.types.is_binary(kind) for kind in table.schema.types):
        raise ValueError(_describe_undecodable(source))
    kept = _select_columns(table)
    _require_names(table.column_names, kept)
    texts = _find_text_columns(arrow, table.select(kept), source, dialect, most_bytes)
    if texts:
        table = _parse_csv(arrow, source, size, dialect, most_bytes, texts)
    return table.select(kept)


def _select_columns(table: Any) -> Sequence[int]:
    """Return the indices of the columns, except row labels and an empty last column.

    The first column contains row labels if it has no name or is called `Unnamed: 0`. A separator at
    the end of lines causes an empty last column.
    """
    names = table.column_names
    last = len(names) - 1
    first = 1 if names[0] in _INDEX_NAMES and last else 0
    if names[last] == "" and last > first and table.column(last).null_count == table.num_rows:
        last -= 1
    return range(first, last + 1)


def _require_names(names: Sequence[str], kept: Sequence[int]) -> None:
    """Raise ValueError if a name of a column in `kept` is empty or repeated."""
    counts = Counter(names)
    for index in kept:
        if not names[index]:
            raise ValueError(f"column {index + 1} has no name")
        if counts[names[index]] > 1:
            raise ValueError(
                f"the table repeats the column {names[index]!r}; rename or remove one of them"
            )


def _read_head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES)


def _read_compressed(path: Path, most_bytes: int | None) -> bytes:
    """Return the content of a gzip file, or its first lines.

    The size is limited, since a small file can expand to more than the memory.
    """
    most = _MOST_CSV_BYTES if most_bytes is None else most_bytes
    with gzip.open(path, "rb") as stream:
        content = stream.read(most)
        if most_bytes is None or len(content) < most:
            return content
    return content[: content.rfind(b"\n") + 1] or content


def _find_dialect(head: bytes) -> _Dialect:
    """Return the encoding, the separator and the decimal mark of a file.

    They are determined from `head`, the first part of the file.

    Raises:
        ValueError: the file has another format, its first line is not in UTF-8, or this line names
            too many columns.
    """
    encoding = "utf-16" if head[:2] in _UTF16 else "utf-8-sig"
    if head[:4] in _FOREIGN:
        raise ValueError(f"it is {_FOREIGN[head[:4]]}")
    try:
        text = head.decode(encoding, "strict" if len(head) < _HEAD_BYTES else "ignore")
    except UnicodeDecodeError as error:
        first_line_end = head.find(b"\n")
        if encoding == "utf-16" or (0 <= first_line_end < error.start):
            # In UTF-8, the names of the columns can be read here. pyarrow reports the invalid bytes
            # if their column is read as text. In UTF-16, it always reports them.
            text = head.decode(encoding, "replace")
        else:
            raise ValueError(_describe_undecodable(head)) from error
    records = {separator: _split_records(text, separator) for separator in _SEPARATORS}
    separator = _find_separator(records)
    names = next(iter(records[separator]), [])
    if len(names) > _MOST_COLUMNS:
        raise ValueError(f"its first line names {len(names)} columns; the limit is {_MOST_COLUMNS}")
    return _Dialect(
        encoding="utf16" if encoding == "utf-16" else "utf8",
        separator=separator,
        decimal_mark=_find_decimal_mark(records[separator][1:]),
    )


def _split_records(text: str, separator: str) -> list[list[str]]:
    """Return the first complete records of a CSV text."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    records: list[list[str]] = []
    # The csv module raises this error for a cell of more than 131,072 characters, its default
    # `field_size_limit`. The records before the cell are enough to find the separator.
    with contextlib.suppress(csv.Error):
        records.extend(record for record in itertools.islice(reader, _HEAD_RECORDS) if record)
    return records[:-1] if len(records) > 2 else records


def _find_separator(records: Mapping[str, list[list[str]]]) -> str:
    """Return the separator that gives the most columns.

    With this separator, all records must have the same number of cells. The result is the comma if
    no separator gives several columns.
    """

    def count_columns(separator: str) -> int:
        lengths = {len(record) for record in records[separator]}
        return lengths.pop() if len(lengths) == 1 else 0

    best = max(_SEPARATORS, key=count_columns)
    return best if count_columns(best) > 1 else ","


def _find_decimal_mark(records: Sequence[Sequence[str]]) -> str:
    """Return the decimal mark of the numbers.

    The mark is the comma if some numbers contain a comma that cannot separate thousands, and all
    numbers lack a point.
    """
    cells = [cell.strip() for record in records for cell in record]
    with_comma = any(re.fullmatch(r"[+-]?\d+,\d+", cell) for cell in cells)
    with_point = any(re.fullmatch(r"[+-]?\d*\.\d+", cell) for cell in cells)
    thousands = any(re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", cell) for cell in cells)
    others = any(re.fullmatch(r"[+-]?(\d+,(\d{1,2}|\d{4,})|\d{4,},\d+)", cell) for cell in cells)
    return "," if with_comma and not with_point and (others or not thousands) else "."


def _parse_csv(
    arrow: Any,
    source: str | bytes,
    size: int,
    dialect: _Dialect,
    most_bytes: int | None,
    texts: Sequence[str] = (),
) -> Any:
    """Return the table of a CSV file with pyarrow's types.

    `source` is the path or the content of the file, which has `size` bytes. With `most_bytes`, only
    the first rows are read. The columns `texts` stay text.
    """
    arrow_csv = importlib.import_module("pyarrow.csv")
    read = arrow_csv.read_csv if most_bytes is None else arrow_csv.open_csv
    # A character of two bytes in UTF-16 can take 3 bytes in UTF-8.
    text_bytes = size + 1 if dialect.encoding == "utf8" else 2 * size
    block_bytes = max(min(text_bytes, most_bytes or text_bytes), 1 << 16)
    result = read(
        source if isinstance(source, str) else arrow.BufferReader(source),
        read_options=arrow_csv.ReadOptions(
            block_size=min(block_bytes, _MOST_CSV_BYTES - 1),
            use_threads=False,
            encoding=dialect.encoding,
        ),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True, delimiter=dialect.separator),
        convert_options=arrow_csv.ConvertOptions(
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
            null_values=list(_MISSING),
            decimal_point=dialect.decimal_mark,
            column_types={name: arrow.string() for name in texts},
        ),
    )
    if most_bytes is None:
        return result
    with result:
        return arrow.Table.from_batches([result.read_next_batch()])


def _find_text_columns(
    arrow: Any, table: Any, source: str | bytes, dialect: _Dialect, most_bytes: int | None
) -> list[str]:
    """Return the columns that must stay text although pyarrow converts them.

    These are dates, and whole numbers that are identifiers.
    """
    kinds = arrow.types
    fields = list(table.schema)
    # Date columns become text columns, since clients send dates as text.
    texts = [field.name for field in fields if kinds.is_temporal(field.type)]
    texts += [
        f.name
        for f in fields
        if kinds.is_floating(f.type) and _exceeds_int64(arrow, table.column(f.name))
    ]
    whole = [field.name for field in fields if kinds.is_integer(field.type)]
    if whole and _has_leading_zero(source, dialect, most_bytes):
        size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
        written = _parse_csv(arrow, source, size, dialect, most_bytes, whole)
        compute = importlib.import_module("pyarrow.compute")
        pattern = r"^\s*[+-]?0[0-9]"
        texts += [
            n
            for n in whole
            if compute.any(compute.match_substring_regex(written.column(n), pattern)).as_py()
        ]
    return texts


def _exceeds_int64(arrow: Any, column: Any) -> bool:
    """Return whether a float64 column contains identifiers.

    This is so if all values are whole numbers below 1e30, and some of them exceed int64.
    """
    compute = importlib.import_module("pyarrow.compute")
    largest = compute.max(compute.abs(column)).as_py()
    if largest is None or not 2.0**63 <= largest < 1e30:
        return False
    return bool(compute.all(compute.equal(column, compute.floor(column))).as_py())


def _has_leading_zero(source: str | bytes, dialect: _Dialect, most_bytes: int | None) -> bool:
    """Return whether a cell of the file can begin with a zero and another digit.

    The cell can be in any column.
    """
    if dialect.encoding != "utf8":
        return True
    mark = re.escape(dialect.separator.encode())
    pattern = re.compile(rb"(?:^|[\n\r\"" + mark + rb"])[ ]*[+-]?0[0-9]")
    content = source if isinstance(source, bytes) else _read_bytes(source, most_bytes)
    return pattern.search(content) is not None


def _read_bytes(path: str, most_bytes: int | None) -> bytes:
    with Path(path).open("rb") as stream:
        return stream.read() if most_bytes is None else stream.read(most_bytes)


def _describe_undecodable(source: str | bytes) -> str:
    """Return the error text for a file that is not UTF-8.

    If there is an invalid byte, the text shows the line of the first one, and how to convert the
    file.
    """
    content = Path(source).read_bytes() if isinstance(source, str) else source
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        around = content[max(0, error.start - 12) : error.start + 12].decode("cp1252", "replace")
        text = " ".join(around.split())
        return (
            f"line {line} contains the byte 0x{content[error.start]:02X}, which is not UTF-8; "
            f"as Windows-1252 it reads {text!r}; convert the file: "
            "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
        )
    return "the file contains bytes that are not text"


def _read_json(arrow: Any, path: Path, most_bytes: int | None) -> Any:
    """Return the columns of a JSON Lines file.

    Dates stay text. Identifiers, which pyarrow reads as float64, become decimals.

    Raises:
        ValueError: the file is too large, or has too many columns.
    """
    arrow_json = importlib.import_module("pyarrow.json")
    size = path.stat().st_size
    if size >= _MOST_CSV_BYTES:
        raise _TooLargeTextError(
            f"its size is {size / (1 << 30):.3g} GiB, and a JSON Lines file must be smaller than "
            "2 GiB"
        )
    with path.open("rb") as stream:
        content = stream.read() if most_bytes is None else stream.read(most_bytes)
    if len(content) < size:
        content = content[: content.rfind(b"\n") + 1] or content

    def read(schema: Any = None) -> Any:
        return arrow_json.read_json(
            arrow.BufferReader(content),
            read_options=arrow_json.ReadOptions(
                block_size=max(len(content) + 1, 1 << 16), use_threads=False
            ),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema, newlines_in_values=True),
        )

    table = read()
    if table.num_columns > _MOST_COLUMNS:
        raise ValueError(f"it has {table.num_columns} columns; the limit is {_MOST_COLUMNS}")
    names = table.column_names
    if dates := [field.name for field in table.schema if arrow.types.is_temporal(field.type)]:
        table = read(arrow.schema([(name, arrow.string()) for name in dates])).select(names)
    for index, field in enumerate(table.schema):
        if arrow.types.is_floating(field.type) and _exceeds_int64(arrow, table.column(index)):
            # pyarrow refuses to read digits after the point as a decimal of scale 0.
            with contextlib.suppress(arrow.ArrowInvalid):
                exact = read(arrow.schema([(field.name, arrow.decimal128(38, 0))]))
                table = table.set_column(index, field.name, exact.column(field.name))
    return table


def _read_parquet(arrow: Any, path: Path, most_bytes: int | None) -> Any:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        if len(file.schema_arrow.names) > _MOST_COLUMNS:
            raise ValueError(
                f"it has {len(file.schema_arrow.names)} columns; the limit is {_MOST_COLUMNS}"
            )
        if most_bytes is None or not file.metadata.num_rows:
            table = file.read()
        else:
            row_bytes = sum(
                file.metadata.row_group(i).total_byte_size
                for i in range(file.metadata.num_row_groups)
            )
            rows = max(1, most_bytes * file.metadata.num_rows // max(1, row_bytes))
            table = arrow.Table.from_batches([next(file.iter_batches(batch_size=rows))])
    return table.drop_columns(
        [name for name in table.column_names if name.startswith("__index_level_")]
    )


def _convert_column(arrow: Any, column: Any, where: str) -> Array:
    """Return a column as an array of shape (rows, 1).

    Raises:
        UserError: the type of the column, or one of its values, is not supported.
    """
    import numpy as np

    column = _cast_column(arrow, column)
    kinds, kind = arrow.types, column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        return _convert_texts(arrow, column, where)
    has_gaps = column.null_count and (kinds.is_integer(kind) or kinds.is_boolean(kind))
    if kinds.is_floating(kind) or kinds.is_null(kind) or has_gaps:
        values = column.cast(arrow.float64() if not kinds.is_boolean(kind) else arrow.int8())
        return _convert_fractions(np.asarray(values.cast(arrow.float64()).to_numpy()), where)[
            :, None
        ]
    if kinds.is_boolean(kind):
        return np.asarray(column.to_numpy(), dtype=np.bool_)[:, None]
    if kinds.is_integer(kind):
        return np.asarray(column.cast(arrow.int64()).to_numpy(), dtype=np.int64)[:, None]
    remedy = (
        "Columns can contain numbers, booleans, texts, categories or dates. "
        "Remove this column from the file."
    )
    raise UserError(f"columns of type {kind} are not supported", where=where, remedy=remedy)


def _cast_column(arrow: Any, column: Any) -> Any:
    """Return a column in types that the arrays support.

    Categories become their values, and dates and identifiers become text. Other decimals become
    int64 if their scale is 0, and float64 otherwise.
    """
    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    is_date = kinds.is_temporal(kind) and not kinds.is_duration(kind)
    is_whole = kinds.is_integer(kind) or (kinds.is_decimal(kind) and kind.scale == 0)
    if is_date or (is_whole and _has_identifiers(column)):
        return column.cast(arrow.string())
    if kinds.is_decimal(kind):
        return column.cast(arrow.int64() if is_whole else arrow.float64())
    return column


def _has_identifiers(column: Any) -> bool:
    """Return whether a column of whole numbers contains identifiers.

    This is so if a number exceeds int64. A column with a missing value becomes a float column.
    The limit of such a column is the range in which float64 is exact.
    """
    most = 1 << 53 if column.null_count else 1 << 63
    limits = importlib.import_module("pyarrow.compute").min_max(column).as_py()
    return limits["max"] is not None and bool(limits["max"] >= most or limits["min"] < -most)


def _convert_fractions(numbers: Any, where: str) -> Array:
    """Return numbers as float32.

    A number beyond the range of float32 raises UserError instead of becoming infinity.
    """
    import numpy as np

    too_large = np.isfinite(numbers) & (np.abs(numbers) > float(np.finfo(np.float32).max))
    if too_large.any():
        row = int(too_large.argmax())
        remedy = "Scale the column, or remove it: numbers are read as float32."
        raise UserError(
            f"row {row + 1} contains {numbers[row]:g}, which float32 cannot represent",
            where=where,
            remedy=remedy,
        )
    return np.asarray(numbers, dtype=np.float32)


def _convert_texts(arrow: Any, column: Any, where: str) -> Array:
    """Return texts as an array of fixed width.

    If one long text would widen all others, the array contains Python objects.

    Raises:
        UserError: a text contains a null byte.
    """
    import numpy as np

    compute = importlib.import_module("pyarrow.compute")
    column = (
        column.cast(arrow.large_string()) if arrow.types.is_string_view(column.type) else column
    )
    column = column.fill_null("") if column.null_count else column
    if compute.any(compute.match_substring(column, "\0")).as_py():
        raise UserError(
            "a cell contains a null byte", where=where, remedy="Remove the null bytes of the file."
        )
    longest = compute.max(compute.utf8_length(column)).as_py()
    fixed_bytes = 4 * max(1, longest) * len(column)
    if fixed_bytes > max(
        1 << 20, _WIDTH_RATIO * compute.sum(compute.binary_length(column)).as_py()
    ):
        # After this conversion, equal texts share one object.
        encoded = column.cast(arrow.large_string()).combine_chunks().dictionary_encode()
        texts = np.array([*encoded.dictionary.to_pylist()], dtype=object)
        return np.asarray(texts[encoded.indices.to_numpy()])[:, None]
    array = np.empty((len(column), 1), dtype=f"U{max(1, longest)}")
    # Texts are converted in chunks, because each text is temporarily a Python object, which takes
    # about 50 bytes more than the characters.
    for start in range(0, len(column), _CHUNK_ROWS):
        array[start : start + _CHUNK_ROWS, 0] = column.slice(start, _CHUNK_ROWS).to_pylist()
    return array
