"""Keep-alive HTTP/1.1 connections that send a plan's requests and record results."""

from __future__ import annotations

import asyncio
import random
import socket
from array import array
from collections import deque
from time import monotonic_ns
from typing import cast

import httptools
import numpy as np

from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.protocol.messages import DEPLOYMENT_HEADER
from tests.support.load.plan import LoadPlan, Requests
from tests.support.load.records import Failure, Records

_ECHO = DEPLOYMENT_HEADER.encode()
_PAUSE_S = 0.01
"""Pause after a refused connection.

Without it, a server that is down would get thousands of connection attempts a second.
"""
_SWEEP_S = 0.05
_TICK_S = 0.001
_ROW = 7
_FINAL = 200
"""Statuses below it are interim: the final answer follows."""


class Connection:
    """A slot for one request at a time.

    Its socket is replaced whenever it ends.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.busy = False
        self.sent_ns = 0
        self._due = self._number = 0

    def send(self, number: int, due_ns: int) -> None:
        self.busy = True
        self._number, self._due = number, due_ns
        if self._wire is None:
            self.sent_ns = monotonic_ns()
            self._connecting = asyncio.get_running_loop().create_task(self._connect_and_write())
        else:
            self._write(self._wire)

    async def connect(self) -> None:
        """Open the socket.

        Raises:
            OSError: the server takes no connection.
        """
        host, port = self._load.plan.address
        _, self._wire = await asyncio.get_running_loop().create_connection(
            lambda: _Wire(self), host, port
        )

    async def _connect_and_write(self) -> None:
        try:
            await asyncio.wait_for(self.connect(), self._load.plan.timeout_s)
        except (OSError, TimeoutError):
            await asyncio.sleep(_PAUSE_S)
            self._end(Failure.REFUSED)
            return
        if self.busy and self._wire is not None:
            self._write(self._wire)

    def _write(self, wire: _Wire) -> None:
        data = self._load.requests.render(self._number)
        self.sent_ns = monotonic_ns()
        wire.transport.write(data)

    def ended(self, wire: _Wire, status: int, *, reusable: bool, deployment: bytes = b"") -> None:
        """Record the end of a request on `wire`.

        Ends on a socket that was given up are ignored.
        """
        if wire is not self._wire:
            return
        if not reusable:
            self._wire = None
            wire.transport.abort()
        self._end(status, deployment)

    def give_up(self) -> None:
        """End the request under way as timed out, and close its socket."""
        if self._wire is not None:
            self.ended(self._wire, Failure.TIMED_OUT, reusable=False)

    def _end(self, status: int, deployment: bytes = b"") -> None:
        if self.busy:
            self.busy = False
            self._load.record(self, self._number, self._due, status, deployment)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.transport.abort()


class _Wire(asyncio.Protocol):
    """One socket, and the parser of what it receives."""

    transport: asyncio.Transport

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._deployment = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.ended(
            self, Failure.CLOSED if exc is None else Failure.RESET, reusable=False
        )

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._connection.ended(self, Failure.GARBLED, reusable=False)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == len(_ECHO) and name.lower() == _ECHO:
            self._deployment = value

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FINAL:
            deployment, self._deployment = self._deployment, b""
            reusable = self._parser.should_keep_alive()
            self._connection.ended(self, status, reusable=reusable, deployment=deployment)


class Load:
    """One run of a plan.

    `stop` ends it early; requests under way are waited for.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.requests = Requests(plan)
        self._rows = array("q")
        self._names = {b"": 0}
        self._next = 0
        self._stopping = False
        self._ended = asyncio.Event()
        self._connections = [Connection(self) for _ in range(plan.connections)]
        self._idle: deque[Connection] = deque()
        self._waiting: deque[tuple[int, int]] = deque()

    def stop(self) -> None:
        self._stopping = True
        self._check_end()

    async def connect(self) -> None:
        """Open all connections.

        Raises:
            ServiceUnavailableError: the server does not accept them.
        """
        try:
            for connection in self._connections:
                await asyncio.wait_for(connection.connect(), self.plan.timeout_s)
        except (OSError, TimeoutError) as error:
            why = str(error) or "it timed out"
            raise ServiceUnavailableError(
                "the server takes no connection", where=self.plan.url, why=why
            ) from error

    async def run(self) -> Records:
        """Send requests until the plan's end, then wait for those under way."""
        loop = asyncio.get_running_loop()
        sweeper = loop.create_task(self._sweep())
        loop.call_later(self.plan.seconds, self.stop)
        if self.plan.rate:
            self._idle.extend(self._connections)
            arrivals = loop.create_task(self._arrive())
        else:
            arrivals = None
            for connection in self._connections:
                self._go_on(connection)
        await self._ended.wait()
        sweeper.cancel()
        if arrivals is not None:
            arrivals.cancel()
        for connection in self._connections:
            connection.close()
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, _ROW)
        return Records.from_rows(rows, [name.decode("latin-1") for name in self._names])

    def record(
        self, connection: Connection, number: int, due: int, status: int, answering: bytes
    ) -> None:
        done, sent, names = monotonic_ns(), connection.sent_ns, self._names
        deployment = names.setdefault(answering, len(names))
        self._rows.extend(
            (due, sent, done, status, deployment, number, self.requests.key_of(number))
        )
        if self.plan.rate:
            self._idle.append(connection)
            self._dispatch()
            self._check_end()
        else:
            self._go_on(connection)

    def _go_on(self, connection: Connection) -> None:
        if (number := self._take()) is None:
            self._check_end()
        else:
            connection.send(number, monotonic_ns())

    def _take(self) -> int | None:
        if self.plan.requests and self._next >= self.plan.requests:
            self._stopping = True
        if self._stopping:
            return None
        self._next += 1
        return self._next - 1

    def _check_end(self) -> None:
        if self._stopping and not self._waiting and not any(c.busy for c in self._connections):
            self._ended.set()

    async def _arrive(self) -> None:
        draw = random.Random(self.plan.seed)  # noqa: S311 (arrivals, no secret)
        due = monotonic_ns()
        while True:
            due += int(draw.expovariate(self.plan.rate) * 1e9)
            while (left := due - monotonic_ns()) > 0:
                await asyncio.sleep(max(left / 1e9, _TICK_S))
            if (number := self._take()) is None:
                self._check_end()
                return
            self._waiting.append((number, due))
            self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._idle:
            self._idle.popleft().send(*self._waiting.popleft())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            latest = monotonic_ns() - int(self.plan.timeout_s * 1e9)
            for connection in self._connections:
                if connection.busy and connection.sent_ns < latest:
                    connection.give_up()
