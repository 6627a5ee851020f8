"""Tags of a version in MLflow: its identity and its decisions."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops import attestation, codec
from onnx_ops.domain.artifact import Digest, is_digest
from onnx_ops.domain.decision import DecisionRecord, SignedDecision
from onnx_ops.domain.release import VariantRecord, VersionRecord
from onnx_ops.errors import CorruptStateError, UserError

VARIANT, GATE, GIT_SHA, DATA_REV, RELEASE = "variant", "gate.", "git.sha", "data.rev", "release"
"""Tags for users, in the order in which MLflow's list of versions shows them.

MLflow's list shows tags in the order in which they were set.
"""

_HIDDEN = "mlflow.onnx_ops."
"""Prefix of tags that MLflow's UI hides (see its `isUserFacingTag`).

The UI hides tags that begin with `mlflow.`, so users cannot delete digests and signatures by
accident in the UI. MLflow's API returns hidden tags like other tags.
"""

DIGEST, EVIDENCE_DIGEST, DECISION = f"{_HIDDEN}digest", f"{_HIDDEN}evidence", f"{_HIDDEN}decision."

MLMODEL_DIGEST = f"{_HIDDEN}mlmodel"
"""Tag of a LoggedModel with the digest of its file `MLmodel`."""

TAG_LIMIT = 65_535
"""Maximum size of a tag's value in bytes: that of MySQL's TEXT."""


def build_decision_tags(record: VariantRecord) -> dict[str, str]:
    """Return the tags that change when a release is judged again.

    Raises:
        UserError: a signed decision exceeds the maximum size of a tag. A cut decision would not
            match its signature.
    """
    tags = {
        f"{GATE}{target}": decision.verdict.value for target, decision in record.decisions.items()
    }
    for target, signed in record.signed.items():
        text = codec.dumps(signed.envelope)
        if len(text) > TAG_LIMIT:
            raise UserError(
                "the signed decision is too long for a tag of MLflow",
                where=f"variant {record.variant} on {target}",
                why=f"it has {len(text)} bytes, and the limit is {TAG_LIMIT}",
                remedy="Use fewer gates for this target.",
            )
        tags[f"{DECISION}{target}"] = text.decode()
    return {**tags, EVIDENCE_DIGEST: str(record.evidence_digest())}


def read_record(model: str, version: str, tags: Mapping[str, str]) -> VersionRecord | None:
    """Return the version that the tags describe; None if onnx-ops did not register it."""
    release, manifest, variant = tags.get(RELEASE, ""), tags.get(DIGEST, ""), tags.get(VARIANT, "")
    if not (is_digest(release) and is_digest(manifest) and variant):
        return None
    return VersionRecord(
        model=model,
        version=version,
        release=Digest(release),
        variant=variant,
        manifest=Digest(manifest),
        decisions=read_decisions(tags),
        tags=tags,
    )


def read_decisions(tags: Mapping[str, str]) -> dict[str, SignedDecision]:
    """Return the readable decisions by target.

    The caller must verify the signatures of the decisions.
    """
    decisions = {}
    for key, value in sorted(tags.items()):
        target = key.removeprefix(DECISION)
        if target == key:
            continue
        try:
            signed = attestation.read_envelope(value.encode(), DecisionRecord, where=key)
        except (CorruptStateError, RecursionError, UnicodeEncodeError):
            continue
        if signed.record.target == target:
            decisions[target] = signed
    return decisions
