"""Tables in CSV: UTF-8, commas, the first line names the columns, as pandas and MLflow write them."""

from __future__ import annotations

import csv
import io

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.serving.wire.document import MAX_VALUES


def read_csv(body: bytes) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and the rows below them, all text.

    Raises:
        UserError: it is not such a table.
        TooLargeError: it has too many cells.
    """
    if body.count(b",") + body.count(b"\n") > MAX_VALUES:
        raise TooLargeError(f"the table has more than {MAX_VALUES} cells", remedy="Send it in the binary form.")
    try:
        lines = csv.reader(io.StringIO(body.decode("utf-8-sig"), newline=""), strict=True)
        table = [line for line in lines if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError("the body is not CSV in UTF-8", why=str(error)) from error
    names = table[0] if table else []
    if not names or all(_is_number(name) for name in names):
        raise UserError("the first line of a table must name its columns")  # else a row would be lost unseen
    if len(set(names)) != len(names):
        raise UserError("the table repeats a column")
    for number, row in enumerate(table[1:], start=1):
        if len(row) != len(names):
            raise UserError(f"row {number} of the table has {len(row)} cells, not {len(names)}")
    return names, table[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
