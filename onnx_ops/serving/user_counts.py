"""What the two versions of a rollout answered, counted by user: by bucket of the hash that also splits the traffic.

A user's requests all go to one version, so that they are one draw of the split, however many they are. Whoever judges
the rollout sets a watch: which two deployments are counted, and which latencies count as slow. Counting begins anew
with another watch. Users who share a bucket share their side, and count as one.
"""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_LATENCIES,
    CELL_OUTCOMES,
    CELL_SUCCESSES,
    MAX_USER_THRESHOLDS,
    USER_CELLS,
    USER_FIELDS,
    UserCountsRequest,
)
from onnx_ops.serving.shared import BOUNDS_S, OTHER, WATCH, Shared, bound_of, column_of

_FAILED = frozenset({column_of(status) for status in (422, 429, 500, 503, 504)} | {OTHER})
"""Columns of statuses that are the deployment's fault; see `protocol.messages.FAILURE_STATUSES`."""
_NEVER = len(BOUNDS_S)


class UserCounts:
    """Counts of one worker, which alone writes them. What it counted by an older watch is dropped when it sees another.

    A request costs 0.05 µs while nothing is watched, and 0.7 µs while its deployment is (`benchmarks.count_cost`).
    """

    def __init__(self, shared: Shared, worker: int) -> None:
        self._words = shared.words
        self._header, self._cells = shared.users(worker)
        self._seen = 0
        self._sides: dict[int, tuple[int, Sequence[float]]] = {}

    @property
    def watching(self) -> bool:
        return self._words[WATCH] != 0

    def observe(self, slot: int, bucket: int, status: int, seconds: float) -> None:
        """Count a request; `seconds` are 0 if they may not be held against other deployments."""
        side = self._side(slot)
        if side is None:
            return
        cells, at = self._cells, side[0] + bucket
        cells[at] += 1
        if status != 200 and column_of(status) in _FAILED:
            cells[at + CELL_ERRORS * USER_CELLS] += 1
        if seconds:
            cells[at + (CELL_LATENCIES + bisect_left(side[1], seconds)) * USER_CELLS] += 1

    def report(self, slot: int, bucket: int, success: bool) -> None:
        """Count what a client reports of an answer."""
        side = self._side(slot)
        if side is not None:
            at = side[0] + bucket
            self._cells[at + CELL_OUTCOMES * USER_CELLS] += 1
            self._cells[at + CELL_SUCCESSES * USER_CELLS] += success

    def _side(self, slot: int) -> tuple[int, Sequence[float]] | None:
        if self._words[WATCH] != self._seen:
            self._turn()
        return self._sides.get(slot)

    def _turn(self) -> None:
        self._seen = self._words[WATCH]
        if self._header[0] != self._seen:  # else the worker before this one has counted by it
            self._cells[:] = memoryview(bytes(8 * len(self._cells))).cast("Q")
        self._sides = {}
        for side in range(2):
            begin = WATCH + 1 + side * (1 + MAX_USER_THRESHOLDS)
            slot, *limits = self._words[begin : begin + 1 + MAX_USER_THRESHOLDS]
            if slot:
                self._sides[slot] = (
                    side * USER_CELLS * USER_FIELDS,
                    [BOUNDS_S[limit] for limit in limits if limit < _NEVER],
                )
        self._header[0] = self._seen


def watch(shared: Shared, slots: Mapping[str, int], asked: UserCountsRequest) -> None:
    """Let the workers count these deployments by user. Setting the same watch again changes nothing."""
    wanted: list[int] = []
    for name in sorted(asked.limits_s)[:2]:
        limits = [bound_of(limit_s) for limit_s in asked.limits_s[name]]
        wanted += [slots.get(name, 0), *limits, *[_NEVER] * (MAX_USER_THRESHOLDS - len(limits))]
    wanted += [0] * (2 + 2 * MAX_USER_THRESHOLDS - len(wanted)) + [asked.number]
    words = shared.words[WATCH + 1 : WATCH + 1 + len(wanted)]
    if words.tolist() != wanted:
        for place, value in enumerate(wanted):
            words[place] = value
        shared.words[WATCH] += 1


def counted_by_user(shared: Shared, names: Sequence[str]) -> Mapping[str, str]:
    """Return the counts of the watched deployments, summed over the workers (see `decode_user_counts`)."""
    total = np.zeros((2, USER_FIELDS, USER_CELLS), dtype="<u8")
    for worker in range(shared.workers):
        header, cells = shared.users(worker)
        if header[0] == shared.words[WATCH]:
            total += np.frombuffer(cells, dtype="<u8").reshape(total.shape)
    return {
        name: base64.b64encode(zlib.compress(total[side].tobytes(), 1)).decode()
        for side, name in enumerate(sorted(names)[:2])
    }
