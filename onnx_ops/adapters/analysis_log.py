"""Logs of analyzed rollouts, as objects in a folder or an object store.

Each entry is one object, which is created only if its name is free. If two instances append at the
same time, one of them fails, reads the entry of the other, and decides again. An instance that is
killed leaves either a whole entry or none. A checkpoint saves reads of entries; it holds the fold
of the entries before it, and is not needed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator

from onnx_ops import codec
from onnx_ops.adapters.files import ObjectStore
from onnx_ops.domain.rollout_analysis import (
    AnalysisEntry,
    AnalysisState,
    EntryBody,
    RolloutKey,
    apply_entry,
)
from onnx_ops.errors import ConflictError, CorruptStateError, OnnxOpsError

_log = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint.json"
CHECKPOINT_EVERY = 64
"""Number of entries from one checkpoint to the next."""
MAX_CACHED = 512
"""Maximum number of states in memory."""
_NAME = re.compile(r"\d{8}\.json")


class AnalysisLog:
    """Entries and states of rollouts in an object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._states: OrderedDict[RolloutKey, AnalysisState] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """Location of the entries, for display."""
        return self._objects.place

    def read(self, key: RolloutKey) -> AnalysisState:
        """Return the state after all entries, including those of other instances.

        Raises:
            CorruptStateError: an entry is missing or unreadable.
        """
        with self._lock:
            known = self._states.get(key)
        state = known or self._read_checkpoint(key) or AnalysisState(key=key)
        while (data := self._objects.read(_format_name(key, state.head + 1))) is not None:
            state = apply_entry(state, _decode(data, key, state.head + 1))
        if known is None:
            self._require_whole(key, state.head)
        self._remember(state)
        return state

    def append(self, state: AnalysisState, body: EntryBody, at: float) -> AnalysisState:
        """Append the entry that follows a state, and return the new state.

        Raises:
            ConflictError: another instance appended an entry first; read again.
        """
        entry = AnalysisEntry(key=state.key, sequence=state.head + 1, at=at, body=body)
        if not self._objects.create(_format_name(state.key, entry.sequence), codec.dumps(entry)):
            raise ConflictError("another instance recorded first", where=state.key.rollout)
        changed = apply_entry(state, entry)
        self._remember(changed)
        if changed.head % CHECKPOINT_EVERY == 0:
            self._write_checkpoint(changed)
        return changed

    def list_states(self) -> Iterator[AnalysisState]:
        """Yield the states of all rollouts, by analysis."""
        for analysis in self._objects.list_names(""):
            for folder in self._objects.list_names(analysis):
                data = self._objects.read(f"{analysis}/{folder}/00000001.json")
                if data is not None:
                    yield self.read(codec.loads(data, AnalysisEntry).key)

    def _remember(self, state: AnalysisState) -> None:
        with self._lock:
            known = self._states.get(state.key)
            if known is None or known.head <= state.head:
                self._states[state.key] = state
            self._states.move_to_end(state.key)
            while len(self._states) > MAX_CACHED:
                self._states.popitem(last=False)

    def _read_checkpoint(self, key: RolloutKey) -> AnalysisState | None:
        data = self._objects.read(f"{key.folder}/{_CHECKPOINT}")
        if data is None:
            return None
        try:
            state = codec.loads(data, AnalysisState)
        except CorruptStateError as error:
            _log.warning("a checkpoint is not used: %s", error)
            return None
        return state if state.key == key else None

    def _write_checkpoint(self, state: AnalysisState) -> None:
        try:
            self._objects.write(f"{state.key.folder}/{_CHECKPOINT}", codec.dumps(state))
        except (OnnxOpsError, OSError) as error:
            _log.warning("a checkpoint could not be written: %s", error)

    def _require_whole(self, key: RolloutKey, head: int) -> None:
        """Raise CorruptStateError if there is an entry after a missing one."""
        names = [name for name in self._objects.list_names(key.folder) if _NAME.fullmatch(name)]
        # Another instance can append while the names are listed; then the next entry exists.
        following = f"{head + 1:08d}.json"
        if max(names, default="") > following and following not in names:
            raise CorruptStateError(
                "the entry is missing",
                where=_format_name(key, head + 1),
                remedy="Restore the object from a backup.",
            )


def _format_name(key: RolloutKey, sequence: int) -> str:
    return f"{key.folder}/{sequence:08d}.json"


def _decode(data: bytes, key: RolloutKey, sequence: int) -> AnalysisEntry:
    where = _format_name(key, sequence)
    entry = codec.loads(data, AnalysisEntry, where=where)
    if (entry.key, entry.sequence) != (key, sequence):
        raise CorruptStateError("the object contains an entry of another rollout", where=where)
    return entry
