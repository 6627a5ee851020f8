"""All traffic back to a version that is known to work. Needs the ledger and the endpoint, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import Intent, ReleaseState, Spoken, fold
from onnx_ops.domain.rollout import Action, ActionKind, Roles, Word, abort, rollback
from onnx_ops.errors import Conflict, NotFound, OnnxOpsError, Refused, UserError
from onnx_ops.operations.journal import Journal, damage, looking_again, pinned
from onnx_ops.operations.status import Wanted, wanted_endpoints
from onnx_ops.ports import Ports

ATTEMPTS = 5
"""Times a rollback tries to get the next ledger entry from a driver that is writing too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """From which version to which; `owed` are aliases that the registry will be told later."""

    endpoint: str
    moved_from: str
    moved_to: str
    reason: str
    owed: tuple[str, ...]


def roll_back(
    ports: Ports,
    endpoint: str,
    *,
    to: str | None = None,
    reason: str = "",
    actor: str = "",
    force: bool = False,
    pin: bool = True,
) -> Rolled:
    """Move all traffic to the previous version, or to `to`.

    Where several endpoints serve the same model and target, this one is pinned: the aliases, which speak for all of
    them, stay. Without `pin` they follow once all of these endpoints have gone back.

    The intent outranks whatever a driver has open: its later outcome no longer counts, and the endpoint refuses its
    later effects, which carry a lower generation.

    Raises:
        NotFound: no such endpoint, or no version to go back to.
        Refused: that version was rolled back itself, and `force` does not say that it must be.
        ServiceUnavailable: the endpoint could not be reached.
    """
    for attempt in range(ATTEMPTS):
        journal = Journal.open(ports, endpoint, actor=actor)
        action, origin, goal = _plan(journal, to, reason, force)
        if pin:
            action = pinned(ports, journal.config, action)
        try:
            journal.perform(action, by_hand=True)
        except Conflict:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        owed = tuple(sorted(journal.state.pending_aliases))
        return Rolled(endpoint=endpoint, moved_from=origin, moved_to=goal.name, reason=action.why, owed=owed)
    raise AssertionError("unreachable: the last attempt returns or raises")


def roll_back_each(
    ports: Ports,
    endpoints: Sequence[str],
    *,
    to: str | None = None,
    reason: str = "",
    actor: str = "",
    force: bool = False,
    pin: bool = True,
) -> tuple[dict[str, Rolled], dict[str, OnnxOpsError]]:
    """`roll_back` of several: what was moved and what was not. One endpoint's trouble does not keep the others back."""
    moved: dict[str, Rolled] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in endpoints:
        try:
            moved[name] = roll_back(ports, name, to=to, reason=reason, actor=actor, force=force, pin=pin)
        except OnnxOpsError as error:
            errors[name] = error
    return moved, errors


def chosen(
    ports: Ports,
    endpoints: tuple[str, ...],
    *,
    every: bool,
    model: str = "",
    target: str = "",
    to: str | None = None,
) -> tuple[str, ...]:
    """Names of the endpoints that a rollback is for: those that are named, or `every` one of a model and target.

    Without `to`, every one means those that have the release which came last to any of them: an endpoint that it has
    not reached yet has nothing to go back from.

    Raises:
        UserError: neither or both are given.
        NotFound: no endpoint serves that model on that target, or none has its last release any more.
    """
    if bool(endpoints) == every or (every and not model) or (not every and (model or target)):
        raise UserError(
            "which endpoints?", remedy="Name them, or write --all --model MODEL; `onnx-ops status` lists them."
        )
    names = wanted_endpoints(ports, Wanted(model=model, target=target)) if every else endpoints
    if not names:
        of_target = f" on {target}" if target else ""
        raise NotFound(f"no endpoint serves {model}{of_target}", remedy="See `onnx-ops status`.")
    return _reached(ports, names, model) if every and to is None else names


