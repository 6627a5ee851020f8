"""Read the status of endpoints.

The status consists of the versions that endpoints serve, their history, their rollouts, and metrics
of pending operations.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from onnx_ops.domain.artifact import short_digest
from onnx_ops.domain.endpoint import Deployment, EndpointServer, EndpointState
from onnx_ops.domain.ledger import (
    ActionOutcome,
    AliasesWritten,
    AliasSelection,
    EndpointAbandoned,
    EndpointBound,
    EndpointDeleted,
    EntryBody,
    Intent,
    LeaseRenewed,
    LedgerAdopted,
    LedgerEntry,
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
    apply_entry,
)
from onnx_ops.domain.rollout import Action, ActionKind, AnalysisResult, ServerOutlier
from onnx_ops.domain.rollout_observations import LatencyThresholds, Observations
from onnx_ops.domain.rollout_policy import LATENCY_QUANTILES, PlannedStep, RolloutPolicy
from onnx_ops.errors import CorruptStateError, NotFoundError, OnnxOpsError
from onnx_ops.ports import Context, EndpointProvider
from onnx_ops.release.endpoint_calls import call_each
from onnx_ops.release.journal import Journal, list_bound_endpoints, read_readable_state
from onnx_ops.release.reconcile import MetricsSnapshot, choose_action, read_metrics
from onnx_ops.release.registry_sync import DesiredState

_TIMELINE = (
    ActionKind.START,
    ActionKind.ADVANCE,
    ActionKind.FINISH,
    ActionKind.ABORT,
    ActionKind.ROLLBACK,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """The state of an endpoint in the ledger and at its provider.

    `actual` is None if the provider cannot observe a state (see `EndpointProvider.observe`).
    `unsupervised` is true if clients still get answers in this case. `servers` are the servers that
    report separately. `outliers` are servers whose requests fail, or are slow, more often than
    those of the other servers.
    """

    state: ReleaseState
    actual: EndpointState | None
    address: str | None
    unsupervised: bool = False
    servers: tuple[EndpointServer, ...] = ()
    outliers: tuple[ServerOutlier, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One ledger entry in a form for operators and auditors.

    `at` is ISO 8601 in UTC. `kind` is the kind of the entry, or of the action that an intent
    begins. For an intent, `versions` are the deployments by role after its action. `traffic` has
    the shares of the deployments in percent; it is empty if the action failed. For other entries,
    both are empty.
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
    """A selection of endpoints and entries.

    An unset field does not restrict the selection. `since` is in seconds since the epoch. `limit`
    is the maximum number of entries; the newest are selected.
    """

    endpoints: tuple[str, ...] = ()
    model: str = ""
    target: str = ""
    actor: str = ""
    since: float = 0.0
    limit: int | None = None
    traffic: bool = False
    """Whether to select only entries that change the shares of an endpoint's traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout in progress.

    `stable` and `candidate` are names of deployments. `step` is an index of `steps`, and `seconds`
    is the time since the step began. `judged` is None without analysis or readable metrics. `next`
    describes in one line the next action of a reconciliation, or why it waits.
    """

    endpoint: str
    stable: str
    candidate: str
    step: int
    steps: tuple[PlannedStep, ...]
    seconds: float
    next: str
    judged: AnalysisResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One action, command, failure or pause of a rollout.

    `at` is in seconds since the epoch. `percent` is the candidate's share of traffic after an
    action; None for a command, a failure or a pause, or if there is no candidate afterwards.
    """

    at: float
    actor: str
    what: str
    why: str
    percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimeline:
    """A rollout from its start, with its counts after each reading.

    `end` is the action that ended the rollout; None while it is in progress.
    """

    candidate: Deployment
    stable: Deployment | None
    steps: tuple[TimelineStep, ...]
    policy: RolloutPolicy
    history: tuple[Observations, ...]
    end: ActionKind | None


def read_status(context: Context, endpoint: str) -> EndpointStatus:
    """Return the status of an endpoint.

    Raises:
        NotFoundError: no pipeline has bound the endpoint.
        CorruptStateError: the ledger is damaged.
        ServiceUnavailableError, RefusedError: the provider does not answer, or denies access.
    """
    return observe_status(Journal.open(context, endpoint))


