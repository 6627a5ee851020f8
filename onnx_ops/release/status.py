"""What an endpoint does, and what happened to it.

The last rollout of an endpoint, in progress or over, as its ledger tells it.

What a person sees of a rollout: where it is, what the figures say, and what it waits for.

What endpoints owe, as metrics: for an alarm that does not depend on a message that somebody has to read.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from onnx_ops.domain.endpoint import Deployment, EndpointConfig, EndpointState
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    Intent,
    LeaseRenewed,
    LedgerEntry,
    MetricsRecorded,
    NotificationSent,
    OperatorCommandSent,
    OverrideRecorded,
    ReleaseState,
    RequestWithdrawn,
    RollbackRequested,
    RolloutPaused,
    ThresholdsFixed,
    VersionRefused,
    apply_entry,
)
from onnx_ops.domain.rollout import Action, ActionKind, AnalysisResult, Roles
from onnx_ops.domain.rollout_observations import Observations
from onnx_ops.domain.rollout_policy import LATENCY_QUANTILES, PlannedStep, RolloutPolicy
from onnx_ops.errors import CorruptStateError, NotFoundError, OnnxOpsError
from onnx_ops.ports import DetachedServing, Ports
from onnx_ops.release.journal import Journal, list_bound_endpoints, read_readable_state
from onnx_ops.release.registry_sync import DesiredState
from onnx_ops.release.rollout_metrics import choose_action, read_metrics

if TYPE_CHECKING:
    from onnx_ops.statistics.rollout.judge import EvidencePath


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """The ledger's view and the provider's. `actual` is None if the endpoint does not answer whoever manages it.

    Then `unsupervised` says that it answers its clients all the same.
    """

    state: ReleaseState
    actual: EndpointState | None
    address: str | None
    unsupervised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One ledger entry for people and auditors. `at` is ISO 8601 in UTC, `kind` that of the entry or its action.

    `versions` are the deployments by role once the entry has taken effect, with the digests of their release, their
    files and the evidence that they were approved on; empty where an entry changes no roles. `traffic` holds the shares
    of the versions after it, in percent; empty where it moves none, or failed to.
    """

    endpoint: str
    sequence: int
    at: str
    actor: str
    kind: str
    what: str
    why: str
    versions: Mapping[str, Deployment] = field(default_factory=dict)
    traffic: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFilter:
    """Which endpoints and entries are asked for; what is left out asks for all. `since` is seconds since the epoch."""

    endpoints: tuple[str, ...] = ()
    model: str = ""
    target: str = ""
    actor: str = ""
    since: float = 0.0
    limit: int | None = None
    traffic: bool = False
    """Only entries that moved traffic."""


def read_status(ports: Ports, endpoint: str) -> EndpointStatus:
    """Raises NotFoundError if no pipeline has bound this endpoint."""
    journal = Journal.open(ports, endpoint)
    config = journal.config
    provider = ports.provider(config.provider)
    actual = provider.observe(config)
    return EndpointStatus(
        state=journal.state,
        actual=actual,
        address=provider.address(config),
        unsupervised=actual is None and isinstance(provider, DetachedServing) and provider.is_unsupervised(config),
    )


def read_statuses(ports: Ports, endpoints: Sequence[str]) -> tuple[tuple[EndpointStatus, ...], dict[str, OnnxOpsError]]:
    """`read_status` of several: what they do, and why of some it cannot be told."""
    found: list[EndpointStatus] = []
    errors: dict[str, OnnxOpsError] = {}
    for name in endpoints:
        try:
            found.append(read_status(ports, name))
        except OnnxOpsError as error:
            errors[name] = error
    return tuple(found), errors


def filter_endpoints(ports: Ports, wanted: HistoryFilter) -> tuple[str, ...]:
    """Names of the bound endpoints that are asked for; with those that nobody can tell of, as their ledger is damaged.

    Raises:
        NotFoundError: one that was named is not bound.
    """
    for name in wanted.endpoints:
        Journal.open(ports, name).config  # noqa: B018 (raises NotFound for an unknown name)
    names = wanted.endpoints or list_bound_endpoints(ports)
    configs = {name: read_readable_state(ports, name).config for name in names}
    return tuple(name for name, config in configs.items() if config is None or _fits(config, wanted))


