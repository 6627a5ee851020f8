"""Measure the cost of counting a request.

    python -m benchmarks.count_cost

The status, the latency bucket and the latency sum are counted in the memory that all workers share,
and also by user. The benchmark also measures the choice of a user's deployment, with and without
epochs, and the token of an answer. Prints the minimum of many rounds, in nanoseconds of one
thread's CPU time. Exits with 1 if counting takes a microsecond or longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.protocol.messages import UserCountsRequest
from onnx_ops.protocol.routing_table import FEEDBACK_KEY_BYTES, build_next_table
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.feedback_tokens import FeedbackTokens
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import BOUNDS_S, EPOCH, SharedMetrics, count_request
from onnx_ops.serving.rollout_counts import RolloutCounts
from tests.support.endpoints import fileless_deployment

ROUNDS, CALLS = 200, 2000
LIMIT_NS = 1000


def main() -> int:
    shared = SharedMetrics(4)
    row, cells, header = shared.get_row(2, 1), CellCounter(shared, 2), shared.header
    split = TrafficSplit(weights={"v1": 90, "v2": 10}, epoch_s=60.0)
    deployments = tuple(map(fileless_deployment, split.weights))
    table = build_next_table(
        None, EndpointState(deployments=deployments, split=split, generation=1)
    )
    sticky = replace(table, state=replace(table.state, split=replace(split, epoch_s=0.0)))
    counts = RolloutCounts(shared)
    counts.start_table(TableRevision(number=1, table=table, slots={"v1": 1, "v2": 2}), now=0.0)
    header[EPOCH] = 7
    keys = [b"user-%d" % number for number in range(CALLS)]

    def route(router: TrafficRouter) -> Callable[[bytes], None]:
        def call(key: bytes) -> None:
            router.route_cell(router.get_draw(header[EPOCH]), router.get_cell(key))

        return call

    router = TrafficRouter.from_table(table)

    def by_user(key: bytes) -> None:
        if cells.is_watching:
            cells.count(router.get_draw(7), 1, router.get_cell(key), 200, 3.1e-5)

    count = _least(lambda _: count_request(row, 200, 3.1e-5), keys)
    chosen = [_least(route(each), keys) for each in (router, TrafficRouter.from_table(sticky))]
    idle = _least(by_user, keys)
    counts.collect(UserCountsRequest(limits_s={"v1": BOUNDS_S[20:24], "v2": BOUNDS_S[20:24]}))
    watched = _least(by_user, keys)
    nothing = _least(lambda _: None, keys)
    tokens = FeedbackTokens(replace(sticky, feedback_key="0f" * FEEDBACK_KEY_BYTES))
    sealed = _least(lambda _: tokens.seal_line("v2", 7), keys)
    print(f"counting a request: {count - nothing:.0f} ns (limit {LIMIT_NS} ns)")
    print(f"by user: {watched - nothing:.0f} ns during a rollout, else {idle - nothing:.0f} ns")
    print(
        "choosing a user's deployment:",
        *(f"{each - nothing:.0f} ns" for each in chosen),
        "(with epochs, without)",
    )
    print(f"sealing the token of an answer: {sealed - nothing:.0f} ns, for replicas only")
    return 0 if count - nothing < LIMIT_NS else 1


def _least(call: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
    return min(_round(call, keys) for _ in range(ROUNDS))


def _round(call: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
    began = time.thread_time_ns()
    for key in keys:
        call(key)
    return (time.thread_time_ns() - began) / CALLS


if __name__ == "__main__":
    raise SystemExit(main())
