"""Ledgers in an object store or in memory.

In an object store, each entry is one object, which is created only if its name is free.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
    adopt,
    build_changed_error,
    build_missing_error,
    decode,
    encode,
    follow,
    format_name,
)
from onnx_ops.adapters.ledgers.seen import SeenHeads, require_fixed
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.ledger import (
    FOLD_VERSION,
    EntryBody,
    LedgerAdopted,
    LedgerEntry,
    ReleaseState,
    apply_entry,
    fold,
)
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.errors import CorruptStateError, LedgerConflictError, OnnxOpsError, StorageError
from onnx_ops.ports import Ledger

_log = logging.getLogger(__name__)
_NAME = re.compile(r"\d{8}\.jsonl")
_SNAPSHOT = "snapshot.json"
_ADOPTED = "adopted.json"
"""Object with the number of the last entry that set the state.

If the ledger is damaged before that entry, readers start at that entry, and verify its signature.
"""
SNAPSHOT_EVERY = 4
"""Number of entries from one snapshot to the next.

Only a signed entry names a snapshot that is stored. Usually, the last of these snapshots is valid,
and at most this number of entries follow it. Reading a state then takes at most this number of
reads plus five.
"""
_SWEEP_EVERY = 64
"""Number of entries from one deletion of unfinished files to the next.

A deletion is left out if the entry at this place is not signed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """A state, and the version of the function `fold` that computed the state.

    With a snapshot, earlier entries are not read. It is valid only if its version is the present
    one. The entry after the state must be signed, and must contain the digest of the snapshot.
    """

    fold: int
    state: ReleaseState


