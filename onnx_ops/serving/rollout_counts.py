"""Counts with which a rollout is analyzed.

Requests are counted by generation of the routing table, by epoch, and by cell of users.

In a split with epochs, all requests of a user are routed to one version for the length of an epoch.
So a user in an epoch is one random assignment, regardless of its number of requests. An epoch is
reported once its requests were answered, or once its memory is needed for another epoch. Counting
may begin and end within an epoch, but only at times that depend on neither version. An epoch in
which the table or the watch (see `cell_counts`) changed is not reported.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnx_ops.protocol.messages import (
    CELLS,
    MAX_USER_THRESHOLDS,
    Counts,
    DeploymentCounts,
    EpochCounts,
    TableCounts,
    UserCountsRequest,
    encode_cells,
)
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.cell_counts import CellTotals, sum_cells
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.metrics import (
    BOUNDS_S,
    EPOCH,
    RING,
    WATCH,
    SharedMetrics,
    find_bound,
)

_NO_BOUND = len(BOUNDS_S)
_TABLES = 16
"""Number of generations whose counts are reported."""
_KEPT_S = 3600.0
"""Time in seconds for which closed epochs are reported, within `_KEPT_BYTES`.

Within this size, a reader that was disconnected for less than this time misses no epoch.
"""
_KEPT_BYTES = 32 << 20
_MIN_KEPT = 60
_SETTLE_S = 1.0
"""Seconds after an epoch in which requests on event loops can end.

Queued requests are counted as in progress, so the wait for them ends when none is left.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PresentTable:
    """The current generation, and its deployments' metrics when it was published."""

    revision: TableRevision
    rows: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedEpoch:
    """An epoch that has ended but is not closed.

    `ended_at` is on the clock of `time.monotonic`.
    """

    generation: int
    epoch: int
    ended_at: float


