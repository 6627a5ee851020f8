"""What counting a request costs: status, latency bucket and sum, and by user, in the memory that all workers share.

    python -m benchmarks.count_cost

Prints the least of many rounds, in nanoseconds of one thread's processor time; the limit is one microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from onnx_ops.protocol.messages import UserCountsRequest
from onnx_ops.serving.inference.deployments import TrafficRouter
from onnx_ops.serving.metrics import BOUNDS_S, SharedMetrics, count_request
from onnx_ops.serving.rollout_counts import UserCounts, set_watch

ROUNDS, CALLS = 200, 2000
LIMIT_NS = 1000


def main() -> int:
    shared = SharedMetrics(4)
    row, users = shared.get_row(2, 1), UserCounts(shared, 2)
    router = TrafficRouter(slots=("v1",) * 100, names=frozenset({"v1"}), salt=7)
    keys = [b"user-%d" % number for number in range(CALLS)]

    def by_user(key: bytes) -> None:
        if users.is_watching:
            users.count_request(1, router.get_bucket(router.hash_key(key)), 200, 3.1e-5)

    count = _least(lambda _: count_request(row, 200, 3.1e-5), keys)
    idle = _least(by_user, keys)
    set_watch(shared, {"v1": 1, "v2": 2}, UserCountsRequest(limits_s={"v1": BOUNDS_S[20:24], "v2": BOUNDS_S[20:24]}))
    watched = _least(by_user, keys)
    nothing = _least(lambda _: None, keys)
    print(f"counting a request: {count - nothing:.0f} ns (limit {LIMIT_NS} ns)")
    print(f"by user: {watched - nothing:.0f} ns during a rollout, else {idle - nothing:.0f} ns")
    return 0 if count < LIMIT_NS else 1


def _least(call: Callable[[bytes], None], keys: Sequence[bytes]) -> float:
    return min(_round(call, keys) for _ in range(ROUNDS))


def _round(call: Callable[[bytes], None], keys: Sequence[bytes]) -> float:
    began = time.thread_time_ns()
    for key in keys:
        call(key)
    return (time.thread_time_ns() - began) / CALLS


if __name__ == "__main__":
    raise SystemExit(main())
