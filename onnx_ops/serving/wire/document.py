"""JSON bodies. Small ones are read by orjson; in large ones simdjson leaves arrays of numbers as they stand, so that
they never become Python objects.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import orjson
import simdjson

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.ports.data import Array

MAX_VALUES = 1 << 22
"""Values in a JSON body. One that a client writes in two bytes may take over a hundred bytes of memory."""
MAX_CONTAINERS = 1 << 20
"""Lists and objects in a JSON body."""

_UNCOUNTED = 1 << 20
"""A body of fewer bytes cannot hold enough values to do harm."""
LARGE = 8192
"""Bytes from which simdjson is faster (benchmarks/wire.py)."""
_KEPT = 2 << 20
_R, _L = b"rl"
_threads = threading.local()
_PLAIN = ("shape", "columns", "index", "parameters", "outputs")
"""Keys below which small lists stand."""

_KINDS: dict[str, tuple[Literal["d", "i", "u"], type[np.generic]]] = {
    "f": ("d", np.float64),
    "i": ("i", np.int64),
    "u": ("u", np.uint64),
}


class Block:
    """A rectangular array of scalars that was never made into Python objects.

    Attributes:
        shape: as it is nested.
    """

    __slots__ = ("_array", "shape")

    def __init__(self, array: simdjson.Array, shape: tuple[int, ...]) -> None:
        self._array = array
        self.shape = shape

    def numbers(self, kind: str) -> Array | None:
        """All elements, flat, as the widest type of numpy's `kind` (f, i or u); None if one of them is not such a
        number.
        """
        code, dtype = _KINDS[kind]
        try:
            return np.frombuffer(self._array.as_buffer(of_type=code), dtype)
        except (TypeError, ValueError):
            return None

    def lists(self) -> list[Any]:
        return self._array.as_list()


def parse(body: bytes) -> tuple[Any, bool]:
    """The document, with large arrays of numbers as a `Block`; and whether truth values may be in it.

    Raises:
        UserError: the body is not strict JSON (NaN and infinities are not).
        TooLargeError: it holds more values than the limits allow.
    """
    literals = may_hold_literals(body)
    if len(body) >= LARGE:
        if len(body) > _UNCOUNTED:
            _count(body)
        document = _parse_lazily(body)
        if document is not None:
            return document, literals
    try:
        return orjson.loads(body), literals
    except orjson.JSONDecodeError as error:
        raise UserError("the body is not JSON", why=str(error)) from error


def may_hold_literals(text: bytes) -> bool:
    """Whether truth values may be in JSON. They have letters that numbers have not; most bodies are cleared by this."""
    # Numbers, not bytes: asked for b"r", `in` first tries it as a number and makes an exception of that each time.
    return _R in text or _L in text


def plain(data: Any) -> Any:
    """Lists in place of a block."""
    return data.lists() if isinstance(data, Block) else data


def _count(body: bytes) -> None:
    letters = np.frombuffer(body, np.uint8)
    values = np.count_nonzero(letters == ord(","))
    containers = np.count_nonzero(letters == ord("[")) + np.count_nonzero(letters == ord("{"))
    if values > MAX_VALUES or containers > MAX_CONTAINERS:
        raise TooLargeError(
            f"the body holds more than {MAX_VALUES} values or {MAX_CONTAINERS} lists",
            remedy="Send large tensors in the binary form.",
        )


def _parse_lazily(body: bytes) -> Any:
    """None where orjson must do: for a body that is not JSON, or whose arrays are not all rectangular."""
    try:
        lazy = _Lazy()
        document = lazy.value(_parser(len(body)).parse(body), "")
    except (ValueError, TypeError, LookupError, RuntimeError):
        return None
    # A list among the elements of a block would go unseen. Every list has its bracket, so counting shows it.
    return document if lazy.brackets == np.count_nonzero(np.frombuffer(body, np.uint8) == ord("[")) else None


def _parser(size: int) -> simdjson.Parser:
    """The thread's own parser, whose memory is warm. It keeps some 14 times the bytes of the largest body, so very
    large bodies get another one. (It refuses to parse while a block of the last body lives, and orjson takes over.)
    """
    if size > _KEPT:
        return simdjson.Parser()
    if not hasattr(_threads, "parser"):
        _threads.parser = simdjson.Parser()
    return _threads.parser  # type: ignore[no-any-return]


class _Lazy:
    """Walks a document of simdjson. `brackets` counts the lists it has seen."""

    def __init__(self) -> None:
        self.brackets = 0

    def value(self, value: Any, key: str) -> Any:
        if type(value) is simdjson.Object:
            keys = list(value)
            if len(set(keys)) != len(keys) or any("\0" in name for name in keys):
                raise ValueError("simdjson finds the first of a repeated key, orjson the last; and its keys end at NUL")
            return {name: self.value(value[name], name) for name in keys}
        if type(value) is not simdjson.Array:
            return value
        if key not in _PLAIN and _leads_to_number(value):
            shape = self._shape(value)
            return Block(value, shape)
        self.brackets += 1
        return [self._item(item) for item in value]

    def _item(self, item: Any) -> Any:
        """Blocks stand as values of objects only."""
        if type(item) is simdjson.Array:
            lists = item.as_list()
            self.brackets += _count_lists(lists)
            return lists
        return self.value(item, "")

    def _shape(self, array: simdjson.Array) -> tuple[int, ...]:
        """Raises ValueError unless all lists of a level have the same length."""
        self.brackets += 1
        shape = [len(array)]
        level = [array]
        while type(first := level[0][0]) is simdjson.Array:
            size = len(first)
            level = [row for parent in level for row in parent]  # type: ignore[misc]
            if not size or any(type(row) is not simdjson.Array or len(row) != size for row in level):
                raise ValueError("not rectangular")
            self.brackets += len(level)
            shape.append(size)
        return tuple(shape)


def _leads_to_number(value: Any) -> bool:
    while type(value) is simdjson.Array:
        if not len(value):
            return False
        value = value[0]
    return type(value) in (int, float)


def _count_lists(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count_lists, value.values()))
    return 1 + sum(map(_count_lists, value)) if isinstance(value, list) else 0
