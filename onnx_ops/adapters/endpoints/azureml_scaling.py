"""How many instances a deployment in Azure has: as many as the settings say, or as Azure Monitor finds right.

Each scaled deployment has an autoscale setting of Azure Monitor. A tag of the deployment says so, so that others are
not asked for theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onnx_ops.adapters.azure import ask
from onnx_ops.adapters.endpoints.azureml_client import AzureClient
from onnx_ops.adapters.endpoints.azureml_errors import Busy
from onnx_ops.adapters.endpoints.azureml_plan import NOT_SCALED, OWNER, SCALING
from onnx_ops.adapters.endpoints.azureml_settings import AzureSettings
from onnx_ops.errors import RefusedError, ServiceUnavailableError

if TYPE_CHECKING:
    from azure.ai.ml.entities import ManagedOnlineDeployment

_API = "api-version=2024-04-01"
_MONITOR = "api-version=2022-10-01"
_METRIC = "CpuUtilizationPercentage"
_REMEDY = "Give the identity the role Monitoring Contributor on the resource group; see docs/azureml.md."


class Scaling:
    """Of the deployments of one endpoint.

    Args:
        name: the endpoint's name in Azure.
        owner: its name here.
    """

    def __init__(self, client: AzureClient, settings: AzureSettings, name: str, owner: str) -> None:
        self._client = client
        self._settings = settings
        self._name = name
        self._owner = owner

    @property
    def tag(self) -> str:
        """What a deployment's tag says of these settings."""
        settings = self._settings
        if not settings.scaled:
            return NOT_SCALED
        return f"{settings.min_instances} to {settings.max_instances} instances at {settings.cpu_percent}% CPU"

    def drift(self, found: ManagedOnlineDeployment) -> Iterator[str]:
        """How the instances of a deployment differ from the settings. Counts that others scale are theirs."""
        there = (found.tags or {}).get(SCALING, NOT_SCALED)
        if there == self.tag and self._settings.scaled and (monitor := self._monitored(found.name)) is not None:
            there = monitor
        if there != self.tag:
            yield f"autoscaling of {found.name}: {there}, not {self.tag}"
        elif self._miscounted(found):
            yield f"instances of {found.name}: {found.instance_count}, not {self._settings.instances}"

    def follow(self, found: ManagedOnlineDeployment) -> bool:
        """Bring a deployment to the settings; whether it was there already. A setting of Azure Monitor is never
        without its tag."""
        there = (found.tags or {}).get(SCALING, NOT_SCALED)
        if there == self.tag and not self._miscounted(found):
            if self._settings.scaled and self._monitored(found.name) is not None:
                self._ask(self._setting(found.name), method="PUT", document=self._document(found.name))
            return True
        if not self._settings.scaled:
            self.let_go(found)
        document: dict[str, Any] = {"tags": {**(found.tags or {}), SCALING: self.tag}}
        if not self._settings.scaled:
            document["sku"] = {"name": "Default", "capacity": self._settings.instances}
        self._ask(f"{self._deployment(found.name)}?{_API}", method="PATCH", document=document)
        return False

    def let_go(self, found: ManagedOnlineDeployment) -> None:
        """Remove what scales a deployment."""
        if (found.tags or {}).get(SCALING, NOT_SCALED) != NOT_SCALED:
            self._ask(self._setting(found.name), method="DELETE")

    def _miscounted(self, found: ManagedOnlineDeployment) -> bool:
        if self._settings.scaled or found.instance_count == self._settings.instances:
            return False
        return not self._by_others(found.name)

    def _by_others(self, name: str) -> bool:
        """Whether somebody made an autoscale setting for this deployment."""
        try:
            listed = self._ask(f"{self._group}?{_MONITOR}")
        except RefusedError:  # who does not use autoscaling needs no permission to look at it
            return False
        targets = (one["properties"].get("targetResourceUri", "") for one in (listed or {}).get("value", ()))
        return self._deployment(name).lower() in map(str.lower, targets)

    def _monitored(self, name: str) -> str | None:
        """How the setting in Azure Monitor differs from ours; None if it does not."""
        found = self._ask(self._setting(name))
        if found is None:
            return NOT_SCALED
        wanted = self._document(name)["properties"]
        profiles = found["properties"].get("profiles") or [{}]
        there = (found["properties"].get("enabled"), *_limits(profiles[0]))
        if len(profiles) == 1 and there == (True, *_limits(wanted["profiles"][0])):
            return None
        capacity = profiles[0].get("capacity", {})
        return f"{capacity.get('minimum')} to {capacity.get('maximum')} instances by other rules"

    def _document(self, name: str) -> dict[str, Any]:
        settings, target = self._settings, self._deployment(name)
        place: Any = self._ask(f"{self._client.place.path}?{_API}") or {}
        counts = {"minimum": settings.min_instances, "maximum": settings.max_instances, "default": settings.instances}
        profile = {
            "name": "onnx-ops",
            "capacity": {key: str(value) for key, value in counts.items()},
            "rules": [
                _rule(target, "GreaterThan", settings.cpu_percent, "Increase"),
                _rule(target, "LessThan", settings.cpu_percent / 2, "Decrease"),
            ],
        }
        return {
            "location": place.get("location"),
            "tags": {OWNER: self._owner},
            "properties": {"enabled": True, "targetResourceUri": target, "profiles": [profile]},
        }

    @property
    def _group(self) -> str:
        place = self._client.place
        group = f"/subscriptions/{place.subscription}/resourceGroups/{place.resource_group}"
        return f"{group}/providers/Microsoft.Insights/autoscaleSettings"

    def _setting(self, name: str) -> str:
        return f"{self._group}/{self._client.place.workspace}--{self._name}--{name}?{_MONITOR}"

    def _deployment(self, name: str) -> str:
        return f"{self._client.place.path}/onlineEndpoints/{self._name}/deployments/{name}"

    def _ask(self, path: str, *, method: str = "GET", document: object = None) -> Any:
        """What Azure Resource Manager answers; None if it is not there.

        Raises:
            Busy: something else changes it.
            RefusedError: it does not let us.
            ServiceUnavailableError: it does not answer.
        """
        last = ServiceUnavailableError("Azure does not answer", where=self._owner)
        for _ in self._client.pace.tries(self._client.pace.answers):
            try:
                return ask(path, method=method, document=document)
            except ServiceUnavailableError as error:
                last = error
            except RefusedError as error:
                if error.why.startswith("HTTP 404"):
                    return None
                if error.why.startswith("HTTP 409"):
                    raise Busy("Azure is busy with it", where=self._owner, why=error.why) from error
                what = "Azure does not let us scale a deployment"
                raise RefusedError(what, where=self._owner, why=error.why, remedy=_REMEDY) from error
        raise last


def _limits(profile: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a profile counts: capacities, and thresholds in the order of their directions."""
    capacity = profile.get("capacity", {})
    rules = {
        rule["scaleAction"]["direction"]: (rule["metricTrigger"]["metricName"], rule["metricTrigger"]["threshold"])
        for rule in profile.get("rules", ())
    }
    return capacity.get("minimum"), capacity.get("maximum"), sorted(rules.items())


def _rule(target: str, operator: str, threshold: float, direction: str) -> dict[str, Any]:
    return {
        "metricTrigger": {
            "metricName": _METRIC,
            "metricResourceUri": target,
            "timeGrain": "PT1M",
            "statistic": "Average",
            "timeWindow": "PT5M",
            "timeAggregation": "Average",
            "operator": operator,
            "threshold": threshold,
        },
        "scaleAction": {"direction": direction, "type": "ChangeCount", "value": "1", "cooldown": "PT5M"},
    }
