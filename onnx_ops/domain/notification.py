"""What people are told about an endpoint, as a function of its ledger: so it does not matter which process acted.

Events for programs: what people are told, and each step of a rollout, under names that can be relied on.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.decision import Drift
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    ActionOutcome,
    Intent,
    LedgerEntry,
    ReleaseState,
    RolloutPaused,
    VersionRefused,
    apply_entry,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout import Action, ActionKind, WaitKind

REPEAT_INTERVAL_S = 3600.0
"""Seconds within which the same trouble, refusal or wait of an endpoint is told once."""

_LONGEST = 400
"""Characters of a reason. Whoever needs all of it looks into the history."""


class NotificationKind(StrEnum):
    """Kinds of notifications."""

    STARTED = "started"
    ADVANCED = "advanced"
    ROLLED_BACK = "rolled back"
    OPERATOR = "rolled back by an operator"
    WITHDRAWN = "withdrawn"
    HELD = "held for a person"
    PAUSED = "paused"
    FINISHED = "finished"
    REFUSED = "refused"
    TROUBLE = "trouble"
    DRIFTED = "drifted"
    TEST = "test"


PROGRESS = frozenset({NotificationKind.STARTED, NotificationKind.ADVANCED})
"""Steps of a rollout that goes well: told to programs that ask for them, and to no person."""

_REPEATS = frozenset(
    {NotificationKind.HELD, NotificationKind.PAUSED, NotificationKind.REFUSED, NotificationKind.TROUBLE}
)
"""What may come again and again by itself."""


class Severity(StrEnum):
    """Severity of a notification."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What a person needs at night: what happened, why in one line, where to look, and what to type.

    `commands` are commands by what they are for. `sequence` is the ledger entry that it is about, `at` its time in
    seconds since the epoch, `actor` who wrote it; `sequence` is 0 for what is in no ledger. `version` is the one that
    it is about, `serving` the one that has the traffic afterwards (most of it, during a rollout); empty where there is
    none. `link` is empty where there is no page.
    """

    endpoint: str
    sequence: int
    at: float
    actor: str
    what: NotificationKind
    severity: Severity
    headline: str
    why: str
    commands: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    version: str = ""
    serving: str = ""
    link: str = ""

    @property
    def title(self) -> str:
        """One line."""
        return f"{self.endpoint}: {self.headline}"

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it as plain text, the title left out."""
        told = [f"Why: {self.why}"] if self.why else []
        told += [f"{purpose}: {command}" for purpose, command in self.commands.items()]
        told += [f"Look: {self.link}"] if self.link else []
        return (*told, f"Entry {self.sequence} of the ledger, by {self.actor}" if self.sequence else f"By {self.actor}")


def derive_notifications(before: ReleaseState, entry: LedgerEntry) -> tuple[Notification, ...]:
    """Return the notifications of an entry, given the state before it."""
    match entry.body:
        case ActionOutcome() if before.open_intent is not None and entry.body.of == before.generation:
            found = _done(before, before.open_intent) if entry.body.ok else _failed(before, entry.body)
        case VersionRefused():
            found = _refused(before, entry.body)
        case RolloutPaused():
            found = _held(before, entry.body)
        case _:
            found = None
    return () if found is None else (found.about(before, entry),)


def list_pending_notifications(
    endpoint: str, entries: Iterable[LedgerEntry], *, after: int = 0, progress: bool = False
) -> tuple[Notification, ...]:
    """Return the notifications of entries after sequence `after`, oldest first; `progress` includes good steps.

    What was told within `REPEAT_INTERVAL_S` is not repeated: an effect that fails in every pass, an alias that is set
    again and again, an endpoint that keeps dying.
    """
    state = ReleaseState(endpoint=endpoint)
    told: dict[tuple[NotificationKind, str], float] = {}
    found: list[Notification] = []
    for entry in entries:
        for notice in derive_notifications(state, entry):
            key = notice.what, notice.headline
            again = notice.at - told[key] < REPEAT_INTERVAL_S if key in told else False
            if again and notice.what in _REPEATS:
                continue
            told[key] = notice.at
            if entry.sequence > after and (progress or notice.what not in PROGRESS):
                found.append(notice)
        state = apply_entry(state, entry)
    return tuple(found)


