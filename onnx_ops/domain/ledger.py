"""The ledger: its entries, and the fold of an endpoint's entries into its state.

Every entry is a fact in the past: what was decided, requested, done or counted. A `ReleaseState` is
always the fold of entries, so that every process that reads the same entries has the same state.
The stored `kind` of an entry selects the type of `EntryBody`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, assert_never

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Envelope
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.domain.release import VersionRecord
from onnx_ops.domain.rollout import Action, ActionKind, OperatorCommand, Roles, WaitKind
from onnx_ops.domain.rollout_observations import (
    GenerationUnits,
    LatencyThresholds,
    MetricsReading,
    Observations,
)
from onnx_ops.domain.rollout_policy import RolloutPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOrigin:
    """The origin of a ledger: the project's name, and the place of its ledgers.

    `keys` are the release keys whose signatures are valid from the first entry on: public keys in
    base64 of DER, by digest.
    """

    project: str
    place: str
    keys: Mapping[Digest, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointBound:
    """The endpoint was bound, or its options or policy changed.

    An endpoint is bound to a model, a target and a provider. In the first entry of a ledger,
    `origin` names where the ledger was begun.
    """

    kind: Literal["endpoint-bound"] = "endpoint-bound"
    config: EndpointConfig
    policy: RolloutPolicy
    origin: LedgerOrigin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAdopted:
    """From this entry on, signatures by `keys` are valid, and `state` applies.

    With `state` None, the state is unchanged. Otherwise, the holder of a key vouches for `state`,
    so earlier entries need not be verifiable any more. For example, their key was retired or
    stolen, or they are damaged or were never signed.
    """

    kind: Literal["ledger-adopted"] = "ledger-adopted"
    keys: Mapping[Digest, str]
    state: ReleaseState | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasSelection:
    """An alias of the registry selects a version.

    `seen_at` is when a reconciler first read the alias on this version.
    """

    alias: str
    version: str
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """`holder` is about to perform the action.

    The intent is the lease of the endpoint until it expires or has an outcome. `selected` is the
    alias that requested the action; None if no alias requested it.
    """

    kind: Literal["intent"] = "intent"
    action: Action
    holder: str
    expires_at: float
    selected: AliasSelection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSelected:
    """An alias selects a version whose rollout has not started yet."""

    kind: Literal["version-selected"] = "version-selected"
    selected: AliasSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """The holder of the intent in entry `of` is still working.

    This entry has an effect only while that intent is open.
    """

    kind: Literal["lease-renewed"] = "lease-renewed"
    of: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """The outcome of the intent or the refusal in entry `of`.

    The action succeeded (`ok`), or failed for the reason `detail`.
    """

    kind: Literal["outcome"] = "outcome"
    of: int
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequested:
    """A request to move all traffic back to one version, as `action` describes.

    The versions that the action rejects are rejected from this entry on.

    An outcome which confirms that the endpoint was observed in the requested state completes the
    rollback. While it is pending, an operator can withdraw it. `by_operator` is False if the
    reconciler decided the rollback, for example because of metrics.
    """

    kind: Literal["rollback-requested"] = "rollback-requested"
    action: Action
    by_operator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWithdrawn:
    """An operator withdrew the pending rollback or deletion.

    The rejections of a withdrawn rollback are withdrawn, too.
    """

    kind: Literal["request-withdrawn"] = "request-withdrawn"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommandSent:
    """An operator sent a command to the rollout in progress."""

    kind: Literal["operator-command"] = "operator-command"
    command: OperatorCommand
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasesWritten:
    """The registry shows these aliases; a process wrote them or found them there.

    None marks a deleted alias.
    """

    kind: Literal["aliases-written"] = "aliases-written"
    aliases: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRefused:
    """An alias pointed to a version that is not allowed to serve.

    An `ActionOutcome` follows once the alias no longer points to the version. `restored_to` is the
    version that the alias gets instead; None deletes the alias.
    """

    kind: Literal["version-refused"] = "version-refused"
    alias: str
    version: str
    reason: str
    restored_to: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeft:
    """A run skipped the promotion of `version`, which was promoted before.

    Version `serving` has replaced this version since its promotion.
    """

    kind: Literal["release-left"] = "release-left"
    version: str
    serving: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecorded:
    """A person allowed this version to serve, regardless of its gates and history.

    The person gave a reason.

    `signed` names the files and the target; the other fields repeat the content of `signed` for
    readers.
    """

    kind: Literal["override-recorded"] = "override-recorded"
    release: Digest
    manifest: Digest
    version: str
    reason: str
    signed: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDeleted:
    """The deletion of the endpoint was requested, and completed if `done`.

    After the deletion is complete, the name can be bound again.
    """

    kind: Literal["endpoint-deleted"] = "endpoint-deleted"
    reason: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAbandoned:
    """The endpoint was unbound; its deployments at `place` keep running.

    The name of the endpoint can be bound again elsewhere.
    """

    kind: Literal["endpoint-abandoned"] = "endpoint-abandoned"
    reason: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdsFixed:
    """Latency thresholds for the rollout of `candidate` (its manifest).

    They were computed before the candidate got any request. `thresholds` apply to the stable
    version and `slower` to the candidate. Both are None if there were too few requests, or if the
    metrics source lacks latencies.
    """

    kind: Literal["thresholds-fixed"] = "thresholds-fixed"
    candidate: Digest
    thresholds: LatencyThresholds | None
    slower: LatencyThresholds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecorded:
    """Counts of the rollout in progress from a metrics source.

    Any process can continue from the last recorded reading.
    """

    kind: Literal["metrics-recorded"] = "metrics-recorded"
    reading: MetricsReading


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPaused:
    """The rollout waits for an operator.

    A further entry follows only after an operator's command, or if the step or the kind of wait
    changes.
    """

    kind: Literal["rollout-paused"] = "rollout-paused"
    wait: WaitKind
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWrittenOff:
    """An operator declared that a silent server of the endpoint has ended permanently.

    No rollback waits for this server until it reports again.
    """

    kind: Literal["server-written-off"] = "server-written-off"
    server: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationSent:
    """This notifier has no more notifications to send of the entries up to `of`.

    It has sent them. When a notifier is first used, older notifications are omitted.
    """

    kind: Literal["notification-sent"] = "notification-sent"
    notifier: str
    of: int


EntryBody = (
    EndpointBound
    | LedgerAdopted
    | VersionSelected
    | Intent
    | RollbackRequested
    | RequestWithdrawn
    | ActionOutcome
    | OperatorCommandSent
    | AliasesWritten
    | VersionRefused
    | ReleaseLeft
    | OverrideRecorded
    | EndpointDeleted
    | EndpointAbandoned
    | ThresholdsFixed
    | MetricsRecorded
    | RolloutPaused
    | NotificationSent
    | LeaseRenewed
    | ServerWrittenOff
)


LEDGER_SCHEMA = 2

FOLD_VERSION = 6
"""Version of `fold`; snapshots of another version are not used.

