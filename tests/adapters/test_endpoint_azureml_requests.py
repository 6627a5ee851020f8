"""Which requests the Azure ML provider sends for an operation, and how many."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.azure import Workspace
from onnx_ops.adapters.endpoints.azureml_client import format_log_command, translate_errors
from onnx_ops.adapters.endpoints.azureml_resources import OnlineEndpoint, parse_duration
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, InfrastructureError, RefusedError
from tests.adapters.azureml_parts import World, config_of, forget_clients
from tests.support.clouds.azureml import FaultRule
from tests.support.clouds.azureml_web import Call, Fault
from tests.support.extras import require
from tests.support.processes import ROOT

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

pytestmark = pytest.mark.services

CHANGES = ("PUT", "PATCH", "POST", "DELETE")
ENDPOINT = "onlineEndpoints/scaling"
ROLL_BACK = """
import sys
from pathlib import Path
from onnx_ops import codec
from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState

folder, config, state = sys.argv[1:]
provider = AzureEndpoints(Path(folder))
provider.roll_back(
    codec.loads(config.encode(), EndpointConfig),
    codec.loads(state.encode(), EndpointState),
    generation=2,
)
print([name for name in sys.modules if name.startswith("azure.ai")])
"""


def record(world: World, operation: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the requests of an operation: methods, and paths below the workspace."""
    first = len(world.cloud.calls)
    operation()
    calls = world.cloud.calls[first:]
    return [(method, path.partition("/workspaces/workspace/")[2] or path) for method, path in calls]


def requested(world: World, sequence: int) -> EndpointState:
    """Return the state of a rollback to blue that was requested at a sequence number."""
    return replace(world.state(blue=100, green=0), generation=sequence)


def roll_back(world: World, generation: int, *, sequence: int = 0) -> list[tuple[str, str]]:
    """Roll back to blue; return the requests."""
    state = requested(world, sequence or generation)
    return record(
        world, lambda: world.provider.roll_back(world.config, state, generation=generation)
    )


def changes(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [call for call in calls if call[0] in CHANGES]


def test_azureml_rollback_changes_traffic_in_second_request(world: World) -> None:
    world.apply(1, blue=90, green=10)
    calls = roll_back(world, 2)
    assert calls[:2] == [("GET", ENDPOINT), ("PUT", ENDPOINT)]
    assert changes(calls) == [("PUT", ENDPOINT)]
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}
    observed = world.observed()
    assert observed.generation == 2
    assert observed.find_deployment(world.green) is not None


def test_azureml_rollback_keeps_identity_and_foreign_tags(world: World) -> None:
    subscription = world.cloud.options["subscription"]
    identities = "providers/Microsoft.ManagedIdentity/userAssignedIdentities"
    identity = f"/subscriptions/{subscription}/resourceGroups/group/{identities}/serving"
    world.config = config_of(world.cloud, identity=identity)
    world.apply(1, blue=90, green=10)
    body = world.cloud.control.resources[ENDPOINT].body
    body["tags"]["team"] = "platform"
    before = body["identity"]
    roll_back(world, 2)
    body = world.cloud.control.resources[ENDPOINT].body
    assert body["tags"]["team"] == "platform"
    assert body["identity"]["type"] == before["type"]
    assert list(body["identity"]["userAssignedIdentities"]) == [identity]