def observe_status(journal: Journal) -> EndpointStatus:
    """Return the status of the endpoint of a journal, whose ledger is not read again."""
    config = journal.config
    provider = journal.context.provider(config.provider)
    actual = provider.observe(config)
    servers = tuple(provider.list_servers(config))
    return EndpointStatus(
        state=journal.state,
        actual=actual,
        address=provider.address(config),
        unsupervised=actual is None and provider.is_unsupervised(config),
        servers=servers,
        outliers=_compare_servers(provider, journal, servers),
    )


def _compare_servers(
    provider: EndpointProvider, journal: Journal, servers: Sequence[EndpointServer]
) -> tuple[ServerOutlier, ...]:
    """Return the reporting servers whose requests fail or are slow more often."""
    reporting = [server.name for server in servers if server.state == "reports"]
    roles = journal.state.roles
    deployments = {role.name for role in (roles.stable, roles.candidate) if role is not None}
    if len(reporting) < 2 or not deployments:
        return ()
    # Only endpoints with several servers need the statistics, so they are imported here.
    from onnx_ops.statistics.rollout.outliers import find_outliers

    return find_outliers(provider.count_by_server(journal.config, reporting, deployments))


def read_statuses(
    context: Context, endpoints: Sequence[str]
) -> tuple[tuple[EndpointStatus, ...], dict[str, OnnxOpsError]]:
    """Return the status of each readable endpoint, and errors of others by name."""
    statuses, errors = call_each(endpoints, lambda name: read_status(context, name))
    return tuple(statuses.values()), errors


def filter_endpoints(context: Context, selection: HistoryFilter) -> tuple[str, ...]:
    """Return the selected endpoints that are bound.

    Endpoints whose binding is unknown because of a damaged ledger are included.

    Raises:
        NotFoundError: a named endpoint is not bound.
        CorruptStateError: the ledger of a named endpoint is damaged.
    """
    for name in selection.endpoints:
        Journal.open(context, name).config  # noqa: B018 (raises NotFoundError for an unknown name)
    names = selection.endpoints or list_bound_endpoints(context)
    configs = {name: read_readable_state(context, name).config for name in names}
    model, target = selection.model, selection.target
    return tuple(
        name for name, config in configs.items() if config is None or config.serves(model, target)
    )


def read_history(
    context: Context, selection: HistoryFilter
) -> tuple[tuple[HistoryLine, ...], dict[str, CorruptStateError]]:
    """Return entries of ledgers, oldest first.

    The history includes deleted endpoints, and models without endpoints. For a damaged ledger, the
    entries before the damage are returned. The second result has the errors of damaged ledgers by
    endpoint.

    Raises:
        NotFoundError: a named endpoint has no history.
    """
    entries: list[LedgerEntry] = []
    errors: dict[str, CorruptStateError] = {}
    for name in selection.endpoints or context.ledger.endpoints():
        ledger_entries, error = _read_ledger(context, name)
        if selection.endpoints and not ledger_entries and error is None:
            known = ", ".join(context.ledger.endpoints()) or "none"
            raise NotFoundError(
                "there is no endpoint of this name", where=name, remedy=f"Known: {known}."
            )
        if not _is_selected(name, ledger_entries, selection, is_damaged=error is not None):
            continue
        if error is not None:
            errors[name] = error
        entries += [
            e
            for e in ledger_entries
            if e.at >= selection.since and selection.actor in ("", e.actor)
        ]

    entries.sort(key=lambda entry: (entry.at, entry.endpoint, entry.sequence))
    lines = build_lines(entries)
    if selection.traffic:
        lines = list(_select_traffic_changes(lines))
    return tuple(lines[-selection.limit :] if selection.limit else lines), errors


def read_rollout_view(context: Context, endpoint: str) -> RolloutView | None:
    """Return the rollout in progress, or None.

    The function reads the endpoint and its metrics, but not the registry.

    Raises:
        NotFoundError: no pipeline has bound this endpoint.
    """
    journal = Journal.open(context, endpoint)
    config, roles = journal.config, journal.state.roles
    if roles.stable is None or roles.candidate is None:
        return None
    snapshot = read_metrics(journal)
    observed = context.provider(config.provider).observe(config)
    return describe_rollout(journal, observed, snapshot)


