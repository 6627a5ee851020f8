"""The instance counts of variants, where they follow the load (Application Auto Scaling)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_ops.adapters.aws import Clients, code_of, translated
from onnx_ops.adapters.endpoints.sagemaker_layout import Layout
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings

_DIMENSION = {"ServiceNamespace": "sagemaker", "ScalableDimension": "sagemaker:variant:DesiredInstanceCount"}
_POLICY = "onnx-ops-invocations"


class Scaling:
    """Targets and policies of one endpoint's variants. Where the settings say nothing of it, nothing is touched."""

    def __init__(self, clients: Clients, endpoint: str, settings: SageMakerSettings) -> None:
        self._clients = clients
        self._endpoint = endpoint
        self._settings = settings

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
                    TargetTrackingScalingPolicyConfiguration={
                        "TargetValue": float(self._settings.invocations_per_instance),
                        "PredefinedMetricSpecification": {
                            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
                        },
                    },
                )

    def let_go(self, variants: list[str]) -> None:
        """No longer scale these variants."""
        if self._settings.scaled:
            for variant in variants:
                self._deregister(variant)

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
