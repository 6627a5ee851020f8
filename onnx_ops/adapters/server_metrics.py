"""Metrics that the servers of an endpoint count themselves."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
    UnitSums,
)
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import MetricsSource
from onnx_ops.protocol import messages
from onnx_ops.protocol.messages import FAILURE_STATUSES, REJECTION_STATUSES, Counts, DeploymentCounts, UserCountsRequest


class ServerMetrics(MetricsSource):
    """Counts of all servers of an endpoint, which `counts` requests from them, by user if requested."""

    def __init__(self, counts: Callable[[EndpointConfig, UserCountsRequest | None], Sequence[Counts]]) -> None:
        self._counts = counts

    def capabilities(self) -> frozenset[str]:
        """Return what an onnx-ops server counts."""
        return frozenset({"exceedances", "shadow", "feedback", "cold_starts"})

    def latencies(self, config: EndpointConfig, deployment: str) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return the histogram of service times, without the time in the queue."""
        counts = self._counts(config, None)
        histograms = [each.deployments[deployment].service for each in counts if deployment in each.deployments]
        return (counts[0].bounds_s, _add(histograms)) if histograms else None

    def read(self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]) -> MetricsReading:
        """Return the counts of all servers, by user, too."""
        watched = {name: {} if limits is None else limits.by_guardrail() for name, limits in deployments.items()}
        ascending = {name: tuple(sorted(set(limits.values()))) for name, limits in watched.items()}
        grades = {
            name: {place: ascending[name].index(limit_s) + 1 for place, limit_s in limits.items()}
            for name, limits in watched.items()
        }
        counts = self._counts(config, UserCountsRequest(limits_s=ascending))
        by_name = {name: [one.deployments[name] for one in counts if name in one.deployments] for name in deployments}
        counted = [one for each in by_name.values() for one in each]
        return MetricsReading(
            origin="+".join(one.origin for one in counts),
            at=min(one.at for one in counts),
            tallies={name: _tally(each, counts[0].bounds_s, watched[name]) for name, each in by_name.items() if each},
            shadow=ShadowCounts(
                compared=sum(one.shadow_answered for one in counted),
                differing=sum(one.shadow_differing for one in counted),
                failed=sum(one.shadow_failed for one in counted),
            ),
            cold_s={
                name: loads for name, each in by_name.items() if (loads := tuple(s for one in each for s in one.cold_s))
            },
            units=_units(
                {n: [one.users for one in each] for n, each in by_name.items() if each}, grades, config.endpoint
            ),
        )


def _add(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*counts, strict=True))


def _tally(
    counted: Sequence[DeploymentCounts], bounds_s: Sequence[float], limits_s: Mapping[str, float]
) -> RequestCounts:
    service = _add([one.service for one in counted])
    timed, below = sum(service), dict(zip(bounds_s, accumulate(service), strict=False))
    return RequestCounts(
        requests=sum(n for one in counted for n in one.statuses.values()),
        errors=sum(one.statuses.get(status, 0) for one in counted for status in FAILURE_STATUSES),
        refused=sum(one.statuses.get(status, 0) for one in counted for status in REJECTION_STATUSES),
        feedback=sum(one.feedback for one in counted),
        successes=sum(one.successes for one in counted),
        timed=timed,
    ).with_over({name: count_slower(below, timed, limit_s, 1e-9) for name, limit_s in limits_s.items()})


def count_slower(below: Mapping[float, int], timed: int, latency_s: float, tolerance: float) -> int | None:
    """Return the requests slower than a bound of a cumulative histogram; None for any other latency."""
    counts = (count for bound, count in below.items() if math.isclose(bound, latency_s, rel_tol=tolerance))
    return next((timed - count for count in counts), None)


def _units(
    vectors: Mapping[str, Sequence[str]], grades: Mapping[str, Mapping[str, int]], endpoint: str
) -> Mapping[str, UnitSums]:
    """Return the sums over users of each event, of both deployments.

    Args:
        vectors: cells by deployment, of each server. They are added first: a user may be seen by all of them.
        grades: by deployment and place, how many thresholds a request exceeds that is slow there.
        endpoint: for errors.
    """
    if not any(map(any, vectors.values())):
        return {}
    import numpy as np

    try:
        cells = {
            name: functools.reduce(np.add, map(messages.decode_user_counts, texts)) for name, texts in vectors.items()
        }
    except (ValueError, zlib.error) as error:
        raise ServiceUnavailableError(
            "that is no answer of an endpoint server", where=endpoint, why=str(error)
        ) from error

    def sums(requests: Mapping[str, slice], events: Mapping[str, slice]) -> UnitSums:
        n, e = (
            np.stack([cells[name][fields].sum(0) for name, fields in chosen.items()]) for chosen in (requests, events)
        )
        (n, single), (e, bad) = (
            (x[:, : messages.USER_BUCKETS], int(x[:, messages.KEYLESS_CELL].sum())) for x in (n, e)
        )
        return UnitSums(
            requests=int(n.sum()) + single,
            events=int(e.sum()) + bad,
            requests_squared=int((n * n).sum()) + single,
            events_squared=int((e * e).sum()) + bad,
            products=int((n * e).sum()) + bad,
        )

    def everywhere(field: int) -> Mapping[str, slice]:
        return dict.fromkeys(cells, slice(field, field + 1))

    timed = dict.fromkeys(cells, slice(messages.CELL_LATENCIES, None))
    places = set.intersection(*(set(grades[name]) for name in cells))
    return {
        "errors": sums(everywhere(messages.CELL_REQUESTS), everywhere(messages.CELL_ERRORS)),
        "feedback": sums(everywhere(messages.CELL_FEEDBACK), everywhere(messages.CELL_SUCCESSES)),
        **{
            place: sums(timed, {name: slice(messages.CELL_LATENCIES + grades[name][place], None) for name in cells})
            for place in sorted(places)
        },
    }
