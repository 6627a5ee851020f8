"""The ledger as one object per entry, created only if its name is free."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects, ObjectStore, sweep_unfinished
from onnx_ops.domain import ledger as fold_module
from onnx_ops.domain import rollout, rollout_observations
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.ledger import LEDGER_SCHEMA, LedgerEntry, ReleaseState, apply_entry, fold
from onnx_ops.errors import CorruptStateError, LedgerConflictError, OnnxOpsError
from onnx_ops.ports import Ledger

_log = logging.getLogger(__name__)
_NAME = re.compile(r"\d{8}\.json")
_SNAPSHOT = "snapshot.json"
SNAPSHOT_EVERY = 4
"""Entries between two snapshots: a state takes one read for each of them, and five more."""
_SWEEP_EVERY = 64
"""Entries after which the files of killed writers are deleted."""

_NEWER = "A newer onnx-ops wrote it: upgrade this one."
_REMEDY = "Restore the file from a backup (entries never change); see docs/runbooks/ledger-damaged.md."


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """A state, with digests of its last entry and of the program that folded it.

    It only saves reads, and is ignored where it does not match the entries.
    """

    program: Digest
    entry: Digest
    state: ReleaseState


class ObjectLedger(Ledger):
    """`<endpoint>/<sequence>.json` and `snapshot.json` in an object store.

    Entries never change, so each is read once in the life of this object.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._read: dict[str, tuple[LedgerEntry, ...]] = {}
        self._states: dict[str, ReleaseState] = {}
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
        state = self._states.get(endpoint) or self._snapshot(endpoint) or ReleaseState(endpoint=endpoint)
        for entry in self._following(endpoint, state.head):
            state = apply_entry(state, entry)
        self._states[endpoint] = state
        return state

    @override
    def read(self, endpoint: str, *, after: int = 0) -> tuple[LedgerEntry, ...]:
        if after:
            return self._following(endpoint, after)
        entries, damage = self._readable(endpoint)
        if damage is not None:
            raise damage
        return entries

    @override
    def read_intact(self, endpoint: str) -> tuple[LedgerEntry, ...]:
        return self._readable(endpoint)[0]

    @override
    def append(self, entry: LedgerEntry) -> None:
        data = codec.dumps(entry)
        if not self._objects.create(_name(entry.endpoint, entry.sequence), data):
            raise LedgerConflictError(
                f"another writer appended entry {entry.sequence} first",
                where=f"ledger {entry.endpoint}",
                remedy="Look at `onnx-ops status` and try again.",
            )
        known = self._states.get(entry.endpoint)
        if known is not None and known.head == entry.sequence - 1:
            self._states[entry.endpoint] = apply_entry(known, entry)
        if entry.sequence % SNAPSHOT_EVERY:
            return
        try:  # a snapshot that cannot be written costs nothing but reads
            known = self._states.get(entry.endpoint)
            state = known if known is not None and known.head == entry.sequence else self.state(entry.endpoint)
            if state.head == entry.sequence:
                snapshot = LedgerSnapshot(program=_program(), entry=digest_bytes(data), state=state)
                self._objects.write(f"{entry.endpoint}/{_SNAPSHOT}", codec.dumps(snapshot))
            if entry.sequence % _SWEEP_EVERY == 0 and isinstance(self._objects, LocalObjects):
                sweep_unfinished(self._objects.root / entry.endpoint)
        except (OnnxOpsError, OSError, ValueError) as error:
            _log.warning("no snapshot of ledger %s: %s", entry.endpoint, error)

    def _following(self, endpoint: str, after: int) -> tuple[LedgerEntry, ...]:
        """Return the entries after a sequence, read one after the other until there is none."""
        entries: list[LedgerEntry] = []
        while True:
            while (data := self._objects.read(_name(endpoint, after + len(entries) + 1))) is not None:
                entries.append(_entry(endpoint, after + len(entries) + 1, data))
            last = after + len(entries)
            if not self._has_later(endpoint, last):
                return tuple(entries)
            # Unless it was written just now.
            if self._objects.read(_name(endpoint, last + 1)) is None:
                where = f"ledger {_name(endpoint, last + 1)}"
                raise CorruptStateError("the entry is missing", where=where, remedy=_REMEDY)

    def _has_later(self, endpoint: str, last: int) -> bool:
        """Return whether there are entries after the one that follows `last`, so that this one cannot be missing.

        On a remote store, all names are listed once in the life of this object: many take as long as many reads.
        """
        if endpoint in self._listed and not isinstance(self._objects, LocalObjects):
            return self._objects.read(_name(endpoint, last + 2)) is not None
        self._listed.add(endpoint)
        names = (name for name in self._objects.list_names(endpoint) if _NAME.fullmatch(name))
        return max(names, default="") > f"{last + 1:08d}.json"

    def _snapshot(self, endpoint: str) -> ReleaseState | None:
        """Return the state of the last snapshot; None if it does not match its entry, as after a restore."""
        data = self._objects.read(f"{endpoint}/{_SNAPSHOT}")
        if data is None:
            return None
        try:
            snapshot = codec.loads(data, LedgerSnapshot)
        except CorruptStateError:
            return None
        last = self._objects.read(_name(endpoint, snapshot.state.head))
        matches = last is not None and digest_bytes(last) == snapshot.entry and snapshot.state.endpoint == endpoint
        return snapshot.state if matches and snapshot.program == _program() else None

    def _readable(self, endpoint: str) -> tuple[tuple[LedgerEntry, ...], CorruptStateError | None]:
        names = [name for name in self._objects.list_names(endpoint) if _NAME.fullmatch(name)]
        entries = list(self._read.get(endpoint, ())[: len(names)])
        for position, name in enumerate(names[len(entries) :], start=len(entries) + 1):
            try:
                entries.append(_entry(endpoint, position, self._objects.read(f"{endpoint}/{name}") or b""))
            except CorruptStateError as error:
                return tuple(entries), error
        self._read[endpoint] = tuple(entries)
        return self._read[endpoint], None


