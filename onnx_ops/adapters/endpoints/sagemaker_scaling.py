"""The instance counts of variants, where they follow the load (Application Auto Scaling)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx_ops.adapters.aws import Clients, code_of, translated
from onnx_ops.adapters.endpoints.sagemaker_drift import instance_drift
from onnx_ops.adapters.endpoints.sagemaker_layout import Layout
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings
from onnx_ops.errors import RefusedError

_NAMESPACE = {"ServiceNamespace": "sagemaker"}
_DIMENSION = {**_NAMESPACE, "ScalableDimension": "sagemaker:variant:DesiredInstanceCount"}
_POLICY = "onnx-ops-invocations"


class Scaling:
    """Targets and policies of one endpoint's variants. What others have made is left alone, and so are the instance
    counts that it sets."""

    def __init__(self, clients: Clients, endpoint: str, settings: SageMakerSettings) -> None:
        self._clients = clients
        self._endpoint = endpoint
        self._settings = settings

    def drift(self, found: Mapping[str, Any]) -> Iterator[str]:
        """How instance counts and autoscaling of an endpoint's production variants differ from the settings. Counts
        that others scale are theirs."""
        settings, names = self._settings, _names(found)
        targets = {} if settings.serverless else self._targets(names)
        policies = {name: self._policy(name) for name in targets}
        for name in names if settings.scaled else targets:
            target, policy = targets.get(name), policies.get(name)
            wanted = {"MinCapacity": settings.min_instances, "MaxCapacity": settings.max_instances}
            asked = _told(wanted, self._tracking()) if settings.scaled else "none"
            if (settings.scaled or policy is not None) and _told(target, policy) != asked:
                yield f"autoscaling of {name}: {_told(target, policy)}, not {asked}"
        if not settings.scaled and not any(policies[name] is None for name in targets):
            yield from instance_drift(found, settings)

    def by_others(self, found: Mapping[str, Any]) -> bool:
        """Whether something else scales a variant, although the settings do not."""
        if self._settings.scaled:
            return False
        return any(self._policy(name) is None for name in self._targets(_names(found)))

    def release(self, found: Mapping[str, Any]) -> None:
        """Let go of what the settings had scaled and scale no longer."""
        for name in () if self._settings.scaled else self._targets(_names(found)):
            if self._policy(name) is not None:
                self._deregister(name)

    def step_aside(self, found: Mapping[str, Any], layout: Layout) -> None:
        """Let go of variants that go, or get other instances: SageMaker refuses to change those that are scaled."""
        if not self._settings.scaled:
            return
        with translated(self._endpoint):
            config = self._clients("sagemaker").describe_endpoint_config(EndpointConfigName=found["EndpointConfigName"])
        kept = {v["VariantName"]: v.get("InstanceType") for v in layout.config["ProductionVariants"]}
        for variant in config["ProductionVariants"]:
            if kept.get(variant["VariantName"], "") != variant.get("InstanceType"):
                self._deregister(variant["VariantName"])

    def follow(self, layout: Layout) -> None:
        """Scale every production variant; doing it again changes nothing."""
        if not self._settings.scaled:
            return
        scaling = self._clients("application-autoscaling")
        with translated(self._endpoint):
            for variant in layout.config["ProductionVariants"]:
                named = {**_DIMENSION, "ResourceId": self._resource(variant["VariantName"])}
                scaling.register_scalable_target(
                    **named, MinCapacity=self._settings.min_instances, MaxCapacity=self._settings.max_instances
                )
                scaling.put_scaling_policy(
                    **named,
                    PolicyName=_POLICY,
                    PolicyType="TargetTrackingScaling",
                    TargetTrackingScalingPolicyConfiguration=self._tracking(),
                )

    def let_go(self, found: Mapping[str, Any]) -> None:
        """No longer scale an endpoint that ends."""
        if self._settings.scaled:
            for variant in _names(found):
                self._deregister(variant)
        else:
            self.release(found)

    def _tracking(self) -> dict[str, Any]:
        metric = {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"}
        target = float(self._settings.invocations_per_instance)
        return {"TargetValue": target, "PredefinedMetricSpecification": metric}

    def _targets(self, variants: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """What is scaled, by variant. Who does not use autoscaling needs no permission to look at it."""
        resources = {self._resource(name): name for name in variants}
        if not resources:
            return {}
        try:
            with translated(self._endpoint):
                scaling = self._clients("application-autoscaling")
                found = scaling.describe_scalable_targets(**_DIMENSION, ResourceIds=list(resources))
        except RefusedError:
            if self._settings.scaled:
                raise
            return {}
        return {resources[one["ResourceId"]]: one for one in found["ScalableTargets"]}

    def _policy(self, variant: str) -> Mapping[str, Any] | None:
        """What our policy of a variant tracks."""
        with translated(self._endpoint):
            found = self._clients("application-autoscaling").describe_scaling_policies(
                **_DIMENSION, ResourceId=self._resource(variant), PolicyNames=[_POLICY]
            )
        policies = found["ScalingPolicies"]
        tracking: Mapping[str, Any] | None = (
            policies[0]["TargetTrackingScalingPolicyConfiguration"] if policies else None
        )
        return tracking

    def _deregister(self, variant: str) -> None:
        from botocore.exceptions import ClientError

        with translated(self._endpoint):
            try:
                self._clients("application-autoscaling").deregister_scalable_target(
                    **_DIMENSION, ResourceId=self._resource(variant)
                )
            except ClientError as error:
                if code_of(error) not in ("ObjectNotFoundException", "ValidationException"):
                    raise

    def _resource(self, variant: str) -> str:
        return f"endpoint/{self._endpoint}/variant/{variant}"


def _names(found: Mapping[str, Any]) -> list[str]:
    return [variant["VariantName"] for variant in found.get("ProductionVariants", ())]


def _told(target: Mapping[str, Any] | None, policy: Mapping[str, Any] | None) -> str:
    if target is None:
        return "none"
    tracked = "nothing" if policy is None else f"{policy['TargetValue']:g} invocations a minute"
    return f"{target['MinCapacity']} to {target['MaxCapacity']} instances by {tracked}"
