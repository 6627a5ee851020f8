"""Updates of a SageMaker endpoint: failures, alarms, concurrent clients, and whole rollouts."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.store.models import manifest_of
from onnx_ops.domain.artifact import digest_bytes, hex_digits
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.rollout import Action, OperatorCommand, Roles, Wait, choose_next_action, plan_rollback
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import AlarmRollbackError, InfrastructureError, NotFoundError, OnnxOpsError
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.adapters.sagemaker_cloud import apply_when_told, cloud, config_of, fake, invoke, pair, process_context
from tests.support.clouds.sagemaker import FakeSageMaker, client

__all__ = ["cloud", "fake", "pair"]
pytestmark = pytest.mark.services

FIGURES = {
    "MetricName": "Invocation5XXErrors", "Namespace": "AWS/SageMaker", "Statistic": "Sum", "Period": 60,
    "EvaluationPeriods": 1, "Threshold": 1.0, "ComparisonOperator": "GreaterThanThreshold",
}  # fmt: skip


@pytest.fixture
def provider(fake: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> SageMakerEndpoints:
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)  # its pauses between attempts
    return SageMakerEndpoints()


@pytest.mark.parametrize("lag", [0, 2])
def test_an_update_that_was_taken_back_silently_is_told(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], lag: int
) -> None:
    blue, green = pair
    config = config_of(f"silent-{lag}")
    before = replace(state_of(blue, blue=100), generation=1)
    provider.apply(config, before, generation=1)
    fake.behave(taken_back="the bake was not good", lag=lag)
    with pytest.raises(InfrastructureError, match=r"took the update back \(the bake was not good\)"):
        provider.apply(config, state_of(green, green=100), generation=2)
    observed = provider.observe(config)
    assert observed is not None
    assert observed.is_equivalent(before)
    assert invoke(fake, config.endpoint) == ("blue", 2.0)


def alarm_is(fake: FakeSageMaker, state: str) -> None:
    client(fake, "cloudwatch").set_alarm_state(AlarmName="failing", StateValue=state, StateReason="test")


@pytest.fixture
def alarmed(
    provider: SageMakerEndpoints,
    fake: FakeSageMaker,
    pair: tuple[Deployment, Deployment],
    request: pytest.FixtureRequest,
) -> EndpointConfig:
    """A guarded endpoint on which blue serves, and whose alarm is quiet."""
    client(fake, "cloudwatch").put_metric_alarm(AlarmName="failing", **FIGURES)
    alarm_is(fake, "OK")
    name = f"alarmed-{hex_digits(digest_bytes(request.node.name.encode()))[:8]}"
    config = config_of(name, strategy="guarded", alarms=["failing"], canary_percent=10)
    provider.apply(config, state_of(pair[0], blue=100), generation=1)
    return config


def updates(fake: FakeSageMaker) -> int:
    return sum(call == "SageMaker.UpdateEndpoint" for call in fake.calls())


def condemn(fake: FakeSageMaker, config: EndpointConfig, deployment: Deployment, *, kill: bool = False) -> None:
    """Begin an update, let the alarm fire meanwhile, and be quiet again afterwards."""
    fake.behave(reads=400)
    context = process_context()
    ours, theirs = context.Pipe()
    state = replace(state_of(deployment, **{deployment.name: 100}), generation=2)
    process = context.Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
    process.start()
    ours.send("go")
    sagemaker = client(fake, "sagemaker")
    while sagemaker.describe_endpoint(EndpointName=config.endpoint)["EndpointStatus"] != "Updating":
        pass
    if kill:
        process.kill()
    alarm_is(fake, "ALARM")
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if kill else 1)
    while sagemaker.describe_endpoint(EndpointName=config.endpoint)["EndpointStatus"] != "InService":
        pass
    alarm_is(fake, "OK")
    fake.behave(reads=2)
    fake.fault()


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_layout_that_an_alarm_took_back_is_never_asked_for_again(
    provider: SageMakerEndpoints,
    fake: FakeSageMaker,
    pair: tuple[Deployment, Deployment],
    alarmed: EndpointConfig,
    kill: bool,
) -> None:
    blue, green = pair
    condemn(fake, alarmed, green, kill=kill)
    for generation in (2, 3):
        with pytest.raises(AlarmRollbackError, match=r"alarm failing fired \(.*failing"):
            provider.apply(alarmed, state_of(green, green=100), generation=generation)
    provider.roll_back(alarmed, state_of(blue, blue=100), generation=4)
    assert updates(fake) == 0
    client(fake, "sagemaker").delete_endpoint(EndpointName=alarmed.endpoint)
    with pytest.raises(AlarmRollbackError):
        provider.apply(alarmed, state_of(green, green=100), generation=5)
    provider.apply(alarmed, state_of(blue, blue=100), generation=6)
    assert invoke(fake, alarmed.endpoint) == ("main", 2.0)


def test_no_update_begins_under_an_alarm_that_fires_and_the_way_back_needs_none(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], alarmed: EndpointConfig
) -> None:
    blue, green = pair
    sagemaker = client(fake, "sagemaker")
    first = sagemaker.describe_endpoint(EndpointName=alarmed.endpoint)["EndpointConfigName"]
    provider.apply(alarmed, state_of(green, green=100), generation=2)
    alarm_is(fake, "ALARM")
    fake.fault()
    with pytest.raises(InfrastructureError, match="alarm failing fires"):
        provider.apply(alarmed, state_of(blue, blue=100), generation=3)
    assert updates(fake) == 0
    provider.roll_back(alarmed, state_of(blue, green, blue=100, green=0), generation=4)
    assert invoke(fake, alarmed.endpoint) == ("main", 2.0)
    alarm_is(fake, "OK")
    provider.apply(alarmed, state_of(green, green=100), generation=5)
    sagemaker.update_endpoint(EndpointName=alarmed.endpoint, EndpointConfigName=first)  # by hand
    alarm_is(fake, "ALARM")
    provider.apply(alarmed, state_of(green, green=100), generation=6)  # what stood there last
    assert invoke(fake, alarmed.endpoint) == ("main", 3.0)


def test_an_update_that_failed_under_a_quiet_alarm_may_come_again(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], alarmed: EndpointConfig
) -> None:
    unknown = replace(alarmed, settings={**alarmed.settings, "alarms": ["nowhere"]})
    with pytest.raises(NotFoundError, match="no alarm is called nowhere"):
        provider.apply(unknown, state_of(pair[1], green=100), generation=2)
    fake.behave(taken_back="no capacity")
    with pytest.raises(InfrastructureError, match="no capacity") as failed:
        provider.apply(alarmed, state_of(pair[1], green=100), generation=2)
    assert not isinstance(failed.value, AlarmRollbackError)
    fake.behave(taken_back="")
    alarm_is(fake, "ALARM")
    alarm_is(fake, "OK")
    provider.apply(alarmed, state_of(pair[1], green=100), generation=3)
    assert invoke(fake, alarmed.endpoint) == ("main", 3.0)


def test_a_rollback_that_failed_says_what_to_do_and_the_next_apply_does_it(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("stuck")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    fake.behave(stuck="no capacity for ml.c6i.large")
    with pytest.raises(InfrastructureError, match="neither finish") as told:
        provider.apply(config, state_of(green, green=100), generation=2)
    assert "no capacity" in str(told.value)
    assert "onnx-ops rollback stuck" in told.value.remedy
    assert provider.observe(config) is None
    fake.behave(stuck="")
    provider.apply(config, state_of(blue, blue=100), generation=3)
    assert invoke(fake, "stuck") == ("blue", 2.0)


def test_a_model_that_does_not_start_is_told_and_the_endpoint_made_anew(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], tmp_path: Path
) -> None:
    config = config_of("broken")
    (tmp_path / "model.onnx").write_bytes(b"no model")
    bad = replace(pair[0], name="bad", manifest=manifest_of(tmp_path).digest(), location=str(tmp_path))
    provider.apply(config_of("whole"), state_of(pair[0], blue=100), generation=1)
    fake.startup(3)
    with pytest.raises(InfrastructureError, match=r"could not start the endpoint.*ping health check"):
        provider.apply(config, state_of(bad, bad=100), generation=1)
    assert provider.observe(config) is None
    provider.apply(config, state_of(pair[0], blue=100), generation=2)
    assert invoke(fake, "broken") == ("blue", 2.0)
    with pytest.raises(InfrastructureError, match=r"took the update back.*ping health check"):
        provider.apply(config, state_of(bad, bad=100), generation=3)
    fake.startup(60)
    assert invoke(fake, "broken") == ("blue", 2.0)


def test_a_quota_is_told_with_its_remedy(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    fake.behave(quota="The account-level service limit 'ml.c6i.large for endpoint usage' is 0 Instances")
    with pytest.raises(InfrastructureError, match="quota") as told:
        provider.apply(config_of("quota"), state_of(pair[0], blue=100), generation=1)
    assert "Service Quotas" in told.value.remedy


def test_an_update_of_somebody_who_died_is_waited_for(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("busy")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    fake.behave(reads=6)
    name = client(fake, "sagemaker").describe_endpoint(EndpointName="busy")["EndpointConfigName"]
    weights = [{"VariantName": "blue", "DesiredWeight": 5}]
    client(fake, "sagemaker").update_endpoint_weights_and_capacities(
        EndpointName="busy", DesiredWeightsAndCapacities=weights
    )
    provider.apply(config, state_of(blue, green, blue=50, green=50), generation=2)
    assert invoke(fake, "busy", "green") == ("green", 3.0)
    assert client(fake, "sagemaker").describe_endpoint(EndpointName="busy")["EndpointConfigName"] != name


@pytest.mark.nightly
def test_a_driver_that_was_overtaken_is_told_and_the_later_state_stands(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("overtaken")
    provider.apply(config, state_of(blue, green, blue=100, green=0), generation=1)
    fake.behave(reads=100)
    ours, theirs = process_context().Pipe()
    state = replace(state_of(green, green=100), generation=2)
    process = process_context().Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
    process.start()
    ours.send("go")
    while client(fake, "sagemaker").describe_endpoint(EndpointName="overtaken")["EndpointStatus"] != "Updating":
        pass
    provider.apply(config, state_of(blue, blue=100), generation=3)
    process.join(60)
    assert process.exitcode == 1
    assert provider.observe(config) == replace(state_of(blue, blue=100), generation=3)
    assert invoke(fake, "overtaken") == ("blue", 2.0)


def test_errors_are_typed(provider: SageMakerEndpoints, fake: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(OnnxOpsError, match="no AWS credentials"):
        SageMakerEndpoints().observe(config_of("nobody"))


CANARY = RolloutPolicy(steps=(0.1, 0.5, 1.0))
AT_ONCE = RolloutPolicy()


@dataclass
class Driver:
    """Does what `choose_next_action` says until nothing is left to do."""

    config: EndpointConfig
    policy: RolloutPolicy
    provider: SageMakerEndpoints = field(default_factory=SageMakerEndpoints)
    roles: Roles = field(default_factory=Roles)
    generation: int = 0

    def toward(self, wanted: Deployment | None, *, now: float = 0.0) -> list[str]:
        """Names of the actions that it took."""
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


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployment, Deployment]:
    folder: Path = tmp_path_factory.mktemp("models")
    return (
        scaling_deployment(folder / "1", name="v1", version="1", scale=2.0),
        scaling_deployment(folder / "2", name="v2", version="2", scale=3.0),
    )


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
def test_first_next_back_and_retired(
    fake: FakeSageMaker, versions: tuple[Deployment, Deployment], strategy: str
) -> None:
    one, two = versions
    name = f"rollout-{strategy}"
    stepwise = strategy == "ab"
    driver = Driver(config_of(name, strategy=strategy), CANARY if stepwise else AT_ONCE)
    assert driver.toward(one) == ["first-deployment"]
    assert invoke(fake, name)[1] == 2.0
    assert driver.toward(two, now=1.0) == (["start", "advance", "finish"] if stepwise else ["finish"])
    assert invoke(fake, name)[1] == 3.0
    fake.fault()
    driver.perform(plan_rollback(driver.roles, one, "cpu", why="it is bad"))
    made, updated = ([call for call in fake.calls() if verb in call] for verb in (".Create", ".Update"))
    assert updated == [f"SageMaker.UpdateEndpoint{'WeightsAndCapacities' if stepwise else ''}"]
    assert bool(made) != stepwise
    assert invoke(fake, name)[1] == 2.0
    assert driver.toward(one, now=2.0) == (["clean-up"] if stepwise else [])
    assert invoke(fake, name)[1] == 2.0


def test_what_was_deleted_by_hand_is_restored(fake: FakeSageMaker, versions: tuple[Deployment, Deployment]) -> None:
    driver = Driver(config_of("by-hand"), AT_ONCE)
    driver.toward(versions[0])
    client(fake, "sagemaker").delete_endpoint(EndpointName="by-hand")
    assert driver.toward(versions[0]) == ["restore"]
    assert invoke(fake, "by-hand")[1] == 2.0
