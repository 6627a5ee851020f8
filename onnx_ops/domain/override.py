"""A person's signed word that a version may serve a target whatever its gates say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.attestation import Attested
from onnx_ops.domain.execution import Execution

OVERRIDE = "override."
"""A version's tag `override.<target>` holds the reason, as a person wrote it."""

_RECORD = ".by"


LONGEST_REASON = 1000
"""Characters; the signed record holds it again, and a tag has a limit too."""


def reason_tag(target: str) -> str:
    return f"{OVERRIDE}{target}"


def record_tag(target: str) -> str:
    """Tag of the signed record. Names of targets have no dots."""
    return f"{OVERRIDE}{target}{_RECORD}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord:
    """What a person, or the registry's server for a person, signs: who overrides, why, and for exactly which content
    and target.

    `custom_ops` are the libraries of operators that a signed decision about this content says the target declares, and
    `execution` says, as that decision does, how the target runs a model.
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
    custom_ops: tuple[Digest, ...] = ()
    execution: Execution = field(default_factory=Execution)
    reason: str
    by: str
    at: str


SignedOverride: TypeAlias = Attested[OverrideRecord]
