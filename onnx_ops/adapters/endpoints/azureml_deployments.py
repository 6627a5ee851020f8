"""The deployments of one endpoint in Azure, and their instance counts.

The name of a deployment contains a digest of its immutable options, so a change of these options
creates another deployment. Only its instance count and its tags change. A scaled deployment has an
autoscale setting of Azure Monitor, and a tag with the limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onnx_ops.adapters.endpoints.azureml_client import (
    AzureClient,
    GoneError,
    format_log_command,
)
from onnx_ops.adapters.endpoints.azureml_models import AzureModels
from onnx_ops.adapters.endpoints.azureml_plan import (
    NOT_SCALED,
    OWNER,
    SCALING,
    build_azure_name,
    build_record_tags,
    read_record,
)
from onnx_ops.adapters.endpoints.azureml_resources import OnlineDeployment
from onnx_ops.domain.artifact import digest_bytes, short_digest
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import ConflictError, InfrastructureError, RefusedError
from onnx_ops.protocol.server_process import OPTION_PREFIX, TRUSTED_KEYS_VARIABLE

SCORING_ROUTE = "/invocations"
_NOT_OPTIONS = (TRUSTED_KEYS_VARIABLE, f"{OPTION_PREFIX}ENDPOINT")
"""Variables that no option of the pipeline file determines."""
_MONITOR_API = "api-version=2022-10-01"
_MONITOR_REMEDY = (
    "Give the identity a role with `Microsoft.Insights/autoscaleSettings/read`, `write` and "
    "`delete` on the resource group. `infra/azure` creates such a role; "
    "see `onnx-ops docs azureml-options`."
)


class AzureDeployments:
    """The deployments of one endpoint, and the models that they serve."""

    def __init__(self, client: AzureClient, models: AzureModels) -> None:
        self._client = client
        self._options = client.options
        self._models = models
        self._autoscaling = Autoscaling(client)

    def name(self, deployment: Deployment) -> str:
        """Return the name in Azure of a deployment with these options."""
        return build_azure_name(deployment, self._options.immutable)

    def drift(self, resource: OnlineDeployment, deployment: Deployment) -> Iterator[str]:
        """Yield the differences between a running deployment and the options."""
        if resource.name == self.name(deployment):
            yield from self._autoscaling.drift(resource)
            return
        variables = resource.environment_variables
        actual = {
            "client_id": variables.get("AZURE_CLIENT_ID", ""),
            "instance_type": resource.instance_type,
            "max_concurrent_requests_per_instance": resource.max_concurrent_requests,
            "request_timeout": resource.request_timeout_s,
            "egress": resource.egress,
            "app_insights": resource.app_insights,
        }
        desired = dict(self._options.immutable)
        if not resource.environment.endswith(f"/{self._environment_name()}/versions/1"):
            yield f"image of {resource.name}: a different image, not {desired['image']}"
        for name in ("image", "control", "reports"):
            # The image is compared above. The digest of a fleet's manifest covers `control` and
            # `reports`.
            desired.pop(name, None)
        environment = {
            name: value
            for name, value in variables.items()
            if name.startswith(OPTION_PREFIX) and name not in _NOT_OPTIONS
        }
        for key in sorted({*desired, *environment}):
            value = actual.get(key, environment.get(key))
            if value != desired.get(key):
                yield f"{key} of {resource.name}: {value}, not {desired.get(key)}"

    def is_ready(self, resource: OnlineDeployment | None) -> bool:
        """Return whether a deployment runs as the options demand; send no request.

        The result is False for a scaled deployment, whose autoscale setting only a request to Azure
        Monitor can show.
        """
        return (
            resource is not None
            and resource.has_succeeded
            and self._is_own(resource)
            and self._autoscaling.is_fixed(resource)
        )

    def ensure(self, name: str, deployment: Deployment) -> None:
        """Create the deployment if it does not exist, and apply count and autoscaling.

        A failed deployment of this endpoint without traffic is deleted and created again.

        Raises:
            RefusedError: the deployment exists, but this endpoint does not own it.
            NotFoundError, DigestMismatchError: files of the model are missing, or do not match its
                manifest.
            InfrastructureError: Azure could not create the deployment, or failed to change the
                instances of a deployment with traffic.
            ServiceUnavailableError: Azure did not finish the change in time.
        """
        where, has_retried = f"deployment {name}", False

        def step() -> bool | None:
            nonlocal has_retried
            resource = self._client.settled_deployment(name)
            if resource is not None and not self._is_own(resource):
                raise RefusedError(
                    f"deployment {name} exists, but its tags do not show that onnx-ops created it "
                    "for this endpoint",
                    where=self._client.owner,
                    remedy="Delete the deployment, or choose another `name` for the endpoint.",
                )
            if resource is not None and resource.has_succeeded:
                return self._autoscaling.apply(resource) or None
            if resource is not None and self._has_traffic(name):
                # A change of the number of instances failed. The running instances still answer
                # requests.
                if has_retried:
                    raise InfrastructureError(
                        "Azure could not change the instances of a deployment",
                        where=where,
                        why=f"its provisioning state is {resource.state}; the former instances "
                        "still serve",
                        remedy="See its log in the Azure portal, or with "
                        f"{format_log_command(self._client.workspace, self._client.name, name)}.",
                    )
                has_retried = True
                self._autoscaling.update(resource)
                return None
            if resource is not None:
                self.delete(name)
            self._create(name, deployment)
            for _ in self._client.policy.attempts(self._client.policy.lag_s):
                if self._client.settled_deployment(name) is not None:
                    break
            return None

        self._client.converge(step, where, retry_reads=True)

    def delete(self, name: str) -> None:
        """Delete a deployment, if it exists; raise ConflictError if it has traffic."""
        where = f"deployment {name}"

        def step() -> bool | None:
            resource = self._client.settled_deployment(name)
            endpoint = None if resource is None else self._client.endpoint()
            if endpoint is None or resource is None:
                return True
            if endpoint.gives_traffic(name):
                raise ConflictError("it has traffic", where=where, remedy="Move the traffic first.")
            try:
                self._autoscaling.remove(resource)
                deployments = self._client.ml.online_deployments
                self._client.write(where, lambda: deployments.begin_delete(name, self._client.name))
            except GoneError:
                return True
            return None

        self._client.converge(step, where)

    def remove_autoscaling(self) -> None:
        """Stop scaling the deployments of an endpoint that is being removed."""
        for resource in self._client.deployments().values():
            if resource.tags.get(OWNER) == self._client.owner:
                self._autoscaling.remove(resource)

    def _has_traffic(self, name: str) -> bool:
        endpoint = self._client.endpoint()
        return endpoint is not None and endpoint.gives_traffic(name)

    def _is_own(self, resource: OnlineDeployment) -> bool:
        is_owner = resource.tags.get(OWNER) == self._client.owner
        return is_owner and read_record(resource.tags) is not None

    def _create(self, name: str, deployment: Deployment) -> None:
        """Create a deployment, and its model unless the deployment is a fleet.

        The environment that deployments share is created if missing. It contains the image of
        onnx-ops and its routes.
        """
        from azure.ai.ml.entities import Environment, ManagedOnlineDeployment, OnlineRequestSettings

        client, options = self._client, self._options
        asset = None
        if not options.is_table:
            asset = self._models.ensure(build_azure_name(deployment), deployment)
        image, environments = self._environment_name(), client.ml.environments
        where = f"environment {image}"
        if client.read(where, lambda: environments.get(image, "1")) is None:
            live, scoring = {"port": 8080, "path": "/ping"}, {"port": 8080, "path": SCORING_ROUTE}
            routes = {"liveness_route": live, "readiness_route": live, "scoring_route": scoring}
            environment = Environment(
                name=image, version="1", image=options.image, inference_config=routes
            )
            client.retry(where, lambda: environments.create_or_update(environment))
        desired = ManagedOnlineDeployment(
            name=name,
            endpoint_name=client.name,
            model=asset,
            environment=f"{client.workspace.path}/environments/{image}/versions/1",
            environment_variables=options.variables(),
            # `enabled` is Azure's default. In a workspace with a managed virtual network, the rules
            # of this network apply, and the field must stay unset.
            egress_public_network_access=None if options.egress == "enabled" else options.egress,
            app_insights_enabled=options.app_insights,
            instance_type=options.instance_type,
            instance_count=options.instances,
            request_settings=OnlineRequestSettings(
                max_concurrent_requests_per_instance=options.concurrency,
                request_timeout_ms=round(options.request_timeout * 1e3),
            ),
            tags={
                OWNER: client.owner,
                **build_record_tags(deployment),
                SCALING: self._autoscaling.tag,
            },
        )
        deployments = client.ml.online_deployments
        client.write(
            f"deployment {name}",
            lambda: deployments.begin_create_or_update(desired),
            instances=options.instances,
        )

    def _environment_name(self) -> str:
        return f"onnx-ops-{short_digest(digest_bytes(self._options.image.encode()))}"


class Autoscaling:
    """Instance counts, fixed by the options or set by Azure Monitor."""

    def __init__(self, client: AzureClient) -> None:
        self._client = client
        self._options = client.options

    @property
    def tag(self) -> str:
        """Return the value of a deployment's scaling tag for these options."""
        options = self._options
        if not options.scaled:
            return NOT_SCALED
        return (
            f"{options.min_instances} to {options.max_instances} instances at "
            f"{options.cpu_percent}% CPU"
        )

    def drift(self, resource: OnlineDeployment) -> Iterator[str]:
        """Yield how instance counts and autoscaling differ from the options.

        Instance counts that another client's autoscaling sets are not compared, if the identity can
        read autoscale settings.
        """
        actual = resource.tags.get(SCALING, NOT_SCALED)
        if actual == self.tag and self._options.scaled:
            actual = self._monitor_drift(resource.name) or actual
        if actual != self.tag:
            yield f"autoscaling of {resource.name}: {actual}, not {self.tag}"
        elif self._is_miscounted(resource):
            yield (
                f"instances of {resource.name}: {resource.instance_count}, "
                f"not {self._options.instances}"
            )

    def is_fixed(self, resource: OnlineDeployment) -> bool:
        """Return whether a deployment has the fixed instance count of the options."""
        is_scaled = resource.tags.get(SCALING, NOT_SCALED) != NOT_SCALED or self._options.scaled
        return not is_scaled and resource.instance_count == self._options.instances

    def apply(self, resource: OnlineDeployment) -> bool:
        """Apply the options; return whether count and tag of the deployment were right.

        The tag shows the limits before the autoscale setting is created, and `none` only after the
        setting is deleted. So a deployment whose tag is `none` has no autoscale setting of
        onnx-ops.
        """
        has_tag = resource.tags.get(SCALING, NOT_SCALED) == self.tag
        if has_tag and not self._is_miscounted(resource):
            if self._options.scaled and self._monitor_drift(resource.name) is not None:
                document = self._setting(resource.name)
                self._ask_monitor(self._setting_path(resource.name), "PUT", document)
            return True
        self.update(resource)
        return False

    def update(self, resource: OnlineDeployment) -> None:
        """Request the tag of the options and, without autoscaling, the instance count.

        Without autoscaling in the options, the autoscale setting is deleted first.
        """
        if not self._options.scaled:
            self.remove(resource)
        changes: dict[str, Any] = {"tags": {**resource.tags, SCALING: self.tag}}
        if not self._options.scaled:
            changes["sku"] = {"name": "Default", "capacity": self._options.instances}
        path = self._client.deployment_path(resource.name)
        self._request(path, f"deployment {resource.name}", "PATCH", changes)

    def remove(self, resource: OnlineDeployment) -> None:
        """Delete the autoscale setting of a deployment whose tag shows one."""
        if resource.tags.get(SCALING, NOT_SCALED) != NOT_SCALED:
            self._ask_monitor(self._setting_path(resource.name), "DELETE")

    def _is_miscounted(self, resource: OnlineDeployment) -> bool:
        """Return whether a fixed instance count differs from the options.

        The result is False if autoscaling of the options or of another client sets the count. The
        autoscaling of another client is unknown if the identity cannot read autoscale settings.
        """
        if self._options.scaled or resource.instance_count == self._options.instances:
            return False
        try:
            listed = self._ask_monitor(f"{self._settings_path}?{_MONITOR_API}")
        except RefusedError:
            # The permission to read autoscale settings is required only for options with
            # autoscaling.
            return True
        targets = (
            item["properties"].get("targetResourceUri", "")
            for item in (listed or {}).get("value", ())
        )
        target = self._client.deployment_path(resource.name)
        return target.lower() not in map(str.lower, targets)

    def _monitor_drift(self, name: str) -> str | None:
        """Return how the autoscale setting of a deployment differs from the options.

        The result is None if it does not differ.
        """
        actual = self._ask_monitor(self._setting_path(name))
        if actual is None:
            return NOT_SCALED
        desired = self._setting(name)["properties"]
        profiles = actual["properties"].get("profiles") or [{}]
        enabled = actual["properties"].get("enabled")
        if len(profiles) == 1 and (enabled, *_limits(profiles[0])) == (
            True,
            *_limits(desired["profiles"][0]),
        ):
            return None
        capacity = profiles[0].get("capacity", {})
        limits = f"{capacity.get('minimum')} to {capacity.get('maximum')} instances"
        return f"{limits} (limits, rules or profiles differ, or autoscaling is disabled)"

    def _setting(self, name: str) -> dict[str, Any]:
        client, options, target = self._client, self._options, self._client.deployment_path(name)
        workspace: Any = self._request(client.workspace.path, client.owner) or {}
        counts = {
            "minimum": options.min_instances,
            "maximum": options.max_instances,
            "default": options.instances,
        }
        profile = {
            "name": "onnx-ops",
            "capacity": {key: str(value) for key, value in counts.items()},
            "rules": [
                _rule(target, "GreaterThan", options.cpu_percent, "Increase"),
                _rule(target, "LessThan", options.cpu_percent / 2, "Decrease"),
            ],
        }
        return {
            "location": workspace.get("location"),
            "tags": {OWNER: self._client.owner},
            "properties": {"enabled": True, "targetResourceUri": target, "profiles": [profile]},
        }

    @property
    def _settings_path(self) -> str:
        workspace = self._client.workspace
        group = f"/subscriptions/{workspace.subscription}/resourceGroups/{workspace.resource_group}"
        return f"{group}/providers/Microsoft.Insights/autoscaleSettings"

    def _setting_path(self, name: str) -> str:
        return (
            f"{self._settings_path}/{self._client.workspace.workspace}--{self._client.name}"
            f"--{name}?{_MONITOR_API}"
        )

    def _ask_monitor(self, path: str, method: str = "GET", document: object = None) -> Any:
        """Return the answer of Azure Monitor; None if the autoscale setting is missing."""
        where = f"autoscaling of {self._client.name}"
        return self._request(path, where, method, document, _MONITOR_REMEDY)

    def _request(
        self,
        path: str,
        where: str,
        method: str = "GET",
        document: object = None,
        role_remedy: str = "",
    ) -> Any:
        """Return the answer of Azure Resource Manager; None if the resource is missing."""

        def send() -> Any:
            return self._client.request(
                path,
                where=where,
                method=method,
                document=document,
                instances=self._options.instances,
                role_remedy=role_remedy,
            )

        return self._client.read(where, send)


def _limits(profile: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the part of an autoscale profile that is compared.

    These are the minimum and maximum of instances, and metric and threshold by direction.
    """
    capacity = profile.get("capacity", {})
    rules = {
        rule["scaleAction"]["direction"]: (
            rule["metricTrigger"]["metricName"],
            rule["metricTrigger"]["threshold"],
        )
        for rule in profile.get("rules", ())
    }
    return capacity.get("minimum"), capacity.get("maximum"), sorted(rules.items())


def _rule(target: str, operator: str, threshold: float, direction: str) -> dict[str, Any]:
    return {
        "metricTrigger": {
            "metricName": "CpuUtilizationPercentage",
            "metricResourceUri": target,
            "timeGrain": "PT1M",
            "statistic": "Average",
            "timeWindow": "PT5M",
            "timeAggregation": "Average",
            "operator": operator,
            "threshold": threshold,
        },
        "scaleAction": {
            "direction": direction,
            "type": "ChangeCount",
            "value": "1",
            "cooldown": "PT5M",
        },
    }
