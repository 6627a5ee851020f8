"""What somebody has signed: DSSE envelopes (https://github.com/secure-systems-lab/dsse, v1.0) of records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from onnx_ops.domain.artifact import Digest, digest_bytes

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """`keyid` is the digest of the public key, `sig` base64 of the signature."""

    keyid: Digest
    sig: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A DSSE envelope. `payload` is base64 of the bytes that are signed together with `payloadType`."""

    payload: str
    payloadType: str  # noqa: N815 (its name in the standard)
    signatures: tuple[Signature, ...]

    def digest(self) -> Digest:
        """Names what was signed, whoever signed it."""
        return digest_bytes(self.payload.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Attested(Generic[R_co]):
    """A record as its envelope tells it; whether somebody who is trusted signed it is for the reader to verify."""

    record: R_co
    envelope: Envelope

    @property
    def keys(self) -> tuple[Digest, ...]:
        """Who says to have signed it."""
        return tuple(signature.keyid for signature in self.envelope.signatures)
