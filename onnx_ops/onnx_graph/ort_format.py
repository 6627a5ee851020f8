"""Read files in ORT format, ONNX Runtime's format for optimized graphs.

They are FlatBuffers, whose schema is part of ONNX Runtime (`core/flatbuffers/schema/ort.fbs`). A
field is identified by its position in a table, so the positions in this module are those of the
schema.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_ops.errors import UserError, quoted

if TYPE_CHECKING:
    import onnx

_MAGIC = b"ORTM"
_TENSOR, _SEQUENCE, _MAP = 1, 2, 3
_VALUE, _PARAMETER = 1, 2


def is_ort_format(path: Path) -> bool:
    """Return whether the first bytes of a file mark it as a file in ORT format."""
    with path.open("rb") as file:
        return file.read(8)[4:] == _MAGIC


def read_ort_structure(path: Path) -> onnx.ModelProto:
    """Read IR version, opsets, inputs, outputs, operators and weight shapes.

    Attributes and weights are not read.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return _parse(path.read_bytes())
    except (struct.error, IndexError, ValueError, TypeError, UnicodeDecodeError) as error:
        remedy = "Recreate it from the .onnx file."
        raise UserError(
            "the file in ORT format is damaged", where=str(path), why=quoted(error), remedy=remedy
        ) from error


class _Table:
    """A table of a FlatBuffer, with fields by position from 0."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def _offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def text(self, field: int) -> str:
        offset = self._offset(field)
        return self._table.String(offset + self._table.Pos).decode() if offset else ""

    def number(self, field: int, form: str) -> int:
        offset = self._offset(field)
        return (
            int(struct.unpack_from(f"<{form}", self._table.Bytes, offset + self._table.Pos)[0])
            if offset
            else 0
        )

    def table(self, field: int) -> _Table | None:
        offset = self._offset(field)
        return self._at(self._table.Indirect(offset + self._table.Pos)) if offset else None

    def union(self, field: int) -> _Table | None:
        offset = self._offset(field)
        place = offset + self._table.Pos
        return (
            self._at(place + int(struct.unpack_from("<I", self._table.Bytes, place)[0]))
            if offset
            else None
        )

    def tables(self, field: int) -> Iterator[_Table]:
        for place in self._items(field, 4):
            yield self._at(self._table.Indirect(place))

    def texts(self, field: int) -> list[str]:
        return [self._table.String(place).decode() for place in self._items(field, 4)]

    def numbers(self, field: int) -> list[int]:
        return [
            int(struct.unpack_from("<q", self._table.Bytes, place)[0])
            for place in self._items(field, 8)
        ]

    def _items(self, field: int, size: int) -> Iterator[int]:
        offset = self._offset(field)
        if not offset:
            return
        count, start = self._table.VectorLen(offset), self._table.Vector(offset)
        if count * size > len(self._table.Bytes):
            raise ValueError(f"a list of {count} does not fit into the file")
        yield from range(start, start + count * size, size)

    def _at(self, place: int) -> _Table:
        from flatbuffers.table import Table

        if not 0 < place < len(self._table.Bytes):
            raise ValueError("a position is outside the file")
        return _Table(Table(self._table.Bytes, place))


def _parse(data: bytes) -> onnx.ModelProto:
    import onnx
    from flatbuffers.table import Table

    session = _Table(Table(data, struct.unpack_from("<I", data)[0]))
    stored = session.table(1)
    graph = stored.table(7) if stored is not None else None
    if stored is None or graph is None:
        raise ValueError("it contains no graph")
    model = onnx.ModelProto(ir_version=stored.number(0, "q"), producer_name=stored.text(2))
    for entry in stored.tables(1):
        model.opset_import.add(domain=entry.text(0), version=entry.number(1, "q"))
    known = {value.text(0): value for value in graph.tables(1)}
    for tensor in graph.tables(0):
        model.graph.initializer.add(
            name=tensor.text(0), dims=tensor.numbers(2), data_type=tensor.number(3, "i")
        )
    for values, names in (
        (model.graph.input, graph.texts(5)),
        (model.graph.output, graph.texts(6)),
    ):
        for name in names:
            value = values.add(name=name)
            kind = known[name].table(2) if name in known else None
            if kind is not None:
                _write_type(kind, value.type)
    for node in graph.tables(2):
        made = model.graph.node.add(name=node.text(0), op_type=node.text(5), domain=node.text(2))
        made.input.extend(node.texts(8))
        made.output.extend(node.texts(9))
    return model


def _write_type(kind: _Table, written: onnx.TypeProto) -> None:
    what, value = kind.number(1, "B"), kind.union(2)
    if what == _SEQUENCE:
        written.sequence_type.SetInParent()
    elif what == _MAP:
        written.map_type.SetInParent()
    elif what == _TENSOR and value is not None:
        written.tensor_type.elem_type = value.number(0, "i")
        shape = value.table(1)
        for dimension in shape.tables(0) if shape is not None else ():
            size = written.tensor_type.shape.dim.add()
            stored = dimension.table(0)
            if stored is not None and stored.number(0, "b") == _VALUE:
                size.dim_value = stored.number(1, "q")
            elif stored is not None and stored.number(0, "b") == _PARAMETER:
                size.dim_param = stored.text(2)
