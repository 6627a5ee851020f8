"""Moves an endpoint to a layout: looks, does the one thing that is due, and looks again.

SageMaker's own waiter takes an update that was rolled back for a success, as the endpoint is in service again. So this
one demands the wanted config and the wanted weights, and reads why it is not so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops.adapters.aws import Clients, code_of, says, translated
from onnx_ops.adapters.endpoints.sagemaker_claims import Claims
from onnx_ops.adapters.endpoints.sagemaker_layout import ENDPOINT_TAG, Layout
from onnx_ops.adapters.endpoints.sagemaker_scaling import Scaling
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings, listed
from onnx_ops.errors import EnvironmentFailure, NotFound, Refused, ServiceUnavailable

_BUSY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_RETAINED_NOT = [{"VariantPropertyType": "DesiredWeight"}, {"VariantPropertyType": "DataCaptureConfig"}]
"""Instance counts stay as autoscaling has set them; weights and capture are what the new config says."""
_PATIENCE = 12
"""Looks for which an endpoint may seem untouched after a request that was taken: its reads are behind."""
_SURE = 3
"""Looks in a row that must say the same bad thing, as a single one may be an old one."""
_EXACT = 1e-3


@dataclass(slots=True)
class _Course:
    """What was done so far. `untouched` counts looks since the last request that showed no sign of it."""

    asked: str = ""
    began: bool = False
    untouched: int = 0
    bad: int = 0
    modified: Any = None
    deleted: bool = False


class Mover:
    """One `apply` of one endpoint."""

    def __init__(
        self, clients: Clients, endpoint: str, settings: SageMakerSettings, claims: Claims, generation: int
    ) -> None:
        self._sagemaker = clients("sagemaker")
        self._clients = clients
        self._endpoint = endpoint
        self._settings = settings
        self._claims = claims
        self._generation = generation
        self._scaling = Scaling(clients, endpoint, settings)

    def move(self, layout: Layout) -> None:
        """Return once the endpoint is in service with this layout and these weights.

        Raises:
            Conflict: a later generation was begun.
            Refused: an endpoint of that name is somebody else's.
            EnvironmentFailure: SageMaker could not do it, or took it back.
            ServiceUnavailable: it did not end in time.
        """
        deadline = time.monotonic() + self._settings.timeout_s
        course, found = _Course(), None
        while time.monotonic() < deadline:
            found = describe(self._sagemaker, self._endpoint)
            if self._arrived(found, layout):
                return
            if found is None or found["EndpointStatus"] not in _BUSY:
                self._claims.hold(self._generation)
                self._next(found, layout, course)
            elif course.asked:
                course.began, course.bad = True, 0
            time.sleep(self._settings.poll_s)
        raise ServiceUnavailable(
            "the endpoint did not get where it should in time",
            where=self._endpoint,
            why=f"it is {(found or {}).get('EndpointStatus', 'not there')}",
            remedy="The update goes on at AWS; call again, or raise `timeout_s`.",
        )

    def shift(self, variant: str) -> None:
        """Return once one of the variants that run has all traffic. Nothing but weights is changed.

        Raises:
            Conflict: a later generation was begun.
            NotFound: the variant does not run.
            ServiceUnavailable: it did not end in time.
        """
        deadline, found = time.monotonic() + self._settings.timeout_s, None
        wait = 0
        while time.monotonic() < deadline:
            found = describe(self._sagemaker, self._endpoint)
            names = [one["VariantName"] for one in (found or {}).get("ProductionVariants", ())]
            if found is None or variant not in names or not is_ours(self._sagemaker, found, self._endpoint):
                raise NotFound(f"no variant {variant} runs", where=self._endpoint)
            weights = {name: 100.0 if name == variant else 0.0 for name in names}
            if found["EndpointStatus"] == "InService":
                if has_weights(found, weights):
                    return
                if wait == 0:
                    self._claims.hold(self._generation)
                    self._shift(weights)
                    wait = _PATIENCE
                wait -= 1
            time.sleep(self._settings.poll_s)
        raise ServiceUnavailable(
            "the endpoint did not get its weights in time",
            where=self._endpoint,
            why=f"it is {(found or {}).get('EndpointStatus', 'not there')}",
            remedy="The change goes on at AWS; call again, or raise `timeout_s`.",
        )

    def _shift(self, weights: Mapping[str, float]) -> None:
        """Ask for weights; an endpoint that is busy is asked again later."""
        from botocore.exceptions import ClientError

        with translated(self._endpoint):
            try:
                self._sagemaker.update_endpoint_weights_and_capacities(
                    EndpointName=self._endpoint,
                    DesiredWeightsAndCapacities=[
                        {"VariantName": name, "DesiredWeight": weight} for name, weight in weights.items()
                    ],
                )
            except ClientError as error:
                if not says(error, "in-progress endpoint", "in progress"):
                    raise

    @staticmethod
    def _arrived(found: Mapping[str, Any] | None, layout: Layout) -> bool:
        if found is None or found["EndpointStatus"] != "InService":
            return False
        return layout.holds(found.get("EndpointConfigName", "")) and has_weights(found, layout.weights)

    def _next(self, found: Mapping[str, Any] | None, layout: Layout, course: _Course) -> None:
        """The one thing that is due to an endpoint that is not busy."""
        if found is None:
            if not course.asked or course.deleted or self._ignored(course):
                self._create(layout, course)
            return
        if not is_ours(self._sagemaker, found, self._endpoint):
            raise Refused(
                "an endpoint of that name exists that onnx-ops did not make",
                where=self._endpoint,
                remedy="Choose another name in the pipeline file, or delete that endpoint yourself.",
            )
        if found["EndpointStatus"] == "Failed":
            self._replace(found, course)
            return
        if course.asked:
            self._judge(found, course)
            if course.asked:
                return
        self._update(found, layout, course)

    def _create(self, layout: Layout, course: _Course) -> None:
        from botocore.exceptions import ClientError

        with translated(self._endpoint):
            try:
                self._sagemaker.create_endpoint(
                    EndpointName=self._endpoint,
                    EndpointConfigName=layout.config_name,
                    Tags=list(layout.config["Tags"]),
                )
            except ClientError as error:
                if not says(error, "already existing"):
                    raise
        course.asked, course.deleted, course.untouched = "create", False, 0

    def _replace(self, found: Mapping[str, Any], course: _Course) -> None:
        """Nothing but its deletion is possible with a failed endpoint, and it serves nobody."""
        from botocore.exceptions import ClientError

        if course.asked and not course.deleted:
            raise EnvironmentFailure(
                "SageMaker could not start the endpoint",
                where=self._endpoint,
                why=_reason(found),
                remedy="Look into its log group /aws/sagemaker/Endpoints in CloudWatch; the next try makes it anew.",
            )
        with translated(self._endpoint):
            try:
                self._sagemaker.delete_endpoint(EndpointName=self._endpoint)
            except ClientError as error:
                if not says(error, "could not find", "in-progress", "in progress"):
                    raise
        course.asked, course.deleted = "delete", True

    def _update(self, found: Mapping[str, Any], layout: Layout, course: _Course) -> None:
        from botocore.exceptions import ClientError

        course.modified = found.get("LastModifiedTime")
        weights_only = layout.holds(found["EndpointConfigName"]) and found["EndpointStatus"] == "InService"
        with translated(self._endpoint):
            try:
                if weights_only:
                    self._sagemaker.update_endpoint_weights_and_capacities(
                        EndpointName=self._endpoint,
                        DesiredWeightsAndCapacities=[
                            {"VariantName": name, "DesiredWeight": weight} for name, weight in layout.weights.items()
                        ],
                    )
                else:
                    self._scaling.step_aside(found, layout)
                    self._sagemaker.update_endpoint(**self._request(layout))
            except ClientError as error:
                if not says(error, "in-progress endpoint", "in progress"):
                    raise
                return
        course.asked, course.began, course.untouched, course.bad = "update", False, 0, 0

    def _request(self, layout: Layout) -> dict[str, Any]:
        request: dict[str, Any] = {
            "EndpointName": self._endpoint,
            "EndpointConfigName": layout.config_name,
            "RetainAllVariantProperties": not self._settings.serverless,
        }
        if not self._settings.serverless:
            request["ExcludeRetainedVariantProperties"] = _RETAINED_NOT
        if self._settings.guarded:
            alarms = self._quiet_alarms()
            hurry = self._claims.served(layout.config_name) or (len(alarms) < len(listed(self._settings.alarms)))
            request["DeploymentConfig"] = guarded(self._settings, alarms, hurry=hurry)
        return request

    def _quiet_alarms(self) -> list[str]:
        """Those that do not fire. One that fires already says nothing of what comes, and would forbid the way back.

        Raises:
            NotFound: there is no such alarm.
        """
        names = listed(self._settings.alarms)
        if not names:
            return []
        with translated(self._endpoint):
            found = self._clients("cloudwatch").describe_alarms(AlarmNames=list(names))
        states = {
            a["AlarmName"]: a["StateValue"] for kind in ("MetricAlarms", "CompositeAlarms") for a in found.get(kind, ())
        }
        if missing := sorted(set(names) - set(states)):
            raise NotFound(
                f"no alarm is called {', '.join(missing)}",
                where=self._endpoint,
                remedy="Make it in CloudWatch (infra does), or take it out of `alarms`.",
            )
        return [name for name in names if states[name] != "ALARM"]

    def _judge(self, found: Mapping[str, Any], course: _Course) -> None:
        """What it means that the endpoint rests, and not where it should, after something was asked of it."""
        if course.asked == "create":  # somebody else had made it already
            course.asked = ""
            return
        moved = course.began or found.get("LastModifiedTime") != course.modified
        if found["EndpointStatus"] == "UpdateRollbackFailed":
            course.bad += 1
            if course.bad >= _SURE and moved:
                raise EnvironmentFailure(
                    "SageMaker could neither finish the update nor take it back; old and new instances both answer",
                    where=self._endpoint,
                    why=_reason(found),
                    remedy=f"Free the capacity that the reason names, then `onnx-ops rollback {self._endpoint}`, "
                    "which updates it to the version before.",
                )
        elif moved:
            course.bad += 1
            if course.bad >= _SURE:
                raise EnvironmentFailure(
                    "SageMaker took the update back",
                    where=self._endpoint,
                    why=_reason(found),
                    remedy="All traffic is where it was. See the alarms and the log of the version that failed.",
                )
        if self._ignored(course):
            course.asked = ""

    @staticmethod
    def _ignored(course: _Course) -> bool:
        course.untouched += 1
        return course.untouched >= _PATIENCE


def guarded(settings: SageMakerSettings, alarms: list[str], *, hurry: bool) -> dict[str, Any]:
    """How SageMaker shifts the traffic. `hurry`: the way back, or away from what makes an alarm fire."""
    routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0 if hurry else settings.wait_s}
    if settings.canary_percent and not hurry:
        size = {"Type": "CAPACITY_PERCENT", "Value": settings.canary_percent}
        routing |= {"Type": "CANARY", "CanarySize": size}
    elif settings.linear_percent and not hurry:
        size = {"Type": "CAPACITY_PERCENT", "Value": settings.linear_percent}
        routing |= {"Type": "LINEAR", "LinearStepSize": size}
    how: dict[str, Any] = {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": routing,
            "TerminationWaitInSeconds": 0 if hurry else settings.termination_wait_s,
            "MaximumExecutionTimeoutInSeconds": settings.max_execution_s,
        }
    }
    if alarms:
        how["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in alarms]}
    return how


def describe(sagemaker: Any, endpoint: str) -> dict[str, Any] | None:
    """What SageMaker says of an endpoint, which may be a little old; None if it knows none."""
    from botocore.exceptions import ClientError

    with translated(endpoint):
        try:
            found: dict[str, Any] = sagemaker.describe_endpoint(EndpointName=endpoint)
        except ClientError as error:
            if code_of(error) == "ValidationException" and says(error, "could not find"):
                return None
            raise
    return found


def is_ours(sagemaker: Any, found: Mapping[str, Any], endpoint: str) -> bool:
    return tag_of(sagemaker, found["EndpointArn"]) == endpoint


def tag_of(sagemaker: Any, arn: str) -> str | None:
    """For which of our endpoints a thing stands, as its tag says."""
    with translated(arn):
        pages = sagemaker.get_paginator("list_tags").paginate(ResourceArn=arn)
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
    value: str | None = tags.get(ENDPOINT_TAG)
    return value


def has_weights(found: Mapping[str, Any], wanted: Mapping[str, float]) -> bool:
    """Whether traffic is split like that, and will be."""
    return all(_shares(found, key, wanted) for key in ("CurrentWeight", "DesiredWeight"))


def _shares(found: Mapping[str, Any], key: str, wanted: Mapping[str, float]) -> bool:
    weights = {v["VariantName"]: float(v.get(key, 0.0)) for v in found.get("ProductionVariants", ())}
    total, asked = sum(weights.values()), sum(wanted.values())
    if set(weights) != set(wanted) or not total:
        return False
    return all(abs(weights[name] / total - weight / asked) < _EXACT for name, weight in wanted.items())


def _reason(found: Mapping[str, Any]) -> str:
    return str(found.get("FailureReason") or "SageMaker gives no reason")
