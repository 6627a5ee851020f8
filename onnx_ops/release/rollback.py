"""Move all traffic back to a version that served before.

A rollback needs only the ledger and the endpoint, unless model files are lost. An entry in the
ledger requests the rollback, which is then pending. Despite failures and killed processes, every
reconciliation tries again until the endpoint is observed in the requested state, or an operator
withdraws the request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, serves_only
from onnx_ops.domain.ledger import (
    OperatorCommandSent,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    ServerWrittenOff,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    plan_abort,
    plan_rollback,
)
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
from onnx_ops.ports import Context
from onnx_ops.release.effects import locate_files, perform_action
from onnx_ops.release.endpoint_calls import COMMAND_TIMEOUT_S, call_each, run_concurrently
from onnx_ops.release.journal import (
    Journal,
    find_corruption,
    list_bound_endpoints,
    pin_aliases,
    read_readable_state,
    retry_on_conflict,
)
from onnx_ops.release.registry_sync import restore_files

OBSERVE_TIMEOUT_S = 2.0
"""Time limit for observing whether an earlier rollback took effect, in seconds.

If the endpoint does not answer in this time, the rollback is requested again.
"""
_POLL_INTERVAL_S = 0.1
NOTHING = "nothing"
"""Name in a result in place of a missing version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackResult:
    """The versions before and after a rollback.

    `pending_aliases` are the aliases that are written later. `already` is true if the endpoint
    already gave all traffic to `moved_to`, so that nothing was requested.
    """

    endpoint: str
    moved_from: str
    moved_to: str
    reason: str
    pending_aliases: tuple[str, ...]
    already: bool = False


def request_and_carry_out(journal: Journal, action: Action) -> None:
    """Request a rollback, and try once to carry it out.

    Use this for a rollback that the reconciler decides, for example because of metrics.

    Raises:
        LedgerConflictError: another process acted meanwhile.
        OnnxOpsError: the errors of `carry_out_pending`.
    """
    journal.append(RollbackRequested(action=action))
    carry_out_pending(journal)


def carry_out_pending(journal: Journal) -> None:
    """Try once to carry out the pending rollback.

    Raises:
        LedgerConflictError: another process acted meanwhile.
        OnnxOpsError: the rollback is still pending; the ledger has the reason.
    """
    context, pending = journal.context, journal.state.pending_rollback
    if pending is None:
        return
    config, action = journal.config, pending.action

    def apply(generation: int) -> None:
        state = locate_files(context, action.state, pending.sequence)
        provider = context.provider(config.provider)
        try:
            provider.roll_back(config, state, generation=generation)
        except (NotFoundError, DigestMismatchError):
            # The files of the version to serve are missing or damaged.
            restore_files(context, state.leader())
            provider.roll_back(config, state, generation=generation)

    perform_action(journal, action, apply)


