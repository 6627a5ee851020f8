"""What stands in a ledger: one kind of entry for everything that is decided, done, said or counted.

The ledger's entries and the fold that turns them into the state of an endpoint.
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
from onnx_ops.domain.rollout_observations import LatencyThresholds, MetricsReading, Observations
from onnx_ops.domain.rollout_policy import RolloutPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointBound:
    """The endpoint is bound to a model, a target and a provider (again)."""

    kind: Literal["configured"] = "configured"
    config: EndpointConfig
    policy: RolloutPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """Somebody is about to do this. While it is open and young it is the lease of the endpoint."""

    kind: Literal["intent"] = "intent"
    action: Action
    holder: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """Whoever holds the lease of the intent in entry `of` is still at it. Counts only while that intent is open."""

    kind: Literal["renewed"] = "renewed"
    of: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """What became of the intent or the refusal in entry `of`."""

    kind: Literal["outcome"] = "outcome"
    of: int
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequested:
    """All traffic is to go back, as `action` says, and what that rejects is rejected from this entry on.

    It is owed until an outcome says that the endpoint was observed there, or until it is withdrawn. `by_hand` says that
    an operator asked for it, and neither figures nor the registry did.
    """

    kind: Literal["rollback-requested"] = "rollback-requested"
    action: Action
    by_hand: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWithdrawn:
    """An operator takes back what is owed: a rollback with what it rejected, or a deletion."""

    kind: Literal["withdrawn"] = "withdrawn"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCommandSent:
    """An operator's word about a rollout that waits."""

    kind: Literal["word"] = "word"
    word: OperatorCommand
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasesWritten:
    """The registry's aliases were made to say what the ledger says."""

    kind: Literal["mirrored"] = "mirrored"
    aliases: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRefused:
    """An alias asked for a version that may not serve; the alias is put back, and an outcome says so."""

    kind: Literal["refused"] = "refused"
    alias: str
    version: str
    reason: str
    restored_to: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecorded:
    """A person decided, with a reason, that this version may serve whatever its gates or history say.

    `signed` says which files on which target; the other fields repeat what it says, for readers.
    """

    kind: Literal["override"] = "override"
    release: Digest
    manifest: Digest
    version: str
    reason: str
    signed: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDeleted:
    """Somebody wants the endpoint gone; `done` once it is. The name may be bound again afterwards."""

    kind: Literal["deleted"] = "deleted"
    reason: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAbandoned:
    """The endpoint is bound no longer, and what runs at `place` stays there. The name may be bound again, elsewhere."""

    kind: Literal["abandoned"] = "abandoned"
    reason: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdsFixed:
    """How fast the stable version was before `candidate` (its manifest) got any request, and how fast the candidate has
    to be. Written before the rollout starts; None if there were too few requests to tell. In ledgers without `slower`
    both versions have the same thresholds."""

    kind: Literal["frozen"] = "frozen"
    candidate: Digest
    thresholds: LatencyThresholds | None
    slower: LatencyThresholds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecorded:
    """What a source has counted of the rollout in progress. A driver goes on from the last reading of any other."""

    kind: Literal["observed"] = "observed"
    reading: MetricsReading


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPaused:
    """A rollout does not go on without a person. Written once for each step and kind of wait."""

    kind: Literal["held"] = "held"
    wait: WaitKind
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationSent:
    """People were told, by this notifier, what the entries up to `of` call for."""

    kind: Literal["notified"] = "notified"
    notifier: str
    of: int


