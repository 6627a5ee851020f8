"""Signed records in DSSE envelopes, and the record of an override.

The envelopes follow DSSE v1.0 (https://github.com/secure-systems-lab/dsse).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.execution import Execution

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvelopeSignature:
    """A signature: `keyid` is the digest of the public key, `sig` is base64."""

    keyid: Digest
    sig: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A DSSE envelope.

    `payload` is the base64 of the bytes that are signed together with `payloadType`.
    """

    payload: str
    payloadType: str  # noqa: N815 (its name in the standard)
    signatures: tuple[EnvelopeSignature, ...]

    def digest(self) -> Digest:
        """Return the digest of the base64 payload; it does not depend on the signer."""
        return digest_bytes(self.payload.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Attested(Generic[R_co]):
    """A record with its envelope, whose signatures are not necessarily verified."""

    record: R_co
    envelope: Envelope

    @property
    def keys(self) -> tuple[Digest, ...]:
        """Digests of the keys that the signatures name, unverified."""
        return tuple(signature.keyid for signature in self.envelope.signatures)


OVERRIDE_TAG_PREFIX = "override."
"""Prefix of the tag `override.<target>`, which contains the reason of an override."""

MAX_REASON_LENGTH = 1000
"""Largest number of characters of a reason.

A reason is stored in a registry tag, whose length is limited, and in the signed record.
"""


def override_reason_tag(target: str) -> str:
    """Return the tag of an override's reason."""
    return f"{OVERRIDE_TAG_PREFIX}{target}"


def override_record_tag(target: str) -> str:
    """Return the tag of the signed record of an override.

    Names of targets have no dots, so this tag differs from the reason tag of any target.
    """
    return f"{OVERRIDE_TAG_PREFIX}{target}.by"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord:
    """The signed record that overrides a version's gates.

    A person signs the record, or the registry's server signs it for a person.

    `custom_ops` are the target's libraries of operators, and `execution` is how the target runs a
    model. Both are copied from the signed decision about this content, if there is one. `by` is the
    actor that signed. In a record of the registry's server, it is the user that the server has
    authenticated; empty without authentication. `at` is ISO 8601 in UTC. Records with different
    times are different overrides.
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
