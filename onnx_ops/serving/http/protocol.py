"""The protocol of one connection: HTTP/1.1 by httptools, within limits.

Responses are sent in the order of the requests.

A request is answered from the parser's callbacks, without a separate task or object. Its head is a
dictionary. Its body is bytes, or a memoryview of a large body in the binary form. Only queued
inferences, awaitable responses and compressed responses are sent later. Until then, later requests
of the connection wait in `_backlog`, and further data of the client stays in the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

import httptools
import numpy as np

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.messages import BINARY_LENGTH_HEADER
from onnx_ops.serving.http.app import Handler, HttpApp, PendingResponse
from onnx_ops.serving.http.limits import (
    ANSWERING,
    IDLE,
    READING,
    REJECTED,
    ConnectionLimits,
    HostPolicy,
    TimedConnection,
)
from onnx_ops.serving.inference.content_coding import CODINGS, choose_coding, compress
from onnx_ops.serving.inference.deployments import InferenceRoute, PendingRequest
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    build_error,
    format_echoed_headers,
)
from onnx_ops.serving.inference.tensors import RequestBody

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 1 << 16
_MAX_DISCARDED_BYTES = 64 << 20
_DRAIN_PAUSE_S = 0.05
_BACKLOG = 2048
"""Number of connections that can wait to be accepted."""
_LARGE_BODY = 1 << 16
"""Number of missing bytes from which a body is read without the parser.

The parser would copy each part of the body.
"""
_ALIGNMENT = 8
"""Alignment in bytes of the first tensor after the JSON of a binary body.

ONNX Runtime requires aligned elements.
"""
_BINARY_LENGTH = BINARY_LENGTH_HEADER.encode()
_MIN_COMPRESSED = 1 << 14
"""Size in bytes from which a response is compressed for clients that accept it.

For this size, compression on a thread takes about 0.2 ms. Many clients accept it by default. For
smaller responses, compression would cost more time than it saves.
"""
_UNIQUE_HEADERS = (b"host", b"origin")
"""Headers that can occur at most once.

The values of these headers decide whether a request is allowed.
"""
_LIST_HEADERS = (
    b"connection",
    b"transfer-encoding",
    b"expect",
    b"content-encoding",
    b"accept-encoding",
)
"""Headers whose values are joined (RFC 9110, 5.3).

All of the values affect how the request is read or answered.
"""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINE = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_METHOD = b":method"
"""Key of the method in a request head; only HEAD requests have it."""
_BETWEEN, _IN_HEAD, _IN_BODY = range(3)
"""Positions of the parser."""

Answer = InferenceRoute | Handler | RawResponse
"""Route or handler of a request, or its error response.

A RawResponse is an error that does not depend on the body.
"""
Body = RequestBody | bytearray
"""The part of a request's body that was received."""


