"""Rollbacks of SageMaker endpoints that serve, are busy or failed, and the requests to AWS."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from onnx_ops.domain.endpoint import EndpointConfig, serves_only
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import ConflictError, InfrastructureError, OnnxOpsError
from tests.adapters.sagemaker_cloud import Site, config_of
from tests.support.clouds.sagemaker import BUCKET

pytestmark = pytest.mark.services

ATTEMPTS = 4
CHANGES = ("CreateEndpoint", "UpdateEndpoint", "UpdateEndpointWeightsAndCapacities", "Delete")
STATUSES = (
    "InService",
    "Updating",
    "RollingBack",
    "UpdateRollbackFailed",
    "Failed",
    "OutOfService",
    "Creating",
    "Deleting",
)


def list_calls(site: Site, act: Callable[[], object]) -> list[str]:
    """Return the requests to AWS that an action sends, in order.

    Requests to SageMaker are shown by their operation, those to S3 by their method.
    """
    site.fake.fault()
    act()
    return [
        call.removeprefix("SageMaker.") if call.startswith("SageMaker.") else call.split()[0]
        for call in site.fake.calls()
    ]


def count_changes(calls: list[str]) -> int:
    """Return the number of requests that change the endpoint."""
    return sum(call in CHANGES or call.startswith("DeleteEndpoint") for call in calls)


def roll_back_until_done(site: Site, config: EndpointConfig, generation: int) -> None:
    """Repeat a rollback to blue, each time with a new generation, as reconciliation does."""
    for attempt in range(ATTEMPTS):
        try:
            site.provider.roll_back(config, site.state(blue=100), generation=generation + attempt)
        except OnnxOpsError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
@pytest.mark.parametrize("status", STATUSES)
def test_sagemaker_roll_back_from_serving_busy_or_failed_status_serves_requested_version(
    site: Site, strategy: str, status: str
) -> None:
    config = config_of(f"from-{strategy}-{status}", strategy=strategy)
    site.apply(1, config, blue=100)
    site.apply(2, config, **({"blue": 90, "green": 10} if strategy == "ab" else {"green": 100}))
    if status != "InService":
        site.fake.bring_to(config.endpoint, status)
    roll_back_until_done(site, config, 3)
    assert serves_only(site.observed(config), site.blue)
    assert site.invoke(config.endpoint)[1] == 2.0
    site.apply(9, config, blue=100)
    assert site.invoke(config.endpoint)[1] == 2.0


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
def test_sagemaker_roll_back_of_endpoint_that_refuses_updates_replaces_it(
    site: Site, strategy: str
) -> None:
    config = config_of(f"refuses-{strategy}", strategy=strategy)
    site.apply(1, config, green=100)
    site.fake.bring_to(config.endpoint, "OutOfService")
    site.fake.behave(refuses_updates=True)
    try:
        roll_back_until_done(site, config, 2)
    finally:
        site.fake.behave(refuses_updates=False)
    assert site.invoke(config.endpoint)[1] == 2.0


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
def test_sagemaker_apply_of_former_state_after_failed_update_serves_former_version(
    site: Site, strategy: str
) -> None:
    """This is what the recommended reconciliation does, because the ledger has this state."""
    config = config_of(f"restored-{strategy}", strategy=strategy)
    site.apply(1, config, blue=100)
    site.fake.behave(stuck="no capacity")
    with pytest.raises(InfrastructureError, match="neither finish nor revert") as failed:
        site.apply(2, config, green=100)
    site.fake.behave(stuck="")
    assert f"onnx-ops reconcile {config.endpoint}" in failed.value.remedy
    assert site.provider.observe(config) is None
    site.apply(3, config, blue=100)
    assert serves_only(site.observed(config), site.blue)


@pytest.mark.parametrize("strategy", ["ab", "guarded"])
def test_sagemaker_roll_back_after_failed_update_serves_former_version_with_new_config(
    site: Site, strategy: str
) -> None:
    """The endpoint keeps the former config, and SageMaker refuses an update to it."""
    config = config_of(f"stuck-{strategy}", strategy=strategy)
    site.apply(1, config, blue=100)
    former = site.describe(config.endpoint)["EndpointConfigName"]
    site.fake.behave(stuck="no capacity")
    with pytest.raises(InfrastructureError):
        site.apply(2, config, green=100)
    assert site.describe(config.endpoint)["EndpointStatus"] == "UpdateRollbackFailed"
    with pytest.raises(InfrastructureError, match="no capacity"):
        site.provider.roll_back(config, site.state(blue=100), generation=3)
    site.fake.behave(stuck="")
    site.provider.roll_back(config, site.state(blue=100), generation=4)
    assert serves_only(site.observed(config), site.blue)
    assert site.describe(config.endpoint)["EndpointConfigName"] != former
    assert site.observed(config).drift == ()


def test_sagemaker_roll_back_changes_traffic_with_third_request(site: Site) -> None:
    config, back = config_of("third"), site.state(blue=100, green=0)
    site.apply(1, config, blue=90, green=10)
    calls = list_calls(site, lambda: site.provider.roll_back(config, back, generation=2))
    assert calls[:3] == ["GET", "PUT", "UpdateEndpointWeightsAndCapacities"]
    assert count_changes(calls) == 1
    assert site.invoke("third") == ("blue", 2.0)


def test_sagemaker_roll_back_of_finished_or_older_generation_changes_nothing(site: Site) -> None:
    config, back = config_of("finished"), site.state(blue=100, green=0)
    site.apply(1, config, blue=90, green=10)
    site.provider.roll_back(config, back, generation=2)
    for generation in (2, 3):
        calls = list_calls(
            site, partial(site.provider.roll_back, config, back, generation=generation)
        )
        assert count_changes(calls) == 0
        assert len(calls) <= 4
    site.apply(4, config, blue=100)
    calls = list_calls(site, lambda: site.provider.roll_back(config, back, generation=5))
    assert count_changes(calls) == 0
    with pytest.raises(ConflictError) as conflict:
        site.provider.roll_back(config, site.state(green=100), generation=4)
    (claim,) = re.findall(rf"`s3://{BUCKET}/(.+)`", conflict.value.remedy)
    assert site.client("s3").head_object(Bucket=BUCKET, Key=claim)
    assert site.invoke("finished") == ("blue", 2.0)


def test_sagemaker_roll_back_overtaken_before_its_claim_changes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client claims a later generation between the read and the write of the claim."""
    from onnx_ops.adapters.endpoints.sagemaker_client import GenerationFence

    config = config_of("raced")
    site.apply(1, config, blue=90, green=10)
    take = GenerationFence.take

    def take_late(self: GenerationFence, state: object) -> None:
        monkeypatch.setattr(GenerationFence, "take", take)
        site.apply(3, config, blue=50, green=50)
        site.fake.fault()
        take(self, state)  # type: ignore[arg-type]  # the state that the provider passes on

    monkeypatch.setattr(GenerationFence, "take", take_late)
    with pytest.raises(ConflictError):
        site.provider.roll_back(config, site.state(blue=100), generation=2)
    assert [call for call in site.fake.calls() if call.startswith("SageMaker.Update")] == []
    assert site.observed(config).split.weights == {"blue": 50, "green": 50}


