"""Counters in shared memory, and the page that Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.errors import UserError
from onnx_ops.protocol.routing_table import RoutingTable, build_next_table
from onnx_ops.serving import metrics
from onnx_ops.serving.metrics import (
    BOUNDS_S,
    SLOTS,
    STATUSES,
    MetricsPage,
    SharedMetrics,
    SlotAllocator,
    count_queued_request,
    count_request,
    get_column,
    get_request_latency,
    get_service_latency,
)
from onnx_ops.testing.endpoints import state_of
from tests.support.endpoints import fileless_deployment


def table(*names: str, previous: RoutingTable | None = None) -> RoutingTable:
    return build_next_table(previous, state_of(*map(fileless_deployment, names), **{names[0]: 100}))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.sampled_from((*STATUSES, 418)),
            st.floats(0, 100, width=32),
        ),
        max_size=60,
    )
)
def test_sum_slot_returns_totals_of_all_workers(events: list[tuple[int, int, int, float]]) -> None:
    shared = SharedMetrics(3)
    for worker, slot, status, seconds in events:
        count_request(shared.get_row(worker, slot), status, seconds)
    for slot in range(4):
        mine = [(status, seconds) for _, s, status, seconds in events if s == slot]
        totals = shared.sum_slot(slot)
        by_column = Counter(get_column(status) for status, _ in mine)
        assert totals[: metrics.INLINE_BUCKETS] == [
            by_column[column] for column in range(metrics.INLINE_BUCKETS)
        ]
        buckets = totals[metrics.INLINE_BUCKETS : metrics.QUEUED_BUCKETS]
        assert sum(buckets) == len(mine)
        for number, bound in enumerate(BOUNDS_S):
            assert sum(buckets[: number + 1]) == sum(seconds <= bound for _, seconds in mine)
        assert totals[metrics.INLINE_NANOSECONDS] == sum(int(seconds * 1e9) for _, seconds in mine)


def test_service_latency_counts_only_comparable_requests() -> None:
    shared = SharedMetrics(2)
    count_request(shared.get_row(0, 1), 200, 1.0)
    count_queued_request(shared.get_row(0, 1), 200, 3.0, 2.0)
    count_queued_request(shared.get_row(1, 1), 504, 5.0, 0.0)
    totals = shared.sum_slot(1)
    every, compared = get_request_latency(totals), get_service_latency(totals)
    assert (sum(every.buckets), every.nanoseconds) == (3, 9_000_000_000)
    assert (sum(compared.buckets), compared.nanoseconds) == (2, 3_000_000_000)
    assert (totals[get_column(200)], totals[get_column(504)]) == (2, 1)
    for histogram, times in ((every, (1.0, 3.0, 5.0)), (compared, (1.0, 2.0))):
        for number, bound in enumerate(BOUNDS_S):
            assert sum(histogram.buckets[: number + 1]) == sum(time <= bound for time in times)


def test_reset_gauges_of_one_worker_keeps_its_counters_and_gauges_of_other_worker() -> None:
    shared = SharedMetrics(2)
    row = shared.get_row(1, 5)
    row[metrics.QUEUED], row[metrics.IN_PROGRESS], row[metrics.LOADS] = 7, 2, 3
    shared.get_row(0, 5)[metrics.QUEUED] = 4
    shared.reset_gauges(1)
    totals = shared.sum_slot(5)
    assert (totals[metrics.QUEUED], totals[metrics.IN_PROGRESS], totals[metrics.LOADS]) == (4, 0, 3)


def test_metric_columns_do_not_overlap() -> None:
    others = (
        *(
            "SLOTS",
            "COLUMNS",
            "_LABEL_BYTES",
            "STEPS",
            "REQUEST_IDS",
            "TOKEN_BUCKETS",
            "USER_CELLS",
            "CELLS",
        ),
        "BLOCK_CELLS",
    )
    after = [
        v
        for name, v in vars(metrics).items()
        if name.isupper() and isinstance(v, int) and name not in others
    ]
    singles = [value for value in after if value >= metrics.INLINE_NANOSECONDS]
    assert sorted(singles) == list(range(metrics.INLINE_NANOSECONDS, metrics.UNJUDGED + 1))
    assert len(STATUSES) + 1 == metrics.COLUMNS - metrics.UNJUDGED
    assert len(STATUSES) == metrics.OTHER_STATUS
    ends = (
        metrics.INLINE_BUCKETS,
        metrics.QUEUED_BUCKETS,
        metrics.SERVICE_BUCKETS,
        metrics.INLINE_NANOSECONDS,
    )
    assert [b - a for a, b in pairwise(ends)] == [len(BOUNDS_S) + 1] * 3


def test_slot_of_returning_deployment_keeps_its_counts() -> None:
    shared = SharedMetrics(1)
    slots = SlotAllocator(shared)
    first = table("a")
    slot = slots.assign(first, None)["a"]
    count_request(shared.get_row(0, slot), 200, 0.1)
    second = table("b", previous=first)
    assert slots.assign(second, first)["b"] != slot
    assert slots.assign(table("a", previous=second), second) == {"a": slot}
    assert shared.sum_slot(slot)[get_column(200)] == 1
    assert shared.get_labels(slot) == {"deployment": "a", "version": "a", "variant": "fp32"}
    assert shared.get_labels(slot + 10) is None


def test_slot_of_removed_deployment_is_reused_with_zero_counts() -> None:
    shared = SharedMetrics(1)
    slots = SlotAllocator(shared)
    previous: RoutingTable | None = None
    for number in range(200):
        current = table(f"d{number}", previous=previous)
        (slot,) = slots.assign(current, previous).values()
        assert 0 < slot < SLOTS
        assert shared.sum_slot(slot)[get_column(200)] == 0
        count_request(shared.get_row(0, slot), 200, 0.1)
        if previous is not None:
            # The previous table still answers requests.
            (kept,) = slots.assign(previous, current).values()
            assert shared.sum_slot(kept)[get_column(200)] == 1
        previous = current


def test_slot_allocator_with_too_many_or_too_long_names_raises_user_error() -> None:
    slots = SlotAllocator(SharedMetrics(1))
    with pytest.raises(UserError, match="the limit is 63"):
        slots.assign(table(*(f"d{number}" for number in range(SLOTS))), None)
    with pytest.raises(UserError, match="more than 1024 bytes"):
        slots.assign(table("x" * 2000), None)


def test_histogram_sums_are_rendered_in_seconds() -> None:
    shared = SharedMetrics(2)
    shared.set_labels(1, {"deployment": "v1", "version": "1", "variant": "fp32"})
    for worker, seconds in enumerate((0.25, 1.5)):
        count_request(shared.get_row(worker, 1), 200, seconds)
    samples = dict(
        line.rsplit(" ", 1)
        for line in MetricsPage(shared, "e").render(None).splitlines()
        if line[0] != "#"
    )
    labels = '{endpoint="e",deployment="v1",version="1",variant="fp32"}'
    for name in ("request_duration_seconds", "service_duration_seconds"):
        found = [float(samples[f"onnx_ops_{name}_{part}{labels}"]) for part in ("count", "sum")]
        assert found == [2.0, 1.75]