class RequestRejectedError(Exception):
    """Error that stops the parser, with the status and message of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpProtocol(TimedConnection):
    """One HTTP/1.1 connection."""

    def __init__(self, app: HttpApp, limits: ConnectionLimits, hosts: HostPolicy) -> None:
        self._app = app
        self._infer, self._invoke = app.infer, app.invoke
        self._deployments = None if app.service is None else app.service.deployments
        self._limits = limits
        self._hosts = hosts
        # A content length with fewer digits is always within the limit.
        self._safe_digits = len(str(limits.max_body))
        self.stage = IDLE
        self.since = limits.now
        # The following attributes describe the message that the parser reads.
        self._place = _BETWEEN
        self._packet_bytes = 0
        self._head_bytes = 0
        self._url = b""
        self._head: dict[bytes, bytes] = {}
        self._repeated = b""
        self._body: bytes | bytearray | memoryview = b""
        self._answer: Answer | None = None
        """Route or handler of the current request; None if its head was answered."""
        self._keep_alive = self._is_sized = True
        self._upgrade_offered = self._must_continue = False
        self._discarded_bytes = 0
        self._reader: LargeBodyReader | None = None
        # The following attributes describe the responses, and the requests that wait for them.
        self._pending: PendingRequest | PendingResponse | None = None
        self._pending_keep_alive = True
        self._held_bytes = 0
        self._blocked = self._write_paused = self._read_paused = False
        self._backlog: deque[tuple[Answer, dict[bytes, bytes], Body, bool]] = deque()
        self._reset_parser()

    def _reset_parser(self) -> None:
        """Replace the parser by a new one, which expects the start of a message."""
        self._parser = httptools.HttpRequestParser(self)
        # With this option, the parser ignores data after `Connection: close` without an error.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed = self._parser.feed_data

    # The following methods handle received data and other events of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, or reject it because of the connection limit."""
        self.transport = transport
        if not self._limits.admit(self):
            self._send(
                build_error(503, "too many connections", b"retry-after: 1\r\n"), {}, last=True
            )
            self._end()

    def connection_lost(self, _error: Exception | None) -> None:
        """End a connection, and abandon its queued request."""
        self._limits.open.discard(self)
        if self._pending is not None:
            self._pending.abandoned = True
            self._pending = None
        self._hold(0)
        self._backlog.clear()
        self.stage = REJECTED
        self._reader = None
        # The parser refers to this object, so the parser and this object would form a reference
        # cycle.
        del self._parser, self._feed

    def pause_writing(self) -> None:
        """Stop answering requests until the client has read enough."""
        self._write_paused = self._blocked = True

    def resume_writing(self) -> None:
        """Answer the waiting requests, since the client has read enough."""
        self._write_paused = False
        self._resume()

    def data_received(self, data: bytes) -> None:
        """Parse received data, and ignore offers to upgrade to another protocol.

        A server may ignore such an offer (RFC 9110, 7.8), but the parser cannot. After a head with
        an offer, it expects the other protocol and would read the body as the next request
        (https://github.com/MagicStack/httptools/issues/124). Therefore a new parser gets the same
        head without the offer, and all data after it.
        """
        if self.stage is REJECTED:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._packet_bytes = len(data)
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self._feed(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                # Within the exception handler, later errors would get this exception as their
                # context.
                self._upgrade_offered = False
                version = self._parser.get_http_version().encode()
                start = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)
                lines = [
                    b"%b: %b" % pair
                    for pair in self._head.items()
                    if pair[0] != b"upgrade" and pair[0][:1] != b":"
                ]
                self._reset_parser()
                self._feed(b"\r\n".join((start, *lines, b"", b"")))
        except httptools.HttpParserError as error:
            self._reject_error(
                error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            )
        if self._place is not _BETWEEN:
            self._check_part(data)

    def _check_part(self, data: bytes) -> None:
        """Check the limits of an incomplete message, and start the reader of a large body."""
        if self.stage is REJECTED:
            return
        if self.stage is IDLE:
            self.stage = READING
            self.since = self._limits.now
        if self._place is _IN_HEAD:
            # The bytes up to the last blank line belong to earlier requests, and are not counted.
            self._head_bytes += len(data) - (data.rfind(b"\r\n\r\n") + 1)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._reject_error(_build_head_error())
        elif not self._hold(len(self._body)):
            self._reject_overload()
        elif self._is_sized and not self._blocked:
            size = int(self._head[b"content-length"])
            if size - len(self._body) >= _LARGE_BODY:
                self._set_reader(
                    LargeBodyReader(self, size, self._body, self._head.get(_BINARY_LENGTH, b""))
                )

    def _set_reader(self, reader: LargeBodyReader | None) -> None:
        """Pass received data to `reader`, or to this object if `reader` is None.

        The transport looks up the receiver when it starts to read. Therefore reading is paused and
        resumed.
        """
        self._reader = reader
        self.transport.pause_reading()
        self.transport.set_protocol(reader or self)
        self.transport.resume_reading()

    def body_received(self, body: memoryview, size: int) -> None:
        """Continue after `size` bytes of a large body have arrived."""
        if not self._hold(size):
            self._reject_overload()
        elif size == len(body):
            self._set_reader(None)
            self._body = body if _BINARY_LENGTH in self._head else bytes(body)
            self._reset_parser()
            self.on_message_complete()

    def _hold(self, size: int) -> bool:
        """Record the size of the bodies that this connection has in memory.

        Return whether the bodies of all connections are within their limit.
        """
        if self._pending is not None:
            size += len(self._pending.body)
        limits = self._limits
        limits.body_bytes += size - self._held_bytes
        self._held_bytes = size
        return limits.has_room

    # The parser calls the public ones of the following methods.

    def on_message_begin(self) -> None:
        """Start a request."""
        self._place = _IN_HEAD
        self._url = self._body = b""
        self._head = {}

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; ignore trailers after the body.

        Of several headers with the same name, the first one applies. Exceptions are the headers in
        `_LIST_HEADERS` and `_UNIQUE_HEADERS`.
        """
        if self._place is _IN_BODY:
            return
        name = name.lower()
        head = self._head
        if name not in head:
            head[name] = value
        elif name in _LIST_HEADERS:
            head[name] += b", " + value
        elif name in _UNIQUE_HEADERS:
            self._repeated = name
        else:
            # A repeated header is stored only so that the head has its full size. No real header
            # begins with a colon.
            head[b":%d" % len(head)] = name + value

    def on_headers_complete(self) -> None:
        """Check the head of the request, and find its route, handler or error."""
        head = self._head
        answer = None if self._deployments is None else self._deployments.routes.get(self._url)
        length = head.get(b"content-length")
        if (
            answer is not None
            and length is not None
            and len(length) < self._safe_digits
            and head.get(b"host") in self._hosts.known
            and b"origin" not in head
            and b"connection" not in head
            and b"expect" not in head
            and b"upgrade" not in head
            and b"content-encoding" not in head
            and not self._repeated
            and self._parser.get_method() == b"POST"
            # Without a Connection header, this is true only for HTTP/1.1.
            and self._parser.should_keep_alive()
            and self._head_bytes + self._packet_bytes <= _MAX_HEAD_BYTES
        ):
            self._answer = answer
            self._keep_alive = self._is_sized = True
        else:
            self._check_head(head, length)
        self._place = _IN_BODY
        self._head_bytes = 0

    def _check_head(self, head: dict[bytes, bytes], length: bytes | None) -> None:
        """Check a head, and find its answer.

        Raises:
            RequestRejectedError: the head violates a rule of HTTP, a limit, or the `HostPolicy`.
            httptools.HttpParserInvalidURLError: the URL is invalid.
        """
        # `_packet_bytes` can include bytes after the head, so a large packet is checked by the size
        # of the head alone.
        size = self._head_bytes + self._packet_bytes
        if (
            size > _MAX_HEAD_BYTES
            and len(self._url) + sum(map(len, (*head, *head.values()))) > _MAX_HEAD_BYTES
        ):
            raise _build_head_error()
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RequestRejectedError(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        if method == b"CONNECT":
            raise RequestRejectedError(400, "CONNECT is not supported: only proxies need it")
        if version == "1.1" and b"host" not in head:
            raise RequestRejectedError(
                400, "the request has no Host header, which HTTP/1.1 requires"
            )
        if self._repeated:
            raise RequestRejectedError(
                400, f"the request has more than one {self._repeated.decode().title()} header"
            )
        expects = version == "1.1" and b"expect" in head
        if expects:
            _check_expectation(head[b"expect"])
        try:
            self._hosts.check(head)
        except RefusedError as error:
            raise RequestRejectedError(403, str(error)) from error
        if length is not None and int(length) > self._limits.max_body:
            raise self._build_size_error()
        if self._parser.should_upgrade():
            # `data_received` parses the head again, without the offer of an upgrade.
            self._upgrade_offered = True
            return
        self._keep_alive = version == "1.1" and self._parser.should_keep_alive()
        self._find_answer(method, head, length, expects=expects)

    def _find_answer(
        self, method: bytes, head: dict[bytes, bytes], length: bytes | None, *, expects: bool
    ) -> None:
        """Find the answer to a request; send an error that does not need the body."""
        answer = self._app.find(method, self._url)
        coding = head.get(b"content-encoding", b"identity").strip().lower()
        if method == b"HEAD":
            head[_METHOD] = method
        elif (
            method in (b"POST", b"PUT")
            and coding != b"identity"
            and not isinstance(answer, RawResponse)
        ):
            if not isinstance(answer, InferenceRoute):
                answer = build_error(415, "only the bodies of inference requests may be compressed")
            elif coding in CODINGS:
                answer = replace(answer, coding=coding)
            else:
                self._app.count_rejected(415)
                message = "the content encoding of the body is not supported: use gzip or deflate"
                answer = build_error(415, message, b"accept-encoding: gzip, deflate\r\n")
        if isinstance(answer, RawResponse):
            self._answer, self._is_sized, self._discarded_bytes = None, False, 0
            if self._blocked:
                self._enqueue(answer, head, b"", self._keep_alive)
            else:
                self._respond_to(answer, head, b"", self._keep_alive)
            return
        self._answer, self._is_sized = answer, length is not None
        if expects and not self._blocked:
            self.transport.write(_CONTINUE)
        else:
            self._must_continue = expects

    def on_body(self, body: bytes) -> None:
        """Add a part of the body.

        Raises:
            RequestRejectedError: the body exceeds its limit.
        """
        if self._is_sized and not self._body:
            self._body = body
        elif self._answer is None:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > self._limits.max_body:
                raise self._build_size_error()
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += body
            if len(self._body) > self._limits.max_body:
                raise self._build_size_error()

    def on_message_complete(self) -> None:
        """Answer a complete request."""
        if self._upgrade_offered:
            return
        self._place = _BETWEEN
        answer, body = self._answer, self._body
        self._body = b""  # An idle connection should not keep the memory of a body.
        if self._held_bytes:
            self._hold(0)
        if answer is None:
            if self.stage is READING:
                self.stage, self.since = IDLE, self._limits.now
        elif self._blocked:
            self._enqueue(answer, self._head, body, self._keep_alive)
            self._must_continue = False
        else:
            self._respond_to(answer, self._head, body, self._keep_alive)

    # The following methods send responses, and continue with waiting requests.

    def _respond_to(
        self, answer: Answer, head: dict[bytes, bytes], body: Body, keep_alive: bool
    ) -> None:
        """Start the next response of this connection."""
        response: RawResponse | PendingRequest | PendingResponse
        if isinstance(answer, InferenceRoute):
            content = body if type(body) is memoryview else bytes(body)
            infer = self._invoke if answer.invocation else self._infer
            response = infer(answer, head, content, self._deliver)
        elif isinstance(answer, RawResponse):
            response = answer
        else:
            response = self._app.respond(answer, head, bytes(body), self._deliver)
        if isinstance(response, RawResponse) and len(response.body) >= _MIN_COMPRESSED:
            response = self._compress(response, head)
        if not isinstance(response, RawResponse):
            self._pending = response
            self._pending_keep_alive = keep_alive
            self.stage = ANSWERING
            self._hold(0)
            self._blocked = True
            return
        is_last = not keep_alive or self._limits.draining
        self._send(response, head, last=is_last)
        if is_last:
            self._end(linger=isinstance(answer, RawResponse))

    def _deliver(self, response: RawResponse) -> None:
        """Send the response to the queued request, and answer the requests after it."""
        if self._pending is None:  # The client has disconnected.
            return
        if len(response.body) >= _MIN_COMPRESSED:
            compressed = self._compress(response, self._pending.head)
            if isinstance(compressed, PendingResponse):
                self._pending = compressed
                self._hold(0)
                return
            response = compressed
        self._send_pending(response)

    def _compress(self, response: RawResponse, head: RequestHead) -> RawResponse | PendingResponse:
        """Return the response with a `vary` header, or start to compress it on a thread.

        If the client accepts a supported coding, the result is a `PendingResponse`, and the
        compressed response is sent later.
        """
        varying = RawResponse(
            response.status, response.lines + b"vary: accept-encoding\r\n", response.body
        )
        coding = choose_coding(head.get(b"accept-encoding", b""))
        if not coding:
            return varying
        compression = asyncio.get_running_loop().run_in_executor(
            None, _compress_response, varying, coding
        )
        compression.add_done_callback(lambda future: self._send_pending(future.result()))
        return PendingResponse(head, b"")

    def _send_pending(self, response: RawResponse) -> None:
        if self._pending is None:  # The client disconnected before the response was ready.
            return
        head, self._pending = self._pending.head, None
        self._hold(0)
        is_last = not self._pending_keep_alive or self._limits.draining
        self._send(response, head, last=is_last)
        if is_last:
            self._end()
        else:
            self._resume()

    def _send(self, response: RawResponse, head: RequestHead, *, last: bool = False) -> None:
        limits, body = self._limits, response.body
        parts = (
            _STATUS_LINE[response.status],
            limits.date_line,
            response.lines,
            format_echoed_headers(head),
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            if last
            else b"content-length: %d\r\n\r\n" % len(body),
            b"" if _METHOD in head else body,
        )
        self.transport.write(b"".join(parts))
        self.stage = IDLE
        self.since = limits.now

    def _end(self, *, linger: bool = False) -> None:
        """End the connection after the last response.

        With `linger`, end it only after the client had time to read the response. A client that
        still sends would lose the response if the server closed the connection immediately.
        """
        self.stage = REJECTED
        self.since = self._limits.now
        self._discarded_bytes = 0
        if not linger:
            self.transport.close()
        else:
            self._resume_reading()
            self.transport.write_eof()
        self._blocked = True

    def _enqueue(
        self, answer: Answer, head: dict[bytes, bytes], body: Body, keep_alive: bool
    ) -> None:
        """Add a request to the backlog, and stop reading further data from the socket.

        The connection is read until a request has to wait. So a disconnect of the client is
        detected while its first request is queued.
        """
        self._backlog.append((answer, head, body, keep_alive))
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Answer the waiting requests, and continue to read."""
        if self._pending is not None or self._write_paused or self.stage is REJECTED:
            return
        self._blocked = False
        while self._backlog and not self._blocked:
            self._respond_to(*self._backlog.popleft())
        if self._blocked or self.stage is REJECTED:
            return
        if self._must_continue:
            self._must_continue = False
            self.transport.write(_CONTINUE)
        if self._place is not _BETWEEN:
            self.stage = READING
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    # The following methods handle errors.

    def time_out(self) -> None:
        """Reject a request that did not arrive within the time limit."""
        self._reject(408, "the request did not arrive in time")

    def _build_size_error(self) -> RequestRejectedError:
        return RequestRejectedError(
            413, f"the body must not be larger than {self._limits.max_body} bytes"
        )

    def _reject_error(self, error: BaseException | None) -> None:
        if isinstance(error, RequestRejectedError):
            self._reject(error.status, str(error))
        elif isinstance(error, (httptools.HttpParserError, UnicodeError)):
            self._reject(400, "this is not HTTP/1.1")
        else:
            _log.error("a request failed unexpectedly", exc_info=error)
            self._reject(500, "internal error")

    def _reject(self, status: int, message: str) -> None:
        """Send an error, and end the connection after the client had time to read it.

        A request that was answered before its body arrived gets no second response.
        """
        if self.stage is REJECTED:
            return
        is_answered = self._place is _IN_BODY and self._answer is None
        self._place = _BETWEEN
        self._body = b""
        if self._reader is not None:
            self._set_reader(None)
        self._hold(0)
        error = build_error(status, message)
        if not is_answered:
            self._app.count_rejected(status)
        if self._pending is None and not self._backlog:
            if is_answered:
                self._end(linger=True)
            else:
                self._respond_to(error, {}, b"", False)
            return
        self.stage = ANSWERING
        if is_answered:
            self._backlog.append((*self._backlog.pop()[:3], False))
        else:
            self._enqueue(error, {}, b"", False)

    def _reject_overload(self) -> None:
        self._reject(503, "the server is receiving too many bytes at the same time")


