"""All counts of the deployments that are published, for whoever judges a rollout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from onnx_ops.protocol.admin import Counts, DeploymentCounts
from onnx_ops.serving import shared as slab
from onnx_ops.serving.shared import Shared


def counted(shared: Shared, slots: Mapping[str, int]) -> Counts:
    """The counts of these deployments now; `slots` by name."""
    return Counts(
        origin=shared.origin,
        at=time.time(),  # noqa: TID251 (the server's own clock, as its counts are)
        bounds_s=slab.BOUNDS_S,
        deployments={name: _counts(shared.totals(slot)) for name, slot in slots.items()},
    )


def _counts(row: Sequence[int]) -> DeploymentCounts:
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
    )
