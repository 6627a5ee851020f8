"""The protocol of one connection, with a fast path for inference.

Inference requests of the usual form are answered straight from the parser's callbacks, without an ASGI scope and task
for each. Every other request goes to the Starlette app, which also answers inference, byte for byte the same. Both have
the same limits.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from onnx_ops.serving.http.limits import (
    ANSWERING,
    IDLE,
    READING,
    ConnectionLimits,
    HostPolicy,
    LimitedProtocol,
    RequestRejectedError,
)
from onnx_ops.serving.inference.deployments import InferenceRoute, PendingRequest
from onnx_ops.serving.inference.responses import RawResponse, RequestHead
from onnx_ops.serving.inference.service import InferenceService

_LARGE_BODY = 1 << 16
"""Bytes of a body from which it is collected without the parser, which would copy each part."""
_MAX_CACHED_HEAD = 2048
"""Longer heads are left to the parser."""
_UNUSUAL = frozenset({b"expect", b"upgrade", b"transfer-encoding", b"content-encoding"})
"""Headers that make a request unusual; its head is never cached."""
_FIXED = _UNUSUAL | {b"connection", b"host", b"origin"}
"""Headers that can reject a request or end its connection: another value is left to the parser."""
_LENGTH = b"content-length"
_VALUE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_HEADER = re.compile(rb"(([\w!#$%&'*+.^`|~-]+): )" + _VALUE.pattern)
_DIGITS = re.compile(rb"[0-9]{1,15}")


@dataclass(slots=True)
class CachedRequestHead:
    """The head of a request, to read similar ones without a parser.

    A client that keeps a connection sends the same head again and again, but for a few values: the length of the body,
    a user's key, a request id. What a parser would make of such a head is known from the first one: the names have the
    same places, and a value of visible ASCII is that value.

    Args:
        start: its bytes, with the empty line.
        size: bytes of head and body.
        route, head: the parsed request line and headers.
    """

    start: bytes
    size: int
    route: InferenceRoute
    head: RequestHead
    _lines: list[bytes] = field(init=False, repr=False, compare=False)
    _names: list[bytes] = field(init=False, repr=False, compare=False)
    """The start of each line, up to its value; empty for a line that must not change."""
    _only: tuple[bytes, bytes, bytes] | None = field(init=False, repr=False, compare=False, default=None)
    """The only header that changed in the last request, and all bytes before and after its value."""

    def __post_init__(self) -> None:
        self._lines = self.start[:-4].split(b"\r\n")
        self._names = [b""]
        for line in self._lines[1:]:
            header = _HEADER.fullmatch(line)
            self._names.append(b"" if header is None or header[2].lower() in _FIXED else header[1])

    def match(self, data: bytes, max_body: int) -> tuple[RequestHead, bytes] | None:
        """Return head and body of a request that differs only in values, else None.

        Args:
            data: the received bytes.
            max_body: bytes of the largest body.
        """
        changed, at = self._match_last(data) or self._compare(data)
        if changed is None:
            return None
        announced = changed.get(_LENGTH)
        if announced is not None and not _DIGITS.fullmatch(announced):
            return None
        head = {**self.head, **changed}
        body = data[at:]
        return (head, body) if len(body) == int(head[_LENGTH]) <= max_body else None

    def _match_last(self, data: bytes) -> tuple[dict[bytes, bytes], int] | None:
        """Do the same as `_compare`, if the same header differs as last time."""
        if self._only is None:
            return None
        name, before, after = self._only
        end = data.find(b"\r\n", len(before), _MAX_CACHED_HEAD) if data.startswith(before) else -1
        if end < 0 or not data.startswith(after, end):
            return None
        value = data[len(before) : end]
        return ({name: value}, end + len(after)) if _VALUE.fullmatch(value) else None

    def _compare(self, data: bytes) -> tuple[dict[bytes, bytes] | None, int]:
        """Return changed headers and the start of the body; None if more differs."""
        end = data.find(b"\r\n\r\n", 0, _MAX_CACHED_HEAD)
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


class _QueuedCycle:
    """Takes the place of uvicorn's request while an inference is queued.

    Requests behind it on the same connection wait as they do behind one of uvicorn's own.
    """

    __slots__ = ("disconnected", "keep_alive", "message_event", "more_body", "request", "response_complete")

    def __init__(self, request: PendingRequest, *, keep_alive: bool) -> None:
        self.request = request
        self.response_complete = False
        self.keep_alive = keep_alive
        self.disconnected = False
        self.more_body = False
        self.message_event = self

    def set(self) -> None:
        """Do nothing: uvicorn wakes the app by this, and here is none."""


class InferenceProtocol(LimitedProtocol):
    """One connection. `build_protocol` sets what is served, and its limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection."""
        self._route: InferenceRoute | None = None
        self._queued: _QueuedCycle | None = None
        self._cached: CachedRequestHead | None = None
        self._complete: tuple[InferenceRoute, RequestHead, bytes] | None = None
        self._head: RequestHead = {}
        self._body: bytes | bytearray = b""
        self._announced = 0
        self._start = b""
        self._parts: list[bytes] = []
        self._missing = 0
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, and abandon its queued request."""
        if self._queued is not None:
            self._queued.request.abandoned = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a request whose head is cached, or parse the received data."""
        if self._missing:
            self._collect(data)
            return
        cached, is_idle = self._cached, self.stage is IDLE and not self.flow.write_paused
        if cached is not None and is_idle:
            # The same head as before, with all or the start of a body of the length that it announces: what a parser
            # would make of it is known, and the parser is between two messages.
            missing = cached.size - len(data)
            if (missing == 0 or missing >= _LARGE_BODY) and data.startswith(cached.start):
                body = data[len(cached.start) :]
                if missing:
                    self._begin_head()
                    self._in_head = False
                    self._route, self._head, self._start = cached.route, cached.head, cached.start
                    self._announced = self._missing = cached.size - len(cached.start)
                    self._parts = []
                    self._collect(body)
                else:
                    self._answer(cached.route, cached.head, body)
                return
            if (match := cached.match(data, self.limits.max_body)) is not None:
                self._answer(cached.route, *match)
                return
        self._cached = self._complete = None
        super().data_received(data)
        if self._route is not None and not self._in_head and self.stage is READING:
            missing = self._announced - len(self._body)
            if missing >= _LARGE_BODY:  # bypass the parser for the rest
                self._missing = missing
                self._parts = [bytes(self._body)]
                self._start = data[: len(data) - len(self._body)] if is_idle else b""
                self._reset_parser()
        elif is_idle:
            self._cache_last_head(data)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Start a request."""
        self.url = b""
        self.headers = []
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the fast path for usual inference requests, else pass the request to uvicorn."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade_offered = True  # `data_received` feeds the head again, without the offer
            return
        head = dict(self.headers)
        announced = head.get(_LENGTH)
        self._route = None
        self._check_head(head)
        route = self.service.deployments.routes.get(self.url)
        if (
            route is not None
            and announced is not None
            and len(head) == len(self.headers)
            and self.parser.get_method() == b"POST"
            and _UNUSUAL.isdisjoint(head)
            and self.parser.should_keep_alive()
            and (b"connection" not in head or self.parser.get_http_version() == "1.1")
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
        ):
            self._route = route
            self._head = head
            self._announced = int(announced)
            self._body = b""
            return
        # Hand the request to uvicorn, which was not notified of it yet.
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        is_http_11 = self.parser.get_http_version() == "1.1"
        self.expect_100_continue = is_http_11 and any(name == b"expect" for name, _ in headers)
        self.headers.extend(headers)
        super().on_headers_complete()
        if self.limits.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        if not self._received and self._route is not None and len(body) == self._announced:
            self._body = body
            return
        self._count_body(len(body))
        if self._route is None:
            super().on_body(body)
        elif not self._body:
            self._body = body
        else:
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        """Answer a complete request."""
        if self._upgrade_offered:
            return
        route = self._route
        if route is None:
            if self.cycle.response_complete:
                self._account_body(-self._body_bytes)
                self.stage, self.since = IDLE, self.limits.now
            elif self.stage is READING:
                self.stage = ANSWERING
            super().on_message_complete()
            self.cycle.more_body = False
            return
        body, self._route, self._body = bytes(self._body), None, b""
        self._complete = (route, self._head, body)
        self._answer(route, self._head, body)

    # Responses

    def _answer(self, route: InferenceRoute, head: RequestHead, body: bytes) -> None:
        request = PendingRequest(route, head, body, self._respond, time.perf_counter())
        response = self.service.handle(request)
        if response is None:
            self.stage = ANSWERING
            self.cycle = self._queued = _QueuedCycle(request, keep_alive=not self.limits.draining)
            self._account_body(len(request.body) - self._body_bytes)
            return
        self._send(response, request.head, last=self.limits.draining)
        if self.limits.draining:
            self.transport.close()
        self.stage = IDLE
        self.since = self.limits.now
        if self._body_bytes:
            self._account_body(-self._body_bytes)

    def _collect(self, data: bytes) -> None:
        part, rest = (data, b"") if len(data) <= self._missing else (data[: self._missing], data[self._missing :])
        try:
            self._count_body(len(part))
        except RequestRejectedError as error:
            self._reject_error(error)
            return
        self._parts.append(part)
        self._missing -= len(part)
        if self._missing:
            return
        self._body = b"".join(self._parts)
        self._parts = []
        self.on_message_complete()
        self._cache_head(self._start)
        if rest:
            self.data_received(rest)

    def _reject(self, status: int, message: str) -> None:
        self._missing, self._parts, self._body = 0, [], b""
        super()._reject(status, message)

    def _cache_last_head(self, data: bytes) -> None:
        """Cache the head of the last request, if `data` was just this one request."""
        body = b"" if self._complete is None else self._complete[2]
        if data.endswith(body):
            self._cache_head(data[: len(data) - len(body)])

    def _cache_head(self, start: bytes) -> None:
        """Cache what preceded the last body, if that is just one head."""
        is_head = start.startswith(b"POST ") and start.find(b"\r\n\r\n") == len(start) - 4
        if self._complete is not None and self.stage is IDLE and is_head and len(start) <= _MAX_CACHED_HEAD:
            route, head, body = self._complete
            self._cached = CachedRequestHead(start, len(start) + len(body), route, head)

    def _respond(self, response: RawResponse) -> None:
        """Send the response to a queued request."""
        queued, self._queued = self._queued, None
        if queued is None or queued.request.abandoned:
            return
        queued.response_complete = True
        self._send(response, queued.request.head, last=not queued.keep_alive)
        if not queued.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Do what uvicorn does, without a timer for each connection."""
        self._account_body(-self._body_bytes)
        if self.transport.is_closing():
            return
        self.since = self.limits.now
        if not self.pipeline:
            self.stage = READING if self.is_answered_early else IDLE
            self.flow.resume_reading()
            return
        cycle, app = self.pipeline.pop()
        self.stage = READING if cycle.more_body else ANSWERING
        self.flow.resume_reading()
        self._start_asgi_task(cycle, app)


def build_protocol(service: InferenceService, limits: ConnectionLimits, hosts: HostPolicy) -> type[InferenceProtocol]:
    """Return the protocol of one worker."""
    return type("WorkerProtocol", (InferenceProtocol,), {"service": service, "limits": limits, "hosts": hosts})
