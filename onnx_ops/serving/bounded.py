"""A connection that bounds what its client may do: size, number and duration of what it sends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from onnx_ops.errors import RefusedError
from onnx_ops.serving import answers
from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.connections import IDLE, READING, REFUSED, Connections
from onnx_ops.serving.host_policy import HostPolicy
from onnx_ops.serving.inference import Inference

_log = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 1 << 16
_MOST_IGNORED_BYTES = 64 << 20
_NOT_HTTP = (httptools.HttpParserError, UnicodeError)
_SINGLE = (b"host", b"origin")
"""Headers that a request bears once at most, as they say whether it is answered at all."""


class RequestRejectedError(Exception):
    """Raised inside the parser to leave it, and to answer with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds. A subclass says what is served, and gives the attributes below."""

    inference: Inference
    bounds: Connections
    hosts: HostPolicy
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.stage = IDLE
        self.since = self.bounds.now
        self._in_head = False
        self._upgrade_offered = False
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._packet_bytes = 0
        self._received = 0
        self._held = 0
        if not self.bounds.admit(self):
            self._send(answers.refusal(503, "too many connections", b"retry-after: 1\r\n"), {}, last=True)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.leave(self)
        self._hold(-self._held)
        super().connection_lost(exc)
        if self._running is not None:  # uvicorn looks only at the request that came last
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.stage is REFUSED:
            self._ignore(data)
            return
        self._packet_bytes = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._complain(error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error)
        else:
            if self._in_head:
                self._head_bytes += len(data) - (data.rfind(b"\r\n\r\n") + 1)  # requests before it are not counted
                if self._head_bytes > _MOST_HEAD_BYTES:
                    self._complain(_head_too_large())

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which reads a request that offers another protocol as if it did not.

        A server may ignore the offer (RFC 9110, 7.8). The parser does not: behind such a head it expects the other
        protocol, and would read the body as the next request (https://github.com/MagicStack/httptools/issues/124). So
        another parser gets the head again, without the offer, and all that follows.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            self._upgrade_offered = False
            version = self.parser.get_http_version().encode()
            start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
            lines = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.begin_parser()
            self.parser.feed_data(b"\r\n".join((start, *lines, b"", b"")))

    def begin_parser(self) -> None:
        """Leave the parser for one that stands between two messages."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def begin_head(self) -> None:
        """A request begins: to be called by the parser."""
        self._in_head = True
        self._head_bytes = 0
        self._received = 0
        if self.stage is IDLE:
            self.stage = READING
            self.since = self.bounds.now

    def end_head(self, head: Head) -> None:
        """The head has come. Raises RequestRejectedError if its request is not to be answered."""
        self._in_head = False
        came = self._head_bytes + self._packet_bytes
        if came > _MOST_HEAD_BYTES and self._parsed_bytes() > _MOST_HEAD_BYTES:
            raise _head_too_large()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise RequestRejectedError(505, f"HTTP/{version} is not supported: use HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":
            raise RequestRejectedError(400, "CONNECT is not supported: this server is no proxy")
        if version == "1.1" and b"host" not in head:
            raise RequestRejectedError(400, "the request has no Host header, which HTTP/1.1 requires")
        if len(head) != len(self.headers):
            names = [name for name, _ in self.headers]
            for name in _SINGLE:
                if names.count(name) > 1:
                    raise RequestRejectedError(
                        400, f"the request has more than one {name.decode().capitalize()} header"
                    )
        if b"expect" in head and version == "1.1" and not all(map(expects_continue, self.headers)):
            raise RequestRejectedError(417, "the only expectation that is met is 100-continue")
        try:
            self.hosts.check(head)
        except RefusedError as error:
            raise RequestRejectedError(403, str(error)) from error
        announced = head.get(b"content-length")
        if announced is not None and int(announced) > self.bounds.max_body:
            raise self._too_large()

    def count_body(self, size: int) -> None:
        """A part of a body has come. Raises RequestRejectedError if it is too much, alone or with all others."""
        self._received += size
        self._hold(size)
        if self._received > self.bounds.max_body:
            raise self._too_large()
        if self.bounds.held > self.bounds.max_held:
            raise RequestRejectedError(503, "the server is receiving too much at the same time")

    @property
    def answered_early(self) -> bool:
        """Whether what comes is the rest of a body whose request is answered already."""
        return self.cycle is not None and bool(self.cycle.response_complete and self.cycle.more_body)

    def time_out(self) -> None:
        self._refuse(408, "the request did not come in time")

    def drop(self) -> None:
        self.transport.close()

    def shutdown(self) -> None:
        """What is being read or answered is finished, and the answer ends the connection. An idle connection is not
        closed here but by the sweep: its client may be about to send, and is told with that answer not to go on."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def _send(self, answer: Answer, head: Head, *, last: bool) -> None:
        self.transport.write(
            b"%b%b%b%bcontent-length: %d\r\n%b\r\n%b"
            % (
                STATUS_LINE[answer.status],
                self.bounds.default_lines(self.server_state.default_headers),
                answer.lines,
                answers.echo(head),
                len(answer.body),
                b"connection: close\r\n" if last else b"",
                answer.body,
            )
        )

    def _hold(self, more: int) -> None:
        """Tell how many bytes of bodies this connection keeps in memory."""
        self._held += more
        self.bounds.held += more

    def _parsed_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _too_large(self) -> RequestRejectedError:
        return RequestRejectedError(413, f"the body must not be larger than {self.bounds.max_body} bytes")

    def _complain(self, error: BaseException | None) -> None:
        if isinstance(error, RequestRejectedError):
            self._refuse(error.status, error.message)
        elif isinstance(error, _NOT_HTTP):
            self._refuse(400, "this is not HTTP/1.1")
        else:
            _log.error("a request failed in a way that nobody foresaw", exc_info=error)
            self._refuse(500, "internal error")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and end the connection, but only after the client had time to read it.

        A request that was answered before its body had come gets no second answer.
        """
        cycle = self.cycle
        answered = self.answered_early
        if not answered:
            self.inference.count(status)
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False  # an earlier request is being answered; the connection ends with its answer
                self.flow.pause_reading()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.stage = REFUSED
        self.since = self.bounds.now
        self._head_bytes = 0
        self._hold(-self._held)
        if not answered:
            self._send(answers.refusal(status, message), {}, last=True)
        self.transport.write_eof()

    def _ignore(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > _MOST_IGNORED_BYTES:
            self.transport.abort()


def expects_continue(header: tuple[bytes, bytes]) -> bool:
    """Whether a header, if it is an expectation, is the one that this server meets."""
    name, value = header
    return name != b"expect" or value.lower() == b"100-continue"


def _head_too_large() -> RequestRejectedError:
    return RequestRejectedError(431, f"the head of the request is larger than {_MOST_HEAD_BYTES} bytes")
