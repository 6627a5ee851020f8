"""Metrics of a rollout in progress: read, used to choose the next action, and recorded in the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.ledger import MetricsRecorded, RolloutPaused, ThresholdsFixed
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Wait, WaitKind, choose_next_action
from onnx_ops.domain.rollout_observations import Observations
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.release.journal import Journal
from onnx_ops.release.registry_sync import DesiredState

RECORD_INTERVAL_S = 60.0
"""Interval at which readings that change nothing are recorded. A process that dies loses a minute of counts, and a
rollout of a week leaves about ten thousand entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """What was counted until now, this reading included. `unavailable` is why there is no reading."""

    observations: Observations | None
    unavailable: str = ""


def read_metrics(journal: Journal) -> MetricsSnapshot:
    """Read the counts of the rollout in progress, if its policy analyzes metrics. Nothing is written."""
    state, roles = journal.state, journal.state.roles
    if not state.policy.is_analyzed or state.observations is None or roles.stable is None or roles.candidate is None:
        return MetricsSnapshot(observations=None)
    candidate, stable = roles.candidate.name, roles.stable.name
    limits = {candidate: state.observations.slower, stable: state.observations.thresholds}
    try:
        reading = journal.ports.metrics(journal.config).read(journal.config, limits)
    except ServiceUnavailableError as error:
        return MetricsSnapshot(observations=None, unavailable=str(error))
    return MetricsSnapshot(observations=state.observations.with_reading(reading, stable=stable, candidate=candidate))


def choose_action(
    journal: Journal, desired: DesiredState, observed: EndpointState | None, snapshot: MetricsSnapshot
) -> Action | Wait:
    """Return the next action by everything that is known. Without counts only a rollback may follow."""
    state, target, now = journal.state, journal.config.target, journal.ports.clock.now()
    if snapshot.observations is not None:
        # The statistics take longer to import than a rollback takes, and most steps need none.
        from onnx_ops.statistics.rollout import decide

        return decide(
            desired=desired.deployment,
            observed=observed,
            roles=state.roles,
            observations=snapshot.observations,
            policy=state.policy,
            target=target,
            command=state.command,
            now=now,
        )
    action = choose_next_action(
        desired=desired.deployment,
        observed=observed,
        roles=state.roles,
        policy=state.policy,
        target=target,
        command=state.command,
        now=now,
    )
    if not isinstance(action, Wait):
        return action
    why = desired.blocked_by if state.roles.candidate is None and desired.blocked_by else action.why
    return replace(action, why=f"{why}: {snapshot.unavailable}" if snapshot.unavailable else why)


def record_metrics(journal: Journal, snapshot: MetricsSnapshot, action: Action | Wait) -> None:
    """Record what an action rests on before it is performed: the counts, and the thresholds of a new rollout.

    Raises:
        ConflictError: another process acted meanwhile.
        ServiceUnavailableError: a rollout cannot start without the latencies of the stable version.
    """
    state = journal.state
    if snapshot.observations is not None and (reading := snapshot.observations.reading) is not None:
        last = state.observations.reading if state.observations is not None else None
        if isinstance(action, Action) or last is None or reading.at - last.at >= RECORD_INTERVAL_S:
            journal.append(MetricsRecorded(reading=reading))
    if isinstance(action, Action) and action.kind is ActionKind.START:
        _fix_thresholds(journal, action)


def record_pause(journal: Journal, wait: Wait) -> None:
    """Record that a rollout needs an operator, once for each step and kind of wait, unless an operator paused it.

    Raises:
        ConflictError: another process acted meanwhile.
    """
    state = journal.state
    if (
        wait.kind not in (WaitKind.INCONCLUSIVE, WaitKind.PAUSED, WaitKind.APPROVAL)
        or state.roles.candidate is None
        or state.command is OperatorCommand.PAUSE
    ):
        return
    if state.pause is None or (state.pause.wait, state.pause.step) != (wait.kind, state.roles.step):
        journal.append(RolloutPaused(wait=wait.kind, step=state.roles.step, why=wait.why))


def _fix_thresholds(journal: Journal, start: Action) -> None:
    state, candidate, stable = journal.state, start.roles.candidate, start.roles.stable
    if candidate is None or stable is None or not state.policy.is_analyzed:
        return
    if state.thresholds is not None and state.thresholds.candidate == candidate.manifest:
        return
    from onnx_ops.statistics.rollout import fix_thresholds

    latencies = journal.ports.metrics(journal.config).latencies(journal.config, stable.name)
    thresholds, slower = (None, None) if latencies is None else fix_thresholds(*latencies, state.policy.slower())
    journal.append(ThresholdsFixed(candidate=candidate.manifest, thresholds=thresholds, slower=slower))
