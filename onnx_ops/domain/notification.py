"""Notifications to users, derived from the ledger, and events for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from onnx_ops.domain.artifact import Digest, digest_json
from onnx_ops.domain.decision import RecheckResult
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.ledger import (
    ActionOutcome,
    LedgerEntry,
    ReleaseState,
    RolloutPaused,
    VersionRefused,
    apply_entry,
)
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout import Action, ActionKind, WaitKind

REPEAT_INTERVAL_S = 3600.0
"""Interval in seconds in which an endpoint's repeated notifications are sent once.

A notification is repeated if it reports the same failure, refusal or wait.
"""

_LONGEST = 400
"""Largest number of characters of a reason; the ledger has the whole text."""


class NotificationKind(StrEnum):
    """Kinds of notifications; the ids of events depend on the values."""

    STARTED = "started"
    ADVANCED = "advanced"
    ROLLED_BACK = "rolled back"
    OPERATOR = "rolled back by an operator"
    WITHDRAWN = "withdrawn"
    WAITING = "waiting for an operator"
    PAUSED = "paused"
    FINISHED = "finished"
    REFUSED = "refused"
    TROUBLE = "trouble"
    RECHECK_FAILED = "recheck-failed"
    TEST = "test"


PROGRESS = frozenset({NotificationKind.STARTED, NotificationKind.ADVANCED})
"""Kinds of notifications about the steps of a rollout without problems.

Only notifiers that want steps send them, such as the notifier that emits events for programs.
"""

_REPEATS = frozenset(
    {
        NotificationKind.WAITING,
        NotificationKind.PAUSED,
        NotificationKind.REFUSED,
        NotificationKind.TROUBLE,
    }
)
"""Kinds of notifications that can repeat without an operator's action."""


class Severity(StrEnum):
    """Severity of a notification."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A notification: what happened, why, a link, and the commands to type.

    `why` is one line. `commands` maps purposes to commands. `sequence` is the sequence of the
    notification's ledger entry, or 0 if it is in no ledger. `at` is the time of that entry in
    seconds since the epoch, and `actor` is the writer of the entry. `version` is the version that
    the notification is about. `serving` is the version that has all traffic afterwards, or the
    stable version of a rollout. Both are empty or `?` if there is no version. `link` is empty if
    the registry has no page.
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
        """The title of the notification, in one line."""
        return f"{self.endpoint}: {self.headline}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the plain text that follow the title."""
        lines = [f"Why: {self.why}"] if self.why else []
        lines += [f"{purpose}: {command}" for purpose, command in self.commands.items()]
        lines += [f"See: {self.link}"] if self.link else []
        origin = f"Entry {self.sequence} of the ledger, by" if self.sequence else "By"
        return (*lines, f"{origin} {self.actor}")


def derive_notification(before: ReleaseState, entry: LedgerEntry) -> Notification | None:
    """Return the notification of an entry, if there is one.

    `before` is the state before the entry.
    """
    body, opened, name = entry.body, before.open_intent, before.endpoint
    match body:
        case ActionOutcome() if opened is not None and body.of == before.generation:
            if body.ok:
                return _describe_effect(before, entry, opened.action)
            is_rollback = opened.action.is_rollback
            return _notification(
                before,
                entry,
                NotificationKind.TROUBLE,
                Severity.CRITICAL if is_rollback else Severity.WARNING,
                f"{opened.action.kind.value} "
                f"failed{' and is still pending' if is_rollback else ''}",
                body.detail,
                {"Try again": f"onnx-ops reconcile {name}", "See": f"onnx-ops status {name}"},
            )
        case VersionRefused():
            return _describe_refusal(before, entry, body)
        case RolloutPaused():
            kind = (
                NotificationKind.PAUSED
                if body.wait is WaitKind.PAUSED
                else NotificationKind.WAITING
            )
            state = {WaitKind.PAUSED: "is paused", WaitKind.APPROVAL: "waits for approval"}
            candidate = before.roles.candidate
            subject = f"v{candidate.version}" if candidate is not None else "the rollout"
            commands = {
                "Advance": f"onnx-ops rollout advance {name}",
                "Abort": f"onnx-ops rollout abort {name}",
            }
            return _notification(
                before,
                entry,
                kind,
                Severity.WARNING,
                f"{subject} {state.get(body.wait, 'waits for an operator')} at step "
                f"{body.step + 1}",
                body.why,
                commands,
                version=candidate.version if candidate is not None else "",
            )
        case _:
            return None


