"""Updates of an endpoint, in a loop of observations and single changes.

SageMaker's waiter reports success for an update that was rolled back. This module checks
that the endpoint has the desired config and weights. Otherwise, it reports SageMaker's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from onnx_ops.adapters.aws import describe_alarms, translate_errors
from onnx_ops.adapters.endpoints.sagemaker_client import (
    IN_PROGRESS,
    NOT_FOUND,
    GenerationFence,
    SageMakerClient,
)
from onnx_ops.adapters.endpoints.sagemaker_layout import EndpointLayout, has_weights
from onnx_ops.adapters.endpoints.sagemaker_options import SageMakerOptions
from onnx_ops.adapters.endpoints.sagemaker_resources import EndpointResources
from onnx_ops.adapters.endpoints.sagemaker_scaling import VariantScaling, find_instance_drift
from onnx_ops.errors import (
    AlarmRollbackError,
    InfrastructureError,
    NotFoundError,
    RefusedError,
    ServiceUnavailableError,
)

_BUSY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})
_NOT_RETAINED = [
    {"VariantPropertyType": "DesiredWeight"},
    {"VariantPropertyType": "DataCaptureConfig"},
]
"""Properties of variants that come from the new config: weights and data capture."""
_COUNT_NOT_RETAINED = {"VariantPropertyType": "DesiredInstanceCount"}
"""Instance counts also come from the new config, unless autoscaling sets them."""
_STALE_READS = 12
"""Number of reads that can be stale after an accepted request."""
_CONFIRMATIONS = 3
"""Number of reads that must show a failure, since a single read can be stale."""
_TAKEN_BACK = (
    "The earlier instances have all traffic. During a guarded update, new instances can also have "
    "answered requests. See the alarms and the log of the new instances."
)


class EndpointUpdate:
    """One change of one endpoint, and its progress.

    No alarm guards a rollback, because an alarm would return the traffic to the faulty version.
    """

    def __init__(
        self,
        client: SageMakerClient,
        fence: GenerationFence,
        generation: int,
        *,
        is_rollback: bool = False,
    ) -> None:
        self._client = client
        self._options = client.options
        self._fence = fence
        self._generation = generation
        self._scaling = VariantScaling(client)
        self._is_rollback = is_rollback
        self._alarms = () if is_rollback else self._options.alarms
        self._sets_counts = not (self._options.scaled or self._options.serverless)
        self._requested: Literal["", "create", "update", "delete"] = ""
        self._has_begun = False
        # This attribute counts the reads that did not show the effect of the request.
        self._unchanged_reads = 0
        self._failures = 0
        self._modified: Any = None
        self._is_deleted = False

    def move(self, layout: EndpointLayout, prepare: Callable[[], None]) -> None:
        """Update the endpoint, and wait until it is in service with this layout.

        Args:
            layout: the desired config and weights.
            prepare: creates the models and the config of the layout. It is not called for an
                endpoint that already has the layout.
        """
        description = self._client.describe()
        if description is not None and self._sets_counts:
            self._scaling.remove_outdated(description)
            self._sets_counts = not self._scaling.is_foreign(description)
        if self._has_arrived(description, layout):
            return
        prepare()

        def step() -> bool | None:
            description = self._client.describe()
            if self._has_arrived(description, layout):
                return True
            if description is None or description["EndpointStatus"] not in _BUSY:
                self._fence.check(self._generation)
                self._advance(description, layout)
            elif self._requested:
                self._has_begun, self._failures = True, 0
            return None

        self._client.converge(step, "the endpoint did not reach its new state in time")

    def _has_arrived(self, description: Mapping[str, Any] | None, layout: EndpointLayout) -> bool:
        if description is None or description["EndpointStatus"] != "InService":
            return False
        has_counts = not (
            self._sets_counts and any(find_instance_drift(description, self._options))
        )
        has_config = layout.has_config(description.get("EndpointConfigName", ""))
        return has_counts and has_config and has_weights(description, layout.weights)

    def shift(
        self,
        weights: Mapping[str, float],
        *,
        is_known: bool,
        is_due: bool = True,
        layout: EndpointLayout | None = None,
    ) -> bool:
        """Change the weights of the running variants, and wait until they are in effect.

        The result is False if a change of weights alone is not enough. This is the case if a
        variant with traffic is missing, or the endpoint has another config than `layout`. The
        endpoint must also be one that onnx-ops created, and must be in service or being changed.
        Otherwise, the result is also False.

        Args:
            weights: weights by variant; those of other variants become 0.
            is_known: whether the claim shows that onnx-ops owns the endpoint, and that it has these
                variants.
            is_due: whether the endpoint is expected to have other weights. With `is_known` and
                `is_due`, the weights are requested before the endpoint is described.
            layout: the config that the endpoint must have; None to accept any config.
        """
        reads = int(is_known and is_due and self._try_weights(weights))

        def step() -> bool | None:
            nonlocal reads, is_known
            description = self._client.describe()
            desired = _complete_weights(description, weights, layout)
            if description is None or desired is None:
                return False
            is_known = is_known or self._client.is_ours(description)
            if not is_known:
                return False
            if description["EndpointStatus"] == "InService":
                if has_weights(description, desired):
                    return True
                if reads % _STALE_READS == 0:
                    self._fence.check(self._generation)
                    self._set_weights(desired)
                reads += 1
            return None

        return self._client.converge(step, "the endpoint did not apply its traffic weights in time")

    def _try_weights(self, weights: Mapping[str, float]) -> bool:
        """Request weights of an endpoint that was not read; return whether it accepts.

        If the result is False, the caller finds the cause when it describes the endpoint.

        Raises:
            RefusedError: AWS denied access.
            ServiceUnavailableError: AWS cannot serve the request.
        """
        try:
            return self._set_weights(weights)
        except (ServiceUnavailableError, RefusedError):
            raise
        except InfrastructureError:
            return False

    def _set_weights(
        self, weights: Mapping[str, float], count: Mapping[str, int] | None = None
    ) -> bool:
        """Request weights; return False if the endpoint was busy.

        `count` is the field of the request with the number of instances; None to keep the number.
        """
        desired = [
            {"VariantName": name, "DesiredWeight": weight, **(count or {})}
            for name, weight in weights.items()
        ]
        return self._request(
            "update_endpoint_weights_and_capacities", DesiredWeightsAndCapacities=desired
        )

    def _request(self, operation: str, *ignored: str, **request: Any) -> bool:
        """Make a request about the endpoint; return whether it was accepted."""
        request["EndpointName"] = self._client.endpoint
        answer = self._client.call(
            "sagemaker", operation, ignored_messages=ignored or IN_PROGRESS, **request
        )
        return answer is not None

    def _advance(self, description: Mapping[str, Any] | None, layout: EndpointLayout) -> None:
        """Make the next change of an endpoint that is not busy.

        Raises:
            AlarmRollbackError: an alarm reverted the update.
            RefusedError: onnx-ops did not create the endpoint.
            NotFoundError: an alarm does not exist in CloudWatch.
            InfrastructureError: the endpoint cannot be started or updated.
        """
        if not self._requested:
            self._refuse_alarmed(layout, description)
        if description is None:
            if not self._requested or self._is_deleted or self._was_ignored():
                config = {
                    "EndpointConfigName": layout.config_name,
                    "Tags": list(layout.config["Tags"]),
                }
                self._request("create_endpoint", "already existing", **config)
                self._requested, self._is_deleted, self._unchanged_reads = "create", False, 0
            return
        if not self._client.is_ours(description):
            raise RefusedError(
                "an endpoint with this name exists, but its tag does not show that onnx-ops "
                "created it",
                where=self._client.endpoint,
                remedy="Choose another name in the pipeline file, "
                "or delete the existing endpoint in SageMaker.",
            )
        if description["EndpointStatus"] == "Failed":
            if self._requested and not self._is_deleted:
                what, why = "SageMaker could not start the endpoint", _failure_reason(description)
                remedy = (
                    "See the log group /aws/sagemaker/Endpoints in CloudWatch; "
                    "the next attempt creates the endpoint again."
                )
                raise InfrastructureError(what, where=self._client.endpoint, why=why, remedy=remedy)
            # SageMaker only permits deleting a failed endpoint. Such an endpoint answers no
            # requests.
            self._delete()
            return
        if self._requested and not self._is_due_again(description, layout):
            return
        try:
            self._update(description, layout)
        except ServiceUnavailableError:
            raise
        except InfrastructureError:
            if description["EndpointStatus"] != "OutOfService":
                raise
            # An endpoint that is out of service answers no requests, so it can be deleted.
            self._delete()

    def _delete(self) -> None:
        self._request("delete_endpoint", *NOT_FOUND, *IN_PROGRESS)
        self._requested, self._is_deleted = "delete", True

    def _update(self, description: Mapping[str, Any], layout: EndpointLayout) -> None:
        options = self._options
        self._modified = description.get("LastModifiedTime")
        if (
            layout.has_config(description["EndpointConfigName"])
            and description["EndpointStatus"] == "InService"
        ):
            count = {"DesiredInstanceCount": options.instance_count} if self._sets_counts else {}
            accepted = self._set_weights(layout.weights, count)
        else:
            self._scaling.pause(description, layout)
            if description["EndpointConfigName"] == layout.config_name:
                # The endpoint already has this config, but is not in service. SageMaker refuses an
                # update to the current config, so the config is copied.
                layout = layout.copy_config()
                EndpointResources(self._client).ensure_config(layout)
            request: dict[str, Any] = {"RetainAllVariantProperties": not options.serverless}
            if not options.serverless:
                excluded = _NOT_RETAINED + [_COUNT_NOT_RETAINED] * self._sets_counts
                request["ExcludeRetainedVariantProperties"] = excluded
            variants = {
                variant["VariantName"] for variant in description.get("ProductionVariants", ())
            }
            # SageMaker does not support guardrails for an update that changes the names of
            # variants.
            if options.guarded and variants == set(layout.weights):
                request["DeploymentConfig"] = self._guard(layout)
            accepted = self._request(
                "update_endpoint", EndpointConfigName=layout.config_name, **request
            )
        if accepted:
            self._requested, self._has_begun, self._unchanged_reads, self._failures = (
                "update",
                False,
                0,
                0,
            )

    def _guard(self, layout: EndpointLayout) -> dict[str, Any]:
        """Return the deployment config of an update: how traffic shifts, and the alarms.

        Raises:
            InfrastructureError: an alarm is firing, and the layout is not the last one that the
                endpoint reached.
            NotFoundError: an alarm does not exist in CloudWatch.
        """
        states = self._alarm_states()
        firing = [name for name, state in states.items() if state.startswith("ALARM")]
        # An update to the last reached config restores an earlier state, so alarms that are already
        # firing do not forbid it. The other alarms guard it.
        if self._fence.has_reached(layout.config_name):
            quiet = [name for name in states if name not in firing]
            return build_deployment_config(self._options, quiet, at_once=bool(firing))
        if firing:
            raise InfrastructureError(
                f"these alarms are firing and cannot guard an update: {', '.join(firing)}",
                where=self._client.endpoint,
                remedy=self._format_alarm_remedy(),
            )
        if states:
            self._fence.begin_update(layout.config_name, states)
        return build_deployment_config(self._options, list(states), at_once=self._is_rollback)

    def _format_alarm_remedy(self) -> str:
        """Return the remedy for an update that a firing alarm prevents.

        With `traffic: table`, the update changes only instances. A rollback would change only the
        traffic.
        """
        if self._options.is_table:
            return (
                "Wait until no alarm fires, or remove the firing alarms from `alarms` for this "
                "change."
            )
        return (
            "Wait until no alarm fires. To return to the previous version, run "
            f"`onnx-ops rollback {self._client.endpoint}`: alarms do not stop it."
        )

    def _refuse_alarmed(
        self, layout: EndpointLayout, description: Mapping[str, Any] | None
    ) -> None:
        """Raise AlarmRollbackError if an alarm reverted an update to this layout.

        A reverted update is assumed if an alarm has changed its state since the update was started.
        This is so even if the alarm is OK again. A finished update would have put the layout into
        service. SageMaker gives its reason only as text. So the layout is not applied again even if
        the cause is uncertain.
        """
        if not self._alarms or (before := self._fence.alarms_before(layout.config_name)) is None:
            return
        now = self._alarm_states()
        changed = [name for name, state in before.items() if now.get(name, state) != state]
        if changed:
            raise AlarmRollbackError(
                "the update did not take effect, and these alarms changed state since it began: "
                f"{', '.join(changed)}",
                where=self._client.endpoint,
                why=_failure_reason(description or {}),
                remedy=_TAKEN_BACK,
            )

    def _alarm_states(self) -> dict[str, str]:
        """Return the state of each guarding alarm, and the time of its last change.

        Raises:
            NotFoundError: an alarm does not exist in CloudWatch.
        """
        if not self._alarms:
            return {}
        with translate_errors(self._client.endpoint):
            alarms = describe_alarms(self._client.clients("cloudwatch"), self._alarms)
        if missing := sorted(set(self._alarms) - set(alarms)):
            raise NotFoundError(
                f"CloudWatch does not have these alarms: {', '.join(missing)}",
                where=self._client.endpoint,
                remedy="Create the alarms in CloudWatch, as `infra/aws` does, or correct `alarms`.",
            )
        states = {}
        for name in self._alarms:
            since = alarms[name].get("StateTransitionedTimestamp") or alarms[name].get(
                "StateUpdatedTimestamp", ""
            )
            states[name] = f"{alarms[name]['StateValue']} {since}"
        return states

    def _is_due_again(self, description: Mapping[str, Any], layout: EndpointLayout) -> bool:
        """Return whether to repeat a request that had no effect.

        The endpoint must be idle and without the desired layout.

        Raises:
            AlarmRollbackError: an alarm reverted the update.
            NotFoundError: an alarm does not exist in CloudWatch.
            InfrastructureError: SageMaker reverted the update, or could neither finish nor revert
                it.
        """
        if self._requested == "create":  # Another client created the endpoint before this request.
            self._requested = ""
            return True
        has_moved = self._has_begun or description.get("LastModifiedTime") != self._modified
        is_stuck = description["EndpointStatus"] == "UpdateRollbackFailed"
        self._failures += is_stuck or has_moved
        if has_moved and self._failures >= _CONFIRMATIONS:
            self._refuse_alarmed(layout, description)
            endpoint, why = self._client.endpoint, _failure_reason(description)
            if is_stuck:
                raise InfrastructureError(
                    "SageMaker could neither finish nor revert the update; "
                    "old and new instances both answer",
                    where=endpoint,
                    why=why,
                    remedy="Remove the cause that SageMaker names, "
                    f"then run `onnx-ops reconcile {endpoint}`. "
                    "The command updates the endpoint to the version in the ledger.",
                )
            if self._alarms:
                self._fence.end_update(layout.config_name)
            raise InfrastructureError(
                "SageMaker reverted the update", where=endpoint, why=why, remedy=_TAKEN_BACK
            )
        if self._was_ignored():
            self._requested = ""
        return not self._requested

    def _was_ignored(self) -> bool:
        self._unchanged_reads += 1
        return self._unchanged_reads >= _STALE_READS


def build_deployment_config(
    options: SageMakerOptions, alarms: list[str], *, at_once: bool
) -> dict[str, Any]:
    """Return a deployment config that shifts traffic immediately or by the options."""
    routing: dict[str, Any] = {
        "Type": "ALL_AT_ONCE",
        "WaitIntervalInSeconds": 0 if at_once else int(options.wait),
    }
    if options.canary_percent and not at_once:
        size = {"Type": "CAPACITY_PERCENT", "Value": options.canary_percent}
        routing |= {"Type": "CANARY", "CanarySize": size}
    elif options.linear_percent and not at_once:
        size = {"Type": "CAPACITY_PERCENT", "Value": options.linear_percent}
        routing |= {"Type": "LINEAR", "LinearStepSize": size}
    config: dict[str, Any] = {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": routing,
            "TerminationWaitInSeconds": 0 if at_once else int(options.termination_wait),
            "MaximumExecutionTimeoutInSeconds": int(options.max_execution),
        }
    }
    if alarms:
        config["AutoRollbackConfiguration"] = {"Alarms": [{"AlarmName": name} for name in alarms]}
    return config


def _complete_weights(
    description: Mapping[str, Any] | None,
    weights: Mapping[str, float],
    layout: EndpointLayout | None,
) -> dict[str, float] | None:
    """Return weights for all variants of an endpoint.

    The result is None if a change of weights alone cannot bring the endpoint to these weights.
    """
    if description is None:
        return None
    status, config = description["EndpointStatus"], description.get("EndpointConfigName", "")
    names = {one["VariantName"] for one in description.get("ProductionVariants", ())}
    has_variants = names.issuperset(name for name, weight in weights.items() if weight)
    can_change = status == "InService" or status in _BUSY
    if not (has_variants and can_change) or (layout is not None and not layout.has_config(config)):
        return None
    return {name: weights.get(name, 0.0) for name in names}


def _failure_reason(description: Mapping[str, Any]) -> str:
    return str(description.get("FailureReason") or "SageMaker gives no reason")
