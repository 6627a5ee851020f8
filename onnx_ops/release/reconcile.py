"""Move an endpoint toward its desired state, as its metrics allow.

The endpoint moves by one recorded action at a time. `reconcile_step` is level-triggered and
idempotent: it reads the desired and the observed state, and takes at most one action. If the
process is killed, a later call continues or reverts the action. `find_step` only decides: it
returns the change that is due without making it. A pass over many endpoints (`reconcile_pass`)
therefore reads the registry once, and reads it again only for endpoints with a due change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.ledger import (
    AliasSelection,
    Intent,
    MetricsRecorded,
    PendingRollback,
    ReleaseState,
    RolloutPaused,
    ThresholdsFixed,
    VersionRefused,
    VersionSelected,
)
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    Wait,
    WaitKind,
    choose_next_action,
    get_step_limit_s,
    plan_reversal,
)
from onnx_ops.domain.rollout_observations import MetricsReading, Observations
from onnx_ops.errors import (
    AlarmRollbackError,
    CorruptStateError,
    InfrastructureError,
    LedgerConflictError,
    MissingKeyError,
    MissingPackageError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.ports import Context
from onnx_ops.release.effects import perform_action
from onnx_ops.release.endpoint_calls import MAX_PAUSE_S, call_each
from onnx_ops.release.journal import Journal, pin_aliases, read_readable_state, retry_on_conflict
from onnx_ops.release.promote import finish_deletion
from onnx_ops.release.registry_sync import (
    DesiredState,
    conclude_refusal,
    is_registry_outdated,
    publish_entries,
    publish_rejections,
    read_request,
    record_alias,
    restore_alias,
    restore_files,
    revert_alias,
    verify_request,
    write_pending_aliases,
)
from onnx_ops.release.rollback import carry_out_pending, request_and_carry_out

ReadAliases: TypeAlias = Callable[[str], Mapping[str, str]]
"""Function that returns a model's versions by alias."""

MAX_STEPS = 20
"""Maximum number of steps in one call.

A rollout has only a few steps. If more are due, two writers probably revert each other's changes.
"""
RECORD_INTERVAL_S = 60.0
"""Interval at which readings are recorded if they cause no action, in seconds.

If a server crashes, its counts since the last recorded reading are lost. A rollout of a week writes
about ten thousand entries.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step and its reason.

    `did` is empty for a wait. `stable` is True if a further step would change nothing now.
    `refused` is True if the step refused a version that an alias points to. `registry_down` is the
    reason why the registry, or a version that it requests, could not be read; otherwise, it is
    empty.
    """

    endpoint: str
    did: str
    why: str
    stable: bool
    refused: bool = False
    registry_down: str = ""


Change: TypeAlias = Callable[[], StepReport]
"""Function that makes a due change and returns its report."""


