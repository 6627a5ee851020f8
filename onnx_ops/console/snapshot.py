"""Snapshots of all endpoints, as the pages of the console show them.

An endpoint is read in the same way as by `onnx-ops status`: from its ledger, and with the same
requests to its provider. The evidence of a rollout is read from the ledger, so metrics sources get
no further requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.errors import InternalError, OnnxOpsError, ServiceUnavailableError, quoted
from onnx_ops.ports import Context
from onnx_ops.release.endpoint_calls import COMMAND_TIMEOUT_S, run_concurrently
from onnx_ops.release.journal import (
    Journal,
    list_bound_endpoints,
    parse_stream_name,
    read_readable_state,
)
from onnx_ops.release.reconcile import MetricsSnapshot
from onnx_ops.release.status import EndpointStatus, RolloutView, describe_rollout, observe_status

_CONCURRENT = 8
"""Number of endpoints that are read at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReading:
    """The data of one endpoint that could be read.

    `state` is None if the ledger could not be read. `status` is None if the ledger is damaged, or
    if the endpoint could not be observed. In all of these cases, `error` is the reason. If the read
    failed unexpectedly or took too long, `state` is that of the previous snapshot.
    """

    name: str
    state: ReleaseState | None = None
    status: EndpointStatus | None = None
    rollout: RolloutView | None = None
    error: OnnxOpsError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All endpoints at a time, in seconds since the epoch.

    `models` are the models of endpoints and of ledgers without endpoints. `error` is the reason why
    the endpoints could not be listed. `revision` changes only if the pages show other data of an
    endpoint, or another error. `models` and data of the registry do not affect it.
    """

    at: float
    endpoints: Mapping[str, EndpointReading] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    error: OnnxOpsError | None = None
    revision: str = ""


class SnapshotReader:
    """Reader of snapshots.

    While a request to an endpoint is still waiting, no further request is sent to this endpoint.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._busy: set[str] = set()
        self._last: dict[str, EndpointReading] = {}

    def read(self) -> Snapshot:
        """Return a new snapshot, which contains errors in place of unreadable parts."""
        now = self._context.clock.now()
        try:
            names = list_bound_endpoints(self._context)
            streams = map(parse_stream_name, self._context.ledger.endpoints())
            unbound = {stream[0] for stream in streams if stream is not None}
        except OnnxOpsError as error:
            return Snapshot(at=now, error=error, revision=_compute_revision((), str(error)))
        readings: dict[str, EndpointReading] = {}
        for start in range(0, len(names), _CONCURRENT):
            readings |= self._read_batch(names[start : start + _CONCURRENT])
        self._last = readings
        states = [reading.state for reading in readings.values()]
        models = {s.config.model for s in states if s is not None and s.config is not None}
        return Snapshot(
            at=now,
            endpoints=readings,
            models=tuple(sorted(models | unbound)),
            revision=_compute_revision(tuple(readings.values()), ""),
        )

    def _read_batch(self, names: tuple[str, ...]) -> dict[str, EndpointReading]:
        calls = {
            name: partial(self._read_endpoint, name) for name in names if name not in self._busy
        }
        results = run_concurrently(calls, COMMAND_TIMEOUT_S, _build_timeout)
        readings: dict[str, EndpointReading] = {}
        for name in names:
            result = results.get(name) or _build_timeout(name)
            if isinstance(result, OnnxOpsError):
                last = self._last.get(name, EndpointReading(name=name))
                result = replace(last, status=None, rollout=None, error=result)
            readings[name] = result
        return readings

    def _read_endpoint(self, name: str) -> EndpointReading:
        self._busy.add(name)
        try:
            return _read_endpoint(self._context, name)
        except OnnxOpsError:
            raise
        except Exception as error:
            # An unexpected error of one endpoint must not hide the other endpoints.
            why = f"{type(error).__name__}: {quoted(error)}"
            raise InternalError("the read ended unexpectedly", where=name, why=why) from error
        finally:
            self._busy.discard(name)


def _read_endpoint(context: Context, name: str) -> EndpointReading:
    try:
        journal = Journal.open(context, name)
    except OnnxOpsError as error:
        try:
            state = read_readable_state(context, name)
        except OnnxOpsError:
            return EndpointReading(name=name, error=error)
        return EndpointReading(name=name, state=state, error=error)
    state = journal.state
    counts = state.observations if state.policy.is_analyzed else None
    snapshot = MetricsSnapshot(observations=counts)
    try:
        status = observe_status(journal)
        rollout = describe_rollout(journal, status.actual, snapshot)
    except OnnxOpsError as error:
        return EndpointReading(name=name, state=state, error=error)
    return EndpointReading(name=name, state=state, status=status, rollout=rollout)


def _build_timeout(name: str) -> OnnxOpsError:
    what = f"the state of the endpoint was not read within {COMMAND_TIMEOUT_S:g} s"
    return ServiceUnavailableError(what, where=name)


def _compute_revision(readings: tuple[EndpointReading, ...], error: str) -> str:
    """Return a text that changes only if the pages would show other data.

    The time of the reading does not affect the text.
    """
    parts: list[object] = [error]
    for reading in readings:
        state, status, rollout = reading.state, reading.status, reading.rollout
        parts.append((reading.name, str(reading.error or "")))
        if state is not None:
            parts.append(state.head)
        if rollout is not None:
            parts.append(rollout.next)
        if status is not None:
            servers = [(s.name, s.state, s.table, s.has_lease, s.address) for s in status.servers]
            parts.append((status.actual, status.address, status.unsupervised, servers))
            parts.append([outlier.summary for outlier in status.outliers])
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
