"""Move an endpoint toward its desired state, one recorded action at a time, as its metrics allow.

`reconcile_step` is level-triggered and idempotent: it reads desired and observed state, takes at most one action, and
can be killed at any point; the next call continues or reverts the action. `DryRun` makes the same decision with a
read-only context, so that an endpoint with nothing to do causes no request to the registry.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.ledger import AliasSelection, MetricsRecorded, RolloutPaused, ThresholdsFixed, VersionSelected
from onnx_ops.domain.rollout import (
    Action,
    ActionKind,
    OperatorCommand,
    Roles,
    Wait,
    WaitKind,
    choose_next_action,
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
from onnx_ops.ports import Context, EndpointProvider, Ledger, MetricsSource, ModelFiles, Registry
from onnx_ops.release.journal import (
    MAX_PAUSE_S,
    Journal,
    call_each,
    pin_aliases,
    read_readable_state,
    retry_on_conflict,
)
from onnx_ops.release.promote import finish_deletion
from onnx_ops.release.registry_sync import (
    DesiredState,
    conclude_refusal,
    publish_entries,
    publish_rejections,
    read_desired_state,
    record_alias,
    restore_files,
    revert_alias,
    write_pending_aliases,
)
from onnx_ops.release.rollback import carry_out_pending, request_and_carry_out

MAX_STEPS = 20
"""A rollout has a few steps; more than this in one call means that two writers undo each other's changes."""
RECORD_INTERVAL_S = 60.0
"""Interval at which readings that change nothing are recorded. A crash loses a minute of counts, and a rollout of a
week leaves about ten thousand entries.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step and its reason. `stable`: a further step would do nothing now."""

    endpoint: str
    did: str
    why: str
    stable: bool
    refused: bool = False
    registry_down: str = ""