class ObjectLedger(Ledger):
    """Ledger in an object store.

    The objects of `<endpoint>/` are `<sequence>.jsonl`, `snapshot.json` and `adopted.json`. Entries
    never change, so an instance reads each of them only once to compute states. Later entries must
    follow the entries that it has read.

    Args:
        keys: the keys that sign appended entries and verify entries that grant something.
        seen: folder in which this machine records how far it has read a ledger. The record
            shows whether a ledger was reset to an earlier state.
        is_read_only: whether this machine's record is only read.
    """

    def __init__(
        self,
        objects: ObjectStore,
        keys: LedgerKeys,
        seen: Path | None = None,
        *,
        is_read_only: bool = False,
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._seen = SeenHeads(seen, is_read_only=is_read_only)
        self._heads: dict[str, Head] = {}
        self._listed: set[str] = set()

    @property
    @override
    def place(self) -> str:
        return self._objects.place

    @property
    @override
    def release_keys(self) -> Mapping[Digest, str]:
        return self._keys.public()

    @override
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._objects.list_names(""))

    @override
    def state(self, endpoint: str) -> ReleaseState:
        return self._update_head(endpoint).state

    @override
    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        if after:
            return self._read_back(self._update_head(endpoint), after)
        head, entries = Head(ReleaseState(endpoint=endpoint), None), []
        for following, stored in self._follow_from(head):
            head = following
            entries.append(stored.entry)
        # An adoption has skipped entries. These entries are returned too if the chain of digests
        # from the last entry leads to them.
        if len(entries) < head.state.head:
            with suppress(CorruptStateError):
                return self._read_back(head, 0)
        return tuple(entries)

    @override
    def read_intact(self, endpoint: str, *, signed: bool = True) -> tuple[LedgerEntry, ...]:
        head, entries = Head(ReleaseState(endpoint=endpoint), None), []
        with suppress(CorruptStateError):
            for _, stored in self._follow_from(head, signed=signed):
                entries.append(stored.entry)
        return tuple(entries)

    @override
    def count(self, endpoint: str) -> int:
        names = [name for name in self._objects.list_names(endpoint) if _NAME.fullmatch(name)]
        return max(
            [int(max(names, default="0").partition(".")[0]), *self._seen.list_fixed(endpoint)]
        )

    @override
    def require_signer(self, state: ReleaseState, body: EntryBody) -> None:
        if grant := explain_grant(state, body):
            name = format_name(state.endpoint, state.head + 1)
            # The signed bytes differ from every ledger entry, so the signature cannot be misused
            # for an entry.
            self._keys.sign(b"signature test", grant, f"ledger {name}", state.keys)

    @override
    def append(self, entry: LedgerEntry) -> None:
        if isinstance(entry.body, LedgerAdopted) and entry.body.state is not None:
            self._append_adoption(entry)
            return
        head = self._heads.get(entry.endpoint)
        if head is None or head.state.head < entry.sequence - 1:
            head = self._update_head(entry.endpoint)
        if head.state.head != entry.sequence - 1:
            raise _build_conflict(entry)
        grant = explain_grant(head.state, entry.body)
        snapshot = (
            None
            if head.state.head % SNAPSHOT_EVERY or not head.state.head
            else _take_snapshot(head.state)
        )
        digest = None if snapshot is None else digest_bytes(snapshot)
        is_signed = self._create(
            ChainedEntry(previous=head.digest, snapshot=digest, entry=entry), grant, head.state
        )
        if snapshot is not None and is_signed:
            self._keep_snapshot(entry, snapshot)

    def _append_adoption(self, entry: LedgerEntry) -> None:
        """Append an entry that sets the state.

        The previous entries can be unreadable.
        """
        empty = ReleaseState(endpoint=entry.endpoint)
        before = self._objects.read(format_name(entry.endpoint, entry.sequence - 1))
        previous = None if before is None else digest_bytes(before.partition(b"\n")[0])
        self._create(
            ChainedEntry(previous=previous, snapshot=None, entry=entry), "sets the state", empty
        )
        self._objects.write(f"{entry.endpoint}/{_ADOPTED}", codec.dumps(entry.sequence))

    def _create(self, chained: ChainedEntry, grant: str, before: ReleaseState) -> bool:
        """Sign and store the entry that follows a state; return whether it is signed.

        Raises:
            LedgerConflictError: another writer appended the entry first.
            MissingKeyError: the entry grants something, and this process cannot sign it.
            StorageError: the entry cannot be written.
        """
        entry, signed = chained.entry, encode(chained)
        name = format_name(entry.endpoint, entry.sequence)
        signatures = self._keys.sign(signed, grant, f"ledger {name}", before.keys)
        try:
            is_created = self._objects.create(name, encode(chained, signatures))
        except StorageError as error:
            remedy = (
                f"{error.remedy} To roll back meanwhile, "
                "see `onnx-ops docs runbooks/ledger-read-only`."
            )
            raise StorageError(
                error.what, where=f"ledger {name}", why=error.why, remedy=remedy
            ) from error
        if not is_created:
            raise _build_conflict(entry)
        self._set_head(entry.endpoint, Head(apply_entry(before, entry), digest_bytes(signed)))
        return bool(signatures)

    def _keep_snapshot(self, entry: LedgerEntry, snapshot: bytes) -> None:
        """Write the snapshot that an entry names.

        If the write fails, readers read more entries. In a local folder, unfinished files are also
        deleted, after some of the snapshots.
        """
        try:
            self._objects.write(f"{entry.endpoint}/{_SNAPSHOT}", snapshot)
            if entry.sequence % _SWEEP_EVERY == 1 and isinstance(self._objects, LocalObjects):
                sweep_unfinished(self._objects.root / entry.endpoint)
        except (OnnxOpsError, OSError) as error:
            _log.warning(
                "writing the snapshot of ledger %s, or deleting unfinished files, failed: %s",
                entry.endpoint,
                error,
            )

    def _update_head(self, endpoint: str) -> Head:
        """Return the head after the entries that were added since the last call."""
        known = self._heads.get(endpoint)
        head = known or self._find_snapshot(endpoint) or Head(ReleaseState(endpoint=endpoint), None)
        first = head.state.head + 1
        fixed = {} if known is not None else self._seen.list_fixed(endpoint)
        for following, stored in self._follow_from(head):
            head = following
            require_fixed(endpoint, fixed, stored.entry.sequence, stored.digest)
        for sequence in fixed:
            if sequence >= head.state.adopted and not first <= sequence <= head.state.head:
                require_fixed(endpoint, fixed, sequence, self._read_digest(endpoint, sequence))
        self._set_head(endpoint, head)
        return head

    def _follow_from(
        self, head: Head, *, signed: bool = True
    ) -> Iterator[tuple[Head, StoredEntry]]:
        """Yield each further entry and the head after it.

        If an entry is damaged, the entries up to the last adoption are skipped.

        Args:
            signed: whether signatures are verified.

        Raises:
            CorruptStateError: an entry is missing or unreadable, breaks the chain of digests, or
                lacks a required signature; and no later adoption is valid.
        """
        endpoint = head.state.endpoint
        try:
            for stored in self._iterate_after(endpoint, head.state.head):
                head = follow(head, stored, self._keys if signed else None)
                yield head, stored
        except CorruptStateError:
            adopted = self._find_adoption(endpoint)
            if adopted is None or adopted[0].state.head <= head.state.head:
                raise
            yield adopted
            yield from self._follow_from(adopted[0], signed=signed)

    def _find_adoption(self, endpoint: str) -> tuple[Head, StoredEntry] | None:
        """Return the last entry that set the state, with the head after it.

        The result is None if `adopted.json` does not name a valid entry of this kind.
        """
        with suppress(CorruptStateError):
            data = self._objects.read(f"{endpoint}/{_ADOPTED}")
            sequence = 0 if data is None else codec.loads(data, int)
            entry = self._objects.read(format_name(endpoint, sequence))
            stored = None if entry is None else decode(endpoint, sequence, entry)
            head = None if stored is None else adopt(stored, self._keys)
            if stored is not None and head is not None:
                return head, stored
        return None

    def _set_head(self, endpoint: str, head: Head) -> None:
        self._heads[endpoint] = head
        if head.digest is not None:
            self._seen.remember(endpoint, head.state.head, head.digest)

    def _iterate_after(self, endpoint: str, after: int) -> Iterator[StoredEntry]:
        """Yield the entries after a sequence number, and read them one at a time.

        Raises:
            CorruptStateError: an entry is missing or unreadable.
        """
        last = after
        while True:
            while (data := self._objects.read(format_name(endpoint, last + 1))) is not None:
                yield decode(endpoint, last + 1, data)
                last += 1
            if not self._has_later(endpoint, last):
                return
            # Another writer possibly wrote the entry after the first read.
            if self._objects.read(format_name(endpoint, last + 1)) is None:
                raise build_missing_error(endpoint, last + 1)

    def _has_later(self, endpoint: str, last: int) -> bool:
        """Return whether an entry exists with a number above `last` + 1.

        If so, entry `last` + 1 is missing, or was written meanwhile. For a remote store, an
        instance lists the names of an endpoint only once, since the list grows with the ledger.
        Later calls only read entry `last` + 2.
        """
        if endpoint in self._listed and not isinstance(self._objects, LocalObjects):
            return self._objects.read(format_name(endpoint, last + 2)) is not None
        self._listed.add(endpoint)
        names = (name for name in self._objects.list_names(endpoint) if _NAME.fullmatch(name))
        return max(names, default="") > f"{last + 1:08d}.jsonl"

    def _find_snapshot(self, endpoint: str) -> Head | None:
        """Return the head after the signed entry that names the snapshot.

        The snapshot must be valid, and a validly signed entry must name it. The present version of
        the function `fold` must have computed its state. Otherwise, the result is None.
        """
        data = self._objects.read(f"{endpoint}/{_SNAPSHOT}")
        if data is None:
            return None
        try:
            snapshot = codec.loads(data, LedgerSnapshot)
            following = self._objects.read(format_name(endpoint, snapshot.state.head + 1))
            if following is None:
                return None
            stored = decode(endpoint, snapshot.state.head + 1, following)
            self._keys.verify(stored, "names a snapshot", {})
            is_named = stored.chained.snapshot == digest_bytes(data)
            if not is_named or snapshot.fold != FOLD_VERSION or snapshot.state.endpoint != endpoint:
                return None
            return follow(Head(snapshot.state, stored.chained.previous), stored, self._keys)
        except CorruptStateError:
            return None

    def _read_digest(self, endpoint: str, sequence: int) -> Digest | None:
        data = self._objects.read(format_name(endpoint, sequence))
        return None if data is None else decode(endpoint, sequence, data).digest

    def _read_back(self, head: Head, after: int) -> tuple[LedgerEntry, ...]:
        """Return the entries after a sequence number, up to a verified head.

        The head contains the digest of the last entry, and each entry the digest of the previous
        one.

        Raises:
            CorruptStateError: an entry is missing, unreadable, or was changed.
        """
        endpoint = head.state.endpoint
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


