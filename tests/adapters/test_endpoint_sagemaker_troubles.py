"""What may go wrong at SageMaker and on the way there, and what is told and left of it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sagemaker_cloud import Load, all_that_stands, apply_when_told, cloud, config_of, fake, invoke, pair

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.adapters.store.models import manifest_of
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import EnvironmentFailure, NotFound, OnnxOpsError, ServiceUnavailable
from onnx_ops.testing.clouds.sagemaker import FakeSageMaker, client
from onnx_ops.testing.endpoints import state_of

__all__ = ["cloud", "fake", "pair"]
pytestmark = pytest.mark.services

KINDS = ("throttle", "error", "drop")
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
    with pytest.raises(EnvironmentFailure, match=r"took the update back \(the bake was not good\)"):
        provider.apply(config, state_of(green, green=100), generation=2)
    observed = provider.observe(config)
    assert observed is not None
    assert observed.same_as(before)
    assert invoke(fake, config.endpoint) == ("blue", 2.0)


def test_an_alarm_that_fires_takes_a_guarded_update_back_and_does_not_hinder_the_way_back(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    cloudwatch, sagemaker = client(fake, "cloudwatch"), client(fake, "sagemaker")
    config = config_of("alarmed", strategy="guarded", alarms="failing", canary_percent=10)
    provider.apply(config, state_of(blue, blue=100), generation=1)
    with pytest.raises(NotFound, match="no alarm is called failing"):
        provider.apply(config, state_of(green, green=100), generation=2)
    cloudwatch.put_metric_alarm(AlarmName="failing", **FIGURES)
    cloudwatch.set_alarm_state(AlarmName="failing", StateValue="OK", StateReason="test")
    # The alarm fires once the update has begun: the fake asks for it at every read.
    fake.behave(reads=400)
    context = _context()
    ours, theirs = context.Pipe()
    state = replace(state_of(green, green=100), generation=3)
    process = context.Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
    process.start()
    ours.send("go")
    while sagemaker.describe_endpoint(EndpointName="alarmed")["EndpointStatus"] != "Updating":
        pass
    cloudwatch.set_alarm_state(AlarmName="failing", StateValue="ALARM", StateReason="test")
    process.join(60)
    assert process.exitcode == 1
    found = sagemaker.describe_endpoint(EndpointName="alarmed")
    assert found["EndpointStatus"] == "InService"
    assert "failing" in found["FailureReason"]
    assert invoke(fake, "alarmed") == ("main", 2.0)
    fake.behave(reads=2)
    provider.apply(config, state_of(green, green=100), generation=4)
    assert invoke(fake, "alarmed") == ("main", 3.0)
    provider.apply(config, state_of(blue, green, blue=100, green=0), generation=5)
    assert invoke(fake, "alarmed") == ("main", 2.0)


def test_a_rollback_that_failed_says_what_to_do_and_the_next_apply_does_it(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("stuck")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    fake.behave(stuck="no capacity for ml.c6i.large")
    with pytest.raises(EnvironmentFailure, match="neither finish") as told:
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
    with pytest.raises(EnvironmentFailure, match=r"could not start the endpoint.*ping health check"):
        provider.apply(config, state_of(bad, bad=100), generation=1)
    assert provider.observe(config) is None
    provider.apply(config, state_of(pair[0], blue=100), generation=2)
    assert invoke(fake, "broken") == ("blue", 2.0)
    with pytest.raises(EnvironmentFailure, match=r"took the update back.*ping health check"):
        provider.apply(config, state_of(bad, bad=100), generation=3)
    fake.startup(60)
    assert invoke(fake, "broken") == ("blue", 2.0)


def test_a_quota_is_told_with_its_remedy(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    fake.behave(quota="The account-level service limit 'ml.c6i.large for endpoint usage' is 0 Instances")
    with pytest.raises(EnvironmentFailure, match="quota") as told:
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


def test_a_driver_that_was_overtaken_is_told_and_the_later_state_stands(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment]
) -> None:
    blue, green = pair
    config = config_of("overtaken")
    provider.apply(config, state_of(blue, green, blue=100, green=0), generation=1)
    fake.behave(reads=100)
    ours, theirs = _context().Pipe()
    state = replace(state_of(green, green=100), generation=2)
    process = _context().Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
    process.start()
    ours.send("go")
    while client(fake, "sagemaker").describe_endpoint(EndpointName="overtaken")["EndpointStatus"] != "Updating":
        pass
    provider.apply(config, state_of(blue, blue=100), generation=3)
    process.join(60)
    assert process.exitcode == 1
    assert provider.observe(config) == replace(state_of(blue, blue=100), generation=3)
    assert invoke(fake, "overtaken") == ("blue", 2.0)


def _context() -> multiprocessing.context.ForkServerContext:
    """Clients that start at once: what they import is there already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["onnx_ops.adapters.endpoints.sagemaker", "boto3", "pytest"])
    return context


