"""What stands in a ledger: one kind of entry for everything that is decided, done, said or counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Envelope
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout import Action, RolloutPolicy, WaitKind, Word
from onnx_ops.domain.rollout_observed import Reading, Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
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
class Renewed:
    """Whoever holds the lease of the intent in entry `of` is still at it. Counts only while that intent is open."""

    kind: Literal["renewed"] = "renewed"
    of: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
class Withdrawn:
    """An operator takes back what is owed: a rollback with what it rejected, or a deletion."""

    kind: Literal["withdrawn"] = "withdrawn"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """An operator's word about a rollout that waits."""

    kind: Literal["word"] = "word"
    word: Word
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """The registry's aliases were made to say what the ledger says."""

    kind: Literal["mirrored"] = "mirrored"
    aliases: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedVersion:
    """An alias asked for a version that may not serve; the alias is put back, and an outcome says so."""

    kind: Literal["refused"] = "refused"
    alias: str
    version: str
    reason: str
    restored_to: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
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
class Deleted:
    """Somebody wants the endpoint gone; `done` once it is. The name may be bound again afterwards."""

    kind: Literal["deleted"] = "deleted"
    reason: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The endpoint is bound no longer, and what runs at `place` stays there. The name may be bound again, elsewhere."""

    kind: Literal["abandoned"] = "abandoned"
    reason: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """How fast the stable version was before `candidate` (its manifest) got any request, and how fast the candidate has
    to be. Written before the rollout starts; None if there were too few requests to tell. In ledgers without `slower`
    both versions have the same thresholds."""

    kind: Literal["frozen"] = "frozen"
    candidate: Digest
    thresholds: Thresholds | None
    slower: Thresholds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a source has counted of the rollout in progress. A driver goes on from the last reading of any other."""

    kind: Literal["observed"] = "observed"
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rollout does not go on without a person. Written once for each step and kind of wait."""

    kind: Literal["held"] = "held"
    wait: WaitKind
    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notified:
    """People were told, by this notifier, what the entries up to `of` call for."""

    kind: Literal["notified"] = "notified"
    notifier: str
    of: int


Body = (
    Configured
    | Intent
    | RollbackRequested
    | Withdrawn
    | Outcome
    | Spoken
    | Mirrored
    | RefusedVersion
    | Override
    | Deleted
    | Abandoned
    | Frozen
    | Observed
    | Held
    | Notified
    | Renewed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One line of the log. `sequence` counts from 1 without gaps; `at` is seconds since the epoch."""

    schema: int = 1
    endpoint: str
    sequence: int
    at: float
    actor: str
    body: Body
