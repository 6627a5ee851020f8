"""What was counted of a rollout in progress: read, judged by, and written down so that any driver can go on with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.ledger import MetricsRecorded, RolloutPaused, ThresholdsFixed
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Wait, WaitKind, choose_next_action
from onnx_ops.domain.rollout_observations import Observations
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.release.journal import Journal
from onnx_ops.release.registry_sync import DesiredState

RECORD_EVERY_S = 60.0
"""A reading that changes nothing is written down this often: a driver that dies loses a minute's counts from the
evidence, and a rollout of a week leaves some thousand entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """What was counted until now, the present reading included; `blind` is why there is none."""

    observations: Observations | None
    blind: str = ""


def read_metrics(journal: Journal) -> MetricsSnapshot:
    """Read the counts of the rollout in progress, if figures decide about it. Nothing is written."""
    state, roles = journal.state, journal.state.roles
    if not state.policy.is_analyzed or state.observations is None or roles.stable is None or roles.candidate is None:
        return MetricsSnapshot(observations=None)
    candidate, stable = roles.candidate.name, roles.stable.name
    limits = {candidate: state.observations.slower, stable: state.observations.thresholds}
    try:
        reading = journal.ports.metrics(journal.config).read(journal.config, limits)
    except ServiceUnavailableError as error:
        return MetricsSnapshot(observations=None, blind=str(error))
    return MetricsSnapshot(observations=state.observations.with_reading(reading, stable=stable, candidate=candidate))


def choose_action(
    journal: Journal, wish: DesiredState, actual: EndpointState | None, seen: MetricsSnapshot
) -> Action | Wait:
    """The one thing to do next, by everything that is known. Without counts nothing moves but the way back."""
    roles, policy, target = journal.state.roles, journal.state.policy, journal.config.target
    word, now = journal.state.command, journal.ports.clock.now()
    if seen.observations is None:
        move = choose_next_action(
            desired=wish.wanted, observed=actual, roles=roles, policy=policy, target=target, command=word, now=now
        )
        if not isinstance(move, Wait):
            return move
        why = wish.waits if roles.candidate is None and wish.waits else move.why
        return replace(move, why=f"{why}: {seen.blind}" if seen.blind else why)
    # The statistics take longer to import than a rollback takes, and most looks need none.
    from onnx_ops.statistics.rollout import decide

    return decide(
        desired=wish.wanted,
        observed=actual,
        roles=roles,
        observations=seen.observations,
        policy=policy,
        target=target,
        command=word,
        now=now,
    )


def record_metrics(journal: Journal, seen: MetricsSnapshot, move: Action | Wait) -> None:
    """Keep what a move rests on before it is made: the counts that were judged, and the thresholds of a rollout that
    begins.

    Raises:
        ConflictError: somebody else acted meanwhile.
        ServiceUnavailableError: a rollout cannot begin while nobody can tell how fast the stable version is.
    """
    if seen.observations is not None and (reading := seen.observations.reading) is not None:
        last = journal.state.observations.reading if journal.state.observations is not None else None
        if isinstance(move, Action) or last is None or reading.at - last.at >= RECORD_EVERY_S:
            journal.append(MetricsRecorded(reading=reading))
    if isinstance(move, Action) and move.kind is ActionKind.START:
        _freeze(journal, move)


def _freeze(journal: Journal, start: Action) -> None:
    state, candidate, stable = journal.state, start.roles.candidate, start.roles.stable
    if candidate is None or stable is None or not state.policy.is_analyzed:
        return
    if state.thresholds is not None and state.thresholds.candidate == candidate.manifest:
        return
    from onnx_ops.statistics.rollout import fix_thresholds

    found = journal.ports.metrics(journal.config).latencies(journal.config, stable.name)
    thresholds, slower = (None, None) if found is None else fix_thresholds(*found, state.policy.slower())
    journal.append(ThresholdsFixed(candidate=candidate.manifest, thresholds=thresholds, slower=slower))


_FOR_A_PERSON = (WaitKind.INCONCLUSIVE, WaitKind.PAUSED, WaitKind.APPROVAL)


def record_pause(journal: Journal, wait: Wait) -> None:
    """Write down that a rollout goes on by a person only, once for each step and kind of wait.

    What an operator paused himself is news to nobody.

    Raises:
        ConflictError: somebody else acted meanwhile.
    """
    state = journal.state
    if wait.kind not in _FOR_A_PERSON or state.roles.candidate is None or state.command is OperatorCommand.PAUSE:
        return
    if state.pause is None or (state.pause.wait, state.pause.step) != (wait.kind, state.roles.step):
        journal.append(RolloutPaused(wait=wait.kind, step=state.roles.step, why=wait.why))
