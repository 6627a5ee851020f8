"""Logs of analyzed rollouts, as objects in a folder or an object store.

Each entry is one object, which is created only if its name is free. Several instances of the
analysis server can append to a rollout at the same time. Only one of them succeeds; the others read
its entry and repeat their operation. An instance that is killed leaves either a whole entry or
none. A checkpoint contains the state after all entries up to a number, so a reader reads only the
later entries.

A rollout is deleted in three steps, each of which can be repeated by any instance:

1. An entry `RolloutForgotten` ends the attempt. Earlier entries have no effect any more.
2. A checkpoint with that entry is written, and the entries before that entry are deleted. The
   numbers continue: an instance with an earlier state finds that entry by its number.
3. When that entry is older than `keep`, at least a day, it and the checkpoint are deleted too. By
   then, no instance uses a state of the ended attempt from memory, so all instances start again
   at number 1.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator

from onnx_ops import codec
from onnx_ops.adapters.files import ObjectStore
from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.rollout_analysis import (
    AnalysisEntry,
    AnalysisStarted,
    AnalysisState,
    EntryBody,
    RolloutForgotten,
    RolloutKey,
    apply_entry,
)
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import ConflictError, CorruptStateError, OnnxOpsError
from onnx_ops.ports import Clock

_log = logging.getLogger(__name__)

_CHECKPOINT = "checkpoint.json"
CHECKPOINT_EVERY = 64
"""Number of entries from one checkpoint to the next."""
MAX_CACHED = 512
"""Maximum number of states in memory."""
CACHED_S = DAY / 2
"""Longest age at which a state in memory is used, in seconds.

