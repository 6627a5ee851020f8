"""HTTP/1.1 of the public listener.

Inference requests of the usual form are answered straight from the parser's callbacks, without an ASGI scope and a task
for each. Every other request goes to the Starlette app, which answers inference too, byte for byte the same. Both ways
have the same bounds.
"""

from __future__ import annotations

import asyncio
import time

from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.bounded import BoundedProtocol, RequestRejectedError
from onnx_ops.serving.connections import ANSWERING, IDLE, READING, Connections
from onnx_ops.serving.heads import MOST_BYTES, ODD, Seen
from onnx_ops.serving.host_policy import HostPolicy
from onnx_ops.serving.inference import Inference, Request
from onnx_ops.serving.residents import Route

_LARGE = 1 << 16
"""Bytes of a body from which it is collected without the parser, which would copy each part."""


class _Pending:
    """Stands where uvicorn keeps the request that a connection is busy with, while an inference waits in a lane.

    Requests behind it on the same connection queue up as they do behind one of uvicorn's own.
    """

    __slots__ = ("disconnected", "keep_alive", "message_event", "more_body", "request", "response_complete")

    def __init__(self, request: Request, *, keep_alive: bool) -> None:
        self.request = request
        self.response_complete = False
        self.keep_alive = keep_alive
        self.disconnected = False
        self.more_body = False
        self.message_event = self

    def set(self) -> None:
        """uvicorn wakes the app by this when a client goes away; here there is none."""


