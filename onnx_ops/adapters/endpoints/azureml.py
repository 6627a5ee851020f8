"""Managed online endpoints of Azure Machine Learning."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import plugins
from onnx_ops.adapters.azure import find_missing_credentials, read_endpoint_name
from onnx_ops.adapters.endpoints.azureml_client import AzureClient, RetryPolicy
from onnx_ops.adapters.endpoints.azureml_deployments import SCORING_ROUTE
from onnx_ops.adapters.endpoints.azureml_diagnosis import diagnose
from onnx_ops.adapters.endpoints.azureml_options import read_azure_options
from onnx_ops.adapters.endpoints.azureml_plan import (
    OWNER,
    build_azure_name,
    plan_traffic,
    read_deployment_names,
    read_record,
    read_state,
)
from onnx_ops.adapters.endpoints.azureml_resources import OnlineDeployment
from onnx_ops.adapters.endpoints.azureml_update import AzureEndpoint, SentGeneration
from onnx_ops.adapters.endpoints.cloud import (
    CloudEndpoints,
    preview_cloud_rollback,
    verify_files,
)
from onnx_ops.adapters.endpoints.fleets import FleetEndpoints, TrafficModes
from onnx_ops.adapters.endpoints.table_options import ReplicaOptions
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import (
    EndpointConfig,
    EndpointState,
    OrphanedResource,
    build_rollback_state,
    drop_idle_deployments,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, UserError

_UPDATING = frozenset({"updating", "scaling"})
"""Provisioning states of a deployment that answers while its instances change."""
_BLOB_SCHEMES = frozenset({"abfs", "abfss", "az"})


class AzureEndpoints(TrafficModes):
    """Endpoints of an Azure ML workspace, with `AzureOptions`.

    `folder/<endpoint>/` contains a lock and the last generation that this machine sent.
    """

    tools = plugins.EXTRAS["azure"]

    def __init__(
        self, folder: Path, trusted: Path | None = None, *, policy: RetryPolicy | None = None
    ) -> None:
        native = AzureDeploymentEndpoints(folder, trusted, policy=policy)
        super().__init__(
            FleetEndpoints(native, _read_locations, _read_store_options, trusted), native
        )


def _read_locations(config: EndpointConfig) -> ReplicaOptions:
    return read_azure_options(config.options, where=config.endpoint).locate()


def _read_store_options(config: EndpointConfig) -> Mapping[str, Any]:
    """Return the options of adlfs; empty if `control` is not a location in Azure.

    With `anon` false, adlfs uses credentials whatever the variable AZURE_STORAGE_ANON contains.
    """
    is_blob = str(config.options.get("control", "")).partition("://")[0] in _BLOB_SCHEMES
    return {"anon": False} if is_blob else {}


class AzureDeploymentEndpoints(CloudEndpoints):
    """Endpoints whose versions are deployments, and the fleets of `traffic: table`."""

    metrics_plugin = "azuremonitor"

    def __init__(
        self, folder: Path, trusted: Path | None = None, *, policy: RetryPolicy | None = None
    ) -> None:
        super().__init__(trusted)
        self._folder = folder
        self._policy = policy or RetryPolicy()

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return `split`, and the capabilities of Azure Monitor as a metrics source."""
        return frozenset({"split"}) | self.metrics().capabilities()

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        read_azure_options(options)

    def read_machine(self, config: EndpointConfig) -> str:
        """Return the instance type."""
        return read_azure_options(config.options, where=config.endpoint).instance_type

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's name and workspace; raise UserError for wrong options."""
        workspace = read_azure_options(config.options, where=config.endpoint).place
        name = read_endpoint_name(config.endpoint, config.options)
        return f"Azure's endpoint {name} in {workspace.path.removeprefix('/')}"

    def validate_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Refuse a change of authentication or identity, which Azure does not support."""
        old, new = (
            read_azure_options(config.options, where=config.endpoint) for config in (before, after)
        )
        for name in ("auth", "identity"):
            if (was := getattr(old, name)) != (desired := getattr(new, name)):
                raise UserError(
                    f"{name} of an existing endpoint cannot be changed from {was or 'none'} to "
                    f"{desired or 'none'}",
                    where=after.endpoint,
                    remedy=f"Restore `{name}`, or delete the endpoint with "
                    f"`onnx-ops delete {after.endpoint}` and run again.",
                )

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterator[Diagnosis]:
        """Check packages, credentials, workspace, role, image, pull access and quota."""
        return diagnose(tuple(endpoints.values()))

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if credentials are missing; send no request to Azure."""
        return find_missing_credentials(where=config.endpoint)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the endpoint's state; None without a valid state or an answer of Azure."""
        try:
            return self._observe(config)[0]
        except ServiceUnavailableError:
            return None

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if the read fails, or if another project is the owner."""
        self._connect(config).read()

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change.

        An error is raised if Azure does not support the state. The same applies if files that Azure
        does not store yet are missing, or were changed.
        """
        after = preview_cloud_rollback(current, state) if is_rollback else state
        endpoint = self._connect(config)
        plan_traffic(after, generation=0, name=endpoint.deployments.name, where=config.endpoint)
        new = [
            deployment
            for deployment in after.deployments
            if current is None or current.find_deployment(deployment) is None
        ]
        stored = endpoint.models.stored() if new else {}
        for deployment in new:
            if build_azure_name(deployment) not in stored:
                verify_files(deployment)
        return after

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Bring the endpoint to a state, and delete deployments that it does not need."""
        endpoint = self._connect(config)
        name = endpoint.deployments.name
        endpoint.apply(plan_traffic(state, generation=generation, name=name, where=config.endpoint))

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Change only the traffic if the state's leader runs; otherwise call `apply`.

        In the simple case, the second request to Azure Resource Manager changes the traffic. This
        needs a settled endpoint whose applied state contains the leader with the present options.
        """
        if self._connect(config).restore(state, generation):
            return
        try:
            observed, names = self._observe(config)
        except ServiceUnavailableError:
            observed, names = None, {}
        if observed is not None and observed.find_deployment(state.leader()) is not None:
            goal = build_rollback_state(observed, state)
            plan = plan_traffic(
                goal, generation=generation, name=lambda d: names[d.name], where=config.endpoint
            )
            self._connect(config).route(replace(plan, since=state.generation))
            return
        self.apply(config, drop_idle_deployments(state), generation=generation)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the scoring address without its route; requests need a key or a token.

        The result is None if the endpoint does not exist.
        """
        endpoint = self._connect(config).read()
        return None if endpoint is None else endpoint.scoring_uri.removesuffix(SCORING_ROUTE)

    def remove(self, config: EndpointConfig) -> None:
        """Delete the endpoint, its deployments and the files of their models."""
        self._connect(config).remove()

    def count_instances(self, config: EndpointConfig) -> int | None:
        """Return how many instances serve now; None if this is 0 or unknown."""
        endpoint = self._connect(config)
        try:
            resource = endpoint.read()
            traffic = {} if resource is None else resource.traffic
            deployments = endpoint.client.deployments().values() if traffic else ()
        except ServiceUnavailableError:
            return None
        return sum(one.instance_count for one in deployments if traffic.get(one.name)) or None

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> tuple[OrphanedResource, ...]:
        """List unused deployments without traffic, and unused models."""
        endpoint = self._connect(config)
        _, names = self._observe(config)
        resource = endpoint.read()
        used = {*names.values(), *({} if resource is None else resource.traffic)}
        own_tags = {
            name: deployment.tags
            for name, deployment in endpoint.client.deployments().items()
            if deployment.tags.get(OWNER) == config.endpoint
        }
        # A needed version is expected under the name that follows from the present options. So an
        # idle deployment with former options is unused.
        expected = {
            endpoint.deployments.name(record)
            for tags in own_tags.values()
            if (record := read_record(tags)) is not None and record.manifest in needed
        }
        deployments = _find_unused_deployments(own_tags, used | expected)
        models = _find_unused_models(endpoint.models.stored(), own_tags, needed)
        return (*deployments, *models)

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Delete an orphan; raise ConflictError if a deployment has traffic again."""
        endpoint = self._connect(config)
        (endpoint.deployments if orphan.kind == "deployment" else endpoint.models).delete(
            orphan.name
        )

    def _observe(self, config: EndpointConfig) -> tuple[EndpointState | None, Mapping[str, str]]:
        """Return the endpoint's state, and the names of its deployments in Azure.

        The keys of the mapping are the names of the deployments in onnx-ops. The state is None if
        the endpoint or its valid state is missing, or if Azure mirrors its traffic.
        """
        endpoint = self._connect(config)
        resource = endpoint.read()
        if resource is None or resource.mirror_traffic:
            return None, {}
        deployments = endpoint.client.deployments()
        is_table = endpoint.client.options.is_table
        records = {
            name: record
            for name, deployment in deployments.items()
            # While Azure adds or removes instances of a fleet, its other instances answer requests.
            if (deployment.has_succeeded or (is_table and deployment.state in _UPDATING))
            and (record := read_record(deployment.tags)) is not None
        }
        state = read_state(resource.tags, resource.traffic, records)
        if state is None:
            return None, {}
        names = {records[name].name: name for name in read_deployment_names(resource.tags)}
        drift = [
            endpoint.deployments.drift(deployments[names[d.name]], d) for d in state.deployments
        ]
        replacements = _list_replacements(config, deployments) if is_table else ()
        return (
            replace(
                state,
                drift=tuple(itertools.chain(*drift)),
                replacements=tuple(replacements),
            ),
            names,
        )

    def _connect(self, config: EndpointConfig) -> AzureEndpoint:
        options = replace(
            read_azure_options(config.options, where=config.endpoint),
            trusted_keys=self._trusted_keys(),
            endpoint=config.endpoint,
        )
        plugins.require(*plugins.EXTRAS["azure"], where=config.endpoint)
        name = read_endpoint_name(config.endpoint, config.options)
        client = AzureClient(options, name, config.endpoint, self._policy)
        return AzureEndpoint(client, SentGeneration(self._folder / config.endpoint))


