"""All counts of the deployments that are published, for whoever judges a rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from onnx_ops.protocol.messages import Counts, DeploymentCounts, UserCountsRequest
from onnx_ops.serving import shared as slab
from onnx_ops.serving.shared import Shared
from onnx_ops.serving.user_counts import counted_by_user, watch


def counted(
    shared: Shared,
    slots: Mapping[str, int],
    asked: UserCountsRequest | None = None,
    *,
    split: str = "",
    cold_s: Mapping[str, Sequence[float]] | None = None,
) -> Counts:
    """The counts of these deployments now; `slots` by name. Those that are watched are counted by user."""
    users: Mapping[str, str] = {}
    if asked is not None:
        watch(shared, slots, asked)
        users = counted_by_user(shared, tuple(asked.limits_s))
    return Counts(
        origin=shared.origin,
        at=time.time(),  # noqa: TID251 (the server's own clock, as its counts are)
        bounds_s=slab.BOUNDS_S,
        deployments={
            name: _counts(shared.totals(slot), users.get(name, ""), (cold_s or {}).get(name, ()))
            for name, slot in slots.items()
        },
        split=split,
    )


def _counts(row: Sequence[int], users: str, cold_s: Sequence[float]) -> DeploymentCounts:
    statuses = {str(status): row[slab.column_of(status)] for status in slab.STATUSES} | {"other": row[slab.OTHER]}
    return DeploymentCounts(
        statuses={status: count for status, count in statuses.items() if count},
        latency=tuple(slab.request_times(row).buckets),
        service=tuple(slab.service_times(row).buckets),
        shadow_answered=row[slab.SHADOW_DONE],
        shadow_differing=row[slab.SHADOW_DIFFERING],
        shadow_failed=row[slab.SHADOW_FAILED],
        outcomes=row[slab.OUTCOMES],
        successes=row[slab.SUCCESSES],
        users=users,
        cold_s=tuple(cold_s),
    )