EntryBody = (
    EndpointBound
    | Intent
    | RollbackRequested
    | RequestWithdrawn
    | ActionOutcome
    | OperatorCommandSent
    | AliasesWritten
    | VersionRefused
    | OverrideRecorded
    | EndpointDeleted
    | EndpointAbandoned
    | ThresholdsFixed
    | MetricsRecorded
    | RolloutPaused
    | NotificationSent
    | LeaseRenewed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One line of the log. `sequence` counts from 1 without gaps; `at` is seconds since the epoch."""

    schema: int = 1
    endpoint: str
    sequence: int
    at: float
    actor: str
    body: EntryBody


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRollback:
    """A rollback that is owed: requested in entry `of`, at `at` in seconds since the epoch, by `actor`.

    `attempts` failed so far, the last one for the reason `error`. `rejected_before` is what was rejected before it, and
    counts again if it is withdrawn.
    """

    of: int
    at: float
    actor: str
    action: Action
    by_hand: bool
    rejected_before: Mapping[Digest, str]
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """The fold of an endpoint's entries.

    `generation` orders effects: the sequence of the last intent, open or closed. `pending_aliases` are
    registry writes that are still owed. `rejected` are releases, and single versions by manifest, that may not come
    back by themselves, with the reason; `untold` the versions of which that changed since the registry was told.
    `known` holds every deployment that may ever have taken traffic, by version.
    `word_at` is the sequence of the operator's word, `decided_at` that of the first intent to do what is open. `trial`
    is what was counted of the rollout in progress, `frozen` the last thresholds that were read for one.
    `overrides` are what persons said of versions, by manifest; whether they count is for the reader to verify, and
    until then what was rejected is. `overrides_taken` are all that ever were among them: after a rollback the same
    one counts no more.
    While `deleting`, nothing else may be done to the endpoint. `pending_rollback` comes before all but that.
    `rolled_back` is the rollback that took effect last, until another version has come.
    `refusing` is a refusal, written in entry `refused_at`, of which no outcome says yet that the alias was put back.
    `arrived` is the release that was begun last, at `arrived_at` in seconds since the epoch; `mirrored_at` the
    sequence of the last entry that tells of aliases. `held` is what the rollout waits for a person for. `notified_at`
    is the sequence up to which each notifier has told people.
    """

    endpoint: str
    head: int = 0
    config: EndpointConfig | None = None
    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    roles: Roles = field(default_factory=Roles)
    open_intent: Intent | None = None
    generation: int = 0
    decided_at: int = 0
    word: OperatorCommand | None = None
    word_at: int = 0
    pending_aliases: Mapping[str, str | None] = field(default_factory=dict)
    aliases: Mapping[str, str | None] = field(default_factory=dict)
    mirrored_at: int = 0
    arrived: Digest | None = None
    arrived_at: float = 0.0
    rejected: Mapping[Digest, str] = field(default_factory=dict)
    untold: frozenset[str] = frozenset()
    overrides: Mapping[Digest, OverrideRecorded] = field(default_factory=dict)
    overrides_taken: frozenset[Digest] = frozenset()
    known: Mapping[str, Deployment] = field(default_factory=dict)
    deleting: bool = False
    pending_rollback: PendingRollback | None = None
    rolled_back: Action | None = None
    frozen: ThresholdsFixed | None = None
    trial: Observations | None = None
    refusing: VersionRefused | None = None
    refused_at: int = 0
    held: RolloutPaused | None = None
    notified_at: Mapping[str, int] = field(default_factory=dict)

    def why_rejected(self, deployment: Deployment | VersionRecord) -> str | None:
        """Why this version may not come back by itself; None if it may."""
        return self.rejected.get(deployment.release, self.rejected.get(deployment.manifest))


def fold(endpoint: str, entries: Iterable[LedgerEntry]) -> ReleaseState:
    """The state that the entries imply. The same entries always give the same state.

    Raises:
        ValueError: the entries are not in sequence or belong to another endpoint.
    """
    state = ReleaseState(endpoint=endpoint)
    for entry in entries:
        state = apply_entry(state, entry)
    return state


def apply_entry(state: ReleaseState, entry: LedgerEntry) -> ReleaseState:
    """The state after one more entry.

    Raises:
        ValueError: the entry does not follow the last one, or belongs to another endpoint.
    """
    if entry.endpoint != state.endpoint or entry.sequence != state.head + 1:
        raise ValueError(f"entry {entry.sequence} of {entry.endpoint} cannot follow {state.head} of {state.endpoint}")
    after = _apply(state, entry)
    if after.rejected != state.rejected:
        changed = {v for v, d in after.known.items() if after.why_rejected(d) != state.why_rejected(d)}
        after = replace(after, untold=after.untold | changed)
    return replace(after, head=entry.sequence)


def _apply(state: ReleaseState, entry: LedgerEntry) -> ReleaseState:
    body = entry.body
    match body:
        case EndpointBound():
            return replace(state, config=body.config, policy=body.policy)
        case Intent():
            # What it overtakes may have reached the endpoint already.
            again = state.open_intent is not None and state.open_intent.action == body.action
            return replace(
                state,
                open_intent=body,
                generation=entry.sequence,
                decided_at=state.decided_at if again or state.pending_rollback is not None else entry.sequence,
                known=_known(state),
                **_arrival(body.action, entry.at),
            )
        case RollbackRequested():
            return _request(state, entry, body)
        case RequestWithdrawn():
            return _withdraw(state)
        case ActionOutcome():
            if state.refusing is not None and body.of == state.refused_at:
                return replace(state, refusing=None)
            return _close(state, body, entry.at)
        case OverrideRecorded() | EndpointDeleted() | EndpointAbandoned():
            return _take(state, body) if isinstance(body, OverrideRecorded) else _unbind(state, body)
        case _:
            return _noted(state, entry.sequence, body)


def _arrival(action: Action, at: float) -> dict[str, Any]:
    """What an action brings to its endpoint, if it brings something."""
    if action.kind not in (ActionKind.FIRST, ActionKind.START, ActionKind.FINISH):
        return {}
    comes = action.roles.candidate or action.roles.stable
    return {} if comes is None else {"arrived": comes.release, "arrived_at": at}


def _request(state: ReleaseState, entry: LedgerEntry, body: RollbackRequested) -> ReleaseState:
    """It overtakes whatever is open, and what a request before it rejected stays rejected."""
    known = _known(state)
    pending = state.pending_rollback
    return replace(
        state,
        open_intent=None,
        generation=entry.sequence,
        decided_at=entry.sequence,
        known={**known, **{d.version: d for d in body.action.state.deployments}},
        rejected=_rejected(state, body.action),
        overrides=_overrides(state, body.action),
        pending_rollback=PendingRollback(
            of=entry.sequence,
            at=entry.at,
            actor=entry.actor,
            action=body.action,
            by_hand=body.by_hand,
            rejected_before=state.rejected if pending is None else pending.rejected_before,
        ),
    )


def _withdraw(state: ReleaseState) -> ReleaseState:
    """What an attempt under way does to the endpoint is undone by the next reconciliation.

    A deletion comes first: a rollback that was owed before it is owed again.
    """
    pending = state.pending_rollback
    if state.deleting or pending is None:
        return replace(state, deleting=False)
    return replace(state, pending_rollback=None, open_intent=None, rejected=pending.rejected_before)


def _rejected(state: ReleaseState, action: Action) -> Mapping[Digest, str]:
    """What is rejected once an action is decided: what it rejects, and never what it leads to."""
    rejected = {**state.rejected, **dict.fromkeys(action.reject, action.why)}
    stable = action.roles.stable
    free = () if stable is None else (stable.release, stable.manifest)
    return {digest: why for digest, why in rejected.items() if digest not in free}


def _noted(
    state: ReleaseState,
    sequence: int,
    body: OperatorCommandSent
    | AliasesWritten
    | VersionRefused
    | ThresholdsFixed
    | MetricsRecorded
    | RolloutPaused
    | NotificationSent
    | LeaseRenewed,
) -> ReleaseState:
    """What was said, read or counted, and changes nothing by itself."""
    match body:
        case OperatorCommandSent():
            return replace(state, word=body.word, word_at=sequence, held=None)
        case RolloutPaused():
            return replace(state, held=body)
        case NotificationSent():
            return replace(state, notified_at={**state.notified_at, body.notifier: body.of})
        case LeaseRenewed():
            return _renew(state, body)
        case AliasesWritten():
            owed = {k: v for k, v in state.pending_aliases.items() if k not in body.aliases}
            told = {**state.aliases, **body.aliases}
            return replace(state, pending_aliases=owed, aliases=told, mirrored_at=sequence, untold=frozenset())
        case VersionRefused():
            return replace(state, refusing=body, refused_at=sequence)
        case ThresholdsFixed():
            return replace(state, frozen=body)
        case MetricsRecorded():
            return replace(state, trial=_observed(state, body.reading))
        case _:
            assert_never(body)


def _renew(state: ReleaseState, body: LeaseRenewed) -> ReleaseState:
    opened = state.open_intent
    if opened is None or state.generation != body.of:
        return state
    return replace(state, open_intent=replace(opened, expires_at=body.expires_at))


def _take(state: ReleaseState, body: OverrideRecorded) -> ReleaseState:
    """An override counts once: the same one means nothing after a rollback."""
    taken = body.signed.digest()
    if taken in state.overrides_taken:
        return state
    return replace(
        state,
        overrides={**state.overrides, body.manifest: body},
        overrides_taken=state.overrides_taken | {taken},
    )


def _overrides(state: ReleaseState, action: Action) -> Mapping[Digest, OverrideRecorded]:
    """The overrides that stand once an action is decided: none of what it rejects."""
    kept = state.overrides.items()
    return {manifest: given for manifest, given in kept if not {manifest, given.release} & set(action.reject)}


def _unbind(state: ReleaseState, body: EndpointDeleted | EndpointAbandoned) -> ReleaseState:
    if isinstance(body, EndpointDeleted) and not body.done:
        return replace(state, deleting=True, open_intent=None, word=None, pending_aliases={})
    # What is bound under this name later must not bring back what failed here, nor count generations from one again.
    return ReleaseState(
        endpoint=state.endpoint,
        generation=state.generation,
        rejected=state.rejected,
        overrides=state.overrides if isinstance(body, EndpointAbandoned) else {},
        overrides_taken=state.overrides_taken,
        notified_at=state.notified_at,
    )


def _close(state: ReleaseState, outcome: ActionOutcome, at: float) -> ReleaseState:
    """An outcome counts only for the intent that is open; one that was overtaken changes nothing."""
    opened = state.open_intent
    if opened is None or state.generation != outcome.of:
        return state
    if not outcome.ok:
        trial = None if state.trial is None else state.trial.split_again(at)
        pending = state.pending_rollback
        if pending is not None:
            pending = replace(pending, attempts=pending.attempts + 1, error=outcome.detail)
        return replace(state, open_intent=None, trial=trial, pending_rollback=pending)
    action = opened.action
    return replace(
        state,
        open_intent=None,
        pending_rollback=None,
        rolled_back=_rolled_back(state, action),
        roles=action.roles,
        word=state.word if _word_stands(state, action) else None,
        pending_aliases={**state.pending_aliases, **action.aliases},
        rejected=_rejected(state, action),
        overrides=_overrides(state, action),
        known=_known(state),
        trial=_trial(state, action.roles, at),
        held=state.held if action.roles == state.roles else None,
    )


def _rolled_back(state: ReleaseState, action: Action) -> Action | None:
    """The rollback that explains what serves now; other repairs leave it as it is."""
    if action.reject:
        return action
    return state.rolled_back if action.roles.stable == state.roles.stable and action.roles.candidate is None else None


def _trial(state: ReleaseState, roles: Roles, at: float) -> Observations | None:
    """The counts go with the candidate. A new one begins with the thresholds that were frozen for it."""
    if roles.candidate is None:
        return None
    candidate = roles.candidate.manifest
    if state.trial is not None and state.trial.candidate == candidate:
        return state.trial.at_step(roles.step, at)
    found = Observations(candidate=candidate, step=roles.step, began=at, split_at=at)
    frozen = state.frozen
    if frozen is None or frozen.candidate != candidate:
        return found
    return replace(found, thresholds=frozen.thresholds, slower=frozen.slower or frozen.thresholds)


def _observed(state: ReleaseState, reading: MetricsReading) -> Observations | None:
    """While an effect is under way the split may change at any moment: such a reading begins no interval."""
    trial, roles = state.trial, state.roles
    if trial is None or roles.stable is None or roles.candidate is None:
        return trial
    if state.open_intent is not None:
        return trial.split_again(trial.split_at)
    return trial.after(reading, stable=roles.stable.name, candidate=roles.candidate.name)


def _known(state: ReleaseState) -> Mapping[str, Deployment]:
    """Every deployment that may have taken traffic, those of the open intent among them."""
    if state.open_intent is None:
        return state.known
    return {**state.known, **{d.version: d for d in state.open_intent.action.state.deployments}}


def _word_stands(state: ReleaseState, action: Action) -> bool:
    """Whether the operator's word is still to be acted upon: the action was a repair, or decided before the word."""
    if action.roles.candidate is None:
        return False
    return action.kind is ActionKind.RESTORE or state.word_at > state.decided_at
