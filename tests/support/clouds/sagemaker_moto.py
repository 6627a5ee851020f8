"""The services beside SageMaker: moto's S3, IAM, CloudWatch and Application Auto Scaling, in the fake's process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.support.clouds.iam import ROLE, Request, container, is_allowed
from tests.support.clouds.sagemaker_containers import Answer, Container, Containers, NotReadyError
from tests.support.clouds.sagemaker_parts import ACCOUNT, REGION

_NAMESPACE = "AWS/SageMaker"
_PRINCIPAL = "sagemaker.amazonaws.com"


class Moto:
    """Fulfils `sagemaker_parts.Surroundings`."""

    def __init__(self, containers: Containers, clock: Callable[[], float]) -> None:
        self._containers = containers
        self._clock = clock
        teach_percentiles()

    def has_object(self, url: str) -> bool:
        return self._object(url) is not None

    def trusts(self, role: str) -> bool:
        """Whether SageMaker may assume it."""
        from moto.backends import get_backend

        roles = get_backend("iam")[ACCOUNT]["aws"].roles.values()
        return any(r.arn == role and _PRINCIPAL in json.dumps(r.assume_role_policy_document) for r in roles)

    def lacks(self, role: str, action: str, resource: str) -> bool:
        return role == ROLE and not is_allowed(container(), Request(action, resource))

    def firing(self, alarms: list[str]) -> list[str]:
        from moto.backends import get_backend

        known = get_backend("cloudwatch")[ACCOUNT][REGION].alarms
        return [name for name in alarms if name in known and known[name].state_value == "ALARM"]

    def scaled(self, resource: str) -> bool:
        from moto.backends import get_backend

        targets = get_backend("applicationautoscaling")[ACCOUNT][REGION].targets
        return any(resource in by_resource for by_resource in targets.values())

    def start(self, model: Mapping[str, Any]) -> Container:
        container = model["PrimaryContainer"]
        archive = self._object(container["ModelDataUrl"])
        if archive is None:
            raise NotReadyError("could not download its model data.")
        return self._containers.start(archive, container.get("Environment", {}))

    def count(self, endpoint: str, variant: str, answer: Answer) -> None:
        """What SageMaker tells CloudWatch of one invocation."""
        from moto.backends import get_backend

        figures = {
            "Invocations": 1.0,
            "Invocation4XXErrors": float(400 <= answer.status < 500),
            "Invocation5XXErrors": float(answer.status >= 500),
            "ModelLatency": answer.seconds * 1e6,
        }
        dimensions = [{"Name": "EndpointName", "Value": endpoint}, {"Name": "VariantName", "Value": variant}]
        at = datetime.fromtimestamp(self._clock(), UTC).replace(tzinfo=None)
        data = [
            {"MetricName": name, "Value": value, "Dimensions": dimensions, "Timestamp": at}
            for name, value in figures.items()
        ]
        get_backend("cloudwatch")[ACCOUNT][REGION].put_metric_data(_NAMESPACE, data)

    @staticmethod
    def _object(url: str) -> bytes | None:
        from moto.backends import get_backend

        bucket, _, key = url.removeprefix("s3://").partition("/")
        s3 = get_backend("s3")[ACCOUNT]["aws"]
        if bucket not in s3.buckets or (found := s3.get_object(bucket, key)) is None:
            return None
        value: bytes = found.value
        return value


def teach_percentiles() -> None:
    """moto has sums and averages only; `p50` and the like are the value at that rank (as CloudWatch's, nearly)."""
    from moto.cloudwatch.models import Statistics

    plain = Statistics.get_statistics_for_type

    def with_percentiles(self: Any, stat: str) -> Any:
        if not stat.startswith("p"):
            return plain(self, stat)
        values = sorted(self.metric_single_values_list)
        rank = math.ceil(float(stat[1:]) / 100 * len(values))
        return values[max(rank, 1) - 1] if values else None

    if plain.__name__ != with_percentiles.__name__:
        Statistics.get_statistics_for_type = with_percentiles  # type: ignore[method-assign]
