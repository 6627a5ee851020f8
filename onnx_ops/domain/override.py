"""A person's signed word that a version may serve a target whatever its gates say."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_ops.domain.artifact import Digest

OVERRIDE = "override."
"""A version's tag `override.<target>` holds the reason, as a person wrote it."""

_RECORD = ".by"


def reason_tag(target: str) -> str:
    return f"{OVERRIDE}{target}"


def record_tag(target: str) -> str:
    """Tag of the signed record, which the registry's server writes. Names of targets have no dots."""
    return f"{OVERRIDE}{target}{_RECORD}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord:
    """What the registry's server signs: who overrides, why, and for exactly which content and target.

    `by` is the user that the server knows, empty if it knows none. `at` is ISO 8601 in UTC; two records of the same
    override at different moments are two overrides.
    """

    schema: int = 1
    model: str
    version: str
    release: Digest
    variant: str
    manifest: Digest
    target: str
    reason: str
    by: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedOverride:
    """`signature` is base64 over the canonical JSON of `record`; `key` is the digest of the public key."""

    record: OverrideRecord
    key: Digest
    signature: str