Increase it whenever the same entries imply another state.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One entry of a ledger.

    `sequence` counts from 1. Entries can be missing only before an adoption that sets the state.
    `at` is in seconds since the epoch.
    """

    schema: int = LEDGER_SCHEMA
    endpoint: str
    sequence: int
    at: float
    actor: str
    body: EntryBody


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRollback:
    """A rollback that was requested in entry `sequence` and is not carried out yet.

    `attempts` counts the failed attempts; the last one failed with `error`. `rejected_before` is
    restored if the rollback is withdrawn.
    """

    sequence: int
    at: float
    actor: str
    action: Action
    by_operator: bool
    rejected_before: Mapping[Digest, str]
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """The state of an endpoint.

    Times are in seconds since the epoch. Sequences are the sequences of ledger entries.

    Attributes:
        endpoint: name of the endpoint.
        head: sequence of the last entry.
        keys: release keys whose signatures are valid; if there are none, the keys that a reader
            trusts are valid.
        adopted: sequence of the last entry that set the state. Earlier entries have no effect on
            the state.
        config: what the endpoint is bound to; None if it is not bound.
        policy: policy of its rollouts.
        roles: deployments by role.
        stable_since: when the release of the stable version got all traffic; 0 without one.
        selected: the version that an alias selected last; None after a rollback was requested.
        left: the version whose promotion a run skipped last.
        open_intent: the action in progress.
        generation: sequence of the last intent, open or closed, or of a later requested rollback.
            It orders the effects on the endpoint.
        decision_sequence: sequence of the entry that decided the last action: its intent, or the
            request of the rollback. An intent that replaces an open intent with the same action
            does not change it.
        command: the operator's command that is not carried out yet, from entry `command_sequence`.
        pending_aliases: aliases that are not yet written to the registry.
        aliases: registry aliases as last written.
        published_sequence: sequence of the last `AliasesWritten`: the registry shows the entries up
            to it.
        latest_release: the release that was started last, at `latest_release_at`.
        rejected: reason of each rejection, by release, or by manifest where only one version is
            rejected.
        unpublished_rejections: versions whose rejection changed since the last write to the
            registry.
        overrides: overrides by manifest. An override lifts a rejection only after a reader has
            verified it.
        used_overrides: digests of all overrides ever recorded. Such an override has no effect if it
            is recorded again, for example after a rollback.
        known: every deployment that took traffic, or possibly did, by version.
        stables: manifests of all versions that served as stable.
        deleting: whether a deletion of the endpoint was requested; no other action is allowed then.
        pending_rollback: the rollback to carry out. It takes precedence over everything except a
            deletion.
        last_rollback: the abort or rollback with rejections that took effect last, until a rollout
            starts or another version becomes stable.
        thresholds: the thresholds that were fixed last.
        observations: counts of the rollout in progress.
        open_refusal: the refusal in entry `refusal_sequence` whose alias is not reverted yet.
        pause: the reason for which the rollout waits for an operator.
        notified: `of` in the last `NotificationSent` of each notifier.
        written_off: servers that were declared gone, with the reason. A server that reports again
            stays among these, although rollbacks wait for it.
    """

    endpoint: str
    head: int = 0
    keys: Mapping[Digest, str] = field(default_factory=dict)
    adopted: int = 0
    config: EndpointConfig | None = None
    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    roles: Roles = field(default_factory=Roles)
    stable_since: float = 0.0
    selected: AliasSelection | None = None
    left: ReleaseLeft | None = None
    open_intent: Intent | None = None
    generation: int = 0
    decision_sequence: int = 0
    command: OperatorCommand | None = None
    command_sequence: int = 0
    pending_aliases: Mapping[str, str | None] = field(default_factory=dict)
    aliases: Mapping[str, str | None] = field(default_factory=dict)
    published_sequence: int = 0
    latest_release: Digest | None = None
    latest_release_at: float = 0.0
    rejected: Mapping[Digest, str] = field(default_factory=dict)
    unpublished_rejections: frozenset[str] = frozenset()
    overrides: Mapping[Digest, OverrideRecorded] = field(default_factory=dict)
    used_overrides: frozenset[Digest] = frozenset()
    known: Mapping[str, Deployment] = field(default_factory=dict)
    stables: frozenset[Digest] = frozenset()
    deleting: bool = False
    pending_rollback: PendingRollback | None = None
    last_rollback: Action | None = None
    thresholds: ThresholdsFixed | None = None
    observations: Observations | None = None
    open_refusal: VersionRefused | None = None
    refusal_sequence: int = 0
    pause: RolloutPaused | None = None
    notified: Mapping[str, int] = field(default_factory=dict)
    written_off: Mapping[str, str] = field(default_factory=dict)

    def find_rejection(self, deployment: Deployment | VersionRecord) -> str | None:
        """Return why this version must not return automatically; None if it can."""
        return self.rejected.get(deployment.release, self.rejected.get(deployment.manifest))


def fold(endpoint: str, entries: Iterable[LedgerEntry]) -> ReleaseState:
    """Return the state that the entries imply.

    The same entries always give the same state.

    Raises:
        ValueError: an entry belongs to another endpoint, or does not follow the entry before it. An
            adoption that sets the state can follow any earlier entry.
    """
    state = ReleaseState(endpoint=endpoint)
    for entry in entries:
        state = apply_entry(state, entry)
    return state


def apply_entry(state: ReleaseState, entry: LedgerEntry) -> ReleaseState:
    """Return the state after one more entry.

    Raises:
        ValueError: the entry does not follow the last one, or belongs to another endpoint. An
            adoption that sets the state can follow any earlier entry.
    """
    after, body = state, entry.body
    if entry.endpoint != state.endpoint or not _follows(state, entry):
        raise ValueError(
            f"entry {entry.sequence} of {entry.endpoint} cannot follow entry {state.head} of "
            f"{state.endpoint}"
        )
    match body:
        case EndpointBound():
            keys = state.keys if body.origin is None else body.origin.keys
            after = replace(state, config=body.config, policy=body.policy, keys=keys)
        case LedgerAdopted():
            return _adopt(state, entry.sequence, body)
        case Intent():
            after = _open_intent(state, entry, body)
        case RollbackRequested():
            after = _request_rollback(state, entry, body)
        case RequestWithdrawn():
            after = _withdraw(state)
        case ActionOutcome():
            after = _close(state, body, entry.at)
        case OverrideRecorded():
            after = _record_override(state, body)
        case EndpointDeleted(done=False):
            after = replace(
                state, deleting=True, open_intent=None, command=None, pending_aliases={}
            )
        case EndpointDeleted() | EndpointAbandoned():
            after = _unbind(state, keeps_overrides=isinstance(body, EndpointAbandoned))
        case _:
            after = _record(state, entry.sequence, body)
    if after.rejected != state.rejected:
        changed = _list_changed_rejections(state, after)
        after = replace(after, unpublished_rejections=after.unpublished_rejections | changed)
    return replace(after, head=entry.sequence)


def _list_changed_rejections(before: ReleaseState, after: ReleaseState) -> set[str]:
    """Return the versions whose rejection differs between two states."""
    return {
        version
        for version, deployment in after.known.items()
        if after.find_rejection(deployment) != before.find_rejection(deployment)
    }


def _follows(state: ReleaseState, entry: LedgerEntry) -> bool:
    """Return whether an entry can be the next one.

    Entries before an adoption that sets the state can be missing.
    """
    if isinstance(entry.body, LedgerAdopted) and entry.body.state is not None:
        return entry.sequence > state.head
    return entry.sequence == state.head + 1


def _adopt(state: ReleaseState, sequence: int, body: LedgerAdopted) -> ReleaseState:
    """Return the state that an adoption sets, or the same state with other keys.

    The previous state has no effect on a state that an adoption sets.
    """
    if body.state is None:
        return replace(state, head=sequence, keys=body.keys)
    return replace(
        body.state, endpoint=state.endpoint, head=sequence, keys=body.keys, adopted=sequence
    )


def _withdraw(state: ReleaseState) -> ReleaseState:
    """Withdraw the pending deletion, or else the pending rollback with its rejections."""
    pending = state.pending_rollback
    if state.deleting or pending is None:
        return replace(state, deleting=False)
    # If an earlier attempt of the rollback has changed the endpoint, the next reconciliation
    # restores the endpoint.
    return replace(state, pending_rollback=None, open_intent=None, rejected=pending.rejected_before)


def _unbind(state: ReleaseState, *, keeps_overrides: bool) -> ReleaseState:
    """Return the initial state of a later endpoint with this name.

    The state keeps rejections, so that a version that failed here does not return. It keeps the
    generation, since generations only grow. It also keeps the keys, which overrides were used, what
    notifiers have sent and, with `keeps_overrides`, the overrides.
    """
    return ReleaseState(
        endpoint=state.endpoint,
        keys=state.keys,
        adopted=state.adopted,
        generation=state.generation,
        rejected=state.rejected,
        overrides=state.overrides if keeps_overrides else {},
        used_overrides=state.used_overrides,
        notified=state.notified,
    )


def _record_override(state: ReleaseState, body: OverrideRecorded) -> ReleaseState:
    """Record an override; a record that was used before has no effect."""
    if (digest := body.signed.digest()) not in state.used_overrides:
        overrides = {**state.overrides, body.manifest: body}
        return replace(state, overrides=overrides, used_overrides=state.used_overrides | {digest})
    return state


def _record(
    state: ReleaseState,
    sequence: int,
    body: OperatorCommandSent
    | AliasesWritten
    | VersionRefused
    | ThresholdsFixed
    | MetricsRecorded
    | RolloutPaused
    | NotificationSent
    | LeaseRenewed
    | VersionSelected
    | ReleaseLeft
    | ServerWrittenOff,
) -> ReleaseState:
    """Record an entry that changes neither roles nor rejections."""
    match body:
        case VersionSelected():
            after = replace(state, selected=body.selected)
        case ReleaseLeft():
            after = replace(state, left=body)
        case ServerWrittenOff():
            after = replace(state, written_off={**state.written_off, body.server: body.reason})
        case OperatorCommandSent():
            # RESUME removes the earlier command, so that the guardrails decide again.
            command = None if body.command is OperatorCommand.RESUME else body.command
            after = replace(state, command=command, command_sequence=sequence, pause=None)
        case RolloutPaused():
            after = replace(state, pause=body)
        case NotificationSent():
            after = replace(state, notified={**state.notified, body.notifier: body.of})
        case LeaseRenewed():
            opened = state.open_intent
            if opened is not None and state.generation == body.of:
                opened = replace(opened, expires_at=body.expires_at)
            after = replace(state, open_intent=opened)
        case AliasesWritten():
            after = replace(
                state,
                pending_aliases={
                    k: v for k, v in state.pending_aliases.items() if k not in body.aliases
                },
                aliases={**state.aliases, **body.aliases},
                published_sequence=sequence,
                unpublished_rejections=frozenset(),
            )
        case VersionRefused():
            after = replace(state, open_refusal=body, refusal_sequence=sequence)
        case ThresholdsFixed():
            after = replace(state, thresholds=body)
        case MetricsRecorded():
            after = replace(state, observations=_count(state, body.reading))
        case _:
            assert_never(body)
    return after


def _count(state: ReleaseState, reading: MetricsReading) -> Observations | None:
    """Return the counts of the rollout in progress after one more reading."""
    counts, stable, candidate = state.observations, state.roles.stable, state.roles.candidate
    if counts is not None and state.open_intent is not None and reading.origin:
        # While an intent is open, the split can change at any moment. Then only a reading of a
        # source with generations can start an interval.
        return counts.reset_reading(counts.split_at)
    if counts is not None and stable is not None and candidate is not None:
        return counts.with_reading(reading, stable=stable.name, candidate=candidate.name)
    return counts


def _open_intent(state: ReleaseState, entry: LedgerEntry, intent: Intent) -> ReleaseState:
    """Open an intent.

    If another intent is open, the new intent replaces it, although the action of the replaced
    intent possibly changed the endpoint.
    """
    action = intent.action
    again = state.open_intent is not None and state.open_intent.action == action
    latest: dict[str, Any] = {}
    if action.kind in (ActionKind.FIRST, ActionKind.START, ActionKind.FINISH):
        new = action.roles.candidate or action.roles.stable
        latest = (
            {} if new is None else {"latest_release": new.release, "latest_release_at": entry.at}
        )
    return replace(
        state,
        selected=intent.selected or state.selected,
        open_intent=intent,
        generation=entry.sequence,
        decision_sequence=state.decision_sequence
        if again or state.pending_rollback is not None
        else entry.sequence,
        known=_known(state),
        **latest,
    )


def _request_rollback(
    state: ReleaseState, entry: LedgerEntry, body: RollbackRequested
) -> ReleaseState:
    """Record a requested rollback, and drop any open action.

    Earlier rejections are kept, except those of the version that becomes stable.
    """
    pending = state.pending_rollback
    return replace(
        state,
        selected=None,
        open_intent=None,
        generation=entry.sequence,
        decision_sequence=entry.sequence,
        known={**_known(state), **{d.version: d for d in body.action.state.deployments}},
        rejected=_rejected(state, body.action),
        overrides=_overrides(state, body.action),
        pending_rollback=PendingRollback(
            sequence=entry.sequence,
            at=entry.at,
            actor=entry.actor,
            action=body.action,
            by_operator=body.by_operator,
            rejected_before=state.rejected if pending is None else pending.rejected_before,
        ),
    )


def _close(state: ReleaseState, outcome: ActionOutcome, at: float) -> ReleaseState:
    """Close the open refusal or intent that the outcome names.

    The outcome of an intent that was replaced changes nothing.
    """
    if state.open_refusal is not None and outcome.of == state.refusal_sequence:
        return replace(state, open_refusal=None)
    opened = state.open_intent
    if opened is None or state.generation != outcome.of:
        return state
    if outcome.ok:
        return _complete(state, opened.action, at)
    # A failed action possibly changed the split, so no interval of counts may span the action.
    observations = None if state.observations is None else state.observations.reset_reading(at)
    pending = state.pending_rollback
    if pending is not None:
        pending = replace(pending, attempts=pending.attempts + 1, error=outcome.detail)
    return replace(state, open_intent=None, observations=observations, pending_rollback=pending)


def _complete(state: ReleaseState, action: Action, at: float) -> ReleaseState:
    """Close the open intent, and apply the roles of its action."""
    # While there is a candidate, a command stays in force after actions that keep the state. It
    # also stays in force after actions that were decided before the command.
    keeps_command = action.roles.candidate is not None and (
        action.kind in (ActionKind.RESTORE, ActionKind.RECONFIGURE)
        or state.command_sequence > state.decision_sequence
    )
    last_rollback = state.last_rollback
    if action.reject:
        last_rollback = action
    elif action.roles.stable != state.roles.stable or action.roles.candidate is not None:
        last_rollback = None
    return replace(
        state,
        open_intent=None,
        pending_rollback=None,
        last_rollback=last_rollback,
        roles=action.roles,
        stable_since=_find_stable_start(state, action, at),
        command=state.command if keeps_command else None,
        pending_aliases={**state.pending_aliases, **action.aliases},
        rejected=_rejected(state, action),
        overrides=_overrides(state, action),
        known=_known(state),
        stables=state.stables | {d.manifest for d in (action.roles.stable,) if d is not None},
        observations=_start_observations(state, action, at),
        pause=state.pause if action.roles == state.roles else None,
    )


def _find_stable_start(state: ReleaseState, action: Action, at: float) -> float:
    """Return when the release of the stable version got all traffic; 0 without one."""
    before, after = state.roles.stable, action.roles.stable
    if after is None:
        return 0.0
    return state.stable_since if before and before.release == after.release else at


def _rejected(state: ReleaseState, action: Action) -> Mapping[Digest, str]:
    """Return the rejections that apply once an action is decided.

    The version that the action makes stable is never rejected.
    """
    rejected = {**state.rejected, **dict.fromkeys(action.reject, action.why)}
    stable = action.roles.stable
    stable_digests = () if stable is None else (stable.release, stable.manifest)
    return {digest: why for digest, why in rejected.items() if digest not in stable_digests}


def _overrides(state: ReleaseState, action: Action) -> Mapping[Digest, OverrideRecorded]:
    """Return the overrides that remain once an action is decided.

    Overrides of releases and versions that the action rejects are removed.
    """
    items = state.overrides.items()
    return {
        manifest: given
        for manifest, given in items
        if not {manifest, given.release} & set(action.reject)
    }


def _known(state: ReleaseState) -> Mapping[str, Deployment]:
    """Return every deployment that took traffic, or possibly did.

    The deployments of the open intent are included.
    """
    if state.open_intent is None:
        return state.known
    return {**state.known, **{d.version: d for d in state.open_intent.action.state.deployments}}


def _start_observations(state: ReleaseState, action: Action, at: float) -> Observations | None:
    """Return the counts of the candidate after an action; None without a candidate.

    The counts of a new candidate start at zero, with the thresholds that were fixed for it.
    """
    candidate, step = action.roles.candidate, action.roles.step
    if candidate is None:
        return None
    observations = state.observations
    if observations is None or observations.candidate != candidate.manifest:
        observations = Observations(
            candidate=candidate.manifest, step=step, started_at=at, split_at=at
        )
        fixed = state.thresholds
        if fixed is not None and fixed.candidate == candidate.manifest:
            observations = replace(
                observations, thresholds=fixed.thresholds, slower=fixed.slower or fixed.thresholds
            )
    split = GenerationUnits(
        generation=state.generation,
        step=step,
        percent=action.state.split.weights.get(candidate.name, 0),
        is_drawn=action.state.split.epoch_s > 0,
    )
    return observations.move_to_step(split, at)
