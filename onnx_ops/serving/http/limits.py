"""Limits of a worker's clients: connections, memory, time, sizes, hosts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.inference.responses import RawResponse, RequestHead, build_error, format_echoed_headers
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.metrics import CONNECTIONS, CONNECTIONS_REFUSED, MetricsRow

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_LINGER_S = 2.0
_SLOW_S = 5.0
"""A request that takes longer to arrive is closed when there is no room, long before the usual timeout."""
_DRAIN_IDLE_S = 1.0
"""When the server drains, a connection that has been idle for this long is closed."""
_MAX_BODIES = 8
"""Request bodies of the largest size that may be in memory at the same time."""
_MAX_HEAD_BYTES = 1 << 16
_MAX_DISCARDED_BYTES = 64 << 20
_PARSE_ERRORS = (httptools.HttpParserError, UnicodeError)
_UNIQUE_HEADERS = (b"host", b"origin")
"""Headers that may occur once at most, as they decide whether a request is allowed."""

IDLE, READING, ANSWERING, REJECTED = range(4)
"""Stages of a connection. Plain numbers, as the lookup of an enumeration's member takes longer."""

_ANY = b"*"
_LOOPBACK = (b"localhost", b"127.0.0.1", b"[::1]")
_HTTP_PORT = 80
_PORT = re.compile(rb":[0-9]*\Z")
_MAX_SHOWN_BYTES = 100


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Allowed Host headers, with port or for any port, and Origin headers; None: any.

    This protects a server on loopback from DNS rebinding. A web page can let its own host name resolve to 127.0.0.1.
    The browser then sends the page's requests to a server on loopback, and lets the page read the responses. Their
    Host header is the page's host name, which no page can change.
    """

    hosts: frozenset[bytes] | None = None
    origins: frozenset[bytes] | None = None

    @classmethod
    def from_options(cls, address: str, port: int, options: ServerOptions) -> HostPolicy:
        """Return the policy of a server that listens on an IP address.

        On loopback, the server allows its own names and those of the options. Elsewhere, it checks only headers for
        which the options have a list: the names there depend on the proxy before it.
        """
        on_loopback = ip_address(address).is_loopback
        hosts, origins = _split_list(options.allowed_hosts), _split_list(options.allowed_origins)
        own = {*_LOOPBACK, f"[{address}]".encode() if ":" in address else address.encode()}
        own = {b"%b:%d" % (name, port) for name in own} | (own if port == _HTTP_PORT else set())
        return cls(
            hosts=hosts | own if (hosts or on_loopback) and _ANY not in hosts else None,
            origins=origins if (origins or on_loopback) and _ANY not in origins else None,
        )

    def check(self, head: RequestHead) -> None:
        """Raise RefusedError if the request's Host or Origin is not allowed."""
        if self.hosts is not None:
            host = head.get(b"host", b"").lower()
            if host not in self.hosts and _PORT.sub(b"", host) not in self.hosts:
                why = "a web page could let that name resolve to this server: DNS rebinding"
                raise _build_refusal("Host", host, why, "hosts")
        if self.origins is not None:
            origin = head.get(b"origin")
            if origin is not None and origin.lower() not in self.origins:
                raise _build_refusal("Origin", origin, "a web page sent it, and any page can", "origins")


def _split_list(text: str) -> frozenset[bytes]:
    return frozenset(entry.strip().lower().encode() for entry in text.split(",") if entry.strip())


