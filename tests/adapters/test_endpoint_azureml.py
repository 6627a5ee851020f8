"""The Azure ML provider, through the real SDK, against the fake.

The fake has real servers behind it.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import httpx
import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_plan import build_azure_name
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.domain.endpoint import EndpointConfig, TrafficSplit
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    InfrastructureError,
    RefusedError,
    UserError,
)
from onnx_ops.testing.endpoints import (
    Disturbance,
    EndpointProviderSuite,
    Killed,
    scaling_deployment,
    state_of,
)
from tests.adapters.azureml_parts import POLICY, World, config_of
from tests.support.clouds.azureml import FaultRule
from tests.support.clouds.azureml_web import Call, Fault
from tests.support.extras import require
from tests.support.suite import Sweep

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

pytestmark = pytest.mark.services

HASTY = replace(POLICY, operation_s=0.2, answer_s=0.2)
"""A policy with short time limits, for clients that get no answer."""
LIMIT = "max_concurrent_requests_per_instance"


class TestAzureEndpoints(EndpointProviderSuite):
    @pytest.fixture
    def provider(self, world: World) -> AzureEndpoints:
        self.made = world.provider
        return self.made

    @pytest.fixture
    def config(self, world: World) -> EndpointConfig:
        return world.config

    @contextmanager
    def disturbed(self, fault: Disturbance, at: int = 0) -> Iterator[Sized]:
        """Disturb the requests of httpx too, which the provider uses beside the SDK."""
        send = httpx.HTTPTransport.handle_request
        with (
            patch.object(self.made.native, "_policy", HASTY),
            super().disturbed(fault, at) as asked,
        ):
            hosts = cast("list[str]", asked)
            error = Killed() if fault == "kill" else httpx.ConnectError("injected")

            def handle(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
                hosts.append(request.url.host)
                number = len(hosts) - 1
                if fault != "none" and number >= at + (fault != "error"):
                    raise error
                response = send(transport, request)
                if fault in ("lost answer", "kill") and number == at:
                    response.close()
                    raise error
                return response

            with patch.object(httpx.HTTPTransport, "handle_request", handle):
                yield asked

    @pytest.fixture
    def chosen(self, sweep: Sweep) -> Sweep:
        return sweep

    def scale(self, address: str, *, user: str | None = None) -> float:
        """Send the key of the endpoint, which Azure requires."""
        body = json.dumps({"inputs": {"x": [[1.0, 1.0]]}}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer key-of-scaling"}
        request = urllib.request.Request(f"{address}/invocations", body, headers)
        with urllib.request.urlopen(
            request, timeout=30, context=ssl.create_default_context()
        ) as response:
            return float(json.load(response)["predictions"]["y"][0][0])


def test_azureml_capabilities_with_native_traffic_are_split_and_quantiles(world: World) -> None:
    assert world.provider.capabilities({"traffic": "native"}) == {"split", "quantiles"}


def test_azureml_apply_of_model_without_trusted_signature_raises_infrastructure_error(
    world: World, tmp_path: Path
) -> None:
    create_key(tmp_path / "keys" / "signing.pem")
    provider = AzureEndpoints(world.folder, tmp_path / "keys", policy=POLICY)
    with pytest.raises(InfrastructureError, match="Promote a version whose gates passed"):
        provider.apply(world.config, world.state(blue=100), generation=1)


@pytest.mark.parametrize(
    ("options", "limit"), [({}, 128), ({"queue": 16}, 16), ({LIMIT: 1, "queue": 16}, 1)]
)
def test_azureml_deployment_concurrency_is_explicit_limit_or_queue_size(
    world: World, options: dict[str, int], limit: int
) -> None:
    config = config_of(world.cloud, **options)
    world.apply(1, config, blue=100)
    assert world.cloud.control.concurrency("scaling", world.name(world.blue, **options)) == limit


def test_azureml_endpoint_with_concurrent_clients_answers_all_requests(world: World) -> None:
    world.apply(1, blue=100)
    address = str(world.provider.address(world.config))

    def ask(_: int) -> float:
        return TestAzureEndpoints().scale(address)

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(ask, range(256))) == {2.0}


def test_azureml_apply_with_lagging_reads_waits_for_state(world: World) -> None:
    world.cloud.conditions.lag = 4
    world.apply(1, blue=100)
    state = world.state(blue=70, green=30)
    world.provider.apply(world.config, state, generation=2)
    observed = world.observed()
    assert observed.is_equivalent(state)
    assert observed.generation == 2
    assert all(sum(split.values()) == 100 for split in world.cloud.routes("scaling")[1:])


def test_azureml_apply_with_lagging_read_does_not_recreate_endpoint(world: World) -> None:
    """Creating the endpoint again would take all of its traffic away."""
    world.apply(1, blue=100)
    world.cloud.control.resources["onlineEndpoints/scaling"].lags(5, None)
    state = world.state(blue=100, green=0)
    world.provider.apply(world.config, state, generation=2)
    assert [sum(split.values()) for split in world.cloud.routes("scaling")] == [0, 100, 100]


def test_azureml_apply_during_update_waits_for_its_end(world: World) -> None:
    world.apply(1, blue=100)
    endpoint = world.cloud.control.resources["onlineEndpoints/scaling"]

    def over() -> None:
        endpoint.state = "Succeeded"

    endpoint.begin("Updating", 7, over)
    world.apply(2, blue=50, green=50)
    assert sum(world.cloud.routes("scaling")[-1].values()) == 100
    assert len(world.cloud.routes("scaling")[-1]) == 2


def test_azureml_apply_with_insufficient_quota_raises_error_and_changes_nothing(
    world: World,
) -> None:
    state = world.state(blue=100)
    world.provider.apply(world.config, state, generation=1)
    world.cloud.conditions.quota = 13
    many = config_of(world.cloud, instances=10)
    with pytest.raises(InfrastructureError, match="instances: 10`, the quota must cover 12"):
        world.apply(2, many, blue=90, green=10)
    assert world.scale() == 2.0
    assert world.observed().is_equivalent(state)


def test_azureml_apply_of_crashing_container_moves_no_traffic_until_it_runs(world: World) -> None:
    name = world.name(world.green)
    world.apply(1, blue=100)
    world.cloud.conditions.broken.add(name)
    state = world.state(blue=0, green=100)
    with pytest.raises(InfrastructureError, match="has crashed"):
        world.provider.apply(world.config, state, generation=2)
    assert world.scale() == 2.0
    left = world.provider.list_orphans(world.config, frozenset({world.blue.manifest}))
    assert {(one.kind, one.name) for one in left} == {("deployment", name)}
    world.cloud.conditions.broken.clear()
    world.provider.apply(world.config, state, generation=2)
    assert world.scale() == 3.0


def test_azureml_apply_after_traffic_was_zeroed_restores_traffic(world: World) -> None:
    """The traffic is zero after another tool has created the endpoint again."""
    from azure.ai.ml.entities import ManagedOnlineEndpoint

    state = world.state(blue=100)
    world.provider.apply(world.config, state, generation=1)
    ml = world.ml
    found = ml.online_endpoints.get("scaling")
    ml.online_endpoints.begin_create_or_update(
        ManagedOnlineEndpoint(name="scaling", auth_mode="key", tags=found.tags)
    ).result()
    assert world.cloud.routes("scaling")[-1] == {}
    assert world.provider.observe(world.config) is None
    world.provider.apply(world.config, state, generation=2)
    assert world.scale() == 2.0


def test_azureml_apply_or_rollback_after_foreign_recreation_restores_traffic_and_owner(
    world: World,
) -> None:
    """Another tool creates the endpoint again, with other tags and no traffic."""
    from azure.ai.ml.entities import ManagedOnlineEndpoint

    state = world.state(blue=100)
    world.provider.apply(world.config, state, generation=1)
    ml = world.ml
    theirs = ManagedOnlineEndpoint(name="scaling", auth_mode="key", tags={"team": "platform"})
    ml.online_endpoints.begin_create_or_update(theirs).result()
    first = len(world.cloud.calls)
    assert world.provider.observe(world.config) is None
    assert len(world.cloud.calls) - first <= 4
    world.provider.apply(world.config, state, generation=2)
    assert world.scale() == 2.0
    tags = world.cloud.control.resources["onlineEndpoints/scaling"].body["tags"]
    assert tags["team"] == "platform"
    ml.online_endpoints.begin_create_or_update(theirs).result()
    world.provider.roll_back(world.config, state, generation=3)
    assert world.scale() == 2.0
    other = replace(config_of(world.cloud, name="scaling"), endpoint="other")
    with pytest.raises(RefusedError, match="does not own it"):
        world.provider.observe(other)


@pytest.mark.parametrize("fault", ["conflict", "throttle"])
def test_azureml_apply_with_refused_traffic_update_sends_few_additional_requests(
    world: World, fault: Fault
) -> None:
    provider = AzureEndpoints(world.folder, policy=replace(POLICY, lag_s=5))

    def requests(generation: int, blue: int) -> int:
        first = len(world.cloud.calls)
        state = world.state(blue=blue, green=100 - blue)
        provider.apply(world.config, state, generation=generation)
        return len(world.cloud.calls) - first

    requests(1, 50)
    plain = requests(2, 60)
    refused: list[str] = []

    def once(_: int, call: Call) -> FaultRule | None:
        if refused or call.method != "PUT" or not call.path.endswith("/onlineEndpoints/scaling"):
            return None
        refused.append(call.path)
        return FaultRule(fault=fault)

    world.cloud.fault_rule = once
    assert requests(3, 70) <= plain + 12
    assert refused
    assert world.cloud.routes("scaling")[-1][world.name(world.blue)] == 70


def test_azureml_apply_with_mirror_traffic_removes_or_refuses_it(world: World) -> None:
    state = world.state(blue=100, green=0)
    world.provider.apply(world.config, state, generation=1)
    endpoint = world.cloud.control.resources["onlineEndpoints/scaling"]
    by_hand = {world.name(world.green): 50}
    endpoint.body["properties"]["mirrorTraffic"] = world.cloud.control.mirrors["scaling"] = by_hand
    assert world.provider.observe(world.config) is None
    world.provider.apply(world.config, state, generation=1)
    assert world.cloud.control.mirrors["scaling"] == {}
    copied = replace(state, split=TrafficSplit(weights={"blue": 100}, shadow={"green": 50}))
    with pytest.raises(UserError, match="would not compare the answers"):
        world.provider.apply(world.config, copied, generation=2)


def test_azureml_apply_or_remove_of_endpoint_of_other_owner_raises_refused_error(
    world: World,
) -> None:
    world.apply(1, blue=100)
    other = replace(config_of(world.cloud, name="scaling"), endpoint="other")
    with pytest.raises(RefusedError, match="does not own it"):
        world.apply(1, other, green=100)
    with pytest.raises(RefusedError, match="does not own it"):
        world.provider.remove(other)
    assert world.scale() == 2.0


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_azureml_apply_with_foreign_deployment_of_same_name_raises_refused_error(
    world: World, state: str
) -> None:
    world.apply(1, blue=100, green=0)
    theirs = world.cloud.control.resources[
        f"onlineEndpoints/scaling/deployments/{world.name(world.green)}"
    ]
    theirs.body["tags"] = {"team": "platform"}
    theirs.body["properties"]["provisioningState"] = state
    with pytest.raises(RefusedError, match="its tags do not show that onnx-ops created it"):
        world.apply(2, blue=50, green=50)
    assert world.name(world.green) in {
        one.name for one in world.ml.online_deployments.list("scaling")
    }
    assert world.scale() == 2.0


def test_azureml_apply_of_changed_files_raises_digest_mismatch_error_and_uploads_nothing(
    world: World, tmp_path: Path
) -> None:
    changed = scaling_deployment(tmp_path / "changed", name="blue", version="1", scale=2.0)
    (tmp_path / "changed" / "model.onnx").write_bytes(b"something else")
    with pytest.raises(DigestMismatchError):
        world.provider.apply(world.config, state_of(changed, blue=100), generation=1)
    assert world.cloud.blobs.data == {}


def test_azureml_apply_of_changed_options_replaces_deployment(world: World) -> None:
    state, name = world.state(blue=100), world.name(world.blue)
    world.provider.apply(world.config, state, generation=1)
    assert world.drift() == []
    changes: dict[str, str | float] = {
        "image": "registry.example/onnx-ops:2",
        "instance_type": "Standard_F4s_v2",
        "request_timeout": "5 s",
    }
    changed = config_of(world.cloud, **changes)
    assert world.drift(changed) == [
        f"image of {name}: a different image, not registry.example/onnx-ops:2",
        f"instance_type of {name}: Standard_DS3_v2, not Standard_F4s_v2",
        f"request_timeout of {name}: 60.0, not 5.0",
    ]
    world.provider.apply(changed, state, generation=2)
    assert world.drift(changed) == []
    assert world.cloud.routes("scaling")[-2:] == [
        {name: 100},
        {world.name(world.blue, **changes): 100},
    ]
    assert list(world.cloud.control.nodes) == [("scaling", world.name(world.blue, **changes))]
    assert world.provider.list_orphans(changed, frozenset({world.blue.manifest})) == ()
    assert world.provider.list_orphans(changed, frozenset()) == ()


def test_azureml_rollback_with_changed_options_uses_running_deployment(world: World) -> None:
    world.apply(1, blue=50, green=50)
    changed = config_of(world.cloud, image="registry.example/broken:1")
    first = len(world.cloud.calls)
    world.provider.roll_back(changed, world.state(blue=100, green=0), generation=2)
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}
    assert not [
        path
        for method, path in world.cloud.calls[first:]
        if method == "PUT" and "/deployments/" in path
    ]


def test_azureml_apply_of_instance_count_updates_deployment_in_place(world: World) -> None:
    state, name = world.state(blue=100), world.name(world.blue)
    world.provider.apply(world.config, state, generation=1)
    more = config_of(world.cloud, instances=3)
    assert world.drift(more) == [f"instances of {name}: 1, not 3"]
    world.provider.apply(more, state, generation=2)
    assert world.drift(more) == []
    deployment = world.cloud.control.resources[f"onlineEndpoints/scaling/deployments/{name}"].body
    assert deployment["sku"]["capacity"] == 3
    # The three writes are the creation of the endpoint, its first traffic, and the tags of
    # generation 2.
    assert len(world.cloud.routes("scaling")) == 3


def test_azureml_drift_with_external_autoscaling_ignores_instance_count(world: World) -> None:
    name, three = world.name(world.blue), config_of(world.cloud, instances=3)
    world.apply(1, three, blue=100)
    deployment = world.cloud.control.resources[f"onlineEndpoints/scaling/deployments/{name}"].body
    # An operator changes the number of instances by hand.
    deployment["sku"]["capacity"] = 2
    assert world.drift(three) == [f"instances of {name}: 2, not 3"]
    world.cloud.control.autoscale.settings["somebody's"] = {
        "properties": {"targetResourceUri": deployment["id"].upper(), "profiles": []}
    }
    assert world.drift(three) == []


def test_azureml_apply_with_autoscaling_creates_and_removes_rules(world: World) -> None:
    state, name, autoscale = (
        world.state(blue=100),
        world.name(world.blue),
        world.cloud.control.autoscale.settings,
    )
    scaled = config_of(world.cloud, min_instances=1, max_instances=4, cpu_percent=60)
    world.provider.apply(scaled, state, generation=1)
    assert world.drift(scaled) == []
    (profile,) = autoscale[f"workspace--scaling--{name}"]["properties"]["profiles"]
    assert profile["capacity"] == {"minimum": "1", "maximum": "4", "default": "1"}
    assert [rule["metricTrigger"]["threshold"] for rule in profile["rules"]] == [60, 30]
    deployment = world.cloud.control.resources[f"onlineEndpoints/scaling/deployments/{name}"].body
    # Azure Monitor scales the deployment.
    deployment["sku"]["capacity"] = 3
    assert world.drift(scaled) == []
    # An operator changes the maximum by hand.
    profile["capacity"]["maximum"] = "9"
    assert world.drift(scaled) == [
        (
            f"autoscaling of {name}: 1 to 9 instances (limits, rules or profiles differ, or "
            "autoscaling is disabled), not 1 to 4 instances at 60% CPU"
        )
    ]
    world.provider.apply(scaled, state, generation=2)
    assert world.drift(scaled) == []
    assert deployment["sku"]["capacity"] == 3
    assert world.drift() == [f"autoscaling of {name}: 1 to 4 instances at 60% CPU, not none"]
    world.provider.apply(world.config, state, generation=3)
    assert world.drift() == []
    assert autoscale == {}
    world.apply(4, scaled, blue=50, green=50)
    world.apply(5, scaled, green=100)
    assert list(autoscale) == [f"workspace--scaling--{world.name(world.green)}"]
    world.provider.remove(scaled)
    assert autoscale == {}


def test_azureml_list_orphans_after_failed_deletion_lists_deployment_with_former_options(
    world: World,
) -> None:
    """Its machines cost money, and no endpoint state contains it."""
    world.apply(1, blue=100)
    former = world.name(world.blue)
    changed = config_of(world.cloud, image="registry.example/onnx-ops:2")
    world.cloud.fault_rule = lambda _, call: (
        FaultRule(fault="forbidden") if call.method == "DELETE" else None
    )
    world.apply(2, changed, blue=100)
    world.cloud.fault_rule = lambda *_: None
    left = world.provider.list_orphans(changed, frozenset({world.blue.manifest}))
    assert [(one.kind, one.name) for one in left] == [("deployment", former)]
    world.provider.delete_orphan(changed, left[0])
    assert world.provider.list_orphans(changed, frozenset({world.blue.manifest})) == ()
    assert world.scale(changed) == 2.0


def test_azureml_orphans_after_promotion_are_listed_and_deleted_only_if_unused(
    world: World,
) -> None:
    provider, config = world.provider, world.config
    provider.apply(config, world.state(blue=50, green=50), generation=1)
    provider.apply(config, world.state(green=100), generation=2)
    assert [
        one.kind for one in provider.list_orphans(config, frozenset({world.blue.manifest}))
    ] == []
    left = provider.list_orphans(config, frozenset())
    assert [(one.kind, one.name, one.paid) for one in left] == [
        ("model", build_azure_name(world.blue), True)
    ]
    for one in (*left, *left):
        provider.delete_orphan(config, one)
    assert provider.list_orphans(config, frozenset()) == ()
    used = replace(left[0], kind="deployment", name=world.name(world.green))
    with pytest.raises(ConflictError, match="traffic"):
        provider.delete_orphan(config, used)
    assert world.scale() == 3.0
    provider.apply(config, world.state(blue=100, green=0), generation=3)
    assert world.scale() == 2.0


def test_azureml_apply_without_role_raises_refused_error(world: World) -> None:
    world.cloud.conditions.forbidden = True
    with pytest.raises(RefusedError, match="AzureML Data Scientist"):
        world.apply(1, blue=100)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"imagee": "a/b"}, "imagee"),
        ({"image": ""}, "image"),
        ({"instance_type": 3}, "instance_type"),
        ({"instances": 0}, "instances"),
        ({"max_instances": 3}, "autoscaling and cpu_percent require both"),
        ({"cpu_percent": 50}, "autoscaling and cpu_percent require both"),
        ({"min_instances": 2, "max_instances": 3}, "from min_instances to max_instances"),
        ({"max_concurrent_requests_per_instance": 0}, "max_concurrent_requests_per_instance"),
        ({"name": "UPPER"}, "name"),
        ({"name": "ab"}, "name"),
        ({"models": "s3://somewhere"}, "models"),
        ({"auth": "none"}, "auth"),
        ({"identity": "me"}, "identity"),
        ({"request_timeout": "181 s"}, "request_timeout"),
        ({"workers": "two"}, "workers"),
        ({"endpoint": "x"}, "endpoint"),
        ({"subscription": ""}, "subscription"),
    ],
)
def test_azureml_validate_options_with_wrong_value_raises_user_error(
    world: World, options: dict[str, str | int], said: str
) -> None:
    world.provider.validate_options({**world.cloud.options, "name": "good-name", "workers": 2})
    with pytest.raises(UserError, match=said):
        world.provider.validate_options({**world.cloud.options, **options})
    assert world.cloud.calls == []
