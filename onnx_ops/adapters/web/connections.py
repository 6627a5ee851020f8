"""Limits of the connections of the HTTP servers in this package.

Clients that connect and send at most a part of a request must not block other requests.
With `limit_concurrency`, uvicorn 0.54 only answers requests beyond the limit with status 503. It
waits without a limit for the head of the first request on a connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
MAX_FROM_SOURCE = 32
"""Maximum number of connections from one address.

Beyond this number or MAX_CONNECTIONS, the oldest connection that waits for its client is closed.
"""
HEAD_S = 5.0
"""Seconds within which a client must send the head of a request.

The time starts when the connection is opened, and again after each response.
"""
MAX_HEAD_BYTES = 1 << 14


class BoundedProtocol(H11Protocol):
    """Connection of uvicorn within the limits of this module."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, and enforce the limits.

        If a limit is exceeded, the oldest other connection that waits for its client is closed. If
        there is none, the new connection is closed.
        """
        super().connection_made(transport)
        self.opened_at = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_S, self._end_idle)
        everyone = [each for each in self.connections if isinstance(each, BoundedProtocol)]
        source = [each for each in everyone if each.host == self.host]
        for group, limit in ((source, MAX_FROM_SOURCE), (everyone, MAX_CONNECTIONS)):
            if sum(not each.transport.is_closing() for each in group) > limit:
                waiting = [each for each in group if each.is_waiting and each is not self]
                min(waiting, key=lambda each: each.opened_at, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit of the next head, and end the connection."""
        self._head_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the time limit of the next request's head."""
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_S, self._end_idle)
        super().on_response_complete()

    @property
    def host(self) -> Any:
        """Return the address of the client."""
        return self.client and self.client[0]

    @property
    def is_waiting(self) -> bool:
        """Whether the client has not sent the whole request."""
        return not self.transport.is_closing() and self.conn.their_state in (
            h11.IDLE,
            h11.SEND_BODY,
        )

    def _end_idle(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
