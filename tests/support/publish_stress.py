"""Repeated publications and rollbacks while clients send requests.

They show whether requests fail, or whether a replaced version answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic_ns

import numpy as np

from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.errors import MeasurementError
from tests.support.load import LoadPlan, LoadProcess, Publication, Records, stale
from tests.support.load.records import FOREVER_NS
from tests.support.server import Answer, ServerFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class StressResult:
    """Publications, and the results of the requests meanwhile."""

    publications: tuple[Publication, ...]
    records: Records

    @property
    def stale(self) -> int:
        """Return the number of stale answers.

        An answer is stale if a publication that replaced its version had returned before the
        request was sent.
        """
        return len(stale(self.records, self.publications))

    def publish_ms(self, quantile: float) -> float:
        """Return a quantile (0 to 100) of the duration of a publication."""
        spans = [
            (p.returned_ns - p.begun_ns) / 1e6
            for p in self.publications
            if p.returned_ns < FOREVER_NS
        ]
        return float(np.percentile(spans, quantile))


class Publisher:
    """Publisher of states of one server under rising generations.

    It records the start and end of each call.
    """

    def __init__(self, server: ServerFamily) -> None:
        self._server = server
        self._generation = 0
        self.publications: list[Publication] = []

    def publish(self, state: EndpointState) -> Answer:
        """Publish once.

        An answer other than 200 counts as a call of unknown outcome.

        Raises:
            OSError, http.client.HTTPException: the server did not answer; the outcome is unknown.
        """
        names = frozenset(name for name, weight in state.split.weights.items() if weight > 0)
        begun, returned = monotonic_ns(), FOREVER_NS
        self._generation += 1
        try:
            answer = self._server.publish(state, self._generation)
            if answer.status == 200:
                returned = monotonic_ns()
        finally:
            self.publications.append(Publication(names=names, begun_ns=begun, returned_ns=returned))
        return answer


def states(first: Deployment) -> Iterator[EndpointState]:
    """Yield an endless series of states.

    The first one serves `first`. Then a new deployment takes all traffic, `first` takes it back,
    the next new deployment takes it, and so on. Every new deployment has a different name, and the
    files of `first`.
    """
    yield _state(first, first)
    for number in count(1):
        newcomer = replace(first, name=f"{first.name}-{number}", version=str(number))
        yield _state(newcomer, first, newcomer)
        yield _state(first, first, newcomer)


def _state(serving: Deployment, *held: Deployment) -> EndpointState:
    weights = {deployment.name: 100 if deployment is serving else 0 for deployment in held}
    return EndpointState(deployments=held, split=TrafficSplit(weights=weights))


def stress_publications(
    server: ServerFamily, first: Deployment, plan: LoadPlan, *, publications: int
) -> StressResult:
    """Publish a number of times under load, as fast as the server accepts it.

    Raises:
        MeasurementError: a publication was refused.
    """
    publisher = Publisher(server)
    upcoming = states(first)
    _publish(publisher, next(upcoming))
    with LoadProcess(plan) as load:
        for _ in range(publications):
            _publish(publisher, next(upcoming))
        records = load.stop()
    return StressResult(publications=tuple(publisher.publications), records=records)


def _publish(publisher: Publisher, state: EndpointState) -> None:
    answer = publisher.publish(state)
    if answer.status != 200:
        raise MeasurementError(
            "a publication was refused", why=f"{answer.status} {answer.body[:500]!r}"
        )