def roll_back_each(
    context: Context,
    endpoints: Sequence[str],
    *,
    to: str | None = None,
    reason: str = "",
    actor: str = "",
    force: bool = False,
    pin: bool = True,
    candidate_only: bool = False,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> tuple[dict[str, RollbackResult], dict[str, OnnxOpsError]]:
    """Request a rollback on several endpoints, and carry it out concurrently.

    All traffic moves to version `to` (`3` or `v3`). By default, it moves to the stable version
    during a rollout, and otherwise to the previous version. The request takes precedence over any
    open action. A later outcome of this action is ignored, and the endpoint refuses its later
    effects because of their lower generation. A request that has already taken effect changes
    nothing.

    Args:
        force: whether to allow a goal version that was itself rolled back before, and to roll back
            further after a rollback.
        pin: whether to leave aliases unchanged that several endpoints share. Otherwise, these
            aliases change. If they include the champion, they change after all of the endpoints
            serve its new version.
        candidate_only: whether to only abort a rollout in progress.
        timeout_s: seconds after which an unfinished rollback is reported as pending.

    Returns:
        Results and errors by endpoint. NotFoundError: the endpoint does not exist, or lacks version
        `to` or a previous version. RefusedError: the goal version was itself rolled back before,
        or the endpoint is being deleted. StillPendingError: the rollback was requested, and is not
        complete yet. UserError: with `candidate_only`, neither is a rollout in progress, nor was
        the last one rolled back. MissingKeyError: no key on this machine can sign the request,
        which does more than return traffic to a granted version. CorruptStateError: the ledger is
        damaged.
    """

    def request(journal: Journal) -> tuple[RollbackResult, Journal]:
        config, pending = journal.config, journal.state.pending_rollback
        goal = None if pending is None else pending.action.roles.stable
        # An earlier abort satisfies the operator's request only if the abort rejects the version.
        if (
            pending is not None
            and pending.action.reject
            and goal is not None
            and to in (None, goal.version, goal.name)
        ):
            return _build_result(journal.state, pending.action), journal
        if (done := _find_done(journal, to, force)) is not None:
            return done, journal
        if candidate_only and journal.state.roles.candidate is None:
            raise _no_rollout(config.endpoint)
        action = _plan(journal, to, reason, force)
        if pin:
            action = pin_aliases(context, config, action)
        result = _build_result(journal.state, action)
        journal.append(RollbackRequested(action=action, by_operator=True))
        return result, journal

    requested, errors = call_each(
        endpoints, lambda name: Journal.update(context, name, request, actor=actor)
    )
    results = {name: result for name, (result, _) in requested.items() if result.already}
    calls = {
        name: partial(_carry_out, journal, r)
        for name, (r, journal) in requested.items()
        if not r.already
    }
    late = f"the endpoint did not move its traffic within {timeout_s:g} s"
    carried_out = run_concurrently(
        calls, timeout_s, lambda name: _still_pending(requested[name][0], late)
    )
    for name, result in carried_out.items():
        if isinstance(result, OnnxOpsError):
            errors[name] = result
        else:
            results[name] = result
    return results, errors


def find_rollback_goal(context: Context, endpoint: str) -> Deployment:
    """Return the deployment that a rollback without `to` would give all traffic.

    Raises:
        NotFoundError: the endpoint does not exist, or lacks a previous version.
        RefusedError: the previous version was itself rolled back, or the endpoint is being deleted.
    """
    action = _plan(Journal.open(context, endpoint), None, "", force=False)
    return action.state.leader()


def withdraw_request(context: Context, endpoint: str, *, reason: str, actor: str = "") -> str:
    """Withdraw the endpoint's pending deletion, or otherwise its pending rollback.

    The rejections of the rollback are also withdrawn.

    Returns:
        The name of the withdrawn request, such as `the deletion`.

    Raises:
        NotFoundError: the endpoint or a pending request does not exist.
        UserError: `reason` is blank.
        MissingKeyError: no key on this machine can sign the withdrawal.
    """
    if not reason.strip():
        raise UserError(
            "a withdrawal needs a reason",
            where=endpoint,
            remedy="Add --reason REASON; the reason is recorded.",
        )

    def withdraw(journal: Journal) -> str:
        pending, deleting = journal.state.pending_rollback, journal.state.deleting
        if pending is None and not deleting:
            remedy = f"See `onnx-ops history {endpoint}`."
            raise NotFoundError(
                "no request is pending", where=journal.config.endpoint, remedy=remedy
            )
        journal.append(RequestWithdrawn(reason=reason))
        if deleting or pending is None:
            return "the deletion"
        return f"the rollback to {_format_name(pending.action.roles.stable)}"

    return Journal.update(context, endpoint, withdraw, actor=actor)


def write_off_server(
    context: Context, endpoint: str, server: str, *, reason: str, actor: str = ""
) -> bool:
    """Record that a silent server has ended, so that no rollback waits for it.

    Returns:
        False if this is already recorded, and the server has not reported since then.

    Raises:
        UserError: `reason` is blank.
        NotFoundError: the endpoint or a report of this server does not exist.
        RefusedError: the server still reports.
    """
    if not reason.strip():
        raise UserError(
            "a write-off needs a reason",
            where=endpoint,
            remedy="Add --reason REASON; the reason is recorded.",
        )

    def write_off(journal: Journal) -> bool:
        config = journal.config
        provider = context.provider(config.provider)
        servers = {each.name: each for each in provider.list_servers(config)}
        found = servers.get(server)
        if server in journal.state.written_off and (found is None or found.state == "ended"):
            return False
        if found is None:
            silent = (
                ", ".join(name for name, each in servers.items() if each.state == "silent")
                or "none"
            )
            raise NotFoundError(
                f"there is no report of replica {server!r}",
                where=endpoint,
                remedy=f"Silent replicas: {silent}.",
            )
        if found.state == "reports":
            raise RefusedError(
                f"replica {server} still reports",
                where=endpoint,
                why=f"its last report is {found.age_s:.0f} s old",
                remedy="Stop the replica, and write it off 20 s later. "
                "A rollback waits for replicas that report.",
            )
        journal.append(ServerWrittenOff(server=server, reason=reason))
        provider.forget_server(config, server)
        return True

    return Journal.update(context, endpoint, write_off, actor=actor)


def send_command(
    context: Context, endpoint: str, command: OperatorCommand, *, reason: str = "", actor: str = ""
) -> None:
    """Record an operator's command to the rollout in progress.

    The reconciler acts on the command.

    Raises:
        NotFoundError: the endpoint does not exist.
        UserError: no rollout is in progress. Or the command is to resume a rollout that no operator
            has paused.
        MissingKeyError: no key on this machine can sign the command; a pause needs no key.
    """

    def send(journal: Journal) -> None:
        config = journal.config
        if journal.state.roles.candidate is None:
            raise _no_rollout(config.endpoint)
        if command is OperatorCommand.RESUME and journal.state.command is not OperatorCommand.PAUSE:
            raise UserError(
                "no operator has paused this rollout",
                where=config.endpoint,
                remedy="To skip the remaining checks of the current step: "
                f"onnx-ops rollout advance {config.endpoint}",
            )
        journal.append(OperatorCommandSent(command=command, reason=reason))

    Journal.update(context, endpoint, send, actor=actor)


def select_endpoints(
    context: Context,
    endpoints: tuple[str, ...],
    *,
    every: bool,
    model: str = "",
    target: str = "",
    to: str | None = None,
) -> tuple[str, ...]:
    """Return the endpoints of a rollback.

    They are the named endpoints, or with `every` the endpoints of a model, and of a target if it is
    given. With `every` and without `to`, only endpoints that serve the release started last are
    selected. The others have nothing to roll back. Endpoints with a damaged ledger are also
    selected. If none is selected, the endpoints that rolled this release back are selected.

    Raises:
        UserError: with `every`, endpoints are named or no model is given. Otherwise, no endpoint is
            named, or a model or target is given.
        NotFoundError: no endpoint serves this model on this target, or its latest release.
    """
    names_endpoints = bool(endpoints) and not (model or target)
    names_model = bool(model) and not endpoints
    if not (names_model if every else names_endpoints):
        raise UserError(
            "a rollback needs either the names of endpoints, or --all with a model",
            remedy="Name endpoints, or use --all --model MODEL, not both. `onnx-ops status` lists "
            "endpoints.",
        )
    return _list_endpoints_of(context, model, target, to) if every else endpoints


def _list_endpoints_of(
    context: Context, model: str, target: str, to: str | None
) -> tuple[str, ...]:
    """Return all endpoints of a model and target that a rollback selects."""
    states = _list_serving_states(context, model, target)
    if to is not None:
        return tuple(state.endpoint for state in states)
    latest = max(states, key=lambda state: state.latest_release_at).latest_release
    selected = [
        state.endpoint
        for state in states
        # A damaged ledger does not show whether the endpoint serves the release. The endpoint is
        # selected, so that its rollback fails visibly.
        if latest in _list_active_releases(state) or find_corruption(context, state.endpoint)
    ]
    if not selected:
        # The command was repeated after the rollback. The endpoints that rolled back from the
        # release are selected, so that they report completion.
        selected = [
            state.endpoint
            for state in states
            if state.last_rollback and state.latest_release == latest
        ]
    if not selected:
        raise NotFoundError(
            f"nothing to roll back: no endpoint is serving the latest release of {model}",
            remedy="See `onnx-ops history`. To roll back further, name a version with --to.",
        )
    return tuple(selected)


def _list_serving_states(context: Context, model: str, target: str) -> list[ReleaseState]:
    """Return the states of the endpoints that serve a model on a target.

    Endpoints with a damaged ledger are included if they can be bound to this model and target.

    Raises:
        NotFoundError: no endpoint serves the model on the target.
    """
    bound = [read_readable_state(context, name) for name in list_bound_endpoints(context)]
    states = [
        state for state in bound if state.config is None or state.config.serves(model, target)
    ]
    if not states:
        of_target = f" on {target}" if target else ""
        raise NotFoundError(
            f"no endpoint serves {model}{of_target}", remedy="See `onnx-ops status`."
        )
    return states


def _list_active_releases(state: ReleaseState) -> set[Digest]:
    """Return the releases of the stable version and the candidate.

    Those of the action in progress are included.
    """
    roles = [state.roles]
    if state.open_intent is not None:
        roles.append(state.open_intent.action.roles)
    deployments = [deployment for each in roles for deployment in (each.candidate, each.stable)]
    return {deployment.release for deployment in deployments if deployment is not None}


def _no_rollout(endpoint: str) -> UserError:
    return UserError(
        "no rollout is in progress", where=endpoint, remedy=f"See `onnx-ops status {endpoint}`."
    )


def _carry_out(journal: Journal, result: RollbackResult) -> RollbackResult:
    """Carry out the request; raise StillPendingError with the cause of a failure."""

    def attempt() -> None:
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        try:
            # Another process can be finishing the same rollback. Without this wait, each repeated
            # command would start the rollback again.
            while (intent := journal.active_intent()) is not None:
                if time.monotonic() > deadline:
                    raise ServiceUnavailableError(
                        f"{intent.holder} is changing the endpoint", where=result.endpoint
                    )
                time.sleep(_POLL_INTERVAL_S)
                journal.state = journal.context.ledger.state(result.endpoint)
            _require_here(journal, result)
            carry_out_pending(journal)
        except LedgerConflictError:
            journal.state = journal.context.ledger.state(result.endpoint)
            raise

    try:
        retry_on_conflict(attempt)
    except StillPendingError:
        raise
    except OnnxOpsError as error:
        raise _still_pending(result, str(error)) from error
    return replace(result, pending_aliases=tuple(sorted(journal.state.pending_aliases)))


def _require_here(journal: Journal, result: RollbackResult) -> None:
    """Raise StillPendingError if a rollback here would not reach the clients."""
    config = journal.config
    if why := journal.context.provider(config.provider).explain_elsewhere(config):
        retry = (
            f"Run `onnx-ops reconcile {config.endpoint}` as the user and with the state folder of "
            "the server. With this state folder, the command would start another server. "
        )
        raise _still_pending(result, why, retry)


_RETRY = "`onnx-ops reconcile`, also with `--watch`, retries the rollback. "


def _still_pending(result: RollbackResult, why: str, retry: str = _RETRY) -> StillPendingError:
    rejected = "" if result.moved_from == NOTHING else f"{result.moved_from} is already rejected. "
    return StillPendingError(
        f"accepted, still pending: all traffic to {result.moved_to}",
        where=result.endpoint,
        why=why,
        remedy=f"{retry}{rejected}Withdraw the rollback with "
        f'`onnx-ops rollback --withdraw {result.endpoint} --reason "…"`.',
    )


def _build_result(state: ReleaseState, action: Action) -> RollbackResult:
    idle = [name for name, weight in action.state.split.weights.items() if not weight]
    return RollbackResult(
        endpoint=state.endpoint,
        moved_from=idle[0] if idle else NOTHING,
        moved_to=_format_name(action.roles.stable),
        reason=action.why,
        pending_aliases=tuple(sorted(state.pending_aliases)),
    )


def _find_done(journal: Journal, to: str | None, force: bool) -> RollbackResult | None:
    """Return the result if the endpoint already serves the goal, or None.

    Without `to`, a rollback command after a rollback is treated as the same rollback. To roll back
    further, an operator names a version or uses `force`.
    """
    state, config = journal.state, journal.config
    stable, last = state.roles.stable, state.last_rollback
    if (
        stable is None
        or state.roles.candidate is not None
        or state.open_intent is not None
        or state.deleting
    ):
        return None
    if (to is None and (last is None or force)) or (
        to is not None and to.removeprefix("v") != stable.version
    ):
        return None
    observe = partial(journal.context.provider(config.provider).observe, config)
    late = ServiceUnavailableError("the endpoint does not answer", where=config.endpoint)
    observed = run_concurrently({config.endpoint: observe}, OBSERVE_TIMEOUT_S, lambda _: late)[
        config.endpoint
    ]
    if observed is None or isinstance(observed, OnnxOpsError) or not serves_only(observed, stable):
        return None
    if last is not None:
        return replace(_build_result(state, last), already=True)
    return RollbackResult(
        endpoint=config.endpoint,
        moved_from=stable.name,
        moved_to=stable.name,
        reason="",
        pending_aliases=tuple(sorted(state.pending_aliases)),
        already=True,
    )


def _plan(journal: Journal, to: str | None, reason: str, force: bool) -> Action:
    state, config = journal.state, journal.config
    if state.deleting:
        raise RefusedError(
            "the endpoint is being deleted",
            where=config.endpoint,
            remedy=f"Complete the deletion with `onnx-ops delete {config.endpoint}`, "
            f'or withdraw it with `onnx-ops rollback --withdraw {config.endpoint} --reason "…"`.',
        )
    begun = state.open_intent.action if state.open_intent is not None else None
    if state.pending_rollback is not None:
        begun = state.pending_rollback.action
    # An action in progress possibly reached the endpoint, so it is treated as done. During an
    # abort, the candidate is treated as present, so that it is also rejected.
    roles = begun.roles if begun is not None and begun.kind is not ActionKind.ABORT else state.roles
    goal = _find_goal(state, roles, to, force)
    if (rejection := state.find_rejection(goal)) is not None and not force:
        raise RefusedError(
            f"{goal.name} was itself rolled back before",
            where=config.endpoint,
            why=rejection,
            remedy="Name another version with --to, or use --force.",
        )
    why = reason or "rolled back by an operator, without a reason"
    if (
        roles.candidate is not None
        and roles.stable is not None
        and goal.manifest == roles.stable.manifest
    ):
        action = plan_abort(roles, config.target, why=why, reject=True)
    else:
        action = plan_rollback(roles, goal, config.target, why=why)
    if begun is not None:
        rejected = dict.fromkeys((*begun.reject, *action.reject))
        action = replace(
            action, reject=tuple(d for d in rejected if d not in (goal.release, goal.manifest))
        )
    return action


def _find_goal(state: ReleaseState, roles: Roles, to: str | None, force: bool) -> Deployment:
    """Return the deployment that the rollback gives all traffic.

    Without `to`, this is the stable version while a rollout is in progress. It is also the stable
    version if it is unchanged since the last rollback, unless `force` is set. Otherwise, it is the
    previous version.

    Raises:
        NotFoundError: the endpoint never served the version, or lacks a previous version.
    """
    if to is not None:
        version = to.removeprefix("v")
        if version not in state.known:
            remedy = f"Versions that served: {_list_versions(state.known)}."
            raise NotFoundError(
                f"v{version} never served at this endpoint", where=state.endpoint, remedy=remedy
            )
        return state.known[version]
    again = state.last_rollback is not None and roles.stable == state.roles.stable and not force
    goal = roles.stable if roles.candidate is not None or again else roles.previous
    if goal is None:
        raise NotFoundError(
            "there is no previous version to roll back to",
            where=state.endpoint,
            remedy=_suggest_version(state),
        )
    return goal


def _suggest_version(state: ReleaseState) -> str:
    """Return a remedy that names the versions that served before."""
    stable = state.roles.stable
    others = [version for version in state.known if stable is None or version != stable.version]
    if not others:
        return "No other version has served here: promote one with `onnx-ops promote`."
    return f"Name one of these versions with --to: {_list_versions(others)}."


def _list_versions(versions: Iterable[str]) -> str:
    ordered = sorted(versions, key=lambda version: (len(version), version))
    return ", ".join(f"v{version}" for version in ordered) or "none"


def _format_name(deployment: Deployment | None) -> str:
    return deployment.name if deployment is not None else NOTHING