def test_build_update_of_azureml_endpoint_omits_read_only_fields() -> None:
    document = {
        "id": "/x",
        "name": "x",
        "location": "west",
        "kind": "Managed",
        "systemData": {"createdBy": "a"},
        "identity": {
            "type": "UserAssigned",
            "principalId": "1",
            "tenantId": "2",
            "userAssignedIdentities": {"/identity": {"clientId": "3", "principalId": "4"}},
        },
        "properties": {
            "authMode": "Key",
            "publicNetworkAccess": "Disabled",
            "scoringUri": "https://x/score",
            "swaggerUri": "https://x/swagger",
            "provisioningState": "Succeeded",
            "traffic": {"a": 100},
            "mirrorTraffic": {"b": 10},
        },
    }
    assert OnlineEndpoint(document).build_update({"tag": "1"}, {"b": 100}) == {
        "location": "west",
        "kind": "Managed",
        "identity": {"type": "UserAssigned", "userAssignedIdentities": {"/identity": {}}},
        "tags": {"tag": "1"},
        "properties": {
            "authMode": "Key",
            "publicNetworkAccess": "Disabled",
            "traffic": {"b": 100},
            "mirrorTraffic": {},
        },
    }


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("PT1M", 60), ("PT0.5S", 0.5), ("P1DT1H1M1S", 90_061), ("", 0), ("a minute", 0)],
)
def test_parse_duration_of_iso_8601_returns_seconds_and_of_other_text_zero(
    text: str, seconds: float
) -> None:
    assert parse_duration(text) == seconds


def test_azureml_rollback_in_fresh_process_does_not_import_sdk(world: World) -> None:
    """The import takes seconds of CPU time, and an operator waits for the rollback."""
    world.apply(1, blue=90, green=10)
    texts = [codec.dumps(one).decode() for one in (world.config, requested(world, 2))]
    answer = subprocess.run(
        [sys.executable, "-c", ROLL_BACK, str(world.folder), *texts],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert answer.stdout.strip() == "[]"
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}


def test_azureml_repeated_finished_rollback_sends_no_change(world: World) -> None:
    world.apply(1, blue=90, green=10)
    roll_back(world, 3, sequence=2)
    for generation in (3, 4, 9):
        assert changes(roll_back(world, generation, sequence=2)) == []
    changed = config_of(world.cloud, image="registry.example/onnx-ops:2")
    state = requested(world, 2)
    calls = record(world, lambda: world.provider.roll_back(changed, state, generation=10))
    assert changes(calls) == []
    assert world.observed().generation == 3


def test_azureml_rollback_to_served_state_refuses_later_apply_of_older_generation(
    world: World,
) -> None:
    """A write that is older than the request must be refused when it arrives late."""
    world.apply(1, blue=100, green=0)
    assert changes(roll_back(world, 4, sequence=3)) == [("PUT", ENDPOINT)]
    with pytest.raises(ConflictError):
        world.apply(2, blue=50, green=50)


def test_azureml_rollback_after_manual_traffic_change_restores_traffic(world: World) -> None:
    world.apply(1, blue=90, green=10)
    roll_back(world, 3, sequence=2)
    by_hand = world.cloud.control.resources[ENDPOINT].body["properties"]
    by_hand["traffic"] = {world.name(world.green): 100}
    assert changes(roll_back(world, 4, sequence=2)) == [("PUT", ENDPOINT)]
    assert world.scale() == 2.0


def test_azureml_rollback_below_applied_generation_raises_conflict_error(
    world: World, tmp_path: Path
) -> None:
    world.apply(5, blue=90, green=10)
    other = replace(world, folder=tmp_path / "other")
    first = len(world.cloud.calls)
    with pytest.raises(ConflictError, match="generation 5"):
        roll_back(other, 4)
    assert changes(world.cloud.calls[first:]) == []


def test_azureml_rollback_with_stale_read_waits_for_own_write(world: World) -> None:
    """The stale read does not show the second deployment."""
    world.apply(1, blue=100)
    endpoint = world.cloud.control.resources[ENDPOINT]
    before = copy.deepcopy(endpoint.body)
    world.apply(2, blue=10, green=90)
    endpoint.lags(1, before)
    roll_back(world, 3)
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}
    assert world.observed().generation == 3
    assert world.observed().is_equivalent(world.state(blue=100, green=0))


