"""Determine whether a signed decision or override allows a version to serve.

The functions are pure, without store or registry, so that the reconciler and the MLflow server
apply the same rules.
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

REJECTED_REMEDY = "Make a new release, or promote the version with --override and a reason."


def require_passing_decision(
    record: VersionRecord, target: str, verifier: Verifier, *, others: Iterable[SignedDecision] = ()
) -> SignedDecision:
    """Return the decision that allows the version to serve the target.

    Args:
        others: decisions of other versions with the same content. They are also considered if they
            are validly signed and about exactly this content and target. The decision with the
            highest sequence applies; if several have this sequence, the worst verdict applies. The
            version itself must also have a valid decision.

    Raises:
        RefusedError: the version lacks a decision, or the verdict that applies is not PASS.
        InvalidSignatureError: the version's decision is forged, signed by a key that is not
            trusted, or about another model, version or target.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    where, own = f"{record.model}/{record.version}", record.decisions.get(target)
    if own is None:
        raise RefusedError(
            f"there is no signed decision for target {target}",
            where=where,
            why=f"it has decisions for {', '.join(sorted(record.decisions))}"
            if record.decisions
            else "",
            remedy="Run its pipeline with this target in `benchmark.targets`, "
            "on a machine that signs decisions. If the target was judged before, write the "
            "decision again: `onnx-ops run FILE --no-cache register`.",
        )
    about = verify_envelope(own.envelope, DecisionRecord, verifier, where=where)
    if not is_about(about, record, target):
        raise InvalidSignatureError(
            "the signed decision is about another model, version or target",
            where=where,
            why=f"it names {about.model}, {about.variant}, {short_digest(about.manifest)}, "
            f"{about.target}",
            remedy="Write the decision again: `onnx-ops run FILE --no-cache register`.",
        )
    own = Attested(record=about, envelope=own.envelope)
    valid = [own, *(other for other in others if is_valid_for(other, record, target, verifier))]
    signed = max(valid, key=lambda each: (each.record.sequence, each.record.verdict.rank))
    decided = signed.record
    if decided.verdict is not Verdict.PASS:
        worst = ", ".join(
            f"{gate} {v.value}" for gate, v in decided.verdicts.items() if v is not Verdict.PASS
        )
        raise RefusedError(
            f"the verdict on {target} is {decided.verdict.name}",
            where=where,
            why=worst,
            remedy=f"See `onnx-ops explain {where} --target {target}`."
            if signed is own
            else "The decision of another version with the same files applies. "
            "Judge this version again: `onnx-ops run FILE --no-cache gate`.",
        )
    return signed


def is_valid_for(
    signed: SignedDecision, record: VersionRecord, target: str, verifier: Verifier
) -> bool:
    """Return whether a decision is validly signed and about this content and target."""
    try:
        about = verify_envelope(signed.envelope, DecisionRecord, verifier)
    except InvalidSignatureError:
        return False
    return is_about(about, record, target)


def read_override(record: VersionRecord, target: str, verifier: Verifier) -> SignedOverride | None:
    """Return the override in the version's tags for a target, or None.

    An override consists of two tags: the reason, which a user can delete, and the signed record.
    The record must have the same reason, and be about exactly this version.
    """
    text = record.tags.get(override_record_tag(target), "")
    try:
        signed = read_envelope(text.encode(), OverrideRecord, where=override_record_tag(target))
        about = verify_envelope(signed.envelope, OverrideRecord, verifier)
    except (CorruptStateError, InvalidSignatureError, UnicodeEncodeError, RecursionError):
        return None
    same = (
        is_about(about, record, target)
        and record.tags.get(override_reason_tag(target)) == about.reason
    )
    return signed if same else None