def _take_snapshot(state: ReleaseState) -> bytes:
    return codec.dumps(LedgerSnapshot(fold=FOLD_VERSION, state=state))


def _build_conflict(entry: LedgerEntry) -> LedgerConflictError:
    return LedgerConflictError(
        f"another writer appended entry {entry.sequence} first",
        where=f"ledger {entry.endpoint}",
        remedy="Check the endpoint with `onnx-ops status`, and try again.",
    )


class MemoryLedger(Ledger):
    """A ledger in memory, for one thread of one process.

    Entries are not signed, and are lost when the process ends.
    """

    def __init__(self) -> None:
        self._entries: dict[str, list[LedgerEntry]] = {}

    @property
    @override
    def place(self) -> str:
        return "in memory"

    @property
    @override
    def release_keys(self) -> Mapping[Digest, str]:
        return {}

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
    def read_intact(self, endpoint: str, *, signed: bool = True) -> tuple[LedgerEntry, ...]:
        return self.read(endpoint)

    @override
    def count(self, endpoint: str) -> int:
        return len(self.read(endpoint))

    @override
    def require_signer(self, state: ReleaseState, body: EntryBody) -> None:
        """Do nothing, since entries in memory are unsigned."""

    @override
    def append(self, entry: LedgerEntry) -> None:
        entries = self._entries.setdefault(entry.endpoint, [])
        if entry.sequence != len(entries) + 1:
            raise _build_conflict(entry)
        entries.append(entry)
