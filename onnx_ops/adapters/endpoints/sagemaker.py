"""Endpoints on Amazon SageMaker, as managed by boto3.

Strategy `ab`: a variant for each deployment, traffic by their weights; the way back is one change of weights.
Strategy `guarded`: one variant, which SageMaker replaces itself, watching CloudWatch's alarms; the way back is an
update to the config before. Models, configs and archives are called by their content and never changed; `apply`
deletes none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops import plugins
from onnx_ops.adapters.aws import Clients, clients, missing_credentials, says, translated, variant_of
from onnx_ops.adapters.endpoints.sagemaker_archive import PART_BYTES, Archives
from onnx_ops.adapters.endpoints.sagemaker_claims import Claims
from onnx_ops.adapters.endpoints.sagemaker_diagnosis import findings
from onnx_ops.adapters.endpoints.sagemaker_drift import config_drift, variants_in
from onnx_ops.adapters.endpoints.sagemaker_layout import Layout, archive_key, deployment_in, lay_out, stem_of
from onnx_ops.adapters.endpoints.sagemaker_leftovers import Leftovers
from onnx_ops.adapters.endpoints.sagemaker_scaling import Scaling
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings, settings_of
from onnx_ops.adapters.endpoints.sagemaker_update import Mover, describe, has_weights, is_ours
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import (
    Deployment,
    EndpointConfig,
    EndpointState,
    Leftover,
    TrafficSplit,
    rolled_back,
    without_spare,
)
from onnx_ops.domain.target import Finding, Target
from onnx_ops.errors import InfrastructureError, NotFoundError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.ports import MetricsSource
from onnx_ops.protocol import server_process
from onnx_ops.protocol.server_process import explain_unservable

_ANSWERS = frozenset({"InService", "Updating", "SystemUpdating", "RollingBack"})
Scalar = str | int | float | bool


class SageMakerEndpoints:
    """Fulfils `ports.EndpointProvider`. Settings: `SageMakerSettings`, and what boto3 takes from the environment.

    Args:
        folder: of endpoints on this machine; nothing is kept there.
        trusted: folder of the public keys that containers ask for a signature; without it they load anything.
        part_bytes: archives that are larger are sent in parts of that size.
    """

    tools = plugins.EXTRAS["aws"]

    def __init__(
        self, folder: Path | None = None, trusted: Path | None = None, *, part_bytes: int = PART_BYTES
    ) -> None:
        del folder
        self._keys = None if trusted is None else TrustedKeys(trusted)
        self._part_bytes = part_bytes
        self._known: dict[tuple[str, str, float], Clients] = {}

    def capabilities(self, settings: Mapping[str, Scalar] | None = None) -> frozenset[str]:
        guarded = (settings or {}).get("strategy") == "guarded"
        return frozenset({"guarded" if guarded else "split", "quantiles"})

    def check(self, settings: Mapping[str, Scalar]) -> None:
        settings_of(settings)

    def place(self, config: EndpointConfig) -> str:
        """Raises UserError if no region is chosen, or the settings are wrong."""
        settings, connected = self._connect(config)
        account = f" of profile {settings.profile}" if settings.profile else ""
        stored = f"s3://{settings.bucket}/{settings.prefix.strip('/')}/{config.endpoint}"
        region = connected("sagemaker").meta.region_name
        return f"SageMaker's endpoint {config.endpoint} in {region}{account}, with {stored}"

    def check_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """An update of the endpoint changes every setting."""

    def metrics(self) -> MetricsSource:
        source: MetricsSource = plugins.load("metrics", "cloudwatch", {})
        return source

    def lacking(self, config: EndpointConfig) -> OnnxOpsError | None:
        return missing_credentials(config.settings, where=config.endpoint)

    def unservable(self, target: Target) -> str:
        return explain_unservable(target, server_process.CONTAINER_PROVIDERS)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """What the endpoint does, as SageMaker says. While an update is under way that is what stood before it.

        The generation is the last one that was begun.

        Raises:
            UserError: there are no credentials, or the settings are wrong.
            RefusedError: AWS does not permit to look.
        """
        settings, connected = self._connect(config)
        try:
            found = describe(connected("sagemaker"), config.endpoint)
            if found is None or found["EndpointStatus"] not in _ANSWERS:
                return None
            if not is_ours(connected("sagemaker"), found, config.endpoint):
                return None
            claimed = self._claims(config, settings, connected).latest()
            if found["EndpointStatus"] != "InService":
                return _read_off(connected("sagemaker"), found, claimed)
            drift = tuple(Scaling(connected, config.endpoint, settings).drift(found))
            if claimed is not None:
                layout = self._layout(config, claimed, settings)
                if layout.holds(found["EndpointConfigName"]) and has_weights(found, layout.weights):
                    return replace(claimed, drift=drift)
            state = _read_off(connected("sagemaker"), found, claimed)
            if state is None:
                return None
            return replace(state, drift=(*self._config_drift(config, found, state), *drift))
        except InfrastructureError:
            return None

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Upload what is missing, make models and config, move the endpoint there, and wait until it is.

        Raises:
            ConflictError: a later generation, or another state of this generation, was begun already.
            DigestMismatchError: a deployment's files are not those of its manifest.
            NotFoundError: a deployment's files are needed and not there, or an alarm does not exist.
            UserError: the settings or the state cannot be had at SageMaker.
            RefusedError: AWS does not permit it, or the endpoint is somebody else's.
            ServiceUnavailableError: AWS does not answer, or the update did not end in time.
            AlarmRollbackError: an alarm took it back, now or in an earlier try.
            InfrastructureError: SageMaker could not do it, or took it back by itself; says why.
        """
        self._apply(config, replace(state, generation=generation))

    def _apply(self, config: EndpointConfig, state: EndpointState, *, back: bool = False) -> None:
        settings, connected = self._connect(config)
        layout = self._layout(config, state, settings)
        claims = self._claims(config, settings, connected)
        claims.take(state)
        archives = Archives(connected("s3"), settings.bucket, kms_key=settings.kms_key, part_bytes=self._part_bytes)
        for deployment in state.deployments:
            archives.ensure(archive_key(settings.prefix, config.endpoint, deployment), deployment)
        self._define(connected("sagemaker"), layout, config.endpoint)
        Mover(connected, config.endpoint, settings, claims, state.generation, back=back).move(layout)
        Scaling(connected, config.endpoint, settings).follow(layout)
        claims.hold(state.generation)
        claims.settle(state.generation)
        if settings.guarded:
            claims.stand(layout.config_name)

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """One change of weights where the endpoint runs the variant of the deployment that gets all traffic; else, and
        with strategy `guarded`, an update as by `apply`."""
        settings, connected = self._connect(config)
        claims = self._claims(config, settings, connected)
        state, held = replace(state, generation=generation), claims.latest()
        if held is None or held.held(state.leader()) is None or settings.guarded:
            self._apply(config, without_spare(state), back=True)
            return
        claims.take(rolled_back(held, state))
        try:
            Mover(connected, config.endpoint, settings, claims, generation).shift(variant_of(state.leader().name))
        except NotFoundError:  # what was claimed last never got there
            self._apply(config, rolled_back(held, state), back=True)

    def address(self, config: EndpointConfig) -> str | None:
        """`<address>/invocations` takes requests that are signed (SigV4, service `sagemaker`)."""
        _, connected = self._connect(config)
        try:
            found = describe(connected("sagemaker"), config.endpoint)
            if found is None or found["EndpointStatus"] == "Deleting":
                return None
            if not is_ours(connected("sagemaker"), found, config.endpoint):
                return None
        except InfrastructureError:
            return None
        base = str(connected("sagemaker-runtime").meta.endpoint_url).rstrip("/")
        return f"{base}/endpoints/{config.endpoint}"

    def remove(self, config: EndpointConfig) -> None:
        """End the endpoint, then remove its configs, models, archives and claims. Data that it captured stays."""
        settings, connected = self._connect(config)
        stem_of(config.endpoint)
        self._end(connected, config.endpoint, settings)
        left = Leftovers(connected, config.endpoint, settings)
        for leftover in list(left.found(frozenset())):
            left.discard(leftover)
        self._claims(config, settings, connected).forget()

    def leftovers(self, config: EndpointConfig, needed: frozenset[Digest]) -> tuple[Leftover, ...]:
        """Configs, models, archives and broken uploads of this endpoint that nothing needs."""
        settings, connected = self._connect(config)
        return tuple(Leftovers(connected, config.endpoint, settings).found(needed))

    def discard(self, config: EndpointConfig, leftover: Leftover) -> None:
        settings, connected = self._connect(config)
        Leftovers(connected, config.endpoint, settings).discard(leftover)

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Scalar]]) -> Iterator[Finding]:
        """Package, credentials and region, role and its trust, bucket, alarms, quota."""
        if not endpoints:
            yield from findings({})
        for name, settings in endpoints.items():
            several = f"{name}: " if len(endpoints) > 1 else ""
            yield from (replace(finding, check=f"{several}{finding.check}") for finding in findings(settings))

    def _end(self, connected: Clients, endpoint: str, settings: SageMakerSettings) -> None:
        from botocore.exceptions import ClientError

        sagemaker = connected("sagemaker")
        deadline = time.monotonic() + settings.timeout_s
        scaling = Scaling(connected, endpoint, settings)
        while (found := describe(sagemaker, endpoint)) is not None and is_ours(sagemaker, found, endpoint):
            if time.monotonic() > deadline:
                raise ServiceUnavailableError(
                    "the endpoint did not end in time", where=endpoint, why=f"it is {found['EndpointStatus']}"
                )
            if found["EndpointStatus"] != "Deleting":
                scaling.let_go(found)
                with translated(endpoint):
                    try:
                        sagemaker.delete_endpoint(EndpointName=endpoint)
                    except ClientError as error:
                        if not says(error, "in-progress", "in progress", "could not find"):
                            raise
            time.sleep(settings.poll_s)

    def _config_drift(self, config: EndpointConfig, found: Mapping[str, Any], state: EndpointState) -> tuple[str, ...]:
        """How the endpoint's config differs from the one that these settings make of the state; nothing where they
        make none."""
        settings, connected = self._connect(config)
        sagemaker = connected("sagemaker")
        try:
            layout = self._layout(config, state, settings)
        except UserError:
            return ()
        if layout.holds(found["EndpointConfigName"]):
            return ()
        with translated(config.endpoint):
            there = sagemaker.describe_endpoint_config(EndpointConfigName=found["EndpointConfigName"])
            names = {v["ModelName"] for v in variants_in(there)}
            models = {name: sagemaker.describe_model(ModelName=name) for name in names}
        return tuple(config_drift(there, models, layout))

    @staticmethod
    def _define(sagemaker: Any, layout: Layout, endpoint: str) -> None:
        for name, request in layout.models.items():
            _create(sagemaker, "model", {"ModelName": name}, request, endpoint)
        _create(sagemaker, "endpoint_config", {"EndpointConfigName": layout.config_name}, layout.config, endpoint)

    def _layout(self, config: EndpointConfig, state: EndpointState, settings: SageMakerSettings) -> Layout:
        keys = "" if self._keys is None else self._keys.encoded()
        return lay_out(config.endpoint, state, settings, trusted_keys=keys)

    def _claims(self, config: EndpointConfig, settings: SageMakerSettings, connected: Clients) -> Claims:
        folder = f"{settings.prefix.strip('/')}/{config.endpoint}"
        return Claims(connected("s3"), settings.bucket, folder, endpoint=config.endpoint)

    def _connect(self, config: EndpointConfig) -> tuple[SageMakerSettings, Clients]:
        settings = settings_of(config.settings, where=config.endpoint)
        key = (settings.region, settings.profile, settings.answer_s)
        if key not in self._known:
            self._known[key] = clients(config.settings, where=config.endpoint)
        return settings, self._known[key]


