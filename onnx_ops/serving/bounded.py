"""A connection that bounds what its client may do: size, number and duration of what it sends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from onnx_ops.serving import answers
from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.connections import IDLE, READING, REFUSED, Connections
from onnx_ops.serving.inference import Inference

_log = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 1 << 16
_MOST_IGNORED_BYTES = 64 << 20
_NOT_HTTP = (httptools.HttpParserError, UnicodeError)


class RefusedError(Exception):
    """Raised inside the parser to leave it, and to answer with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within bounds. A subclass says what is served, and gives `inference` and `bounds`."""

    inference: Inference
    bounds: Connections
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.stage = IDLE
        self.since = self.bounds.now
        self._in_head = False
        self._head_bytes = 0
        self._received = 0
        self._held = 0
        if not self.bounds.admit(self):
            self._send(answers.refusal(503, "too many connections", b"retry-after: 1\r\n"), {}, last=True)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.leave(self)
        self._hold(-self._held)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.stage is REFUSED:
            self._ignore(data)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer to change the protocol, which a server may ignore; the request itself was handled
        except httptools.HttpParserError as error:
            self._complain(error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error)
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > _MOST_HEAD_BYTES:
                    self._refuse(431, "the head of the request is too large")

    def begin_head(self) -> None:
        """A request begins: to be called by the parser."""
        self._in_head = True
        self._head_bytes = 0
        self._received = 0
        if self.stage is IDLE:
            self.stage = READING
            self.since = self.bounds.now

    def end_head(self, announced: bytes | None) -> None:
        """The head has come. Raises RefusedError if the body that it announces is too large."""
        self._in_head = False
        if announced is not None and int(announced) > self.bounds.max_body:
            raise self._too_large()

    def count_body(self, size: int) -> None:
        """A part of a body has come. Raises RefusedError if it is too much, alone or with all others."""
        self._received += size
        self._hold(size)
        if self._received > self.bounds.max_body:
            raise self._too_large()
        if self.bounds.held > self.bounds.max_held:
            raise RefusedError(503, "the server is receiving too much at the same time")

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

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body must not be larger than {self.bounds.max_body} bytes")

    def _complain(self, error: BaseException | None) -> None:
        if isinstance(error, RefusedError):
            self._refuse(error.status, error.message)
        elif isinstance(error, _NOT_HTTP):
            self._refuse(400, "this is not HTTP/1.1")
        else:
            _log.error("a request failed in a way that nobody foresaw", exc_info=error)
            self._refuse(500, "internal error")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and end the connection, but only after the client had time to read it."""
        self.inference.count(status)
        cycle = self.cycle
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
        self._send(answers.refusal(status, message), {}, last=True)
        self.transport.write_eof()

    def _ignore(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > _MOST_IGNORED_BYTES:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Clients must not be able to fill the log."""
