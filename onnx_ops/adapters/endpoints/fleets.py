"""Cloud endpoints whose instances follow signed routing tables, as replicas do.

The cloud runs a *fleet*: one deployment of our image without a model. A rollout changes only
objects in storage. The cloud's control plane is only needed to create, observe, change and delete
the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.adapters.endpoints.cloud import CloudEndpoints
from onnx_ops.adapters.endpoints.replicas import (
    ADOPT_S,
    ReplicaEndpoints,
    SeenReplica,
    StorePlace,
)
from onnx_ops.adapters.endpoints.table_options import ReplicaOptions
from onnx_ops.domain.artifact import Digest, digest_bytes, digest_json
from onnx_ops.domain.endpoint import (
    Deployment,
    EndpointConfig,
    EndpointServer,
    EndpointState,
    OrphanedResource,
    ServerMemory,
    TrafficSplit,
    drop_idle_deployments,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import GenerationCounts
from onnx_ops.domain.target import Diagnosis, Target
from onnx_ops.errors import AlarmRollbackError, InfrastructureError, OnnxOpsError, UserError
from onnx_ops.ports import EndpointProvider, MetricsSource, Signer
from onnx_ops.protocol.replica_tables import ReplicaTable, TableNumber

FLEET = "main"
"""Name of the one deployment of a fleet."""


def build_fleet_state(config: EndpointConfig, options: ReplicaOptions) -> EndpointState:
    """Return the state of a fleet for the cloud's own provider.

    The state has one deployment without a model. Its manifest digest is that of the locations, so
    other locations need another fleet.
    """
    fleet = Deployment(
        name=FLEET,
        model=config.endpoint,
        version="1",
        variant="",
        release=digest_bytes(b""),
        manifest=digest_json([options.control, options.reports]),
    )
    return EndpointState(deployments=(fleet,), split=TrafficSplit(weights={FLEET: 100}))


class FleetEndpoints(ReplicaEndpoints):
    """Provider for endpoints with `traffic: table` in a cloud.

    Args:
        machines: the cloud's own provider, which runs the fleet as a deployment.
        read: returns the locations and the least number of instances of an endpoint.
        read_store_options: returns the options of the object store's client.
        trusted: folder of the trusted public keys.
    """

    def __init__(
        self,
        machines: CloudEndpoints,
        read: Callable[[EndpointConfig], ReplicaOptions],
        read_store_options: Callable[[EndpointConfig], Mapping[str, Any]],
        trusted: Path | None = None,
    ) -> None:
        super().__init__(trusted=trusted)
        self._machines = machines
        self._read = read
        self._read_store_options = read_store_options

    def read_options(self, config: EndpointConfig) -> ReplicaOptions:
        """Return the locations, and how many instances should run at least."""
        return self._read(config)

    def read_store_options(self, config: EndpointConfig) -> Mapping[str, Any]:
        """Return the options with which the client of the object store is created."""
        return self._read_store_options(config)

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return the capabilities of replicas, and `fleet`.

        `fleet` means that instances are changed separately from the traffic.
        """
        return super().capabilities(options) | {"fleet"}

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        self._machines.validate_options(options)

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Refuse other locations, and what the cloud's own provider refuses.

        Tables and models would stay at the former locations.
        """
        old, new = self.read_options(before), self.read_options(after)
        for name in ("control", "reports"):
            if (was := getattr(old, name)) != (desired := getattr(new, name)):
                raise UserError(
                    f"{name} of an existing endpoint cannot be changed from {was} to {desired}",
                    where=after.endpoint,
                    remedy="Change the option back, or delete the endpoint with "
                    f"`onnx-ops delete {after.endpoint}` and run again.",
                )
        self._machines.validate_change(before, after)

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's location in the cloud, as messages show it."""
        return self._machines.place(config)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address of the cloud's endpoint; None if it does not exist."""
        return self._machines.address(config)

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if credentials are missing; send no request to the cloud."""
        return self._machines.find_missing_requirement(config)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the state of the newest table, and the fleet's drift from its options.

        The result is None if the fleet or a valid table is missing, or the fleet does not serve.
        """
        fleet = self._machines.observe(config)
        state = None if fleet is None else super().observe(config)
        if fleet is None or state is None:
            return None
        return replace(
            state,
            drift=(*state.drift, *self._list_drift(config, fleet)),
            replacements=fleet.replacements,
        )

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the fleet could not be changed now."""
        self._machines.require_changeable(config)

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish a state; if it moves no traffic, restore the fleet too.

        A step needs no control plane, which could be busy or down. `observe` shows how the fleet
        differs from its options. Applying the same traffic again restores the options. New
        instances are in service only after they have adopted a table. Therefore the table comes
        first if the fleet does not serve.
        """
        seen = self._look(config)
        if _moves_traffic(seen, state):
            self._publish_seen(config, seen, state, generation)
        else:
            self._restore(config, state, generation)
        self._wait_until_adopted(config, TableNumber(generation), ADOPT_S)

    def _restore(self, config: EndpointConfig, state: EndpointState, generation: int) -> None:
        """Create the fleet or change its options where needed, and publish the state."""
        fleet = self._machines.observe(config)
        if fleet is None:
            self._publish_once(config, state, generation)
            self._change_fleet(config, generation)
        else:
            if any(self._list_drift(config, fleet)):
                self._change_fleet(config, generation)
            self._publish_once(config, state, generation)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Publish the table of a rollback, and create the fleet if none serves.

        A later observation shows the rollback only if a fleet serves. The cloud gets a request only
        if no instance reports.
        """
        super().roll_back(config, state, generation=generation)
        if any(one.is_live for one in self.list_replicas(config)):
            return
        if self._machines.observe(config) is None:
            self._change_fleet(config, generation)

    def count_expected(self, config: EndpointConfig, replicas: Sequence[SeenReplica]) -> int:
        """Return how many instances must report: at most those that the cloud runs.

        If the number of running instances is unknown, the option applies. A changed number of
        instances is not applied during a rollout. A rollback must not wait for instances that the
        cloud starts only after the rollback.
        """
        expected = super().count_expected(config, replicas)
        if sum(one.is_live for one in replicas) >= expected:
            return expected
        running = self._machines.count_instances(config)
        return expected if running is None else min(running, expected)

    def _list_drift(self, config: EndpointConfig, fleet: EndpointState) -> Iterator[str]:
        options = self.read_options(config)
        if not fleet.is_equivalent(build_fleet_state(config, options)):
            yield (
                "the cloud does not run exactly one deployment with the options "
                f"`control: {options.control}` and `reports: {options.reports}`"
            )
        yield from fleet.drift

    def _change_fleet(self, config: EndpointConfig, generation: int) -> None:
        """Create the fleet, or change it to its options.

        Raises:
            InfrastructureError: an alarm reverted the change. No release is rejected, since the
                change concerns only the instances.
        """
        fleet = build_fleet_state(config, self.read_options(config))
        try:
            self._machines.apply(config, fleet, generation=generation)
        except AlarmRollbackError as error:
            raise InfrastructureError(
                error.what,
                where=error.where,
                why=error.why,
                remedy="Change the options, such as `image`: this change is not retried.",
            ) from error

    def _wait_until_loaded(
        self, config: EndpointConfig, table: ReplicaTable, expected: int
    ) -> None:
        """Wait until every registered instance has loaded a table.

        Without an instance that reports, the function returns immediately: new instances read the
        newest table before they are in service.
        """
        if any(one.is_live for one in self.list_replicas(config)):
            super()._wait_until_loaded(config, table, expected)

    def remove(self, config: EndpointConfig) -> None:
        """Delete the fleet, and then tables, models and reports."""
        self._machines.remove(config)
        super().remove(config)

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> tuple[OrphanedResource, ...]:
        """Return the cloud's resources that the endpoint does not need any more."""
        return tuple(self._machines.list_orphans(config, needed))

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Delete an orphan; raise ConflictError if the endpoint uses it again."""
        self._machines.delete_orphan(config, orphan)


def _moves_traffic(seen: StorePlace, state: EndpointState) -> bool:
    """Return whether a state changes the traffic that the newest table specifies.

    The result is False without a table, or if the store lost a table.
    """
    if seen.newest is None or seen.went_back:
        return False
    newest = drop_idle_deployments(seen.newest.table.state)
    return not newest.is_equivalent(drop_idle_deployments(state))


class TrafficModes(EndpointProvider):
    """Provider whose option `traffic` selects how an endpoint's traffic is routed.

    With `table`, the default, the instances follow a table in object storage. With `native`, the
    cloud routes by its own weights.
    """

    def __init__(self, table: EndpointProvider, native: CloudEndpoints) -> None:
        self._table = table
        self.native = native

    def _select(self, options: Mapping[str, Json] | None) -> EndpointProvider:
        return self.native if (options or {}).get("traffic") == "native" else self._table

    def sign_with(self, signer: Callable[[], Signer | None]) -> None:
        """Give both providers the function that returns the signer of tables."""
        self._table.sign_with(signer)
        self.native.sign_with(signer)

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return the capabilities of an endpoint with these options."""
        return self._select(options).capabilities(options)

    def metrics(self, options: Mapping[str, Json] | None = None) -> MetricsSource:
        """Return the metrics source of the instances, or that of the cloud."""
        return self._select(options).metrics(options)

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        self._select(options).validate_options(options)

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Refuse a change of `traffic`, and what the selected provider refuses.

        A change of the machine type is also refused if the target stays the same. The decisions of
        a target are valid only for the hardware on which they were measured.
        """
        provider = self._select(after.options)
        if self._select(before.options) is not provider:
            was, desired = ("native", "table") if provider is self._table else ("table", "native")
            raise UserError(
                f"traffic of an existing endpoint cannot be changed from {was} to {desired}",
                where=after.endpoint,
                remedy=f"Set `traffic: {was}`, or delete the endpoint with `onnx-ops delete "
                f"{after.endpoint}` and run again.",
            )
        provider.validate_change(before, after)
        was, desired = self.native.read_machine(before), self.native.read_machine(after)
        if was != desired and before.target_digest == after.target_digest:
            target = after.target
            raise UserError(
                f"no decision of target {target} was measured for {desired}",
                where=after.endpoint,
                why=f"the machine changes from {was} to {desired}, and the target has not changed: "
                f"its decisions were measured for {was}",
                remedy=f"Describe the new machine in `requires` of the file of target {target}, "
                "which `onnx-ops targets` shows. First copy a shipped profile to the project's "
                "folder of targets. Then measure the target on such a machine with `onnx-ops run`.",
            )

    def explain_unservable(self, target: Target) -> str:
        """Return why the image cannot run models of the target; empty if it can."""
        return self.native.explain_unservable(target)

    def explain_uncounted(self, source: str, options: Mapping[str, Json]) -> str:
        """Return why `source` cannot count the versions of a table; empty if it can."""
        if source != self.native.metrics_plugin or self._select(options) is self.native:
            return ""
        return (
            f"source '{source}' counts no version of an endpoint with `traffic: table`, because "
            "the cloud runs one deployment for all versions; leave out 'metrics', so that the "
            "instances report their counts"
        )

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's location in the cloud, as messages show it."""
        return self.native.place(config)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the endpoint's state, and how it differs from its options.

        The result is None without an endpoint that serves and has a valid state.
        """
        return self._select(config.options).observe(config)

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the endpoint could not be changed now."""
        self._select(config.options).require_changeable(config)

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change; raise the errors that are known before it."""
        return self._select(config.options).preview(config, state, current, is_rollback=is_rollback)

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Bring the endpoint to a state, through the provider that `traffic` selects."""
        self._select(config.options).apply(config, state, generation=generation)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Give all traffic to the previous version."""
        self._select(config.options).roll_back(config, state, generation=generation)

    def confirm_rollout(self, config: EndpointConfig) -> None:
        """Record that the rollout was analyzed; do nothing with `traffic: native`."""
        self._select(config.options).confirm_rollout(config)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address of the cloud's endpoint; None if it does not exist."""
        return self.native.address(config)

    def list_servers(self, config: EndpointConfig) -> Sequence[EndpointServer]:
        """Return the instances with their last status; none with `traffic: native`."""
        return self._select(config.options).list_servers(config)

    def list_memory(self, config: EndpointConfig) -> Sequence[ServerMemory]:
        """Return the memory of the instances that report; none with `traffic: native`."""
        return self._select(config.options).list_memory(config)

    def count_by_server(
        self, config: EndpointConfig, servers: Collection[str], deployments: Collection[str]
    ) -> Sequence[GenerationCounts]:
        """Return the counts of instances; none with `traffic: native`."""
        return self._select(config.options).count_by_server(config, servers, deployments)

    def forget_server(self, config: EndpointConfig, name: str) -> None:
        """Stop waiting for reports of an instance."""
        self._select(config.options).forget_server(config, name)

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> Sequence[OrphanedResource]:
        """Return the cloud's resources that are not needed any more."""
        return self.native.list_orphans(config, needed)

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Delete an orphan.

        Raises:
            ConflictError: a resource of SageMaker is used again, or a deployment of Azure has
                traffic again.
        """
        self.native.delete_orphan(config, orphan)

    def remove(self, config: EndpointConfig) -> None:
        """Delete the endpoint, and the tables, reports and model files stored for it."""
        self._select(config.options).remove(config)

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if credentials are missing; send no request to the cloud."""
        return self.native.find_missing_requirement(config)

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterator[Diagnosis]:
        """Check the requirements of the cloud; for tables, also locations and instances."""
        yield from self.native.diagnose(endpoints)
        followers = {
            name: options
            for name, options in endpoints.items()
            if self._select(options) is self._table
        }
        if followers:
            yield from self._table.diagnose(followers)
