"""Where a model's external weights lie: every place is checked before a byte of it is read.

What ONNX Runtime 1.31 and the onnx package refuse differs: the former reads a tensor out of the model file itself, out
of the middle of another tensor, and through `..` that comes back; the latter reads a tensor that is shorter than its
shape. Here a place is refused if either could be misled by it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from onnx_ops.errors import NotFoundError, RefusedError

if TYPE_CHECKING:
    import onnx

_LARGEST = (1 << 63) - 1
_AGAIN = "Save the model again with its weights beside it."


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Bytes `start` to `end` (exclusive) of a file that hold one tensor; `file` is its real path."""

    file: Path
    start: int
    end: int
    tensor: str


def locations(tensors: Iterable[onnx.TensorProto]) -> tuple[str, ...]:
    """Names of the files that tensors say they lie in, as they stand in the model, each once; none is looked at."""
    return tuple(dict.fromkeys(e.value for t in tensors for e in t.external_data if e.key == "location"))


def checked_files(tensors: Iterable[onnx.TensorProto], folder: Path) -> tuple[Path, ...]:
    """The files that hold the tensors, in order of appearance.

    Raises:
        RefusedError: a name is absolute, climbs out of the folder or links out of it; a place is missing,
            given twice, negative, beyond the file's end, or of another size than its tensor; two places overlap
            without being the same.
        NotFoundError: a file is missing.
    """
    found: dict[Path, None] = {}
    places: list[Place] = []
    for tensor in tensors:
        if not (tensor.external_data or tensor.data_location):  # 1 is EXTERNAL
            continue
        entries = _entries(tensor)
        path = _inside_of(folder, entries["location"], tensor.name)
        found[path] = None
        places.append(_place(tensor, entries, path))
    _check_apart(places)
    return tuple(found)


def bits_of(data_type: int) -> int | None:
    """Bits of one element of an ONNX type; None for texts and for types that do not exist."""
    from onnx import TensorProto

    return _BITS.get(TensorProto.DataType.Name(data_type)) if data_type in TensorProto.DataType.values() else None


def tell_lengths(tensors: Iterable[onnx.TensorProto]) -> None:
    """Give each external tensor the length of its shape: without one, the onnx package reads the rest of the file."""
    for tensor in tensors:
        size = _bytes_of(tensor) if tensor.external_data else None
        if size is not None and all(entry.key != "length" for entry in tensor.external_data):
            tensor.external_data.add(key="length", value=str(size))


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    keys = [entry.key for entry in tensor.external_data]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RefusedError(f"it tells the {twice!r} of its external data twice", where=_of(tensor.name), remedy=_AGAIN)
    if "location" not in keys:
        raise RefusedError(
            "it has external data and does not tell in which file", where=_of(tensor.name), remedy=_AGAIN
        )
    return {entry.key: entry.value for entry in tensor.external_data}


def _place(tensor: onnx.TensorProto, entries: dict[str, str], path: Path) -> Place:
    """Where a tensor stands in its file, which may end in the middle of nothing."""
    where = _of(tensor.name)
    start, told = _number(entries, "offset", where), _number(entries, "length", where)
    size, wanted = os.path.getsize(path), _bytes_of(tensor)
    if told is not None and wanted is not None and told != wanted:
        raise RefusedError(f"its external data has {told} bytes, its shape needs {wanted}", where=where, remedy=_AGAIN)
    begin = start or 0
    length = told if told is not None else wanted if wanted is not None else max(0, size - begin)
    if begin + length > size:
        raise RefusedError(
            f"its external data lies beyond the end of {entries['location']!r}",
            where=where,
            why=f"it should stand at bytes {begin} to {begin + length}, the file has {size}",
            remedy="Copy the file again, whole; or save the model again.",
        )
    return Place(file=path.resolve(), start=begin, end=begin + length, tensor=tensor.name)


def _number(entries: dict[str, str], key: str, where: str) -> int | None:
    if key not in entries:
        return None
    text = entries[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= _LARGEST):
        what = f"the {key} of its external data is no number of bytes: {text[:40]!r}"
        raise RefusedError(what, where=where, remedy=_AGAIN)
    return int(text)


def _bytes_of(tensor: onnx.TensorProto) -> int | None:
    """What its shape and type take; None for a type without a fixed size."""
    if any(size < 0 for size in tensor.dims):
        raise RefusedError(f"its shape is negative: {list(tensor.dims)}", where=_of(tensor.name))
    bits = bits_of(tensor.data_type)
    return None if bits is None else -(-math.prod(tensor.dims) * bits // 8)


def _check_apart(places: list[Place]) -> None:
    """Tensors may share their bytes, as tied weights do, but not in part."""
    last: Place | None = None
    for place in sorted(p for p in places if p.end > p.start):
        if last and last.file == place.file and place.start < last.end and (last.start, last.end) != _span(place):
            raise RefusedError(
                f"its external data overlaps that of tensor {last.tensor}", where=_of(place.tensor), remedy=_AGAIN
            )
        last = place


def _span(place: Place) -> tuple[int, int]:
    return place.start, place.end


def _inside_of(folder: Path, name: str, tensor: str) -> Path:
    pure = PurePosixPath(name)
    unsafe = not name or pure.is_absolute() or ".." in pure.parts or "\\" in name
    path = folder / name
    if unsafe or not _inside(path, folder):
        raise RefusedError(f"its external data {name!r} lies outside its folder", where=_of(tensor), remedy=_AGAIN)
    if not os.path.isfile(path):  # unlike Path.is_file, it takes a name that is too long
        remedy = f"Put {name} there: it holds the model's weights, and belongs with the file."
        raise NotFoundError(f"its external data {name!r} is missing", where=str(folder), remedy=remedy)
    return path


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, a zero byte
        return False


def _of(tensor: str) -> str:
    return f"tensor {tensor}"


def _sizes() -> Iterator[tuple[str, int]]:
    for bits, names in {
        2: "INT2 UINT2",
        4: "INT4 UINT4 FLOAT4E2M1",
        8: "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ FLOAT8E8M0",
        16: "INT16 UINT16 FLOAT16 BFLOAT16",
        32: "INT32 UINT32 FLOAT",
        64: "INT64 UINT64 DOUBLE COMPLEX64",
        128: "COMPLEX128",
    }.items():
        for name in names.split():
            yield name, bits


_BITS = dict(_sizes())