def describe_rollout(
    journal: Journal, observed: EndpointState | None, snapshot: MetricsSnapshot
) -> RolloutView | None:
    """Return the rollout in progress as the endpoint and its metrics show it, or None.

    The endpoint and its metrics are not read again.
    """
    from onnx_ops.statistics.rollout.judge import judge

    state, now = journal.state, journal.context.clock.now()
    stable, candidate = state.roles.stable, state.roles.candidate
    if stable is None or candidate is None:
        return None
    action = choose_action(journal, DesiredState(deployment=candidate), observed, snapshot)
    counts = snapshot.observations
    return RolloutView(
        endpoint=state.endpoint,
        stable=stable.name,
        candidate=candidate.name,
        step=state.roles.step,
        steps=state.policy.planned(),
        seconds=max(0.0, now - state.observations.started_at)
        if state.observations is not None
        else 0.0,
        next=f"next: {action.why}" if isinstance(action, Action) else action.why,
        judged=None if counts is None else judge(counts, state.policy),
    )


def build_timeline(endpoint: str, entries: Sequence[LedgerEntry]) -> RolloutTimeline | None:
    """Return the endpoint's last rollout whose start was completed, or None.

    `entries` are all entries of the endpoint's ledger, oldest first.
    """
    state, timeline = ReleaseState(endpoint=endpoint), None
    for entry in entries:
        # The outcome of an action closes its intent, so the action is read before the entry is
        # applied.
        action = _find_completed(state, entry.body)
        state = apply_entry(state, entry)
        if (
            action is not None
            and action.kind is ActionKind.START
            and action.roles.candidate is not None
        ):
            timeline = RolloutTimeline(
                candidate=action.roles.candidate,
                stable=action.roles.stable,
                steps=(_build_step(entry, action),),
                policy=state.policy,
                history=(),
                end=None,
            )
        elif timeline is not None and timeline.end is None:
            timeline = _extend_timeline(timeline, entry, action, state)
    return timeline


def render_pending_metrics(context: Context) -> str:
    """Return pending rollbacks and deletions in Prometheus' text format, for alerts.

    Raises:
        ServiceUnavailableError: the ledger does not answer.
    """
    now = context.clock.now()
    states = [read_readable_state(context, name) for name in list_bound_endpoints(context)]
    pending = {s.endpoint: s.pending_rollback for s in states}
    ages = {name: max(0.0, now - each.at) if each else 0.0 for name, each in pending.items()}
    attempts = {name: each.attempts if each else 0 for name, each in pending.items()}
    deletions = {s.endpoint: int(s.deleting) for s in states}
    gauges: tuple[tuple[str, str, Mapping[str, float]], ...] = (
        ("onnx_ops_rollback_pending_seconds", "Age of the pending rollback, or 0.", ages),
        ("onnx_ops_rollback_failed_attempts", "Failed attempts of the pending rollback.", attempts),
        ("onnx_ops_deletion_pending", "Whether a deletion of the endpoint is pending.", deletions),
    )
    return "".join(
        f"# HELP {name} {text}\n# TYPE {name} gauge\n"
        + "".join(
            f"{name}{{endpoint={json.dumps(key)}}} {value:g}\n"
            for key, value in sorted(values.items())
        )
        for name, text, values in gauges
    )


def _read_ledger(
    context: Context, name: str
) -> tuple[Sequence[LedgerEntry], CorruptStateError | None]:
    """Return the entries of a ledger, and its error if it is damaged.

    For a damaged ledger, the entries before the damage are returned.
    """
    try:
        return context.ledger.read(name), None
    except CorruptStateError as error:
        return context.ledger.read_intact(name), error


def _is_selected(
    name: str, entries: Sequence[LedgerEntry], selection: HistoryFilter, *, is_damaged: bool
) -> bool:
    """Return whether the ledger was ever about the selected model and target."""
    configs = [entry.body.config for entry in entries if isinstance(entry.body, EndpointBound)]
    if is_damaged and not configs:
        # The lost entries possibly contained the binding to the model.
        return True
    model, _, target = name.partition("@")
    if target:
        return selection.model in ("", model) and selection.target in ("", target)
    if not (selection.model or selection.target):
        return True
    return any(config.serves(selection.model, selection.target) for config in configs)


