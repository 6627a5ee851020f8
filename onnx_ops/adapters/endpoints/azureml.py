"""Managed online endpoints of Azure Machine Learning."""

from __future__ import annotations

import itertools
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from onnx_ops import plugins
from onnx_ops.adapters.azure import Scalar, endpoint_name, first_line, missing_credentials
from onnx_ops.adapters.endpoints.azureml_change import Change, is_mirrored
from onnx_ops.adapters.endpoints.azureml_client import AzureClient, Pace, succeeded
from onnx_ops.adapters.endpoints.azureml_deployments import SCORING_ROUTE
from onnx_ops.adapters.endpoints.azureml_doctor import diagnose
from onnx_ops.adapters.endpoints.azureml_memory import Memory
from onnx_ops.adapters.endpoints.azureml_models import AzureModels
from onnx_ops.adapters.endpoints.azureml_plan import (
    OWNER,
    azure_name,
    listed_in,
    manifest_of,
    planned,
    record_of,
    state_of,
)
from onnx_ops.adapters.endpoints.azureml_settings import read_settings
from onnx_ops.attestation import TrustedKeys
from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, Leftover, rolled_back, without_spare
from onnx_ops.domain.target import Finding, Target
from onnx_ops.errors import NotFoundError, OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.ports.release import MetricsSource
from onnx_ops.protocol import server_process
from onnx_ops.protocol.server_process import explain_unservable

_INVOKE_S = 90.0
_PIN = "azureml-model-deployment"


