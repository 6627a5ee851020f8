"""All traffic back to a version that is known to work. Needs the ledger and the endpoint, nothing else.

A rollback is requested first, by an entry of its own, and is owed from then on: whatever fails or is killed, every
reconciliation tries again, until the endpoint was observed where the request leads or an operator withdraws it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, EndpointConfig, serves_only
from onnx_ops.domain.ledger import OperatorCommandSent, ReleaseState, RequestWithdrawn, RollbackRequested
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Roles, plan_abort, plan_rollback
from onnx_ops.errors import (
    DigestMismatchError,
    LedgerConflictError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    StillPendingError,
    UserError,
)
from onnx_ops.ports import Ports
from onnx_ops.release.journal import Journal, find_corruption, pin_aliases, read_readable_state, with_generation
from onnx_ops.release.registry_sync import restore_files
from onnx_ops.release.retry import COMMAND_TIMEOUT_S, retry_on_conflict, run_concurrently
from onnx_ops.release.status import HistoryFilter, filter_endpoints

_PAUSE_S = 0.1
OBSERVE_TIMEOUT_S = 2.0
"""How long to look, in seconds, whether a rollback took effect before. An endpoint that does not answer is no proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackResult:
    """From which version to which; `owed` are aliases that the registry will be told later. `already`: nothing was
    left to do."""

    endpoint: str
    moved_from: str
    moved_to: str
    reason: str
    owed: tuple[str, ...]
    already: bool = False


def roll_back(
    ports: Ports,
    endpoint: str,
    *,
    to: str | None = None,
    reason: str = "",
    actor: str = "",
    force: bool = False,
    pin: bool = True,
    candidate_only: bool = False,
) -> RollbackResult:
    """Request that all traffic goes to the previous version, or to `to`, and carry it out.

    Where several endpoints serve the same model and target, this one is pinned: the aliases, which speak for all of
    them, stay. Without `pin` they follow once all of these endpoints have gone back.

    The request outranks whatever a driver has open: its later outcome no longer counts, and the endpoint refuses its
    later effects, which carry a lower generation. A request that has taken effect already changes nothing.

    Raises:
        NotFoundError: no such endpoint, or no version to go back to.
        RefusedError: that version was rolled back itself, and `force` does not say that it must be.
        StillPendingError: it was requested, and could not be carried out yet.
        UserError: no rollout is in progress, and `candidate_only` says that only its candidate may be taken back.
    """
    rolled, journal = request_rollback(
        ports, endpoint, to=to, reason=reason, actor=actor, force=force, pin=pin, candidate_only=candidate_only
    )
    return rolled if rolled.already else _carried_out(journal, rolled)


def request_rollback(
    ports: Ports,
    endpoint: str,
    *,
    to: str | None,
    reason: str,
    actor: str,
    force: bool,
    pin: bool,
    candidate_only: bool,
) -> tuple[RollbackResult, Journal]:
    """Write down that traffic is to go back; from then on it is owed. Arguments and errors as of `roll_back`.

    Returns:
        The rollback, and the journal in which it stands.
    """

    def request() -> tuple[RollbackResult, Journal]:
        journal = Journal.open(ports, endpoint, actor=actor)
        config, pending = journal.config, journal.state.pending_rollback
        if pending is not None and _is_same(pending.action, to):
            return _rolled(journal.state, pending.action), journal
        if (done := _done(journal, to, force)) is not None:
            return done, journal
        if candidate_only and journal.state.roles.candidate is None:
            raise _no_rollout(endpoint)
        action = _plan(journal, to, reason, force)
        if pin:
            action = pin_aliases(ports, config, action)
        rolled = _rolled(journal.state, action)
        journal.append(RollbackRequested(action=action, by_operator=True))
        return rolled, journal

    return retry_on_conflict(request)


def request_and_carry_out(journal: Journal, action: Action) -> None:
    """Request what the figures or the registry call for, and try once to carry it out.

    Raises:
        OnnxOpsError: as `carry_out_pending` does.
    """
    journal.append(RollbackRequested(action=action))
    carry_out_pending(journal)