def list_pending_notifications(
    endpoint: str, entries: Iterable[LedgerEntry], *, after: int = 0, progress: bool = False
) -> tuple[Notification, ...]:
    """Return the notifications of entries after sequence `after`, oldest first.

    `entries` are all entries of the ledger, since repetitions depend on earlier entries.
    With `progress`, the steps of a rollout without problems are included. Repetitions within
    `REPEAT_INTERVAL_S` are omitted, such as those of an effect that fails in every pass, or of an
    alias that is set repeatedly.
    """
    state = ReleaseState(endpoint=endpoint)
    sent_at: dict[tuple[NotificationKind, str], float] = {}
    pending: list[Notification] = []
    for entry in entries:
        notification = derive_notification(state, entry)
        state = apply_entry(state, entry)
        if notification is None:
            continue
        key = notification.what, notification.headline
        is_repeated = key in sent_at and notification.at - sent_at[key] < REPEAT_INTERVAL_S
        if is_repeated and notification.what in _REPEATS:
            continue
        sent_at[key] = notification.at
        if entry.sequence > after and (progress or notification.what not in PROGRESS):
            pending.append(notification)
    return tuple(pending)


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
        why="requested by `onnx-ops notify --test`",
        commands={"See what serves": "onnx-ops status"},
    )


def _notification(
    before: ReleaseState,
    entry: LedgerEntry,
    kind: NotificationKind,
    severity: Severity,
    headline: str,
    why: str,
    commands: Mapping[str, str],
    *,
    version: str = "",
    serving: str = "",
) -> Notification:
    return Notification(
        endpoint=entry.endpoint,
        sequence=entry.sequence,
        at=entry.at,
        actor=entry.actor,
        what=kind,
        severity=severity,
        headline=headline,
        why=textwrap.shorten(why, _LONGEST, placeholder=" …"),
        commands=commands,
        model=before.config.model if before.config is not None else "",
        version=version,
        serving=serving or _stable(before),
    )


def _describe_effect(
    before: ReleaseState, entry: LedgerEntry, action: Action
) -> Notification | None:
    name, serving = before.endpoint, _version(action.roles.stable)
    kind, severity, version = NotificationKind.FINISHED, Severity.INFO, serving
    commands: dict[str, str] = {}
    by_operator = before.pending_rollback is not None and before.pending_rollback.by_operator
    match action.kind:
        case ActionKind.ABORT:
            version = _version(before.roles.candidate)
            commands = {"Undo": _promote(before, version)}
            kind, how = NotificationKind.WITHDRAWN, "withdrawn"
            if action.reject:
                kind, severity = _rate_rollback(by_operator=by_operator)
                how = "rolled back by an operator" if by_operator else "rolled back"
                commands = {"Undo": f'{_promote(before, version)} --override --reason "..."'}
            headline = f"v{version} was {how}, v{serving} has all traffic"
        case ActionKind.START | ActionKind.ADVANCE:
            kind = (
                NotificationKind.STARTED
                if action.kind is ActionKind.START
                else NotificationKind.ADVANCED
            )
            version = _version(action.roles.candidate)
            headline = f"v{version} is at step {action.roles.step + 1}"
        case ActionKind.ROLLBACK:
            kind, severity = _rate_rollback(by_operator=by_operator)
            version = _stable(before)
            how = "an operator rolled back" if by_operator else f"v{version} was rolled back"
            headline = f"{how}, and v{serving} has all traffic"
            commands = (
                {"Undo": f"onnx-ops rollback {name} --to {version} --force"} if version else {}
            )
        case ActionKind.FINISH:
            headline, commands = (
                f"v{serving} has all traffic",
                {"Undo": f"onnx-ops rollback {name}"},
            )
        case ActionKind.FIRST:
            headline, commands = f"first deployment: v{serving}", {"See": f"onnx-ops status {name}"}
        case ActionKind.RESTORE:
            kind, severity = NotificationKind.TROUBLE, Severity.WARNING
            headline, commands = (
                "the endpoint did not report its expected state, and was restored",
                {"See": f"onnx-ops history {name}"},
            )
        case _:
            return None
    return _notification(
        before,
        entry,
        kind,
        severity,
        headline,
        action.why,
        commands,
        version=version,
        serving=serving,
    )