def find_recorded_override(
    state: ReleaseState, what: VersionRecord | Deployment, target: str, verifier: Verifier
) -> SignedOverride | None:
    """Return the override in an endpoint's ledger for these files, or None.

    The override must be validly signed for these files on this target.
    """
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
    """Return why an endpoint rejects a version that it rolled back, or None.

    The result is None if the endpoint does not reject the version, or if an override allows it. If
    `what` is read from the registry and a tag records a rollback, the endpoint rejects the version
    unless an override was signed later. This also applies if the ledger no longer has the rollback.
    """
    override = find_recorded_override(state, what, target, verifier)
    why = state.find_rejection(what) if override is None else None
    if why is None and isinstance(what, VersionRecord):
        rollback = read_published_rollback(what, state.endpoint)
        if rollback is not None and (override is None or not is_later(override, rollback)):
            return rollback.why
    return why


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRollback:
    """The rollback of a version, as a tag of the version records it.

    `at` is when the rollback was published, and `why` is its reason.
    """

    at: datetime
    why: str

    def format(self) -> str:
        """Return the text of the tag."""
        return f"{self.at.isoformat(timespec='milliseconds')} {self.why}"


def rolled_back_tag(endpoint: str) -> str:
    """Return the name of the tag that marks a version as rolled back by an endpoint."""
    return f"{_ROLLED_BACK}{endpoint}"


def read_published_rollback(record: VersionRecord, endpoint: str) -> PublishedRollback | None:
    """Return the rollback of a version by an endpoint, as its tag records it, or None.

    The tag needs no signature, since it can only prevent a version from serving.
    """
    at, _, why = record.tags.get(rolled_back_tag(endpoint), "").partition(" ")
    try:
        return PublishedRollback(at=datetime.fromisoformat(at).astimezone(UTC), why=why)
    except ValueError:
        return None


def is_later(override: SignedOverride, rollback: PublishedRollback) -> bool:
    """Return whether an override was signed at or after a rollback's publication.

    The result is False if the time of the override is not valid.
    """
    try:
        return datetime.fromisoformat(override.record.at) >= rollback.at
    except (ValueError, TypeError):  # The text is not a time with a time zone.
        return False


def build_override(
    record: VersionRecord,
    target: str,
    verifier: Verifier | None,
    *,
    reason: str,
    by: str,
    now: float,
) -> OverrideRecord:
    """Return the override record to sign for a version.

    Operator libraries and execution are taken from a signed decision about these files, regardless
    of its verdict. If there is no such decision, the files are served on one CPU thread, and
    operator libraries are left out. The clock of this machine can be wrong. The time of the record
    is therefore never before a published rollback of the version, so that the override lifts this
    rollback.

    Args:
        verifier: verifier of the decision; None if no decision can be verified.
        now: seconds since the epoch.
    """
    signed = record.decisions.get(target)
    is_valid = (
        signed is not None
        and verifier is not None
        and is_valid_for(signed, record, target, verifier)
    )
    endpoints = [
        tag.removeprefix(_ROLLED_BACK) for tag in record.tags if tag.startswith(_ROLLED_BACK)
    ]
    rollbacks = [
        rollback.at
        for name in endpoints
        if (rollback := read_published_rollback(record, name)) is not None
    ]
    at = max([datetime.fromtimestamp(now, tz=UTC), *rollbacks])
    return OverrideRecord(
        model=record.model,
        version=record.version,
        release=record.release,
        variant=record.variant,
        manifest=record.manifest,
        target=target,
        custom_ops=signed.record.custom_ops if signed is not None and is_valid else (),
        execution=signed.record.execution if signed is not None and is_valid else Execution(),
        reason=reason,
        by=by,
        at=at.isoformat(timespec="milliseconds"),
    )


def is_signed_by(record: VersionRecord, target: str, key: Digest, verifier: Verifier) -> bool:
    """Return whether this key signed the version's decision or override for a target."""
    signed = record.decisions.get(target)
    if signed is not None and key in signed.keys and is_valid_for(signed, record, target, verifier):
        return True
    override = read_override(record, target, verifier)
    return override is not None and key in override.keys