def carry_out_pending(journal: Journal) -> None:
    """Try once to bring the endpoint where its pending rollback leads.

    Raises:
        OnnxOpsError: it is still owed; the ledger says why.
    """
    pending = journal.state.pending_rollback
    if pending is not None:
        journal.perform(pending.action, partial(_give_back, journal.ports, journal.config, pending.action))


def roll_back_each(
    ports: Ports,
    endpoints: Sequence[str],
    *,
    to: str | None = None,
    reason: str = "",
    actor: str = "",
    force: bool = False,
    pin: bool = True,
    candidate_only: bool = False,
    patience_s: float = COMMAND_TIMEOUT_S,
) -> tuple[dict[str, RollbackResult], dict[str, OnnxOpsError]]:
    """`roll_back` of several: what was moved and what was not. One endpoint's trouble does not keep the others back.

    All are requested first, then carried out side by side. What takes longer than `patience_s` is `StillPendingError`.
    """
    requested: dict[str, tuple[RollbackResult, Journal]] = {}
    errors: dict[str, OnnxOpsError] = {}
    for name in endpoints:
        try:
            requested[name] = request_rollback(
                ports, name, to=to, reason=reason, actor=actor, force=force, pin=pin, candidate_only=candidate_only
            )
        except OnnxOpsError as error:
            errors[name] = error
    moved = {name: rolled for name, (rolled, _) in requested.items() if rolled.already}
    calls = {
        name: partial(_carried_out, journal, rolled)
        for name, (rolled, journal) in requested.items()
        if name not in moved
    }
    late = f"the endpoint did not get there within {patience_s:g} s"
    for name, result in run_concurrently(calls, patience_s, lambda name: _still_owed(requested[name][0], late)).items():
        if isinstance(result, OnnxOpsError):
            errors[name] = result
        else:
            moved[name] = result
    return moved, errors


def withdraw_request(ports: Ports, endpoint: str, *, reason: str, actor: str = "") -> str:
    """Take back what the endpoint owes: a deletion, or else a rollback that did not take effect, with what it rejected.

    Returns:
        What was withdrawn, in words.

    Raises:
        NotFoundError: nothing is owed.
        UserError: there is no reason.
    """
    if not reason.strip():
        raise UserError("a withdrawal needs a reason", where=endpoint, remedy="Say why with --reason; it is recorded.")

    def attempt() -> str:
        journal = Journal.open(ports, endpoint, actor=actor)
        pending, deleting = journal.state.pending_rollback, journal.state.deleting
        if pending is None and not deleting:
            raise NotFoundError(
                "nothing is owed here", where=journal.config.endpoint, remedy=f"See `onnx-ops history {endpoint}`."
            )
        journal.append(RequestWithdrawn(reason=reason))
        if deleting or pending is None:
            return "the deletion"
        return f"the rollback to {_name(pending.action.roles.stable)}"

    return retry_on_conflict(attempt)