def read_history(ports: Ports, wanted: HistoryFilter) -> tuple[tuple[HistoryLine, ...], dict[str, CorruptStateError]]:
    """Entries of ledgers, oldest first; also of endpoints that are gone, and of models that no endpoint serves.

    Of a damaged ledger only what comes before the damage can be told, and why no more, by name.

    Raises:
        NotFoundError: an endpoint that was named has no history.
    """
    names = wanted.endpoints or ports.ledger.endpoints()
    found: list[LedgerEntry] = []
    errors: dict[str, CorruptStateError] = {}
    for name in names:
        entries, error = _entries(ports, name)
        if not entries and error is None and wanted.endpoints:
            known = ", ".join(ports.ledger.endpoints()) or "none"
            raise NotFoundError("no endpoint of that name", where=name, remedy=f"Known: {known}.")
        bound = error is None or any(isinstance(entry.body, EndpointBound) for entry in entries)
        if bound and not _was_ever(name, entries, wanted):
            continue
        if error is not None:
            errors[name] = error
        found += [e for e in entries if e.at >= wanted.since and wanted.actor in ("", e.actor)]
    found.sort(key=lambda entry: (entry.at, entry.endpoint, entry.sequence))
    failed = {(e.endpoint, e.body.of) for e in found if isinstance(e.body, ActionOutcome) and not e.body.ok}
    lines = [_line(entry, failed=(entry.endpoint, entry.sequence) in failed) for entry in found]
    if wanted.traffic:
        lines = [line for line in lines if line.traffic]
    return tuple(lines[-wanted.limit :] if wanted.limit else lines), errors


def _entries(ports: Ports, name: str) -> tuple[Sequence[LedgerEntry], CorruptStateError | None]:
    try:
        return ports.ledger.read(name), None
    except CorruptStateError as error:
        return ports.ledger.read_intact(name), error


def _fits(config: EndpointConfig | None, wanted: HistoryFilter) -> bool:
    return config is not None and wanted.model in ("", config.model) and wanted.target in ("", config.target)


def _was_ever(name: str, entries: Sequence[LedgerEntry], wanted: HistoryFilter) -> bool:
    """Whether the ledger is about that model and target."""
    model, _, target = name.partition("@")
    if target:
        return wanted.model in ("", model) and wanted.target in ("", target)
    if not (wanted.model or wanted.target):
        return True
    return any(isinstance(e.body, EndpointBound) and _fits(e.body.config, wanted) for e in entries)


def _line(entry: LedgerEntry, *, failed: bool) -> HistoryLine:
    what, why = _told(entry)
    at = datetime.datetime.fromtimestamp(entry.at, tz=datetime.UTC).isoformat(timespec="seconds")
    action = entry.body.action if isinstance(entry.body, Intent) else None
    roles = {} if action is None else _by_role(action.roles)
    return HistoryLine(
        endpoint=entry.endpoint,
        sequence=entry.sequence,
        at=at,
        actor=entry.actor,
        kind=entry.body.kind if action is None else action.kind.value,
        what=what,
        why=why,
        versions=roles,
        traffic={} if action is None or failed else dict(action.state.split.weights),
    )


def _by_role(roles: Roles) -> dict[str, Deployment]:
    named = {"stable": roles.stable, "previous": roles.previous, "candidate": roles.candidate}
    return {role: deployment for role, deployment in named.items() if deployment is not None}


def _told(entry: LedgerEntry) -> tuple[str, str]:
    body = entry.body
    match body:
        case EndpointBound():
            return f"bound to {body.config.model} on {body.config.target}", f"pipeline {body.config.pipeline}"
        case Intent() | RollbackRequested():
            asks = "asks for " if isinstance(body, RollbackRequested) else ""
            return asks + _action_told(body.action), body.action.why
        case ActionOutcome():
            return f"{'done' if body.ok else 'failed'} (entry {body.of})", body.detail
        case OperatorCommandSent():
            return f"operator says {body.command.value}", body.reason
        case AliasesWritten():
            told = ", ".join(f"{name} -> {version or 'none'}" for name, version in body.aliases.items())
            return f"registry: {told}", ""
        case VersionRefused():
            restored = f"restored to {body.restored_to}" if body.restored_to else "removed"
            return f"refused {body.alias} on version {body.version}, alias {restored}", body.reason
        case OverrideRecorded():
            return f"override for version {body.version}", body.reason
        case (
            EndpointDeleted()
            | EndpointAbandoned()
            | ThresholdsFixed()
            | MetricsRecorded()
            | RolloutPaused()
            | NotificationSent()
            | LeaseRenewed()
            | RequestWithdrawn()
        ):
            return _noted_told(body)
        case _:
            assert_never(body)