class AzureEndpoints:
    """Keeps in `folder/<endpoint>/` a lock and the last generation sent; all else stands in Azure.

    Args:
        folder: for what this machine remembers.
        trusted: folder of the public keys that containers ask for a signature; without it they load anything.
        pace: how long to wait for Azure.
    """

    tools = plugins.EXTRAS["azure"]

    def __init__(self, folder: Path, trusted: Path | None = None, *, pace: Pace | None = None) -> None:
        self._folder = folder
        self._keys = None if trusted is None else TrustedKeys(trusted)
        self._pace = pace or Pace()

    def capabilities(self, settings: Mapping[str, Scalar] | None = None) -> frozenset[str]:
        """Azure mirrors requests, but nobody compares the answers; and it keeps no user on one version."""
        return frozenset({"split"}) | self.metrics().capabilities()

    def metrics(self) -> MetricsSource:
        source: MetricsSource = plugins.load("metrics", "azuremonitor", {})
        return source

    def check(self, settings: Mapping[str, Scalar]) -> None:
        read_settings(settings)

    def place(self, config: EndpointConfig) -> str:
        """Raises UserError if the settings are wrong."""
        workspace = read_settings(config.settings, where=config.endpoint).place
        name = endpoint_name(config.endpoint, config.settings)
        return f"Azure's endpoint {name} in {workspace.path.removeprefix('/')}"

    def check_change(self, before: EndpointConfig, after: EndpointConfig) -> None:
        """Azure fixes how clients show who they are, and the endpoint's identity, when the endpoint is made."""
        there, wanted = (read_settings(config.settings, where=config.endpoint) for config in (before, after))
        for name in ("auth", "identity"):
            if (was := getattr(there, name)) != (asked := getattr(wanted, name)):
                raise UserError(
                    f"{name} of an endpoint that exists cannot be changed from {was or 'none'} to {asked or 'none'}",
                    where=after.endpoint,
                    remedy=f"Set {name} back, or end the endpoint with `onnx-ops delete {after.endpoint}` and run "
                    "again, or give it another `name`.",
                )

    def diagnose(self, endpoints: Mapping[str, Mapping[str, Scalar]]) -> Iterator[Finding]:
        """What stands in the way of endpoints with these settings, each with the remedy."""
        return diagnose(tuple(endpoints.values()))

    def lacking(self, config: EndpointConfig) -> OnnxOpsError | None:
        return missing_credentials(where=config.endpoint)

    def unservable(self, target: Target) -> str:
        return explain_unservable(target, server_process.CONTAINER_PROVIDERS)

    def observe(self, config: EndpointConfig) -> EndpointState | None:
        """None also where a deployment is lost, traffic is not what any state says, or Azure does not answer."""
        try:
            return self._observed(config)[0]
        except ServiceUnavailableError:
            return None

    def apply(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """Returns when Azure routes by it and what it does not need is gone.

        Raises:
            ConflictError: a later generation, or another state of this one, was applied already.
            DigestMismatchError: a deployment's files are not those of its manifest.
            NotFoundError: a deployment's files are not there.
            UserError: the endpoint's name or settings are not for Azure, or the state asks for copies.
            RefusedError: Azure does not let us, or a thing of that name is somebody else's.
            InfrastructureError: a deployment does not start, or there is no quota for it.
            ServiceUnavailableError: Azure does not answer.
        """
        change, _, _ = self._parts(config)
        change.to(planned(state, generation=generation, name=change.deployments.name, where=config.endpoint))

    def roll_back(self, config: EndpointConfig, state: EndpointState, *, generation: int) -> None:
        """One change of traffic where the endpoint holds the deployment that gets all of it; else as `apply`."""
        try:
            held, names = self._observed(config)
        except ServiceUnavailableError:
            held, names = None, {}
        if held is not None and held.held(state.leader()) is not None:
            goal = rolled_back(held, state)
            change, _, _ = self._parts(config)
            change.routed(planned(goal, generation=generation, name=lambda d: names[d.name], where=config.endpoint))
            return
        self.apply(config, without_spare(state), generation=generation)

    def address(self, config: EndpointConfig) -> str | None:
        """Azure's scoring address without its route; requests need a key or token (see `authorization`)."""
        change, _, _ = self._parts(config)
        found = change.present()
        return None if found is None else str(found.scoring_uri).removesuffix(SCORING_ROUTE)

    def remove(self, config: EndpointConfig) -> None:
        change, _, _ = self._parts(config)
        change.removed()

    def leftovers(self, config: EndpointConfig, needed: frozenset[Digest]) -> tuple[Leftover, ...]:
        """Deployments without traffic that the endpoint's state does not list, and uploaded models that nobody needs.

        Raises:
            ServiceUnavailableError: Azure does not answer.
        """
        change, client, name = self._parts(config)
        _, names = self._observed(config)
        listed = set(names.values())
        endpoint = change.present()
        used = {n for n, percent in (endpoint.traffic or {}).items() if percent} if endpoint is not None else set()
        there = {n: d for n, d in client.deployments(name).items() if (d.tags or {}).get(OWNER) == config.endpoint}
        spare = sorted(
            n for n, d in there.items() if n not in listed | used and manifest_of(d.tags or {}) not in needed
        )
        found = [
            Leftover(kind="deployment", name=n, why="it has no traffic, and no state needs it", paid=True)
            for n in spare
        ]
        records = (record_of(d.tags or {}) for d in there.values())
        served = {azure_name(record) for record in records if record is not None}
        for model in self._models(config).kept():
            if model.manifest not in needed and model.name not in served:
                why = "no deployment serves it" if model.manifest else "its upload was cut off"
                found.append(Leftover(kind="model", name=model.name, why=why, paid=True))
        return tuple(found)

    def discard(self, config: EndpointConfig, leftover: Leftover) -> None:
        """Raises ConflictError for a deployment that has traffic by now."""
        change, _, _ = self._parts(config)
        if leftover.kind == "deployment":
            change.deployments.deleted(leftover.name)
        else:
            self._models(config).discard(leftover.name)

    def authorization(self, config: EndpointConfig) -> str:
        """What clients send in the header `Authorization`: the endpoint's first key, or a token.

        Raises:
            NotFoundError: there is no such endpoint.
        """
        _, client, name = self._parts(config)
        found = client.read(f"endpoint {name}", lambda: client.ml.online_endpoints.get_keys(name))
        if found is None:
            raise NotFoundError("there is no such endpoint", where=config.endpoint)
        return f"Bearer {getattr(found, 'primary_key', None) or getattr(found, 'access_token', '')}"

    def invoke(self, config: EndpointConfig, document: object, *, deployment: str | None = None) -> object:
        """One request, as a client sends it. The SDK's own `invoke` is not used: it names the deployment in a header
        that it then sends with every later request of the process.

        Args:
            document: the body, as JSON.
            deployment: name of a deployment here; whichever has traffic without it.

        Raises:
            NotFoundError: there is no such endpoint or deployment.
            ServiceUnavailableError: it does not answer, or fails.
        """
        address = self.address(config)
        if address is None:
            raise NotFoundError("there is no such endpoint", where=config.endpoint)
        headers = {"Content-Type": "application/json", "Authorization": self.authorization(config)}
        if deployment is not None:
            headers[_PIN] = self._azure_name(config, deployment)
        request = urllib.request.Request(f"{address}{SCORING_ROUTE}", json.dumps(document).encode(), headers)  # noqa: S310 (Azure's own)
        try:
            with urllib.request.urlopen(  # noqa: S310
                request, timeout=_INVOKE_S, context=ssl.create_default_context()
            ) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise ServiceUnavailableError(
                "the endpoint does not answer", where=config.endpoint, why=first_line(error)
            ) from error

    def _observed(self, config: EndpointConfig) -> tuple[EndpointState | None, Mapping[str, str]]:
        """What the endpoint does, and the names in Azure of its deployments by theirs here."""
        change, client, name = self._parts(config)
        found = change.present()
        if found is None or is_mirrored(found):
            return None, {}
        there = client.deployments(name)
        records = {n: r for n, d in there.items() if succeeded(d) and (r := record_of(d.tags or {})) is not None}
        state = state_of(found.tags or {}, found.traffic or {}, records)
        if state is None:
            return None, {}
        names = {records[n].name: n for n in listed_in(found.tags or {})}
        drift = [change.deployments.drift(there[names[d.name]], d) for d in state.deployments]
        return replace(state, drift=tuple(itertools.chain(*drift))), names

    def _azure_name(self, config: EndpointConfig, deployment: str) -> str:
        _, names = self._observed(config)
        if deployment not in names:
            raise NotFoundError(f"there is no deployment {deployment}", where=config.endpoint)
        return names[deployment]

    def _parts(self, config: EndpointConfig) -> tuple[Change, AzureClient, str]:
        settings = read_settings(config.settings, where=config.endpoint)
        if self._keys is not None and (keys := self._keys.encoded()):
            settings = replace(settings, server={**settings.server, "trusted_keys": keys})
        name = endpoint_name(config.endpoint, config.settings)
        client = AzureClient(settings.place, self._pace, answer_s=settings.answer_s)
        memory = Memory(self._folder / config.endpoint)
        client.connect(config.endpoint)
        models = AzureModels(client, settings, name)
        return Change(client, settings, models, memory, name, config.endpoint), client, name

    def _models(self, config: EndpointConfig) -> AzureModels:
        settings = read_settings(config.settings, where=config.endpoint)
        name = endpoint_name(config.endpoint, config.settings)
        return AzureModels(AzureClient(settings.place, self._pace, answer_s=settings.answer_s), settings, name)