def _reached(ports: Ports, names: Sequence[str], model: str) -> tuple[str, ...]:
    came: list[tuple[float, Digest]] = []
    have: dict[str, set[Digest]] = {}
    for name in names:
        entries = ports.ledger.sound(name)
        begun = [(e.at, e.body.action) for e in entries if isinstance(e.body, Intent)]
        came += [(at, new.release) for at, action in begun if (new := _newcomer(action)) is not None]
        state = fold(name, entries)
        roles = (state.roles, *((state.open_intent.action.roles,) if state.open_intent is not None else ()))
        have[name] = {d.release for one in roles for d in (one.candidate, one.stable) if d is not None}
    last = max(came, default=(0.0, None), key=lambda item: item[0])[1]
    # Of a damaged ledger nobody knows whether it had that release: that it cannot be rolled back is to be told.
    found = tuple(name for name in names if last in have[name] or damage(ports, name) is not None)
    if not found:
        raise NotFound(
            f"no endpoint serves the last release of {model} any more",
            remedy="See `onnx-ops history`; to go further back, name a version with --to.",
        )
    return found


def _newcomer(action: Action) -> Deployment | None:
    """What an action brings to its endpoint."""
    arrives = action.kind in (ActionKind.FIRST, ActionKind.START, ActionKind.FINISH)
    return (action.roles.candidate or action.roles.stable) if arrives else None


def say(ports: Ports, endpoint: str, word: Word, *, reason: str = "", actor: str = "") -> None:
    """An operator's word about a rollout in progress; the reconciler acts upon it.

    Raises:
        UserError: no rollout is in progress.
    """

    def speak() -> None:
        journal = Journal.open(ports, endpoint, actor=actor)
        config = journal.config
        if journal.state.roles.candidate is None:
            raise UserError(
                "no rollout is in progress", where=config.endpoint, remedy=f"See `onnx-ops status {config.endpoint}`."
            )
        journal.append(Spoken(word=word, reason=reason))

    looking_again(speak)


def _plan(journal: Journal, to: str | None, reason: str, force: bool) -> tuple[Action, str, Deployment]:
    state, config = journal.state, journal.config
    if state.deleting:
        raise Refused(
            "the endpoint is being deleted",
            where=config.endpoint,
            remedy=f"Complete that with `onnx-ops delete {config.endpoint}`, or bind it again with `onnx-ops run`.",
        )
    begun = state.open_intent.action if state.open_intent is not None else None
    if begun is not None and (goal := _way_back(begun)) is not None and to in (None, goal.version, goal.name):
        return begun, _name(state.roles.candidate or state.roles.stable), goal
    # What a driver has begun may have reached the endpoint already, so it counts as done; but what is being taken
    # out counts as still there, so that it is rejected too.
    roles = begun.roles if begun is not None and begun.kind is not ActionKind.ABORT else state.roles
    goal = _goal(state, roles, to)
    if (bad := state.why_rejected(goal)) is not None and not force:
        raise Refused(
            f"{goal.name} is known to be bad",
            where=config.endpoint,
            why=bad,
            remedy="Name another version with --to, or insist with --force.",
        )
    why = reason or "rolled back by an operator, who gave no reason"
    now = journal.ports.clock.now()
    if roles.candidate is not None and roles.stable is not None and goal.manifest == roles.stable.manifest:
        action, origin = abort(roles, config.target, why=why, reject=True), roles.candidate.name
    else:
        action, origin = rollback(roles, goal, config.target, why=why, now=now), _name(roles.stable)
    if begun is not None:
        rejected = (*begun.reject, *action.reject)
        action = replace(
            action, reject=tuple(d for d in dict.fromkeys(rejected) if d not in (goal.release, goal.manifest))
        )
    return action, origin, goal


def _way_back(begun: Action) -> Deployment | None:
    """Where an operator's rollback leads that nobody concluded; None if something else was begun."""
    return begun.roles.stable if begun.reject else None


def _name(deployment: Deployment | None) -> str:
    return deployment.name if deployment is not None else "nothing"


def _goal(state: ReleaseState, roles: Roles, to: str | None) -> Deployment:
    if to is not None:
        version = to.removeprefix("v")
        if version not in state.known:
            known = ", ".join(f"v{v}" for v in sorted(state.known, key=lambda v: (len(v), v))) or "none"
            raise NotFound(f"v{version} never served here", where=state.endpoint, remedy=f"Versions that did: {known}.")
        if roles.stable is not None and roles.candidate is None and roles.stable.version == version:
            raise UserError(f"v{version} serves all traffic already", where=state.endpoint)
        return state.known[version]
    goal = roles.stable if roles.candidate is not None else roles.previous
    if goal is None:
        raise NotFound(
            "no previous version to go back to",
            where=state.endpoint,
            remedy=f"See `onnx-ops history {state.endpoint}`; name a version with --to.",
        )
    return goal