def _create(sagemaker: Any, noun: str, named: Mapping[str, str], request: Mapping[str, Any], endpoint: str) -> None:
    """Create what cannot be changed afterwards; what has its name already must be the same.

    Raises:
        InfrastructureError: it is another thing.
    """
    from botocore.exceptions import ClientError

    with translated(endpoint):
        try:
            getattr(sagemaker, f"create_{noun}")(**request)
        except ClientError as error:
            if not says(error, "already existing"):
                raise
            found = getattr(sagemaker, f"describe_{noun}")(**named)
            asked = {key: value for key, value in request.items() if key != "Tags"}
            if not _within(asked, found):
                raise InfrastructureError(
                    f"another {noun.replace('_', ' ')} has the name {next(iter(named.values()))}",
                    where=endpoint,
                    remedy="Somebody made it by hand; delete it.",
                ) from error


def _within(asked: Any, found: Any) -> bool:
    """Whether everything asked for stands in what was found, which tells more."""
    if isinstance(asked, Mapping) and isinstance(found, Mapping):
        return all(key in found and _within(value, found[key]) for key, value in asked.items())
    if isinstance(asked, Sequence) and not isinstance(asked, str) and isinstance(found, Sequence):
        return len(asked) == len(found) and all(map(_within, asked, found))
    return bool(asked == found)


