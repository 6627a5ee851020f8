"""The rule of what a signed decision allows. Pure: no store, no registry; both the reconciler and the registry's own
server judge by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from onnx_ops.attestation import is_about, read_envelope, verify_envelope
from onnx_ops.domain.artifact import Digest, short_digest
from onnx_ops.domain.attestation import (
    Attested,
    OverrideRecord,
    SignedOverride,
    override_reason_tag,
    override_record_tag,
)
from onnx_ops.domain.decision import DecisionRecord, SignedDecision, Verdict
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.ledger import ReleaseState
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import CorruptStateError, InvalidSignatureError, RefusedError
from onnx_ops.ports import Verifier

_ROLLED_BACK = "onnxops.rolled-back."

REJECTED_REMEDY = "Make a new release, or promote it with --override and a reason."


def require_passing_decision(
    record: VersionRecord, target: str, verifier: Verifier, *, others: Iterable[SignedDecision] = ()
) -> SignedDecision:
    """The decision that lets the version serve the target.

    Args:
        record: the version as the registry tells it.
        target: the target's name.
        verifier: knows the trusted keys.
        others: decisions found elsewhere, such as on another version with the same content. Those that are validly
            signed and about exactly this content and target count too: of all, the one with the highest sequence
            decides, and of several with the same sequence the worst. None of them can stand in for the version's own.

    Raises:
        RefusedError: there is none, or it is not a pass.
        InvalidSignatureError: it is forged, signed by a key that is not trusted, or about something else.
    """
    own = _own_decision(record, target, verifier)
    counted = [own, *(other for other in others if is_valid_for(other, record, target, verifier))]
    signed = max(counted, key=lambda found: (found.record.sequence, found.record.verdict.rank))
    decided = signed.record
    if decided.verdict is not Verdict.PASS:
        worst = ", ".join(f"{gate} {v.value}" for gate, v in decided.verdicts.items() if v is not Verdict.PASS)
        where = f"{record.model}/{record.version}"
        raise RefusedError(
            f"its gates on {target} ended {decided.verdict.value}",
            where=where,
            why=worst,
            remedy=f"See `onnx-ops explain {where} --target {target}`.",
        )
    return signed


def is_valid_for(signed: SignedDecision, record: VersionRecord, target: str, verifier: Verifier) -> bool:
    """Whether the decision is validly signed and about exactly this content and target."""
    try:
        about = verify_envelope(signed.envelope, DecisionRecord, verifier)
    except InvalidSignatureError:
        return False
    return is_about(about, record, target)


def read_override(record: VersionRecord, target: str, verifier: Verifier) -> SignedOverride | None:
    """The override that stands on the version for a target.

    It needs both tags: the reason, which a person may take away again, and the record that was signed for that reason
    and exactly this version.
    """
    text = record.tags.get(override_record_tag(target), "")
    try:
        signed = read_envelope(text.encode(), OverrideRecord, where=override_record_tag(target))
        about = verify_envelope(signed.envelope, OverrideRecord, verifier)
    except (CorruptStateError, InvalidSignatureError, UnicodeEncodeError, RecursionError):
        return None
    same = is_about(about, record, target) and record.tags.get(override_reason_tag(target)) == about.reason
    return signed if same else None


def find_recorded_override(
    state: ReleaseState, what: VersionRecord | Deployment, target: str, verifier: Verifier
) -> SignedOverride | None:
    """The override in an endpoint's ledger that is validly signed for exactly these files on this target."""
    if (given := state.overrides.get(what.manifest)) is None:
        return None
    try:
        about = verify_envelope(given.signed, OverrideRecord, verifier)
    except InvalidSignatureError:
        return None
    return Attested(record=about, envelope=given.signed) if is_about(about, what, target) else None


def find_rejection_reason(
    state: ReleaseState, what: VersionRecord | Deployment, target: str, verifier: Verifier
) -> str | None:
    """Why this endpoint does not take the version back; None if it may come, or a person overrode that.

    The registry's tag is a second witness: what it says was rolled back counts also where the ledger does not say so
    any more, and only an override that was signed later outweighs it.
    """
    override = find_recorded_override(state, what, target, verifier)
    why = state.find_rejection(what) if override is None else None
    if why is None and isinstance(what, VersionRecord):
        told = read_published_rollback(what, state.endpoint)
        if told is not None and (override is None or not is_later(override, told)):
            return told.why
    return why


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRollback:
    """What a version's tag says of a rollback: when the registry was told, and why it was rolled back."""

    at: datetime
    why: str

    def text(self) -> str:
        return f"{self.at.isoformat(timespec='milliseconds')} {self.why}"


