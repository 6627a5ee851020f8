"""Heads of requests that come again on a connection, read without a parser.

A client that keeps a connection asks with the same head again and again, but for a few values: the length of the body,
a user's key, a request id. What a parser would make of such a head is known from the first one: the names stand at the
same places, and a value of visible ASCII is that value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from onnx_ops.serving.answers import Head
from onnx_ops.serving.residents import Route

MOST_BYTES = 2048
"""Longer heads are left to the parser."""
ODD = frozenset({b"expect", b"upgrade", b"transfer-encoding", b"content-encoding"})
"""Headers that make a request unusual; a head that has one is never kept."""
_FIXED = ODD | {b"connection"}
_LENGTH = b"content-length"
_VALUE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_HEADER = re.compile(rb"(([\w!#$%&'*+.^`|~-]+): )" + _VALUE.pattern)
_DIGITS = re.compile(rb"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Seen:
    """The head of a request that came in one piece with its body.

    Args:
        start: its bytes, with the empty line.
        size: bytes of head and body.
        route, head: what a parser has made of it.
    """

    start: bytes
    size: int
    route: Route
    head: Head
    _lines: list[bytes] = field(init=False, repr=False, compare=False)
    _names: list[bytes] = field(init=False, repr=False, compare=False)
    """Of each line what it begins with; empty for one that must stay as it is."""

    def __post_init__(self) -> None:
        lines = self.start[:-4].split(b"\r\n")
        object.__setattr__(self, "_lines", lines)
        object.__setattr__(self, "_names", [b"", *map(_free, lines[1:])])

    def again(self, data: bytes, most: int) -> tuple[Head, bytes] | None:
        """The head and body of another request, if nothing but values differs and it is whole; else None.

        Args:
            most: bytes of the largest body.
        """
        end = data.find(b"\r\n\r\n", 0, MOST_BYTES)
        lines = data[:end].split(b"\r\n") if end > 0 else []
        if len(lines) != len(self._lines):
            return None
        changed: dict[bytes, bytes] = {}
        for old, new, name in zip(self._lines, lines, self._names, strict=True):
            if old != new:
                value = new[len(name) :]
                if not (name and new.startswith(name) and _VALUE.fullmatch(value)):
                    return None
                changed[name[:-2].lower()] = value
        announced = changed.get(_LENGTH)
        if announced is not None and not _DIGITS.fullmatch(announced):
            return None
        head = {**self.head, **changed}
        body = data[end + 4 :]
        return (head, body) if len(body) == int(head[_LENGTH]) <= most else None


def _free(line: bytes) -> bytes:
    match = _HEADER.fullmatch(line)
    return b"" if match is None or match[2].lower() in _FIXED else match[1]