class RolloutCounts:
    """Counts of a server by table and epoch.

    The object also begins and closes the epochs. Only the supervisor uses it.
    """

    def __init__(self, shared: SharedMetrics) -> None:
        self._shared = shared
        self._names: Sequence[str] = ()
        self._watches = 0
        self._table: _PresentTable | None = None
        self._past: deque[TableCounts] = deque(maxlen=_TABLES - 1)
        self._first_counted = 0
        self._ended: deque[_EndedEpoch] = deque()
        self._closed: deque[EpochCounts] = deque()

    @property
    def epoch_s(self) -> float:
        """Length of an epoch of the current split in seconds; 0 if it has no epochs."""
        return 0.0 if self._table is None else self._table.revision.table.state.split.epoch_s

    def start_table(self, revision: TableRevision, now: float) -> None:
        """Start counting for a revision, just before it is published.

        `now` is in seconds since the epoch.
        """
        is_first = self._table is None
        if self._table is not None:
            self._past.append(self._count_table(self._table))
        rows = {name: self._shared.sum_slot(slot) for name, slot in revision.slots.items()}
        self._table = _PresentTable(revision=revision, rows=rows)
        split = revision.table.state.split
        if sum(weight > 0 for weight in split.weights.values()) < 2:
            self._shared.header[WATCH] = (
                0  # Requests are counted by cell only during a rollout, which saves time.
            )
        if self.epoch_s:
            # Epoch 0 is reserved for splits without epochs.
            epoch = max(1, int(now // self.epoch_s))
            self._close_epochs(reused_by=epoch)
            self._shared.header[EPOCH] = epoch
            self._first_counted = epoch + (not is_first)

    def get_epoch_rest_s(self, now: float) -> float | None:
        """Return the seconds until the next epoch; None if the split has no epochs."""
        if not self.epoch_s:
            return None
        # The limit prevents a longer epoch if the clock is set back.
        return min(self.epoch_s, max(0.0, (self._shared.header[EPOCH] + 1) * self.epoch_s - now))

    def turn_epoch(self, now: float, *, is_complete: bool = True) -> None:
        """Begin the next epoch.

        The epoch that ends is reported only if a watch is set, and if all deployments were loaded
        (`is_complete`). It is not reported if a change of the table or the watch, or an error, has
        excluded it.
        """
        if self._table is None or not self.epoch_s:
            return
        ending = self._shared.header[EPOCH]
        epoch = max(ending + 1, int(now // self.epoch_s))
        if ending >= self._first_counted and is_complete and self._shared.header[WATCH]:
            generation = self._table.revision.table.state.generation
            self._ended.append(
                _EndedEpoch(generation=generation, epoch=ending, ended_at=time.monotonic())
            )
        self._close_epochs(reused_by=epoch)
        self._shared.header[EPOCH] = epoch

    def discard_epoch(self) -> None:
        """Exclude the current epoch from the evidence, after an error in its change."""
        epoch = self._shared.header[EPOCH]
        self._first_counted = max(self._first_counted, epoch + 1)
        while self._ended and self._ended[-1].epoch >= epoch:
            self._ended.pop()

    def collect(
        self,
        request: UserCountsRequest | None = None,
        *,
        cold_s: Mapping[str, Sequence[float]] | None = None,
    ) -> Counts:
        """Return the counts of the deployments of the current table, by name.

        With `request`, the workers count its deployments by user from now on, and the result also
        has these counts. `cold_s` contains times of cold starts in seconds, by deployment.
        """
        if request is not None:
            self._set_watch(request)
        self._close_epochs()
        table = self._table
        slots = {} if table is None else table.revision.slots
        is_watched = request is not None
        tables = [*self._past, *([] if table is None else [self._count_table(table)])]
        now = time.time()  # noqa: TID251 (the server's own clock, as its counts are)
        return Counts(
            origin=self._shared.origin,
            at=now,
            bounds_s=BOUNDS_S,
            deployments={
                name: _count_deployment(self._shared.sum_slot(slot)) for name, slot in slots.items()
            },
            tables=tuple(tables if is_watched else (replace(each, cells={}) for each in tables)),
            epochs=tuple(self._closed) if is_watched else (),
            open_epoch=self._count_open_epoch() if is_watched else None,
            closed_through=self._get_closed_through(),
            cold_s={name: tuple(loads_s) for name, loads_s in (cold_s or {}).items()},
        )

    def _set_watch(self, request: UserCountsRequest) -> None:
        """Let the workers count two deployments of a request by user.

        These are the first two in the order of their names. An unchanged request changes nothing.
        Otherwise, the earlier epochs are dropped.
        """
        slots = {} if self._table is None else self._table.revision.slots
        names = sorted(request.limits_s)[:2]
        wanted: list[int] = []
        for name in names:
            bounds = [find_bound(limit_s) for limit_s in request.limits_s[name]]
            wanted += [
                slots.get(name, 0),
                *bounds,
                *[_NO_BOUND] * (MAX_USER_THRESHOLDS - len(bounds)),
            ]
        wanted += [0] * (2 + 2 * MAX_USER_THRESHOLDS - len(wanted))
        header = self._shared.header
        numbers = header[WATCH + 1 : WATCH + 1 + len(wanted)]
        if header[WATCH] and numbers.tolist() == wanted:
            return
        for place, value in enumerate(wanted):
            numbers[place] = value
        self._watches += 1
        header[WATCH] = self._watches
        self._names = names
        if self._watches > 1:
            self._first_counted = header[EPOCH] + 1
        self._ended.clear()
        self._closed.clear()

    def _close_epochs(self, reused_by: int | None = None) -> None:
        """Close the ended epochs in their order.

        An epoch is closed if it has no request in progress, and ended long enough ago. This time is
        the shorter of `_SETTLE_S` and a quarter of an epoch. An epoch is also closed when epoch
        `reused_by` reuses its memory, or that of a later epoch.
        """
        settle_s = min(_SETTLE_S, self.epoch_s / 4)
        reused = [
            number
            for number, each in enumerate(self._ended, 1)
            if reused_by and not (reused_by - each.epoch) % RING
        ]
        must_close = max(reused, default=0)
        while self._ended:
            ended, must_close = self._ended[0], must_close - 1
            if must_close < 0 and time.monotonic() < ended.ended_at + settle_s:
                return
            totals = sum_cells(self._shared, ended.generation, ended.epoch)
            if must_close < 0 and totals.in_progress.any():
                return
            cells = self._encode(totals.with_requests_in_progress(are_errors=True))
            self._closed.append(
                EpochCounts(generation=ended.generation, epoch=ended.epoch, cells=cells)
            )
            self._ended.popleft()
            self._forget_epochs()

    def _get_closed_through(self) -> int:
        if not self.epoch_s:
            return 0
        return (self._ended[0].epoch if self._ended else self._shared.header[EPOCH]) - 1

    def _forget_epochs(self) -> None:
        kept = (
            max(_MIN_KEPT, math.ceil(_KEPT_S / self.epoch_s)) if self.epoch_s else len(self._closed)
        )
        size = sum(len(text) for each in self._closed for text in each.cells.values())
        while len(self._closed) > kept or size > _KEPT_BYTES:
            size -= sum(map(len, self._closed.popleft().cells.values()))

    def _count_open_epoch(self) -> EpochCounts | None:
        """Return the counts of the current epoch so far; None if it will not be reported.

        Requests in progress are counted as successes. If the server ended now, its counts would
        otherwise include only requests with fast responses.
        """
        epoch = self._shared.header[EPOCH]
        if self._table is None or not self.epoch_s or epoch < self._first_counted:
            return None
        generation = self._table.revision.table.state.generation
        totals = sum_cells(self._shared, generation, epoch).with_requests_in_progress(
            are_errors=False
        )
        return EpochCounts(generation=generation, epoch=epoch, cells=self._encode(totals))

    def _count_table(self, table: _PresentTable) -> TableCounts:
        state = table.revision.table.state
        deployments = {
            name: _count_deployment(
                [n - b for n, b in zip(self._shared.sum_slot(slot), table.rows[name], strict=True)]
            )
            for name, slot in table.revision.slots.items()
        }
        is_sticky = not state.split.epoch_s and self._shared.header[WATCH]
        return TableCounts(
            generation=state.generation,
            split=table.revision.table.compute_split_digest(),
            deployments=deployments,
            cells=self._encode(sum_cells(self._shared, state.generation, 0)) if is_sticky else {},
        )

    def _encode(self, totals: CellTotals) -> Mapping[str, str]:
        """Return the counts of each watched deployment by name."""
        texts = {}
        for side, name in enumerate(self._names):
            mine = totals.cells // CELLS == side
            texts[name] = encode_cells(totals.cells[mine] - side * CELLS, totals.counts[mine])
        return texts


def _count_deployment(row: Sequence[int]) -> DeploymentCounts:
    return DeploymentCounts(
        statuses={
            str(status): count for status, count in metrics.count_judged(row).items() if count
        },
        unjudged={
            str(status): count for status, count in metrics.count_unjudged(row).items() if count
        },
        latency=tuple(metrics.get_request_latency(row).buckets),
        service=tuple(metrics.get_service_latency(row).buckets),
        shadow_answered=row[metrics.SHADOW_DONE],
        shadow_differing=row[metrics.SHADOW_DIFFERING],
        shadow_failed=row[metrics.SHADOW_FAILED],
        feedback=row[metrics.FEEDBACK],
        successes=row[metrics.SUCCESSES],
    )
