"""Updates of a SageMaker endpoint.

The tests cover failures, alarms, concurrent clients, and whole rollouts.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.artifact import digest_bytes, digest_folder, hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.rollout import (
    Action,
    OperatorCommand,
    Roles,
    Wait,
    choose_next_action,
    plan_rollback,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import AlarmRollbackError, InfrastructureError, NotFoundError, OnnxOpsError
from onnx_ops.testing.endpoints import state_of
from tests.adapters.sagemaker_cloud import Site, config_of

pytestmark = pytest.mark.services

FIGURES = {
    "MetricName": "Invocation5XXErrors",
    "Namespace": "AWS/SageMaker",
    "Statistic": "Sum",
    "Period": 60,
    "EvaluationPeriods": 1,
    "Threshold": 1.0,
    "ComparisonOperator": "GreaterThanThreshold",
}


@pytest.mark.parametrize("lag", [0, 2])
def test_sagemaker_update_reverted_by_service_raises_infrastructure_error(
    site: Site, lag: int
) -> None:
    config = config_of(f"silent-{lag}")
    before = replace(site.state(blue=100), generation=1)
    site.provider.apply(config, before, generation=1)
    site.fake.behave(taken_back="the bake was not good", lag=lag)
    with pytest.raises(
        InfrastructureError, match=r"reverted the update \(the bake was not good\)"
    ) as reverted:
        site.apply(2, config, green=100)
    # A guarded update shifts traffic before SageMaker reverts it.
    assert "new instances can also have answered requests" in reverted.value.remedy
    assert site.observed(config).is_equivalent(before)
    assert site.invoke(config.endpoint) == ("blue", 2.0)


def alarm_is(site: Site, state: str) -> None:
    site.client("cloudwatch").set_alarm_state(
        AlarmName="failing", StateValue=state, StateReason="test"
    )


@pytest.fixture
def alarmed(site: Site, request: pytest.FixtureRequest) -> EndpointConfig:
    """Return a guarded endpoint on which blue serves, and whose alarm does not fire."""
    site.client("cloudwatch").put_metric_alarm(AlarmName="failing", **FIGURES)
    alarm_is(site, "OK")
    name = f"alarmed-{hex_digits(digest_bytes(request.node.name.encode()))[:8]}"
    config = config_of(name, strategy="guarded", alarms=["failing"], canary_percent=10)
    site.apply(1, config, blue=100)
    return config


def updates(site: Site) -> int:
    return sum(call == "SageMaker.UpdateEndpoint" for call in site.fake.calls())


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_sagemaker_update_reverted_by_alarm_is_not_retried(
    site: Site, alarmed: EndpointConfig, kill: bool
) -> None:
    """The alarm fires during an update, and stops afterwards."""
    site.fake.behave(reads=400)
    process, order = site.start_client(alarmed, replace(site.state(green=100), generation=2))
    order.send("go")
    site.wait_for(alarmed.endpoint, "Updating")
    if kill:
        process.kill()
    alarm_is(site, "ALARM")
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if kill else 1)
    site.wait_for(alarmed.endpoint, "InService")
    alarm_is(site, "OK")
    site.fake.behave(reads=2)
    site.fake.fault()
    for generation in (2, 3):
        with pytest.raises(
            AlarmRollbackError, match=r"changed state since it began: failing \(.*failing"
        ):
            site.apply(generation, alarmed, green=100)
    site.provider.roll_back(alarmed, site.state(blue=100), generation=4)
    assert updates(site) == 0
    site.client("sagemaker").delete_endpoint(EndpointName=alarmed.endpoint)
    with pytest.raises(AlarmRollbackError):
        site.apply(5, alarmed, green=100)
    site.apply(6, alarmed, blue=100)
    assert site.invoke(alarmed.endpoint) == ("main", 2.0)


def test_sagemaker_update_with_firing_alarm_is_refused_except_rollback_and_restoration(
    site: Site, alarmed: EndpointConfig
) -> None:
    sagemaker = site.client("sagemaker")
    first = site.describe(alarmed.endpoint)["EndpointConfigName"]
    site.apply(2, alarmed, green=100)
    alarm_is(site, "ALARM")
    site.fake.fault()
    with pytest.raises(InfrastructureError, match=r"alarms are firing .*: failing") as refused:
        site.apply(3, alarmed, blue=100)
    assert f"onnx-ops rollback {alarmed.endpoint}" in refused.value.remedy
    assert updates(site) == 0
    site.provider.roll_back(alarmed, site.state(blue=100, green=0), generation=4)
    assert site.invoke(alarmed.endpoint) == ("main", 2.0)
    alarm_is(site, "OK")
    site.apply(5, alarmed, green=100)
    # An operator changes the endpoint by hand.
    sagemaker.update_endpoint(EndpointName=alarmed.endpoint, EndpointConfigName=first)
    alarm_is(site, "ALARM")
    # This state was applied last before the operator's change.
    site.apply(6, alarmed, green=100)
    assert site.invoke(alarmed.endpoint) == ("main", 3.0)


def test_sagemaker_update_with_unknown_alarm_raises_not_found_error(
    site: Site, alarmed: EndpointConfig
) -> None:
    unknown = replace(alarmed, options={**alarmed.options, "alarms": ["nowhere"]})
    with pytest.raises(NotFoundError, match="does not have these alarms: nowhere"):
        site.apply(2, unknown, green=100)


def test_sagemaker_update_after_failure_without_alarm_is_retried(
    site: Site, alarmed: EndpointConfig
) -> None:
    site.fake.behave(taken_back="no capacity")
    with pytest.raises(InfrastructureError, match="no capacity") as failed:
        site.apply(2, alarmed, green=100)
    assert not isinstance(failed.value, AlarmRollbackError)
    site.fake.behave(taken_back="")
    alarm_is(site, "ALARM")
    alarm_is(site, "OK")
    site.apply(3, alarmed, green=100)
    assert site.invoke(alarmed.endpoint) == ("main", 3.0)


def test_sagemaker_update_with_failed_revert_raises_error_with_reconcile_command(
    site: Site,
) -> None:
    config = config_of("stuck")
    site.apply(1, config, blue=100)
    site.fake.behave(stuck="no capacity for ml.c6i.large")
    with pytest.raises(InfrastructureError, match="neither finish") as caught:
        site.apply(2, config, green=100)
    assert "no capacity" in str(caught.value)
    assert "onnx-ops reconcile stuck" in caught.value.remedy
    assert site.provider.observe(config) is None
    site.fake.behave(stuck="")
    site.apply(3, config, blue=100)
    assert site.invoke("stuck") == ("blue", 2.0)


def test_sagemaker_apply_of_model_that_fails_to_start_raises_error_with_health_check(
    site: Site, tmp_path: Path
) -> None:
    config = config_of("broken")
    (tmp_path / "model.onnx").write_bytes(b"no model")
    bad = replace(
        site.blue, name="bad", manifest=digest_folder(tmp_path).digest(), location=str(tmp_path)
    )
    site.apply(1, config_of("whole"), blue=100)
    site.fake.startup(3)
    with pytest.raises(
        InfrastructureError, match=r"could not start the endpoint.*ping health check"
    ):
        site.provider.apply(config, state_of(bad, bad=100), generation=1)
    assert site.provider.observe(config) is None
    site.apply(2, config, blue=100)
    assert site.invoke("broken") == ("blue", 2.0)
    with pytest.raises(InfrastructureError, match=r"reverted the update.*ping health check"):
        site.provider.apply(config, state_of(bad, bad=100), generation=3)
    site.fake.startup(60)
    assert site.invoke("broken") == ("blue", 2.0)


def test_sagemaker_apply_without_quota_raises_error_with_remedy(site: Site) -> None:
    site.fake.behave(
        quota="The account-level service limit 'ml.c6i.large for endpoint usage' is 0 Instances"
    )
    with pytest.raises(InfrastructureError, match="quota") as caught:
        site.apply(1, config_of("quota"), blue=100)
    assert "higher quota" in caught.value.remedy


def test_sagemaker_apply_during_other_update_waits_for_its_end(site: Site) -> None:
    config = config_of("busy")
    site.apply(1, config, blue=100)
    site.fake.behave(reads=6)
    name = site.describe("busy")["EndpointConfigName"]
    weights = [{"VariantName": "blue", "DesiredWeight": 5}]
    site.client("sagemaker").update_endpoint_weights_and_capacities(
        EndpointName="busy", DesiredWeightsAndCapacities=weights
    )
    site.apply(2, config, blue=50, green=50)
    assert site.invoke("busy", "green") == ("green", 3.0)
    assert site.describe("busy")["EndpointConfigName"] != name


@pytest.mark.nightly
def test_sagemaker_apply_overtaken_by_later_generation_fails(site: Site) -> None:
    config = config_of("overtaken")
    site.apply(1, config, blue=100, green=0)
    site.fake.behave(reads=100)
    process, order = site.start_client(config, replace(site.state(green=100), generation=2))
    order.send("go")
    site.wait_for("overtaken", "Updating")
    site.apply(3, config, blue=100)
    process.join(60)
    assert process.exitcode == 1
    assert site.provider.observe(config) == replace(site.state(blue=100), generation=3)
    assert site.invoke("overtaken") == ("blue", 2.0)


def test_sagemaker_observe_without_credentials_raises_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(OnnxOpsError, match="AWS credentials are missing"):
        SageMakerEndpoints().observe(config_of("nobody"))


CANARY = RolloutPolicy(steps=(0.1, 0.5, 1.0))
AT_ONCE = RolloutPolicy()


@dataclass
class Driver:
    """A driver that performs the actions of `choose_next_action` until none is left."""

    config: EndpointConfig
    policy: RolloutPolicy
    provider: SageMakerEndpoints = field(default_factory=SageMakerEndpoints)
    roles: Roles = field(default_factory=Roles)
    generation: int = 0

    def toward(self, wanted: Deployment | None, *, now: float = 0.0) -> list[str]:
        """Drive toward the wanted deployment; return the names of the actions that ran."""
        did: list[str] = []
        while len(did) < 10:
            action = choose_next_action(
                desired=wanted,
                observed=self.provider.observe(self.config),
                roles=self.roles,
                policy=self.policy,
                target="cpu",
                command=OperatorCommand.ADVANCE,
                now=now,
            )
            if isinstance(action, Wait):
                return did
            self.perform(action)
            did.append(action.kind.value)
        return did

    def perform(self, action: Action) -> None:
        self.generation += 1
        effect = self.provider.roll_back if action.is_rollback else self.provider.apply
        effect(self.config, action.state, generation=self.generation)
        self.roles = action.roles


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
def test_sagemaker_rollback_after_rollout_serves_previous_version(
    site: Site, strategy: str
) -> None:
    name = f"rollout-{strategy}"
    stepwise = strategy == "ab"
    driver = Driver(config_of(name, strategy=strategy), CANARY if stepwise else AT_ONCE)
    assert driver.toward(site.blue) == ["first-deployment"]
    assert site.invoke(name)[1] == 2.0
    assert driver.toward(site.green, now=1.0) == (
        ["start", "advance", "finish"] if stepwise else ["finish"]
    )
    assert site.invoke(name)[1] == 3.0
    site.fake.fault()
    driver.perform(plan_rollback(driver.roles, site.blue, "cpu", why="it is bad"))
    made, updated = (
        [call for call in site.fake.calls() if verb in call] for verb in (".Create", ".Update")
    )
    assert updated == [f"SageMaker.UpdateEndpoint{'WeightsAndCapacities' if stepwise else ''}"]
    assert bool(made) != stepwise
    assert site.invoke(name)[1] == 2.0
    assert driver.toward(site.blue, now=2.0) == (["clean-up"] if stepwise else [])
    assert site.invoke(name)[1] == 2.0


def test_choose_next_action_after_manual_deletion_of_sagemaker_endpoint_restores_it(
    site: Site,
) -> None:
    driver = Driver(config_of("by-hand"), AT_ONCE)
    driver.toward(site.blue)
    site.client("sagemaker").delete_endpoint(EndpointName="by-hand")
    assert driver.toward(site.blue) == ["restore"]
    assert site.invoke("by-hand")[1] == 2.0
