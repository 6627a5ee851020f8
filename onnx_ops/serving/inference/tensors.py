"""Conversion of JSON and bytes to arrays of exactly the declared type.

NumPy's type inference is not used, because it would turn text into numbers, null into NaN, and a
boolean into 1. Small JSON bodies are parsed by orjson. In large bodies, simdjson parses arrays of
numbers only when their type is known, so their elements need not become Python objects.
"""

from __future__ import annotations

import math
import reprlib
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import orjson
import simdjson

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.ports.data import Array

DATATYPE_OF: Mapping[str, str] = {
    "bool": "BOOL",
    **{
        f"{kind}{bits}": f"{kind}{bits}".upper()
        for kind in ("uint", "int")
        for bits in (8, 16, 32, 64)
    },
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
    "image": "BYTES",
}
"""Open Inference datatype by `TensorSpec.dtype`.

An element of type `image` is an encoded image (see `image_tensors`).

See https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md.
"""

DTYPE_OF_ONNX: Mapping[str, str] = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    **{
        f"tensor({dtype})": dtype
        for dtype in DATATYPE_OF
        if dtype not in ("float32", "float64", "image")
    },
}
"""`TensorSpec.dtype` by the runtime's name of the type."""

RequestBody = bytes | memoryview
"""The body of a request.

A large body in the binary form stays in the memory into which it was received.
"""

MAX_VALUES = 1 << 22
"""Maximum number of values in a JSON or CSV body, and of elements of BYTES.

A value of two bytes takes up to 36 bytes of memory in JSON, and up to 122 bytes in CSV. This is the
peak resident memory of `read_invocation` for this many zeros, divided by their number. The JSON
list also contains a null, and the CSV body has one column (CPython 3.11).
"""
MAX_CONTAINERS = 1 << 20
"""Maximum number of lists and objects in a JSON body."""
MAX_KEYS = 1 << 12
"""Maximum number of keys of one JSON object: columns of a record, or parameters.

A body below `LARGE_BODY_BYTES` has no room for more keys.
"""
LARGE_BODY_BYTES = 8192
"""Size of a body from which simdjson is faster (benchmarks/wire.py)."""
_UNCHECKED_BYTES = 1 << 20
"""Size up to which a body cannot contain enough values to exceed the limits."""
_CACHED_PARSER_BYTES = 2 << 20
_LARGE_ARRAY_BYTES = 1 << 20
"""Bytes of text from which an array is parsed in pieces."""
_PIECE_BYTES = 1 << 18
"""Bytes of text that are parsed in one millisecond."""
_LOOKED_AT = 64
"""Maximum number of arrays of a body that are examined."""
_LOOKED_UP = 64
"""Maximum number of keys of an object that are looked up one by one.

A lookup does not parse arrays, but it scans all previous keys of the object.
"""
_NOT_OF_NUMBERS = (b"{", b'"', b"l", b"r")
"""Bytes that no array of numbers contains.

Each of null, true and false contains one of the letters.
"""
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
_R, _L = b"rl"
_parsers: dict[int, simdjson.Parser] = {}
"""One parser for each thread, which reuses its memory for the next body."""
_SMALL_LISTS = ("shape", "columns", "index", "parameters", "outputs")
"""Keys whose lists become Python lists, since they are usually small."""
_EMPTY_LIMIT = 1 << 16
"""Largest product of the nonzero dimensions of an empty tensor.

A model can return an output with all of these dimensions and without the empty one.
"""
_MAX_RANK = 32

_LAZY_CODES: Mapping[str, Literal["d", "i", "u"]] = {"f": "d", "i": "i", "u": "u"}
"""simdjson's type code of the widest type of each kind."""
_TEXT_LENGTH = struct.Struct("<I")

_JSON_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a fraction",
    type(None): "null",
    dict: "an object",
    list: "a list",
}


def describe_tensor(spec: TensorSpec, *, optional: bool = False) -> dict[str, object]:
    """Return the metadata of an input or output; -1 means a free dimension."""
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    document: dict[str, object] = {
        "name": spec.name,
        "datatype": DATATYPE_OF[spec.dtype],
        "shape": shape,
    }
    return {**document, "parameters": {"optional": True}} if optional else document


def get_numpy_dtype(dtype: str) -> str:
    """Return numpy's type for a `TensorSpec.dtype`; uint16 for bfloat16."""
    return {"string": "object", "image": "object", "bfloat16": "uint16"}.get(dtype, dtype)


