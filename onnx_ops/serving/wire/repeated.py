"""Requests that are the same JSON as the last one but for the numbers.

A client of a model with one input writes the same text around its data every time. That text is compared, and only what
is between is parsed. In JSON a value stands for itself wherever it stands, so the rest of the document is what it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from onnx_ops.serving.wire.call import Call
from onnx_ops.serving.wire.document import LARGE, may_hold_literals
from onnx_ops.serving.wire.reader import Reader

_MISSES = 17
"""After so many requests in a row that are unlike the one that is known, another one is learnt, as learning costs more
than it may save. An odd number, so that of two clients who take turns each has its chance.
"""
_PLACE = re.compile(rb'"data"\s*:\s*(?=\[)')
_BRACKET = re.compile(rb"[\[\]]")
_MARK = "\0"


@dataclass(frozen=True, slots=True)
class _Known:
    start: bytes
    end: bytes
    reader: Reader
    shape: tuple[int, ...]
    count: int
    call: Call


class Repeated:
    """What the last request of this kind looked like. Any thread may use it: what is known is replaced as a whole."""

    __slots__ = ("_known", "_misses")

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._misses = 0

    def read(self, body: bytes) -> Call | None:
        """The request in a body that differs from the known one in its data alone; None for any other.

        Raises:
            UserError: the data does not fit the model; told as for any other body.
        """
        known = self._known
        if known is None or len(body) >= LARGE or not (body.startswith(known.start) and body.endswith(known.end)):
            return None
        data = body[len(known.start) : len(body) - len(known.end)]
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        array = known.reader.array(known.shape, known.count, values, literals=may_hold_literals(data))
        self._misses = _MISSES
        call = known.call
        return Call({known.reader.name: array}, call.outputs, call.rows, call.form, call.identity, call.binary)

    def learn(self, body: bytes, document: dict[str, Any], call: Call, reader: Reader) -> None:
        """Know a request by its body, as it was parsed and read.

        Args:
            document, call: what became of `body`.
            reader: of the only tensor in it.
        """
        if len(body) >= LARGE:
            return
        self._misses -= 1
        if self._misses > 0 or (found := _around(body)) is None:
            return
        self._misses = _MISSES
        start, end = found
        (array,) = call.feed.values()
        marked = {**document, "inputs": [{**document["inputs"][0], "data": _MARK}]}
        if _parsed(start + orjson.dumps(_MARK) + end) == marked:
            bare = Call({}, call.outputs, call.rows, call.form, call.identity, call.binary)
            self._known = _Known(start, end, reader, array.shape, array.size, bare)


def _around(body: bytes) -> tuple[bytes, bytes] | None:
    """The text before and after what looks like the data of the only tensor."""
    place = _PLACE.search(body)
    if place is None:
        return None
    depth = 0
    for bracket in _BRACKET.finditer(body, place.end()):
        depth += 1 if bracket[0] == b"[" else -1
        if not depth:
            return body[: place.end()], body[bracket.end() :]
    return None


def _parsed(text: bytes) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
