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
from onnx_ops.adapters.endpoints.sagemaker_drift import instance_drift
from onnx_ops.adapters.endpoints.sagemaker_layout import ENDPOINT_TAG, Layout
from onnx_ops.adapters.endpoints.sagemaker_scaling import Scaling
from onnx_ops.adapters.endpoints.sagemaker_settings import SageMakerSettings, listed
from onnx_ops.errors import (
    AlarmRollbackError,
    InfrastructureError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
)

_BUSY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_RETAINED_NOT = [{"VariantPropertyType": "DesiredWeight"}, {"VariantPropertyType": "DataCaptureConfig"}]
"""Weights and capture are what the new config says."""
_COUNT_NEITHER = {"VariantPropertyType": "DesiredInstanceCount"}
"""Nor do instance counts stay, unless autoscaling sets them."""
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
    """One `apply` of one endpoint; with `back`, one rollback, which no alarm guards: it would only keep traffic where
    it must not stay."""

    def __init__(
        self,
        clients: Clients,
        endpoint: str,
        settings: SageMakerSettings,
        claims: Claims,
        generation: int,
        *,
        back: bool = False,
    ) -> None:
        self._sagemaker = clients("sagemaker")
        self._clients = clients
        self._endpoint = endpoint
        self._settings = settings
        self._claims = claims
        self._generation = generation
        self._scaling = Scaling(clients, endpoint, settings)
        self._back = back
        self._alarms = () if back else listed(settings.alarms)
        self._counts = not (settings.scaled or settings.serverless)

    def move(self, layout: Layout) -> None:
        """Return once the endpoint is in service with this layout and these weights.

        Raises:
            ConflictError: a later generation was begun.
            RefusedError: an endpoint of that name is somebody else's.
            AlarmRollbackError: an alarm took this layout back, now or in an earlier try.
            InfrastructureError: SageMaker could not do it, or took it back; or an alarm that guards it fires already.
            ServiceUnavailableError: it did not end in time.
        """
        deadline = time.monotonic() + self._settings.timeout_s
        course, found = _Course(), describe(self._sagemaker, self._endpoint)
        if found is not None and self._counts:
            self._scaling.release(found)
            self._counts = not self._scaling.by_others(found)
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
        raise ServiceUnavailableError(
            "the endpoint did not get where it should in time",
            where=self._endpoint,
            why=f"it is {(found or {}).get('EndpointStatus', 'not there')}",
            remedy="The update goes on at AWS; call again, or raise `timeout_s`.",
        )

    def shift(self, variant: str) -> None:
        """Return once one of the variants that run has all traffic. Nothing but weights is changed.

        Raises:
            ConflictError: a later generation was begun.
            NotFoundError: the variant does not run.
            ServiceUnavailableError: it did not end in time.
        """
        deadline, found = time.monotonic() + self._settings.timeout_s, None
        wait = 0
        while time.monotonic() < deadline:
            found = describe(self._sagemaker, self._endpoint)
            names = [one["VariantName"] for one in (found or {}).get("ProductionVariants", ())]
            if found is None or variant not in names or not is_ours(self._sagemaker, found, self._endpoint):
                raise NotFoundError(f"no variant {variant} runs", where=self._endpoint)
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
        raise ServiceUnavailableError(
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

    def _arrived(self, found: Mapping[str, Any] | None, layout: Layout) -> bool:
        if found is None or found["EndpointStatus"] != "InService":
            return False
        if self._counts and any(instance_drift(found, self._settings)):
            return False
        return layout.holds(found.get("EndpointConfigName", "")) and has_weights(found, layout.weights)

    def _next(self, found: Mapping[str, Any] | None, layout: Layout, course: _Course) -> None:
        """The one thing that is due to an endpoint that is not busy."""
        if not course.asked:
            self._refuse_condemned(layout, found)
        if found is None:
            if not course.asked or course.deleted or self._ignored(course):
                self._create(layout, course)
            return
        if not is_ours(self._sagemaker, found, self._endpoint):
            raise RefusedError(
                "an endpoint of that name exists that onnx-ops did not make",
                where=self._endpoint,
                remedy="Choose another name in the pipeline file, or delete that endpoint yourself.",
            )
        if found["EndpointStatus"] == "Failed":
            self._replace(found, course)
            return
        if course.asked:
            self._judge(found, layout, course)
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
            raise InfrastructureError(
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
        count = {"DesiredInstanceCount": self._settings.instance_count} if self._counts else {}
        weights_only = layout.holds(found["EndpointConfigName"]) and found["EndpointStatus"] == "InService"
        with translated(self._endpoint):
            try:
                if weights_only:
                    self._sagemaker.update_endpoint_weights_and_capacities(
                        EndpointName=self._endpoint,
                        DesiredWeightsAndCapacities=[
                            {"VariantName": name, "DesiredWeight": weight} | count
                            for name, weight in layout.weights.items()
                        ],
                    )
                else:
                    self._scaling.step_aside(found, layout)
                    self._sagemaker.update_endpoint(**self._request(found, layout))
            except ClientError as error:
                if not says(error, "in-progress endpoint", "in progress"):
                    raise
                return
        course.asked, course.began, course.untouched, course.bad = "update", False, 0, 0

    def _request(self, found: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        request: dict[str, Any] = {
            "EndpointName": self._endpoint,
            "EndpointConfigName": layout.config_name,
            "RetainAllVariantProperties": not self._settings.serverless,
        }
        if not self._settings.serverless:
            request["ExcludeRetainedVariantProperties"] = _RETAINED_NOT + [_COUNT_NEITHER] * self._counts
        same = {variant["VariantName"] for variant in found.get("ProductionVariants", ())} == set(layout.weights)
        if self._settings.guarded and same:  # SageMaker guards no update that brings other variants
            request["DeploymentConfig"] = self._guard(layout)
        return request

    def _guard(self, layout: Layout) -> dict[str, Any]:
        """Return how the traffic is shifted, and under which alarms.

        Raises:
            NotFoundError: there is no such alarm.
            InfrastructureError: an alarm fires already, so it could not guard what comes.
        """
        states = self._alarm_states()
        firing = [name for name, state in states.items() if state.startswith("ALARM")]
        if self._claims.stands(layout.config_name):  # somebody changed the endpoint: this brings nothing new
            return guarded(self._settings, [one for one in states if one not in firing], hurry=bool(firing))
        if firing:
            raise InfrastructureError(
                f"alarm {', '.join(firing)} fires, so it cannot guard an update",
                where=self._endpoint,
                remedy=f"Wait until it is quiet, or `onnx-ops rollback {self._endpoint}`, which no alarm hinders.",
            )
        if states:
            self._claims.begin_update(layout.config_name, states)
        return guarded(self._settings, list(states), hurry=self._back)

    def _refuse_condemned(self, layout: Layout, found: Mapping[str, Any] | None) -> None:
        """Raise AlarmRollbackError if an update to this layout was begun, and an alarm changed its state since.

        It was not finished, or it would stand. An alarm that has been quiet again meanwhile counts: in doubt the
        layout does not come again, as what SageMaker says of its reasons is text.
        """
        if not self._alarms or (before := self._claims.begun_update(layout.config_name)) is None:
            return
        now = self._alarm_states()
        changed = [name for name, state in before.items() if now.get(name, state) != state]
        if changed:
            raise AlarmRollbackError(
                f"SageMaker took the update back: alarm {', '.join(changed)} fired",
                where=self._endpoint,
                why=_reason(found or {}),
                remedy="All traffic is where it was. See the alarms and the log of the version that failed.",
            )

    def _alarm_states(self) -> dict[str, str]:
        """Return each guarding alarm's state, and when it came to it.

        Raises:
            NotFoundError: there is no such alarm.
        """
        if not self._alarms:
            return {}
        with translated(self._endpoint):
            found = self._clients("cloudwatch").describe_alarms(
                AlarmNames=list(self._alarms), AlarmTypes=["MetricAlarm", "CompositeAlarm"]
            )
        alarms = {a["AlarmName"]: a for kind in ("MetricAlarms", "CompositeAlarms") for a in found.get(kind, ())}
        if missing := sorted(set(self._alarms) - set(alarms)):
            raise NotFoundError(
                f"no alarm is called {', '.join(missing)}",
                where=self._endpoint,
                remedy="Make it in CloudWatch (infra does), or take it out of `alarms`.",
            )
        states = {}
        for name in self._alarms:
            since = alarms[name].get("StateTransitionedTimestamp") or alarms[name].get("StateUpdatedTimestamp", "")
            states[name] = f"{alarms[name]['StateValue']} {since}"
        return states

    def _judge(self, found: Mapping[str, Any], layout: Layout, course: _Course) -> None:
        """What it means that the endpoint rests, and not where it should, after something was asked of it."""
        if course.asked == "create":  # somebody else had made it already
            course.asked = ""
            return
        moved = course.began or found.get("LastModifiedTime") != course.modified
        if found["EndpointStatus"] == "UpdateRollbackFailed":
            course.bad += 1
            if course.bad >= _SURE and moved:
                self._refuse_condemned(layout, found)
                raise InfrastructureError(
                    "SageMaker could neither finish the update nor take it back; old and new instances both answer",
                    where=self._endpoint,
                    why=_reason(found),
                    remedy=f"Free the capacity that the reason names, then `onnx-ops rollback {self._endpoint}`, "
                    "which updates it to the version before.",
                )
        elif moved:
            course.bad += 1
            if course.bad >= _SURE:
                self._refuse_condemned(layout, found)
                if self._alarms:
                    self._claims.end_update(layout.config_name)
                raise InfrastructureError(
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
    """How SageMaker shifts the traffic. `hurry`: at once."""
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
