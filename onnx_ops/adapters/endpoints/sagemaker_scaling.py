"""Instance counts of variants: fixed, or set by Application Auto Scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx_ops.adapters.endpoints.sagemaker_client import SageMakerClient
from onnx_ops.adapters.endpoints.sagemaker_layout import EndpointLayout
from onnx_ops.adapters.endpoints.sagemaker_options import SageMakerOptions
from onnx_ops.errors import RefusedError

_DIMENSION = {
    "ServiceNamespace": "sagemaker",
    "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
}
_POLICY = "onnx-ops-invocations"
_UNREGISTERED = ("ObjectNotFoundException", "ValidationException")


def find_instance_drift(description: Mapping[str, Any], options: SageMakerOptions) -> Iterator[str]:
    """Yield how the desired instance counts of variants differ from the options."""
    for variant in description.get("ProductionVariants", ()):
        count = variant.get("DesiredInstanceCount")
        if count is not None and count != options.instance_count:
            yield f"instances of {variant['VariantName']}: {count}, not {options.instance_count}"


class VariantScaling:
    """Scalable targets and policies of one endpoint's variants.

    If the options do not scale variants, the targets that other clients registered are kept. The
    instance counts that other clients set are then kept too.
    """

    def __init__(self, client: SageMakerClient) -> None:
        self._client = client
        self._options = client.options

    def drift(self, description: Mapping[str, Any], *, was_scaled: bool) -> Iterator[str]:
        """Yield how instance counts and autoscaling differ from the options.

        Args:
            description: SageMaker's description of the endpoint.
            was_scaled: whether policies of onnx-ops can exist though the options do not scale.
        """
        options, names = self._options, _variant_names(description)
        counts = list(find_instance_drift(description, options))
        if not (options.scaled or was_scaled or counts):
            return  # Autoscaling is read only if it can cause or explain a difference.
        targets = {} if options.serverless else self._targets(names)
        policies = {name: self._policy(name) for name in targets}
        desired = "none"
        if options.scaled:
            limits = {"MinCapacity": options.min_instances, "MaxCapacity": options.max_instances}
            desired = _describe(limits, self._tracking())
        for name in names if options.scaled else targets:
            actual = _describe(targets.get(name), policies.get(name))
            if (options.scaled or policies.get(name) is not None) and actual != desired:
                yield f"autoscaling of {name}: {actual}, not {desired}"
        if not options.scaled and not any(policies[name] is None for name in targets):
            yield from counts

    def is_foreign(self, description: Mapping[str, Any]) -> bool:
        """Return whether a variant has a scalable target without onnx-ops' policy.

        Another client has then registered the target. The result is False if the options scale the
        variants.
        """
        if self._options.scaled:
            return False
        return any(
            self._policy(name) is None for name in self._targets(_variant_names(description))
        )

    def apply(self, layout: EndpointLayout) -> None:
        """Apply the autoscaling of the options, if any, to every production variant."""
        if not self._options.scaled:
            return
        for variant in layout.config["ProductionVariants"]:
            target = self._resource(variant["VariantName"])
            self._call(
                "register_scalable_target",
                **target,
                MinCapacity=self._options.min_instances,
                MaxCapacity=self._options.max_instances,
            )
            self._call(
                "put_scaling_policy",
                **target,
                PolicyName=_POLICY,
                PolicyType="TargetTrackingScaling",
                TargetTrackingScalingPolicyConfiguration=self._tracking(),
            )

    def remove(self, description: Mapping[str, Any]) -> None:
        """Stop scaling the variants of an endpoint that is being removed."""
        if self._options.scaled:
            for name in _variant_names(description):
                self._deregister(name)
        else:
            self.remove_outdated(description)

    def remove_outdated(self, description: Mapping[str, Any]) -> None:
        """Stop scaling variants that only the previous options scaled."""
        for name in () if self._options.scaled else self._targets(_variant_names(description)):
            if self._policy(name) is not None:
                self._deregister(name)

    def pause(self, description: Mapping[str, Any], layout: EndpointLayout) -> None:
        """Stop scaling variants that are removed or get a new instance type.

        SageMaker refuses to change the type of a scaled variant. Nothing is done unless the options
        scale variants.
        """
        if not self._options.scaled:
            return
        config = self._client.describe_config(description["EndpointConfigName"])
        types = {
            v["VariantName"]: v.get("InstanceType") for v in layout.config["ProductionVariants"]
        }
        for variant in config["ProductionVariants"]:
            if types.get(variant["VariantName"], "") != variant.get("InstanceType"):
                self._deregister(variant["VariantName"])

    def _tracking(self) -> dict[str, Any]:
        metric = {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"}
        target = float(self._options.invocations_per_instance)
        return {"TargetValue": target, "PredefinedMetricSpecification": metric}

    def _targets(self, variants: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Return the scalable targets by variant.

        The permission to read targets is required only if the options scale variants. Otherwise,
        the result is empty without it.
        """
        resources = {self._resource(name)["ResourceId"]: name for name in variants}
        if not resources:
            return {}
        try:
            answer = self._call(
                "describe_scalable_targets", **_DIMENSION, ResourceIds=list(resources)
            )
        except RefusedError:
            if self._options.scaled:
                raise
            return {}
        return {resources[target["ResourceId"]]: target for target in answer["ScalableTargets"]}

    def _policy(self, variant: str) -> Mapping[str, Any] | None:
        """Return the target tracking of onnx-ops' policy of a variant; None without it."""
        answer = self._call(
            "describe_scaling_policies", **self._resource(variant), PolicyNames=[_POLICY]
        )
        policies = [
            policy["TargetTrackingScalingPolicyConfiguration"]
            for policy in answer["ScalingPolicies"]
        ]
        return policies[0] if policies else None

    def _deregister(self, variant: str) -> None:
        """Deregister a variant's target; AWS also deletes policies of other clients."""
        self._call(
            "deregister_scalable_target", ignored_codes=_UNREGISTERED, **self._resource(variant)
        )

    def _call(self, operation: str, **request: Any) -> Any:
        return self._client.call("application-autoscaling", operation, **request)

    def _resource(self, variant: str) -> dict[str, str]:
        return {**_DIMENSION, "ResourceId": f"endpoint/{self._client.endpoint}/variant/{variant}"}


def _variant_names(description: Mapping[str, Any]) -> list[str]:
    return [variant["VariantName"] for variant in description.get("ProductionVariants", ())]


def _describe(target: Mapping[str, Any] | None, policy: Mapping[str, Any] | None) -> str:
    if target is None:
        return "none"
    tracked = (
        "without a scaling policy"
        if policy is None
        else f"at {policy['TargetValue']:g} invocations per instance and minute"
    )
    return f"{target['MinCapacity']} to {target['MaxCapacity']} instances {tracked}"