def build_lines(entries: Sequence[LedgerEntry]) -> list[HistoryLine]:
    """Return a line for each entry."""
    failed = {
        (e.endpoint, e.body.of)
        for e in entries
        if isinstance(e.body, ActionOutcome) and not e.body.ok
    }
    return [
        _build_line(entry, failed=(entry.endpoint, entry.sequence) in failed) for entry in entries
    ]


def _select_traffic_changes(lines: Iterable[HistoryLine]) -> Iterator[HistoryLine]:
    """Yield the lines that change the shares of their endpoint's traffic.

    The first line with traffic is included.
    """
    last: dict[str, Mapping[str, int]] = {}
    for line in lines:
        shares = {name: share for name, share in line.traffic.items() if share}
        if line.traffic and shares != last.get(line.endpoint):
            last[line.endpoint] = shares
            yield line


def _build_line(entry: LedgerEntry, *, failed: bool) -> HistoryLine:
    what, why = describe_entry(entry.body)
    action = entry.body.action if isinstance(entry.body, Intent) else None
    names = ("stable", "previous", "candidate")
    roles = {} if action is None else {role: getattr(action.roles, role) for role in names}
    return HistoryLine(
        endpoint=entry.endpoint,
        sequence=entry.sequence,
        at=datetime.datetime.fromtimestamp(entry.at, tz=datetime.UTC).isoformat(timespec="seconds"),
        actor=entry.actor,
        kind=entry.body.kind if action is None else action.kind.value,
        what=what,
        why=why,
        versions={role: deployment for role, deployment in roles.items() if deployment is not None},
        traffic={} if action is None or failed else dict(action.state.split.weights),
    )


def describe_entry(body: EntryBody) -> tuple[str, str]:
    """Return a description of an entry, and its reason."""
    why = ""
    match body:
        case EndpointBound() | LedgerAdopted() | EndpointDeleted() | EndpointAbandoned():
            what, why = _describe_ledger(body)
        case Intent():
            what, why = _describe_action(body.action), body.action.why
            if body.selected is not None:
                why = f"{why}; {_describe_selection(body.selected)}"
        case RollbackRequested():
            what, why = f"requested {_describe_action(body.action)}", body.action.why
        case ActionOutcome():
            what, why = f"{'done' if body.ok else 'failed'} (entry {body.of})", body.detail
        case OperatorCommandSent():
            what, why = f"operator command {body.command.value}", body.reason
        case AliasesWritten():
            aliases = ", ".join(
                f"{name} -> {version or 'none'}" for name, version in body.aliases.items()
            )
            what = f"registry: {aliases}"
        case VersionRefused():
            restored = f"restored to {body.restored_to}" if body.restored_to else "removed"
            what, why = (
                f"refused {body.alias} on version {body.version}, alias {restored}",
                body.reason,
            )
        case ReleaseLeft():
            what, why = (
                f"skipped version {body.version}",
                f"it was promoted before version {body.serving}, which serves",
            )
        case OverrideRecorded():
            what, why = f"override for version {body.version}", body.reason
        case RequestWithdrawn():
            what, why = "withdrew the pending request", body.reason
        case ServerWrittenOff():
            what, why = f"wrote off replica {body.server}", body.reason
        case _:
            what, why = _describe_record(body)
    return what, why


def _describe_ledger(
    body: EndpointBound | LedgerAdopted | EndpointDeleted | EndpointAbandoned,
) -> tuple[str, str]:
    """Return a description of an entry about the endpoint as a whole, and its reason."""
    match body:
        case EndpointBound():
            return (
                f"bound to {body.config.model} on {body.config.target}",
                f"pipeline {body.config.pipeline}",
            )
        case LedgerAdopted():
            what = "adopted the state" if body.state is not None else "changed the keys"
            return (
                f"{what}; accepted keys: {', '.join(map(short_digest, sorted(body.keys)))}",
                body.reason,
            )
        case EndpointDeleted():
            return "deleted" if body.done else "deletion requested", body.reason
        case EndpointAbandoned():
            return f"abandoned: {body.place}", body.reason
        case _:
            assert_never(body)


def _describe_selection(selected: AliasSelection) -> str:
    """Return which alias selects which version, and when this was first observed."""
    since = datetime.datetime.fromtimestamp(selected.seen_at, tz=datetime.UTC).isoformat(
        timespec="seconds"
    )
    return f"{selected.alias} selects version {selected.version}, first seen at {since}"


