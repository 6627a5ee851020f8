"""Models in an Azure ML registry.

One workspace registers them, others read them, and deployments name them by path.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.adapters.endpoints.azureml_plan import MANIFEST, build_azure_name
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.testing.endpoints import state_of
from tests.adapters.azureml_parts import POLICY, World, config_of
from tests.support.clouds.azureml import FaultRule
from tests.support.clouds.azureml_registry import REGISTRY
from tests.support.clouds.azureml_web import Call, Fault
from tests.support.extras import require
from tests.support.suite import Sweep

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

pytestmark = pytest.mark.services


def config(world: World, **options: str | float) -> EndpointConfig:
    return config_of(world.cloud, registry=REGISTRY, **options)


def test_azureml_apply_with_registry_deploys_model_by_registry_path(world: World) -> None:
    world.apply(1, config(world), blue=100)
    assert world.scale(config(world)) == 2.0
    name = build_azure_name(world.blue)
    (asset,) = world.cloud.control.registries.models
    assert asset == f"models/onnx-ops--{name}/versions/1"
    made = world.cloud.control.resources[
        f"onlineEndpoints/scaling/deployments/{world.name(world.blue)}"
    ]
    assert made.body["properties"]["model"] == f"azureml://registries/{REGISTRY}/{asset}"
    posts = [
        path for method, path in world.cloud.calls if method == "POST" and path.endswith("/import")
    ]
    world.apply(2, config(world), blue=100)
    assert [
        path for method, path in world.cloud.calls if method == "POST" and path.endswith("/import")
    ] == posts


def test_azureml_apply_of_model_in_registry_succeeds_without_upload_or_local_files(
    world: World,
) -> None:
    """A model in the registry is read from there.

    Nothing is uploaded, and the model's files need not be on this machine.
    """
    world.apply(1, config(world), blue=100)
    world.provider.remove(config(world))
    world.cloud.blobs.data.clear()
    for path in [path for path in world.cloud.control.resources if path.startswith("models/")]:
        del world.cloud.control.resources[path]
    elsewhere = AzureEndpoints(world.folder / "another-machine", policy=POLICY)
    elsewhere.apply(
        config(world), state_of(replace(world.blue, location=""), blue=100), generation=1
    )
    assert world.scale(config(world)) == 2.0
    assert world.cloud.blobs.data == {}


def test_azureml_apply_with_other_model_in_registry_raises_refused_error(world: World) -> None:
    world.apply(1, config(world), blue=100)
    world.provider.remove(config(world))
    ((body, _),) = world.cloud.control.registries.models.values()
    caught = body["tags"] if MANIFEST in body.get("tags", {}) else body["properties"]["tags"]
    caught[MANIFEST] = "sha256:" + "0" * 64
    with pytest.raises(RefusedError, match="another model"):
        world.apply(1, config(world), blue=100)


def test_azureml_apply_with_missing_registry_raises_not_found_error(world: World) -> None:
    nowhere = config_of(world.cloud, registry="nowhere")
    with pytest.raises(NotFoundError, match="no such registry") as caught:
        world.apply(1, nowhere, blue=100)
    assert "AzureML Registry User" in caught.value.remedy


def test_azureml_validate_options_with_invalid_registry_name_raises_user_error(
    world: World,
) -> None:
    with pytest.raises(UserError, match="registry"):
        world.provider.validate_options(config_of(world.cloud, registry="no name!").options)


@pytest.mark.nightly
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_azureml_apply_with_failing_registry_request_completes(
    world: World, after: bool, sweep: Sweep
) -> None:
    """Each request fails one time; the kinds of fault take turns."""
    faults: list[Fault] = ["drop", "hang", "error"]
    concerns = world.cloud.control.registries.concerns
    memory = world.folder / "scaling" / "azureml.generation"
    about: list[int] = []
    # The first time, the client sends one more request, for the registry's location.
    for _ in range(2):
        memory.unlink(missing_ok=True)
        with world.cloud.kept():
            begun = len(world.cloud.calls)
            world.apply(1, config(world), blue=100)
            about = [at for at, (_, path) in enumerate(world.cloud.calls[begun:]) if concerns(path)]
    assert len(about) >= 5
    for turn in sweep(range(len(about))):
        memory.unlink(missing_ok=True)
        with world.cloud.kept():
            met: list[int] = []

            def once(
                number: int, call: Call, turn: int = turn, met: list[int] = met
            ) -> FaultRule | None:
                if not concerns(call.path):
                    return None
                met.append(number)
                return (
                    FaultRule(fault=faults[turn % 3], after=after) if len(met) == turn + 1 else None
                )

            world.cloud.fault_rule = once
            world.apply(1, config(world, api_timeout="700 ms"), blue=100)
            assert len(met) > turn
            assert world.scale(config(world)) == 2.0
            assert len(world.cloud.control.registries.models) == 1
