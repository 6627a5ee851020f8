"""Counts by cell of users, which a worker writes and the supervisor reads.

The analysis of a rollout sets a watch. The watch defines which two deployments are counted, and
which latencies are slow. A request is counted in the epoch in which it was routed, regardless of
when it is answered. Each worker has a ring of memory blocks. A block belongs to one epoch of one
generation of the routing table, under one watch. The tag of the block names the epoch, the
generation and the watch. When a request with another tag uses the block, the block is reset.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_FEEDBACK,
    CELL_FIELDS,
    CELL_LATENCIES,
    CELL_REFUSED,
    CELL_REQUESTS,
    CELL_SUCCESSES,
    CELLS,
    FAILURE_STATUSES,
    MAX_USER_THRESHOLDS,
    REJECTION_STATUSES,
)
from onnx_ops.serving.inference.traffic_router import CellDraw
from onnx_ops.serving.metrics import (
    BLOCK_CELLS,
    BLOCKS,
    BOUNDS_S,
    CELL_NUMBERS,
    LOST_RUN,
    OTHER_STATUS,
    RING,
    RUN_CELL,
    RUN_SLOT,
    WATCH,
    CellBlock,
    SharedMetrics,
    get_column,
)

_IN_PROGRESS, _LISTED = CELL_FIELDS, CELL_FIELDS + 1
_FAILURES = frozenset(
    {get_column(int(s)) for s in FAILURE_STATUSES if s != "other"} | {OTHER_STATUS}
)
_REJECTIONS = frozenset(get_column(int(s)) for s in REJECTION_STATUSES)
_GENERATION, _EPOCH, _WATCH, _LENGTH = range(4)
_NO_BOUND = len(BOUNDS_S)


@dataclass(frozen=True, slots=True, eq=False)
class _OpenBlock:
    """A memory block of this worker, and the deployments that are counted in it.

    `sides` has the first cell and the thresholds of each deployment, by slot.
    """

    memory: CellBlock
    draw: CellDraw
    watch: int
    sides: dict[int, tuple[int, Sequence[float]]]


@dataclass(frozen=True, slots=True, eq=False)
class CellPlace:
    """The place in memory where a request in progress is counted."""

    block: _OpenBlock
    at: int
    limits_s: Sequence[float]


class CellCounter:
    """Counter of one worker. A worker that replaces another one continues its counts.

    Counting a request takes 0.05 µs without a watch, and 0.7 µs if its deployment is watched
    (`benchmarks.count_cost`).
    """

    def __init__(self, shared: SharedMetrics, worker: int) -> None:
        self._header = shared.header
        self._memory = [shared.get_cell_block(worker, place) for place in range(BLOCKS)]
        self._ring: list[_OpenBlock | None] = [None] * BLOCKS
        self._block: _OpenBlock | None = None
        for memory in self._memory:
            _take_over(memory)
        state = shared.get_process_state(worker)
        self._count_lost(state[LOST_RUN + RUN_SLOT], state[LOST_RUN + RUN_CELL])
        state[LOST_RUN + RUN_SLOT] = 0

    @property
    def is_watching(self) -> bool:
        """Whether deployments are counted by cell at present."""
        return self._header[WATCH] != 0

    def count(self, draw: CellDraw, slot: int, cell: int, status: int, seconds: float) -> None:
        """Count a request if its deployment is watched.

        `seconds` are 0 if its latency is not comparable.
        """
        block = self._block
        if block is None or block.draw is not draw or block.watch != self._header[WATCH]:
            block = self._open_block(draw)
        side = block.sides.get(slot)
        if side is not None:
            _count(block.memory, (side[0] + cell) * CELL_NUMBERS, side[1], status, seconds)

    def begin(self, draw: CellDraw, slot: int, cell: int) -> CellPlace | None:
        """Count a request as in progress, until `finish` or `cancel` is called.

        Return None if the request's deployment is not watched.
        """
        block = self._block
        if block is None or block.draw is not draw or block.watch != self._header[WATCH]:
            block = self._open_block(draw)
        side = block.sides.get(slot)
        if side is None:
            return None
        at = (side[0] + cell) * CELL_NUMBERS
        counts = block.memory.counts
        if not counts[at + _LISTED]:
            _list_cell(block.memory, at)
        counts[at + _IN_PROGRESS] += 1
        return CellPlace(block, at, side[1])

    def finish(self, place: CellPlace, status: int, seconds: float) -> None:
        """Count the result of a request that was counted as in progress.

        Nothing is counted if the memory of its epoch has been reused.
        """
        block = place.block
        if self._ring[_find_place(block.draw.epoch)] is block:
            block.memory.counts[place.at + _IN_PROGRESS] -= 1
            _count(block.memory, place.at, place.limits_s, status, seconds)

    def cancel(self, place: CellPlace) -> None:
        """Remove a request from the requests in progress.

        Nothing is changed if the memory of its epoch has been reused.
        """
        if self._ring[_find_place(place.block.draw.epoch)] is place.block:
            place.block.memory.counts[place.at + _IN_PROGRESS] -= 1

    def count_feedback(self, draw: CellDraw, slot: int, cell: int, success: bool) -> None:
        """Count an entry of feedback if its deployment is watched.

        Call this only for splits without epochs. Otherwise, the epoch of the response can already
        be closed when the feedback arrives.
        """
        block = self._block
        if block is None or block.draw is not draw or block.watch != self._header[WATCH]:
            block = self._open_block(draw)
        side = block.sides.get(slot)
        if side is not None:
            at = (side[0] + cell) * CELL_NUMBERS
            counts = block.memory.counts
            if not counts[at + _LISTED]:
                _list_cell(block.memory, at)
            counts[at + CELL_FEEDBACK] += 1
            counts[at + CELL_SUCCESSES] += success

    def _count_lost(self, slot: int, cell: int) -> None:
        """Count the request that this worker's predecessor lost, as an error.

        The predecessor was running the request on its event loop when it ended. The request is
        counted only if the split has routed it, and its deployment is watched.
        """
        side = _read_sides(self._header).get(slot)
        blocks = [
            memory
            for memory in self._memory
            if memory.tag[_GENERATION] and memory.tag[_WATCH] == self._header[WATCH]
        ]
        if side is not None and cell and blocks:
            last = max(blocks, key=lambda memory: (memory.tag[_GENERATION], memory.tag[_EPOCH]))
            _count(last, (side[0] + cell - 1) * CELL_NUMBERS, side[1], 500, 0.0)

    def _open_block(self, draw: CellDraw) -> _OpenBlock:
        """Make the block of a draw the current block, and return it.

        If the previous worker already counted in this block, its counts are continued.
        """
        watch, place = self._header[WATCH], _find_place(draw.epoch)
        memory = self._memory[place]
        if memory.tag.tolist()[:_LENGTH] != [draw.generation, draw.epoch, watch]:
            _reset(memory)
            memory.tag[_GENERATION], memory.tag[_EPOCH], memory.tag[_WATCH] = (
                draw.generation,
                draw.epoch,
                watch,
            )
        block = _OpenBlock(memory, draw, watch, _read_sides(self._header))
        self._block = self._ring[place] = block
        return block


def _find_place(epoch: int) -> int:
    """Return the index of the block of an epoch.

    The last block is for splits without epochs. Their epoch number is 0.
    """
    return epoch % RING if epoch else RING


def _count(
    memory: CellBlock, at: int, limits_s: Sequence[float], status: int, seconds: float
) -> None:
    counts = memory.counts
    if not counts[at + _LISTED]:
        _list_cell(memory, at)
    counts[at] += 1  # `at` is the index of CELL_REQUESTS, whose offset is 0.
    if status != 200:
        column = get_column(status)
        if column in _FAILURES:
            counts[at + CELL_ERRORS] += 1
        elif column in _REJECTIONS:
            counts[at + CELL_REFUSED] += 1
    if seconds:
        counts[at + CELL_LATENCIES + bisect_left(limits_s, seconds)] += 1


def _list_cell(memory: CellBlock, at: int) -> None:
    length = memory.tag[_LENGTH]
    memory.listed[length] = at // CELL_NUMBERS
    memory.tag[_LENGTH] = length + 1
    memory.counts[at + _LISTED] = 1


def _read_sides(header: memoryview) -> dict[int, tuple[int, Sequence[float]]]:
    """Return the watched deployments by slot.

    The values are the number of the deployment's first cell, and its thresholds in seconds.
    """
    sides: dict[int, tuple[int, Sequence[float]]] = {}
    for side in range(2):
        begin = WATCH + 1 + side * (1 + MAX_USER_THRESHOLDS)
        slot, *bounds = header[begin : begin + 1 + MAX_USER_THRESHOLDS]
        if slot:
            sides[slot] = side * CELLS, [BOUNDS_S[bound] for bound in bounds if bound < _NO_BOUND]
    return sides


def _view(memory: CellBlock) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return arrays over the numbers of the listed cells and the counts of all cells.

    The shapes are (n,) and (`BLOCK_CELLS`, `CELL_NUMBERS`).
    """
    listed = np.unique(np.frombuffer(memory.listed, np.uint32)[: memory.tag[_LENGTH]])
    return listed, np.frombuffer(memory.counts, np.uint32).reshape(BLOCK_CELLS, CELL_NUMBERS)


