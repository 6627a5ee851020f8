"""Answers to inference requests, as the bytes that go out; the same whichever way a request came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from onnx_ops.errors import OnnxOpsError
from onnx_ops.protocol import messages
from onnx_ops.serving.http import Overloaded, Unfit, status_of

Head = Mapping[bytes, bytes]
"""Headers of a request by lower-case name; of several with one name the first."""

_JSON_LINE = b"content-type: application/json\r\n"
_ECHOED = (messages.REQUEST_ID_HEADER.encode(), messages.TRACE_PARENT_HEADER.encode())
_NOTHING_TO_ECHO = frozenset(_ECHOED).isdisjoint
_LONGEST_ECHO = 256


@dataclass(slots=True)
class Answer:
    """`lines` are whole header lines, each ended by CR LF, without content-length."""

    status: int
    lines: bytes
    body: bytes

    def pairs(self) -> list[tuple[bytes, bytes]]:
        """The headers one by one, content-length the last."""
        listed = [line.partition(b": ")[::2] for line in self.lines.split(b"\r\n") if line]
        return [*listed, (b"content-length", str(len(self.body)).encode())]


def refusal(status: int, message: str, lines: bytes = b"") -> Answer:
    """An error as the Open Inference Protocol writes it: `{"error": message}`."""
    return Answer(status, _JSON_LINE + lines, orjson.dumps({"error": message}))


def of_error(error: OnnxOpsError, lines: bytes = b"", *, invocation: bool = False) -> Answer:
    """Return the answer to a request that failed.

    An invocation whose inputs the model refuses is answered 500, not 422: SageMaker counts 4xx as the caller's errors,
    and a rollout there would not see a candidate that fails.
    """
    if isinstance(error, Overloaded):
        lines += b"retry-after: %d\r\n" % error.retry_after_s
    status = 500 if invocation and isinstance(error, Unfit) else status_of(error)
    return refusal(status, str(error), lines)


def of_crash(lines: bytes = b"") -> Answer:
    """For an error that nobody foresaw: the log has it all, the client only learns that it happened."""
    return refusal(500, "internal error", lines)


def naming(deployment: str) -> bytes:
    """The header lines that say which deployment answered."""
    name = deployment.encode("ascii", "replace")
    return b"%s: %s\r\n%s: %s\r\n" % (messages.DEPLOYMENT_HEADER.encode(), name, messages.VARIANT_HEADER.encode(), name)


def echo(head: Head) -> bytes:
    """Request id and trace context of the request, where they are short and printable."""
    lines = b""
    if _NOTHING_TO_ECHO(head):
        return lines
    for name in _ECHOED:
        value = head.get(name)
        if value is not None and len(value) <= _LONGEST_ECHO and value.isascii() and value.decode().isprintable():
            lines += b"%s: %s\r\n" % (name, value)
    return lines
