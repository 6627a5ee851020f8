"""Whole rollouts by the reconciler's own rules: what SageMaker shows after each step is what the next one believes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.rollout import Action, OperatorCommand, Roles, Wait, choose_next_action, plan_rollback
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.testing.endpoints import scaling_deployment
from tests.adapters.sagemaker_cloud import cloud, config_of, fake, invoke
from tests.support.clouds.sagemaker import FakeSageMaker, client

__all__ = ["cloud", "fake"]
pytestmark = pytest.mark.services

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
                wanted=wanted,
                actual=self.provider.observe(self.config),
                roles=self.roles,
                policy=self.policy,
                target="cpu",
                word=OperatorCommand.ADVANCE,
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
