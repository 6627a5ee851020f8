"""Limits for the clients of a worker: connections, memory, time, sizes, hosts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from email.utils import formatdate
from ipaddress import ip_address

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.inference.content_coding import InflateBudget
from onnx_ops.serving.inference.responses import RequestHead
from onnx_ops.serving.metrics import CONNECTIONS, CONNECTIONS_REFUSED, MetricsRow

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_LINGER_S = 2.0
_SLOW_S = 5.0
"""Seconds after which an arriving request is slow.

A worker that has reached its connection limit closes the connection of a slow request early.
"""
_DRAIN_IDLE_S = 1.0
"""Seconds without a request after which a draining server closes a connection."""
_MAX_BODIES = 8
"""Number of request bodies of the largest size that can be in memory together."""

IDLE, READING, ANSWERING, REJECTED = range(4)
"""Stages of a connection."""

_ANY = b"*"
_LOOPBACK = (b"localhost", b"127.0.0.1", b"[::1]")
_HTTP_PORT = 80
_PORT = re.compile(rb":[0-9]*\Z")
_MAX_SHOWN_BYTES = 100
_MAX_KNOWN_HOSTS = 64


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Allowed Host headers and Origin headers; None allows any value.

    An entry of `hosts` without a port allows its host with every port.

    The policy protects a server on loopback from DNS rebinding. In this attack, a web page makes
    its own host name resolve to 127.0.0.1. The page cannot change the Host header of its requests
    (docs/serving.md, "Web pages").
    """

    hosts: frozenset[bytes] | None = None
    origins: frozenset[bytes] | None = None
    known: set[bytes] = field(default_factory=set, compare=False)
    """Host headers that were allowed before, exactly as clients sent them."""

    @classmethod
    def from_options(cls, address: str, port: int, options: ServerOptions) -> HostPolicy:
        """Return the policy of a server that listens on an IP address.

        On loopback, the server allows its own names, and the names and origins in the options. On
        other addresses, the valid names depend on the proxy in front of the server. Therefore only
        headers for which the options have a list are checked. `*` allows any value.
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
        """Raise RefusedError if the request's Host or Origin is not allowed.

        Otherwise, the Host header is added to `known`, up to `_MAX_KNOWN_HOSTS` entries.
        """
        given = head.get(b"host", b"")
        if self.hosts is not None:
            host = given.lower()
            if host not in self.hosts and _PORT.sub(b"", host) not in self.hosts:
                why = "a web page could let that name resolve to this server: DNS rebinding"
                raise _build_refusal("Host", host, why, "hosts")
        if self.origins is not None:
            origin = head.get(b"origin")
            if origin is not None and origin.lower() not in self.origins:
                raise _build_refusal(
                    "Origin",
                    origin,
                    "a web page sent the request, and any page can send such requests",
                    "origins",
                )
        if len(self.known) < _MAX_KNOWN_HOSTS:
            self.known.add(given)


def _split_list(text: str) -> frozenset[bytes]:
    return frozenset(entry.strip().lower().encode() for entry in text.split(",") if entry.strip())


def _build_refusal(header: str, value: bytes, why: str, option: str) -> RefusedError:
    shown = value[:_MAX_SHOWN_BYTES].decode("latin-1")
    return RefusedError(
        f"the request's {header} header is {shown!r}, which is not allowed",
        why=why,
        remedy=f"To allow it, start the server with --allowed-{option}={shown or '*'}, "
        f"or set allowed_{option} in the endpoint's options.",
    )


class TimedConnection(asyncio.Protocol):
    """A connection with time limits.

    Attributes:
        stage: what the connection does, such as `READING`.
        since: when this stage began, on the clock of `ConnectionLimits.now`; unused in the stage
            `ANSWERING`.
    """

    transport: asyncio.Transport
    stage: int
    since: float

    @abstractmethod
    def time_out(self) -> None:
        """Reject a request that did not arrive within the time limit."""


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectionLimits:
    """Limits and clock of the connections of a worker, or of an admin listener.

    Attributes:
        now: monotonic time in seconds, which `watch` reads a few times a second.
        open: the connections that were admitted.
        body_bytes: bytes of all request bodies in memory, before decompression.
        max_body_bytes: maximum bytes of received and decompressed bodies together.
        inflated: budget of decompressed bodies.
        date_line: the header line with the date, which all responses share.
    """

    max_connections: int
    max_body: int
    read_timeout_s: float
    keep_alive_s: float
    row: MetricsRow
    now: float = field(default_factory=time.monotonic)
    draining: bool = False
    open: set[TimedConnection] = field(default_factory=set)
    body_bytes: int = 0
    max_body_bytes: int = field(init=False)
    inflated: InflateBudget = field(init=False)
    _full_at: float = 0.0
    date_line: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.max_body_bytes = self.max_body * _MAX_BODIES
        self.inflated = InflateBudget(self.max_body_bytes)
        self._set_date()

    def _set_date(self) -> None:
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()

    @property
    def has_room(self) -> bool:
        """Whether the bodies in memory, received and decompressed, are within the budget."""
        return self.body_bytes + self.inflated.bytes <= self.max_body_bytes

    def admit(self, connection: TimedConnection) -> bool:
        """Admit a connection if possible; return whether it is admitted.

        If the limit is reached, an idle or slow connection is closed to admit the new one. If
        there is no such connection, the new one is refused.
        """
        if len(self.open) >= self.max_connections:
            victim = None
            # The search is skipped if it failed at the same clock value. Otherwise, every
            # connection of a burst would cause a search of all open connections.
            if self._full_at != self.now:
                late = self.now - _SLOW_S
                is_late = (
                    c
                    for c in self.open
                    if c.stage is IDLE or (c.stage is READING and c.since < late)
                )
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

    async def watch(self) -> None:
        """Update the clock, and close connections over their time limits, without end."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._close_expired()
            except Exception:
                # If this error ended the task, no connection would time out any more.
                _log.exception("connections could not be checked")

    def _close_expired(self) -> None:
        self.now = time.monotonic()
        self._set_date()
        self.row[CONNECTIONS] = len(self.open)
        idle_s = _DRAIN_IDLE_S if self.draining else self.keep_alive_s
        for connection in tuple(self.open):
            stage, age = connection.stage, self.now - connection.since
            if stage is READING and age > self.read_timeout_s:
                connection.time_out()
            elif (stage is IDLE and age > idle_s) or (stage is REJECTED and age > _LINGER_S):
                connection.transport.close()
