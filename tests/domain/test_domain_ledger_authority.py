"""Entries that need no signature because they only restore what was granted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.domain.rollout import Action, ActionKind, Roles
from onnx_ops.domain.rollout_policy import RolloutPolicy, ShadowTrial
from tests.domain.test_domain_ledger import folded, intent, version

STABLE, CANDIDATE, OTHER = version(1), version(2), version(3)
ROLES = Roles(stable=STABLE, candidate=CANDIDATE, step=0)


@pytest.fixture
def state() -> ReleaseState:
    """Return an endpoint in the first step of a rollout."""
    return replace(folded(), roles=ROLES, policy=RolloutPolicy(steps=(0.1, 0.5, 1.0)))


def restore(roles: Roles, **weights: int) -> Action:
    """Return a restoring action that sets these roles."""
    deployments = tuple(d for d in (roles.stable, roles.candidate) if d is not None)
    split = TrafficSplit(weights=weights)
    return Action(
        kind=ActionKind.RESTORE,
        state=EndpointState(deployments=deployments, split=split),
        roles=roles,
        why="the endpoint lost its state",
    )


def test_explain_grant_of_restore_with_same_roles_is_empty(state: ReleaseState) -> None:
    assert explain_grant(state, intent(restore(ROLES, v1=90, v2=10))) == ""


@pytest.mark.parametrize(
    "roles",
    [
        replace(ROLES, stable=OTHER),
        replace(ROLES, stable=CANDIDATE, candidate=None),
        replace(ROLES, candidate=OTHER),
        replace(ROLES, candidate=None),
        replace(ROLES, step=1),
    ],
    ids=["stable", "finished", "candidate", "ended", "step"],
)
def test_explain_grant_of_restore_with_other_roles_requires_signature(
    state: ReleaseState, roles: Roles
) -> None:
    """The state itself stays as granted; only the recorded roles differ."""
    action = replace(restore(ROLES, v1=90, v2=10), roles=roles)
    assert explain_grant(state, intent(action)) == "begins restore"


@pytest.mark.parametrize(
    ("shadow", "grant"),
    [
        ({}, ""),
        ({"v2": 20}, ""),
        ({"v2": 21}, "begins restore"),
        ({"v1": 1}, "begins restore"),
    ],
    ids=["none", "as granted", "more", "of stable"],
)
def test_explain_grant_of_restore_permits_only_copies_of_shadow_step(
    state: ReleaseState, shadow: dict[str, int], grant: str
) -> None:
    policy = replace(state.policy, shadow=ShadowTrial(fraction=0.2))
    action = restore(ROLES, v1=100, v2=0)
    split = replace(action.state.split, shadow=shadow)
    action = replace(action, state=replace(action.state, split=split))
    assert explain_grant(replace(state, policy=policy), intent(action)) == grant


def test_explain_grant_of_restore_with_copies_after_shadow_step_requires_signature(
    state: ReleaseState,
) -> None:
    action = restore(ROLES, v1=90, v2=10)
    split = replace(action.state.split, shadow={"v2": 1})
    action = replace(action, state=replace(action.state, split=split))
    assert explain_grant(state, intent(action)) == "begins restore"
