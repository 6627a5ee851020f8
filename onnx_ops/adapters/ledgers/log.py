"""The ledger as one object per entry, created only if its name is free."""

from __future__ import annotations

import re

from onnx_ops import codec
from onnx_ops.adapters.objects import Objects
from onnx_ops.domain.ledger import LedgerEntry
from onnx_ops.errors import Overtaken, StateCorrupt

_NAME = re.compile(r"\d{8}\.json")

_REMEDY = "Bring the file back from a copy, which is right as entries never change: docs/troubles/ledger-damaged.md."


class ObjectLedger:
    """`<endpoint>/<sequence>.json` on a local folder or an object store.

    Entries never change, so each is read once in the life of this object.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read: dict[str, tuple[LedgerEntry, ...]] = {}

    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._objects.names(""))

    def read(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        entries, damage = self._readable(endpoint)
        if damage is not None:
            raise damage
        return entries

    def sound(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self._readable(endpoint)[0]

    def _readable(self, endpoint: str) -> tuple[tuple[LedgerEntry, ...], StateCorrupt | None]:
        names = [name for name in self._objects.names(endpoint) if _NAME.fullmatch(name)]
        entries = list(self._read.get(endpoint, ())[: len(names)])
        for position, name in enumerate(names[len(entries) :], start=len(entries) + 1):
            try:
                entries.append(self._entry(endpoint, name, position))
            except StateCorrupt as error:
                error.remedy = _REMEDY
                return tuple(entries), error
        self._read[endpoint] = tuple(entries)
        return self._read[endpoint], None

    def _entry(self, endpoint: str, name: str, position: int) -> LedgerEntry:
        where = f"ledger {endpoint}/{name}"
        data = self._objects.read(f"{endpoint}/{name}")
        entry = codec.loads(data or b"", LedgerEntry, where=where)
        if entry.sequence != position or entry.endpoint != endpoint:
            raise StateCorrupt("the entry is not where it belongs", where=where)
        return entry

    def append(self, entry: LedgerEntry) -> None:
        name = f"{entry.endpoint}/{entry.sequence:08d}.json"
        if not self._objects.create(name, codec.dumps(entry)):
            raise Overtaken(
                f"somebody else wrote entry {entry.sequence} first",
                where=f"ledger {entry.endpoint}",
                remedy="Look at `onnx-ops status` and try again.",
            )


class MemoryLedger:
    """The same promises within one process."""

    def __init__(self) -> None:
        self._entries: dict[str, list[LedgerEntry]] = {}

    def endpoints(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def read(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.get(endpoint, ()))

    def sound(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self.read(endpoint)

    def append(self, entry: LedgerEntry) -> None:
        entries = self._entries.setdefault(entry.endpoint, [])
        if entry.sequence != len(entries) + 1:
            raise Overtaken(f"somebody else wrote entry {entry.sequence} first", where=f"ledger {entry.endpoint}")
        entries.append(entry)
