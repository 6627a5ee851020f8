"""Endpoints on Amazon SageMaker, through boto3.

With `traffic: table`, the endpoint has one variant, whose instances follow a table. With `traffic:
native` and strategy `ab`, each deployment has a variant, and a rollback to one of the variants
changes only weights. With strategy `guarded`, the endpoint has one variant. SageMaker replaces the
instances of this variant. It reverts the update if an alarm of the option `alarms` is raised. A
rollback is then an update to the config of the previous version, without alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import plugins
from onnx_ops.adapters.aws import (
    AwsAccess,
    Clients,
    build_variant_name,
    find_missing_credentials,
    make_clients,
    read_access,
)
from onnx_ops.adapters.endpoints.cloud import (
    CloudEndpoints,
    preview_cloud_rollback,
    verify_files,
)
from onnx_ops.adapters.endpoints.fleets import FleetEndpoints, TrafficModes
from onnx_ops.adapters.endpoints.sagemaker_client import (
    IN_PROGRESS,
    NOT_FOUND,
    EndpointClaim,
    GenerationFence,
    SageMakerClient,
)
from onnx_ops.adapters.endpoints.sagemaker_diagnosis import diagnose
from onnx_ops.adapters.endpoints.sagemaker_layout import (
    EndpointLayout,
    build_layout,
    build_name_stem,
    find_config_drift,
    has_weights,
    list_variants,
    read_deployment,
    read_state,
)
from onnx_ops.adapters.endpoints.sagemaker_options import read_sagemaker_options
from onnx_ops.adapters.endpoints.sagemaker_resources import PART_BYTES, EndpointResources
from onnx_ops.adapters.endpoints.sagemaker_scaling import VariantScaling
from onnx_ops.adapters.endpoints.sagemaker_update import EndpointUpdate
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
from onnx_ops.errors import InfrastructureError, OnnxOpsError, UserError

_ANSWERING = frozenset({"InService", "Updating", "SystemUpdating", "RollingBack"})


class SageMakerEndpoints(TrafficModes):
    """Endpoints of an AWS account, with `SageMakerOptions`.

    Nothing is stored in `folder`.
    """

    tools = plugins.EXTRAS["aws"]

    def __init__(
        self,
        folder: Path | None = None,
        trusted: Path | None = None,
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        native = SageMakerVariants(trusted, part_bytes=part_bytes)
        super().__init__(
            FleetEndpoints(native, _read_locations, _read_store_options, trusted), native
        )


def _read_locations(config: EndpointConfig) -> ReplicaOptions:
    options = read_sagemaker_options(config.options, where=config.endpoint)
    return options.locate(config.endpoint)


def _read_store_options(config: EndpointConfig) -> Mapping[str, Any]:
    """Return the options of s3fs for the account and region of an endpoint."""
    access = read_access(config.options)
    region = {"client_kwargs": {"region_name": access.region}} if access.region else {}
    return {**region, **({"profile": access.profile} if access.profile else {})}


class SageMakerVariants(CloudEndpoints):
    """Endpoints whose deployments are variants, and the fleets of `traffic: table`."""

    metrics_plugin = "cloudwatch"

    def __init__(self, trusted: Path | None = None, *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(trusted)
        self._part_bytes = part_bytes
        self._clients: dict[AwsAccess, Clients] = {}

    def capabilities(self, options: Mapping[str, Json] | None = None) -> frozenset[str]:
        """Return `guarded` or `split`, depending on the strategy, and `quantiles`."""
        guarded = (options or {}).get("strategy") == "guarded"
        return frozenset({"guarded" if guarded else "split", "quantiles"})

    def validate_options(self, options: Mapping[str, Json]) -> None:
        """Raise UserError if the options of an endpoint are not valid."""
        read_sagemaker_options(options)

    def read_machine(self, config: EndpointConfig) -> str:
        """Return the instance type, or the memory of a serverless endpoint."""
        options = read_sagemaker_options(config.options, where=config.endpoint)
        memory = f"serverless with {options.memory_mib} MiB"
        return memory if options.serverless else options.instance_type

    def place(self, config: EndpointConfig) -> str:
        """Return the endpoint's name, region, profile and location in S3.

        Raises:
            UserError: the options are not valid, or the region is missing.
            MissingPackageError: boto3 is not installed.
        """
        client = self._connect(config)
        profile = f" of profile {client.options.profile}" if client.options.profile else ""
        region = client.clients("sagemaker").meta.region_name
        stored = f"s3://{client.options.bucket}/{client.folder}"
        return f"SageMaker's endpoint {config.endpoint} in {region}{profile}, with {stored}"

    def find_missing_requirement(self, config: EndpointConfig) -> OnnxOpsError | None:
        """Return an error if profile, region or credentials are missing; send no request."""
        return find_missing_credentials(read_access(config.options), where=config.endpoint)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """Return the endpoint's state; during an update, the state before the update.

        The result is None without an endpoint of onnx-ops that can answer, or if a request to AWS
        fails with an InfrastructureError. A claim is the object in the bucket that records the
        endpoint's latest generation and its state. Two requests are sufficient for an idle endpoint
        without autoscaling that matches its claim and has the instances of the options. They read
        its description and the claim. The config's name contains a digest of the variants and
        options, without tags, so a matching name shows that these are unchanged.
        """
        client = self._connect(config)
        try:
            description = client.describe()
            if description is None or description["EndpointStatus"] not in _ANSWERING:
                return None
            claim = GenerationFence(client).read()
            is_idle = description["EndpointStatus"] == "InService"
            if is_idle and claim is not None and self._shows(client, description, claim):
                return replace(claim.state, drift=_list_scaling_drift(client, description, claim))
            if not client.is_ours(description):
                return None
            state = _read_state(client, description, claim)
            if state is None or not is_idle:
                return state if state is None else _with_replacement(client, state, description)
            drift = (
                *self._config_drift(client, description, state),
                *_list_scaling_drift(client, description, claim),
            )
            return replace(state, drift=drift)
        except InfrastructureError:
            return None

    def _shows(
        self, client: SageMakerClient, description: Mapping[str, Any], claim: EndpointClaim
    ) -> bool:
        """Return whether an endpoint in service has the claimed config and weights.

        The result is False if the present options cannot give an endpoint the claimed state.
        """
        try:
            layout = self._layout(client, claim.state)
        except UserError:
            return False
        return layout.has_config(description["EndpointConfigName"]) and has_weights(
            description, layout.weights
        )

    def require_changeable(self, config: EndpointConfig) -> None:
        """Raise an error if SageMaker cannot serve the request, or denies access."""
        self._connect(config).describe()

    def preview(
        self,
        config: EndpointConfig,
        state: EndpointState,
        current: EndpointState | None,
        *,
        is_rollback: bool = False,
    ) -> EndpointState:
        """Return the state after a change.

        An error is raised if the state cannot be built with the options. The same applies if files
        that S3 does not store yet are missing, or were changed.
        """
        client = self._connect(config)
        after = state
        if is_rollback:
            is_guarded = client.options.guarded
            after = preview_cloud_rollback(None if is_guarded else current, state)
        self._layout(client, after)
        resources = EndpointResources(client, part_bytes=self._part_bytes)
        for deployment in () if client.options.is_table else after.deployments:
            is_served = current is not None and current.find_deployment(deployment) is not None
            if not is_served and not resources.has_archive(deployment):
                verify_files(deployment)
        return after

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Upload archives, create models and a config, and update the endpoint to it.

        If only weights differ from the last state, only the weights are changed.

        Raises:
            AlarmRollbackError: an alarm reverted the update to the state, now or in an earlier
                attempt.
            ConflictError: a later generation is claimed, or this generation for another state.
            UserError: the state cannot be built with the options, or an alarm or files are missing.
            RefusedError: another client created the endpoint, AWS denied access, or files do not
                match their manifest.
            InfrastructureError: SageMaker refused or reverted the update, or did not finish it in
                time.
        """
        client, state = self._connect(config), replace(state, generation=generation)
        layout, fence = self._layout(client, state), GenerationFence(client)
        before = fence.read()
        fence.take(state)
        if before is not None and _is_weight_step(client, before, state, layout):
            update = EndpointUpdate(client, fence, generation)
            if update.shift(layout.weights, is_known=True, layout=layout):
                return
        self._reach(client, fence, state, layout)

    def _reach(
        self,
        client: SageMakerClient,
        fence: GenerationFence,
        state: EndpointState,
        layout: EndpointLayout,
        *,
        is_rollback: bool = False,
    ) -> None:
        """Bring the endpoint to a claimed state, whatever its status is."""
        resources = EndpointResources(client, part_bytes=self._part_bytes)

        def prepare() -> None:
            if not client.options.is_table:
                for deployment in state.deployments:
                    resources.ensure_archive(deployment)
            resources.ensure_definitions(layout)

        update = EndpointUpdate(client, fence, state.generation, is_rollback=is_rollback)
        update.move(layout, prepare)
        VariantScaling(client).apply(layout)
        fence.settle(state.generation, reached=layout.config_name)
        if client.options.guarded:
            fence.end_update(layout.config_name)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Change only weights if the leader is a variant; otherwise deploy it alone.

        With guarded updates, the endpoint has one variant, so the leader is always deployed alone.
        If the claim shows that the endpoint has the leader's variant and other weights, the weights
        are requested before the endpoint is described.
        """
        client = self._connect(config)
        fence, state = GenerationFence(client), replace(state, generation=generation)
        claim = fence.read()
        if (
            claim is None
            or claim.state.find_deployment(state.leader()) is None
            or client.options.guarded
        ):
            self._deploy_alone(client, fence, state)
            return
        goal = build_rollback_state(claim.state, state)
        is_due = not (claim.settled and claim.state.is_equivalent(goal))
        fence.take(goal)
        update = EndpointUpdate(client, fence, generation)
        weights = {build_variant_name(n): float(w) for n, w in goal.split.weights.items()}
        if update.shift(weights, is_known=bool(claim.reached), is_due=is_due):
            fence.settle(generation)
        else:
            self._deploy_alone(client, fence, goal)

    def _deploy_alone(
        self, client: SageMakerClient, fence: GenerationFence, state: EndpointState
    ) -> None:
        """Deploy the goal of a rollback without idle deployments.

        The cause of a failed start can be an idle deployment.
        """
        state = drop_idle_deployments(state)
        layout = self._layout(client, state)
        fence.take(state)
        self._reach(client, fence, state, layout, is_rollback=True)

    def address(self, config: EndpointConfig) -> str | None:
        """Return the address; requests need a signature (SigV4, service `sagemaker`).

        The result is None if an endpoint of onnx-ops is missing or being deleted, or if a request
        to AWS fails with an InfrastructureError.
        """
        client = self._connect(config)
        try:
            description = client.describe()
            if (
                description is None
                or description["EndpointStatus"] == "Deleting"
                or not client.is_ours(description)
            ):
                return None
        except InfrastructureError:
            return None
        base = str(client.clients("sagemaker-runtime").meta.endpoint_url).rstrip("/")
        return f"{base}/endpoints/{config.endpoint}"

    def remove(self, config: EndpointConfig) -> None:
        """Delete the endpoint, its configs, models, archives and claim.

        The endpoint is deleted only if onnx-ops created it.
        """
        client = self._connect(config)
        build_name_stem(config.endpoint)

        def step() -> bool | None:
            description = client.describe()
            if description is None or not client.is_ours(description):
                return True
            if description["EndpointStatus"] != "Deleting":
                VariantScaling(client).remove(description)
                ignored = (*IN_PROGRESS, *NOT_FOUND)
                client.call(
                    "sagemaker",
                    "delete_endpoint",
                    ignored_messages=ignored,
                    EndpointName=config.endpoint,
                )
            return None

        client.converge(step, "the endpoint was not deleted in time")
        EndpointResources(client).delete_all()
        GenerationFence(client).delete()

    def count_instances(self, config: EndpointConfig) -> int | None:
        """Return how many instances serve now; None if this is 0 or unknown."""
        try:
            description = self._connect(config).describe() or {}
        except InfrastructureError:
            return None
        variants = description.get("ProductionVariants", ())
        return sum(int(one.get("CurrentInstanceCount", 0)) for one in variants) or None

    def list_orphans(
        self, config: EndpointConfig, needed: frozenset[Digest]
    ) -> tuple[OrphanedResource, ...]:
        """List unused configs, models, archives and unfinished uploads."""
        return tuple(EndpointResources(self._connect(config)).orphans(needed))

    def delete_orphan(self, config: EndpointConfig, orphan: OrphanedResource) -> None:
        """Delete an orphan; raise ConflictError if the endpoint uses it again."""
        EndpointResources(self._connect(config)).delete_orphan(orphan)

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Json]]) -> Iterator[Diagnosis]:
        """Check package, credentials, role, bucket, image, permissions, alarms and quota."""
        if not endpoints:
            yield from diagnose({})
        for name, options in endpoints.items():
            prefix = f"{name}: " if len(endpoints) > 1 else ""
            yield from (
                replace(finding, check=f"{prefix}{finding.check}") for finding in diagnose(options)
            )

    def _config_drift(
        self, client: SageMakerClient, description: Mapping[str, Any], state: EndpointState
    ) -> tuple[str, ...]:
        """Return how the endpoint's config differs from the config of these options.

        The result is empty if these options cannot produce the state.
        """
        try:
            layout = self._layout(client, state)
        except UserError:
            return ()
        if layout.has_config(description["EndpointConfigName"]):
            return ()
        config = client.describe_config(description["EndpointConfigName"])
        models = {
            name: client.describe_model(name)
            for name in {v["ModelName"] for v in list_variants(config)}
        }
        return tuple(find_config_drift(config, models, layout))

    def _layout(self, client: SageMakerClient, state: EndpointState) -> EndpointLayout:
        return build_layout(
            client.endpoint, state, client.options, trusted_keys=self._trusted_keys()
        )

    def _connect(self, config: EndpointConfig) -> SageMakerClient:
        options = read_sagemaker_options(config.options, where=config.endpoint)
        access = read_access(config.options)
        if access not in self._clients:
            self._clients[access] = make_clients(access, where=config.endpoint)
        return SageMakerClient(self._clients[access], config.endpoint, options)


def _with_replacement(
    client: SageMakerClient, state: EndpointState, description: Mapping[str, Any]
) -> EndpointState:
    """Return the state of an endpoint that SageMaker is changing.

    With `traffic: table`, the update changes only instances, so `replacements` contains it.
    """
    if not client.options.is_table:
        return state
    status = description["EndpointStatus"]
    return replace(state, replacements=(f"SageMaker's endpoint has the status {status}",))


def _is_weight_step(
    client: SageMakerClient, before: EndpointClaim, state: EndpointState, layout: EndpointLayout
) -> bool:
    """Return whether a claimed state differs from the reached config only in weights.

    If a state is applied again, its weights are already in effect, and only differences from the
    options are corrected.
    """
    return (
        not client.options.guarded
        and layout.has_config(before.reached)
        and before.scaled == client.options.scaled
        and not before.state.is_equivalent(state)
    )


def _list_scaling_drift(
    client: SageMakerClient, description: Mapping[str, Any], claim: EndpointClaim | None
) -> tuple[str, ...]:
    was_scaled = claim is None or claim.scaled
    return tuple(VariantScaling(client).drift(description, was_scaled=was_scaled))


def _read_state(
    client: SageMakerClient, description: Mapping[str, Any], claim: EndpointClaim | None
) -> EndpointState | None:
    config = client.describe_config(description["EndpointConfigName"])
    variants = {
        variant["VariantName"]: read_deployment(client.describe_model(variant["ModelName"]))
        for variant in config["ProductionVariants"]
    }
    weights = {
        v["VariantName"]: float(v.get("CurrentWeight", 0.0))
        for v in description.get("ProductionVariants", ())
    }
    return read_state(variants, weights, 0 if claim is None else claim.state.generation)