def reconcile_until_stable(
    context: Context,
    endpoint: str,
    *,
    actor: str = "",
    on_step: Callable[[StepReport], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[StepReport]:
    """Reconcile an endpoint until no change is due, or until stopped.

    At most `MAX_STEPS` steps are taken. If another writer, such as a rollback command, was first,
    the step is decided again.

    Args:
        on_step: function that receives the report of each step.
        is_stopped: function that returns whether to stop after the present step.

    Returns:
        The report of each step. If no change is due, the last report gives the reason.

    Raises:
        OnnxOpsError: the errors of `reconcile_step`.
    """
    reports: list[StepReport] = []
    while len(reports) < MAX_STEPS:
        report = retry_on_conflict(lambda: reconcile_step(context, endpoint, actor=actor))
        reports.append(report)
        on_step(report)
        if report.stable or is_stopped():
            break
    return reports


def reconcile_each(
    context: Context, endpoints: Sequence[str], *, actor: str = ""
) -> tuple[dict[str, list[StepReport]], dict[str, OnnxOpsError]]:
    """Call `reconcile_until_stable` for several endpoints.

    Returns:
        Reports and errors by endpoint.
    """
    return call_each(endpoints, lambda name: reconcile_until_stable(context, name, actor=actor))


def reconcile_with_retries(
    context: Context, endpoints: Sequence[str], *, actor: str = "", for_s: float
) -> tuple[dict[str, list[StepReport]], dict[str, OnnxOpsError]]:
    """Call `reconcile_each` with growing pauses until it succeeds.

    A call fails if an endpoint fails or a rollback is pending. The function starts no further call
    after `for_s` seconds, or if missing packages are the only errors.

    Returns:
        The reports and errors of the last call, by endpoint.
    """
    deadline, pause = time.monotonic() + for_s, 1.0
    while True:
        reports, errors = reconcile_each(context, endpoints, actor=actor)
        if errors:
            is_final = all(isinstance(error, MissingPackageError) for error in errors.values())
        else:
            is_final = not any(
                read_readable_state(context, name).pending_rollback for name in endpoints
            )
        if is_final or time.monotonic() + pause > deadline:
            return reports, errors
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def write_aliases(context: Context, endpoint: str, *, actor: str = "") -> str:
    """Reconcile an endpoint to write a rollback's aliases; return an error as text.

    The text is empty without an error. Aliases that wait for another endpoint remain pending. The
    function raises no OnnxOpsError, since traffic has already moved and the reconciler tries again.
    """
    try:
        return reconcile_until_stable(context, endpoint, actor=actor)[-1].registry_down
    except OnnxOpsError as error:
        return str(error)


def reconcile_step(context: Context, endpoint: str, *, actor: str = "") -> StepReport:
    """Perform the next action of an endpoint, and return its report.

    Raises:
        NotFoundError: the endpoint does not exist.
        LedgerConflictError: another process acted meanwhile; call again.
        ConflictError: a process that does not write the ledger is changing the endpoint.
        ServiceUnavailableError: the endpoint could not be reached.
        InfrastructureError: the provider failed, or a model cannot be loaded.
        RefusedError: a version of the action is not approved, the provider refuses the action, or
            the registry refuses an alias. In the last case, an endpoint that does not answer was
            restored before.
        CorruptStateError: the ledger is damaged, or lost entries that the endpoint has applied.
        MissingKeyError: no key on this machine can sign the entry of the next action.
    """
    journal = Journal.open(context, endpoint, actor=actor)
    return _take(find_step(journal, lambda model: context.registry().aliases(model)))


def find_step(journal: Journal, read_aliases: ReadAliases) -> StepReport | Change:
    """Return the change that is due now, or a report of why no change is due.

    The function writes nothing to the ledger or the registry. If a rollout continues, the
    function confirms this to the provider.

    Raises:
        OnnxOpsError: the errors of `reconcile_step`, except those of the change itself.
    """
    state, config = journal.state, journal.config
    if state.deleting:
        return partial(_delete, journal)
    if (active := journal.active_intent()) is not None:
        return _report_wait(
            journal, f"{active.holder} is changing the endpoint: {active.action.why}"
        )
    if state.pending_rollback is not None:
        return partial(_resume_rollback, journal, state.pending_rollback)
    if state.open_intent is not None:
        return partial(_resume_action, journal, state.open_intent)
    observed = journal.context.provider(config.provider).observe(config)
    _require_known(journal, observed)
    if observed is None and (restoration := _find_restoration(journal)) is not None:
        return partial(_restore, journal, restoration, read_aliases)
    return _find_requested_change(_StepBasis(journal=journal, observed=observed), read_aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepBasis:
    """The data from which a step is decided.

    `unwritten` is the error of comparing the registry with the ledger, or of writing the registry,
    in this step. An endpoint that does not answer is still restored after this error. `unrestored`
    is the error of restoring the endpoint in this step. A version that the registry requests can
    still be served after this error.
    """

    journal: Journal
    observed: EndpointState | None
    unrestored: OnnxOpsError | None = None
    unwritten: OnnxOpsError | None = None


def _take(step: StepReport | Change) -> StepReport:
    return step if isinstance(step, StepReport) else step()


def _find_requested_change(basis: _StepBasis, read_aliases: ReadAliases) -> StepReport | Change:
    desired = read_request(basis.journal, read_aliases)
    if desired.request is not None:
        return partial(_follow_request, basis, desired)
    return _find_change(basis, desired)


def _follow_request(basis: _StepBasis, desired: DesiredState) -> StepReport:
    """Verify the version that the registry requests, and take the step.

    The verification can download files and record an override.
    """
    return _take(_find_change(basis, verify_request(basis.journal, desired)))


def _find_change(basis: _StepBasis, desired: DesiredState) -> StepReport | Change:
    journal = basis.journal
    if (refusal := _find_refusal(journal, desired)) is not None:
        return refusal
    try:
        is_outdated = not desired.registry_down and is_registry_outdated(journal, desired.champion)
    except (InfrastructureError, RefusedError) as error:
        basis, is_outdated = replace(basis, unwritten=error), False
    return (
        partial(_update_registry, basis, desired) if is_outdated else _find_action(basis, desired)
    )


def _find_action(basis: _StepBasis, desired: DesiredState) -> StepReport | Change:
    journal = basis.journal
    snapshot = read_metrics(journal)
    action = choose_action(journal, desired, basis.observed, snapshot)
    if basis.unwritten is not None and not (
        isinstance(action, Action) and action.kind is ActionKind.RESTORE
    ):
        raise basis.unwritten
    if isinstance(action, Wait) and not _is_record_due(journal, desired, snapshot, action):
        _confirm_rollout(journal)
        return _report_wait(journal, action.why, registry_down=desired.registry_down)
    return partial(_act, basis, desired, snapshot, action)


def _report_wait(journal: Journal, why: str, *, registry_down: str = "") -> StepReport:
    return StepReport(
        endpoint=journal.state.endpoint, did="", why=why, stable=True, registry_down=registry_down
    )


def _delete(journal: Journal) -> StepReport:
    endpoint = journal.state.endpoint
    finish_deletion(journal)
    return StepReport(
        endpoint=endpoint, did="deleted", why="its deletion was requested", stable=True
    )


def _require_known(journal: Journal, observed: EndpointState | None) -> None:
    """Check that the ledger has the last entry that the endpoint applied.

    Raises:
        LedgerConflictError: another process has written the entry since the ledger was read.
        CorruptStateError: the ledger ends before the entry.
    """
    endpoint, head = journal.state.endpoint, journal.state.head
    generation = 0 if observed is None else observed.generation
    if generation <= head:
        return
    if generation <= journal.context.ledger.state(endpoint).head:
        raise LedgerConflictError("another process has changed the endpoint", where=endpoint)
    raise CorruptStateError(
        f"the ledger lost entries: it ends with entry {head}",
        where=f"ledger {endpoint}",
        why=f"the endpoint has applied entry {generation}; the storage of the ledger was restored "
        "from a backup, or changed",
        remedy=f"Restore the newer ledger, or accept this state: `onnx-ops ledger adopt {endpoint}`"
        " (`onnx-ops docs backup`).",
    )


def _find_restoration(journal: Journal) -> Action | None:
    """Return the action that restores an endpoint that does not answer, or None.

    The result is None if the endpoint has no stable version. The registry is not read, since it can
    be slow, down or invalid.
    """
    roles = journal.state.roles
    desired = DesiredState(deployment=roles.candidate or roles.stable)
    action = choose_action(journal, desired, None, MetricsSnapshot(observations=None))
    return action if isinstance(action, Action) and action.kind is ActionKind.RESTORE else None


def _restore(journal: Journal, action: Action, read_aliases: ReadAliases) -> StepReport:
    try:
        perform_action(journal, action)
    except (InfrastructureError, RefusedError, UserError) as error:
        basis = _StepBasis(journal=journal, observed=None, unrestored=error)
    else:
        return StepReport(
            endpoint=journal.state.endpoint, did=action.kind.value, why=action.why, stable=False
        )
    return _take(_find_requested_change(basis, read_aliases))


def _fetch_lost_files(context: Context, action: Action, failure: OnnxOpsError) -> None:
    """Download the lost or damaged files of the deployments in an action.

    Raises:
        OnnxOpsError: no files are lost or damaged (the error is `failure`), or the download failed.
    """
    lost = [d for d in action.state.deployments if context.files.location(d.manifest) is None]
    if not lost:
        raise failure
    for deployment in lost:
        restore_files(context, deployment)


def _act(
    basis: _StepBasis, desired: DesiredState, snapshot: MetricsSnapshot, action: Action | Wait
) -> StepReport:
    """Perform the chosen action, or record a wait."""
    journal = basis.journal
    if (
        isinstance(action, Action)
        and action.kind is ActionKind.RESTORE
        and basis.unrestored is not None
    ):
        _fetch_lost_files(journal.context, action, basis.unrestored)
    record_metrics(journal, snapshot, action)
    if isinstance(action, Wait):
        _note_wait(journal, desired, action)
        return _report_wait(journal, action.why, registry_down=desired.registry_down)
    if action.is_rollback:
        # The rollback is recorded before it is tried. If the process is then killed, the rollback
        # is pending, and every step tries it again.
        request_and_carry_out(journal, pin_aliases(journal.context, journal.config, action))
        performed = action
    else:
        performed = _perform(journal, action, find_selection(journal, desired))
    return StepReport(
        endpoint=journal.state.endpoint,
        did=performed.kind.value,
        why=performed.why,
        stable=False,
        registry_down=desired.registry_down,
    )


def _perform(journal: Journal, action: Action, selected: AliasSelection | None = None) -> Action:
    """Perform the action, and return the action.

    If an alarm of the provider reversed a step of a rollout, roll back, and return the rollback
    instead.
    """
    roles, config = journal.state.roles, journal.config
    try:
        perform_action(journal, action, selected=selected)
    except AlarmRollbackError as error:
        reversal = plan_reversal(roles, action, config.target, why=str(error))
        if reversal is None:
            raise
        request_and_carry_out(journal, pin_aliases(journal.context, config, reversal))
        return reversal
    return action


def _update_registry(basis: _StepBasis, desired: DesiredState) -> StepReport:
    """Write to the registry; take the next action if no alias was written or recorded.

    If the write failed, the next action is taken only if it restores the endpoint. Otherwise, the
    error of the write is raised.
    """
    try:
        if (report := _write_registry(basis.journal, desired)) is not None:
            return report
    except (InfrastructureError, RefusedError) as error:
        basis = replace(basis, unwritten=error)
    return _take(_find_action(basis, desired))


def _write_registry(journal: Journal, desired: DesiredState) -> StepReport | None:
    """Write the ledger's aliases and rejections to the registry.

    A champion alias that another process or a user has set is recorded in the ledger if the
    endpoint serves its version. A deleted champion alias is set again. The result is None if no
    alias was written or recorded.
    """
    endpoint = journal.state.endpoint
    has_rejections = publish_rejections(journal)
    if written := write_pending_aliases(journal):
        return StepReport(endpoint=endpoint, did="wrote aliases", why=written, stable=False)
    if has_rejections:
        publish_entries(journal, {})
    if record_alias(journal, desired.champion):
        why = f"the champion in the registry is v{desired.champion}, which this endpoint serves"
        return StepReport(endpoint=endpoint, did="recorded alias", why=why, stable=False)
    if restore_alias(journal, desired.champion):
        why = "the champion alias was deleted in the registry; it is set again"
        return StepReport(endpoint=endpoint, did="wrote aliases", why=why, stable=False)
    return None


def _find_refusal(journal: Journal, desired: DesiredState) -> Change | None:
    """Return the change that refuses a version which an alias points to, or None.

    The change reverts the alias of a version that is not allowed to serve, or completes an
    interrupted refusal.
    """
    begun, refused = journal.state.open_refusal, desired.refused
    is_same = begun and refused and (begun.alias, begun.version) == (refused.alias, refused.version)
    if begun is not None and not desired.registry_down and not is_same:
        return partial(_refuse, journal, begun, conclude_refusal)
    return None if refused is None else partial(_refuse, journal, refused, revert_alias)


def _refuse(
    journal: Journal, refused: VersionRefused, carry_out: Callable[[Journal, VersionRefused], None]
) -> StepReport:
    carry_out(journal, refused)
    did = f"refused {refused.alias} on version {refused.version}"
    return StepReport(
        endpoint=journal.state.endpoint, did=did, why=refused.reason, stable=False, refused=True
    )


def _resume_rollback(journal: Journal, pending: PendingRollback) -> StepReport:
    carry_out_pending(journal)
    did, why = pending.action.kind.value, f"requested by {pending.actor}: {pending.action.why}"
    return StepReport(endpoint=journal.state.endpoint, did=did, why=why, stable=False)


def _resume_action(journal: Journal, intent: Intent) -> StepReport:
    """Complete an action whose process ended, or whose lease has expired."""
    performed = _perform(journal, intent.action, intent.selected)
    # If an alarm reversed the action, the rollback is new.
    continued = f"continued the action that {intent.holder} began: "
    return StepReport(
        endpoint=journal.state.endpoint,
        did=performed.kind.value,
        why=(continued if performed is intent.action else "") + performed.why,
        stable=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """The counts of a rollout up to now, with those of `reading`.

    `observations` is None outside an analyzed rollout, or if the metrics source does not answer.
    `reading` is None if the source has no new counts. `failure` is the reason why counts are
    missing.
    """

    observations: Observations | None
    reading: MetricsReading | None = None
    failure: str = ""


def read_metrics(journal: Journal) -> MetricsSnapshot:
    """Read the counts of the rollout in progress, if its policy analyzes metrics.

    The ledger is not changed.
    """
    state, roles = journal.state, journal.state.roles
    if (
        not state.policy.is_analyzed
        or state.observations is None
        or roles.stable is None
        or roles.candidate is None
    ):
        return MetricsSnapshot(observations=None)
    candidate, stable = roles.candidate.name, roles.stable.name
    limits = {candidate: state.observations.slower, stable: state.observations.thresholds}
    try:
        reading = journal.context.metrics(journal.config).read(journal.config, limits)
    except ServiceUnavailableError as error:
        return MetricsSnapshot(observations=None, failure=str(error))
    reading = state.observations.select_new(reading)
    observations = state.observations.with_reading(reading, stable=stable, candidate=candidate)
    is_new = observations.reading is not state.observations.reading
    return MetricsSnapshot(
        observations=observations, reading=reading if is_new else None, failure=reading.failure
    )


def choose_action(
    journal: Journal,
    desired: DesiredState,
    observed: EndpointState | None,
    snapshot: MetricsSnapshot,
) -> Action | Wait:
    """Return the next action, or the wait and its reason."""
    state, analysis = journal.state, None
    if snapshot.observations is not None:
        # The import of the statistics takes longer than a rollback of a local endpoint
        # (`benchmarks.rollback`), and most calls do not need it.
        from onnx_ops.statistics.rollout.judge import analyze

        analysis = analyze(snapshot.observations, state.roles, state.policy)
    provider = journal.context.provider(journal.config.provider)
    capabilities = provider.capabilities(journal.config.options)
    action = choose_next_action(
        desired=desired.deployment,
        observed=observed,
        roles=state.roles,
        policy=state.policy,
        target=journal.config.target,
        command=state.command,
        now=journal.context.clock.now(),
        analysis=analysis,
        draws_epochs="epochs" in capabilities,
        has_fleet="fleet" in capabilities,
    )
    if isinstance(action, Wait):
        blocked = desired.blocked_by if state.roles.candidate is None else ""
        why = blocked or action.why
        action = replace(action, why=f"{why}: {snapshot.failure}" if snapshot.failure else why)
    else:
        action = _hold(action, state.roles, snapshot, state.command)
    is_late = snapshot.failure and _is_step_late(state, journal.context.clock.now())
    if is_late and isinstance(action, Wait) and action.kind is WaitKind.ANALYZING:
        why = f"needs an operator: the time of the step is over ({action.why})"
        return Wait(why=why, kind=WaitKind.INCONCLUSIVE)
    return action


def _is_step_late(state: ReleaseState, now: float) -> bool:
    """Return whether the candidate's step lasts longer than its policy permits."""
    seen, roles = state.observations, state.roles
    if seen is None or roles.candidate is None:
        return False
    if (seen.candidate, seen.step) != (roles.candidate.manifest, roles.step):
        return False
    return now - seen.started_at >= get_step_limit_s(state.policy, roles.step)


def _hold(
    action: Action, roles: Roles, snapshot: MetricsSnapshot, command: OperatorCommand | None
) -> Action | Wait:
    """Return the action, or a wait if the action would advance without evidence.

    An action that an operator ordered does not wait.
    """
    goes_on = action.kind in (ActionKind.ADVANCE, ActionKind.FINISH) and roles.candidate is not None
    if goes_on and snapshot.failure and command is not OperatorCommand.ADVANCE:
        return Wait(why=f"evidence is missing: {snapshot.failure}", kind=WaitKind.ANALYZING)
    return action


def record_metrics(journal: Journal, snapshot: MetricsSnapshot, action: Action | Wait) -> None:
    """Record the data that an action depends on before it is performed.

    The data are the new counts, and the thresholds of a new rollout.

    Raises:
        ConflictError: another process acted meanwhile.
        ServiceUnavailableError: the metrics source does not answer, which prevents the start.
        MissingKeyError: no key on this machine can sign the thresholds.
    """
    state = journal.state
    if snapshot.reading is not None and _is_reading_due(state, snapshot.reading, action):
        # Counts can cause an advance, so their entry must be signed. If the key is missing, the
        # counts are not recorded, and a rollback is still possible.
        with suppress(MissingKeyError):
            journal.append(MetricsRecorded(reading=snapshot.reading))
    if (
        not isinstance(action, Action)
        or action.kind is not ActionKind.START
        or not state.policy.is_analyzed
    ):
        return
    candidate, stable, fixed = action.roles.candidate, action.roles.stable, state.thresholds
    if (
        candidate is None
        or stable is None
        or (fixed is not None and fixed.candidate == candidate.manifest)
    ):
        return
    from onnx_ops.statistics.rollout.guardrails import fix_thresholds

    latencies = journal.context.metrics(journal.config).latencies(journal.config, stable.name)
    thresholds, slower = (
        (None, None)
        if latencies is None
        else fix_thresholds(*latencies, state.policy.max_latency_increases())
    )
    journal.append(
        ThresholdsFixed(candidate=candidate.manifest, thresholds=thresholds, slower=slower)
    )


def _is_reading_due(state: ReleaseState, reading: MetricsReading, action: Action | Wait) -> bool:
    """Return whether a reading must be recorded now.

    The first reading, and a reading before an action, are recorded. Others are recorded if
    `RECORD_INTERVAL_S` seconds have passed since the last recorded reading.
    """
    last = state.observations.reading if state.observations is not None else None
    return (
        isinstance(action, Action) or last is None or abs(reading.at - last.at) >= RECORD_INTERVAL_S
    )


def _is_record_due(
    journal: Journal, desired: DesiredState, snapshot: MetricsSnapshot, wait: Wait
) -> bool:
    """Return whether data of a wait must be recorded in the ledger now."""
    return (
        (snapshot.reading is not None and _is_reading_due(journal.state, snapshot.reading, wait))
        or _find_pause(journal.state, wait) is not None
        or _find_unrecorded_selection(journal, desired) is not None
    )


def _note_wait(journal: Journal, desired: DesiredState, wait: Wait) -> None:
    """Record the new data of a wait, and confirm a rollout that continues."""
    record_pause(journal, wait)
    record_selection(journal, desired)
    _confirm_rollout(journal)


def _confirm_rollout(journal: Journal) -> None:
    """Confirm to the provider that a rollout in progress continues."""
    if journal.state.roles.candidate is not None:
        journal.context.provider(journal.config.provider).confirm_rollout(journal.config)


def record_pause(journal: Journal, wait: Wait) -> None:
    """Record that a rollout needs an operator, unless an operator paused it.

    The need is not recorded again while its step and its kind of wait stay the same.

    Raises:
        ConflictError: another process acted meanwhile.
    """
    if (pause := _find_pause(journal.state, wait)) is not None:
        journal.append(pause)


def _find_pause(state: ReleaseState, wait: Wait) -> RolloutPaused | None:
    """Return the pause that a wait begins; None without a pause, or if it is recorded."""
    needs_operator = wait.kind in (WaitKind.INCONCLUSIVE, WaitKind.PAUSED, WaitKind.APPROVAL)
    if (
        not needs_operator
        or state.roles.candidate is None
        or state.command is OperatorCommand.PAUSE
    ):
        return None
    if state.pause is not None and (state.pause.wait, state.pause.step) == (
        wait.kind,
        state.roles.step,
    ):
        return None
    return RolloutPaused(wait=wait.kind, step=state.roles.step, why=wait.why)


def find_selection(journal: Journal, desired: DesiredState) -> AliasSelection | None:
    """Return the alias that requests the desired version, or None.

    The result includes the time at which a reconciler first saw this request: the recorded time,
    or else the present time.
    """
    if desired.request is None or desired.refused is not None:
        return None
    (alias, version), known = desired.request, journal.state.selected
    if known is not None and (known.alias, known.version) == (alias, version):
        return known
    return AliasSelection(alias=alias, version=version, seen_at=journal.context.clock.now())


def record_selection(journal: Journal, desired: DesiredState) -> None:
    """Record once that an alias selects a version which does not start yet.

    The entry of the later start can then show when the version was selected.

    Raises:
        ConflictError: another process acted meanwhile.
    """
    if (selected := _find_unrecorded_selection(journal, desired)) is not None:
        with suppress(MissingKeyError):
            # If the signing key is missing, the present time is lost. The entry of the later start
            # then has its own time as the time of the selection.
            journal.append(VersionSelected(selected=selected))


def _find_unrecorded_selection(journal: Journal, desired: DesiredState) -> AliasSelection | None:
    """Return the selection of a version that has not started yet, or None.

    The result is also None if the selection is already recorded.
    """
    selected, roles = find_selection(journal, desired), journal.state.roles
    present = [
        deployment.version
        for deployment in (roles.stable, roles.candidate)
        if deployment is not None
    ]
    if selected is None or selected == journal.state.selected or selected.version in present:
        return None
    return selected
