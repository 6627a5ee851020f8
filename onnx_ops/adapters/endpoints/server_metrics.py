"""What an endpoint server of onnx-ops has counted, as it tells it itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observed import Reading, ShadowTally, Tally, Thresholds, UnitSums
from onnx_ops.domain.rollout_policy import QUANTILES
from onnx_ops.errors import ServiceUnavailable
from onnx_ops.protocol import users
from onnx_ops.protocol.admin import FAILURES, REFUSALS, Counts, DeploymentCounts, Watch

_SAME = 1e-9


class ServerMetrics:
    """Fulfils `ports.MetricsSource`.

    Args:
        counts: asks the server of an endpoint, which counts by user what is to be watched; raises ServiceUnavailable
            if it does not answer.
    """

    def __init__(self, counts: Callable[[EndpointConfig, Watch | None], Counts]) -> None:
        self._counts = counts

    def capabilities(self) -> frozenset[str]:
        return frozenset({"exceedances", "shadow", "outcomes"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """How long requests to the deployment took since the server was started, without waiting for their turn: how
        long they wait says what traffic there is, and not how fast the deployment is."""
        found = self._counts(config, None)
        counted = found.deployments.get(deployment)
        return None if counted is None else (found.bounds_s, counted.service)

    def read(self, config: EndpointConfig, deployments: Mapping[str, Thresholds | None]) -> Reading:
        found = self._counts(config, Watch(limits_s={name: _limits(limits) for name, limits in deployments.items()}))
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
            units=_units([counted.users for counted in ours.values() if counted.users], config.endpoint),
        )


def _tally(counted: DeploymentCounts, bounds_s: Sequence[float], thresholds: Thresholds | None) -> Tally:
    def over(latency_s: float) -> int | None:
        """Requests slower than a bound of the histogram; None for any other latency."""
        at = next((i for i, bound in enumerate(bounds_s) if math.isclose(bound, latency_s, rel_tol=_SAME)), None)
        return None if at is None else sum(counted.service[at + 1 :])

    limits = {} if thresholds is None else thresholds.by_guardrail()
    return Tally(
        requests=sum(counted.statuses.values()),
        errors=sum(counted.statuses.get(status, 0) for status in FAILURES),
        refused=sum(counted.statuses.get(status, 0) for status in REFUSALS),
        outcomes=counted.outcomes,
        successes=counted.successes,
        timed=sum(counted.service),
    ).with_over({name: over(limit_s) for name, limit_s in limits.items()})


def _limits(thresholds: Thresholds | None) -> tuple[float, ...]:
    known = {} if thresholds is None else thresholds.by_guardrail()
    return tuple(known.get(name, 0.0) for name in QUANTILES)


def _units(vectors: Sequence[str], endpoint: str) -> Mapping[str, UnitSums]:
    """The sums over users of each event, of both deployments.

    Raises:
        ServiceUnavailable: the server sent something else.
    """
    if not vectors:
        return {}
    import numpy as np

    try:
        cells = np.stack([users.read(text) for text in vectors])
    except (ValueError, zlib.error) as error:
        raise ServiceUnavailable("that is no answer of an endpoint server", where=endpoint, why=str(error)) from error

    def sums(requests: int, events: int) -> UnitSums:
        n, e = cells[:, : users.BUCKETS, requests], cells[:, : users.BUCKETS, events]
        single, bad = (int(cells[:, users.KEYLESS, field].sum()) for field in (requests, events))
        return UnitSums(
            requests=int(n.sum()) + single,
            events=int(e.sum()) + bad,
            requests_squared=int((n * n).sum()) + single,
            events_squared=int((e * e).sum()) + bad,
            products=int((n * e).sum()) + bad,
        )

    return {
        "errors": sums(users.REQUESTS, users.ERRORS),
        "outcomes": sums(users.OUTCOMES, users.SUCCESSES),
        **{name: sums(users.TIMED, field) for name, field in zip(QUANTILES, users.OVER, strict=True)},
    }