def _requests(provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], name: str) -> int:
    """How many requests the change of the sweeps takes."""
    blue, green = pair
    config = config_of(f"{name}-whole")
    provider.apply(config, state_of(blue, blue=100), generation=1)
    fake.fault()
    provider.apply(config, state_of(blue, green, blue=90, green=10), generation=2)
    return len(fake.calls())


def _check(provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], name: str) -> None:
    """The endpoint answers, goes on, goes back, and nothing stands there that is not told."""
    blue, green = pair
    config = config_of(name)
    observed = provider.observe(config)
    assert observed is not None
    assert sum(observed.split.weights.values()) == 100
    provider.apply(config, state_of(blue, green, blue=90, green=10), generation=3)
    assert invoke(fake, name, "green") == ("green", 3.0)
    provider.apply(config, state_of(blue, blue=100), generation=4)
    assert invoke(fake, name) == ("blue", 2.0)
    left = provider.leftovers(config, frozenset({blue.manifest}))
    for one in left:
        provider.discard(config, one)
    assert provider.leftovers(config, frozenset({blue.manifest})) == ()
    stands = all_that_stands(fake, name)
    assert sorted(kind for kind, _ in stands) == ["archive", "endpoint-config", "model"], (left, stands)
    assert invoke(fake, name) == ("blue", 2.0)


@pytest.fixture
def load(fake: FakeSageMaker) -> Iterator[Load]:
    with Load(fake) as load:
        yield load
    assert load.failed == []
    assert load.answered > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lasting", [False, True])
def test_faults_at_every_request(
    provider: SageMakerEndpoints,
    fake: FakeSageMaker,
    pair: tuple[Deployment, Deployment],
    load: Load,
    kind: str,
    lasting: bool,
) -> None:
    """A fault that passes is survived; one that lasts is told, and nothing is lost by it."""
    blue, green = pair
    requests = _requests(provider, fake, pair, f"s-{kind}-{int(lasting)}")
    survived = 0
    for request in range(KINDS.index(kind), requests, len(KINDS)):  # the kinds take turns
        moment = 2 * request + (kind != "throttle")  # what was throttled had no effect
        name = f"s-{kind}-{int(lasting)}-{moment}"
        config = config_of(name)
        provider.apply(config, state_of(blue, blue=100), generation=1)
        load.endpoint = name
        fake.fault(at=moment, kind=kind, times=8 if lasting else 1)
        try:
            provider.apply(config, state_of(blue, green, blue=90, green=10), generation=2)
            survived += 1
        except ServiceUnavailable:
            assert lasting
        fake.fault()
        _check(provider, fake, pair, name)
    assert survived > 0 or lasting


def test_a_client_that_is_killed_at_every_request(
    provider: SageMakerEndpoints, fake: FakeSageMaker, pair: tuple[Deployment, Deployment], load: Load
) -> None:
    blue, green = pair
    requests = _requests(provider, fake, pair, "k")
    context = _context()
    for moment in (0, *range(1, 2 * requests, 2)):  # after one request is before the next
        name = f"k-{moment}"
        config = config_of(name)
        provider.apply(config, state_of(blue, blue=100), generation=1)
        load.endpoint = name
        ours, theirs = context.Pipe()
        state = replace(state_of(blue, green, blue=90, green=10), generation=2)
        process = context.Process(target=apply_when_told, args=(dict(fake.environment), config, state, theirs))
        process.start()
        fake.fault(at=moment, kind="kill", pid=process.pid)
        ours.send("go")
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        fake.fault()
        _check(provider, fake, pair, name)


def test_errors_are_typed(provider: SageMakerEndpoints, fake: FakeSageMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(OnnxOpsError, match="no AWS credentials"):
        SageMakerEndpoints().observe(config_of("nobody"))