def test_sagemaker_roll_back_of_foreign_endpoint_with_same_variants_changes_nothing(
    site: Site,
) -> None:
    site.apply(1, config_of("ours"), blue=90, green=10)
    foreign = config_of("foreign")
    name = site.describe("ours")["EndpointConfigName"]
    site.client("sagemaker").create_endpoint(EndpointName="foreign", EndpointConfigName=name)
    site.wait_for("foreign", "InService")
    with pytest.raises(OnnxOpsError):
        site.apply(1, foreign, blue=90, green=10)
    with pytest.raises(OnnxOpsError):
        site.provider.roll_back(foreign, site.state(blue=100), generation=2)
    assert {v["CurrentWeight"] for v in site.describe("foreign")["ProductionVariants"]} == {90, 10}


def test_sagemaker_observation_weight_step_and_rollback_send_expected_requests(site: Site) -> None:
    config = config_of("few")
    site.apply(1, config, blue=90, green=10)
    table = {
        "idle observation": list_calls(site, lambda: site.provider.observe(config)),
        "weight step": list_calls(site, lambda: site.apply(2, config, blue=50, green=50)),
        "rollback": list_calls(
            site, lambda: site.provider.roll_back(config, site.state(blue=100), generation=3)
        ),
    }
    step, look = "UpdateEndpointWeightsAndCapacities", "DescribeEndpoint"
    assert table == {
        "idle observation": [look, "GET"],
        "weight step": ["GET", "PUT", step, look, look],
        "rollback": ["GET", "PUT", step, look, look, "PUT"],
    }
    assert site.invoke("few") == ("blue", 2.0)