def _build_refusal(header: str, value: bytes, why: str, option: str) -> RefusedError:
    shown = value[:_MAX_SHOWN_BYTES].decode("latin-1")
    return RefusedError(
        f"the request's {header} header is {shown!r}, which is not allowed",
        why=why,
        remedy=f"To allow it, start the server with --allowed-{option}={shown or '*'}, or set allowed_{option} in the "
        "endpoint's settings.",
    )


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectionLimits:
    """Limits and clock of all connections of one worker (see `ServerOptions`).

    Attributes:
        now: a clock that advances a few times a second: reading the system's clock for every request costs more.
        open: the connections that were admitted.
        body_bytes, max_body_bytes: size of all request bodies in memory.
    """

    max_connections: int
    max_body: int
    read_timeout_s: float
    keep_alive_s: float
    row: MetricsRow
    now: float = field(default_factory=time.monotonic)
    draining: bool = False
    open: set[LimitedProtocol] = field(default_factory=set)
    body_bytes: int = 0
    max_body_bytes: int = field(init=False)
    _full_at: float = 0.0
    _default_pairs: Sequence[tuple[bytes, bytes]] = ()
    _default_lines: bytes = b""

    def __post_init__(self) -> None:
        self.max_body_bytes = self.max_body * _MAX_BODIES

    def admit(self, connection: LimitedProtocol) -> bool:
        """Return whether there is room; an idle or slow connection makes way."""
        if len(self.open) >= self.max_connections:
            victim = None
            if self._full_at != self.now:  # a burst of connections must not search all of them each time
                late = self.now - _SLOW_S
                is_late = (c for c in self.open if c.stage is IDLE or (c.stage is READING and c.since < late))
                victim = next(is_late, None)
            if victim is None:
                self._full_at = self.now
                self.row[CONNECTIONS_REFUSED] += 1
                return False
            self.open.discard(victim)
            if victim.stage is IDLE:
                victim.transport.close()
            else:
                victim.time_out()
        self.open.add(connection)
        return True

    def format_default_headers(self, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return header lines of all responses. uvicorn renews `pairs` once a second."""
        if pairs is not self._default_pairs:
            self._default_pairs = pairs
            self._default_lines = b"".join(b"%s: %s\r\n" % pair for pair in pairs)
        return self._default_lines

    async def watch(self) -> None:
        """Close connections that exceed their time, forever."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.now = time.monotonic()
            self.row[CONNECTIONS] = len(self.open)
            idle_s = _DRAIN_IDLE_S if self.draining else self.keep_alive_s
            for connection in tuple(self.open):
                stage, age = connection.stage, self.now - connection.since
                if stage is READING and age > self.read_timeout_s:
                    connection.time_out()
                elif (stage is IDLE and age > idle_s) or (stage is REJECTED and age > _LINGER_S):
                    connection.transport.close()


class RequestRejectedError(Exception):
    """Raised inside the parser to stop it, and to answer with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within limits. A subclass sets the attributes below.

    `since` is when the present stage began, on the clock of `ConnectionLimits.now`.
    """

    service: InferenceService
    limits: ConnectionLimits
    hosts: HostPolicy
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, or reject it if there is no room."""
        super().connection_made(transport)
        self.stage = IDLE
        self.since = self.limits.now
        self._in_head = False
        self._upgrade_offered = False
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._packet_bytes = 0
        self._received = 0
        self._body_bytes = 0
        if not self.limits.admit(self):
            self._send(build_error(503, "too many connections", b"retry-after: 1\r\n"), {}, last=True)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self.limits.open.discard(self)
        self._account_body(-self._body_bytes)
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn notifies only the last request
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """Parse received data, and ignore offers of another protocol.

        A server may ignore the offer (RFC 9110, 7.8). The parser does not: after such a head it expects the other
        protocol, and would read the body as the next request (https://github.com/MagicStack/httptools/issues/124). So
        a new parser gets the head again, without the offer, and all that follows.
        """
        if self.stage is REJECTED:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._packet_bytes = len(data)
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                # Behind the handler, which would replace the context of an error below.
                self._upgrade_offered = False
                version = self.parser.get_http_version().encode()
                start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
                lines = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
                self._reset_parser()
                self.parser.feed_data(b"\r\n".join((start, *lines, b"", b"")))
        except httptools.HttpParserError as error:
            self._reject_error(error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error)
        else:
            if self._in_head:
                self._head_bytes += len(data) - (data.rfind(b"\r\n\r\n") + 1)  # without requests before it
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self._reject_error(_build_head_error())

    def _reset_parser(self) -> None:
        """Replace the parser by one that is between two messages."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _begin_head(self) -> None:
        """Record the start of a request."""
        self._in_head = True
        self._head_bytes = 0
        self._received = 0
        if self.stage is IDLE:
            self.stage = READING
            self.since = self.limits.now

    def _check_head(self, head: RequestHead) -> None:
        """Check a complete head. Raises RequestRejectedError."""
        self._in_head = False
        received = self._head_bytes + self._packet_bytes
        if received > _MAX_HEAD_BYTES:
            parsed = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if parsed > _MAX_HEAD_BYTES:
                raise _build_head_error()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RequestRejectedError(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":
            raise RequestRejectedError(400, "CONNECT is not supported: this server is not a proxy")
        if version == "1.1" and b"host" not in head:
            raise RequestRejectedError(400, "the request has no Host header, which HTTP/1.1 requires")
        if len(head) != len(self.headers):
            names = [name for name, _ in self.headers]
            for name in _UNIQUE_HEADERS:
                if names.count(name) > 1:
                    header = name.decode().capitalize()
                    raise RequestRejectedError(400, f"the request has more than one {header} header")
        expectations = [value.lower() for name, value in self.headers if name == b"expect"] if b"expect" in head else []
        if version == "1.1" and any(value != b"100-continue" for value in expectations):
            raise RequestRejectedError(417, "the only supported expectation is 100-continue")
        try:
            self.hosts.check(head)
        except RefusedError as error:
            raise RequestRejectedError(403, str(error)) from error
        announced = head.get(b"content-length")
        if announced is not None and int(announced) > self.limits.max_body:
            raise self._build_size_error()

    def _count_body(self, size: int) -> None:
        """Count a part of a body. Raises RequestRejectedError beyond a limit."""
        self._received += size
        self._account_body(size)
        if self._received > self.limits.max_body:
            raise self._build_size_error()
        if self.limits.body_bytes > self.limits.max_body_bytes:
            raise RequestRejectedError(503, "the server is receiving too many bytes at the same time")

    @property
    def is_answered_early(self) -> bool:
        """Whether the rest of a body arrives whose request is already answered."""
        return self.cycle is not None and bool(self.cycle.response_complete and self.cycle.more_body)

    def time_out(self) -> None:
        """Reject a request that did not arrive in time."""
        self._reject(408, "the request did not arrive in time")

    def shutdown(self) -> None:
        """Let the present response end the connection.

        An idle connection is closed by the sweep instead: its client may be about to send, and learns from the
        response to that request that the connection ends.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def _send(self, response: RawResponse, head: RequestHead, *, last: bool) -> None:
        self.transport.write(
            b"%b%b%b%bcontent-length: %d\r\n%b\r\n%b"
            % (
                STATUS_LINE[response.status],
                self.limits.format_default_headers(self.server_state.default_headers),
                response.lines,
                format_echoed_headers(head),
                len(response.body),
                b"connection: close\r\n" if last else b"",
                response.body,
            )
        )

    def _account_body(self, more: int) -> None:
        """Add to the bytes of bodies that this connection keeps in memory."""
        self._body_bytes += more
        self.limits.body_bytes += more

    def _build_size_error(self) -> RequestRejectedError:
        return RequestRejectedError(413, f"the body must not be larger than {self.limits.max_body} bytes")

    def _reject_error(self, error: BaseException | None) -> None:
        if isinstance(error, RequestRejectedError):
            self._reject(error.status, str(error))
        elif isinstance(error, _PARSE_ERRORS):
            self._reject(400, "this is not HTTP/1.1")
        else:
            _log.error("a request failed unexpectedly", exc_info=error)
            self._reject(500, "internal error")

    def _reject(self, status: int, message: str) -> None:
        """Answer with an error; end the connection once the client could read it.

        A request that was answered before its body was received gets no second response.
        """
        cycle = self.cycle
        answered = self.is_answered_early
        if not answered:
            self.service.count_rejected(status)
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False  # an earlier request is being answered; the connection ends with its response
                self.flow.pause_reading()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.stage = REJECTED
        self.since = self.limits.now
        self._head_bytes = 0
        self._account_body(-self._body_bytes)
        if not answered:
            self._send(build_error(status, message), {}, last=True)
        self.transport.write_eof()


def _build_head_error() -> RequestRejectedError:
    return RequestRejectedError(431, f"the head of the request is larger than {_MAX_HEAD_BYTES} bytes")