def shorten(value: object) -> str:
    """Return the text of a client's value, shortened for an error message."""
    return reprlib.repr(value)


class LazyArray:
    """A rectangular JSON array of scalars, not parsed into Python objects."""

    __slots__ = ("_array", "shape")

    def __init__(self, array: simdjson.Array, shape: tuple[int, ...]) -> None:
        self._array = array
        self.shape = shape

    def to_numbers(self, kind: str) -> Array | None:
        """Return flat numbers of numpy's `kind` (f, i or u).

        The result is None if an element is not a number of that kind.
        """
        try:
            return np.frombuffer(self._array.as_buffer(of_type=_LAZY_CODES[kind]), f"{kind}8")
        except (TypeError, ValueError):
            return None

    def to_lists(self) -> list[Any]:
        """Return the array as nested Python lists."""
        return self._array.as_list()


class LargeArray(LazyArray):
    """The unparsed text of a rectangular array.

    Only its brackets and commas were examined. The text is parsed in pieces. Each piece blocks the
    interpreter, and between the pieces other requests can be answered.
    """

    __slots__ = ("_body", "_end", "_start")

    def __init__(self, body: bytes, start: int, end: int, shape: tuple[int, ...]) -> None:
        self._body, self._start, self._end, self.shape = body, start, end, shape

    def to_numbers(self, kind: str) -> Array | None:
        """Return flat numbers of numpy's `kind` (f, i or u).

        The result is None if an element is not a number of that kind.
        """
        parser, numbers = simdjson.Parser(), []
        try:
            for piece in self._divide():
                buffer: Any = parser.parse(piece).as_buffer(of_type=_LAZY_CODES[kind])  # type: ignore[union-attr]
                numbers.append(np.frombuffer(buffer, f"{kind}8"))
        except (
            TypeError,
            ValueError,
            # simdjson raises RuntimeError for an integer of more than 64 bits.
            RuntimeError,
        ):
            return None
        flat = np.concatenate(numbers)
        return flat if flat.size == math.prod(self.shape) else None

    def _divide(self) -> Iterator[bytes]:
        """Yield flat arrays that together contain all elements.

        The text is cut at commas, and its brackets are replaced by spaces.
        """
        start, cut = self._start, 0
        while cut >= 0:
            is_last = self._end - start <= _PIECE_BYTES
            cut = -1 if is_last else self._body.rfind(b",", start, start + _PIECE_BYTES)
            yield b"[%b]" % self._body[start : cut if cut >= 0 else self._end].translate(
                _WITHOUT_BRACKETS
            )
            start = cut + 1

    def to_lists(self) -> list[Any]:
        """Return the array as nested Python lists.

        Raises:
            UserError: the text is not JSON.
        """
        try:
            lists: list[Any] = orjson.loads(self._body[self._start : self._end])
        except orjson.JSONDecodeError as error:
            raise UserError("the body is not JSON", why=str(error)) from error
        return lists


def _take_large_arrays(body: bytes) -> tuple[bytes, dict[str, LazyArray]]:
    """Return a body in which a string replaces each large array of numbers.

    Also return these arrays by the inserted string. Only the first `_LOOKED_AT` lists of the body
    are examined. Brackets inside a string of the client are safe. The quotes of the inserted string
    would end the client's string, so the body would not be valid JSON.
    """
    taken: dict[str, LazyArray] = {}
    parts: list[bytes] = []
    done = place = 0
    for _ in range(_LOOKED_AT):
        place = body.find(b"[", place)
        if place < 0:
            break
        start = place
        while body[place : place + 1] == b"[":
            place += 1
        depth = place - start
        if depth > _MAX_RANK:
            # An array this deep is not a tensor, and measuring its shape would take time quadratic
            # in its depth.
            continue
        end = body.find(b"]" * depth, place) + depth
        if end - start < _LARGE_ARRAY_BYTES or any(
            body.find(other, start, end) >= 0 for other in _NOT_OF_NUMBERS
        ):
            continue
        if shape := _measure(body, start, end, depth):
            name = secrets.token_hex(16)
            taken[name] = LargeArray(body, start, end, shape)
            parts += body[done:start], f'"{name}"'.encode()
            done = place = end
    return b"".join((*parts, body[done:])), taken


