"""The ledger as one object per entry, created only if its name is free."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects, ObjectStore, sweep_unfinished
from onnx_ops.adapters.ledgers.chain import (
    ChainedEntry,
    Head,
    LedgerKeys,
    StoredEntry,
    build_changed_error,
    build_missing_error,
    decode,
    encode,
    follow,
    format_name,
)
from onnx_ops.adapters.ledgers.seen import FixedEntry, SeenHeads, require_fixed
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.ledger import FOLD_VERSION, LedgerEntry, LedgerHead, ReleaseState, apply_entry, fold
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.errors import CorruptStateError, LedgerConflictError, OnnxOpsError
from onnx_ops.ports import Ledger

_log = logging.getLogger(__name__)
_NAME = re.compile(r"\d{8}\.jsonl")
_SNAPSHOT = "snapshot.json"
SNAPSHOT_EVERY = 4
"""Entries between two snapshots: a state takes one read for each of them, and five more."""
_SWEEP_EVERY = 64
"""Entries after which the files of killed writers are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """A state, and the version of the fold that led to it.

    It saves reads, and counts only if a signed entry names its digest: the one that follows the state's head.
    """

    fold: int
    state: ReleaseState


class ObjectLedger(Ledger):
    """`<endpoint>/<sequence>.jsonl` and `snapshot.json` in an object store.

    Entries never change, so each is read once in the life of this object, and what follows must follow what it read.

    Args:
        keys: sign what is appended, and verify what grants something.
        seen: remembers on this machine how far a ledger was read, so that it cannot go back.
    """

    def __init__(self, objects: ObjectStore, keys: LedgerKeys, seen: Path | None = None) -> None:
        self._objects = objects
        self._keys = keys
        self._seen = SeenHeads(seen)
        self._heads: dict[str, Head] = {}
        self._listed: set[str] = set()

    @property
    @override
    def place(self) -> str:
        return self._objects.place

    @override
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._objects.list_names(""))

    @override
    def state(self, endpoint: str) -> ReleaseState:
        return self._update_head(endpoint).state

    @override
    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        if after:
            return self._read_after(endpoint, after)
        entries, damage = self._read_all(endpoint)
        if damage is not None:
            raise damage
        return entries

    @override
    def read_intact(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self._read_all(endpoint)[0]

    @override
    def head(self, endpoint: str) -> LedgerHead | None:
        head = self._update_head(endpoint)
        return None if head.digest is None else LedgerHead(sequence=head.state.head, digest=head.digest)

    @override
    def append(self, entry: LedgerEntry) -> None:
        head = self._heads.get(entry.endpoint)
        if head is None or head.state.head < entry.sequence - 1:
            head = self._update_head(entry.endpoint)
        if head.state.head != entry.sequence - 1:
            raise _build_conflict(entry)
        grant = explain_grant(head.state, entry.body)
        snapshot = None if head.state.head % SNAPSHOT_EVERY or not head.state.head else _take_snapshot(head.state)
        digest = None if snapshot is None else digest_bytes(snapshot)
        chained = ChainedEntry(previous=head.digest, snapshot=digest, entry=entry)
        signed, name = encode(chained), format_name(entry.endpoint, entry.sequence)
        signatures = self._keys.sign(signed, grant, f"ledger {name}")
        if not self._objects.create(name, encode(chained, signatures)):
            raise _build_conflict(entry)
        self._set_head(entry.endpoint, Head(apply_entry(head.state, entry), digest_bytes(signed)))
        if snapshot is not None and signatures:
            self._keep_snapshot(entry, snapshot)

    def _keep_snapshot(self, entry: LedgerEntry, snapshot: bytes) -> None:
        """Write the snapshot that an entry names. If that fails, the one before still counts and costs more reads."""
        try:
            self._objects.write(f"{entry.endpoint}/{_SNAPSHOT}", snapshot)
            if entry.sequence % _SWEEP_EVERY == 1 and isinstance(self._objects, LocalObjects):
                sweep_unfinished(self._objects.root / entry.endpoint)
        except (OnnxOpsError, OSError) as error:
            _log.warning("no snapshot of ledger %s: %s", entry.endpoint, error)

    def _update_head(self, endpoint: str) -> Head:
        """Return the head after the entries that have come since."""
        known = self._heads.get(endpoint)
        head = known or self._find_snapshot(endpoint) or Head(ReleaseState(endpoint=endpoint), None)
        first = head.state.head + 1
        fixed = {} if known is not None else self._list_fixed(endpoint)
        for stored in self._iterate_after(endpoint, head.state.head):
            head = follow(head, stored, self._keys)
            require_fixed(endpoint, fixed, stored.entry.sequence, stored.digest)
        for sequence in fixed:
            if not first <= sequence <= head.state.head:
                require_fixed(endpoint, fixed, sequence, self._read_digest(endpoint, sequence))
        self._set_head(endpoint, head)
        return head

    def _list_fixed(self, endpoint: str) -> dict[int, FixedEntry]:
        """Return the entries that this ledger must hold, by sequence."""
        entries = [*self._seen.list_fixed(endpoint), *self._keys.list_fixed(endpoint)]
        return {one.head.sequence: one for one in entries}

    def _set_head(self, endpoint: str, head: Head) -> None:
        self._heads[endpoint] = head
        if head.digest is not None:
            self._seen.remember(endpoint, head.state.head, head.digest)

    def _iterate_after(self, endpoint: str, after: int) -> Iterator[StoredEntry]:
        """Yield the entries after a sequence, read one after the other until there is none."""
        last = after
        while True:
            while (data := self._objects.read(format_name(endpoint, last + 1))) is not None:
                yield decode(endpoint, last + 1, data)
                last += 1
            if not self._has_later(endpoint, last):
                return
            # Unless it was written just now.
            if self._objects.read(format_name(endpoint, last + 1)) is None:
                raise build_missing_error(endpoint, last + 1)

    def _has_later(self, endpoint: str, last: int) -> bool:
        """Return whether there are entries after the one that follows `last`, so that this one cannot be missing.

        On a remote store, all names are listed once in the life of this object: many take as long as many reads.
        """
        if endpoint in self._listed and not isinstance(self._objects, LocalObjects):
            return self._objects.read(format_name(endpoint, last + 2)) is not None
        self._listed.add(endpoint)
        names = (name for name in self._objects.list_names(endpoint) if _NAME.fullmatch(name))
        return max(names, default="") > f"{last + 1:08d}.jsonl"

    def _find_snapshot(self, endpoint: str) -> Head | None:
        """Return the head after the signed entry that names the snapshot; None if none does, or its fold is another."""
        data = self._objects.read(f"{endpoint}/{_SNAPSHOT}")
        if data is None:
            return None
        try:
            snapshot = codec.loads(data, LedgerSnapshot)
            following = self._objects.read(format_name(endpoint, snapshot.state.head + 1))
            if following is None:
                return None
            stored = decode(endpoint, snapshot.state.head + 1, following)
            self._keys.verify(stored, "names a snapshot")
            is_named = stored.chained.snapshot == digest_bytes(data)
            if not is_named or snapshot.fold != FOLD_VERSION or snapshot.state.endpoint != endpoint:
                return None
            return follow(Head(snapshot.state, stored.chained.previous), stored, self._keys)
        except CorruptStateError:
            return None

    def _read_digest(self, endpoint: str, sequence: int) -> Digest | None:
        data = self._objects.read(format_name(endpoint, sequence))
        return None if data is None else decode(endpoint, sequence, data).digest

    def _read_after(self, endpoint: str, after: int) -> tuple[LedgerEntry, ...]:
        """Return the entries after a sequence, up to a verified head that commits to them by its digest."""
        head = self._update_head(endpoint)
        entries: list[LedgerEntry] = []
        previous = head.digest
        for sequence in range(head.state.head, after, -1):
            data = self._objects.read(format_name(endpoint, sequence))
            if data is None:
                raise build_missing_error(endpoint, sequence)
            stored = decode(endpoint, sequence, data)
            if stored.digest != previous:
                raise build_changed_error(endpoint, sequence)
            entries.append(stored.entry)
            previous = stored.chained.previous
        return tuple(reversed(entries))

    def _read_all(self, endpoint: str) -> tuple[tuple[LedgerEntry, ...], CorruptStateError | None]:
        """Return the verified entries from the first on, and why the next one does not count, if there is one."""
        head, entries = Head(ReleaseState(endpoint=endpoint), None), []
        try:
            for stored in self._iterate_after(endpoint, 0):
                head = follow(head, stored, self._keys)
                entries.append(stored.entry)
        except CorruptStateError as error:
            return tuple(entries), error
        return tuple(entries), None


def _take_snapshot(state: ReleaseState) -> bytes:
    return codec.dumps(LedgerSnapshot(fold=FOLD_VERSION, state=state))


def _build_conflict(entry: LedgerEntry) -> LedgerConflictError:
    return LedgerConflictError(
        f"another writer appended entry {entry.sequence} first",
        where=f"ledger {entry.endpoint}",
        remedy="Look at `onnx-ops status` and try again.",
    )


class MemoryLedger(Ledger):
    """A ledger in memory, with the same promises within one process."""

    def __init__(self) -> None:
        self._entries: dict[str, list[LedgerEntry]] = {}

    @property
    @override
    def place(self) -> str:
        return "in memory"

    @override
    def endpoints(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    @override
    def state(self, endpoint: str) -> ReleaseState:
        return fold(endpoint, self.read(endpoint))

    @override
    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.get(endpoint, ())[after:])

    @override
    def read_intact(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self.read(endpoint)

    @override
    def head(self, endpoint: str) -> LedgerHead | None:
        entries = self.read(endpoint)
        return LedgerHead(sequence=len(entries), digest=digest_bytes(codec.dumps(entries[-1]))) if entries else None

    @override
    def append(self, entry: LedgerEntry) -> None:
        entries = self._entries.setdefault(entry.endpoint, [])
        if entry.sequence != len(entries) + 1:
            raise _build_conflict(entry)
        entries.append(entry)
