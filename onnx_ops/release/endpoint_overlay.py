"""Endpoints and their metrics in a dry run: changes are recorded instead of made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import (
    EndpointConfig,
    EndpointServer,
    EndpointState,
    OrphanedResource,
    ServerMemory,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import (
    GenerationCounts,
    LatencyThresholds,
    MetricsReading,
)
from onnx_ops.domain.target import Diagnosis, Target
from onnx_ops.errors import OnnxOpsError
from onnx_ops.ports import Clock, EndpointProvider, MetricsSource, Signer
from onnx_ops.release.changes import NOTHING, Change, ChangeKind, ChangeLog


class EndpointOverlay(EndpointProvider):
    """A provider that reads from a wrapped provider, and only records changes.

    After the first change of an endpoint, `observe` returns the state that the endpoint would have
    after the recorded changes.
    """

    def __init__(self, inner: EndpointProvider, log: ChangeLog) -> None:
        self.tools, self.converters = inner.tools, inner.converters
        self.requirements = inner.requirements
        self._inner = inner
        self._log = log
        self._states: dict[str, EndpointState | None] = {}
        self._deleted: set[tuple[str, OrphanedResource]] = set()
        self._forgotten: set[tuple[str, str]] = set()

    def has_changed(self, endpoint: str) -> bool:
        """Return whether a change of the endpoint's state, or its removal, is recorded."""
        return endpoint in self._states

    def sign_with(self, signer: Callable[[], Signer | None]) -> None:
        """Set the signer of the wrapped provider."""
        self._inner.sign_with(signer)

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return the capabilities of the wrapped provider."""
        return self._inner.capabilities(options)

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        self._inner.validate_options(options)

    def explain_unservable(self, target: Target) -> str:
        """Return why the wrapped provider cannot serve the target; empty if it can."""
        return self._inner.explain_unservable(target)

    def explain_uncounted(self, source: str, options: Mapping[str, Json]) -> str:
        """Return why a metrics source counts no requests, according to the provider."""
        return self._inner.explain_uncounted(source, options)

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's location."""
        return self._inner.place(config)

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Raise UserError if the endpoint does not support a change of its options."""
        self._inner.validate_change(before, after)

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the endpoint cannot be changed now."""
        self._inner.require_changeable(config)

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change, as the wrapped provider computes it."""
        return self._inner.preview(config, state, current, is_rollback=is_rollback)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the state after the recorded changes, or else the observed state."""
        if config.endpoint in self._states:
            return self._states[config.endpoint]
        return self._inner.observe(config)

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Record the changes of `apply`."""
        self._change(config, state, generation, is_rollback=False)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Record the changes of `roll_back`."""
        self._change(config, state, generation, is_rollback=True)

    def _change(
        self, config: EndpointConfig, state: EndpointState, generation: int, *, is_rollback: bool
    ) -> None:
        self.require_changeable(config)
        before = self.observe(config)
        after = self.preview(config, state, before, is_rollback=is_rollback)
        for change in list_endpoint_changes(config.endpoint, before, after):
            self._log.add(replace(change, needs=self._describe_access(config)))
        self._states[config.endpoint] = replace(after, generation=generation)

    def confirm_rollout(self, config: EndpointConfig) -> None:
        """Record that the rollout would be confirmed."""
        what = f"confirm to {config.endpoint} that its rollout continues"
        self._record(config, ChangeKind.CONFIRMATION, what)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address from the wrapped provider; None after a recorded removal."""
        is_removed = self.has_changed(config.endpoint) and self._states[config.endpoint] is None
        return None if is_removed else self._inner.address(config)

    def list_servers(self, config: EndpointConfig) -> Sequence[EndpointServer]:
        """Return the servers, without those that were forgotten."""
        return [
            server
            for server in self._inner.list_servers(config)
            if (config.endpoint, server.name) not in self._forgotten
        ]

    def list_memory(self, config: EndpointConfig) -> Sequence[ServerMemory]:
        """Return the memory of the servers, from the wrapped provider."""
        return self._inner.list_memory(config)

    def count_by_server(
        self, config: EndpointConfig, servers: Collection[str], deployments: Collection[str]
    ) -> Sequence[GenerationCounts]:
        """Return the counts of servers, from the wrapped provider."""
        return self._inner.count_by_server(config, servers, deployments)

    def forget_server(self, config: EndpointConfig, name: str) -> None:
        """Record that the server would be forgotten."""
        self._forgotten.add((config.endpoint, name))
        self._record(config, ChangeKind.SERVER, f"stop waiting for replica {name}")

    def metrics(self, options: Mapping[str, Json] | None = None) -> MetricsSource:
        """Return the metrics source of the wrapped provider."""
        return self._inner.metrics(options)

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> Sequence[OrphanedResource]:
        """Return the resources that are not needed, except those that were deleted."""
        return [
            orphan
            for orphan in self._inner.list_orphans(config, needed)
            if (config.endpoint, orphan) not in self._deleted
        ]

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Record that the resource would be deleted."""
        self.require_changeable(config)
        self._deleted.add((config.endpoint, orphan))
        what = f"delete {orphan.kind} {orphan.name} at the provider of {config.endpoint}"
        self._record(config, ChangeKind.RESOURCE, what)

    def remove(self, config: EndpointConfig) -> None:
        """Record that the endpoint would be removed."""
        self.require_changeable(config)
        before = self.observe(config)
        for change in list_endpoint_changes(config.endpoint, before, None):
            self._log.add(replace(change, needs=self._describe_access(config)))
        self._record(config, ChangeKind.ENDPOINT, f"delete {self._inner.place(config)}")
        self._states[config.endpoint] = None

    def is_unsupervised(self, config: EndpointConfig) -> bool:
        """Return whether clients get answers although `observe` returns None.

        The result is False after a recorded change of the endpoint.
        """
        return not self.has_changed(config.endpoint) and self._inner.is_unsupervised(config)

    def explain_elsewhere(self, config: EndpointConfig) -> str:
        """Return why a rollback from here would not reach the clients, or empty."""
        return self._inner.explain_elsewhere(config)

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterable[Diagnosis]:
        """Return the diagnoses of the wrapped provider."""
        return self._inner.diagnose(endpoints)

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return what this machine lacks for the endpoint, or None."""
        return self._inner.find_missing_requirement(config)

    def _record(self, config: EndpointConfig, kind: ChangeKind, what: str) -> None:
        needs = self._describe_access(config)
        self._log.add(Change(kind=kind, subject=config.endpoint, what=what, needs=needs))

    def _describe_access(self, config: EndpointConfig) -> tuple[str, ...]:
        return (f"the right to change {self._inner.place(config)}",)


class MetricsOverlay(MetricsSource):
    """A metrics source that has no new counts after a recorded change of the endpoint.

    The counts of the real source do not include the change. After a real change, the counts of the
    new split start at zero, so no step is decided from them.

    Args:
        has_changed: function that returns whether a change of an endpoint is recorded.
        readings: the last reading by endpoint, which all sources of a dry run share.
    """

    def __init__(
        self,
        inner: MetricsSource,
        has_changed: Callable[[str], bool],
        readings: dict[str, MetricsReading],
        clock: Clock,
    ) -> None:
        self.tools, self.converters = inner.tools, inner.converters
        self.requirements = inner.requirements
        self._inner = inner
        self._has_changed = has_changed
        self._readings = readings
        self._clock = clock

    def capabilities(self) -> frozenset[str]:
        """Return what the real source can report."""
        return self._inner.capabilities()

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts; after a recorded change, the last counts before this change.

        If no counts were read before the change, the reading is empty.
        """
        name = config.endpoint
        if not self._has_changed(name):
            self._readings[name] = self._inner.read(config, deployments)
        return self._readings.get(name) or MetricsReading(at=self._clock.now())

    def latencies(
        self, config: EndpointConfig, deployment: str
    ) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return the latency histogram of a deployment from the real source, or None."""
        return self._inner.latencies(config, deployment)

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return what this machine lacks for the source, or None."""
        return self._inner.find_missing_requirement(config)


