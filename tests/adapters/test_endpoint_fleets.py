"""Endpoints with `traffic: table` on the fakes of both clouds.

Their instances are real followers with real servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.fleets import TrafficModes
from onnx_ops.adapters.files import FsspecObjects, LocalObjects
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import AlarmRollbackError, ConflictError, InfrastructureError, UserError
from onnx_ops.testing.endpoints import Disturbance, EndpointProviderSuite
from tests.adapters.fleet_site import (
    AzureFleet,
    FleetSite,
    SageMakerFleet,
    open_azure_fleet,
    open_sagemaker_fleet,
    with_options,
)
from tests.adapters.test_endpoint_replicas import disturbed_objects
from tests.support.clouds.sagemaker import FakeSageMaker, client
from tests.support.extras import require
from tests.support.load.loops import RequestLoop
from tests.support.processes import until

require("azure.ai.ml", reason="LOUD: the extra `azure` is not installed")

pytestmark = pytest.mark.services

QUIET = {"taken_back": "", "stuck": "", "quota": "", "lag": 0, "reads": 2}


@pytest.fixture
def amazon(
    sagemaker: FakeSageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SageMakerFleet]:
    for name, value in sagemaker.environment.items():
        monkeypatch.setenv(name, value)
    sagemaker.reset()
    sagemaker.behave(**QUIET)
    with open_sagemaker_fleet(sagemaker, tmp_path) as site:
        yield site
    sagemaker.reset()
    assert sagemaker.denied() == []


@pytest.fixture
def azure(tmp_path: Path) -> Iterator[AzureFleet]:
    with open_azure_fleet(tmp_path) as site:
        yield site


@pytest.fixture(params=[pytest.param("sagemaker", marks=pytest.mark.nightly), "azureml"])
def fleet(request: pytest.FixtureRequest) -> FleetSite:
    """Return a site whose endpoint serves blue, and then green to half of the users."""
    site: FleetSite = request.getfixturevalue("amazon" if request.param == "sagemaker" else "azure")
    site.apply(1, blue=100)
    site.apply(2, blue=50, green=50)
    return site


def test_fleet_with_two_versions_keeps_users_on_their_version_and_counts_feedback(
    fleet: FleetSite,
) -> None:
    fleet.provider.confirm_rollout(fleet.config)
    users = [f"user {number};%" for number in range(40)]
    first = {user: fleet.invoke(user) for user in users}
    assert {answer.deployment for answer in first.values()} == {"blue", "green"}
    assert all(
        answer.factor == (2.0 if answer.deployment == "blue" else 3.0) for answer in first.values()
    )
    again = [fleet.invoke(user).deployment for _ in range(3) for user in users]
    assert again == [answer.deployment for answer in first.values()] * 3
    fleet.report({answer.token: answer.deployment == "green" for answer in first.values()})
    expected = Counter(answer.deployment for answer in first.values())
    source = fleet.provider.metrics(fleet.config.options)

    def read_feedback() -> dict[str, tuple[int, int]]:
        tallies = source.read(fleet.config, {"blue": None, "green": None}).sum_tallies()
        return {name: (tally.feedback, tally.successes) for name, tally in tallies.items()}

    counts = {"blue": (expected["blue"], 0), "green": (expected["green"], expected["green"])}
    until(lambda: read_feedback() == counts)


def test_fleet_step_and_rollback_change_nothing_in_control_plane(fleet: FleetSite) -> None:
    before = fleet.count_changes()
    fleet.apply(3, blue=10, green=90)
    fleet.provider.roll_back(fleet.config, fleet.state(blue=100), generation=4)
    assert fleet.count_changes() == before
    assert {fleet.invoke(f"user-{number}").deployment for number in range(10)} == {"blue"}
    until(lambda: not fleet.observed().stragglers)


def test_fleet_with_other_image_is_replaced_without_failed_request(fleet: FleetSite) -> None:
    fleet.apply(3, blue=100)
    with RequestLoop(lambda: fleet.invoke("loader")) as load:
        with_options(fleet, image=f"{fleet.config.options['image']}-new")
        assert any("mage" in line for line in fleet.drift())
        fleet.apply(4, blue=100)
    assert load.failed == []
    assert load.answered > 10
    assert fleet.drift() == []

    def list_images() -> set[str]:
        servers = fleet.provider.list_servers(fleet.config)
        return {one.image for one in servers if one.state == "reports"}

    until(lambda: list_images() == {str(fleet.config.options["image"])})
    for orphan in fleet.provider.list_orphans(fleet.config, frozenset()):
        fleet.provider.delete_orphan(fleet.config, orphan)
    assert not fleet.provider.list_orphans(fleet.config, frozenset())
    assert fleet.invoke("anna").deployment == "blue"


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["image", "count"])
def test_fleet_during_replacement_of_instances_reports_replacement_and_rolls_back(
    fleet: FleetSite, key: str
) -> None:
    count = "instance_count" if fleet.provider_name == "sagemaker" else "instances"
    changed: Mapping[str, Json] = {"image": "registry.example/onnx-ops:new"}
    fleet.slow_updates()
    with_options(fleet, **(changed if key == "image" else {count: 3}))
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(fleet.apply, 3, blue=50, green=50)
        until(lambda: bool(fleet.observed().replacements))
        assert fleet.observed().is_equivalent(fleet.state(blue=50, green=50))
        fleet.provider.roll_back(fleet.config, fleet.state(blue=100), generation=4)
        is_running = not update.done()
        answering = {fleet.invoke(f"user-{number}").deployment for number in range(10)}
        with suppress(ConflictError):  # the table of the rollback is later than that of the update
            update.result(timeout=120)
    assert is_running
    assert answering == {"blue"}
    assert fleet.observed().is_equivalent(fleet.state(blue=100, green=0))
    assert (fleet.observed().replacements, fleet.drift()) == ((), [])


def test_fleet_validate_change_of_traffic_or_location_raises_user_error(azure: AzureFleet) -> None:
    changed = replace(azure.config, options={**azure.config.options, "traffic": "native"})
    moved = replace(azure.config, options={**azure.config.options, "control": "/elsewhere"})
    for after, name in ((changed, "traffic"), (moved, "control")):
        with pytest.raises(UserError, match=f"{name} of an existing endpoint"):
            azure.provider.validate_change(azure.config, after)


@pytest.mark.parametrize("traffic", ["table", "native"])
@pytest.mark.parametrize(
    ("site", "machine"), [("amazon", "ml.m7g.large"), ("azure", "Standard_F8s_v2")]
)
def test_fleet_validate_change_of_machine_with_same_target_raises_user_error(
    request: pytest.FixtureRequest, site: str, machine: str, traffic: str
) -> None:
    fleet: FleetSite = request.getfixturevalue(site)
    options = {**fleet.config.options, "traffic": traffic}
    before = replace(fleet.config, options=options)
    after = replace(before, options={**options, "instance_type": machine})
    with pytest.raises(UserError) as caught:
        fleet.provider.validate_change(before, after)
    assert f"no decision of target {before.target} was measured for {machine}" in str(caught.value)
    assert "onnx-ops targets" in caught.value.remedy
    assert "onnx-ops run" in caught.value.remedy
    measured = replace(after, target_digest=digest_bytes(b"the target with another machine"))
    fleet.provider.validate_change(before, measured)


@pytest.mark.nightly
def test_fleet_with_other_client_id_drifts_until_applied(azure: AzureFleet) -> None:
    azure.apply(1, blue=100)
    with_options(azure, client_id="id-of-the-identity")
    assert any("client_id" in line for line in azure.drift())
    azure.apply(2, blue=100)
    assert azure.drift() == []


def put_alarm(site: SageMakerFleet, state: str) -> None:
    """Create the alarm `errors`, or change its state."""
    cloudwatch = client(site.fake, "cloudwatch")
    cloudwatch.put_metric_alarm(
        AlarmName="errors",
        MetricName="Invocation5XXErrors",
        Namespace="AWS/SageMaker",
        Period=60,
        EvaluationPeriods=1,
        Threshold=1,
        ComparisonOperator="GreaterThanThreshold",
        Statistic="Sum",
    )
    cloudwatch.set_alarm_state(AlarmName="errors", StateValue=state, StateReason="a test")


@pytest.mark.nightly
def test_fleet_update_with_firing_alarm_does_not_recommend_rollback(
    amazon: SageMakerFleet,
) -> None:
    """A rollback would move the traffic, and change no instance."""
    put_alarm(amazon, "ALARM")
    amazon.apply(1, blue=100)
    with_options(amazon, image="registry.example/onnx-ops:2", alarms=["errors"])
    with pytest.raises(InfrastructureError, match="alarms are firing") as raised:
        amazon.apply(2, blue=100)
    assert "rollback" not in raised.value.remedy
    with_options(amazon, alarms=[])
    amazon.apply(3, blue=100)
    assert amazon.drift() == []


def test_fleet_update_reverted_by_alarm_raises_infrastructure_error_and_keeps_serving(
    amazon: SageMakerFleet,
) -> None:
    put_alarm(amazon, "OK")
    with_options(amazon, alarms=["errors"])
    amazon.apply(1, blue=100)
    with_options(amazon, image="registry.example/onnx-ops:bad")
    amazon.fake.behave(reads=400)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(amazon.apply, 2, blue=100)
        until(lambda: amazon.read_status() == "Updating")
        put_alarm(amazon, "ALARM")
        with pytest.raises(InfrastructureError, match="changed state since it began") as raised:
            update.result()
    assert not isinstance(raised.value, AlarmRollbackError), "that error would reject the release"
    assert amazon.invoke("anna").deployment == "blue"
    assert amazon.observed().is_equivalent(amazon.state(blue=100))


STATUSES = ("InService", "Updating", "UpdateRollbackFailed", "Failed", "Creating", "Deleted")


def bring_to(site: SageMakerFleet, status: str) -> None:
    """Bring the endpoint to a status of SageMaker, as an interrupted change of options does."""
    fake, sagemaker = site.fake, client(site.fake, "sagemaker")
    if status == "InService":
        return
    if status in ("Failed", "Creating", "Deleted"):
        config = site.describe()["EndpointConfigName"]
        arn = site.describe()["EndpointArn"]
        tags = sagemaker.list_tags(ResourceArn=arn)["Tags"]
        sagemaker.delete_endpoint(EndpointName=site.name)
        until(lambda: site.read_status() == "Deleted")
        if status == "Deleted":
            return
        fake.startup(0.0 if status == "Failed" else 60.0)
        fake.behave(reads=1 if status == "Failed" else 200)
        sagemaker.create_endpoint(EndpointName=site.name, EndpointConfigName=config, Tags=tags)
    else:
        fake.behave(
            stuck="no capacity" if status == "UpdateRollbackFailed" else "",
            reads=1 if status == "UpdateRollbackFailed" else 200,
        )
        config = site.describe()["EndpointConfigName"]
        other = sagemaker.describe_endpoint_config(EndpointConfigName=config)
        sagemaker.create_endpoint_config(
            EndpointConfigName="other", ProductionVariants=other["ProductionVariants"]
        )
        sagemaker.update_endpoint(EndpointName=site.name, EndpointConfigName="other")
    until(lambda: site.read_status() == status)


@pytest.mark.nightly
@pytest.mark.parametrize("status", STATUSES)
def test_fleet_apply_after_rollback_in_steady_or_interrupted_status_serves_stable_version(
    amazon: SageMakerFleet, status: str
) -> None:
    """A rollback changes nothing in the control plane while instances report."""
    amazon.apply(1, blue=100)
    amazon.apply(2, blue=90, green=10)
    bring_to(amazon, status)
    amazon.fake.fault()
    with suppress(InfrastructureError):  # a fleet that cannot start is reported
        amazon.provider.roll_back(amazon.config, amazon.state(blue=100), generation=3)
    if status in ("InService", "Updating", "UpdateRollbackFailed"):
        assert amazon.count_changes() == 0
    amazon.fake.behave(**QUIET)
    amazon.fake.startup(60.0)
    amazon.open_again()
    if status == "Creating":
        # SageMaker ends the creation before the next change.
        until(lambda: amazon.read_status() != "Creating")
    amazon.apply(4, blue=100)
    assert amazon.observed().is_equivalent(amazon.state(blue=100))
    assert {amazon.invoke(f"user-{number}").deployment for number in range(10)} == {"blue"}


@pytest.mark.nightly
class TestFleets(EndpointProviderSuite):
    """The endpoint suite on the fakes of both clouds."""

    site: FleetSite

    @pytest.fixture(params=["sagemaker", "azureml"])
    def made(self, request: pytest.FixtureRequest) -> FleetSite:
        fixture = "amazon" if request.param == "sagemaker" else "azure"
        self.site = request.getfixturevalue(fixture)
        return self.site

    @pytest.fixture
    def provider(self, made: FleetSite) -> TrafficModes:
        return made.provider

    @pytest.fixture
    def config(self, made: FleetSite) -> EndpointConfig:
        return made.config

    @pytest.fixture
    def deployments(self, made: FleetSite) -> tuple[Deployment, Deployment]:
        return made.blue, made.green

    @pytest.fixture
    def chosen(self) -> Callable[[Iterable[int]], Sequence[int]]:
        # The suite of replicas disturbs each of the first seven calls, so every third call is
        # enough here. Later calls only read the reports.
        return lambda requests: list(requests)[:7:3]

    def disturbed(self, fault: Disturbance, at: int = 0) -> AbstractContextManager[Sized]:
        is_remote = isinstance(self.site, SageMakerFleet)
        return disturbed_objects(FsspecObjects if is_remote else LocalObjects, fault, at)

    def scale(self, address: str, *, user: str | None = None) -> float:
        return self.site.invoke(user or "anna").factor
