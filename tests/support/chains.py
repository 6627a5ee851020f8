"""Ledgers as an attacker with access to their storage changes them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from onnx_ops.adapters.files import LocalObjects, ObjectStore
from onnx_ops.adapters.ledgers.chain import ChainedEntry, decode, encode
from onnx_ops.domain.ledger import EntryBody, LedgerEntry
from onnx_ops.errors import CorruptStateError, StorageError


class MemoryObjects(LocalObjects):
    """Objects in memory.

    `crash` is the moment at which a call fails once: `snapshot` (before a write), or `before` or
    `after` a creation.
    """

    def __init__(self, data: dict[str, bytes] | None = None) -> None:
        super().__init__(Path("/nowhere"))
        self.data: dict[str, bytes] = data or {}
        self.crash = ""

    def read(self, name: str) -> bytes | None:
        return self.data.get(name)

    def list_names(self, prefix: str) -> list[str]:
        below = f"{prefix}/" if prefix else ""
        return sorted(
            {
                name.removeprefix(below).partition("/")[0]
                for name in self.data
                if name.startswith(below)
            }
        )

    def write(self, name: str, data: bytes) -> None:
        self._crash("snapshot")
        self.data[name] = data

    def create(self, name: str, data: bytes) -> bool:
        self._crash("before")
        is_new = self.data.setdefault(name, data) is data
        self._crash("after")
        return is_new

    def _crash(self, point: str) -> None:
        if self.crash == point:
            self.crash = ""
            raise StorageError(f"killed {point}")


def append_raw(
    objects: ObjectStore, endpoint: str, body: EntryBody, *, actor: str = "alice", at: float = 0.0
) -> None:
    """Append an entry that follows the last one, as far as possible without a key.

    If the last entry is damaged, the new one names no predecessor.
    """
    names = [name for name in objects.list_names(endpoint) if name[0] == "0"]
    previous = None
    if names:
        with contextlib.suppress(CorruptStateError):
            previous = decode(
                endpoint, len(names), objects.read(f"{endpoint}/{names[-1]}") or b""
            ).digest
    entry = LedgerEntry(endpoint=endpoint, sequence=len(names) + 1, at=at, actor=actor, body=body)
    chained = ChainedEntry(previous=previous, snapshot=None, entry=entry)
    objects.write(f"{endpoint}/{entry.sequence:08d}.jsonl", encode(chained))


def append_unsigned(folder: Path, endpoint: str, body: EntryBody) -> None:
    """Append an entry to a ledger in a folder as `append_raw` does."""
    append_raw(LocalObjects(folder), endpoint, body)