def _reset(memory: CellBlock) -> None:
    memory.tag[_GENERATION] = memory.tag[_EPOCH] = memory.tag[_WATCH] = (
        0  # With a generation of 0, readers skip the block while it is reset.
    )
    listed, counts = _view(memory)
    counts[listed] = 0
    memory.tag[_LENGTH] = 0


def _take_over(memory: CellBlock) -> None:
    """Count as errors the requests that a worker had not answered when it ended.

    When the worker ended, the connections of its clients were closed.
    """
    listed, counts = _view(memory)
    lost = counts[listed, _IN_PROGRESS]
    counts[listed, CELL_REQUESTS] += lost
    counts[listed, CELL_ERRORS] += lost
    counts[listed, _IN_PROGRESS] = 0
    # The worker possibly ended in `_list_cell` before it set this flag.
    counts[listed, _LISTED] = 1


@dataclass(frozen=True, slots=True, eq=False)
class CellTotals:
    """Counts by cell, summed over all workers.

    The shapes are (n,) for `cells` and `in_progress`, and (n, `CELL_FIELDS`) for `counts`. Cells of
    the second deployment follow those of the first.
    """

    cells: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    in_progress: npt.NDArray[np.int64]

    def with_requests_in_progress(self, *, are_errors: bool) -> CellTotals:
        """Return the counts with requests in progress added as errors, or as successes."""
        counts = self.counts.copy()
        counts[:, CELL_REQUESTS] += self.in_progress
        if are_errors:
            counts[:, CELL_ERRORS] += self.in_progress
        return CellTotals(self.cells, counts, np.zeros_like(self.in_progress))


def sum_cells(shared: SharedMetrics, generation: int, epoch: int) -> CellTotals:
    """Return the counts of an epoch under the current watch, summed over the workers."""
    tag = [generation, epoch, shared.header[WATCH]]
    parts = []
    for worker in range(shared.workers):
        memory = shared.get_cell_block(worker, _find_place(epoch))
        if memory.tag.tolist()[:_LENGTH] == tag:
            listed, counts = _view(memory)
            parts.append((listed, counts[listed]))
    cells = np.unique(np.concatenate([np.zeros(0, np.uint32), *(listed for listed, _ in parts)]))
    total = np.zeros((len(cells), CELL_NUMBERS), np.int64)
    for listed, counts in parts:
        total[np.searchsorted(cells, listed)] += counts
    return CellTotals(cells.astype(np.int64), total[:, :CELL_FIELDS], total[:, _IN_PROGRESS])
