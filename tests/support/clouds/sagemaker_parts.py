"""Parts of the fake control plane.

They are variants, fleets, endpoints, and their descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.clouds.containers import ContainerPool

ACCOUNT, REGION = "123456789012", "us-east-1"
CALLER = "AKIACALLER"
"""Access key of a client with the role that runs onnx-ops."""
CONTAINER = "AKIACONTAINER"
"""Access key of the containers, with their role.

Every other key than these two has all permissions.
"""


class Invalid(Exception):
    """An error of the service: a ValidationException, or another one by its code."""

    def __init__(
        self, message: str, *, code: str = "ValidationException", status: int = 400
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(slots=True)
class Variant:
    name: str
    model: str
    weight: float
    desired_weight: float
    count: int
    instance_type: str | None
    serverless: dict[str, Any] | None
    containers: ContainerPool | None = None


@dataclass(slots=True)
class Fleet:
    config: str
    production: list[Variant]


@dataclass(slots=True)
class Endpoint:
    """An endpoint of the fake.

    `left` counts the reads until the present status ends. The next `stale` reads show `seen`, the
    previous state.
    """

    name: str
    fleet: Fleet
    status: str
    created: float
    modified: float
    left: int
    pending: Fleet | None = None
    request: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    seen: dict[str, Any] | None = None
    stale: int = 0
    ends_at: float = 0.0
    """When the present status ends, where `Behaviour.duration` counts time."""


@dataclass(slots=True)
class Behaviour:
    """Behaviour of the control plane that tests can set.

    Args:
        reads: reads until a change ends.
        duration: returns the seconds until a change ends. If it is set, reads are not counted.
        lag: reads that still show the previous state.
        taken_back: if set, the next updates are rolled back with this text as reason.
        stuck: if set, the next updates end as UpdateRollbackFailed with this text as reason.
        quota: if set, new instances are refused with this text.
        refuses_updates: whether an endpoint out of service can only be deleted.
        denied: actions that SimulatePrincipalPolicy denies to every role.
        limits: limits of Service Quotas by instance type.
    """

    reads: int = 2
    duration: Callable[[], float] | None = None
    lag: int = 0
    taken_back: str = ""
    stuck: str = ""
    quota: str = ""
    refuses_updates: bool = False
    denied: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=lambda: {"ml.c6i.large": 4.0})


def check_config(request: Mapping[str, Any]) -> None:
    """Check the rules for an endpoint config that the service model does not contain."""
    production = request["ProductionVariants"]
    names = [variant["VariantName"] for variant in production]
    if len(set(names)) != len(names):
        raise Invalid("Variant names must be unique.")
    serverless = [variant for variant in production if "ServerlessConfig" in variant]
    if serverless and len(names) > 1:
        raise Invalid("A serverless endpoint has one variant.")
    if serverless and ("DataCaptureConfig" in request or "InstanceType" in serverless[0]):
        raise Invalid("A serverless endpoint has neither instances nor data capture.")
    if any(
        "ServerlessConfig" not in v and not {"InstanceType", "InitialInstanceCount"} <= set(v)
        for v in production
    ):
        raise Invalid("A variant needs an instance type and count, or a serverless config.")


def shown(endpoint: Endpoint) -> dict[str, Any]:
    """Return the answer of DescribeEndpoint."""
    answer: dict[str, Any] = {
        "EndpointName": endpoint.name,
        "EndpointArn": arn_of("endpoint", endpoint.name),
        "EndpointConfigName": endpoint.fleet.config,
        "EndpointStatus": endpoint.status,
        "CreationTime": endpoint.created,
        "LastModifiedTime": endpoint.modified,
    }
    if endpoint.status not in ("Creating", "Failed"):
        answer["ProductionVariants"] = [_summary(variant) for variant in endpoint.fleet.production]
    if endpoint.reason:
        answer["FailureReason"] = endpoint.reason[:1024]
    if endpoint.pending is not None and endpoint.status == "Updating":
        answer["PendingDeploymentSummary"] = {"EndpointConfigName": endpoint.pending.config}
    return answer


def variant_of(one: Mapping[str, Any]) -> Variant:
    weight = float(one.get("InitialVariantWeight", 1.0))
    return Variant(
        name=one["VariantName"],
        model=one["ModelName"],
        weight=weight,
        desired_weight=weight,
        count=one.get("InitialInstanceCount", 0),
        instance_type=one.get("InstanceType"),
        serverless=one.get("ServerlessConfig"),
    )


def _summary(variant: Variant) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "VariantName": variant.name,
        "CurrentWeight": variant.weight,
        "DesiredWeight": variant.desired_weight,
    }
    if variant.serverless is not None:
        return {**summary, "CurrentServerlessConfig": variant.serverless}
    return {**summary, "CurrentInstanceCount": variant.count, "DesiredInstanceCount": variant.count}


def retain(old: Fleet, new: Fleet, but: list[str]) -> None:
    before = {variant.name: variant for variant in old.production}
    for variant in new.production:
        if (kept := before.get(variant.name)) is not None:
            if "DesiredInstanceCount" not in but:
                variant.count = kept.count
            if "DesiredWeight" not in but:
                variant.weight = variant.desired_weight = kept.weight


def page(
    there: Mapping[str, dict[str, Any]],
    key: str,
    fields: tuple[str, ...],
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a page of ten items, so that a client without paging misses some."""
    names = sorted(there)
    begin = int(request.get("NextToken") or 0)
    items = [{field: there[name][field] for field in fields} for name in names[begin : begin + 10]]
    more = {"NextToken": str(begin + 10)} if begin + 10 < len(names) else {}
    return {key: items, **more}


def arn_of(noun: str, name: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{noun}/{name}"