def list_endpoint_changes(
    endpoint: str, before: EndpointState | None, after: EndpointState | None
) -> Iterator[Change]:
    """Yield the changes that lead from one state of an endpoint to another."""
    old, new = _list_loaded(before), _list_loaded(after)
    for name in (name for name in new if name not in old or old[name] != new[name]):
        what = f"load {name} on {endpoint}"
        if name in old:
            what = f"load {name} on {endpoint} again, with other files or options"
        yield _describe(ChangeKind.DEPLOYMENT, endpoint, what)
    was, will = _describe_traffic(before), _describe_traffic(after)
    if was != will:
        what = f"move the traffic of {endpoint}"
        yield replace(_describe(ChangeKind.TRAFFIC, endpoint, what), before=was, after=will)
    for name in (name for name in old if name not in new):
        yield _describe(ChangeKind.DEPLOYMENT, endpoint, f"unload {name} from {endpoint}")
    if before is not None and after is not None and before.drift and not after.drift:
        what = f"restore the options of {endpoint}"
        changed = _describe(ChangeKind.OPTIONS, endpoint, what)
        yield replace(changed, before="; ".join(before.drift), after="as in the pipeline file")


def _describe(kind: ChangeKind, endpoint: str, what: str) -> Change:
    return Change(kind=kind, subject=endpoint, what=what)


def _list_loaded(state: EndpointState | None) -> dict[str, object]:
    """Return what each loaded deployment runs, by name."""
    if state is None:
        return {}
    return {
        d.name: (d.manifest, d.batchable, d.threads, d.custom_ops, d.execution)
        for d in state.deployments
    }


def _describe_traffic(state: EndpointState | None) -> str:
    if state is None:
        return NOTHING
    split = state.split
    texts = [f"{name} {weight} %" for name, weight in sorted(split.weights.items()) if weight]
    texts += [f"copies to {name} {percent} %" for name, percent in split.shadow.items() if percent]
    if split.epoch_s:
        texts.append(f"epochs of {split.epoch_s:g} s")
    return ", ".join(texts)
