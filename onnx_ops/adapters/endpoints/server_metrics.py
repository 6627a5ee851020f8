"""What an endpoint server of onnx-ops has counted, as it tells it itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observed import Reading, ShadowTally, Tally, Thresholds, UnitSums
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
        watched = {name: {} if limits is None else limits.by_guardrail() for name, limits in deployments.items()}
        ascending = {name: tuple(sorted(set(limits.values()))) for name, limits in watched.items()}
        grades = {
            name: {place: ascending[name].index(limit_s) + 1 for place, limit_s in limits.items()}
            for name, limits in watched.items()
        }
        found = self._counts(config, Watch(limits_s=ascending))
        ours = {name: counted for name, counted in found.deployments.items() if name in deployments}
        return Reading(
            origin=found.origin,
            at=found.at,
            tallies={name: _tally(counted, found.bounds_s, watched[name]) for name, counted in ours.items()},
            shadow=ShadowTally(
                compared=sum(counted.shadow_answered for counted in ours.values()),
                differing=sum(counted.shadow_differing for counted in ours.values()),
                failed=sum(counted.shadow_failed for counted in ours.values()),
            ),
            units=_units({n: one.users for n, one in ours.items() if one.users}, grades, config.endpoint),
        )


def _tally(counted: DeploymentCounts, bounds_s: Sequence[float], limits_s: Mapping[str, float]) -> Tally:
    def over(latency_s: float) -> int | None:
        """Requests slower than a bound of the histogram; None for any other latency."""
        at = next((i for i, bound in enumerate(bounds_s) if math.isclose(bound, latency_s, rel_tol=_SAME)), None)
        return None if at is None else sum(counted.service[at + 1 :])

    return Tally(
        requests=sum(counted.statuses.values()),
        errors=sum(counted.statuses.get(status, 0) for status in FAILURES),
        refused=sum(counted.statuses.get(status, 0) for status in REFUSALS),
        outcomes=counted.outcomes,
        successes=counted.successes,
        timed=sum(counted.service),
    ).with_over({name: over(limit_s) for name, limit_s in limits_s.items()})


def _units(
    vectors: Mapping[str, str],
    grades: Mapping[str, Mapping[str, int]],
    endpoint: str,
) -> Mapping[str, UnitSums]:
    """The sums over users of each event, of both deployments.

    Args:
        vectors: cells by deployment.
        grades: by deployment and place, how many thresholds a request exceeds that is slow there.
        endpoint: for errors.

    Raises:
        ServiceUnavailable: the server sent something else.
    """
    if not vectors:
        return {}
    import numpy as np

    try:
        cells = {name: users.read(text) for name, text in vectors.items()}
    except (ValueError, zlib.error) as error:
        raise ServiceUnavailable("that is no answer of an endpoint server", where=endpoint, why=str(error)) from error

    def sums(requests: Mapping[str, slice], events: Mapping[str, slice]) -> UnitSums:
        n, e = (
            np.stack([cells[name][fields].sum(0) for name, fields in chosen.items()]) for chosen in (requests, events)
        )
        (n, single), (e, bad) = ((x[:, : users.BUCKETS], int(x[:, users.KEYLESS].sum())) for x in (n, e))
        return UnitSums(
            requests=int(n.sum()) + single,
            events=int(e.sum()) + bad,
            requests_squared=int((n * n).sum()) + single,
            events_squared=int((e * e).sum()) + bad,
            products=int((n * e).sum()) + bad,
        )

    def everywhere(field: int) -> Mapping[str, slice]:
        return dict.fromkeys(cells, slice(field, field + 1))

    timed = dict.fromkeys(cells, slice(users.GRADES, None))
    places = set.intersection(*(set(grades[name]) for name in cells))
    return {
        "errors": sums(everywhere(users.REQUESTS), everywhere(users.ERRORS)),
        "outcomes": sums(everywhere(users.OUTCOMES), everywhere(users.SUCCESSES)),
        **{
            place: sums(timed, {name: slice(users.GRADES + grades[name][place], None) for name in cells})
            for place in sorted(places)
        },
    }