def reconcile_until_stable(
    context: Context,
    endpoint: str,
    *,
    actor: str = "",
    on_step: Callable[[StepReport], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[StepReport]:
    """Reconcile until nothing is left to do now, or until stopped; the last report gives the reason.

    A step that lost to another writer, such as a rollback command, is decided anew.

    Raises:
        OnnxOpsError: as `reconcile_step` does.
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
    """Call `reconcile_until_stable` for several endpoints; return reports and errors by endpoint."""
    return call_each(endpoints, lambda name: reconcile_until_stable(context, name, actor=actor))


def reconcile_with_retries(
    context: Context, endpoints: Sequence[str], *, actor: str = "", for_s: float
) -> tuple[dict[str, list[StepReport]], dict[str, OnnxOpsError]]:
    """Call `reconcile_each` with growing pauses until nothing fails and no rollback is pending, at most for `for_s`.

    A missing package is not retried.
    """
    deadline, pause = time.monotonic() + for_s, 1.0
    while True:
        reports, errors = reconcile_each(context, endpoints, actor=actor)
        if errors:
            is_final = all(isinstance(error, MissingPackageError) for error in errors.values())
        else:
            is_final = not any(read_readable_state(context, name).pending_rollback for name in endpoints)
        if is_final or time.monotonic() + pause > deadline:
            return reports, errors
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def write_aliases(context: Context, endpoint: str, *, actor: str = "") -> str:
    """Write the aliases that a rollback left pending; return the reason if that fails.

    Traffic has moved already, so nothing is raised: the reconciler tries again.
    """
    try:
        return reconcile_until_stable(context, endpoint, actor=actor)[-1].registry_down
    except OnnxOpsError as error:
        return str(error)


def reconcile_step(context: Context, endpoint: str, *, actor: str = "") -> StepReport:
    """Perform the next action.

    Raises:
        NotFoundError: no such endpoint.
        LedgerConflictError: another process acted meanwhile; call again.
        ConflictError: the endpoint is changed by something that does not write the ledger.
        ServiceUnavailableError: the endpoint could not be reached.
        RefusedError: the registry does not permit an alias; an endpoint that died is restored nevertheless.
    """
    journal = Journal.open(context, endpoint, actor=actor)
    config = journal.config
    if journal.state.deleting:
        finish_deletion(journal)
        return StepReport(endpoint=endpoint, did="deleted", why="its deletion was requested", stable=True)
    if (report := _resume(journal)) is not None:
        return report
    observed = context.provider(config.provider).observe(config)
    _require_known(journal, observed)
    unrestored: OnnxOpsError | None = None
    try:
        if observed is None and (report := _restore(journal)) is not None:
            return report
    except (InfrastructureError, RefusedError, UserError) as error:
        unrestored = error  # the registry may request something that can be served
    desired = read_desired_state(journal)
    if (report := _refuse(journal, desired)) is not None:
        return report
    unwritten: OnnxOpsError | None = None
    try:
        if (report := _write_registry(journal, desired)) is not None:
            return report
    except (InfrastructureError, RefusedError) as error:
        unwritten = error
    snapshot = read_metrics(journal)
    action = choose_action(journal, desired, observed, snapshot)
    if isinstance(action, Action) and action.kind is ActionKind.RESTORE:
        if unrestored is not None:
            _fetch_lost_files(context, action, unrestored)
    elif unwritten is not None:
        raise unwritten
    record_metrics(journal, snapshot, action)
    did, why = _act(journal, desired, action)
    return StepReport(endpoint=endpoint, did=did, why=why, stable=not did, registry_down=desired.registry_down)


def _require_known(journal: Journal, observed: EndpointState | None) -> None:
    """Require that the ledger holds the entry that the endpoint has carried out.

    Raises:
        LedgerConflictError: another process has just written it.
        CorruptStateError: the ledger ends before it.
    """
    endpoint, head = journal.state.endpoint, journal.state.head
    generation = 0 if observed is None else observed.generation
    if generation <= head:
        return
    if generation <= journal.context.ledger.state(endpoint).head:
        raise LedgerConflictError("another process has changed the endpoint", where=endpoint)
    raise CorruptStateError(
        f"the ledger went back: it ends with entry {head}",
        where=f"ledger {endpoint}",
        why=f"the endpoint has carried out entry {generation}; the storage was restored from a backup, or changed",
        remedy="Restore the newer ledger, or accept this state: `onnx-ops ledger adopt` (`onnx-ops docs backup`).",
    )


def _restore(journal: Journal) -> StepReport | None:
    """Restore an endpoint that does not answer; None if another action comes first.

    The registry is not read: it may be slow or down, or hold what cannot be processed.
    """
    roles = journal.state.roles
    desired = DesiredState(deployment=roles.candidate or roles.stable)
    action = choose_action(journal, desired, None, MetricsSnapshot(observations=None))
    if not isinstance(action, Action) or action.kind is not ActionKind.RESTORE:
        return None
    journal.perform(action)
    return StepReport(endpoint=journal.state.endpoint, did=action.kind.value, why=action.why, stable=False)


def _fetch_lost_files(context: Context, action: Action, failure: OnnxOpsError) -> None:
    """Download the files of what an action deploys; raise the failure of the attempt before if none is lost."""
    lost = [d for d in action.state.deployments if context.files.location(d.manifest) is None]
    if not lost:
        raise failure
    for deployment in lost:
        restore_files(context, deployment)


def _act(journal: Journal, desired: DesiredState, action: Action | Wait) -> tuple[str, str]:
    """Perform what was chosen, or note a wait. Return the kind of the performed action, if any, and its reason."""
    if isinstance(action, Wait):
        _note_wait(journal, desired, action)
        return "", action.why
    if action.is_rollback:
        # Requested before it is tried: a kill in between leaves a pending rollback, which every step tries again.
        request_and_carry_out(journal, pin_aliases(journal.context, journal.config, action))
        return action.kind.value, action.why
    performed = _perform(journal, action, find_selection(journal, desired))
    return performed.kind.value, performed.why


def _perform(journal: Journal, action: Action, selected: AliasSelection | None = None) -> Action:
    """Perform the action. If an alarm of the provider reversed it, roll back. Return the performed action."""
    roles, config = journal.state.roles, journal.config
    try:
        journal.perform(action, selected=selected)
    except AlarmRollbackError as error:
        reversal = plan_reversal(roles, action, config.target, why=str(error))
        if reversal is None:
            raise
        request_and_carry_out(journal, pin_aliases(journal.context, config, reversal))
        return reversal
    return action


def _write_registry(journal: Journal, desired: DesiredState) -> StepReport | None:
    """Write the ledger's aliases and rejections to the registry, and record aliases that others have set."""
    if desired.registry_down:
        return None
    endpoint = journal.state.endpoint
    has_rejections = publish_rejections(journal)
    if written := write_pending_aliases(journal):
        return StepReport(endpoint=endpoint, did="wrote aliases", why=written, stable=False)
    if has_rejections:
        publish_entries(journal, {})
    if record_alias(journal, desired.champion):
        why = f"the champion in the registry is v{desired.champion}, which serves here"
        return StepReport(endpoint=endpoint, did="recorded alias", why=why, stable=False)
    return None


def _refuse(journal: Journal, desired: DesiredState) -> StepReport | None:
    """Revert an alias whose version is not allowed to serve, or complete an interrupted refusal."""
    begun, refused = journal.state.open_refusal, desired.refused
    is_same = begun and refused and (begun.alias, begun.version) == (refused.alias, refused.version)
    if begun is not None and not desired.registry_down and not is_same:
        conclude_refusal(journal, begun)
        refused = begun
    elif refused is not None:
        revert_alias(journal, refused)
    else:
        return None
    did = f"refused {refused.alias} on version {refused.version}"
    return StepReport(endpoint=journal.state.endpoint, did=did, why=refused.reason, stable=False, refused=True)


def _resume(journal: Journal) -> StepReport | None:
    """Wait for a process that acts, else carry out a pending rollback or complete the action of a dead process."""
    intent, pending = journal.state.open_intent, journal.state.pending_rollback
    if (active := journal.active_intent()) is not None:
        did, why = "", f"{active.holder} is changing it: {active.action.why}"
    elif pending is not None:
        carry_out_pending(journal)
        did, why = pending.action.kind.value, f"requested by {pending.actor}: {pending.action.why}"
    elif intent is not None:
        done = _perform(journal, intent.action, intent.selected)
        did, why = done.kind.value, f"finished what {intent.holder} began: {done.why}"
    else:
        return None
    return StepReport(endpoint=journal.state.endpoint, did=did, why=why, stable=not did)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """The counts until now, this `reading` included; None if it adds nothing. `failure` is why counts are missing."""

    observations: Observations | None
    reading: MetricsReading | None = None
    failure: str = ""


def read_metrics(journal: Journal) -> MetricsSnapshot:
    """Read the counts of the rollout in progress, if its policy analyzes metrics. Nothing is written."""
    state, roles = journal.state, journal.state.roles
    if not state.policy.is_analyzed or state.observations is None or roles.stable is None or roles.candidate is None:
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
    return MetricsSnapshot(observations=observations, reading=reading if is_new else None, failure=reading.failure)


def choose_action(
    journal: Journal, desired: DesiredState, observed: EndpointState | None, snapshot: MetricsSnapshot
) -> Action | Wait:
    """Return the next action. Without counts only a rollback can follow."""
    state, analysis = journal.state, None
    if snapshot.observations is not None:
        # The statistics take longer to import than a rollback takes, and most steps need none.
        from onnx_ops.statistics.rollout.judge import analyze

        analysis = analyze(snapshot.observations, state.roles, state.policy)
    provider = journal.context.provider(journal.config.provider)
    action = choose_next_action(
        desired=desired.deployment,
        observed=observed,
        roles=state.roles,
        policy=state.policy,
        target=journal.config.target,
        command=state.command,
        now=journal.context.clock.now(),
        analysis=analysis,
        draws_epochs="epochs" in provider.capabilities(journal.config.settings),
    )
    if not isinstance(action, Wait):
        return _hold(action, state.roles, snapshot, state.command)
    why = desired.blocked_by if state.roles.candidate is None and desired.blocked_by else action.why
    return replace(action, why=f"{why}: {snapshot.failure}" if snapshot.failure else why)


def _hold(action: Action, roles: Roles, snapshot: MetricsSnapshot, command: OperatorCommand | None) -> Action | Wait:
    """Return the action, or the wait of a rollout that would go on although evidence is missing."""
    goes_on = action.kind in (ActionKind.ADVANCE, ActionKind.FINISH) and roles.candidate is not None
    if goes_on and snapshot.failure and command is not OperatorCommand.ADVANCE:
        return Wait(why=f"evidence is missing: {snapshot.failure}", kind=WaitKind.ANALYZING)
    return action


def record_metrics(journal: Journal, snapshot: MetricsSnapshot, action: Action | Wait) -> None:
    """Record the basis of an action before it is performed: the counts, and the thresholds of a new rollout.

    Raises:
        ConflictError: another process acted meanwhile.
        ServiceUnavailableError: a rollout cannot start without the latencies of the stable version.
    """
    state = journal.state
    if (reading := snapshot.reading) is not None:
        last = state.observations.reading if state.observations is not None else None
        if isinstance(action, Action) or last is None or abs(reading.at - last.at) >= RECORD_INTERVAL_S:
            # Counts can lead to an advance, so that a key signs them. A rollback needs neither.
            with suppress(MissingKeyError):
                journal.append(MetricsRecorded(reading=reading))
    if not isinstance(action, Action) or action.kind is not ActionKind.START or not state.policy.is_analyzed:
        return
    candidate, stable, fixed = action.roles.candidate, action.roles.stable, state.thresholds
    if candidate is None or stable is None or (fixed is not None and fixed.candidate == candidate.manifest):
        return
    from onnx_ops.statistics.rollout.guardrails import fix_thresholds

    latencies = journal.context.metrics(journal.config).latencies(journal.config, stable.name)
    thresholds, slower = (
        (None, None) if latencies is None else fix_thresholds(*latencies, state.policy.max_latency_increases())
    )
    journal.append(ThresholdsFixed(candidate=candidate.manifest, thresholds=thresholds, slower=slower))


def _note_wait(journal: Journal, desired: DesiredState, wait: Wait) -> None:
    """Record what a wait shows anew, and confirm a rollout that continues."""
    record_pause(journal, wait)
    record_selection(journal, desired)
    if journal.state.roles.candidate is not None:
        journal.context.provider(journal.config.provider).confirm_rollout(journal.config)


def record_pause(journal: Journal, wait: Wait) -> None:
    """Record that a rollout needs an operator, once for each step and kind of wait, unless an operator paused it.

    Raises:
        ConflictError: another process acted meanwhile.
    """
    state = journal.state
    needs_operator = wait.kind in (WaitKind.INCONCLUSIVE, WaitKind.PAUSED, WaitKind.APPROVAL)
    if not needs_operator or state.roles.candidate is None or state.command is OperatorCommand.PAUSE:
        return
    if state.pause is None or (state.pause.wait, state.pause.step) != (wait.kind, state.roles.step):
        journal.append(RolloutPaused(wait=wait.kind, step=state.roles.step, why=wait.why))


def find_selection(journal: Journal, desired: DesiredState) -> AliasSelection | None:
    """Return the alias that requests the desired version, with the time when a reconciler saw that first."""
    if desired.request is None or desired.refused is not None:
        return None
    (alias, version), known = desired.request, journal.state.selected
    if known is not None and (known.alias, known.version) == (alias, version):
        return known
    return AliasSelection(alias=alias, version=version, seen_at=journal.context.clock.now())


def record_selection(journal: Journal, desired: DesiredState) -> None:
    """Record once that an alias selects a version which does not start yet, so that its start says since when.

    Raises:
        ConflictError: another process acted meanwhile.
    """
    selected, roles = find_selection(journal, desired), journal.state.roles
    present = [deployment.version for deployment in (roles.stable, roles.candidate) if deployment is not None]
    if selected is None or selected == journal.state.selected or selected.version in present:
        return
    with suppress(MissingKeyError):  # what starts it later quotes the time of its start
        journal.append(VersionSelected(selected=selected))


class _ChangesNeeded(Exception):
    """Raised where reading is not enough. No handler of an `OnnxOpsError` catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySnapshot:
    """Aliases of the registry: version by alias, by model. `down` is why the registry did not answer."""

    aliases: Mapping[str, Mapping[str, str]]
    down: str = ""


def read_registry(context: Context, models: Collection[str] | None = None) -> RegistrySnapshot:
    """Read the aliases of all models, or of these, in one request; the result records a registry that is down."""
    try:
        registry = context.registry()
        if models is None:
            return RegistrySnapshot(aliases=registry.all_aliases())
        return RegistrySnapshot(aliases={model: registry.aliases(model) for model in sorted(models)})
    except OnnxOpsError as error:
        return RegistrySnapshot(aliases={}, down=str(error))


class DryRun:
    """One pass over endpoints, over ledgers that are read once and one snapshot of the registry.

    Args:
        read_snapshot: reads the registry; called once, if at all. While the registry is down it gets no other request.

    Attributes:
        state: returns the state of an endpoint; raises CorruptStateError if its ledger is damaged.
    """

    def __init__(self, context: Context, read_snapshot: Callable[[], RegistrySnapshot]) -> None:
        self._read_snapshot = functools.cache(read_snapshot)
        self._context = replace(context, registry=lambda: self._unless_down(context.registry))
        self.state = functools.cache(context.ledger.state)
        ledger = _ReadOnlyPort(context.ledger, "endpoints", "place", "read", "read_intact", state=self.state)
        registry = _ReadOnlyPort(None, aliases=lambda model: self._read_snapshot().aliases.get(model, {}))
        self._read_only = replace(
            context,
            ledger=cast("Ledger", ledger),
            files=cast("ModelFiles", _ReadOnlyPort(context.files)),
            registry=lambda: self._unless_down(lambda: cast("Registry", registry)),
            provider=lambda name: cast(
                "EndpointProvider", _ReadOnlyPort(context.provider(name), "observe", "capabilities", "confirm_rollout")
            ),
            metrics=lambda config: cast("MetricsSource", _ReadOnlyPort(context.metrics(config), "read")),
        )

    def reconcile(
        self,
        endpoint: str,
        *,
        actor: str = "",
        on_step: Callable[[StepReport], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[StepReport]:
        """Call `reconcile_until_stable`, over the real context only if there is something to do.

        Raises:
            OnnxOpsError: as `reconcile_step` does.
        """
        try:
            reports = reconcile_until_stable(self._read_only, endpoint, actor=actor)
        except (_ChangesNeeded, CorruptStateError):
            # The states of a pass may be older than what an endpoint has carried out meanwhile. Only fresh reads show
            # whether its ledger went back.
            return reconcile_until_stable(self._context, endpoint, actor=actor, on_step=on_step, is_stopped=is_stopped)
        on_step(reports[-1])
        return reports

    def _unless_down(self, registry: Callable[[], Registry]) -> Registry:
        if why := self._read_snapshot().down:
            raise ServiceUnavailableError(why)
        return registry()


class _ReadOnlyPort:
    """A port that permits only what reads: attributes of the inner one by name, and replacements of others."""

    def __init__(self, inner: object, *allowed: str, **replaced: Callable[..., object]) -> None:
        self._permitted = {name: getattr(inner, name) for name in allowed} | replaced

    def __getattr__(self, name: str) -> Any:
        if name not in self._permitted:
            raise _ChangesNeeded(name)
        return self._permitted[name]
