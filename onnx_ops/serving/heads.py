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
_FIXED = ODD | {b"connection", b"host", b"origin"}
"""Headers with which a request may be refused or end its connection: another value is left to the parser."""
_LENGTH = b"content-length"
_VALUE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_HEADER = re.compile(rb"(([\w!#$%&'*+.^`|~-]+): )" + _VALUE.pattern)
_DIGITS = re.compile(rb"[0-9]{1,15}")


@dataclass(slots=True)
class Seen:
    """The head of a request, and how long it is with its body.

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
    _only: tuple[bytes, bytes, bytes] | None = field(init=False, repr=False, compare=False, default=None)
    """The header that alone was another one in the last request, and all that stands before and after its value."""

    def __post_init__(self) -> None:
        self._lines = self.start[:-4].split(b"\r\n")
        self._names = [b"", *map(_free, self._lines[1:])]

    def again(self, data: bytes, most: int) -> tuple[Head, bytes] | None:
        """The head and body of another request, if nothing but values differs and it is whole; else None.

        Args:
            most: bytes of the largest body.
        """
        changed, at = self._as_last(data) or self._compared(data)
        if changed is None:
            return None
        announced = changed.get(_LENGTH)
        if announced is not None and not _DIGITS.fullmatch(announced):
            return None
        head = {**self.head, **changed}
        body = data[at:]
        return (head, body) if len(body) == int(head[_LENGTH]) <= most else None

    def _as_last(self, data: bytes) -> tuple[dict[bytes, bytes], int] | None:
        """As `_compared`, if nothing but the header that changed the last time did; else None."""
        if self._only is None:
            return None
        name, before, after = self._only
        end = data.find(b"\r\n", len(before), MOST_BYTES) if data.startswith(before) else -1
        if end < 0 or not data.startswith(after, end):
            return None
        value = data[len(before) : end]
        return ({name: value}, end + len(after)) if _VALUE.fullmatch(value) else None

    def _compared(self, data: bytes) -> tuple[dict[bytes, bytes] | None, int]:
        """The headers with another value, by lower-case name, and where the body begins; None if more is different."""
        end = data.find(b"\r\n\r\n", 0, MOST_BYTES)
        lines = data[:end].split(b"\r\n") if end > 0 else []
        if len(lines) != len(self._lines):
            return None, 0
        changed: dict[bytes, bytes] = {}
        place = 0
        for number, (old, new, name) in enumerate(zip(self._lines, lines, self._names, strict=True)):
            if old != new:
                value = new[len(name) :]
                if not (name and new.startswith(name) and _VALUE.fullmatch(value)):
                    return None, 0
                changed[name[:-2].lower()] = value
                place = number
        if len(changed) == 1:
            before = b"\r\n".join((*lines[:place], self._names[place]))
            after = b"\r\n".join((b"", *lines[place + 1 :], b"", b""))
            self._only = next(iter(changed)), before, after
        return changed, end + 4


def _free(line: bytes) -> bytes:
    match = _HEADER.fullmatch(line)
    return b"" if match is None or match[2].lower() in _FIXED else match[1]