class LargeBodyReader(asyncio.BufferedProtocol):
    """Receiver for the rest of a large body, which replaces the connection's parser.

    Received bytes are written into the memory of the body without a copy.

    Args:
        size: size of the body in bytes.
        start: first bytes of the body, which were already received.
        header_length: value of the header with the length of the JSON before the first tensor,
            which is aligned in memory.
    """

    def __init__(
        self, connection: HttpProtocol, size: int, start: Body, header_length: bytes
    ) -> None:
        self._connection = connection
        lead = (
            -int(header_length) % _ALIGNMENT
            if header_length.isdigit() and len(header_length) < 16
            else 0
        )
        # Unlike a new bytearray, this memory is not filled with zeros.
        self._body = np.empty(lead + size, np.uint8).data[lead:]
        self._body[: len(start)] = start
        self._size = len(start)

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return the memory for the missing bytes of the body."""
        return self._body[self._size :]

    def buffer_updated(self, size: int) -> None:
        """Count the received bytes, and report them to the connection."""
        self._size += size
        self._connection.body_received(self._body.toreadonly(), self._size)

    def connection_lost(self, error: Exception | None) -> None:
        """Forward the end of the connection to its protocol object."""
        self._connection.connection_lost(error)

    def pause_writing(self) -> None:
        """Forward the event to the connection, which then stops answering requests."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Forward the event to the connection, which then answers the waiting requests."""
        self._connection.resume_writing()


