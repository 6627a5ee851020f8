"""The rule of what a signed decision allows. Pure: no store, no registry; both the reconciler and the registry's own
server judge by it."""

from __future__ import annotations

from collections.abc import Iterable

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, digest_bytes, short
from onnx_ops.domain.gate import DecisionRecord, SignedDecision, Verdict
from onnx_ops.domain.override import OverrideRecord, SignedOverride, reason_tag, record_tag
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import Refused, SignatureInvalid, StateCorrupt
from onnx_ops.ports import Verifier


def passing_decision(
    record: VersionRecord, target: str, verifier: Verifier, *, others: Iterable[SignedDecision] = ()
) -> DecisionRecord:
    """The decision that lets the version serve the target.

    Args:
        record: the version as the registry tells it.
        target: the target's name.
        verifier: knows the trusted keys.
        others: decisions found elsewhere, such as on another version with the same content. Those that are validly
            signed and about exactly this content and target count too: of all, the one with the highest sequence
            decides, and of several with the same sequence the worst. None of them can stand in for the version's own.

    Raises:
        Refused: there is none, or it is not a pass.
        SignatureInvalid: it is forged, signed by a key that is not trusted, or about something else.
    """
    own = _own_decision(record, target, verifier)
    counted = [own, *(other.record for other in others if counts(other, record, target, verifier))]
    decided = max(counted, key=lambda found: (found.sequence, found.verdict.rank))
    if decided.verdict is not Verdict.PASS:
        worst = ", ".join(f"{gate} {v.value}" for gate, v in decided.verdicts.items() if v is not Verdict.PASS)
        where = f"{record.model}/{record.version}"
        raise Refused(
            f"its gates on {target} ended {decided.verdict.value}",
            where=where,
            why=worst,
            remedy=f"See `onnx-ops explain {where} --target {target}`.",
        )
    return decided


def counts(signed: SignedDecision, record: VersionRecord, target: str, verifier: Verifier) -> bool:
    """Whether the decision is validly signed and about exactly this content and target."""
    if not is_about(signed.record, record, target):
        return False
    try:
        _verify(signed.record, signed.signature, signed.key, verifier)
    except SignatureInvalid:
        return False
    return True


def is_about(about: DecisionRecord | OverrideRecord, record: VersionRecord, target: str) -> bool:
    """Whether a record names this model, variant, release, content and target."""
    expected = (record.model, record.variant, record.release, record.manifest, target)
    return (about.model, about.variant, about.release, about.manifest, about.target) == expected


def standing_override(record: VersionRecord, target: str, verifier: Verifier) -> SignedOverride | None:
    """The override that stands on the version for a target.

    It needs both tags: the reason, which a person may take away again, and the record that the registry's server
    signed for that reason and exactly this version.
    """
    text = record.tags.get(record_tag(target), "")
    try:
        signed = codec.loads(text.encode(), SignedOverride, where=record_tag(target))
        _verify(signed.record, signed.signature, signed.key, verifier)
    except (StateCorrupt, SignatureInvalid, UnicodeEncodeError, RecursionError):
        return None
    about = signed.record
    same = is_about(about, record, target) and about.version == record.version
    return signed if same and record.tags.get(reason_tag(target)) == about.reason else None


def override_id(signed: SignedOverride) -> Digest:
    """Names one override, so that it is taken up once."""
    return digest_bytes(codec.dumps(signed.record))


def rests_on(record: VersionRecord, target: str, key: Digest, verifier: Verifier) -> bool:
    """Whether the version's decision or override for a target was signed by this key."""
    signed = record.decisions.get(target)
    if signed is not None and signed.key == key and counts(signed, record, target, verifier):
        return True
    override = standing_override(record, target, verifier)
    return override is not None and override.key == key


def _own_decision(record: VersionRecord, target: str, verifier: Verifier) -> DecisionRecord:
    """The decision that stands on the version itself, whatever its verdict; raises as `passing_decision` does."""
    where = f"{record.model}/{record.version}"
    own = record.decisions.get(target)
    if own is None:
        raise Refused(
            f"no signed decision for target {target}",
            where=where,
            remedy="Run its pipeline with this target in `benchmark.targets`, where decisions are signed.",
        )
    try:
        _verify(own.record, own.signature, own.key, verifier)
    except SignatureInvalid as error:
        raise SignatureInvalid(error.what, where=where, why=error.why, remedy=error.remedy) from error
    if not is_about(own.record, record, target):
        about = own.record
        raise SignatureInvalid(
            "the signed decision is about another model, version or target",
            where=where,
            why=f"it names {about.model}, {about.variant}, {short(about.manifest)}, {about.target}",
            remedy="Somebody moved a tag from another version; run the pipeline again.",
        )
    return own.record


def _verify(record: DecisionRecord | OverrideRecord, signature: str, key: Digest, verifier: Verifier) -> None:
    """Raises SignatureInvalid; a record that has no canonical form (half a surrogate pair) was signed by nobody."""
    try:
        data = codec.dumps(record)
    except ValueError as error:
        raise SignatureInvalid("nobody can have signed this record", why=str(error)) from error
    verifier.verify(data, signature, key)