def build_test_notification(endpoint: str, *, at: float, actor: str) -> Notification:
    """Return a notification that tests delivery."""
    return Notification(
        endpoint=endpoint,
        sequence=0,
        at=at,
        actor=actor,
        what=NotificationKind.TEST,
        severity=Severity.INFO,
        headline="a test: notifications arrive here",
        why="somebody ran `onnx-ops notify --test`",
        commands={"See what serves": "onnx-ops status"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    what: NotificationKind
    severity: Severity
    headline: str
    why: str
    commands: Mapping[str, str]
    version: str = ""
    serving: str = ""

    def about(self, state: ReleaseState, entry: LedgerEntry) -> Notification:
        return Notification(
            endpoint=entry.endpoint,
            sequence=entry.sequence,
            at=entry.at,
            actor=entry.actor,
            what=self.what,
            severity=self.severity,
            headline=self.headline,
            why=textwrap.shorten(self.why, _LONGEST, placeholder=" …"),
            commands=self.commands,
            model=state.config.model if state.config is not None else "",
            version=self.version,
            serving=self.serving or _stable(state),
        )


def _done(before: ReleaseState, intent: Intent) -> _News | None:
    action, name = intent.action, before.endpoint
    serving = _serving(action)
    what, severity, version = NotificationKind.FINISHED, Severity.INFO, serving
    match action.kind:
        case ActionKind.ABORT:
            return _taken_back(before, intent)
        case ActionKind.START | ActionKind.ADVANCE:
            what = NotificationKind.STARTED if action.kind is ActionKind.START else NotificationKind.ADVANCED
            version = _version(action.roles.candidate)
            headline, commands = f"v{version} is at step {action.roles.step + 1}", {}
        case ActionKind.ROLLBACK:
            what, severity, version = NotificationKind.OPERATOR, Severity.WARNING, _stable(before)
            headline = f"rolled back by an operator, v{serving} has all traffic"
            commands = {"Undo": f"onnx-ops rollback {name} --to {version} --force"} if version else {}
        case ActionKind.FINISH:
            headline, commands = f"v{serving} has all traffic", {"Undo": f"onnx-ops rollback {name}"}
        case ActionKind.FIRST:
            headline, commands = f"first deployment: v{serving}", {"See": f"onnx-ops status {name}"}
        case ActionKind.RESTORE:
            what, severity = NotificationKind.TROUBLE, Severity.WARNING
            headline, commands = "was not what it should be, and was restored", {"See": f"onnx-ops history {name}"}
        case _:
            return None
    return _News(
        what=what,
        severity=severity,
        headline=headline,
        why=action.why,
        commands=commands,
        version=version,
        serving=serving,
    )


def _taken_back(before: ReleaseState, intent: Intent) -> _News:
    """Describe a candidate that lost its traffic, by metrics, by an operator or by the registry."""
    action, version = intent.action, _version(before.roles.candidate)
    serving = f"v{_serving(action)} has all traffic"
    if not action.reject:
        what, severity, headline = NotificationKind.WITHDRAWN, Severity.INFO, f"v{version} was withdrawn, {serving}"
        commands = {"Undo": _promote(before, version)}
    else:
        by_hand = before.pending_rollback is not None and before.pending_rollback.by_operator
        what = NotificationKind.OPERATOR if by_hand else NotificationKind.ROLLED_BACK
        severity = Severity.WARNING if by_hand else Severity.CRITICAL
        headline = f"v{version} was rolled back{' by an operator' if by_hand else ''}, {serving}"
        commands = {"Undo": f'{_promote(before, version)} --override --reason "..."'}
    return _News(
        what=what,
        severity=severity,
        headline=headline,
        why=action.why,
        commands=commands,
        version=version,
        serving=_serving(action),
    )


def _failed(before: ReleaseState, outcome: ActionOutcome) -> _News:
    action = before.open_intent.action if before.open_intent is not None else None
    kind = action.kind if action is not None else None
    back = action is not None and action.is_rollback
    name = before.endpoint
    commands = {"Try again": f"onnx-ops reconcile {name}", "See": f"onnx-ops status {name}"}
    return _News(
        what=NotificationKind.TROUBLE,
        severity=Severity.CRITICAL if back else Severity.WARNING,
        headline=f"{kind.value if kind is not None else 'an effect'} failed{' and is still owed' if back else ''}",
        why=outcome.detail,
        commands=commands,
    )


def _refused(before: ReleaseState, body: VersionRefused) -> _News:
    commands = {}
    if before.config is not None:
        look = f"onnx-ops explain {before.config.model}/{body.version} --target {before.config.target}"
        override = f'{_promote(before, body.version)} --override --reason "..."'
        commands = {"See": look, "Let it serve all the same": override}
    restored = f"v{body.restored_to} stands there again" if body.restored_to else "the alias was removed"
    return _News(
        what=NotificationKind.REFUSED,
        severity=Severity.WARNING,
        headline=f"refused {body.alias} on v{body.version}: {restored}",
        why=body.reason,
        commands=commands,
        version=body.version,
    )


def _held(before: ReleaseState, body: RolloutPaused) -> _News:
    paused = body.wait is WaitKind.PAUSED
    candidate = before.roles.candidate
    name = f"v{candidate.version}" if candidate is not None else "the rollout"
    waits = {WaitKind.PAUSED: "is paused", WaitKind.APPROVAL: "waits for approval"}
    return _News(
        what=NotificationKind.PAUSED if paused else NotificationKind.HELD,
        severity=Severity.WARNING,
        headline=f"{name} {waits.get(body.wait, 'is held for a person')} at step {body.step + 1}",
        why=body.why,
        commands={
            "Go on": f"onnx-ops rollout resume {before.endpoint}",
            "Take it back": f"onnx-ops rollout abort {before.endpoint}",
        },
        version=candidate.version if candidate is not None else "",
    )


def _promote(state: ReleaseState, version: str) -> str:
    if state.config is None:
        return f"onnx-ops promote MODEL {version} --target TARGET"
    return f"onnx-ops promote {state.config.model} {version} --target {state.config.target}"


def _serving(action: Action) -> str:
    return _version(action.roles.stable)


def _version(deployment: Deployment | None) -> str:
    return deployment.version if deployment is not None else "?"


def _stable(state: ReleaseState) -> str:
    return state.roles.stable.version if state.roles.stable is not None else ""


PREFIX = "onnx-ops."

EVENT_NAMES: Mapping[NotificationKind, str] = {
    NotificationKind.STARTED: "onnx-ops.rollout.started",
    NotificationKind.ADVANCED: "onnx-ops.rollout.advanced",
    NotificationKind.FINISHED: "onnx-ops.rollout.finished",
    NotificationKind.ROLLED_BACK: "onnx-ops.rollout.rolled-back",
    NotificationKind.WITHDRAWN: "onnx-ops.rollout.withdrawn",
    NotificationKind.HELD: "onnx-ops.rollout.held",
    NotificationKind.PAUSED: "onnx-ops.rollout.paused",
    NotificationKind.OPERATOR: "onnx-ops.rolled-back",
    NotificationKind.REFUSED: "onnx-ops.alias.refused",
    NotificationKind.TROUBLE: "onnx-ops.endpoint.trouble",
    NotificationKind.DRIFTED: "onnx-ops.champion.drifted",
    NotificationKind.TEST: "onnx-ops.test",
}

GATE_FAILED = "onnx-ops.gate.failed"
REGISTERED = "onnx-ops.release.registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvent:
    """Something that happened to a resource.

    `resource` is `onnx-ops.endpoint.NAME` or `onnx-ops.model.NAME`, `name` how people call it; `labels` are what
    triggers can filter by. `related` are other resources by their role. `at` is seconds since the epoch. `key` is the
    same whenever the same thing is told again; None where nothing tells one occurrence from another.
    """

    event: str
    resource: str
    name: str
    at: float
    payload: Mapping[str, Json]
    labels: Mapping[str, str] = field(default_factory=dict)
    related: Mapping[str, str] = field(default_factory=dict)
    key: Digest | None = None


def format_endpoint_id(name: str) -> str:
    """Return the resource id of an endpoint."""
    return f"{PREFIX}endpoint.{name}"


def format_model_id(name: str) -> str:
    """Return the resource id of a model."""
    return f"{PREFIX}model.{name}"


def build_event(notice: Notification) -> ReleaseEvent:
    """Return the event of a notification: about a model if it is in no ledger, else about an endpoint."""
    drift = notice.what is NotificationKind.DRIFTED
    payload: dict[str, Json] = {
        "what": notice.headline,
        "why": notice.why,
        "version": notice.version,
        "serving": notice.serving,
        "model": notice.model,
        "actor": notice.actor,
        "sequence": notice.sequence,
        "commands": dict(notice.commands),
        "link": notice.link,
    }
    return ReleaseEvent(
        event=EVENT_NAMES[notice.what],
        resource=format_model_id(notice.model) if drift else format_endpoint_id(notice.endpoint),
        name=notice.endpoint,
        at=notice.at,
        payload=payload,
        labels={f"{PREFIX}severity": notice.severity.value},
        related={"model": format_model_id(notice.model)} if notice.model and not drift else {},
        key=digest_json([notice.endpoint, notice.sequence, notice.what.value, notice.at]) if notice.sequence else None,
    )


def build_drift_notification(drift: Drift, *, at: float, actor: str) -> Notification:
    """Return the notification of a champion that has drifted; `at` is in seconds since the epoch."""
    return Notification(
        endpoint=f"{drift.model}@{drift.target}",
        sequence=0,
        at=at,
        actor=actor,
        what=NotificationKind.DRIFTED,
        severity=Severity.WARNING,
        headline=f"champion v{drift.version} ({drift.variant}) has drifted",
        why=drift.reason,
        commands={
            "See what it was": f"onnx-ops explain {drift.model}/{drift.version} --target {drift.target}",
            "Measure again": f"onnx-ops drift check {drift.pipeline}",
            "Choose again": f"onnx-ops run configs/pipelines/{drift.pipeline}.yaml --no-cache benchmark",
        },
        model=drift.model,
        version=drift.version,
        serving=drift.version,
    )
