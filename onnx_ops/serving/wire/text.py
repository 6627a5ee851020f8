"""BYTES in the binary form: each element is its length, four bytes little-endian, and then its UTF-8."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from onnx_ops.errors import UserError

_LENGTH = struct.Struct("<I")


def split_text(name: str, body: bytes, start: int, size: int, count: int) -> list[str]:
    """The elements of `size` bytes at `start`.

    Raises:
        UserError: they are not exactly `count` elements, or not UTF-8, which text in ONNX is.
    """
    if count * _LENGTH.size > size:
        raise UserError(f"tensor {name!r}: {count} elements of BYTES need more than {size} bytes")
    end = start + size
    found: list[str] = []
    for _ in range(count):
        if end - start < _LENGTH.size:
            raise UserError(f"tensor {name!r}: its bytes end after {len(found)} of {count} elements")
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        if length > end - start:
            raise UserError(f"tensor {name!r}: element {len(found)} announces {length} bytes, but {end - start} follow")
        try:
            found.append(body[start : start + length].decode())
        except UnicodeDecodeError as error:
            raise UserError(f"tensor {name!r}: element {len(found)} is not UTF-8") from error
        start += length
    if start != end:
        raise UserError(f"tensor {name!r}: {end - start} bytes follow after its {count} elements")
    return found


def join_text(values: Iterable[bytes]) -> bytes:
    parts: list[bytes] = []
    for value in values:
        parts += (_LENGTH.pack(len(value)), value)
    return b"".join(parts)