def _compress_response(response: RawResponse, coding: bytes) -> RawResponse:
    body = compress(response.body, coding)
    if len(body) >= len(response.body):
        return response
    return RawResponse(response.status, response.lines + b"content-encoding: %b\r\n" % coding, body)


def _check_expectation(value: bytes) -> None:
    """Raise RequestRejectedError if an Expect header has a value except 100-continue."""
    if any(each.strip().lower() != b"100-continue" for each in value.split(b",")):
        raise RequestRejectedError(417, "the only supported expectation is 100-continue")


def _build_head_error() -> RequestRejectedError:
    return RequestRejectedError(
        431, f"the head of the request is larger than {_MAX_HEAD_BYTES} bytes"
    )


async def serve_connections(
    build: Callable[[], HttpProtocol],
    listener: socket.socket,
    limits: ConnectionLimits,
    stop: asyncio.Event,
    *,
    drain_s: float,
) -> None:
    """Accept connections until `stop` is set, then wait for them to end.

    Connections that have not ended after `drain_s` seconds are aborted.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(build, sock=listener, backlog=_BACKLOG)
    watch = loop.create_task(limits.watch())
    await stop.wait()
    limits.draining = True
    server.close()
    listener.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while limits.open:
                await asyncio.sleep(_DRAIN_PAUSE_S)
    for connection in tuple(limits.open):
        connection.transport.abort()
    watch.cancel()