def _measure(body: bytes, start: int, end: int, depth: int) -> tuple[int, ...]:
    """Return the shape of an array of this depth; empty if it is not rectangular.

    The shape is derived from brackets and commas.
    """
    pieces = []
    for place in range(start, end, _PIECE_BYTES):
        letters = np.frombuffer(body, np.uint8)[place : min(place + _PIECE_BYTES, end)]
        pieces.append(
            letters[(letters == ord(",")) | (letters == ord("[")) | (letters == ord("]"))].tobytes()
        )
    found, row, shape = b"".join(pieces), b"", list[int]()
    for level in reversed(range(depth)):
        ends = np.frombuffer(found, np.uint8)[level + 1 + len(row) :: len(row) + 1] == ord("]")
        if not ends.any():
            return ()
        shape.insert(0, int(ends.argmax()) + 1)
        row = b"[%b]" % (b",".join([row] * shape[0]) if row else b"," * (shape[0] - 1))
    return tuple(shape) if row == found else ()


def _count_letter(text: bytes, letter: str) -> int:
    """Count a letter with NumPy, because `bytes.count` would block the interpreter."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(letter)))


def parse_document(body: bytes) -> tuple[Any, bool]:
    """Parse a JSON body; return the document, and whether it can contain booleans.

    In a body of at least `LARGE_BODY_BYTES`, arrays of numbers can become `LazyArray`.

    Raises:
        UserError: the body is not strict JSON, which excludes NaN and infinities.
        TooLargeError: the body exceeds `MAX_VALUES`, `MAX_CONTAINERS` or `MAX_KEYS`.
    """
    literals = may_contain_literals(body)
    if len(body) >= LARGE_BODY_BYTES:
        if len(body) > _UNCHECKED_BYTES:
            containers = _count_letter(body, "[") + _count_letter(body, "{")
            if _count_letter(body, ",") > MAX_VALUES or containers > MAX_CONTAINERS:
                raise TooLargeError(
                    f"the body contains more than {MAX_VALUES} commas, "
                    f"or more than {MAX_CONTAINERS} opening brackets",
                    remedy="Send large tensors in the binary form.",
                )
        document = _parse_lazily(body)
        if document is not None:
            return document, literals
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError("the body is not JSON", why=str(error)) from error
    if len(body) >= LARGE_BODY_BYTES:
        _check_objects(document)
    return document, literals


def _check_objects(document: Any) -> None:
    """Raise TooLargeError if an object of a document has too many keys."""
    pending = [document]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            _check_keys(len(value))
            value = value.values()
        elif type(value) is not list:
            continue
        pending += [item for item in value if type(item) in (dict, list)]


def _check_keys(count: int) -> None:
    if count > MAX_KEYS:
        raise TooLargeError(
            f"the body has an object with {count} keys, and the limit is {MAX_KEYS}",
            remedy="Send a wide table in the binary form, or as dataframe_split.",
        )


def may_contain_literals(text: bytes) -> bool:
    """Return whether a JSON text can contain booleans, by searching for their letters."""
    # The letters are integers and not bytes. For b"r", `in` first tries to convert it to a number,
    # which raises and catches an exception.
    return _R in text or _L in text


def to_plain(data: Any) -> Any:
    """Return the nested lists of a lazy array; return all other data unchanged."""
    return data.to_lists() if isinstance(data, LazyArray) else data


def release_parsers() -> None:
    """Free the memory of all cached parsers that are not in use."""
    _parsers.clear()


def _parse_lazily(body: bytes) -> Any:
    """Parse a body by simdjson; return None if orjson must parse it.

    orjson must parse a body whose arrays are irregular. A parser retains memory of about 14 times
    its largest body. Therefore each thread reuses a parser only for bodies up to
    `_CACHED_PARSER_BYTES`. A parser refuses to parse while a lazy array of the last body exists;
    orjson is then used.
    """
    taken: dict[str, LazyArray] = {}
    if len(body) >= _LARGE_ARRAY_BYTES:
        body, taken = _take_large_arrays(body)
    if len(body) > _CACHED_PARSER_BYTES:
        parser = simdjson.Parser()
    else:
        thread = threading.get_ident()
        parser = _parsers.get(thread) or _parsers.setdefault(thread, simdjson.Parser())
    try:
        walk = _LazyWalk(taken)
        document = walk.convert(parser.parse(body), "")
    except (ValueError, TypeError, LookupError, RuntimeError):
        return None
    # The parser does not detect a list among the elements of a lazy array. Counting the brackets
    # detects it.
    return document if walk.brackets == _count_letter(body, "[") and not walk.taken else None


@dataclass(slots=True, eq=False)
class _LazyWalk:
    """Conversion of a simdjson document to Python objects and lazy arrays.

    `brackets` counts the lists of the document. `taken` contains the arrays that were replaced by
    strings in the document. Its keys are these strings.
    """

    taken: dict[str, LazyArray]
    brackets: int = 0

    def convert(self, value: Any, key: str) -> Any:
        if type(value) is simdjson.Object:
            _check_keys(len(value))
            keys = list(value)
            if len(set(keys)) != len(keys) or any("\0" in name for name in keys):
                raise ValueError(
                    "orjson must parse repeated keys, of which simdjson takes the first, "
                    "and keys with NUL, where simdjson ends them"
                )
            if len(keys) > _LOOKED_UP:
                document = value.as_dict()
                self.brackets += _count_lists(document)
                return document
            return {name: self.convert(value[name], name) for name in keys}
        if type(value) is not simdjson.Array:
            return self.taken.pop(value, value) if self.taken and type(value) is str else value
        if key not in _SMALL_LISTS and _begins_with_number(value):
            return LazyArray(value, self._measure(value))
        self.brackets += 1
        items = []
        for item in value:
            # Arrays in a list become lists, not lazy arrays.
            if type(item) is simdjson.Array:
                items.append(item.as_list())
                self.brackets += _count_lists(items[-1])
            else:
                items.append(self.convert(item, ""))
        return items

    def _measure(self, array: simdjson.Array) -> tuple[int, ...]:
        """Return the shape of an array; raise ValueError if it is not rectangular."""
        self.brackets += 1
        shape = [len(array)]
        level = [array]
        while type(first := level[0][0]) is simdjson.Array:
            size = len(first)
            level = [row for parent in level for row in parent]  # type: ignore[misc]
            if not size or any(
                type(row) is not simdjson.Array or len(row) != size for row in level
            ):
                raise ValueError("not rectangular")
            self.brackets += len(level)
            shape.append(size)
        return tuple(shape)


def _begins_with_number(value: Any) -> bool:
    """Return whether the first scalar in nested arrays is a number."""
    while type(value) is simdjson.Array and len(value):
        value = value[0]
    return type(value) in (int, float)


def _count_lists(value: Any) -> int:
    """Return the number of lists in a value; check the number of keys of its objects."""
    if isinstance(value, dict):
        _check_keys(len(value))
        return sum(map(_count_lists, value.values()))
    return 1 + sum(map(_count_lists, value)) if isinstance(value, list) else 0


class TensorReader:
    """Reader of the arrays of one input of a model.

    The methods raise UserError if the data of a request does not fit the input.
    """

    __slots__ = (
        "_pack",
        "code",
        "datatype",
        "dims",
        "dtype",
        "elements",
        "has_free_rows",
        "name",
        "spec",
    )

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.datatype = DATATYPE_OF[spec.dtype]
        self.dtype = np.dtype(get_numpy_dtype(spec.dtype))
        self.dims = tuple(d if isinstance(d, int) else None for d in spec.shape)
        self.has_free_rows = bool(self.dims) and self.dims[0] is None
        # The struct module packs a list of numbers and checks their types in one call.
        has_code = self.dtype.kind in "fiu" and spec.dtype != "bfloat16"
        self.code = self.dtype.char.replace("l", "q").replace("L", "Q") if has_code else ""
        self.elements = frozenset(
            {int, float}
            if spec.dtype.startswith("float")
            else {{"bool": bool, "string": str, "image": str}.get(spec.dtype, int)}
        )
        self._pack: tuple[int, Callable[..., bytes]] = 0, struct.Struct("").pack

    def error(self, what: str, remedy: str = "") -> UserError:
        """Return an error that names the tensor."""
        return UserError(f"tensor {self.name!r}{what}", remedy=remedy)

    def check_shape(self, given: object) -> tuple[tuple[int, ...], int]:
        """Validate the shape in a request; return it with its number of elements.

        Raises:
            UserError: the input does not accept the shape.
        """
        if type(given) is not list or len(given) != len(self.dims):
            raise self._shape_error(given)
        count, axis = 1, 0
        for expected in self.dims:
            size = given[axis]
            if type(size) is not int or size < 0 or (size != expected and expected is not None):
                raise self._shape_error(given)
            count *= size
            axis += 1  # noqa: SIM113 (this is the hottest loop of a request)
        shape = tuple(given)
        if not count and math.prod(size for size in shape if size) > _EMPTY_LIMIT:
            raise self.error(f": shape {list(shape)} is too large for an empty tensor")
        return shape, count

    def _shape_error(self, given: object) -> UserError:
        if (
            type(given) is not list
            or len(given) > _MAX_RANK
            or not all(type(d) is int and d >= 0 for d in given)
        ):
            return self.error(
                f": shape must be a list of at most {_MAX_RANK} non-negative integers"
            )
        return self.error(f" must have shape [{', '.join(map(str, self.spec.shape))}], not {given}")

    def read_json(
        self, shape: tuple[int, ...], count: int, data: object, *, literals: bool
    ) -> Array:
        """Return an array from flat or nested lists.

        `shape` and `count` are the results of `check_shape`. `literals` states whether `data` can
        contain booleans.
        """
        flat = data
        if type(data) is list and len(data) != count and len(shape) == 2:
            columns = shape[1]
            for row in data:
                if type(row) is not list or len(row) != columns:
                    break
            else:
                flat = data[0] if len(data) == 1 else list(chain.from_iterable(data))
        if type(flat) is list and len(flat) == count and self.code:
            last, pack = self._pack
            if last != count:
                pack = struct.Struct(f"<{count}{self.code}").pack
                # Other threads read both values, so one atomic assignment sets them.
                self._pack = count, pack
            try:
                packed = pack(*flat)
            except (struct.error, OverflowError):
                # The data is nested, of other types, or out of range. The code below distinguishes
                # these cases.
                pass
            else:
                if not literals or bool not in set(map(type, flat)):
                    return np.ndarray(shape, self.dtype, packed)
        if isinstance(data, LazyArray):
            if self.code and data.shape in (shape, (math.prod(shape),)):
                numbers = data.to_numbers(self.dtype.kind)
                if numbers is not None and _is_in_range(numbers, self.dtype):
                    return numbers.astype(self.dtype).reshape(shape)
            data = data.to_lists()
        return self._read_lists(shape, data)

    def _read_lists(self, shape: tuple[int, ...], data: object) -> Array:
        if self.spec.dtype == "bfloat16":
            raise self.error(" of BF16 is not supported in JSON", "Send it in the binary form.")
        flat = self._flatten(shape, data)
        count = math.prod(shape)
        if len(flat) != count:
            raise self.error(f": shape {list(shape)} needs {count} elements, not {len(flat)}")
        if unexpected := set(map(type, flat)) - self.elements:
            names = ", ".join(sorted(_JSON_NAMES.get(t, t.__name__) for t in unexpected))
            raise self.error(f" of {self.datatype} contains {names}")
        if self.spec.dtype == "string":
            return build_object_array(flat, shape)
        try:
            with np.errstate(over="raise"):
                return np.array(flat, dtype=self.dtype).reshape(shape)
        except (OverflowError, FloatingPointError) as error:
            raise self.error(f" contains a number outside the range of {self.datatype}") from error

    def _flatten(self, shape: tuple[int, ...], data: object) -> list[Any]:
        """Return the elements of nested lists, which must fit the shape.

        A flat list is returned as it is.
        """
        if not isinstance(data, list):
            if shape != ():
                raise self.error(": data must be a list")
            return [data]
        if not any(isinstance(item, list) for item in data):
            return data
        level: list[Any] = [data]
        for size in shape:
            if not all(isinstance(item, list) and len(item) == size for item in level):
                raise self.error(f": the nesting of data does not fit shape {list(shape)}")
            level = list(chain.from_iterable(level))
        return level

    def read_binary(
        self, shape: tuple[int, ...], body: RequestBody, start: int, size: int
    ) -> Array:
        """Return an array from `size` bytes at `start`: little-endian, row-major."""
        count = math.prod(shape)
        if self.spec.dtype == "string":
            return build_object_array(self._split_text(body, start, size, count), shape)
        if size != count * self.dtype.itemsize:
            raise self.error(
                f": shape {list(shape)} of {self.datatype} needs {count * self.dtype.itemsize} "
                f"bytes, not {size}"
            )
        if (
            self.dtype.kind == "b"
            and count
            and np.frombuffer(body, np.uint8, count, start).max() > 1
        ):
            raise self.error(": a byte of BOOL must be 0 or 1")
        array = np.ndarray(shape, self.dtype, body, start)
        # ONNX Runtime requires aligned elements, so unaligned arrays are copied.
        return array if array.flags.aligned else array.copy()

    def _split_text(self, body: RequestBody, start: int, size: int, count: int) -> list[str]:
        """Return `count` elements of BYTES as strings, decoded from UTF-8."""
        texts: list[str] = []
        for element in self.split_elements(body, start, size, count):
            try:
                texts.append(str(element, "utf-8"))
            except UnicodeDecodeError as error:
                raise self.error(f": element {len(texts)} is not UTF-8") from error
        return texts

    def split_elements(
        self, body: RequestBody, start: int, size: int, count: int
    ) -> Iterator[RequestBody]:
        """Yield `count` elements of BYTES, each of which follows its length in four bytes."""
        if count * _TEXT_LENGTH.size > size:
            raise self.error(f": {count} elements of BYTES need more than {size} bytes")
        if count > MAX_VALUES:
            raise TooLargeError(
                f"tensor {self.name!r} has more than {MAX_VALUES} elements of BYTES"
            )
        end = start + size
        for number in range(count):
            if end - start < _TEXT_LENGTH.size:
                raise self.error(f": its bytes end after {number} of {count} elements")
            (length,) = _TEXT_LENGTH.unpack_from(body, start)
            start += _TEXT_LENGTH.size
            if length > end - start:
                raise self.error(
                    f": element {number} announces {length} bytes, but {end - start} follow"
                )
            yield body[start : start + length]
            start += length
        if start != end:
            raise self.error(f": {end - start} bytes follow after its {count} elements")

    def read_raw(self, body: RequestBody) -> Array:
        """Return an array from a body that consists only of the raw data.

        For text, the body is one element. For other types, the length of the body determines a free
        dimension.
        """
        if self.spec.dtype == "string":
            shape, _ = self.check_shape([1 if d is None else d for d in self.dims])
            body = join_text([bytes(body)])
            return self.read_binary(shape, body, 0, len(body))
        known = math.prod(d for d in self.dims if d is not None) * self.dtype.itemsize
        free = self.dims.count(None)
        if free > 1 or not known:
            raise self.error(
                " has several free dimensions or a dimension of size 0, so the shape of a raw body "
                "is unknown"
            )
        size = len(body) // known if free else 0
        shape, _ = self.check_shape([size if d is None else d for d in self.dims])
        return self.read_binary(shape, body, 0, len(body))

    def convert_cells(self, data: Any) -> Any:
        """Convert cells or rows of a table of text to elements of this input."""
        if self.spec.dtype == "string":
            return data
        convert = self._convert_cell
        return [
            [convert(cell, row) for cell in item] if isinstance(item, list) else convert(item, row)
            for row, item in enumerate(data, start=1)
        ]

    def _convert_cell(self, text: str, row: int) -> float | int | bool:
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
            raise self.error(
                f" of {self.datatype} contains {shorten(text)} in row {row}"
            ) from error

    def fill_missing(self, data: Any) -> Any:
        """Replace null in the rows of a table by NaN, for an input of floating-point type."""
        if self.dtype.kind != "f" or type(data) is not list:
            return data
        return [
            _fill_row(item) if type(item) is list else math.nan if item is None else item
            for item in data
        ]

    def check_column(self, data: Any) -> None:
        """Raise UserError for the first value of a wrong type, with its row."""
        if type(data) is not list:
            return
        for row, item in enumerate(data, start=1):
            value = item[0] if type(item) is list and len(item) == 1 else item
            if type(value) is not list and type(value) not in self.elements:
                name = _JSON_NAMES.get(type(value), "another type")
                raise self.error(f" of {self.datatype} contains {name} in row {row}")


def _fill_row(row: list[Any]) -> list[Any]:
    return [math.nan if cell is None else cell for cell in row]


def join_text(values: Iterable[bytes]) -> bytes:
    """Return elements of BYTES, each preceded by its length."""
    parts: list[bytes] = []
    for value in values:
        parts += (_TEXT_LENGTH.pack(len(value)), value)
    return b"".join(parts)


def _is_in_range(flat: Array, dtype: np.dtype[Any]) -> bool:
    if not flat.size or flat.dtype == dtype:
        return True
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return bool(limits.min <= flat.min() and flat.max() <= limits.max)


def build_object_array(values: list[Any], shape: tuple[int, ...]) -> Array:
    """Return an array of Python objects, such as strings."""
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)