def _noted_told(
    body: EndpointDeleted
    | EndpointAbandoned
    | ThresholdsFixed
    | MetricsRecorded
    | RolloutPaused
    | NotificationSent
    | LeaseRenewed
    | RequestWithdrawn,
) -> tuple[str, str]:
    if isinstance(body, EndpointAbandoned | RequestWithdrawn):
        what = f"left behind: {body.place}" if isinstance(body, EndpointAbandoned) else "withdrew what was owed"
        return what, body.reason
    if isinstance(body, EndpointDeleted):
        return "deleted" if body.done else "is to be deleted", body.reason
    if isinstance(body, RolloutPaused):
        return f"goes on by a person only ({body.wait.value})", body.why
    if isinstance(body, NotificationSent):
        return f"sent notifications by {body.notifier}, up to entry {body.of}", ""
    if isinstance(body, LeaseRenewed):
        return f"still at it (entry {body.of})", ""
    if isinstance(body, MetricsRecorded):
        counts = sorted(body.reading.tallies.items())
        return "read the counts", ", ".join(f"{name} {n.errors} of {n.requests} failed" for name, n in counts)
    found = body.thresholds
    if found is None:
        return "froze no latency thresholds", "too few requests to tell"
    told = [
        ", ".join(
            f"{name.removeprefix('latency_')} {limit_s * 1e3:.3g} ms"
            for name, limit_s in one.by_guardrail().items()
            if name in LATENCY_QUANTILES
        )
        for one in (found, body.slower or found)
    ]
    what = f"{told[0]}, read off {found.requests} requests; the candidate's: {told[1]}"
    return "froze latency thresholds", what


def _action_told(action: Action) -> str:
    """What the action does to traffic, and for a change of the stable version from which to which."""
    weights, stable = action.state.split.weights, action.roles.stable
    split = ", ".join(f"{name} {weight} %" for name, weight in weights.items())
    before = next((name for name, weight in weights.items() if not weight), None)
    if action.kind in (ActionKind.FINISH, ActionKind.ROLLBACK) and stable is not None and before is not None:
        return f"{action.kind.value} {before} -> {stable.name}: {split}"
    return f"{action.kind.value}: {split}"


