"""The tags of a version: what it is, what was decided about it, and how a decision is read back."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_ops import codec
from onnx_ops.domain.artifact import digest_file, digest_json
from onnx_ops.domain.gate import SignedDecision
from onnx_ops.domain.release import VariantRecord
from onnx_ops.errors import StateCorrupt, UserError

RELEASE, VARIANT, DIGEST, GIT_SHA, DATA_REV = "release", "variant", "digest", "git.sha", "data.rev"
MLMODEL_DIGEST, EVIDENCE_DIGEST = "digest.mlmodel", "digest.evidence"
GATE, DECISION = "gate.", "decision."

TAG_LIMIT = 65_535
"""Bytes of a tag's value: MySQL's TEXT, the smallest of MLflow's databases."""


def judgement(record: VariantRecord) -> dict[str, str]:
    """The tags that change when a release is judged again.

    Raises:
        UserError: a signed decision is longer than a tag may be; cut, its signature would not fit.
    """
    tags = {f"{GATE}{target}": decision.verdict.value for target, decision in record.decisions.items()}
    for target, signed in record.signed.items():
        text = codec.dumps(signed)
        if len(text) > TAG_LIMIT:
            raise UserError(
                "the signed decision is too long for a tag of MLflow",
                where=f"variant {record.variant} on {target}",
                why=f"{len(text)} bytes of at most {TAG_LIMIT}",
                remedy="Use fewer gates for this target",
            )
        tags[f"{DECISION}{target}"] = text.decode()
    evidence = {name: digest_file(path) for name, path in record.evidence.items()}
    return {**tags, EVIDENCE_DIGEST: str(digest_json(evidence))}


def decisions(tags: Mapping[str, str]) -> dict[str, SignedDecision]:
    """By target, the decisions that can be read; others are left out. Who signed them is for the caller to verify."""
    found = {}
    for key, value in sorted(tags.items()):
        target = key.removeprefix(DECISION)
        if target == key:
            continue
        try:
            signed = codec.loads(value.encode(), SignedDecision, where=key)
        except (StateCorrupt, RecursionError):
            continue
        if signed.record.target == target:
            found[target] = signed
    return found