def _read_off(sagemaker: Any, found: Mapping[str, Any], claimed: EndpointState | None) -> EndpointState | None:
    """The state that stands at SageMaker; None if something of it is not ours."""
    with translated(str(found["EndpointName"])):
        config = sagemaker.describe_endpoint_config(EndpointConfigName=found["EndpointConfigName"])
        stand = {
            variant["VariantName"]: _deployment(sagemaker, variant["ModelName"])
            for variant in config["ProductionVariants"]
        }
    named = {variant: deployment for variant, deployment in stand.items() if deployment is not None}
    current = {v["VariantName"]: float(v.get("CurrentWeight", 0.0)) for v in found.get("ProductionVariants", ())}
    if len(named) != len(stand) or not set(current) <= set(named) or not sum(current.values()):
        return None
    weights = {named[variant].name: percent for variant, percent in _percent(current).items()}
    generation = 0 if claimed is None else claimed.generation
    return EndpointState(deployments=tuple(named.values()), split=TrafficSplit(weights=weights), generation=generation)


def _deployment(sagemaker: Any, model: str) -> Deployment | None:
    container = sagemaker.describe_model(ModelName=model).get("PrimaryContainer", {})
    return deployment_in(container.get("Environment", {}))


def _percent(weights: Mapping[str, float]) -> dict[str, int]:
    """Whole percentages that sum to 100, the largest taking what rounding leaves."""
    total = sum(weights.values())
    found = {name: round(100 * weight / total) for name, weight in weights.items()}
    largest = max(found, key=lambda name: (found[name], name))
    found[largest] += 100 - sum(found.values())
    return found