def rolled_back_tag(endpoint: str) -> str:
    """Tag of a version that an endpoint rolled back."""
    return f"{_ROLLED_BACK}{endpoint}"


def read_published_rollback(record: VersionRecord, endpoint: str) -> PublishedRollback | None:
    """What the registry knows of a rollback of the version by an endpoint. It needs no signature: it only refuses."""
    at, _, why = record.tags.get(rolled_back_tag(endpoint), "").partition(" ")
    try:
        return PublishedRollback(at=datetime.fromisoformat(at).astimezone(UTC), why=why)
    except ValueError:
        return None


def moment_of_override(record: VersionRecord, now: float) -> str:
    """When an override is given, ISO 8601 in UTC: never before a rollback of the version that is known, however wrong
    the clock is, since who overrides now knows of it. `now` is seconds since the epoch."""
    endpoints = [tag.removeprefix(_ROLLED_BACK) for tag in record.tags if tag.startswith(_ROLLED_BACK)]
    known = [told.at for endpoint in endpoints if (told := read_published_rollback(record, endpoint)) is not None]
    return max([datetime.fromtimestamp(now, tz=UTC), *known]).isoformat(timespec="milliseconds")


def is_later(override: SignedOverride, told: PublishedRollback) -> bool:
    """Whether a person gave an override after the registry was told of the rollback."""
    try:
        return datetime.fromisoformat(override.record.at) >= told.at
    except (ValueError, TypeError):  # no time, or one without a zone
        return False


def build_override(
    record: VersionRecord, target: str, verifier: Verifier | None, *, reason: str, by: str, now: float
) -> OverrideRecord:
    """What a person is about to sign who overrides the gates of a version.

    What the target declares is taken from a signed decision about these files, whatever its verdict. Without one they
    are served without libraries of operators, on one thread of the CPU.

    Args:
        record: the version.
        target: where it may serve.
        verifier: of signed decisions; None where none can be verified.
        reason: why.
        by: who.
        now: seconds since the epoch.
    """
    signed = record.decisions.get(target)
    judged = signed is not None and verifier is not None and is_valid_for(signed, record, target, verifier)
    return OverrideRecord(
        model=record.model,
        version=record.version,
        release=record.release,
        variant=record.variant,
        manifest=record.manifest,
        target=target,
        custom_ops=signed.record.custom_ops if signed is not None and judged else (),
        execution=signed.record.execution if signed is not None and judged else Execution(),
        reason=reason,
        by=by,
        at=moment_of_override(record, now),
    )


def is_signed_by(record: VersionRecord, target: str, key: Digest, verifier: Verifier) -> bool:
    """Whether the version's decision or override for a target was signed by this key."""
    signed = record.decisions.get(target)
    if signed is not None and key in signed.keys and is_valid_for(signed, record, target, verifier):
        return True
    override = read_override(record, target, verifier)
    return override is not None and key in override.keys


def _own_decision(record: VersionRecord, target: str, verifier: Verifier) -> SignedDecision:
    """Return the version's own decision, whatever its verdict; raises as `require_passing_decision` does."""
    where = f"{record.model}/{record.version}"
    own = record.decisions.get(target)
    if own is None:
        raise RefusedError(
            f"no signed decision for target {target}",
            where=where,
            remedy="Run its pipeline with this target in `benchmark.targets`, where decisions are signed.",
        )
    about = verify_envelope(own.envelope, DecisionRecord, verifier, where=where)
    if not is_about(about, record, target):
        raise InvalidSignatureError(
            "the signed decision is about another model, version or target",
            where=where,
            why=f"it names {about.model}, {about.variant}, {short_digest(about.manifest)}, {about.target}",
            remedy="Somebody moved a tag from another version; run the pipeline again.",
        )
    return Attested(record=about, envelope=own.envelope)
