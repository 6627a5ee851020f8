"""What an endpoint server of onnx-ops has counted, as it tells it itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observed import Reading, ShadowTally, Tally, Thresholds
from onnx_ops.protocol.admin import FAILURES, REFUSALS, Counts, DeploymentCounts

_SAME = 1e-9


class ServerMetrics:
    """Fulfils `ports.MetricsSource`.

    Args:
        counts: asks the server of an endpoint; raises ServiceUnavailable if it does not answer.
    """

    def __init__(self, counts: Callable[[EndpointConfig], Counts]) -> None:
        self._counts = counts

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "outcomes"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """How long requests to the deployment took since the server was started, without waiting for their turn: how
        long they wait says what traffic there is, and not how fast the deployment is."""
        found = self._counts(config)
        counted = found.deployments.get(deployment)
        return None if counted is None else (found.bounds_s, counted.service)

    def read(self, config: EndpointConfig, deployments: Mapping[str, Thresholds | None]) -> Reading:
        found = self._counts(config)
        ours = {name: counted for name, counted in found.deployments.items() if name in deployments}
        return Reading(
            origin=found.origin,
            at=found.at,
            tallies={name: _tally(counted, found.bounds_s, deployments[name]) for name, counted in ours.items()},
            shadow=ShadowTally(
                compared=sum(counted.shadow_answered for counted in ours.values()),
                differing=sum(counted.shadow_differing for counted in ours.values()),
                failed=sum(counted.shadow_failed for counted in ours.values()),
            ),
        )


def _tally(counted: DeploymentCounts, bounds_s: Sequence[float], thresholds: Thresholds | None) -> Tally:
    def over(latency_s: float | None) -> int | None:
        """Requests slower than a bound of the histogram; None for any other latency."""
        if latency_s is None:
            return None
        at = next((i for i, bound in enumerate(bounds_s) if math.isclose(bound, latency_s, rel_tol=_SAME)), None)
        return None if at is None else sum(counted.service[at + 1 :])

    p50, p99 = (None, None) if thresholds is None else (thresholds.p50_s, thresholds.p99_s)
    return Tally(
        requests=sum(counted.statuses.values()),
        errors=sum(counted.statuses.get(status, 0) for status in FAILURES),
        refused=sum(counted.statuses.get(status, 0) for status in REFUSALS),
        over_p50=over(p50),
        over_p99=over(p99),
        outcomes=counted.outcomes,
        successes=counted.successes,
        timed=sum(counted.service),
    )
