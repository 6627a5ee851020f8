"""The fold of ledger entries: which count, and what is pending or rejected."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.attestation import Envelope
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    FOLD_VERSION,
    ActionOutcome,
    AliasesWritten,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LedgerEntry,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseState,
    apply_entry,
    fold,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    Wait,
    choose_next_action,
    plan_abort,
    plan_rollback,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.testing.ledgers import entry as build_entry
from onnx_ops.testing.ledgers import one_of_each
from tests.support.endpoints import endpoint_config, fileless_deployment

POLICY = RolloutPolicy(steps=(0.1, 0.5, 1.0))
CONFIG = endpoint_config("digits", model="digits", pipeline="digits")


def version(number: int, *, release: str = "") -> Deployment:
    manifest = digest_bytes(f"manifest {number}".encode())
    return fileless_deployment(
        f"v{number}", release or f"release {number}", model="digits", manifest=manifest
    )


def log(*bodies: EntryBody | Action) -> list[LedgerEntry]:
    """Return log entries of these bodies; entry n is written at time n.

    An action stands for an intent and its successful outcome.
    """
    flat: list[EntryBody] = []
    for body in bodies:
        if isinstance(body, Action):
            flat.append(intent(body))
            flat.append(ActionOutcome(of=len(flat), ok=True))
        else:
            flat.append(body)
    return [
        LedgerEntry(endpoint="digits", sequence=n, at=float(n), actor="a", body=body)
        for n, body in enumerate(flat, start=1)
    ]


def folded(*bodies: EntryBody | Action) -> ReleaseState:
    return fold("digits", log(*bodies))


def intent(action: Action) -> Intent:
    return Intent(action=action, holder="h", expires_at=1000.0)


def at_rest(
    roles: Roles,
    policy: RolloutPolicy,
    wanted: Deployment | None,
    *,
    now: float = 100.0,
    command: OperatorCommand | None = None,
) -> Any:
    """Return what is due at an endpoint whose state matches its roles."""
    ask = partial(
        choose_next_action, desired=wanted, roles=roles, policy=policy, target="cpu", now=now
    )
    restored = ask(observed=None, command=None)
    return ask(observed=restored.state if isinstance(restored, Action) else None, command=command)


def planned(wanted: Deployment, roles: Roles, command: OperatorCommand | None = None) -> Action:
    action = at_rest(roles, POLICY, wanted, command=command)
    assert isinstance(action, Action), action
    return action


FIRST = planned(version(1), Roles())
START = planned(version(2), FIRST.roles)
ADVANCE = planned(version(2), START.roles, OperatorCommand.ADVANCE)
FINISH = planned(version(2), ADVANCE.roles, OperatorCommand.ADVANCE)
CONFIGURED = EndpointBound(config=CONFIG, policy=POLICY)
SERVING = (CONFIGURED, FIRST)


def test_scenario_actions_have_expected_kinds() -> None:
    kinds = [FIRST.kind, START.kind, ADVANCE.kind, FINISH.kind]
    assert kinds == [ActionKind.FIRST, ActionKind.START, ActionKind.ADVANCE, ActionKind.FINISH]


def test_fold_of_same_entries_together_or_one_by_one_returns_same_state() -> None:
    entries = log(*SERVING, START, OperatorCommandSent(command=OperatorCommand.PAUSE))
    assert fold("digits", entries) == fold("digits", entries)
    step_by_step = ReleaseState(endpoint="digits")
    for entry in entries:
        step_by_step = apply_entry(step_by_step, entry)
    assert step_by_step == fold("digits", entries)


def test_fold_with_gap_repeat_or_other_endpoint_raises_value_error() -> None:
    entries = log(*SERVING)
    for wrong in (entries[1:], [entries[0], entries[2]], [*entries, entries[-1]]):
        with pytest.raises(ValueError, match="cannot follow"):
            fold("digits", wrong)
    with pytest.raises(ValueError, match="cannot follow"):
        fold("other", entries)


def test_fold_with_open_intent_keeps_roles() -> None:
    state = folded(*SERVING, intent(START))
    assert state.open_intent == intent(START)
    assert state.generation == 4
    assert state.roles == FIRST.roles


def test_fold_with_outcome_closes_only_named_intent() -> None:
    overtaken = folded(*SERVING, intent(START), intent(FINISH), ActionOutcome(of=4, ok=True))
    assert overtaken.open_intent == intent(FINISH)
    assert overtaken.roles == FIRST.roles
    closed = folded(*SERVING, intent(START), FINISH, ActionOutcome(of=5, ok=False))
    assert closed.open_intent is None
    assert closed.roles == FINISH.roles


def test_fold_with_failed_outcome_keeps_roles_aliases_and_rejections() -> None:
    before = folded(*SERVING)
    after = folded(*SERVING, intent(START), ActionOutcome(of=4, ok=False, detail="no memory"))
    began = replace(before, latest_release=version(2).release, latest_release_at=4.0)
    assert after == replace(began, head=5, generation=4, decision_sequence=4)


def test_fold_with_superseded_intent_records_and_rejects_its_version() -> None:
    back = plan_abort(START.roles, "cpu", why="bad", reject=True)
    state = folded(*SERVING, intent(START), back)
    assert set(state.known) == {"1", "2"}
    assert set(state.rejected) == {version(2).release}


def test_fold_keeps_aliases_pending_until_written() -> None:
    state = folded(*SERVING)
    assert state.pending_aliases == {"champion-cpu": "1", "challenger-cpu": None}
    state = folded(*SERVING, AliasesWritten(aliases={"champion-cpu": "1"}))
    assert state.pending_aliases == {"challenger-cpu": None}
    assert state.aliases == {"champion-cpu": "1"}


def test_operator_command_is_cleared_by_successful_advance() -> None:
    said = (*SERVING, START, OperatorCommandSent(command=OperatorCommand.ADVANCE))
    assert folded(*said).command is OperatorCommand.ADVANCE
    assert folded(*said, intent(ADVANCE)).command is OperatorCommand.ADVANCE
    assert (
        folded(*said, intent(ADVANCE), ActionOutcome(of=7, ok=False)).command
        is OperatorCommand.ADVANCE
    )
    assert folded(*said, ADVANCE).command is None


def test_operator_command_survives_restore() -> None:
    repair = Action(kind=ActionKind.RESTORE, state=START.state, roles=START.roles, why="lost")
    said = (*SERVING, START, OperatorCommandSent(command=OperatorCommand.ADVANCE))
    assert folded(*said, repair).command is OperatorCommand.ADVANCE


def test_operator_command_sent_during_open_intent_survives_outcome_of_advance() -> None:
    state = folded(
        *SERVING,
        START,
        OperatorCommandSent(command=OperatorCommand.ADVANCE),
        intent(ADVANCE),
        OperatorCommandSent(command=OperatorCommand.PAUSE),
        ActionOutcome(of=7, ok=True),
    )
    assert state.command is OperatorCommand.PAUSE


def test_operator_command_is_cleared_when_rollout_finishes() -> None:
    state = folded(
        *SERVING,
        START,
        intent(FINISH),
        OperatorCommandSent(command=OperatorCommand.PAUSE),
        ActionOutcome(of=6, ok=True),
    )
    assert state.command is None


def given(what: Deployment, reason: str) -> OverrideRecorded:
    """Return the override that a person signed for a version."""
    envelope = Envelope(payload=reason, payloadType="text/plain", signatures=())
    return OverrideRecorded(
        release=what.release,
        manifest=what.manifest,
        version=what.version,
        reason=reason,
        signed=envelope,
    )


def test_override_of_rejected_version_lasts_until_next_rollback_and_cannot_be_replayed() -> None:
    back = plan_rollback(FINISH.roles, version(1), "cpu", why="slow")
    rolled = (*SERVING, FINISH, back)
    assert folded(*rolled).rejected == {version(2).release: "slow"}
    override = given(version(2), "it was the network")
    assert folded(*rolled, override).rejected == {version(2).release: "slow"}
    assert folded(*rolled, override).overrides == {version(2).manifest: override}
    again = folded(*rolled, override, back)
    assert again.rejected == {version(2).release: "slow"}
    assert again.overrides == {}
    replayed = folded(*rolled, override, back, override)
    assert replayed.overrides == {}


def test_abort_or_rollback_to_version_of_same_release_does_not_reject_that_version() -> None:
    good, bad = version(1, release="same"), version(2, release="same")
    started = planned(bad, Roles(stable=good))
    for back in (
        plan_abort(started.roles, "cpu", why="bad", reject=True),
        plan_rollback(Roles(stable=bad, previous=good), good, "cpu", why="bad"),
    ):
        state = folded(*SERVING, started, back)
        assert state.find_rejection(good) is None
        assert state.find_rejection(bad) == "bad"


def test_rollback_to_rejected_version_clears_its_rejection() -> None:
    back = plan_rollback(FINISH.roles, version(1), "cpu", why="slow")
    forth = plan_rollback(back.roles, version(2), "cpu", why="it was the network")
    state = folded(*SERVING, FINISH, back, forth)
    assert state.roles.stable == version(2)
    assert state.rejected == {version(1).release: "it was the network"}


def test_deleted_endpoint_keeps_generation_without_roles() -> None:
    gone = folded(*SERVING, START, EndpointDeleted(done=False), EndpointDeleted(done=True))
    assert (gone.generation, gone.config, gone.roles) == (4, None, Roles())


def test_choose_next_action_without_versions_waits() -> None:
    asked = at_rest(Roles(), POLICY, None)
    assert isinstance(asked, Wait)
    assert "challenger-cpu" in asked.why


def test_fold_of_known_entries_matches_digest_of_fold_version() -> None:
    """A snapshot of another fold must not be used.

    If this digest changes, FOLD_VERSION must change too.
    """
    entries = [
        build_entry(sequence, body)
        for sequence, body in enumerate([*one_of_each(), *one_of_each()], start=1)
    ]
    states = [fold("digits", entries[:length]) for length in range(len(entries) + 1)]
    assert (FOLD_VERSION, digest_bytes(b"".join(codec.dumps(state) for state in states))) == (
        6,
        "sha256:7dd9fc04b082a37243639c5a52d2a0b456f26dc9f9ffac88cefff36574a47ccb",
    )