def _rate_rollback(*, by_operator: bool) -> tuple[NotificationKind, Severity]:
    """Return the kind and the severity of a rollback."""
    if by_operator:
        return NotificationKind.OPERATOR, Severity.WARNING
    return NotificationKind.ROLLED_BACK, Severity.CRITICAL


def _describe_refusal(
    before: ReleaseState, entry: LedgerEntry, refused: VersionRefused
) -> Notification:
    commands = {}
    if before.config is not None:
        explain = (
            f"onnx-ops explain {before.config.model}/{refused.version} --target "
            f"{before.config.target}"
        )
        override = f'{_promote(before, refused.version)} --override --reason "..."'
        commands = {"See": explain, "Let it serve nevertheless": override}
    restored = (
        f"the alias points to v{refused.restored_to} again"
        if refused.restored_to
        else "the alias was removed"
    )
    headline = f"refused {refused.alias} on v{refused.version}: {restored}"
    return _notification(
        before,
        entry,
        NotificationKind.REFUSED,
        Severity.WARNING,
        headline,
        refused.reason,
        commands,
        version=refused.version,
    )


def _promote(state: ReleaseState, version: str) -> str:
    if state.config is None:
        return f"onnx-ops promote MODEL/{version} --target TARGET"
    return f"onnx-ops promote {state.config.model}/{version} --target {state.config.target}"


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
    NotificationKind.WAITING: "onnx-ops.rollout.waiting",
    NotificationKind.PAUSED: "onnx-ops.rollout.paused",
    NotificationKind.OPERATOR: "onnx-ops.rolled-back",
    NotificationKind.REFUSED: "onnx-ops.alias.refused",
    NotificationKind.TROUBLE: "onnx-ops.endpoint.trouble",
    NotificationKind.RECHECK_FAILED: "onnx-ops.champion.recheck-failed",
    NotificationKind.TEST: "onnx-ops.test",
}

GATE_FAILED = "onnx-ops.gate.failed"
REGISTERED = "onnx-ops.release.registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEvent:
    """Something that happened to a resource.

    `resource` is `onnx-ops.endpoint.NAME` or `onnx-ops.model.NAME`, and `name` is its display name.
    Triggers can filter by `labels`. `related` are other resources by their role. `at` is in seconds
    since the epoch. `key` is the same for every report of one occurrence; None where occurrences
    cannot be distinguished.
    """

    event: str
    resource: str
    name: str
    at: float
    payload: Mapping[str, Json]
    labels: Mapping[str, str] = field(default_factory=dict)
    related: Mapping[str, str] = field(default_factory=dict)
    key: Digest | None = None


def format_model_id(name: str) -> str:
    """Return the resource id of a model."""
    return f"{PREFIX}model.{name}"


def build_event(notice: Notification) -> ReleaseEvent:
    """Return the event of a notification.

    The event of a failed recheck is about a model, any other event about an endpoint.
    """
    is_recheck = notice.what is NotificationKind.RECHECK_FAILED
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
        resource=format_model_id(notice.model)
        if is_recheck
        else f"{PREFIX}endpoint.{notice.endpoint}",
        name=notice.endpoint,
        at=notice.at,
        payload=payload,
        labels={f"{PREFIX}severity": notice.severity.value},
        related={"model": format_model_id(notice.model)} if notice.model and not is_recheck else {},
        key=digest_json([notice.endpoint, notice.sequence, notice.what.value, notice.at])
        if notice.sequence
        else None,
    )


def build_recheck_notification(result: RecheckResult, *, at: float, actor: str) -> Notification:
    """Return the notification of a champion that failed its recheck.

    `at` is in seconds since the epoch.
    """
    return Notification(
        endpoint=f"{result.model}@{result.target}",
        sequence=0,
        at=at,
        actor=actor,
        what=NotificationKind.RECHECK_FAILED,
        severity=Severity.WARNING,
        headline=f"champion v{result.version} ({result.variant}) failed its recheck",
        why=result.reason,
        commands={
            "See what it was": (
                f"onnx-ops explain {result.model}/{result.version} --target {result.target}"
            ),
            "Measure again": f"onnx-ops recheck {result.pipeline}",
            f"Choose again with the file of pipeline {result.pipeline}": (
                "onnx-ops run FILE --no-cache benchmark"
            ),
        },
        model=result.model,
        version=result.version,
        serving=result.version,
    )