def test_azureml_rollback_during_update_waits_for_its_end(world: World) -> None:
    world.apply(1, blue=90, green=10)
    endpoint = world.cloud.control.resources[ENDPOINT]

    def end() -> None:
        endpoint.state = "Succeeded"

    endpoint.begin("Updating", 5, end)
    roll_back(world, 2)
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}


def test_azureml_rollback_to_deleted_deployment_creates_it(world: World) -> None:
    world.apply(1, blue=0, green=100)
    name = world.name(world.blue)
    del world.cloud.control.resources[f"{ENDPOINT}/deployments/{name}"]
    roll_back(world, 2)
    assert world.scale() == 2.0


def test_azureml_rollback_with_other_deployment_deleted_completes_when_repeated(
    world: World,
) -> None:
    world.apply(1, blue=90, green=10)
    del world.cloud.control.resources[f"{ENDPOINT}/deployments/{world.name(world.green)}"]
    with pytest.raises(ConflictError):
        roll_back(world, 3, sequence=2)
    assert world.scale() == 2.0
    roll_back(world, 4, sequence=2)
    assert world.observed().is_equivalent(world.state(blue=100))


def test_azureml_rollback_of_missing_endpoint_creates_it(world: World) -> None:
    roll_back(world, 1)
    assert world.scale() == 2.0


def test_azureml_rollback_of_foreign_endpoint_changes_nothing(world: World) -> None:
    world.apply(1, blue=90, green=10)
    other = replace(config_of(world.cloud, name="scaling"), endpoint="other")
    first = len(world.cloud.calls)
    with pytest.raises(RefusedError, match="does not own it"):
        world.provider.roll_back(other, requested(world, 2), generation=2)
    assert changes(world.cloud.calls[first:]) == []


@pytest.mark.parametrize("fault", ["throttle", "error", "drop", "conflict"])
@pytest.mark.parametrize("after", [False, True])
def test_azureml_rollback_with_faulty_write_takes_effect(
    world: World, fault: Fault, after: bool
) -> None:
    world.apply(1, blue=90, green=10)
    world.mischief(1, FaultRule(fault=fault, after=after))
    roll_back(world, 2)
    assert world.cloud.routes("scaling")[-1] == {world.name(world.blue): 100}
    assert world.observed().generation == 2


def test_azureml_operations_without_faults_send_expected_number_of_requests(world: World) -> None:
    """The fake shows a change in the second poll; Azure takes about a minute for it."""
    world.apply(1, blue=90, green=10)
    counts = {
        "observation": len(record(world, lambda: world.provider.observe(world.config))),
        "unchanged state": len(record(world, lambda: world.apply(1, blue=90, green=10))),
        "weight step": len(record(world, lambda: world.apply(2, blue=50, green=50))),
        "rollback": len(roll_back(world, 3)),
        "repeated rollback": len(roll_back(world, 4, sequence=3)),
        "address": len(record(world, lambda: world.provider.address(world.config))),
        "deletion of a version": len(record(world, lambda: world.apply(5, blue=100))),
    }
    assert counts == {
        "observation": 2,
        "unchanged state": 2,
        "weight step": 5,
        "rollback": 5,
        "repeated rollback": 2,
        "address": 1,
        "deletion of a version": 12,
    }


def test_azureml_remove_sends_same_number_of_requests_for_each_deployment(world: World) -> None:
    def count(number: int) -> int:
        deployments = [
            replace(world.blue, name=f"v{at}", version=str(at)) for at in range(1, number + 1)
        ]
        weights = {one.name: 100 if one is deployments[0] else 0 for one in deployments}
        state = EndpointState(
            deployments=tuple(deployments),
            split=replace(world.state(blue=100).split, weights=weights),
        )
        world.provider.apply(world.config, state, generation=1)
        return len(record(world, lambda: world.provider.remove(world.config)))

    one, two, three = (count(number) for number in (1, 2, 3))
    assert three - two == two - one
    assert two - one <= 4


