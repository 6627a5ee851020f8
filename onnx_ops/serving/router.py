"""Which deployment answers a request."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_ops.errors import NotFoundError
from onnx_ops.protocol import messages
from onnx_ops.protocol.messages import KEYLESS_CELL, USER_BUCKETS
from onnx_ops.protocol.routing_table import RoutingTable

_MASK = 0xFFFFFFFF
_PINS = tuple(name.encode() for name in messages.PIN_HEADERS)
_NO_PIN = frozenset(_PINS).isdisjoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The split of one table. Each of the 100 `slots` stands for one percent of traffic, the newest deployment first.

    With two deployments, raising the newer one's weight only moves users into it. The salt is bound to the newest
    deployment with traffic: fixed for the length of an experiment, and another one for the next.
    """

    slots: tuple[str, ...]
    names: frozenset[str]
    salt: int

    @classmethod
    def of(cls, table: RoutingTable) -> Router:
        salt = zlib.crc32("\0".join(table.get_experiment()).encode())
        return cls(slots=table.list_slots(), names=frozenset(table.layout), salt=salt)

    def by_key(self, key: bytes) -> str:
        """Always the same deployment for the same key and split."""
        return self.slots[mixed(zlib.crc32(key) ^ self.salt) * 100 >> 32]

    def bucket(self, key: bytes | None) -> int:
        """The bucket in which a user is counted; nested in the split, but for those that it cuts in two."""
        return KEYLESS_CELL if key is None else mixed(zlib.crc32(key) ^ self.salt) * USER_BUCKETS >> 32

    def by_chance(self, draw: float) -> str:
        """The deployment for a draw from [0, 1)."""
        return self.slots[int(draw * 100)]

    def pinned(self, head: Mapping[bytes, bytes]) -> str | None:
        """The deployment that the headers of a request force, if they do.

        Raises:
            NotFoundError: there is no such deployment.
        """
        if _NO_PIN(head):
            return None
        for header in _PINS:
            value = head.get(header)
            if value is not None:
                name = value.decode("latin-1")
                if name not in self.names:
                    raise NotFoundError(f"no deployment is called {name!r} (header {header.decode()})")
                return name
        return None


def mixed(value: int) -> int:
    """A bijection of 32-bit numbers that spreads every bit: the finalizer of MurmurHash3 (A. Appleby, public domain).

    CRC-32 is linear: without this, two salts would give shares that coincide or are disjoint, and users of one
    experiment's candidate would be carried over into the next.
    """
    value ^= value >> 16
    value = value * 0x85EBCA6B & _MASK
    value ^= value >> 13
    value = value * 0xC2B2AE35 & _MASK
    return value ^ value >> 16