def _describe_record(
    body: RolloutPaused
    | NotificationSent
    | LeaseRenewed
    | MetricsRecorded
    | ThresholdsFixed
    | VersionSelected,
) -> tuple[str, str]:
    why = ""
    match body:
        case VersionSelected():
            what = _describe_selection(body.selected)
        case RolloutPaused():
            what, why = f"needs an operator ({body.wait.value})", body.why
        case NotificationSent():
            what = f"sent notifications by {body.notifier}, up to entry {body.of}"
        case LeaseRenewed():
            what = f"lease renewed (entry {body.of})"
        case MetricsRecorded():
            counts = sorted(body.reading.sum_tallies().items())
            what = "recorded metrics"
            why = ", ".join(
                f"{name}: {n.errors} of {n.requests} requests failed" for name, n in counts
            )
        case ThresholdsFixed():
            what, why = "set latency thresholds", _describe_thresholds(body)
        case _:
            assert_never(body)
    return what, why


def _describe_thresholds(body: ThresholdsFixed) -> str:
    def describe(thresholds: LatencyThresholds) -> str:
        return ", ".join(
            f"{name.removeprefix('latency_')} {limit_s * 1e3:.3g} ms"
            for name, limit_s in thresholds.by_guardrail().items()
            if name in LATENCY_QUANTILES
        )

    fixed = body.thresholds
    if fixed is None:
        return "none: too few requests, or the source lacks latencies"
    return (
        f"{describe(fixed)}, from {fixed.requests} requests; "
        f"candidate: {describe(body.slower or fixed)}"
    )


def _describe_action(action: Action) -> str:
    """Return an action's description: its kind, split, and change of stable version."""
    weights, stable = action.state.split.weights, action.roles.stable
    split = ", ".join(f"{name} {weight} %" for name, weight in weights.items())
    before = next((name for name, weight in weights.items() if not weight), None)
    if (
        action.kind in (ActionKind.FINISH, ActionKind.ROLLBACK)
        and stable is not None
        and before is not None
    ):
        return f"{action.kind.value} {before} -> {stable.name}: {split}"
    return f"{action.kind.value}: {split}"


def _find_completed(state: ReleaseState, body: EntryBody) -> Action | None:
    """Return the open action that an entry completes, or None."""
    if state.open_intent is None or not isinstance(body, ActionOutcome):
        return None
    # An outcome is ignored if another action has replaced its action.
    return state.open_intent.action if body.ok and body.of == state.generation else None


def _extend_timeline(
    timeline: RolloutTimeline, entry: LedgerEntry, action: Action | None, state: ReleaseState
) -> RolloutTimeline:
    """Return the timeline of a rollout in progress, extended by an entry.

    The entry completes `action`. If `action` is None, the entry can record a command, a failure, a
    pause or counts.
    """
    steps, end = _list_notes(entry), None
    if action is not None and action.kind in _TIMELINE:
        steps = [_build_step(entry, action)]
        end = action.kind if state.roles.candidate is None else None
    return replace(
        timeline,
        steps=(*timeline.steps, *steps),
        policy=state.policy,
        history=(*timeline.history, *_list_counts(entry.body, state.observations)),
        end=end,
    )


def _build_step(entry: LedgerEntry, action: Action) -> TimelineStep:
    candidate = action.roles.candidate
    percent = None if candidate is None else action.state.split.weights.get(candidate.name, 0)
    return TimelineStep(
        at=entry.at, actor=entry.actor, what=action.kind.value, why=action.why, percent=percent
    )


def _list_counts(body: EntryBody, observations: Observations | None) -> list[Observations]:
    """Return the counts after an entry that records a reading; empty for others."""
    return [observations] if isinstance(body, MetricsRecorded) and observations is not None else []


def _list_notes(entry: LedgerEntry) -> list[TimelineStep]:
    """Return the step of an entry that records a command, a failure or a pause."""
    match entry.body:
        case OperatorCommandSent(command=command, reason=why):
            what = f"operator command {command.value}"
        case ActionOutcome(ok=False, detail=why):
            what = "failed"
        case RolloutPaused(wait=wait, why=why):
            what = wait.value
        case _:
            return []
    return [TimelineStep(at=entry.at, actor=entry.actor, what=what, why=why)]