def _list_replacements(
    config: EndpointConfig, deployments: Mapping[str, OnlineDeployment]
) -> Iterator[str]:
    """Yield a message for each deployment of a fleet that Azure is changing."""
    for name, deployment in sorted(deployments.items()):
        if deployment.tags.get(OWNER) == config.endpoint and not deployment.is_settled:
            yield f"Azure's deployment {name} has the provisioning state {deployment.state}"


def _find_unused_deployments(names: Iterable[str], used: Set[str]) -> Iterator[OrphanedResource]:
    """Yield each of onnx-ops' deployments that is not in `used`."""
    for name in sorted(names):
        if name not in used:
            why = "it has no traffic, and the endpoint's state lacks it"
            yield OrphanedResource(kind="deployment", name=name, why=why, paid=True)


def _find_unused_models(
    manifests: Mapping[str, str], own_tags: Mapping[str, Mapping[str, str]], needed: Set[Digest]
) -> Iterator[OrphanedResource]:
    """Yield the stored models that neither a deployment serves nor `needed` lists.

    `manifests` are the manifest digests of stored models by name; empty for incomplete folders.
    `own_tags` are the tags of the deployments that onnx-ops created, by name.
    """
    served = {
        build_azure_name(record)
        for record in map(read_record, own_tags.values())
        if record is not None
    }
    for name, manifest in manifests.items():
        if manifest not in needed and name not in served:
            why = (
                "no deployment serves it" if manifest else "its upload or deletion was interrupted"
            )
            yield OrphanedResource(kind="model", name=name, why=why, paid=True)
