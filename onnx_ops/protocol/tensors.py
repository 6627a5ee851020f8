"""Tensors in the JSON form of the Open Inference Protocol v2, checked before any array is made.

https://github.com/kserve/open-inference-protocol (specification/protocol/inference_rest.md)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypedDict

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import UserError
from onnx_ops.ports.models import Array

DTYPE_OF_ONNX: Mapping[str, str] = {
    "tensor(bool)": "bool",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(string)": "string",
}
"""The name of an element type in `TensorSpec.dtype`, by the runtime's name of it."""

DATATYPE_OF: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
}
"""The Open Inference name of an element type."""

DTYPE_OF: Mapping[str, str] = {datatype: dtype for dtype, datatype in DATATYPE_OF.items()}


class TensorDocument(TypedDict):
    """A tensor on the wire. `data` is flat and row-major."""

    name: str
    datatype: str
    shape: list[int]
    data: Any


def numpy_dtype(dtype: str) -> str:
    return "object" if dtype == "string" else dtype


def metadata(spec: TensorSpec) -> dict[str, object]:
    """A model's input or output as its metadata shows it: -1 stands for a dimension that is free."""
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    return {"name": spec.name, "datatype": DATATYPE_OF[spec.dtype], "shape": shape}


def write_tensor(name: str, array: Array) -> TensorDocument:
    """The array as plain JSON types."""
    dtype = "string" if array.dtype.kind in "OU" else array.dtype.name
    return {
        "name": name,
        "datatype": DATATYPE_OF[dtype],
        "shape": [int(d) for d in array.shape],
        "data": array.reshape(-1).tolist(),
    }


def read_tensor(document: object, spec: TensorSpec | None = None) -> tuple[str, Array]:
    """Name and array of a tensor on the wire.

    Args:
        document: the parsed JSON; `data` may be flat or nested.
        spec: what the tensor must be; without it the tensor's own datatype and shape are believed.

    Raises:
        UserError: it is not such a tensor; the message names it.
    """
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        raise UserError("a tensor must be an object with a name")
    name = document["name"]
    datatype, shape = document.get("datatype"), document.get("shape")
    if not isinstance(datatype, str) or datatype not in DTYPE_OF:
        raise UserError(f"tensor {name!r}: datatype {datatype!r} is none of {', '.join(DTYPE_OF)}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
        raise UserError(f"tensor {name!r}: shape must be a list of whole numbers from 0")
    if "data" not in document:
        raise UserError(f"tensor {name!r} has no data (only the JSON form is accepted)")
    if spec is not None:
        if DATATYPE_OF[spec.dtype] != datatype:
            raise UserError(f"tensor {name!r} must be {DATATYPE_OF[spec.dtype]}, not {datatype}")
        check_shape(spec, tuple(shape))
    return name, make_array(name, DTYPE_OF[datatype], tuple(shape), document["data"])


def check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raises UserError if the shape does not fit."""
    fits = len(shape) == len(spec.shape) and all(
        not isinstance(want, int) or want == have for want, have in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(d) for d in spec.shape)
        raise UserError(f"tensor {spec.name!r} must have shape [{wanted}], not {list(shape)}")


def check_symbols(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Array]) -> None:
    """Raises UserError if a symbolic dimension has two sizes. `?` stands for dimensions without a name."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in tensors.items():
        for symbol, size in zip(specs[name].shape, array.shape, strict=True):
            if isinstance(symbol, int) or symbol == "?":
                continue
            known, owner = sizes.setdefault(symbol, (size, name))
            if known != size:
                raise UserError(f"dimension {symbol!r} is {known} in tensor {owner!r} but {size} in {name!r}")


def make_array(name: str, dtype: str, shape: tuple[int, ...], data: object) -> Array:
    """An array of that type and shape from flat or nested lists.

    The elements' types are checked one by one: numpy would turn text into numbers, and a wide string into a table
    of equally wide ones.

    Raises:
        UserError: count, nesting, type or range of the elements do not fit.
    """
    import numpy as np

    flat = _flatten(name, shape, data)
    wrong = set(map(type, flat)) - _ELEMENTS[dtype]
    if wrong:
        found = ", ".join(sorted(_JSON_NAMES.get(t, t.__name__) for t in wrong))
        raise UserError(f"tensor {name!r} of {DATATYPE_OF[dtype]} holds {found}")
    try:
        with np.errstate(over="raise"):
            return np.array(flat, dtype=numpy_dtype(dtype)).reshape(shape)
    except (OverflowError, FloatingPointError) as error:
        raise UserError(f"tensor {name!r} holds a number that is too large for {DATATYPE_OF[dtype]}") from error


def _flatten(name: str, shape: tuple[int, ...], data: object) -> list[object]:
    if shape == () and not isinstance(data, list):
        return [data]
    if not isinstance(data, list):
        raise UserError(f"tensor {name!r}: data must be a list")
    level: list[Any] = data
    if any(isinstance(item, list) for item in level):
        level = [level]
        for size in shape:
            if not all(isinstance(item, list) and len(item) == size for item in level):
                raise UserError(f"tensor {name!r}: the nesting of data does not fit shape {list(shape)}")
            level = list(chain.from_iterable(level))
    if 0 in shape and math.prod(d for d in shape if d) > _EMPTY_LIMIT:
        # No element needs to be sent for it, yet a model may answer with an array of those other dimensions.
        raise UserError(f"tensor {name!r}: shape {list(shape)} is too large for an empty tensor")
    if len(level) != math.prod(shape):
        raise UserError(f"tensor {name!r}: shape {list(shape)} needs {math.prod(shape)} elements, not {len(level)}")
    return level


def nested_shape(name: str, data: object) -> tuple[int, ...]:
    """The shape that nested lists have by their first elements; `make_array` then checks all others."""
    return tuple(_sizes(name, data))


def _sizes(name: str, data: object) -> Iterator[int]:
    depth = 0
    while isinstance(data, list):
        if depth == 32:
            raise UserError(f"tensor {name!r}: data is nested too deeply")
        yield len(data)
        if not data:
            return
        data, depth = data[0], depth + 1


_EMPTY_LIMIT = 1 << 16


def _elements(dtype: str) -> frozenset[type]:
    if dtype.startswith("float"):
        return frozenset({int, float})
    return frozenset({{"bool": bool, "string": str}.get(dtype, int)})


_ELEMENTS: Mapping[str, frozenset[type]] = {dtype: _elements(dtype) for dtype in DATATYPE_OF}
_JSON_NAMES: Mapping[type, str] = {
    str: "text",
    bool: "a truth value",
    int: "a whole number",
    float: "a fraction",
    type(None): "null",
    dict: "an object",
    list: "a list",
}
