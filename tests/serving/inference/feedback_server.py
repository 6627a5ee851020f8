"""The counts of one server and of its workers, without processes and models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.protocol.messages import (
    CELL_FEEDBACK,
    CELL_SUCCESSES,
    KEYLESS_CELL,
    TableCounts,
    UserCountsRequest,
    decode_cells,
)
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import (
    LoadedDeployment,
    LoadedDeployments,
    TableRevision,
)
from onnx_ops.serving.inference.feedback import FeedbackCounter
from onnx_ops.serving.inference.request_queue import LatencyEstimator
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import REVISION, MetricsRow, SharedMetrics, SlotAllocator
from onnx_ops.serving.rollout_counts import RolloutCounts
from tests.support.endpoints import fileless_deployment
from tests.support.must import must

KEY, OTHER_KEY = "0f" * 16, "f0" * 16
WATCH = UserCountsRequest(limits_s={"new": (), "old": ()})


def make_table(
    generation: int = 3, key: str = KEY, epoch_s: float = 0.0, **weights: int
) -> RoutingTable:
    """Return a table of both deployments, the newer one first."""
    split = TrafficSplit(weights=weights or {"old": 50, "new": 50}, epoch_s=epoch_s)
    deployments = tuple(map(fileless_deployment, split.weights))
    stable = replace(split, weights={**dict.fromkeys(split.weights, 0), "old": 100})
    before = build_next_table(None, EndpointState(deployments=deployments, split=stable))
    state = EndpointState(deployments=deployments, split=split, generation=generation)
    return replace(build_next_table(before, state), feedback_key=key)


class FeedbackServer:
    """The counts of one server and of its workers."""

    def __init__(self, *tables: RoutingTable, workers: int = 2) -> None:
        self.shared = SharedMetrics(workers)
        self.counts = RolloutCounts(self.shared)
        self._slots = SlotAllocator(self.shared)
        self._workers = [LoadedDeployments(self.shared, number, load) for number in range(workers)]
        self._feedback = [
            FeedbackCounter(each, CellCounter(self.shared, number))
            for number, each in enumerate(self._workers)
        ]
        self._revision: TableRevision | None = None
        for table in tables:
            self.publish(table)

    def publish(self, table: RoutingTable) -> None:
        before = self._revision
        slots = self._slots.assign(table, None if before is None else before.table)
        revision = TableRevision.follow(before, self.shared.header[REVISION] + 1, table, slots)
        for worker in self._workers:
            worker.prepare(revision)
        self.counts.start_table(revision, 0.0)
        self.shared.header[REVISION] = revision.number
        self.counts.collect(WATCH)
        self._revision = revision

    def answer(self, deployment: str, cell: int = KEYLESS_CELL) -> str:
        """Return the token of an answer of this server."""
        return must(self._workers[0].get_current().tokens).seal(deployment, cell).decode()

    def remember(
        self, deployment: str, request_id: str, cell: int, epoch: int = 0, worker: int = 0
    ) -> None:
        """Answer a request of a user by a deployment, as the service records it."""
        snapshot = self._workers[worker].get_current()
        slot = snapshot.get_deployment(deployment).slot
        self._feedback[worker].remember(
            request_id.encode(), slot, snapshot.split_number, epoch, cell
        )

    def report(
        self, subjects: Sequence[str], *, success: bool = True, worker: int = 0, kind: str = "token"
    ) -> tuple[int, int]:
        """Report feedback; return the numbers of counted and of unknown entries."""
        entries = [{kind: subject, "success": success} for subject in subjects]
        return self._feedback[worker].count(json.dumps({"feedback": entries}).encode())

    def get_slot(self, deployment: str) -> int:
        return self._workers[0].get_current().get_deployment(deployment).slot

    def read_table(self) -> TableCounts:
        """Return the counts of the current generation."""
        return self.counts.collect(WATCH).tables[-1]

    def read_feedback(self) -> dict[str, tuple[int, int]]:
        """Return feedback and successes of the current generation, by deployment."""
        return {
            name: (one.feedback, one.successes)
            for name, one in self.read_table().deployments.items()
        }

    def read_cells(self, deployment: str) -> dict[int, tuple[int, int]]:
        """Return feedback and successes by cell of users."""
        cells, counts = decode_cells(self.read_table().cells[deployment])
        fields = counts[:, [CELL_FEEDBACK, CELL_SUCCESSES]].tolist()
        return {
            int(cell): (feedback, successes)
            for cell, (feedback, successes) in zip(cells, fields, strict=True)
        }


def load(deployment: Deployment, row: MetricsRow, _control: bool) -> LoadedDeployment:
    return LoadedDeployment(
        deployment=deployment,
        signature=cast("Any", None),
        run=lambda *_: [np.zeros(1)],
        max_body=0,
        row=row,
        queue=cast("Any", None),
        latency=LatencyEstimator(),
        size_bytes=0,
    )


def find_cell(table: RoutingTable, deployment: str) -> int:
    """Return a cell of users that a sticky split gives to a deployment."""
    router = TrafficRouter.from_table(table)
    return next(
        cell
        for cell in range(KEYLESS_CELL)
        if router.route_cell(router.get_draw(0), cell) == deployment
    )
