"""The deployments of one endpoint in Azure: made once, deleted when they have no traffic.

What a deployment was made with is a part of its name and never changed; of a running one only the number of its
instances is. So other settings make another deployment, and traffic moves there once it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onnx_ops.adapters.endpoints.azureml_client import AzureClient, succeeded
from onnx_ops.adapters.endpoints.azureml_errors import Busy, Gone
from onnx_ops.adapters.endpoints.azureml_models import AzureModels
from onnx_ops.adapters.endpoints.azureml_plan import OWNER, SCALING, azure_name, record_of, record_tags
from onnx_ops.adapters.endpoints.azureml_scaling import Scaling
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.domain.artifact import digest_bytes, short
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import ConflictError, OnnxOpsError, RefusedError, ServiceUnavailableError
from onnx_ops.protocol.server_process import OPTION_PREFIX, TRUSTED_KEYS_VARIABLE

if TYPE_CHECKING:
    from azure.ai.ml.entities import ManagedOnlineDeployment, ManagedOnlineEndpoint

SCORING_ROUTE = "/invocations"
_PORT = 8080


class Deployments:
    """Fulfils what a state asks of an endpoint's deployments.

    Args:
        name: the endpoint's name in Azure.
        owner: its name here, which stands in the tags.
    """

    def __init__(
        self, client: AzureClient, settings: AzureSettings, models: AzureModels, name: str, owner: str
    ) -> None:
        self._client = client
        self._settings = settings
        self._models = models
        self._name = name
        self._owner = owner
        self._scaling = Scaling(client, settings, name, owner)

    def name(self, deployment: Deployment) -> str:
        """What a deployment is called in Azure that these settings make."""
        return azure_name(deployment, self._settings.made_with)

    def drift(self, found: ManagedOnlineDeployment, deployment: Deployment) -> Iterator[str]:
        """How a deployment that runs differs from the settings."""
        if found.name == self.name(deployment):
            yield from self._scaling.drift(found)
            return
        requests, variables = found.request_settings, found.environment_variables or {}
        there = {
            "instance_type": found.instance_type,
            "max_concurrent_requests_per_instance": getattr(requests, "max_concurrent_requests_per_instance", None),
            "request_timeout": (getattr(requests, "request_timeout_ms", None) or 0) / 1e3,
        }
        wanted = dict(self._settings.made_with)
        if not str(found.environment).endswith(f"/{_environment_name(self._settings)}/versions/1"):
            yield f"image of {found.name}: another one, not {wanted['image']}"
        wanted.pop("image")
        options = {name: value for name, value in variables.items() if name.startswith(OPTION_PREFIX)}
        options.pop(TRUSTED_KEYS_VARIABLE, None)
        for key in sorted({*wanted, *options}):
            value = there.get(key, options.get(key))
            if value != wanted.get(key):
                yield f"{key} of {found.name}: {value}, not {wanted.get(key)}"

    def runs(self, name: str, deployment: Deployment) -> None:
        """Make the deployment if it is not there, with as many instances as the settings say."""
        last: OnnxOpsError = ServiceUnavailableError("it could not be made", where=f"deployment {name}")
        for _ in self._client.pace.tries(self._client.pace.patience):
            try:
                found = self._client.settled_deployment(self._name, name)
                if found is not None and succeeded(found):
                    self._check_ours(found)
                    if self._scaling.follow(found):
                        return
                    continue
                if found is not None:
                    self.deleted(name)
                asset = self._models.asset(azure_name(deployment), deployment)
                environment = self._environment()
                self._client.write(
                    f"deployment {name}",
                    lambda: self._making(name, deployment, asset, environment),  # noqa: B023 (called at once)
                    instances=self._settings.instances,
                )
                self._seen(name)
            except (Busy, ServiceUnavailableError) as error:
                last = error
        raise last

    def _seen(self, name: str) -> None:
        for _ in self._client.pace.tries(self._client.pace.lag):
            if self._client.settled_deployment(self._name, name) is not None:
                return

    def _making(self, name: str, deployment: Deployment, asset: str, environment: str) -> Any:
        from azure.ai.ml.entities import ManagedOnlineDeployment, OnlineRequestSettings

        return self._client.ml.online_deployments.begin_create_or_update(
            ManagedOnlineDeployment(
                name=name,
                endpoint_name=self._name,
                model=asset,
                environment=environment,
                environment_variables=self._settings.variables(),
                instance_type=self._settings.instance_type,
                instance_count=self._settings.instances,
                request_settings=OnlineRequestSettings(
                    max_concurrent_requests_per_instance=self._settings.concurrency,
                    request_timeout_ms=round(self._settings.request_timeout * 1e3),
                ),
                tags={OWNER: self._owner, **record_tags(deployment), SCALING: self._scaling.tag},
            )
        )

    def _environment(self) -> str:
        """Resource id of the environment that is our image, with its routes."""
        name = _environment_name(self._settings)
        ml, where = self._client.ml, f"environment {name}"
        if self._client.read(where, lambda: ml.environments.get(name, "1")) is None:
            self._client.write(where, lambda: _Done(ml.environments.create_or_update(_container(name, self._settings))))
        return f"{self._client.place.path}/environments/{name}/versions/1"

    def deleted(self, name: str) -> None:
        """Delete a deployment that has no traffic. No error if it is not there.

        Raises:
            ConflictError: it has traffic.
        """
        last: OnnxOpsError = ServiceUnavailableError("it could not be deleted", where=f"deployment {name}")
        for _ in self._client.pace.tries(self._client.pace.patience):
            endpoint = self._client.endpoint(self._name)
            found = self._client.settled_deployment(self._name, name)
            if endpoint is None or found is None:
                return
            if _used(endpoint, name):
                raise ConflictError("it has traffic", where=f"deployment {name}", remedy="Move the traffic first.")
            try:
                self._scaling.let_go(found)
                self._client.write(
                    f"deployment {name}", lambda: self._client.ml.online_deployments.begin_delete(name, self._name)
                )
            except (Busy, ServiceUnavailableError) as error:
                last = error
            except Gone:
                return
        raise last

    def let_go(self) -> None:
        """No longer scale the deployments of an endpoint that ends."""
        for found in self._client.deployments(self._name).values():
            if (found.tags or {}).get(OWNER) == self._owner:
                self._scaling.let_go(found)

    def _check_ours(self, found: ManagedOnlineDeployment) -> None:
        if (found.tags or {}).get(OWNER) != self._owner or record_of(found.tags or {}) is None:
            raise RefusedError(
                f"a deployment {found.name} stands there that is not ours",
                where=self._owner,
                remedy="Delete it, or choose another `name` for the endpoint.",
            )


class _Done:
    """An operation that was over when it was answered."""

    def __init__(self, found: object) -> None:
        self._found = found

    def wait(self, timeout: float | None = None) -> None:
        del timeout

    def done(self) -> bool:
        return True

    def result(self) -> object:
        return self._found


def _environment_name(settings: AzureSettings) -> str:
    return f"onnx-ops-{short(digest_bytes(settings.image.encode()))}"


def _container(name: str, settings: AzureSettings) -> Any:
    from azure.ai.ml.entities import Environment

    alive, scoring = {"port": _PORT, "path": "/ping"}, {"port": _PORT, "path": SCORING_ROUTE}
    return Environment(
        name=name,
        version="1",
        image=settings.image,
        inference_config={"liveness_route": alive, "readiness_route": alive, "scoring_route": scoring},
    )


def _used(endpoint: ManagedOnlineEndpoint, name: str) -> bool:
    return bool((endpoint.traffic or {}).get(name) or (endpoint.mirror_traffic or {}).get(name))
