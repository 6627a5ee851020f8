"""Every request of the Azure ML provider goes wrong once, in every way; and the client is killed at every write.

Whatever happens: traffic is never below 100 %, the version that served can always be reached, applying again finishes
the work, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("azure.ai.ml", reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all")

from azureml_parts import World, inside

from onnx_ops.adapters.endpoints.azureml_plan import azure_name
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import Conflict, EnvironmentFailure
from onnx_ops.testing.clouds.azureml import AzureCloud, Trouble
from onnx_ops.testing.clouds.azureml_nodes import Nodes
from onnx_ops.testing.clouds.azureml_web import Fault
from onnx_ops.testing.endpoints import scaling_deployment, state_of

pytestmark = pytest.mark.services


WRITES = ("PUT", "DELETE", "POST")
STAGES = [
    pytest.param(stage, id=name, marks=[] if name == "back" else [pytest.mark.nightly])
    for stage, name in enumerate(("first", "canary", "end", "back"))
]
"""A sweep takes a minute or two; the way back is swept in every run."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder, nodes = tmp_path_factory.mktemp("azure"), Nodes()
    try:
        with AzureCloud(folder / "cloud", nodes=nodes) as cloud, inside(cloud):
            yield World(
                cloud=cloud,
                folder=folder / "endpoints",
                blue=scaling_deployment(folder / "models" / "blue", name="blue", version="1", scale=2.0),
                green=scaling_deployment(folder / "models" / "green", name="green", version="2", scale=3.0),
            )
    finally:
        nodes.close()


def stages(world: World) -> tuple[EndpointState, ...]:
    """A first deployment, a canary, its end with the previous version gone, and the way back to that."""
    return (
        state_of(world.blue, blue=100),
        state_of(world.blue, world.green, blue=90, green=10),
        state_of(world.green, green=100),
        state_of(world.blue, world.green, blue=100, green=0),
    )


def prepared(world: World, stage: int) -> None:
    """All stages before this one."""
    memory = world.folder / "scaling" / "azureml.generation"
    memory.unlink(missing_ok=True)
    for generation, state in enumerate(stages(world)[:stage], start=1):
        world.provider.apply(world.config, state, generation=generation)


def requests_of(world: World, stage: int) -> list[str]:
    """The methods of the requests that this stage takes when all is well."""
    with world.cloud.kept():
        first = len(world.cloud.calls)
        world.provider.apply(world.config, stages(world)[stage], generation=stage + 1)
        return [method for method, _ in world.cloud.calls[first:]]


def troubles(at: int, method: str) -> list[Trouble]:
    """All that can happen to a write. To us a read that fails is one like another, so those take turns."""
    faults: list[Fault] = ["throttle", "error", "drop"]
    if method not in WRITES:
        return [Trouble(fault=faults[at % 3])]
    return [*(Trouble(fault=fault) for fault in faults), *(Trouble(fault=f, after=True) for f in faults[1:])]


def holds(world: World, stage: int) -> None:
    """What is true at every moment."""
    routes = world.cloud.routes("scaling")
    served = next((at for at, split in enumerate(routes) if split), len(routes))
    assert all(sum(split.values()) == 100 for split in routes[served:])
    if stage:
        assert served < len(routes)
        assert all(("scaling", name) in world.cloud.control.nodes for name in routes[-1])
        assert world.scale() in (2.0, 3.0)


def finished(world: World, stage: int) -> None:
    state = stages(world)[stage]
    world.provider.apply(world.config, state, generation=stage + 1)
    observed = world.provider.observe(world.config)
    assert observed is not None
    assert observed.same_as(state)
    assert observed.generation == stage + 1
    names = {azure_name(d) for d in state.deployments}
    assert {name for _, name in world.cloud.control.nodes} == names
    holds(world, 1)
    needed = frozenset(d.manifest for d in state.deployments)
    left = world.provider.leftovers(world.config, needed)
    assert all(one.kind == "model" for one in left)
    for one in left:
        world.provider.discard(world.config, one)
    assert world.provider.leftovers(world.config, needed) == ()


@pytest.mark.parametrize("stage", STAGES)
def test_any_request_may_fail_in_any_way(world: World, stage: int) -> None:
    memory = world.folder / "scaling" / "azureml.generation"
    with world.cloud.kept():
        prepared(world, stage)
        methods = requests_of(world, stage)
        assert len(methods) > 5
        for at, method in enumerate(methods):
            for trouble in troubles(at, method):
                memory.write_text(str(stage)) if stage else memory.unlink(missing_ok=True)
                with world.cloud.kept():
                    world.mischief(at, trouble)
                    with suppress(EnvironmentFailure):
                        world.provider.apply(world.config, stages(world)[stage], generation=stage + 1)
                    world.cloud.trouble = lambda *_: None
                    holds(world, stage)
                    finished(world, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_the_client_may_be_killed_at_any_write(world: World, stage: int) -> None:
    memory = world.folder / "scaling" / "azureml.generation"
    with world.cloud.kept():
        prepared(world, stage)
        methods = requests_of(world, stage)
        died = 0
        for at, method in enumerate(methods):
            for after in (False, True) if method in WRITES else ():
                memory.write_text(str(stage)) if stage else memory.unlink(missing_ok=True)
                with world.cloud.kept():
                    died += world.dies(at, stages(world)[stage], stage + 1, after=after)
                    holds(world, stage)
                    finished(world, stage)
        assert died == 2 * sum(method in WRITES for method in methods)


def test_a_driver_that_was_overtaken_changes_nothing(world: World, tmp_path: Path) -> None:
    """Another machine applies a later generation while this one makes a deployment."""
    canary, back = stages(world)[1], state_of(world.blue, blue=100)
    other = World(cloud=world.cloud, folder=tmp_path / "other", blue=world.blue, green=world.green)
    with world.cloud.kept():
        prepared(world, 1)
        first = len(world.cloud.calls)
        busy: list[int] = []

        def overtake(number: int, call: object) -> None:
            if getattr(call, "method", "") == "PUT" and "/deployments/" in getattr(call, "path", "") and not busy:
                busy.append(number - first)
                other.provider.apply(other.config, back, generation=3)

        world.cloud.trouble = overtake
        with pytest.raises(Conflict, match="generation 3"):
            world.provider.apply(world.config, canary, generation=2)
        world.cloud.trouble = lambda *_: None
        observed = other.provider.observe(other.config)
        assert observed is not None
        assert observed.same_as(back)
        left = other.provider.leftovers(other.config, frozenset({world.blue.manifest}))
        assert {one.kind for one in left} == {"deployment"}
