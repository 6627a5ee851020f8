"""Content codings of request and response bodies: gzip and deflate.

RFC 9110, 8.4.1, defines them.
"""

from __future__ import annotations

import functools
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from onnx_ops.errors import ServiceUnavailableError, TooLargeError, UserError
from onnx_ops.serving.inference.tensors import RequestBody

CODINGS: Mapping[bytes, int] = {
    b"gzip": 16 + zlib.MAX_WBITS,
    b"x-gzip": 16 + zlib.MAX_WBITS,
    b"deflate": zlib.MAX_WBITS,
}
"""zlib's `wbits` by content coding.

`deflate` is the zlib format (RFC 1950), not a raw deflate stream.
"""

_LEVEL = 1
"""Level of compression.

For 2 MB of JSON numbers, level 1 takes 53 ms and reduces the size to 48 %. Level 6 takes 430 ms and
reduces the size to 43 %.
"""
_ACCEPTED = re.compile(rb"\s*([^\s;]+)\s*(?:;\s*q=([01](?:\.[0-9]{0,3})?)\s*)?")
_MAX_ACCEPT_BYTES = 256
_INPUT_BYTES = 1 << 16
"""Compressed bytes that are decompressed in one step.

After each step, zlib copies the bytes that it has not consumed.
"""
_PIECE_BYTES = 1 << 20

Charge = Callable[[int], None]
"""Function that charges bytes to a budget.

It raises ServiceUnavailableError if the budget is exhausted.
"""


class InflateBudget:
    """Limit for the decompressed bodies that a worker has in memory at the same time.

    All requests and all threads of the worker share the budget.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.bytes = 0

    @contextmanager
    def reserve(self) -> Iterator[Charge]:
        """Yield a function that charges bytes. The end of the block releases them.

        The function raises ServiceUnavailableError if all charged bytes would exceed the limit.
        """
        charged = 0

        def charge(size: int) -> None:
            nonlocal charged
            with self._lock:
                if self.bytes + size > self._max_bytes:
                    raise ServiceUnavailableError(
                        "the server is decompressing too many bytes at the same time"
                    )
                self.bytes += size
            charged += size

        try:
            yield charge
        finally:
            with self._lock:
                self.bytes -= charged


def inflate(
    body: RequestBody, coding: bytes, max_bytes: int, charge: Charge = lambda _: None
) -> bytes:
    """Return a body without its content coding.

    A body must be one stream. A gzip body with several members is refused, because many empty
    members take far longer to read than their size suggests.

    Raises:
        TooLargeError: the result has more than `max_bytes`. Decompression stops at this limit.
        UserError: the body is malformed, ends too early, or has bytes after its end.
        ServiceUnavailableError: raised by `charge`, which is called for each piece.
    """
    stream = zlib.decompressobj(CODINGS[coding])
    place = size = 0
    pieces: list[bytes] = []
    try:
        while place < len(body) and not stream.eof:
            rest = bytes(body[place : place + _INPUT_BYTES])
            place += len(rest)
            while rest and not stream.eof:
                pieces.append(stream.decompress(rest, _PIECE_BYTES))
                rest = stream.unconsumed_tail
                size += len(pieces[-1])
                if size > max_bytes:
                    # Without this call, the traceback of the error would keep the pieces in memory.
                    pieces.clear()
                    raise TooLargeError(
                        f"the body must not be larger than {max_bytes} bytes after decompression"
                    )
                charge(len(pieces[-1]))
    except zlib.error as error:
        raise UserError(f"the body is not valid {coding.decode()}", why=str(error)) from error
    except ServiceUnavailableError:
        pieces.clear()
        raise
    if not stream.eof:
        raise UserError(f"the body ends before the end of its {coding.decode()} stream")
    if unused := len(stream.unused_data) + len(body) - place:
        raise UserError(f"{unused} bytes follow after the {coding.decode()} stream of the body")
    return b"".join(pieces)


def compress(body: bytes, coding: bytes) -> bytes:
    """Return a body in a content coding."""
    return zlib.compress(body, _LEVEL, CODINGS[coding])


@functools.lru_cache(maxsize=64)
def choose_coding(accept_encoding: bytes) -> bytes:
    """Return the content coding that a client prefers; empty if it prefers none.

    The `Accept-Encoding` header states the preference (RFC 9110, 12.5.3). A header of more than
    `_MAX_ACCEPT_BYTES` is ignored.
    """
    weights: dict[bytes, float] = {}
    if len(accept_encoding) <= _MAX_ACCEPT_BYTES:
        for element in accept_encoding.lower().split(b","):
            if match := _ACCEPTED.fullmatch(element):
                weights[match[1].removeprefix(b"x-")] = float(match[2] or 1)
    weight, coding = max(
        ((weights.get(coding, weights.get(b"*", 0.0)), coding) for coding in (b"gzip", b"deflate")),
        key=lambda w: w[0],
    )
    return coding if weight and weight >= weights.get(b"identity", 0.0) else b""
