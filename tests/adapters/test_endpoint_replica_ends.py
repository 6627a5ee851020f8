"""Starts of replicas that ended without a last report."""

from __future__ import annotations

import pytest

from onnx_ops.adapters.endpoints.replica_ends import SAME_MOMENT_S, find_ends
from onnx_ops.protocol.messages import Counts
from onnx_ops.protocol.replica_reports import ReplicaStatus, ReportSource

NOW = 10_000.0
OLD, NEW = "0" * 12, "1" * 12


def counts(origin: str = "", *, is_final: bool = False) -> Counts:
    return Counts(origin=origin, at=0.0, bounds_s=(), deployments={}, is_final=is_final)


def status(replica: str, start: str = NEW, *, is_final: bool = False) -> ReplicaStatus:
    return ReplicaStatus(
        replica=replica, start=start, endpoint="digits", adopted=None, is_final=is_final
    )


def test_find_ends_after_restart_without_last_report_includes_previous_start() -> None:
    starts = {
        ReportSource("r1", OLD): (counts("a"), NOW - 60),
        ReportSource("r1", NEW): (counts("b"), NOW - 1),
    }
    assert find_ends(starts, {"r1": (status("r1"), NOW - 1)}, NOW) == {ReportSource("r1", OLD)}
    starts[ReportSource("r1", OLD)] = (counts("a", is_final=True), NOW - 60)
    assert find_ends(starts, {"r1": (status("r1"), NOW - 1)}, NOW) == set()


def test_find_ends_after_follower_restart_with_same_server_is_empty() -> None:
    starts = {
        ReportSource("r1", OLD): (counts("a"), NOW - 60),
        ReportSource("r1", NEW): (counts("a"), NOW - 1),
    }
    assert find_ends(starts, {"r1": (status("r1"), NOW - 1)}, NOW) == set()


@pytest.mark.parametrize(
    ("age_s", "other_age_s", "is_ended"), [(36, 1, True), (34, 1, False), (500, 500, False)]
)
def test_find_ends_includes_silent_replica_only_after_lease_and_beside_live_replica(
    age_s: float, other_age_s: float, is_ended: bool
) -> None:
    starts = {
        ReportSource("r1", NEW): (counts("a"), NOW - age_s),
        ReportSource("r2", NEW): (counts("b"), NOW - 1),
    }
    statuses = {"r1": (status("r1"), NOW - age_s), "r2": (status("r2"), NOW - other_age_s)}
    assert (ReportSource("r1", NEW) in find_ends(starts, statuses, NOW)) is is_ended


@pytest.mark.parametrize("has_last_counts", [True, False])
def test_find_ends_of_final_status_includes_start_only_without_last_counts(
    has_last_counts: bool,
) -> None:
    # If the status is final without last counts, an operator has written the server off.
    source = ReportSource("r1", NEW)
    starts = {source: (counts("a", is_final=has_last_counts), NOW - 500)}
    statuses = {"r1": (status("r1", is_final=True), NOW - 500), "r2": (status("r2"), NOW - 1)}
    assert find_ends(starts, statuses, NOW) == (set() if has_last_counts else {source})


def test_find_ends_of_almost_simultaneous_ends_returns_first_of_each_group() -> None:
    starts = {
        ReportSource(f"r{index}", OLD): (counts(str(index)), NOW - 500 + index)
        for index in range(30)
    }
    statuses = {source.replica: (status(source.replica), NOW - 1) for source in starts}
    ended = sorted(starts[source][1] - NOW + 500 for source in find_ends(starts, statuses, NOW))
    assert ended == [0, SAME_MOMENT_S + 1, 2 * (SAME_MOMENT_S + 1)]