The entries of an attempt are deleted only if the last of them is older than a day. So the entries
after a state younger than half a day still exist, even if the clocks of two machines differ by
hours.
"""
_NAME = re.compile(r"\d{8}\.json")


class AnalysisLog:
    """Entries and states of rollouts in an object store."""

    def __init__(self, objects: ObjectStore, clock: Clock | None = None) -> None:
        self._objects = objects
        self._clock = SystemClock() if clock is None else clock
        self._states: OrderedDict[RolloutKey, AnalysisState] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """Location of the entries, for display."""
        return self._objects.place

    def read(self, key: RolloutKey) -> AnalysisState:
        """Return the state after all entries, including those of other instances.

        Raises:
            CorruptStateError: an entry is missing, unreadable, or of another rollout.
        """
        known = self._recall(key)
        state = self._follow(known or self._read_checkpoint(key) or AnalysisState(key=key))
        while known is None and (later := self._list_sequences(key, after=state.head)):
            head = state.head
            state = self._cross_gap(state, later[0])
            if state.head == head:
                # Another instance deleted the listed entries before they were read.
                break
        self._remember(state)
        return state

    def _recall(self, key: RolloutKey) -> AnalysisState | None:
        """Return the state in memory; None if it is missing, or too old and thus removed."""
        with self._lock:
            known = self._states.get(key)
            if known is not None and self._clock.now() - known.changed_at > CACHED_S:
                del self._states[key]
                return None
        return known

    def _follow(self, state: AnalysisState) -> AnalysisState:
        """Return the state after the entries that follow without a gap."""
        key = state.key
        while (data := self._objects.read(_format_name(key, state.head + 1))) is not None:
            state = apply_entry(state, _decode(data, key, state.head + 1))
        return state

    def _cross_gap(self, state: AnalysisState, sequence: int) -> AnalysisState:
        """Return the state after entry number `sequence` and the entries that follow.

        The entries before `sequence` can be missing if a checkpoint covers them, or if the entry
        starts or ends an attempt. The state is returned unchanged if the entry was deleted.

        Raises:
            CorruptStateError: the entry depends on missing entries.
        """
        key = state.key
        if sequence == state.head + 1:
            # Another instance appended this entry after the state was read.
            return self._follow(state)
        saved = self._read_checkpoint(key)
        if saved is not None and saved.head > state.head:
            # Another instance deleted the missing entries. The newer checkpoint contains their
            # effect.
            return self._follow(saved)
        data = self._objects.read(_format_name(key, sequence))
        if data is None:
            return state
        entry = _decode(data, key, sequence)
        if not isinstance(entry.body, AnalysisStarted | RolloutForgotten):
            raise CorruptStateError(
                "the entry is missing",
                where=_format_name(key, state.head + 1),
                remedy="Restore the object from a backup.",
            )
        return self._follow(apply_entry(state, entry))

    def append(self, state: AnalysisState, body: EntryBody, at: float) -> AnalysisState:
        """Append the entry that follows a state, and return the new state.

        Raises:
            ConflictError: another instance appended an entry first; read again.
        """
        entry = AnalysisEntry(key=state.key, sequence=state.head + 1, at=at, body=body)
        if not self._objects.create(_format_name(state.key, entry.sequence), codec.dumps(entry)):
            what = f"another instance recorded entry {entry.sequence} first"
            raise ConflictError(what, where=state.key.rollout)
        changed = apply_entry(state, entry)
        self._remember(changed)
        if changed.head % CHECKPOINT_EVERY == 0:
            self._write_checkpoint(changed)
        return changed

    def list_states(self) -> Iterator[AnalysisState]:
        """Yield the states of all rollouts, grouped by analysis.

        Raises:
            CorruptStateError: an entry is missing, unreadable, or of another rollout.
        """
        for key in self.list_keys():
            yield self.read(key)

    def list_keys(self, *, skip_corrupt: bool = False) -> Iterator[RolloutKey]:
        """Yield the keys of all rollouts, grouped by analysis.

        Raises:
            CorruptStateError: the object that names the key of a rollout is unreadable. With
                `skip_corrupt`, a warning is logged instead.
        """
        for analysis in self._objects.list_names(""):
            for folder in self._objects.list_names(analysis):
                try:
                    key = self._find_key(f"{analysis}/{folder}")
                except CorruptStateError as error:
                    if not skip_corrupt:
                        raise
                    _log.warning("the rollout in %s/%s is skipped: %s", analysis, folder, error)
                    continue
                if key is not None:
                    yield key

    def _find_key(self, folder: str) -> RolloutKey | None:
        """Return the key in a folder's first entry, else in its checkpoint.

        The result is None if the folder has neither.
        """
        names = self._objects.list_names(folder)
        for name in filter(_NAME.fullmatch, names):
            if (data := self._objects.read(f"{folder}/{name}")) is not None:
                return codec.loads(data, AnalysisEntry).key
        # An instance was killed when only the checkpoint was left to delete.
        data = self._objects.read(f"{folder}/{_CHECKPOINT}") if _CHECKPOINT in names else None
        return None if data is None else codec.loads(data, AnalysisState).key

    def delete_old(self, key: RolloutKey, keep_s: float, why: str) -> bool:
        """Delete the unneeded objects of a rollout; return whether its attempt was ended.

        An attempt is ended with the reason `why` if its last entry is older than `keep_s` and than
        the attempt's `max_duration`. Its earlier entries are then deleted immediately. The earlier
        entries of an attempt that a client ended are deleted a day later. When the last entry of an
        ended attempt is older than `keep_s`, a call deletes the remaining objects.

        Raises:
            ConflictError: another instance appended an entry.
            CorruptStateError: an entry is missing, unreadable, or of another rollout.
        """
        state, now = self.read(key), self._clock.now()
        is_ended = state.policy is not None and state.is_over(now, keep_s)
        if is_ended:
            state = self.append(state, RolloutForgotten(why=why), now)
        if state.policy is None:
            # After a client ended the attempt, another instance can have a state in memory, which
            # needs the entries.
            if is_ended or state.is_over(now, DAY):
                self._delete_before(state)
            if not is_ended and state.is_over(now, keep_s):
                self._objects.delete(_format_name(key, state.head))
                self._objects.delete(f"{key.folder}/{_CHECKPOINT}")
        return is_ended

    def _delete_before(self, state: AnalysisState) -> None:
        """Delete the entries before the last one, which has ended the attempt."""
        old = [each for each in self._list_sequences(state.key) if each < state.head]
        if not old:
            return
        # Without the checkpoint, a reader would miss the first entries while they are deleted.
        self._objects.write(f"{state.key.folder}/{_CHECKPOINT}", codec.dumps(state))
        for sequence in old:
            self._objects.delete(_format_name(state.key, sequence))

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
            _log.warning("the checkpoint in %s is not used: %s", key.folder, error)
            return None
        return state if state.key == key else None

    def _write_checkpoint(self, state: AnalysisState) -> None:
        try:
            self._objects.write(f"{state.key.folder}/{_CHECKPOINT}", codec.dumps(state))
        except (OnnxOpsError, OSError) as error:
            _log.warning("the checkpoint in %s could not be written: %s", state.key.folder, error)

    def _list_sequences(self, key: RolloutKey, after: int = 0) -> list[int]:
        """Return the numbers of the entries after number `after`, sorted."""
        names = filter(_NAME.fullmatch, self._objects.list_names(key.folder))
        return [each for each in sorted(int(name[:8]) for name in names) if each > after]


def _format_name(key: RolloutKey, sequence: int) -> str:
    return f"{key.folder}/{sequence:08d}.json"


def _decode(data: bytes, key: RolloutKey, sequence: int) -> AnalysisEntry:
    where = _format_name(key, sequence)
    entry = codec.loads(data, AnalysisEntry, where=where)
    if (entry.key, entry.sequence) != (key, sequence):
        raise CorruptStateError(
            f"the object contains entry {entry.sequence} of rollout {entry.key.rollout}",
            where=where,
            remedy="Restore the object from a backup.",
        )
    return entry
