"""SageMaker's control plane as a state machine of models, configs and endpoints.

By default, time is counted in reads: an update ends after a number of `DescribeEndpoint` calls, not
of seconds. Tests can therefore observe every state, and none depends on the machine's speed. With
`Behaviour.duration`, an update ends by the clock. The behaviour follows the service model and the
documentation.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.support.clouds.sagemaker_parts import (
    ACCOUNT,
    REGION,
    Behaviour,
    Endpoint,
    Fleet,
    Invalid,
    arn_of,
    check_config,
    page,
    retain,
    shown,
    variant_of,
)

if TYPE_CHECKING:
    from tests.support.clouds.sagemaker_moto import Moto

_BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
_SILENT = ("Creating", "Failed", "Deleting", "OutOfService")
"""Statuses in which an endpoint answers no requests."""


class Plane:
    """All operations by name.

    Each operation takes a validated request, and returns the answer of the service.
    """

    def __init__(self, around: Moto, clock: Callable[[], float]) -> None:
        self.behaviour = Behaviour()
        self.endpoints: dict[str, Endpoint] = {}
        self.lock = threading.RLock()
        self.updates: list[dict[str, Any]] = []
        """Every accepted UpdateEndpoint."""
        self._around = around
        self._clock = clock
        self._models: dict[str, dict[str, Any]] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        """Tags by ARN."""

    @property
    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the models by name."""
        return self._models

    @property
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the endpoint configs by name."""
        return self._configs

    def call(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """Perform an operation.

        Raises:
            Invalid: the service would refuse the request.
        """
        method = getattr(self, f"do_{operation}", None)
        if method is None:
            raise Invalid(f"the fake does not know {operation}", code="InternalFailure", status=500)
        with self.lock:
            answer: dict[str, Any] = method(request)
            return answer

    def do_CreateModel(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["ModelName"]
        if name in self._models:
            raise Invalid(f'Cannot create already existing model "{arn_of("model", name)}".')
        if not self._around.trusts(request["ExecutionRoleArn"]):
            raise Invalid(
                f"Could not assume role {request['ExecutionRoleArn']}. "
                "Please ensure that the role exists."
            )
        url = request["PrimaryContainer"].get("ModelDataUrl")
        if url is None:
            return self._keep(self._models, "model", "Model", name, request)
        if self._around.lacks(
            request["ExecutionRoleArn"], "s3:GetObject", f"arn:aws:s3:::{url.removeprefix('s3://')}"
        ):
            raise Invalid(
                f"Could not access model data at {url}. Please ensure that the role has permission."
            )
        if not self._around.has_object(url):
            raise Invalid(f"Could not find model data at {url}.")
        return self._keep(self._models, "model", "Model", name, request)

    def do_CreateEndpointConfig(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["EndpointConfigName"]
        if name in self._configs:
            raise Invalid(
                "Cannot create already existing endpoint configuration "
                f'"{arn_of("endpoint-config", name)}".'
            )
        check_config(request)
        capture = (
            request.get("DataCaptureConfig", {}).get("DestinationS3Uri", "").removeprefix("s3://")
        )
        for variant in request["ProductionVariants"] if capture else ():
            role = self._get(self._models, "model", variant["ModelName"])["ExecutionRoleArn"]
            if self._around.lacks(role, "s3:PutObject", f"arn:aws:s3:::{capture}/1.jsonl"):
                raise Invalid(f"Role {role} may not perform s3:PutObject in s3://{capture}.")
        for variant in request["ProductionVariants"]:
            if variant["ModelName"] not in self._models:
                raise Invalid(f'Could not find model "{arn_of("model", variant["ModelName"])}".')
        return self._keep(self._configs, "endpoint-config", "EndpointConfig", name, request)

    def do_DescribeModel(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return copy.deepcopy(self._get(self._models, "model", request["ModelName"]))

    def do_DescribeEndpointConfig(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return copy.deepcopy(
            self._get(self._configs, "endpoint configuration", request["EndpointConfigName"])
        )

    def do_DeleteModel(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self._get(self._models, "model", request["ModelName"])
        del self._models[request["ModelName"]]
        return {}

    def do_DeleteEndpointConfig(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self._get(self._configs, "endpoint configuration", request["EndpointConfigName"])
        del self._configs[request["EndpointConfigName"]]
        return {}

    def do_ListModels(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return page(self._models, "Models", ("ModelName", "ModelArn", "CreationTime"), request)

    def do_ListEndpointConfigs(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        keys = ("EndpointConfigName", "EndpointConfigArn", "CreationTime")
        return page(self._configs, "EndpointConfigs", keys, request)

    def do_ListTags(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        tags = self.tags.get(request["ResourceArn"], {})
        return {"Tags": [{"Key": key, "Value": value} for key, value in sorted(tags.items())]}

    def do_CreateEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["EndpointName"]
        if name in self.endpoints:
            raise Invalid(f'Cannot create already existing endpoint "{arn_of("endpoint", name)}".')
        if self.behaviour.quota:
            raise Invalid(self.behaviour.quota, code="ResourceLimitExceeded")
        fleet = self._fleet(request["EndpointConfigName"])
        now = self._clock()
        endpoint = Endpoint(
            name, fleet, "Creating", now, now, self.behaviour.reads, stale=self.behaviour.lag
        )
        self._set_end(endpoint)
        self.endpoints[name] = endpoint
        self._tag(arn_of("endpoint", name), request)
        return {"EndpointArn": arn_of("endpoint", name)}

    def do_DescribeEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = request["EndpointName"]
        endpoint = self._endpoint(name)
        self._pass(endpoint)
        if endpoint.stale > 0:
            endpoint.stale -= 1
            if endpoint.seen is None:
                raise Invalid(f'Could not find endpoint "{arn_of("endpoint", name)}".')
            return endpoint.seen
        if name not in self.endpoints:
            raise Invalid(f'Could not find endpoint "{arn_of("endpoint", name)}".')
        endpoint.seen = shown(endpoint)
        return endpoint.seen

    def do_UpdateEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        endpoint = self._resting(request["EndpointName"])
        new = self._fleet(request["EndpointConfigName"])
        if self.behaviour.quota:
            raise Invalid(self.behaviour.quota, code="ResourceLimitExceeded")
        if new.config == endpoint.fleet.config:
            raise Invalid(
                f"Endpoint {endpoint.name} is using the endpoint configuration {new.config} "
                "already."
            )
        self._check_guards(endpoint, new, request)
        self._check_alarms(endpoint, request)
        self._check_scaling(endpoint, new)
        if request.get("RetainAllVariantProperties"):
            excluded = [
                p["VariantPropertyType"]
                for p in request.get("ExcludeRetainedVariantProperties", ())
            ]
            retain(endpoint.fleet, new, excluded)
        endpoint.request = request
        self.updates.append(request)
        self._turn(endpoint, "Updating", self.behaviour.reads, pending=new)
        return {"EndpointArn": arn_of("endpoint", endpoint.name)}

    def do_UpdateEndpointWeightsAndCapacities(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        endpoint = self._resting(request["EndpointName"])
        if endpoint.status != "InService":
            raise Invalid(
                f'Cannot update endpoint "{arn_of("endpoint", endpoint.name)}" in status '
                f"{endpoint.status}."
            )
        variants = {variant.name: variant for variant in endpoint.fleet.production}
        for asked in request["DesiredWeightsAndCapacities"]:
            if asked["VariantName"] not in variants:
                raise Invalid(f"Variant {asked['VariantName']} does not exist.")
        for asked in request["DesiredWeightsAndCapacities"]:
            variant = variants[asked["VariantName"]]
            variant.desired_weight = asked.get("DesiredWeight", variant.desired_weight)
            variant.count = asked.get("DesiredInstanceCount", variant.count)
        self._turn(endpoint, "Updating", self.behaviour.reads)
        return {"EndpointArn": arn_of("endpoint", endpoint.name)}

    def do_DeleteEndpoint(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        endpoint = self._endpoint(request["EndpointName"])
        if endpoint.status in _BUSY:
            raise Invalid(
                f'Cannot update in-progress endpoint "{arn_of("endpoint", endpoint.name)}".'
            )
        self._turn(endpoint, "Deleting", self.behaviour.reads)
        return {}

    def serving(self, name: str) -> Fleet:
        """Return the fleet that answers now.

        Raises:
            Invalid: there is none.
        """
        with self.lock:
            self._elapse(name)
            endpoint = self.endpoints.get(name)
            if endpoint is None or endpoint.status in _SILENT:
                raise Invalid(
                    f"Endpoint {name} of account {ACCOUNT} not found.", code="ValidationError"
                )
            return copy.copy(endpoint.fleet)

    def bring_to(self, name: str, status: str, reads: int) -> None:
        """Set an endpoint's status, which ends after some reads if it is a passing one."""
        with self.lock:
            endpoint = self._endpoint(name)
            self._turn(endpoint, status, reads)
            endpoint.reason = "" if status in (*_BUSY, "InService") else "injected"

    def _pass(self, endpoint: Endpoint) -> None:
        """Count one read of an endpoint."""
        if endpoint.status not in _BUSY:
            return
        if self.behaviour.duration is not None:
            if self._clock() < endpoint.ends_at:
                return
            endpoint.left = 0
        if (
            endpoint.status == "Updating"
            and endpoint.pending is not None
            and (why := self._alarmed(endpoint))
        ):
            self._turn(endpoint, "RollingBack", 1)
            endpoint.reason = why
            return
        endpoint.left -= 1
        if endpoint.left <= 0:
            getattr(self, f"_after_{endpoint.status}")(endpoint)

    def _alarmed(self, endpoint: Endpoint) -> str:
        if self.behaviour.taken_back:
            return self.behaviour.taken_back
        policy = endpoint.request.get("DeploymentConfig", {}).get("AutoRollbackConfiguration", {})
        firing = self._around.firing([alarm["AlarmName"] for alarm in policy.get("Alarms", ())])
        return (
            f"One or more configured alarms are in the ALARM state: {', '.join(firing)}"
            if firing
            else ""
        )

    def _after_Creating(self, endpoint: Endpoint) -> None:  # noqa: N802
        try:
            self._start(endpoint.fleet)
        except Exception as error:
            endpoint.reason = str(error)
            self._turn(endpoint, "Failed", 0)
        else:
            self._turn(endpoint, "InService", 0)

    def _after_Updating(self, endpoint: Endpoint) -> None:  # noqa: N802
        if endpoint.pending is None:
            for variant in endpoint.fleet.production:
                variant.weight = variant.desired_weight
                self._around.resize(self._models[variant.model], variant)
            endpoint.reason = ""
            self._turn(endpoint, "InService", 0)
            return
        try:
            self._start(endpoint.pending)
        except Exception as error:
            endpoint.reason = str(error)
            self._turn(endpoint, "RollingBack", 1)
            return
        if self.behaviour.stuck:
            endpoint.reason = self.behaviour.stuck
            endpoint.pending = None
            self._turn(endpoint, "UpdateRollbackFailed", 0)
            return
        self._around.end(endpoint.fleet)
        endpoint.fleet, endpoint.pending, endpoint.reason = endpoint.pending, None, ""
        self._turn(endpoint, "InService", 0)

    def _after_RollingBack(self, endpoint: Endpoint) -> None:  # noqa: N802
        endpoint.pending = None
        self._turn(endpoint, "InService", 0)

    def _after_Deleting(self, endpoint: Endpoint) -> None:  # noqa: N802
        self._around.end(endpoint.fleet)
        del self.endpoints[endpoint.name]
        self.tags.pop(arn_of("endpoint", endpoint.name), None)

    def _turn(
        self, endpoint: Endpoint, status: str, reads: int, *, pending: Fleet | None = None
    ) -> None:
        endpoint.status, endpoint.left, endpoint.stale = status, reads, self.behaviour.lag
        endpoint.pending = pending or endpoint.pending
        endpoint.modified = self._clock()
        self._set_end(endpoint)

    def _set_end(self, endpoint: Endpoint) -> None:
        if self.behaviour.duration is not None:
            endpoint.ends_at = self._clock() + self.behaviour.duration()

    def _elapse(self, name: str) -> None:
        """End the change of an endpoint whose time is over."""
        if self.behaviour.duration is not None and name in self.endpoints:
            self._pass(self.endpoints[name])

    def _start(self, fleet: Fleet) -> None:
        for variant in fleet.production:
            model = self._get(self._models, "model", variant.model)
            try:
                variant.containers = self._around.start(model, variant.count)
            except Exception as error:
                raise Invalid(
                    f"The primary container for production variant {variant.name} {error}"
                ) from error

    def _fleet(self, config_name: str) -> Fleet:
        config = self._get(self._configs, "endpoint configuration", config_name)
        return Fleet(config_name, [variant_of(one) for one in config["ProductionVariants"]])

    def _check_guards(self, endpoint: Endpoint, new: Fleet, request: Mapping[str, Any]) -> None:
        guards = request.get("DeploymentConfig", {})
        if not guards:
            return
        if {v.name for v in endpoint.fleet.production} != {v.name for v in new.production}:
            raise Invalid(
                "Deployment guardrails need the same variant names in the old and the new "
                "configuration."
            )
        routing = guards.get("BlueGreenUpdatePolicy", {}).get("TrafficRoutingConfiguration", {})
        for key, low, high in (("CanarySize", 1, 50), ("LinearStepSize", 10, 50)):
            if key in routing and not low <= routing[key]["Value"] <= high:
                raise Invalid(f"{key} must be from {low} to {high} percent.")
        if (routing.get("Type") == "CANARY") != ("CanarySize" in routing):
            raise Invalid("CanarySize goes with CANARY.")

    def _check_alarms(self, endpoint: Endpoint, request: Mapping[str, Any]) -> None:
        """Check that SageMaker can read the alarms with the containers' role."""
        policy = request.get("DeploymentConfig", {}).get("AutoRollbackConfiguration", {})
        roles = {
            self._models[variant.model]["ExecutionRoleArn"] for variant in endpoint.fleet.production
        }
        for alarm in policy.get("Alarms", ()):
            arn = f"arn:aws:cloudwatch:{REGION}:{ACCOUNT}:alarm:{alarm['AlarmName']}"
            for role in roles:
                if self._around.lacks(role, "cloudwatch:DescribeAlarms", arn):
                    raise Invalid(
                        f"Role {role} may not perform cloudwatch:DescribeAlarms on {arn}."
                    )

    def _check_scaling(self, endpoint: Endpoint, new: Fleet) -> None:
        kept = {variant.name: variant.instance_type for variant in new.production}
        for variant in endpoint.fleet.production:
            resource = f"endpoint/{endpoint.name}/variant/{variant.name}"
            if kept.get(variant.name) != variant.instance_type and self._around.scaled(resource):
                raise Invalid(
                    f"The variant {variant.name} is registered with Application Auto Scaling: "
                    "deregister it."
                )

    def _resting(self, name: str) -> Endpoint:
        endpoint = self._endpoint(name)
        if endpoint.status in _BUSY:
            raise Invalid(f'Cannot update in-progress endpoint "{arn_of("endpoint", name)}".')
        refuses = endpoint.status == "OutOfService" and self.behaviour.refuses_updates
        if endpoint.status == "Failed" or refuses:
            raise Invalid(f'Cannot update failed endpoint "{arn_of("endpoint", name)}".')
        return endpoint

    def _endpoint(self, name: str) -> Endpoint:
        self._elapse(name)
        if name not in self.endpoints:
            raise Invalid(f'Could not find endpoint "{arn_of("endpoint", name)}".')
        return self.endpoints[name]

    def _keep(
        self,
        there: dict[str, dict[str, Any]],
        noun: str,
        kind: str,
        name: str,
        request: dict[str, Any],
    ) -> dict[str, Any]:
        arn = {f"{kind}Arn": arn_of(noun, name)}
        kept = {key: value for key, value in request.items() if key != "Tags"}
        there[name] = {**copy.deepcopy(kept), **arn, "CreationTime": self._clock()}
        self._tag(arn_of(noun, name), request)
        return arn

    def _tag(self, arn: str, request: Mapping[str, Any]) -> None:
        self.tags[arn] = {tag["Key"]: tag["Value"] for tag in request.get("Tags", ())}

    @staticmethod
    def _get(there: Mapping[str, dict[str, Any]], noun: str, name: str) -> dict[str, Any]:
        if name not in there:
            raise Invalid(
                f"Could not find {noun} "
                f'"{arn_of(noun.replace("uration", "").replace(" ", "-"), name)}".'
            )
        return there[name]