_STORY = (ActionKind.START, ActionKind.ADVANCE, ActionKind.FINISH, ActionKind.ABORT, ActionKind.ROLLBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One thing that was done or said. `at` is seconds since the epoch, `percent` the candidate's share afterwards."""

    at: float
    actor: str
    what: str
    why: str
    percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimeline:
    """A rollout from its start. `observations` are what was counted of it, also where it is over; `end` is how it
    ended, None while it goes on."""

    candidate: Deployment
    stable: Deployment | None
    steps: tuple[TimelineStep, ...]
    policy: RolloutPolicy
    observations: Observations | None
    end: ActionKind | None


def build_timeline(endpoint: str, entries: Sequence[LedgerEntry]) -> RolloutTimeline | None:
    """The endpoint's last rollout that had a step before its last one; None if there was none."""
    state, found = ReleaseState(endpoint=endpoint), None
    for entry in entries:
        action = _done(state, entry)
        state = apply_entry(state, entry)
        if action is not None and action.kind is ActionKind.START and action.roles.candidate is not None:
            found = RolloutTimeline(
                candidate=action.roles.candidate,
                stable=action.roles.stable,
                steps=(_step(entry, action),),
                policy=state.policy,
                observations=state.observations,
                end=None,
            )
        elif found is not None and found.end is None:
            done = action is not None and action.kind in _STORY
            steps = [_step(entry, action)] if action is not None and done else _said(entry)
            found = replace(
                found,
                steps=(*found.steps, *steps),
                policy=state.policy,
                observations=state.observations or found.observations,
                end=action.kind if action is not None and done and state.roles.candidate is None else None,
            )
    return found


def _done(before: ReleaseState, entry: LedgerEntry) -> Action | None:
    """The action that this entry says was done, if it counts."""
    body, opened = entry.body, before.open_intent
    if isinstance(body, ActionOutcome) and body.ok and isinstance(opened, Intent) and body.of == before.generation:
        return opened.action
    return None


def _step(entry: LedgerEntry, action: Action) -> TimelineStep:
    candidate = action.roles.candidate
    percent = None if candidate is None else action.state.split.weights.get(candidate.name, 0)
    return TimelineStep(at=entry.at, actor=entry.actor, what=action.kind.value, why=action.why, percent=percent)


def _said(entry: LedgerEntry) -> list[TimelineStep]:
    body = entry.body
    if isinstance(body, OperatorCommandSent):
        what, why = f"operator says {body.command.value}", body.reason
    elif isinstance(body, ActionOutcome) and not body.ok:
        what, why = "failed", body.detail
    elif body.kind == "rollout-paused":
        what, why = body.wait.value, body.why
    else:
        return []
    return [TimelineStep(at=entry.at, actor=entry.actor, what=what, why=why)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout in progress. `step` indexes `steps`; `seconds` is how long it has been there.

    `judged` and `evidence` are None and empty where no figures decide, or none could be read. `next` says in one line
    what the next step of a driver would do, or what is waited for.
    """

    endpoint: str
    stable: str
    candidate: str
    step: int
    steps: tuple[PlannedStep, ...]
    seconds: float
    next: str
    judged: AnalysisResult | None = None
    evidence: tuple[EvidencePath, ...] = ()


def read_rollout_view(ports: Ports, endpoint: str) -> RolloutView | None:
    """None if no rollout is in progress. Asks the endpoint and its metrics, never the registry.

    Raises:
        NotFoundError: no pipeline has bound this endpoint.
    """
    journal = Journal.open(ports, endpoint)
    config, state = journal.config, journal.state
    stable, candidate = state.roles.stable, state.roles.candidate
    if stable is None or candidate is None:
        return None
    from onnx_ops.statistics.rollout.judge import judge, trace_guardrails

    seen = read_metrics(journal)
    actual = ports.provider(config.provider).observe(config)
    move = choose_action(journal, DesiredState(wanted=candidate), actual, seen)
    found = seen.observations
    began = state.observations.started_at if state.observations is not None else ports.clock.now()
    return RolloutView(
        endpoint=endpoint,
        stable=stable.name,
        candidate=candidate.name,
        step=state.roles.step,
        steps=state.policy.planned(),
        seconds=max(0.0, ports.clock.now() - began),
        next=f"next: {move.why}" if isinstance(move, Action) else move.why,
        judged=None if found is None else judge(found, state.policy),
        evidence=() if found is None else trace_guardrails(found, state.policy),
    )


def render_pending_metrics(ports: Ports) -> str:
    """Rollbacks and deletions that are owed, in Prometheus' text format: 0 where nothing is.

    Raises:
        ServiceUnavailableError: the ledger does not answer.
    """
    now = ports.clock.now()
    states = [read_readable_state(ports, name) for name in list_bound_endpoints(ports)]
    rollbacks = {s.endpoint: max(0.0, now - s.pending_rollback.at) if s.pending_rollback else 0.0 for s in states}
    return "".join(
        (
            *_gauge("onnx_ops_rollback_owed_seconds", "Age of the rollback that is owed.", rollbacks),
            *_gauge(
                "onnx_ops_rollback_failed_attempts",
                "Attempts to roll back that failed.",
                {s.endpoint: s.pending_rollback.attempts if s.pending_rollback else 0 for s in states},
            ),
            *_gauge(
                "onnx_ops_deletion_owed",
                "Whether the endpoint is still to be deleted.",
                {s.endpoint: int(s.deleting) for s in states},
            ),
        )
    )


def _gauge(name: str, text: str, values: dict[str, float] | dict[str, int]) -> list[str]:
    samples = [f"{name}{{endpoint={json.dumps(endpoint)}}} {value:g}\n" for endpoint, value in sorted(values.items())]
    return [f"# HELP {name} {text}\n# TYPE {name} gauge\n", *samples]
