"""The rollout as a state machine: its invariants apply to any order of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EntryBody,
    Intent,
    LedgerEntry,
    OperatorCommandSent,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    apply_entry,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    Wait,
    WaitKind,
    build_split_state,
    choose_next_action,
    plan_abort,
    plan_rollback,
)
from onnx_ops.domain.rollout_policy import DAY, Guardrail, RolloutPolicy, ShadowTrial, SplitTest
from tests.domain.test_domain_ledger import at_rest, version
from tests.support.must import must

POLICIES = (
    RolloutPolicy(),
    RolloutPolicy(steps=(0.1, 1.0)),
    RolloutPolicy(steps=(0.05, 0.5, 1.0), scale_down_delay=3600.0),
)


VERSIONS = tuple(version(number, release=f"release {number // 2}") for number in range(6))
"""Versions 0 and 1, 2 and 3, and so on are variants of one release."""


class Rollouts(RuleBasedStateMachine):
    """A registry, a provider, an operator, and the driver of a rollout.

    The registry requests versions, which the provider applies or loses. The driver can fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = ReleaseState(endpoint="digits", policy=POLICIES[0])
        self.actual: EndpointState | None = None
        self.wanted: Deployment | None = None
        self.approved: set[Digest] = set()
        self.now = 1000.0
        self.replaced = False

    def append(self, body: EntryBody) -> None:
        entry = LedgerEntry(
            endpoint="digits", sequence=self.state.head + 1, at=self.now, actor="a", body=body
        )
        self.state = apply_entry(self.state, entry)

    def due(self) -> Action | Wait:
        if self.state.pending_rollback is not None:
            return self.state.pending_rollback.action
        # A rejected version has no desired deployment, as after `verify_request`.
        refused = self.wanted is None or self.state.find_rejection(self.wanted) is not None
        return choose_next_action(
            desired=None if refused else self.wanted,
            observed=self.actual,
            roles=self.state.roles,
            policy=self.state.policy,
            target="cpu",
            command=self.state.command,
            now=self.now,
        )

    def perform(self, action: Action, *, reaches: bool = True, ok: bool = True) -> None:
        if (
            action.kind in (ActionKind.ABORT, ActionKind.ROLLBACK)
            and self.state.pending_rollback is None
        ):
            self.append(RollbackRequested(action=action))
            self.nothing_rejected_has_a_way_forward()
        self.append(Intent(action=action, holder="h", expires_at=self.now + 120))
        if reaches:
            self.actual = replace(action.state, generation=self.state.generation)
        self.append(ActionOutcome(of=self.state.generation, ok=ok))

    @rule(policy=st.sampled_from(POLICIES))
    def configure(self, policy: RolloutPolicy) -> None:
        self.state = replace(self.state, policy=policy)

    @rule(desired=st.sampled_from(VERSIONS))
    def want(self, desired: Deployment) -> None:
        """Request only a version that is not rejected, as `desired` does."""
        if self.state.find_rejection(desired) is None:
            self.wanted = desired
            self.approved.add(desired.manifest)

    @rule()
    def withdraw(self) -> None:
        self.wanted = None

    @rule(seconds=st.sampled_from([1.0, 3600.0, DAY]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(lost=st.booleans())
    def interfere(self, lost: bool) -> None:
        stable = self.state.roles.stable
        self.actual = None if lost or stable is None else build_split_state(stable, None, 0)

    @precondition(lambda self: self.state.roles.candidate is not None)
    @rule(command=st.sampled_from(OperatorCommand))
    def speak(self, command: OperatorCommand) -> None:
        self.append(OperatorCommandSent(command=command))

    @rule(reaches=st.booleans())
    def fail(self, reaches: bool) -> None:
        action = self.due()
        if isinstance(action, Action):
            self.perform(action, reaches=reaches, ok=False)

    @rule()
    def step(self) -> None:
        action = self.due()
        if not isinstance(action, Action):
            return
        self.nothing_rejected_has_a_way_forward()
        if action.kind is ActionKind.FINISH:
            assert action.roles.stable is not None
            assert action.aliases["champion-cpu"] == action.roles.stable.version
            self.replaced = True
        self.perform(action)
        assert self.due() != action

    def nothing_rejected_has_a_way_forward(self) -> None:
        """Assert that no due action gives traffic to a rejected version.

        A pending rollback leads away from a rejected version.
        """
        action = self.due()
        if isinstance(action, Action):
            assert (
                action.roles.candidate is None
                or self.state.find_rejection(action.roles.candidate) is None
            )
            for deployment in action.state.deployments:
                if action.state.split.weights.get(deployment.name):
                    assert self.state.find_rejection(deployment) is None

    @rule()
    def reconcile(self) -> None:
        for _ in range(10):
            action = self.due()
            if isinstance(action, Wait):
                return
            self.step()
        raise AssertionError(f"does not come to rest: {self.due()}")

    @precondition(lambda self: self.state.pending_rollback is not None)
    @rule()
    def withdraw_what_is_owed(self) -> None:
        pending = must(self.state.pending_rollback)
        self.append(RequestWithdrawn(reason="wrong endpoint"))
        assert self.state.rejected == pending.rejected_before
        self.wanted = self.state.roles.stable

    @precondition(
        lambda self: self.state.roles.stable is not None and self.state.pending_rollback is None
    )
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        roles = self.state.roles
        assert roles.stable is not None
        if roles.candidate is not None:
            action, goal = plan_abort(roles, "cpu", why="bad", reject=True), roles.stable
        else:
            goal = data.draw(st.sampled_from(list(self.state.known.values())))
            if goal.manifest == roles.stable.manifest:
                return
            action = plan_rollback(roles, goal, "cpu", why="bad")
            assert action.aliases["champion-cpu"] == goal.version
            self.replaced = False
        self.perform(action)
        self.wanted = None
        assert self.actual is not None
        assert self.actual.split.weights[goal.name] == 100
        assert self.state.roles.stable == goal
        left = roles.candidate or roles.stable
        assert self.state.find_rejection(left) == "bad"
        assert self.state.find_rejection(goal) is None

    @rule()
    def mirror(self) -> None:
        self.append(AliasesWritten(aliases=dict(self.state.pending_aliases)))
        assert not self.state.pending_aliases

    @invariant()
    def traffic_sums_to_100_and_reaches_approved_versions_only(self) -> None:
        if self.actual is None:
            return
        weights = self.actual.split.weights
        assert sum(weights.values()) == 100
        serving = [d for d in self.actual.deployments if weights.get(d.name, 0) > 0]
        assert {d.manifest for d in serving} <= self.approved

    @invariant()
    def roles_are_consistent(self) -> None:
        roles = self.state.roles
        if roles.stable is None:
            assert roles == Roles()
            return
        assert (
            self.state.pending_rollback is not None
            or self.state.find_rejection(roles.stable) is None
        )
        assert roles.stable.version in self.state.known
        for other in (roles.candidate, roles.previous):
            assert other is None or other.manifest != roles.stable.manifest

    @invariant()
    def the_champion_is_what_serves_or_is_owed_to_be(self) -> None:
        stable = self.state.roles.stable
        if stable is not None:
            aliases = {**self.state.aliases, **self.state.pending_aliases}
            assert aliases["champion-cpu"] == stable.version

    @invariant()
    def a_plain_rollback_has_somewhere_to_go(self) -> None:
        """Assert that a rollback without a named version has a destination.

        It is the stable version while a candidate is on trial, otherwise the version replaced last.
        """
        if self.replaced:
            assert self.state.roles.previous is not None


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_first_deployment_gets_all_traffic() -> None:
    action = at_rest(Roles(), POLICIES[2], VERSIONS[0], now=1.0)
    assert action.kind is ActionKind.FIRST
    assert action.state.split.weights == {"v0": 100}


def test_rollout_steps_wait_for_operator_and_end_at_all_traffic() -> None:
    roles, seen = Roles(stable=VERSIONS[0]), []
    while roles.stable != VERSIONS[2]:
        action = at_rest(roles, POLICIES[2], VERSIONS[2], now=1.0, command=OperatorCommand.ADVANCE)
        seen.append((action.kind, action.state.split.weights["v2"]))
        roles = action.roles
        if roles.candidate is not None:
            waiting = at_rest(roles, POLICIES[2], VERSIONS[2], now=1.0)
            assert isinstance(waiting, Wait)
    assert seen == [(ActionKind.START, 5), (ActionKind.ADVANCE, 50), (ActionKind.FINISH, 100)]


def test_previous_version_retires_after_scale_down_delay() -> None:
    action = at_rest(Roles(stable=VERSIONS[0]), POLICIES[0], VERSIONS[2], now=10.0)
    assert action.kind is ActionKind.FINISH
    assert action.state.split.weights == {"v2": 100, "v0": 0}
    assert isinstance(at_rest(action.roles, POLICIES[0], VERSIONS[2], now=10.0 + DAY - 1), Wait)
    retired = at_rest(action.roles, POLICIES[0], VERSIONS[2], now=10.0 + DAY)
    assert retired.kind is ActionKind.RETIRE
    assert [d.name for d in retired.state.deployments] == ["v2"]
    assert retired.roles.previous == VERSIONS[0]


def test_aborted_rollout_keeps_previous_version() -> None:
    finished = at_rest(Roles(stable=VERSIONS[0]), POLICIES[0], VERSIONS[2], now=10.0)
    started = at_rest(finished.roles, POLICIES[1], VERSIONS[4], now=20.0)
    assert started.kind is ActionKind.START
    assert {d.name for d in started.state.deployments} == {"v2", "v4"}
    aborted = at_rest(started.roles, POLICIES[1], None, now=30.0)
    assert aborted.kind is ActionKind.ABORT
    assert aborted.roles.previous == VERSIONS[0]


def test_plan_abort_without_rollout_raises_value_error() -> None:
    with pytest.raises(ValueError, match="no rollout"):
        plan_abort(Roles(stable=VERSIONS[0]), "cpu", why="", reject=True)


RAILS = (Guardrail(name="errors"),)
MIXED = RolloutPolicy(
    steps=(0.1, 1.0),
    guardrails=RAILS,
    shadow=ShadowTrial(),
    ab_test=SplitTest(duration=DAY, split=0.5),
    epoch=30.0,
)


def epochs_of(policy: RolloutPolicy, *, draws_epochs: bool) -> list[tuple[int, float]]:
    """Return the candidate's weight and the epoch of every state of a rollout.

    The operator always advances.
    """
    roles, states, observed = Roles(stable=VERSIONS[0]), [], build_split_state(VERSIONS[0], None, 0)
    while roles.stable != VERSIONS[2]:
        action = choose_next_action(
            desired=VERSIONS[2],
            observed=observed,
            roles=roles,
            policy=policy,
            target="cpu",
            command=OperatorCommand.ADVANCE,
            now=1.0,
            draws_epochs=draws_epochs,
        )
        assert isinstance(action, Action)
        roles, observed = action.roles, action.state
        states.append((action.state.split.weights["v2"], action.state.split.epoch_s))
    return states


def test_split_epochs_apply_to_judged_canary_steps_only() -> None:
    """An A/B test keeps users on their version.

    A step that an operator ends does so too.
    """
    assert epochs_of(MIXED, draws_epochs=True) == [(0, 0.0), (10, 30.0), (50, 0.0), (100, 0.0)]
    assert epochs_of(MIXED, draws_epochs=False) == [(0, 0.0), (10, 0.0), (50, 0.0), (100, 0.0)]
    assert epochs_of(POLICIES[2], draws_epochs=True) == [(5, 0.0), (50, 0.0), (100, 0.0)]


def test_choose_next_action_with_different_epoch_restores_endpoint() -> None:
    roles = Roles(stable=VERSIONS[0], candidate=VERSIONS[2], step=1)
    for epoch_s, kind in ((30.0, None), (60.0, ActionKind.RESTORE), (0.0, ActionKind.RESTORE)):
        action = choose_next_action(
            desired=VERSIONS[2],
            observed=build_split_state(VERSIONS[0], VERSIONS[2], 10, epoch_s=epoch_s),
            roles=roles,
            policy=MIXED,
            target="cpu",
            command=None,
            now=1.0,
            draws_epochs=True,
        )
        assert (action.kind if isinstance(action, Action) else None) == kind


@pytest.mark.parametrize("epoch_s", [-1.0, 0.05, 1e6])
def test_build_split_state_with_invalid_epoch_raises_value_error(epoch_s: float) -> None:
    with pytest.raises(ValueError, match="an epoch must last"):
        build_split_state(VERSIONS[0], VERSIONS[2], 10, epoch_s=epoch_s)


REPLACED = "SageMaker's endpoint has the status Updating"
IN_ROLLOUT = Roles(stable=VERSIONS[0], candidate=VERSIONS[2])
HALF_WAY = build_split_state(VERSIONS[0], VERSIONS[2], 5)


def choose_with_instances(
    command: OperatorCommand | None, desired: Deployment = VERSIONS[2], **observed: tuple[str, ...]
) -> Action | Wait:
    """Return the next action of a rollout whose instances differ, or are being replaced."""
    return choose_next_action(
        desired=desired,
        observed=replace(HALF_WAY, **observed),  # type: ignore[arg-type]
        roles=IN_ROLLOUT,
        policy=POLICIES[2],
        target="cpu",
        command=command,
        now=1.0,
        has_fleet=True,
    )


def test_rollout_during_replacement_of_instances_waits_for_its_end_unless_paused() -> None:
    for command in (None, OperatorCommand.ADVANCE, OperatorCommand.RESUME):
        held = choose_with_instances(command, replacements=(REPLACED,), drift=("image: a, not b",))
        why = f"the cloud is changing the instances: {REPLACED}"
        assert held == Wait(why=why, kind=WaitKind.REPLACING)
    paused = choose_with_instances(OperatorCommand.PAUSE, replacements=(REPLACED,))
    assert isinstance(paused, Wait)
    assert paused.kind is WaitKind.PAUSED


def test_superseded_rollout_during_replacement_of_instances_aborts() -> None:
    action = choose_with_instances(None, VERSIONS[4], replacements=(REPLACED,))
    assert isinstance(action, Action)
    assert action.kind is ActionKind.ABORT


def test_rollout_does_not_start_while_instances_are_replaced() -> None:
    observed = replace(build_split_state(VERSIONS[0], None, 0), replacements=(REPLACED,))
    waiting = choose_next_action(
        desired=VERSIONS[2],
        observed=observed,
        roles=Roles(stable=VERSIONS[0]),
        policy=POLICIES[2],
        target="cpu",
        command=None,
        now=1.0,
    )
    assert isinstance(waiting, Wait)
    assert waiting.kind is WaitKind.REPLACING


def test_rollout_step_with_drifted_instances_reconfigures_instances_only() -> None:
    action = choose_with_instances(OperatorCommand.ADVANCE, drift=("image: a, not b",))
    assert isinstance(action, Action)
    assert (action.kind, action.roles) == (ActionKind.RECONFIGURE, IN_ROLLOUT)
    assert action.state.is_equivalent(HALF_WAY)
    assert isinstance(choose_with_instances(None, drift=("image: a, not b",)), Wait)
