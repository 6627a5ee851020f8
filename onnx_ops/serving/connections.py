"""What a worker lets its clients do: how many connections, how much memory, how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from onnx_ops.serving.shared import CONNECTIONS, CONNECTIONS_REFUSED, Row

_TICK_S = 0.25
_LINGER_S = 2.0
_DAWDLED_S = 5.0
"""Who has not asked by then gives way when there is no room, long before the usual time is over."""
_DRAINED_S = 1.0
"""Who has sent nothing for this long is not told that a draining server wants no more requests."""
_HELD_BODIES = 8
"""Request bodies of the largest size that may be in memory at the same time."""


IDLE, READING, ANSWERING, REFUSED = range(4)
"""What a connection is doing. Plain numbers, as a look at a member of an enumeration takes longer."""


class Connection(Protocol):
    """One client, as `Connections` sees it. `since` is when its stage began, on the clock of `Connections.now`."""

    stage: int
    since: float

    def time_out(self) -> None:
        """The request has not come in time."""
        ...

    def drop(self) -> None: ...


class Connections:
    """Bounds and clock of all connections of one worker.

    Args:
        most: how many connections may be open.
        max_body: bytes of the largest request body.
        read_timeout_s: how long a request may take to come.
        keep_alive_s: how long a connection may be idle.
        row: where connections are counted.
    """

    def __init__(self, *, most: int, max_body: int, read_timeout_s: float, keep_alive_s: float, row: Row) -> None:
        self.max_body = max_body
        self.max_held = max_body * _HELD_BODIES
        self.held = 0
        """Bytes of request bodies in memory."""
        self.now = time.monotonic()
        """A clock that moves a few times a second, as reading the system's for every request would cost more."""
        self.draining = False
        self._most = most
        self._read_timeout_s = read_timeout_s
        self._keep_alive_s = keep_alive_s
        self._row = row
        self._full_at = 0.0
        self._open: set[Connection] = set()
        self._default_pairs: Sequence[tuple[bytes, bytes]] = ()
        self._default_lines = b""

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for a connection. One that is idle, or takes its time to ask, is closed to make it."""
        if len(self._open) >= self._most and not self._make_room():
            self._row[CONNECTIONS_REFUSED] += 1
            return False
        self._open.add(connection)
        return True

    def _make_room(self) -> bool:
        if self._full_at == self.now:
            return False  # a crowd that all ask at the same time must not have the whole crowd looked through each time
        late = self.now - _DAWDLED_S
        leaving = next((c for c in self._open if c.stage is IDLE or (c.stage is READING and c.since < late)), None)
        if leaving is None:
            self._full_at = self.now
            return False
        self._open.discard(leaving)
        if leaving.stage is IDLE:
            leaving.drop()
        else:
            leaving.time_out()
        return True

    def default_lines(self, pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Header lines that all answers have. uvicorn makes a new list once a second; it is rendered as often."""
        if pairs is not self._default_pairs:
            self._default_pairs = pairs
            self._default_lines = b"".join(b"%s: %s\r\n" % pair for pair in pairs)
        return self._default_lines

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)

    async def watch(self) -> None:
        """Close what takes too long, for ever."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.now = time.monotonic()
            self._row[CONNECTIONS] = len(self._open)
            self._sweep(tuple(self._open))

    def _sweep(self, connections: Collection[Connection]) -> None:
        for connection in connections:
            age = self.now - connection.since
            patience_s = _DRAINED_S if self.draining else self._keep_alive_s
            if connection.stage is READING and age > self._read_timeout_s:
                connection.time_out()
            elif (connection.stage is IDLE and age > patience_s) or (connection.stage is REFUSED and age > _LINGER_S):
                connection.drop()
