"""Apply actions to endpoints, with an intent before and an outcome after.

An open intent gives its process a lease of the endpoint. The process renews the lease while the
effect is in progress, since a cloud update can take twenty minutes. If the process is killed, the
lease expires, and another process continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from onnx_ops.attestation import verify_authority
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, serves_only
from onnx_ops.domain.ledger import ActionOutcome, AliasSelection, Intent, LeaseRenewed
from onnx_ops.domain.rollout import Action, ActionKind
from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    LedgerConflictError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
)
from onnx_ops.ports import Context
from onnx_ops.release.decision_policy import REJECTED_REMEDY, find_rejection_reason
from onnx_ops.release.journal import Journal

LEASE_S = 120.0
"""Time for which an intent excludes other processes, in seconds.

The lease ends immediately if its process is known to be dead.
"""
LEASE_CHECK_INTERVAL_S = 1.0
"""Interval at which the lease thread checks the time, in seconds."""

Effect: TypeAlias = Callable[[int], None]


def perform_action(
    journal: Journal,
    action: Action,
    effect: Effect | None = None,
    *,
    selected: AliasSelection | None = None,
) -> None:
    """Record the intent, apply the action to the endpoint, and record the outcome.

    The lease is renewed meanwhile. A request that fails can take effect nevertheless, because its
    response can be lost. After a failure other than a conflict, the endpoint is therefore observed.
    The action succeeded if the endpoint shows the state of the action. A rollback is complete only
    after this observation.

    Args:
        effect: function that performs the action, given the intent's sequence. By default, the
            provider applies the state of the action.
        selected: the alias that the action follows.

    Raises:
        LedgerConflictError: another process acted meanwhile, and its entry takes precedence.
        RefusedError: the action deploys a version that is not approved; nothing was changed. This
            is not checked if `effect` is given.
        MissingKeyError: no key on this machine can sign the intent; nothing was changed.
        OnnxOpsError: the effect failed; the outcome records it, and the roles are unchanged.
    """
    config = journal.config
    if effect is None:
        _require_approved(journal, action)
    expires_at = journal.context.clock.now() + LEASE_S
    holder = journal.context.host.holder()
    sequence = journal.append(
        Intent(action=action, holder=holder, expires_at=expires_at, selected=selected)
    )
    with _renewing_lease(journal, sequence):
        failure: OnnxOpsError | None = None
        try:
            if effect is not None:
                effect(sequence)
            else:
                state = locate_files(journal.context, action.state, sequence)
                state = replace(state, limits_s=_list_limits(journal, action))
                journal.context.provider(config.provider).apply(config, state, generation=sequence)
        except OnnxOpsError as error:
            failure = error
        except OSError as error:
            failure = InfrastructureError(
                "the endpoint could not be changed",
                where=config.endpoint,
                why=str(error),
                remedy="Remove the cause that the reason names, such as a full disk or a file "
                "without access.",
            )
        if (failure is not None or action.is_rollback) and (
            missing := _find_missing(journal, config, action, failure)
        ):
            failure = failure or ServiceUnavailableError(
                "the endpoint does not show the rollback yet",
                where=config.endpoint,
                why=missing,
            )
            _conclude(journal, ActionOutcome(of=sequence, ok=False, detail=str(failure)))
            raise failure
    _conclude(journal, ActionOutcome(of=sequence, ok=True))


def renew_lease(journal: Journal, sequence: int) -> bool:
    """Extend the lease of intent `sequence`.

    Return False if the intent is no longer open.

    Raises:
        LedgerConflictError: another writer appended an entry meanwhile; call again.
    """
    current = Journal.open(journal.context, journal.state.endpoint, actor=journal.actor)
    if current.state.open_intent is None or current.state.generation != sequence:
        return False
    current.append(LeaseRenewed(of=sequence, expires_at=journal.context.clock.now() + LEASE_S))
    return True


def locate_files(context: Context, state: EndpointState, generation: int) -> EndpointState:
    """Return an endpoint's state with file locations and a generation, for a provider.

    Locations in the ledger are not used, because an attacker with write access to the ledger could
    name any folder.
    """
    place = context.files.place
    deployments = tuple(replace(d, location=place(d.manifest)) for d in state.deployments)
    return replace(state, deployments=deployments, generation=generation)


def _require_approved(journal: Journal, action: Action) -> None:
    """Raise RefusedError unless a trusted key approved every version of the action.

    The approval must be for this model and target. If this endpoint rolled the stable version or
    the candidate back, the version also needs an override.
    """
    state, config, verifier = journal.state, journal.config, journal.context.verifier()
    for deployment in action.state.deployments:
        about = verify_authority(deployment, verifier)
        if (about.model, about.target) != (config.model, config.target):
            raise RefusedError(
                f"the deployment was approved for {about.model} on {about.target}",
                where=f"{config.endpoint}, which serves {config.model} on {config.target}",
                why=f"the ledger names {deployment.name}",
                remedy="Restore the ledger from a backup.",
            )
    for role in (action.roles.stable, action.roles.candidate):
        if (
            role is not None
            and (why := find_rejection_reason(state, role, config.target, verifier)) is not None
        ):
            where = config.endpoint
            raise RefusedError(
                f"{role.name} was rolled back on this endpoint",
                where=where,
                why=why,
                remedy=REJECTED_REMEDY,
            )


def _list_limits(journal: Journal, action: Action) -> Mapping[str, tuple[float, ...]]:
    """Return the latencies in seconds above which requests are counted, by deployment."""
    stable, candidate, fixed = action.roles.stable, action.roles.candidate, journal.state.thresholds
    if stable is None or candidate is None or not journal.state.policy.is_analyzed:
        return {}
    if fixed is None or fixed.candidate != candidate.manifest or fixed.thresholds is None:
        return {candidate.name: (), stable.name: ()}
    slower = fixed.slower or fixed.thresholds
    return {candidate.name: slower.list_limits(), stable.name: fixed.thresholds.list_limits()}


def _find_missing(
    journal: Journal, config: EndpointConfig, action: Action, failure: OnnxOpsError | None
) -> str:
    """Return why the endpoint does not show the action's state; empty if it does.

    After a conflict, the endpoint is not observed, because this state could be that of another
    process.
    """
    if isinstance(failure, ConflictError):
        return str(failure)
    try:
        observed = journal.context.provider(config.provider).observe(config)
    except OnnxOpsError as error:
        return str(error)
    if observed is None:
        return "it does not answer"
    if action.is_rollback and serves_only(observed, action.state.leader()):
        return "; ".join(observed.stragglers)
    if action.is_rollback or not observed.is_equivalent(action.state):
        return "it serves another state"
    # Only RECONFIGURE is meant to correct drift. Other actions can succeed although drift remains.
    return "; ".join(observed.drift) if action.kind is ActionKind.RECONFIGURE else ""


def _conclude(journal: Journal, outcome: ActionOutcome) -> None:
    """Append the outcome after any newer entries.

    Raises:
        LedgerConflictError: the intent was replaced, or already has an outcome.
    """
    while True:
        try:
            journal.append(outcome)
            return
        except LedgerConflictError:
            journal.state = journal.context.ledger.state(journal.state.endpoint)
            if journal.state.open_intent is None or journal.state.generation != outcome.of:
                raise


@contextmanager
def _renewing_lease(journal: Journal, sequence: int) -> Iterator[None]:
    """Renew the lease in a thread until the block ends.

    The thread renews the lease each time half of its duration has passed.
    """
    ended, clock = threading.Event(), journal.context.clock

    def keep() -> None:
        due = clock.now() + LEASE_S / 2
        while not ended.wait(LEASE_CHECK_INTERVAL_S):
            now = clock.now()
            if now < due:
                continue
            try:
                if not renew_lease(journal, sequence):
                    return
            except OnnxOpsError:  # The renewal is tried again at the next check.
                continue
            due = now + LEASE_S / 2

    thread = threading.Thread(target=keep, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