@functools.cache
def _program() -> Digest:
    """Digest of the code that folds entries: what another version has folded is folded again."""
    files = (module.__file__ for module in (fold_module, rollout, rollout_observations))
    return digest_bytes(b"".join(Path(file).read_bytes() for file in files if file))


def _name(endpoint: str, sequence: int) -> str:
    return f"{endpoint}/{sequence:08d}.json"


def _entry(endpoint: str, sequence: int, data: bytes) -> LedgerEntry:
    """Parse an entry; raise CorruptStateError with the remedy."""
    where = f"ledger {_name(endpoint, sequence)}"
    try:
        entry = codec.loads(data, LedgerEntry, where=where)
        if entry.sequence != sequence or entry.endpoint != endpoint:
            raise CorruptStateError("the entry is not where it belongs", where=where)
        if entry.schema != LEDGER_SCHEMA:
            raise CorruptStateError(f"the entry has schema {entry.schema}, not {LEDGER_SCHEMA}", where=where)
    except CorruptStateError as error:
        error.remedy = _NEWER if _is_newer(data) else _REMEDY
        raise
    return entry


def _is_newer(data: bytes) -> bool:
    """Return whether an entry that cannot be read names a later schema."""
    try:
        schema = codec.loads(data, dict[str, Any]).get("schema")
    except CorruptStateError:
        return False
    return isinstance(schema, int) and schema > LEDGER_SCHEMA


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
    def append(self, entry: LedgerEntry) -> None:
        entries = self._entries.setdefault(entry.endpoint, [])
        if entry.sequence != len(entries) + 1:
            raise LedgerConflictError(
                f"another writer appended entry {entry.sequence} first", where=f"ledger {entry.endpoint}"
            )
        entries.append(entry)