def test_sagemaker_weight_step_restores_lost_endpoint(site: Site) -> None:
    config = config_of("lost")
    site.apply(1, config, blue=90, green=10)
    site.client("sagemaker").delete_endpoint(EndpointName="lost")
    site.apply(2, config, blue=40, green=60)
    assert site.observed(config).split.weights == {"blue": 40, "green": 60}


def make_leftovers(site: Site, endpoint: str, count: int) -> None:
    """Create models, configs and archives of former versions, as onnx-ops names them."""
    sagemaker, s3 = site.client("sagemaker"), site.client("s3")
    tags: list[dict[str, Json]] = [{"Key": "onnx-ops.endpoint", "Value": endpoint}]
    used = site.describe(endpoint)["EndpointConfigName"]
    config = sagemaker.describe_endpoint_config(EndpointConfigName=used)
    model = sagemaker.describe_model(ModelName=config["ProductionVariants"][0]["ModelName"])
    for number in range(count):
        name = f"{endpoint}-{number:020x}"
        sagemaker.create_model(
            ModelName=name,
            ExecutionRoleArn=model["ExecutionRoleArn"],
            PrimaryContainer=model["PrimaryContainer"],
            Tags=tags,
        )
        sagemaker.create_endpoint_config(
            EndpointConfigName=f"{endpoint}-{number:016x}-{number:010x}",
            ProductionVariants=[{**config["ProductionVariants"][0], "ModelName": name}],
            Tags=tags,
        )
        s3.put_object(
            Bucket=BUCKET,
            Key=f"onnx-ops/{endpoint}/archives/{number:064x}/1/model.tar.gz",
            Body=json.dumps(number).encode(),
        )


def test_sagemaker_remove_sends_constant_number_of_requests_for_each_resource(site: Site) -> None:
    counts = {}
    for leftovers in (0, 2, 6):
        config = config_of(f"removed-{leftovers}")
        site.apply(1, config, blue=100)
        make_leftovers(site, config.endpoint, leftovers)
        calls = list_calls(site, partial(site.provider.remove, config))
        # The fake lists ten items a page, so the number of list requests depends on the leftovers.
        # These requests are not counted.
        counts[leftovers] = Counter(call for call in calls if not call.startswith("ListM"))
        counts[leftovers].pop("ListEndpointConfigs")
        left = site.client("s3").list_objects_v2(
            Bucket=BUCKET, Prefix=f"onnx-ops/{config.endpoint}/"
        )
        assert left.get("Contents", []) == []
    per_resource = {"ListTags": 2, "DeleteModel": 1, "DeleteEndpointConfig": 1, "DELETE": 1}
    for leftovers in (2, 6):
        assert counts[leftovers] - counts[0] == {
            name: number * leftovers for name, number in per_resource.items()
        }


def test_sagemaker_delete_orphan_sends_at_most_five_requests(site: Site) -> None:
    config = config_of("orphans")
    site.apply(1, config, blue=100)
    make_leftovers(site, "orphans", 3)
    orphans = site.provider.list_orphans(config, frozenset())
    numbers: dict[str, set[int]] = {}
    for orphan in orphans:
        calls = list_calls(site, partial(site.provider.delete_orphan, config, orphan))
        numbers.setdefault(orphan.kind, set()).add(len(calls))
    assert {kind: max(each) for kind, each in numbers.items()} == {
        "endpoint-config": 4,
        "model": 5,
        "archive": 4,
    }
