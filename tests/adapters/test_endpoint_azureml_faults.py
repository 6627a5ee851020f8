"""Faults in every request of the Azure ML provider, and kills at every write.

Traffic is never below 100 %, and the version that served can always be reached. Applying again
finishes the work and leaves no unused resources.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.azureml import AzureEndpoints
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import ConflictError, InfrastructureError, ServiceUnavailableError
from tests.adapters.azureml_parts import POLICY, World, config_of, forget_clients
from tests.support.clouds.azureml import FaultRule
from tests.support.clouds.azureml_web import Call, Fault
from tests.support.extras import require
from tests.support.suite import Sweep

require(
    "azure.ai.ml",
    reason="LOUD: the extra `azure` is not installed, so Azure ML is not tested at all",
)

pytestmark = pytest.mark.services


ANSWER_S = 0.35
"""Seconds that the client waits for an answer: nearly every answer is faster.

The client repeats a request whose answer takes longer.
"""
WRITES = ("PUT", "DELETE", "POST")
STAGES = [
    pytest.param(stage, id=name) for stage, name in enumerate(("first", "canary", "end", "back"))
]
PASSING: list[Fault] = ["throttle", "error", "drop", "hang"]


def stages(world: World) -> tuple[EndpointState, ...]:
    """Return the states: deployment, canary, promotion and rollback."""
    splits = ({"blue": 100}, {"blue": 90, "green": 10}, {"green": 100}, {"blue": 100, "green": 0})
    return tuple(world.state(**split) for split in splits)


def prepared(world: World, stage: int) -> None:
    """Apply all stages before this one."""
    memory = world.folder / "scaling" / "azureml.generation"
    memory.unlink(missing_ok=True)
    for generation, state in enumerate(stages(world)[:stage], start=1):
        world.provider.apply(world.config, state, generation=generation)


def requests_of(world: World, stage: int) -> list[str]:
    """Return the methods of the requests that this stage sends without faults."""
    with world.cloud.kept():
        first = len(world.cloud.calls)
        world.provider.apply(world.config, stages(world)[stage], generation=stage + 1)
        return [method for method, _ in world.cloud.calls[first:]]


def fault_rules(at: int, method: str) -> list[FaultRule]:
    """Return the faults for a request: for a write, all faults that can happen to it.

    A client treats all failed reads alike, so the faults take turns at reads.
    """
    if method not in WRITES:
        return [FaultRule(fault=PASSING[at % len(PASSING)])]
    faults: list[Fault] = [*PASSING, "conflict"]
    return [
        *(FaultRule(fault=fault) for fault in faults),
        *(FaultRule(fault=f, after=True) for f in PASSING[1:]),
    ]


def holds(world: World, stage: int) -> None:
    """Assert the invariants, which are true at every moment."""
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
    observed = world.observed()
    assert observed.is_equivalent(state)
    assert observed.generation == stage + 1
    names = {world.name(d) for d in state.deployments}
    assert {name for _, name in world.cloud.control.nodes} == names
    holds(world, 1)
    needed = frozenset(d.manifest for d in state.deployments)
    left = world.provider.list_orphans(world.config, needed)
    assert all(one.kind == "model" for one in left)
    for one in left:
        world.provider.delete_orphan(world.config, one)
    assert world.provider.list_orphans(world.config, needed) == ()


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize("stage", STAGES)
def test_azureml_apply_with_any_failing_request_keeps_traffic_and_completes_when_repeated(
    world: World, stage: int, sweep: Sweep
) -> None:
    memory = world.folder / "scaling" / "azureml.generation"
    prepared(world, stage)
    methods = requests_of(world, stage)
    assert len(methods) > 5
    points = [
        (at, fault_rule)
        for at, method in enumerate(methods)
        for fault_rule in fault_rules(at, method)
    ]
    for at, fault_rule in sweep(points):
        memory.write_text(str(stage)) if stage else memory.unlink(missing_ok=True)
        with world.cloud.kept():
            world.mischief(at, fault_rule)
            timeout_s = ANSWER_S if fault_rule.fault == "hang" else 60
            config = config_of(world.cloud, api_timeout=f"{timeout_s} s")
            with suppress(InfrastructureError):
                world.provider.apply(config, stages(world)[stage], generation=stage + 1)
            world.cloud.fault_rule = lambda *_: None
            holds(world, stage)
            finished(world, stage)


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize("stage", STAGES)
def test_azureml_apply_killed_at_any_write_keeps_traffic_and_completes_when_repeated(
    world: World, stage: int, sweep: Sweep
) -> None:
    memory = world.folder / "scaling" / "azureml.generation"
    prepared(world, stage)
    methods = requests_of(world, stage)
    writes = [at for at, method in enumerate(methods) if method in WRITES]
    moments = sweep(itertools.product(writes, (False, True)))
    died = 0
    for at, after in moments:
        memory.write_text(str(stage)) if stage else memory.unlink(missing_ok=True)
        with world.cloud.kept():
            died += world.dies(at, stages(world)[stage], stage + 1, after=after)
            holds(world, stage)
            finished(world, stage)
    assert died == len(moments) > 0


def test_azureml_apply_overtaken_by_later_generation_raises_conflict_error_and_keeps_it(
    world: World, tmp_path: Path
) -> None:
    """Another machine applies a later generation while this one creates a deployment."""
    canary, back = stages(world)[1], world.state(blue=100)
    other = replace(world, folder=tmp_path / "other")
    prepared(world, 1)
    busy: list[int] = []

    def overtake(number: int, call: Call) -> None:
        if call.method == "PUT" and "/deployments/" in call.path and not busy:
            busy.append(number)
            other.provider.apply(other.config, back, generation=3)

    world.cloud.fault_rule = overtake
    with pytest.raises(ConflictError, match="generation 3"):
        world.provider.apply(world.config, canary, generation=2)
    world.cloud.fault_rule = lambda *_: None
    assert other.observed().is_equivalent(back)
    left = other.provider.list_orphans(other.config, frozenset({world.blue.manifest}))
    assert {one.kind for one in left} == {"deployment"}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", PASSING)
def test_azureml_token_request_after_fault_is_retried(world: World, fault: Fault) -> None:
    """Tokens are cached, so that hardly any other test sends this request."""
    config = config_of(world.cloud, api_timeout=f"{ANSWER_S} s")
    forget_clients()
    world.cloud.token_faults = [fault]
    assert world.provider.address(config) is None
    assert world.cloud.token_faults == []


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["drop", pytest.param("hang", marks=pytest.mark.nightly)])
def test_azureml_token_request_failing_until_timeout_raises_service_unavailable_error(
    world: World, fault: Fault
) -> None:
    config = config_of(world.cloud, api_timeout=f"{ANSWER_S} s")
    forget_clients()
    world.cloud.token_faults = [fault] * 100
    hurried = AzureEndpoints(world.folder, policy=replace(POLICY, answer_s=0))
    with pytest.raises(ServiceUnavailableError, match="token service"):
        hurried.address(config)
    assert len(world.cloud.token_faults) >= 90
    world.cloud.token_faults = []
