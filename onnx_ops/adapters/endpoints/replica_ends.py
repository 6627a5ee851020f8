"""Detection of replica starts that ended without a last report.

Causes are a kill, a lack of memory, or the loss of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx_ops.protocol.messages import Counts
from onnx_ops.protocol.replica_reports import REPORT_S, ReplicaStatus, ReportSource
from onnx_ops.protocol.replica_tables import DEADLINE_S, LEASE_S

SAME_MOMENT_S = 2 * REPORT_S
"""Seconds within which several ends are treated as one.

Such ends probably have one cause, for example the failure of a machine or of a network.
"""


def find_ends(
    starts: Mapping[ReportSource, tuple[Counts, float]],
    statuses: Mapping[str, tuple[ReplicaStatus, float]],
    now: float,
) -> set[ReportSource]:
    """Return the starts that ended without a last report, one per moment.

    The last start of a replica is treated as ended after `LEASE_S` + `DEADLINE_S` without a report,
    and only if other replicas report. If no replica reports, the store or this process can be
    disconnected. An earlier start of a replica is treated as ended unless a later start has
    reported for the same server.

    Args:
        starts: the last counts of each start, and the time at which they were written.
        statuses: the last status of each replica, and the time at which it was written.
        now: the current time. All times are in seconds by the store's clock.
    """
    latest = max((at for _, at in statuses.values()), default=0.0)
    gone_s = LEASE_S + DEADLINE_S
    ended: list[tuple[float, ReportSource]] = []
    for source, (counts, at) in starts.items():
        status, reported_at = statuses.get(source.replica, (None, at))
        if counts.is_final:
            continue
        if status is None or status.start == source.start:
            is_ended = now - max(at, reported_at) > gone_s and now - latest <= gone_s
        else:
            is_ended = not _has_successor(source, starts)
        if is_ended:
            ended.append((at, source))
    return _select_moments(ended)


def _has_successor(
    source: ReportSource, starts: Mapping[ReportSource, tuple[Counts, float]]
) -> bool:
    """Return whether a later start of the replica has reported for the same server.

    A server continues to run if only the process that follows the tables is started again.
    """
    counts, at = starts[source]
    return any(
        other.origin == counts.origin
        and other_at > at
        and each.replica == source.replica
        and each != source
        for each, (other, other_at) in starts.items()
    )


def _select_moments(ended: Sequence[tuple[float, ReportSource]]) -> set[ReportSource]:
    """Return the first end of each group of ends within `SAME_MOMENT_S`."""
    selected: set[ReportSource] = set()
    began_at = float("-inf")
    for at, source in sorted(ended):
        if at - began_at > SAME_MOMENT_S:
            selected.add(source)
            began_at = at
    return selected
