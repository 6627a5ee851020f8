"""Helpers that the tests of Azure ML share."""

from __future__ import annotations

import importlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from onnx_ops.adapters import azure
from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_client import AzureClient, RetryPolicy, _ml_client
from onnx_ops.adapters.endpoints.azureml_options import read_azure_options
from onnx_ops.adapters.endpoints.azureml_plan import build_azure_name
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState
from onnx_ops.domain.quantities import Json
from tests.adapters.endpoint_site import EndpointSite, make_config, make_models
from tests.support.clouds.azureml import AzureCloud, FaultRule
from tests.support.clouds.azureml_web import Call
from tests.support.forks import fork_context

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

POLICY = RetryPolicy(operation_s=30, answer_s=5, lag_s=1, pause_s=0.01, longest_s=0.1)
_CLOUD = "AZUREML_CURRENT_CLOUD"


def config_of(cloud: AzureCloud, **options: str | float) -> EndpointConfig:
    given: dict[str, Json] = {**cloud.options, **options}
    return make_config("scaling", "azureml", **given)


def enter(environment: Mapping[str, str]) -> None:
    """Set the fake's environment, and delete cached tokens and clients of other clouds."""
    with warnings.catch_warnings():
        # marshmallow warns about the schemas of Azure's SDK.
        warnings.simplefilter("ignore")
        for name in ("azure.ai.ml", "azure.identity"):
            importlib.import_module(name)
    os.environ.update(environment)
    os.environ.pop(_CLOUD, None)
    forget_clients()


def forget_clients() -> None:
    """Clear the cached tokens and clients, which belong to another cloud."""
    azure.get_credential.cache_clear()
    _ml_client.cache_clear()


@contextmanager
def inside(cloud: AzureCloud) -> Iterator[AzureCloud]:
    before = {name: os.environ.get(name) for name in (*cloud.environment, _CLOUD)}
    enter(cloud.environment)
    try:
        yield cloud
        assert cloud.denied == []
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def key_of(config: EndpointConfig) -> str:
    """Return the header `Authorization` that clients of the endpoint send."""
    return f"Bearer key-of-{azure.read_endpoint_name(config.endpoint, config.options)}"


@dataclass(kw_only=True)
class World(EndpointSite):
    """The Azure ML provider on the fake cloud.

    `folder` is the state folder of a machine.
    """

    cloud: AzureCloud
    folder: Path
    provider: AzureEndpoints = field(init=False)

    def __post_init__(self) -> None:
        self.provider, self.config = (
            AzureEndpoints(self.folder, policy=POLICY),
            config_of(self.cloud),
        )

    def name(self, deployment: Deployment, **options: str | float) -> str:
        """Return the name of the deployment in Azure."""
        config = config_of(self.cloud, **options)
        return build_azure_name(deployment, read_azure_options(config.options).immutable)

    @property
    def ml(self) -> MLClient:
        """Return another client of the workspace."""
        return AzureClient(read_azure_options(self.config.options), "scaling", "scaling", POLICY).ml

    def scale(self, config: EndpointConfig | None = None) -> float:
        """Send a request as clients do; return the factor of the model that answers."""
        config = config or self.config
        headers = {"Authorization": key_of(config)}
        url = f"{self.provider.address(config)}/invocations"
        answer = httpx.post(url, json={"inputs": {"x": [[1.0, 1.0]]}}, headers=headers, timeout=90)
        return float(answer.raise_for_status().json()["predictions"]["y"][0][0])

    def mischief(
        self, at: int, fault_rule: FaultRule | None, also: Callable[[], None] = lambda: None
    ) -> None:
        """Disturb the request of that number, counted from now, a single time."""
        first = len(self.cloud.calls)

        def decide(number: int, call: Call) -> FaultRule | None:
            if number - first != at or fault_rule is None:
                return None
            also()
            return fault_rule

        self.cloud.fault_rule = decide

    def dies(self, at: int, state: EndpointState, generation: int, *, after: bool) -> bool:
        """Apply in another process, which is killed at that request.

        Return whether the process reached the request.
        """
        context = fork_context(__name__, "azure.ai.ml", "azure.identity")
        child: BaseProcess = context.Process(
            target=_apply,
            args=(dict(self.cloud.environment), self.folder, self.config, state, generation),
        )
        killed = []

        def kill() -> None:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            killed.append(at)

        self.mischief(at, FaultRule(fault="drop", after=after), kill)
        child.start()
        child.join(60)
        self.cloud.fault_rule = lambda *_: None
        assert child.exitcode == (-signal.SIGKILL if killed else 0)
        return bool(killed)


@contextmanager
def open_world(folder: Path) -> Iterator[World]:
    blue, green = make_models(folder / "models")
    with AzureCloud(folder / "cloud") as cloud, inside(cloud):
        yield World(cloud=cloud, folder=folder / "endpoints", blue=blue, green=green)


def _apply(
    environment: Mapping[str, str],
    folder: Path,
    config: EndpointConfig,
    state: EndpointState,
    generation: int,
) -> None:
    enter(environment)
    AzureEndpoints(folder, policy=POLICY).apply(config, state, generation=generation)
