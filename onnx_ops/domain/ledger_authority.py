"""Which entries of the ledger grant something and therefore require a signature.

A user who can write the ledger's storage can add entries. An entry without a signature can only
record facts, restrict, restore what was granted, or return traffic to a granted version. A signed
entry made that version stable, and the version is not rejected or has an override.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerAdopted,
    MetricsRecorded,
    NotificationSent,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseLeft,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    RolloutPaused,
    ServerWrittenOff,
    ThresholdsFixed,
    VersionRefused,
    VersionSelected,
)
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, find_step, format_alias

GRANTS: Mapping[type, str] = {
    EndpointBound: "binds the endpoint",
    LedgerAdopted: "sets the keys whose signatures are valid",
    EndpointAbandoned: "unbinds the endpoint",
    ThresholdsFixed: "fixes thresholds",
    MetricsRecorded: "records evidence",
    RequestWithdrawn: "withdraws a request",
    OverrideRecorded: "overrides gates",
    VersionSelected: "records the version that an alias selects",
}
"""Kinds of entries that always grant something, and what they grant."""

RECORDS = (
    ActionOutcome,
    ReleaseLeft,
    RolloutPaused,
    NotificationSent,
    LeaseRenewed,
    ServerWrittenOff,
)
"""Kinds of entries that never grant anything.

