"""What supervisor and workers tell each other, over a socket that each worker has of its own."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnx_ops import codec
from onnx_ops.protocol.routing_table import RoutingTable

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """To a worker: load what this table needs, so that it can be published as `edition`. `slots` are for counts."""

    edition: int
    table: RoutingTable
    slots: Mapping[str, int]
    kind: Literal["prepare"] = "prepare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """To a worker: an edition was published, or was not and never will be. What is not needed may go."""

    edition: int
    published: bool
    kind: Literal["settled"] = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From a worker: it accepts connections. `failed` names deployments that it could not load, and why."""

    failed: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """From a worker: the answer to `Prepare`. `error` is what went wrong, as `error_to_bytes` writes it, or empty."""

    edition: int
    error: str = ""
    kind: Literal["prepared"] = "prepared"


Message = Prepare | Settled | Ready | Prepared


class Channel:
    """One end of the socket. Messages arrive whole and in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Message) -> None:
        """Raises ConnectionError if the other side is gone."""
        data = codec.dumps(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None once the other side is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return codec.loads(await self._reader.readexactly(length), Message, where="control socket")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
