"""The services beside SageMaker, and what moto's versions of them lack.

They are S3, IAM, CloudWatch and Application Auto Scaling.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from tests.support.clouds.containers import Answer, ContainerPool, Containers, NotReadyError
from tests.support.clouds.iam import ROLE, Request, container, is_allowed
from tests.support.clouds.sagemaker_parts import ACCOUNT, REGION, Fleet, Variant
from tests.support.must import must

_NAMESPACE = "AWS/SageMaker"
_PRINCIPAL = "sagemaker.amazonaws.com"


class Moto:
    """The other services, and the containers."""

    def __init__(self, containers: Containers, clock: Callable[[], float]) -> None:
        self._containers = containers
        self._clock = clock
        teach_percentiles()

    def has_object(self, url: str) -> bool:
        return self._object(url) is not None

    def trusts(self, role: str) -> bool:
        """Return whether SageMaker may assume a role."""
        from moto.backends import get_backend

        roles = get_backend("iam")[ACCOUNT]["aws"].roles.values()
        return any(
            r.arn == role and _PRINCIPAL in json.dumps(r.assume_role_policy_document) for r in roles
        )

    def lacks(self, role: str, action: str, resource: str) -> bool:
        """Return whether the containers' role lacks a permission that SageMaker uses."""
        return role == ROLE and not is_allowed(container(), Request(action, resource))

    def firing(self, alarms: list[str]) -> list[str]:
        from moto.backends import get_backend

        known = get_backend("cloudwatch")[ACCOUNT][REGION].alarms
        return [name for name in alarms if name in known and known[name].state_value == "ALARM"]

    def scaled(self, resource: str) -> bool:
        from moto.backends import get_backend

        targets = get_backend("applicationautoscaling")[ACCOUNT][REGION].targets
        return any(resource in by_resource for by_resource in targets.values())

    def start(self, model: Mapping[str, Any], count: int) -> ContainerPool:
        """Start the containers of a model.

        Raises:
            NotReadyError: a container does not start; the error has SageMaker's message.
        """
        described = model["PrimaryContainer"]
        url = described.get("ModelDataUrl")
        try:
            return self._containers.start(
                {} if url is None else self._unpack(url), _variables(described), count
            )
        except NotReadyError as error:
            checked = (
                "did not pass the ping health check. Please check CloudWatch logs for this "
                "endpoint."
            )
            raise NotReadyError(f"{checked} {error}") from error

    def resize(self, model: Mapping[str, Any], variant: Variant) -> None:
        """Start or end followers until the variant has its number of instances."""
        described = model["PrimaryContainer"]
        self._containers.resize(must(variant.containers), _variables(described), variant.count)

    def end(self, fleet: Fleet) -> None:
        """End the followers of a fleet."""
        for variant in fleet.production:
            if variant.containers is not None:
                self._containers.end(variant.containers)

    def _unpack(self, url: str) -> dict[str, bytes]:
        archive = self._object(url)
        if archive is None:
            raise NotReadyError("could not download its model data.")
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
                streams = {member.name: packed.extractfile(member) for member in packed}
                return {
                    name: stream.read() for name, stream in streams.items() if stream is not None
                }
        except (tarfile.TarError, OSError, EOFError) as error:
            raise NotReadyError("Failed to extract model data archive from URL.") from error

    def count(self, endpoint: str, variant: str, answer: Answer) -> None:
        """Record the metrics that SageMaker reports to CloudWatch for one invocation."""
        from moto.backends import get_backend

        figures = {
            "Invocations": 1.0,
            "Invocation4XXErrors": float(400 <= answer.status < 500),
            "Invocation5XXErrors": float(answer.status >= 500),
            "ModelLatency": answer.seconds * 1e6,
        }
        dimensions = [
            {"Name": "EndpointName", "Value": endpoint},
            {"Name": "VariantName", "Value": variant},
        ]
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


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    return {**container.get("Environment", {}), "ONNX_OPS_SERVE_WORKERS": "1"}


def teach_percentiles() -> None:
    """Add percentiles to moto, which has only sums and averages.

    `p50` and the like are the value at that rank, nearly as in CloudWatch.
    """
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


def policy_question(environ: dict[str, Any]) -> list[Request] | None:
    """Return the actions and resources of a SimulatePrincipalPolicy request.

    Their contexts name the role. None for another request.
    """
    if environ.get("PATH_INFO") != "/" or environ.get("HTTP_X_AMZ_TARGET"):
        return None
    asked = parse_qs(environ["wsgi.input"].getvalue().decode("utf-8", "replace"))
    if asked.get("Action") != ["SimulatePrincipalPolicy"]:
        return None
    resources = [values[0] for name, values in asked.items() if name.startswith("ResourceArns.")]
    actions = [
        values[0] for name, values in sorted(asked.items()) if name.startswith("ActionNames.")
    ]
    about = {"role": asked["PolicySourceArn"][0]}
    return [Request(action, resource, about) for resource in resources for action in actions]


def policy_answer(asked: Sequence[Request], denied: Sequence[str]) -> bytes:
    """Return the answer to SimulatePrincipalPolicy.

    The containers' role has the permissions of `infra/aws`; other roles have all. Actions in
    `denied` are denied to every role.
    """

    def decision(request: Request) -> str:
        able = request.context["role"] != ROLE or is_allowed(container(), request)
        return "allowed" if request.action not in denied and able else "implicitDeny"

    rows = "".join(
        f"<member><EvalActionName>{request.action}</EvalActionName>"
        f"<EvalDecision>{decision(request)}</EvalDecision></member>"
        for request in asked
    )
    return (
        '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
        f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{rows}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata>"
        "</SimulatePrincipalPolicyResponse>"
    ).encode()