An `ActionOutcome` proves nothing: reconciliation observes the endpoint, and restores what was
granted.
"""

_UPKEEP = (ActionKind.RESTORE, ActionKind.RETIRE, ActionKind.CLEAN_UP, ActionKind.RECONFIGURE)


def explain_grant(state: ReleaseState, body: EntryBody) -> str:
    """Return what the next entry grants; empty if the entry needs no signature.

    The text is a verb phrase whose subject is the entry. It is also empty for the ledger of a model
    and target without an endpoint.
    """
    if "@" in state.endpoint or isinstance(body, RECORDS):
        return ""
    if (always := GRANTS.get(type(body))) is not None:
        return always
    is_bounded, grant = _check_bounds(state, body)
    return "" if is_bounded else grant


def _check_bounds(state: ReleaseState, body: EntryBody) -> tuple[bool, str]:
    """Return whether an entry needs no signature, and what it otherwise grants.

    An entry needs no signature if it only records facts, restricts, restores what was granted, or
    returns traffic to a granted version.
    """
    match body:
        case EndpointDeleted():
            return body.done and state.deleting, "deletes the endpoint"
        case OperatorCommandSent():
            return body.command is OperatorCommand.PAUSE, f"orders to {body.command.value}"
        case RollbackRequested():
            return _leads_back(
                state, body.action
            ), "does more than return traffic to a granted version"
        case Intent():
            return _is_granted(state, body.action), f"begins {body.action.kind.value}"
        case VersionRefused():
            restored = (None, state.aliases.get(body.alias))
            is_own = body.alias in _list_aliases(state) and body.restored_to in restored
            return is_own, f"moves alias {body.alias}"
        case AliasesWritten():
            return _shows_served(
                state, body.aliases
            ), "publishes aliases of versions that were not granted"
        case _:
            return False, "is of an unknown kind"


def _is_granted(state: ReleaseState, action: Action) -> bool:
    """Return whether an earlier entry grants the action, or it needs no grant.

    While a rollback is pending, only its action is granted. Otherwise, an action is granted if the
    open intent has the same action. An action of the kinds in `_UPKEEP` needs no grant if it only
    restores the roles in the ledger (`_keeps_roles`).
    """
    if state.pending_rollback is not None:
        return action == state.pending_rollback.action
    if state.open_intent is not None and action == state.open_intent.action:
        return True
    return action.kind in _UPKEEP and _keeps_roles(state, action)


def _keeps_roles(state: ReleaseState, action: Action) -> bool:
    """Return whether the action only restores the roles in the ledger.

    The candidate gets at most the share and the copies of its step. The previous version can be
    retired.
    """
    roles, after, split = state.roles, action.roles, action.state.split
    if (after.stable, after.candidate, after.step) != (roles.stable, roles.candidate, roles.step):
        return False
    if (
        after.previous not in (None, roles.previous)
        or action.aliases
        or action.reject
        or roles.stable is None
    ):
        return False
    present = [d for d in (roles.stable, roles.previous, roles.candidate) if d is not None]
    share, most, copies = 0, 0, dict[str, int]()
    if roles.candidate is not None:
        step = find_step(state.policy, roles.step)
        share, most = split.weights.get(roles.candidate.name, 0), step.percent
        copies = {roles.candidate.name: step.mirror_percent}
    return (
        _are_among(action.state.deployments, present)
        and share <= most
        and split.weights.get(roles.stable.name, 0) == 100 - share
        and sum(split.weights.values()) == 100
        and all(percent <= copies.get(name, 0) for name, percent in split.shadow.items())
    )


def _leads_back(state: ReleaseState, action: Action) -> bool:
    """Return whether the action only returns traffic to a granted version.

    All traffic goes to a version that was stable, and that is not rejected or has an override. The
    action names only granted deployments, ends the rollout in progress, and changes aliases only as
    `_follows` allows.
    """
    goal, split = action.roles.stable, action.state.split
    if not action.is_rollback or goal is None or action.roles.candidate is not None:
        return False
    if goal.manifest not in state.stables or action.roles.previous not in (
        None,
        state.roles.previous,
    ):
        return False
    is_rejected = state.find_rejection(goal) is not None and goal.manifest not in state.overrides
    has_all_traffic = (
        split.weights.get(goal.name) == 100
        and sum(split.weights.values()) == 100
        and not split.shadow
    )
    is_known = _are_among((goal, *action.state.deployments), _list_granted(state))
    return (
        not is_rejected and has_all_traffic and is_known and _follows(state, action.aliases, goal)
    )


def _list_granted(state: ReleaseState) -> list[Deployment]:
    """Return every deployment that a signed entry has granted.

    The deployments of the open action are included.
    """
    roles = state.roles
    opened = () if state.open_intent is None else state.open_intent.action.state.deployments
    present = (d for d in (roles.stable, roles.previous, roles.candidate) if d is not None)
    return [*state.known.values(), *present, *opened]


def _follows(state: ReleaseState, aliases: Mapping[str, str | None], goal: Deployment) -> bool:
    """Return whether a rollback to the goal is allowed to write these aliases.

    The aliases must belong to the endpoint. The champion's alias can move to the goal or be
    deleted; every other alias can only be deleted.
    """
    own = _list_aliases(state)
    allowed = {None, goal.version}
    return all(
        alias in own and version in (allowed if alias == own[0] else {None})
        for alias, version in aliases.items()
    )


def _shows_served(state: ReleaseState, aliases: Mapping[str, str | None]) -> bool:
    """Return whether the registry is allowed to show these aliases.

    The aliases must belong to the endpoint. Each must be deleted, or name a version that was stable
    or that the ledger records for it.
    """
    served = {None, *(version for version, d in state.known.items() if d.manifest in state.stables)}
    if state.roles.stable is not None:
        served.add(state.roles.stable.version)
    return all(
        alias in _list_aliases(state)
        and version in {*served, state.aliases.get(alias), state.pending_aliases.get(alias)}
        for alias, version in aliases.items()
    )


def _list_aliases(state: ReleaseState) -> tuple[str, ...]:
    """Return the aliases of the endpoint's target, the champion's alias first."""
    if state.config is None:
        return ()
    return tuple(
        format_alias(role, state.config.target) for role in ("champion", "challenger", "previous")
    )


def _are_among(deployments: Iterable[Deployment], granted: Iterable[Deployment]) -> bool:
    granted = list(granted)
    return all(deployment in granted for deployment in deployments)