class EndpointProtocol(BoundedProtocol):
    """One connection. A subclass made by `protocol_for` says what it serves and within which bounds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._route: Route | None = None
        self._pending: _Pending | None = None
        self._seen: Seen | None = None
        self._whole: tuple[Route, Head, bytes] | None = None
        self._head: Head = {}
        self._body: bytes | bytearray = b""
        self._announced = 0
        self._start = b""
        self._parts: list[bytes] = []
        self._missing = 0
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pending is not None:
            self._pending.request.abandoned = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._collect(data)
            return
        seen, fresh = self._seen, self.stage is IDLE and not self.flow.write_paused
        if seen is not None and fresh:
            # The same head as before, with all or the beginning of a body of the length that it announces: what a
            # parser would make of it is known, and the parser stands between two messages. Clients that keep a
            # connection often ask like this.
            missing = seen.size - len(data)
            if (missing == 0 or missing >= _LARGE) and data.startswith(seen.start):
                body = data[len(seen.start) :]
                if missing:
                    self._collect_after(seen, body)
                else:
                    self._answer(seen.route, seen.head, body)
                return
            if (again := seen.again(data, self.bounds.max_body)) is not None:
                self._answer(seen.route, *again)
                return
        self._seen = self._whole = None
        super().data_received(data)
        if self._route is not None and not self._in_head and self.stage is READING:
            self._begin_collecting(data[: len(data) - len(self._body)] if fresh else b"")
        elif fresh:
            self._remember(data)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade_offered = True  # `_parse` has the head read again, without the offer
            return
        head = dict(self.headers)
        announced = head.get(b"content-length")
        self._route = None
        self.end_head(head)
        route = self.inference.residents.routes.get(self.url)
        if (
            route is not None
            and announced is not None
            and len(head) == len(self.headers)
            and self.parser.get_method() == b"POST"
            and ODD.isdisjoint(head)
            and self.parser.should_keep_alive()
            and (b"connection" not in head or self.parser.get_http_version() == "1.1")
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
        ):
            self._route = route
            self._head = head
            self._announced = int(announced)
            self._body = b""
        else:
            self._begin_slowly()

    def on_body(self, body: bytes) -> None:
        if not self._received and self._route is not None and len(body) == self._announced:
            self._body = body
            return
        self.count_body(len(body))
        if self._route is None:
            super().on_body(body)
        elif not self._body:
            self._body = body
        else:
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        if self._upgrade_offered:
            return
        route = self._route
        if route is None:
            if self.cycle.response_complete:
                self._hold(-self._held)
                self.stage, self.since = IDLE, self.bounds.now
            elif self.stage is READING:
                self.stage = ANSWERING
            super().on_message_complete()
            self.cycle.more_body = False
            return
        body, self._route, self._body = bytes(self._body), None, b""
        self._whole = (route, self._head, body)
        self._answer(route, self._head, body)

    # Answers

    def _answer(self, route: Route, head: Head, body: bytes) -> None:
        request = Request(route, head, body, self._respond, time.perf_counter())
        answer = self.inference.call(request)
        if answer is None:
            self.stage = ANSWERING
            self.cycle = self._pending = _Pending(request, keep_alive=not self.bounds.draining)
            self._hold(len(request.body) - self._held)
            return
        self._send(answer, request.head, last=self.bounds.draining)
        if self.bounds.draining:
            self.transport.close()
        self.stage = IDLE
        self.since = self.bounds.now
        if self._held:
            self._hold(-self._held)

    def _begin_collecting(self, start: bytes) -> None:
        """Leave the parser in the midst of a large body. For the next message there is another one.

        `start` is all that came before the body; empty where it is not known.
        """
        missing = self._announced - len(self._body)
        if missing >= _LARGE:
            self._missing = missing
            self._parts = [bytes(self._body)]
            self._start = start
            self.begin_parser()

    def _collect_after(self, seen: Seen, part: bytes) -> None:
        """Begin to collect a large body behind a head that came before; a parser is not needed at all."""
        self.begin_head()
        self._in_head = False
        self._route, self._head, self._start = seen.route, seen.head, seen.start
        self._announced = self._missing = seen.size - len(seen.start)
        self._parts = []
        self._collect(part)

    def _collect(self, data: bytes) -> None:
        part, rest = (data, b"") if len(data) <= self._missing else (data[: self._missing], data[self._missing :])
        try:
            self.count_body(len(part))
        except RequestRejectedError as error:
            self._complain(error)
            return
        self._parts.append(part)
        self._missing -= len(part)
        if self._missing:
            return
        self._body = b"".join(self._parts)
        self._parts = []
        self.on_message_complete()
        self._keep(self._start)
        if rest:
            self.data_received(rest)

    def _refuse(self, status: int, message: str) -> None:
        self._missing, self._parts, self._body = 0, [], b""
        super()._refuse(status, message)

    def _remember(self, data: bytes) -> None:
        """Keep the head of a request if `data`, which began between two messages, was just this one request."""
        body = b"" if self._whole is None else self._whole[2]
        if data.endswith(body):
            self._keep(data[: len(data) - len(body)])

    def _keep(self, start: bytes) -> None:
        """Keep what came before the body of the request that was answered last, if that is a head and nothing else."""
        is_head = start.startswith(b"POST ") and start.find(b"\r\n\r\n") == len(start) - 4
        if self._whole is not None and self.stage is IDLE and is_head and len(start) <= MOST_BYTES:
            route, head, body = self._whole
            self._seen = Seen(start, len(start) + len(body), route, head)

    def _begin_slowly(self) -> None:
        """Hand the request to uvicorn, which was told nothing of it yet."""
        url, listed = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.expect_100_continue = any(n == b"expect" for n, _ in listed) and self.parser.get_http_version() == "1.1"
        self.headers.extend(listed)
        super().on_headers_complete()
        if self.bounds.draining:
            self.cycle.keep_alive = False

    def _respond(self, answer: Answer) -> None:
        """Called with the answer to a request that waited in a lane."""
        pending, self._pending = self._pending, None
        if pending is None or pending.request.abandoned:
            return
        pending.response_complete = True
        self._send(answer, pending.request.head, last=not pending.keep_alive)
        if not pending.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """What uvicorn does here, without a timer for each idle connection: one sweep looks at them all."""
        self._hold(-self._held)
        if self.transport.is_closing():
            return
        self.since = self.bounds.now
        if not self.pipeline:
            self.stage = READING if self.answered_early else IDLE
            self.flow.resume_reading()
            return
        cycle, app = self.pipeline.pop()
        self.stage = READING if cycle.more_body else ANSWERING
        self.flow.resume_reading()
        self._start_asgi_task(cycle, app)


def protocol_for(inference: Inference, bounds: Connections, hosts: HostPolicy) -> type[EndpointProtocol]:
    """The protocol of one worker."""
    return type("WorkerProtocol", (EndpointProtocol,), {"inference": inference, "bounds": bounds, "hosts": hosts})