def select_endpoints(
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
        NotFoundError: no endpoint serves that model on that target, or none has its last release any more.
    """
    if bool(endpoints) == every or (every and not model) or (not every and (model or target)):
        raise UserError(
            "which endpoints?", remedy="Name them, or write --all --model MODEL; `onnx-ops status` lists them."
        )
    names = filter_endpoints(ports, HistoryFilter(model=model, target=target)) if every else endpoints
    if not names:
        of_target = f" on {target}" if target else ""
        raise NotFoundError(f"no endpoint serves {model}{of_target}", remedy="See `onnx-ops status`.")
    return _reached(ports, names, model) if every and to is None else names


def _reached(ports: Ports, names: Sequence[str], model: str) -> tuple[str, ...]:
    states = {name: read_readable_state(ports, name) for name in names}
    last = max(states.values(), key=lambda state: state.latest_release_at).latest_release
    # Of a damaged ledger nobody knows whether it had that release: that it cannot be rolled back is to be told.
    found = tuple(
        name for name, state in states.items() if last in _releases(state) or find_corruption(ports, name) is not None
    )
    # Asked again after the rollback: those that went back from it, so that the answer is that this is done.
    found = found or tuple(
        name for name, state in states.items() if state.last_rollback and state.latest_release == last
    )
    if not found:
        raise NotFoundError(
            f"no endpoint serves the last release of {model} any more",
            remedy="See `onnx-ops history`; to go further back, name a version with --to.",
        )
    return found


def _releases(state: ReleaseState) -> set[Digest]:
    """Releases that take traffic, or are about to."""
    roles = (state.roles, *((state.open_intent.action.roles,) if state.open_intent is not None else ()))
    return {d.release for one in roles for d in (one.candidate, one.stable) if d is not None}


def send_command(ports: Ports, endpoint: str, word: OperatorCommand, *, reason: str = "", actor: str = "") -> None:
    """An operator's word about a rollout in progress; the reconciler acts upon it.

    Raises:
        UserError: no rollout is in progress.
    """

    def speak() -> None:
        journal = Journal.open(ports, endpoint, actor=actor)
        config = journal.config
        if journal.state.roles.candidate is None:
            raise _no_rollout(config.endpoint)
        journal.append(OperatorCommandSent(command=word, reason=reason))

    retry_on_conflict(speak)


def _no_rollout(endpoint: str) -> UserError:
    return UserError("no rollout is in progress", where=endpoint, remedy=f"See `onnx-ops status {endpoint}`.")


def _carried_out(journal: Journal, rolled: RollbackResult) -> RollbackResult:
    """Pay what was requested. Raises StillPendingError, with the cause."""

    def attempt() -> None:
        try:
            _wait_for_another(journal)
            carry_out_pending(journal)
        except LedgerConflictError:
            journal.state = journal.ports.ledger.state(rolled.endpoint)
            raise

    try:
        retry_on_conflict(attempt)
    except OnnxOpsError as error:
        raise _still_owed(rolled, str(error)) from error
    return replace(rolled, owed=tuple(sorted(journal.state.pending_aliases)))


def _wait_for_another(journal: Journal) -> None:
    """Let whoever carries the same rollback out already get on with it. Commands that are repeated faster than a slow
    endpoint moves would else all begin anew, and none would ever end.

    Raises:
        ServiceUnavailableError: it takes long.
    """
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while (intent := journal.at_work()) is not None:
        if time.monotonic() > deadline:
            raise ServiceUnavailableError(f"{intent.holder} is at work on it", where=journal.state.endpoint)
        time.sleep(_PAUSE_S)
        journal.state = journal.ports.ledger.state(journal.state.endpoint)


def _still_owed(rolled: RollbackResult, why: str) -> StillPendingError:
    return StillPendingError(
        f"accepted, still owed: all traffic to {rolled.moved_to}",
        where=rolled.endpoint,
        why=why,
        remedy=f"Every `onnx-ops reconcile` and watch tries again; {rolled.moved_from} counts as rejected meanwhile. "
        f"Take it back with `onnx-ops rollback --withdraw {rolled.endpoint} --reason ...`.",
    )


def _give_back(ports: Ports, config: EndpointConfig, action: Action, generation: int) -> None:
    """Traffic first, by the provider's one call. Files that it needs and that are lost or damaged are fetched again."""
    state, provider = with_generation(action.state, generation), ports.provider(config.provider)
    try:
        provider.roll_back(config, state, generation=generation)
    except (NotFoundError, DigestMismatchError):
        restore_files(ports, state.leader())
        provider.roll_back(config, state, generation=generation)


def _is_same(asked: Action, to: str | None) -> bool:
    """Whether what is owed is what an operator asks for. What was only withdrawn is not rejected yet."""
    goal = asked.roles.stable
    return bool(asked.reject) and goal is not None and to in (None, goal.version, goal.name)


def _rolled(state: ReleaseState, action: Action, *, already: bool = False) -> RollbackResult:
    left = [name for name, weight in action.state.split.weights.items() if not weight]
    return RollbackResult(
        endpoint=state.endpoint,
        moved_from=left[0] if left else "nothing",
        moved_to=_name(action.roles.stable),
        reason=action.why,
        owed=tuple(sorted(state.pending_aliases)),
        already=already,
    )


def _done(journal: Journal, to: str | None, force: bool) -> RollbackResult | None:
    """What a request that took effect before has done; None if there is something to do.

    Without `to`, a rollback after a rollback is the same one again: whoever wants to go back further says how far.
    """
    state, config = journal.state, journal.config
    stable, last = state.roles.stable, state.last_rollback
    if stable is None or state.roles.candidate is not None or state.open_intent is not None or state.deleting:
        return None
    if to is None and (last is None or force):
        return None
    if to is not None and to.removeprefix("v") != stable.version:
        return None
    look = partial(journal.ports.provider(config.provider).observe, config)
    late = ServiceUnavailableError("the endpoint does not answer", where=config.endpoint)
    actual = run_concurrently({config.endpoint: look}, OBSERVE_TIMEOUT_S, lambda _: late)[config.endpoint]
    if actual is None or isinstance(actual, OnnxOpsError) or not serves_only(actual, stable):
        return None
    if last is None:
        return RollbackResult(
            endpoint=config.endpoint,
            moved_from=stable.name,
            moved_to=stable.name,
            reason="",
            owed=tuple(sorted(state.pending_aliases)),
            already=True,
        )
    return _rolled(state, last, already=True)


def _plan(journal: Journal, to: str | None, reason: str, force: bool) -> Action:
    state, config = journal.state, journal.config
    if state.deleting:
        raise RefusedError(
            "the endpoint is being deleted",
            where=config.endpoint,
            remedy=f"Complete that with `onnx-ops delete {config.endpoint}`, or take it back with "
            f"`onnx-ops rollback --withdraw {config.endpoint} --reason ...`.",
        )
    begun = state.open_intent.action if state.open_intent is not None else None
    if state.pending_rollback is not None:
        begun = state.pending_rollback.action
    # What a driver has begun may have reached the endpoint already, so it counts as done; but what is being taken
    # out counts as still there, so that it is rejected too.
    roles = begun.roles if begun is not None and begun.kind is not ActionKind.ABORT else state.roles
    goal = _goal(state, roles, to, force)
    if (bad := state.find_rejection(goal)) is not None and not force:
        raise RefusedError(
            f"{goal.name} is known to be bad",
            where=config.endpoint,
            why=bad,
            remedy="Name another version with --to, or insist with --force.",
        )
    why = reason or "rolled back by an operator, who gave no reason"
    if roles.candidate is not None and roles.stable is not None and goal.manifest == roles.stable.manifest:
        action = plan_abort(roles, config.target, why=why, reject=True)
    else:
        action = plan_rollback(roles, goal, config.target, why=why)
    if begun is not None:
        rejected = (*begun.reject, *action.reject)
        action = replace(
            action, reject=tuple(d for d in dict.fromkeys(rejected) if d not in (goal.release, goal.manifest))
        )
    return action


def _name(deployment: Deployment | None) -> str:
    return deployment.name if deployment is not None else "nothing"


def _goal(state: ReleaseState, roles: Roles, to: str | None, force: bool) -> Deployment:
    """Where traffic is to go: without `to`, where the last rollback led if nothing else has come since."""
    if to is not None:
        version = to.removeprefix("v")
        if version not in state.known:
            known = ", ".join(f"v{v}" for v in sorted(state.known, key=lambda v: (len(v), v))) or "none"
            raise NotFoundError(
                f"v{version} never served here", where=state.endpoint, remedy=f"Versions that did: {known}."
            )
        return state.known[version]
    again = state.last_rollback is not None and roles.stable == state.roles.stable and not force
    goal = roles.stable if roles.candidate is not None or again else roles.previous
    if goal is None:
        raise NotFoundError(
            "no previous version to go back to",
            where=state.endpoint,
            remedy=f"See `onnx-ops history {state.endpoint}`; name a version with --to.",
        )
    return goal