@pytest.mark.parametrize(
    ("code", "message", "what", "remedy"),
    [
        ("OutOfQuota", "Not enough quota for it.", "not enough quota", "in the portal"),
        (
            "OutOfCapacity",
            "The VM size failed to provision due to a lack of capacity.",
            "no free capacity",
            "another region",
        ),
        ("BadArgument", "OutOfCapacity: no machines.", "no free capacity", "instance_type"),
    ],
)
@pytest.mark.parametrize("is_update", [False, True])
def test_azureml_apply_without_quota_or_capacity_raises_error_with_cause_and_remedy(
    world: World, code: str, message: str, what: str, remedy: str, is_update: bool
) -> None:
    """The SDK creates deployments; plain requests change their instance counts."""
    if is_update:
        world.apply(1, blue=100)
    world.cloud.control.conditions.refusal = (code, message)
    more = config_of(world.cloud, instances=3)
    with pytest.raises(InfrastructureError, match=what) as raised:
        world.apply(2, more, blue=100)
    assert remedy in raised.value.remedy
    assert "Monitoring" not in raised.value.remedy
    assert "onnx-ops docs cloud-traffic" in raised.value.remedy
    assert ("quota" in raised.value.what) == (code == "OutOfQuota")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/deployments/", "AzureML Data Scientist"),
        ("autoscaleSettings", "`Microsoft.Insights/autoscaleSettings/read`, `write` and `delete`"),
    ],
)
def test_azureml_apply_with_forbidden_scaling_raises_refused_error_with_role_or_actions(
    world: World, path: str, remedy: str
) -> None:
    world.apply(1, blue=100)
    scaled = config_of(world.cloud, min_instances=1, max_instances=4)

    def forbid(_: int, call: Call) -> FaultRule | None:
        is_change = call.method in ("PUT", "PATCH") and path in call.path
        return FaultRule(fault="forbidden") if is_change else None

    world.cloud.fault_rule = forbid
    with pytest.raises(RefusedError) as raised:
        world.apply(2, scaled, blue=100)
    assert remedy in raised.value.remedy


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (
            (
                "This request is not authorized to perform this operation using this permission.\n"
                "RequestId:1\nErrorCode:AuthorizationPermissionMismatch"
            ),
            "Storage Blob Data Contributor",
        ),
        (
            (
                "(LinkedAuthorizationFailed) The client has permission to perform action "
                "'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/write', but not "
                "on the linked scope."
            ),
            "Managed Identity Operator",
        ),
        (
            (
                "The client does not have authorization to perform action "
                "'Microsoft.MachineLearningServices/registries/assets/write' over scope."
            ),
            "AzureML Registry User",
        ),
        (
            (
                "The client does not have authorization to perform action "
                "'Microsoft.MachineLearningServices/workspaces/models/versions/write' over scope."
            ),
            "AzureML Data Scientist",
        ),
    ],
)
def test_translate_errors_of_refusal_names_missing_role(message: str, role: str) -> None:
    from azure.core.exceptions import HttpResponseError

    refusal = HttpResponseError(message)
    refusal.status_code = 403
    with pytest.raises(RefusedError) as raised, translate_errors("model digits"):
        raise refusal
    assert f"the role {role} on" in raised.value.remedy


def test_azureml_client_with_unknown_cloud_raises_error_with_remedy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "Elsewhere")
    forget_clients()
    with pytest.raises(InfrastructureError, match="name of the Azure cloud is unknown") as raised:
        assert world.ml
    assert "AZUREML_CURRENT_CLOUD" in raised.value.remedy


def test_format_log_command_names_deployment_and_workspace() -> None:
    place = Workspace(subscription="s", resource_group="g", workspace="w")
    assert format_log_command(place, "digits", "blue") == (
        "`az ml online-deployment get-logs --name blue --endpoint-name digits "
        "--workspace-name w --resource-group g --subscription s`"
    )
