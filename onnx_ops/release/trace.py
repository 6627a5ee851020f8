"""The last rollout of an endpoint, in progress or over, as its ledger tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import Intent, LedgerEntry, Outcome, ReleaseState, Spoken, follow
from onnx_ops.domain.rollout import Action, ActionKind
from onnx_ops.domain.rollout_observations import Observations
from onnx_ops.domain.rollout_policy import RolloutPolicy

_STORY = (ActionKind.START, ActionKind.ADVANCE, ActionKind.FINISH, ActionKind.ABORT, ActionKind.ROLLBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One thing that was done or said. `at` is seconds since the epoch, `percent` the candidate's share afterwards."""

    at: float
    actor: str
    what: str
    why: str
    percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A rollout from its start. `observations` are what was counted of it, also where it is over; `end` is how it
    ended, None while it goes on."""

    candidate: Deployment
    stable: Deployment | None
    steps: tuple[TracedStep, ...]
    policy: RolloutPolicy
    observations: Observations | None
    end: ActionKind | None


def trace(endpoint: str, entries: Sequence[LedgerEntry]) -> Trace | None:
    """The endpoint's last rollout that had a step before its last one; None if there was none."""
    state, found = ReleaseState(endpoint=endpoint), None
    for entry in entries:
        action = _done(state, entry)
        state = follow(state, entry)
        if action is not None and action.kind is ActionKind.START and action.roles.candidate is not None:
            found = Trace(
                candidate=action.roles.candidate,
                stable=action.roles.stable,
                steps=(_step(entry, action),),
                policy=state.policy,
                observations=state.trial,
                end=None,
            )
        elif found is not None and found.end is None:
            done = action is not None and action.kind in _STORY
            steps = [_step(entry, action)] if action is not None and done else _said(entry)
            found = replace(
                found,
                steps=(*found.steps, *steps),
                policy=state.policy,
                observations=state.trial or found.observations,
                end=action.kind if action is not None and done and state.roles.candidate is None else None,
            )
    return found


def _done(before: ReleaseState, entry: LedgerEntry) -> Action | None:
    """The action that this entry says was done, if it counts."""
    body, opened = entry.body, before.open_intent
    if isinstance(body, Outcome) and body.ok and isinstance(opened, Intent) and body.of == before.generation:
        return opened.action
    return None


def _step(entry: LedgerEntry, action: Action) -> TracedStep:
    candidate = action.roles.candidate
    percent = None if candidate is None else action.state.split.weights.get(candidate.name, 0)
    return TracedStep(at=entry.at, actor=entry.actor, what=action.kind.value, why=action.why, percent=percent)


def _said(entry: LedgerEntry) -> list[TracedStep]:
    body = entry.body
    if isinstance(body, Spoken):
        what, why = f"operator says {body.word.value}", body.reason
    elif isinstance(body, Outcome) and not body.ok:
        what, why = "failed", body.detail
    elif body.kind == "held":
        what, why = body.wait.value, body.why
    else:
        return []
    return [TracedStep(at=entry.at, actor=entry.actor, what=what, why=why)]
