"""One input of a model: elements as they come, checked one by one, to an array of exactly its type.

Numpy is never asked to guess: it would turn text into numbers, null into NaN, and a truth value into 1.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.data import Array
from onnx_ops.protocol.tensors import DATATYPE_OF, numpy_dtype
from onnx_ops.serving.wire.document import Block
from onnx_ops.serving.wire.text import join_text, split_text

_CODES = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
}
"""Letters of the struct module, which packs numbers strictly and faster than numpy takes them from a list."""

_EMPTY_LIMIT = 1 << 16
"""An empty tensor needs no element to be sent, yet a model may answer with an array of its other dimensions."""

_MAX_RANK = 32

_JSON_NAMES = {
    str: "text",
    bool: "a truth value",
    int: "a whole number",
    float: "a fraction",
    type(None): "null",
    dict: "an object",
    list: "a list",
}


class Reader:
    """Makes arrays for one input. Every method raises UserError with the tensor's name if something does not fit."""

    __slots__ = ("_pack", "code", "datatype", "dims", "dtype", "elements", "free_rows", "name", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.datatype = DATATYPE_OF[spec.dtype]
        self.dtype = np.dtype(numpy_dtype(spec.dtype))
        self.dims = tuple(d if isinstance(d, int) else None for d in spec.shape)
        self.free_rows = bool(self.dims) and self.dims[0] is None
        self.code = _CODES.get(spec.dtype, "")
        self.elements = _elements(spec.dtype)
        self._pack: tuple[int, Callable[..., bytes]] = 0, struct.Struct("").pack

    def error(self, what: str, remedy: str = "") -> UserError:
        return UserError(f"tensor {self.name!r}{what}", remedy=remedy)

    def shape(self, given: object) -> tuple[tuple[int, ...], int]:
        """The shape, if it is one that the input takes, and the number of its elements."""
        if type(given) is not list or len(given) != len(self.dims):
            raise self._misshapen(given)
        count, axis = 1, 0
        for want in self.dims:
            size = given[axis]
            if type(size) is not int or size < 0 or (size != want and want is not None):
                raise self._misshapen(given)
            count *= size
            axis += 1  # noqa: SIM113 (this is the hottest loop of a request)
        shape = tuple(given)
        if not count and math.prod(size for size in shape if size) > _EMPTY_LIMIT:
            raise self.error(f": shape {list(shape)} is too large for an empty tensor")
        return shape, count

    def array(self, shape: tuple[int, ...], count: int, data: object, *, literals: bool) -> Array:
        """From flat or nested lists.

        Args:
            shape, count: from `shape`.
            data: parsed JSON.
            literals: whether truth values may be in it.
        """
        flat = data
        if type(data) is list and len(data) != count and len(shape) == 2:
            flat = _joined(data, shape[1])
        if type(flat) is list and len(flat) == count and self.code:
            last, pack = self._pack
            if last != count:
                pack = struct.Struct(f"<{count}{self.code}").pack
                self._pack = count, pack  # in one step: other threads read it
            try:
                packed = pack(*flat)
            except (struct.error, OverflowError):
                pass  # nested, of other types, or out of range: told apart below
            else:
                if not literals or bool not in set(map(type, flat)):
                    return np.ndarray(shape, self.dtype, packed)
        if isinstance(data, Block):
            return self._from_block(shape, data)
        return self._from_lists(shape, data)

    def binary(self, shape: tuple[int, ...], body: bytes, start: int, size: int) -> Array:
        """From `size` bytes at `start`: little-endian, row-major; text with its length before it."""
        count = math.prod(shape)
        if self.spec.dtype == "string":
            return _objects(split_text(self.name, body, start, size, count), shape)
        if size != count * self.dtype.itemsize:
            raise self.error(
                f": shape {list(shape)} of {self.datatype} needs {count * self.dtype.itemsize} bytes, not {size}"
            )
        if self.dtype.kind == "b" and count and np.frombuffer(body, np.uint8, count, start).max() > 1:
            raise self.error(": a byte of BOOL must be 0 or 1")
        array: Array = np.ndarray(shape, self.dtype, body, start)
        return array if array.flags.aligned else array.copy()  # the runtime reads whole elements

    def raw(self, body: bytes) -> Array:
        """From a body that is nothing but this tensor: its shape follows from the model and the length."""
        if self.spec.dtype == "string":
            shape, _ = self.shape([1 if d is None else d for d in self.dims])
            body = join_text([body])
            return self.binary(shape, body, 0, len(body))
        known = math.prod(d for d in self.dims if d is not None) * self.dtype.itemsize
        free = self.dims.count(None)
        if free > 1 or not known:
            raise self.error(" has several free dimensions; a raw body cannot tell its shape")
        size = len(body) // known if free else 0
        shape, _ = self.shape([size if d is None else d for d in self.dims])
        return self.binary(shape, body, 0, len(body))

    def typed(self, data: Any) -> Any:
        """Cells of a table, which are text, as elements of this input: a list of them or a list of rows."""
        if self.spec.dtype == "string":
            return data
        return [
            [self._cell(cell, row) for cell in item] if isinstance(item, list) else self._cell(item, row)
            for row, item in enumerate(data, start=1)
        ]

    def with_missing(self, data: Any) -> Any:
        """Values of a table, null being a missing number where the input takes fractions."""
        if self.dtype.kind != "f" or type(data) is not list:
            return data
        return [math.nan if item is None else self.with_missing(item) if type(item) is list else item for item in data]

    def check_column(self, data: Any) -> None:
        """Raises UserError with the row of the first value that the input does not take."""
        if type(data) is not list:
            return
        for row, item in enumerate(data, start=1):
            value = item[0] if type(item) is list and len(item) == 1 else item
            if type(value) is not list and type(value) not in self.elements:
                raise self.error(
                    f" of {self.datatype} holds {_JSON_NAMES.get(type(value), 'another type')} in row {row}"
                )

    def _cell(self, text: str, row: int) -> float | int | bool:
        try:
            if not text and self.dtype.kind == "f":
                return math.nan
            if self.dtype.kind == "b":
                return {"true": True, "false": False}[text.strip().lower()]
            if "_" in text:
                raise ValueError(text)
            if self.dtype.kind != "f":
                return int(text)
            if math.isfinite(value := float(text)):
                return value
            raise ValueError(text)
        except (ValueError, KeyError) as error:
            raise self.error(f" of {self.datatype} holds {shown(text)} in row {row}") from error

    def _misshapen(self, given: object) -> UserError:
        if type(given) is not list or len(given) > _MAX_RANK or not all(type(d) is int and d >= 0 for d in given):
            return self.error(f": shape must be a list of at most {_MAX_RANK} whole numbers from 0")
        return self.error(f" must have shape [{', '.join(map(str, self.spec.shape))}], not {given}")

    def _from_block(self, shape: tuple[int, ...], block: Block) -> Array:
        if self.dtype.kind not in "fiu" or self.spec.dtype == "bfloat16":
            return self._from_lists(shape, block.lists())
        if block.shape not in (shape, (math.prod(shape),)):
            return self._from_lists(shape, block.lists())
        flat = block.numbers(self.dtype.kind)
        if flat is None or not _fits(flat, self.dtype):
            return self._from_lists(shape, block.lists())
        return flat.astype(self.dtype).reshape(shape)

    def _from_lists(self, shape: tuple[int, ...], data: object) -> Array:
        if self.spec.dtype == "bfloat16":
            raise self.error(" of BF16 cannot come as JSON", "Send it in the binary form.")
        flat = self._flatten(shape, data)
        wrong = set(map(type, flat)) - self.elements
        if wrong:
            found = ", ".join(sorted(_JSON_NAMES.get(t, t.__name__) for t in wrong))
            raise self.error(f" of {self.datatype} holds {found}")
        if self.spec.dtype == "string":
            return _objects(flat, shape)
        try:
            with np.errstate(over="raise"):
                return np.array(flat, dtype=self.dtype).reshape(shape)
        except (OverflowError, FloatingPointError) as error:
            raise self.error(f" holds a number that is too large for {self.datatype}") from error

    def _flatten(self, shape: tuple[int, ...], data: object) -> list[Any]:
        if shape == () and not isinstance(data, list):
            return [data]
        if not isinstance(data, list):
            raise self.error(": data must be a list")
        level: list[Any] = data
        if any(isinstance(item, list) for item in level):
            level = [level]
            for size in shape:
                if not all(isinstance(item, list) and len(item) == size for item in level):
                    raise self.error(f": the nesting of data does not fit shape {list(shape)}")
                level = list(chain.from_iterable(level))
        count = math.prod(shape)
        if len(level) != count:
            raise self.error(f": shape {list(shape)} needs {count} elements, not {len(level)}")
        return level


def _joined(rows: list[Any], columns: int) -> list[Any]:
    """The elements of the rows; the rows as they are unless each is a list of so many elements."""
    for row in rows:
        if type(row) is not list or len(row) != columns:
            return rows
    return rows[0] if len(rows) == 1 else list(chain.from_iterable(rows))


def shown(value: object) -> str:
    """What a client sent, short enough to be shown to it again."""
    return reprlib.repr(value)


def _elements(dtype: str) -> frozenset[type]:
    if dtype.startswith("float"):
        return frozenset({int, float})
    return frozenset({{"bool": bool, "string": str}.get(dtype, int)})


def _fits(flat: Array, dtype: np.dtype[Any]) -> bool:
    if not flat.size or flat.dtype == dtype:
        return True
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return bool(limits.min <= flat.min() and flat.max() <= limits.max)


def _objects(values: list[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)
