"""Stored entries of a ledger: chained by digests, and signed.

An entry is one line of JSON that holds the digest of the line before it. A second line has its signatures: a DSSE
signature (https://github.com/secure-systems-lab/dsse, v1.0) covers the exact bytes of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onnx_ops import codec
from onnx_ops.adapters.ledgers.seen import FixedEntry
from onnx_ops.attestation import RetiredKey, sign_bytes, verify_bytes
from onnx_ops.domain.artifact import Digest, digest_bytes, short_digest
from onnx_ops.domain.attestation import EnvelopeSignature
from onnx_ops.domain.ledger import LEDGER_SCHEMA, LedgerEntry, ReleaseState, apply_entry
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.errors import CorruptStateError, InvalidSignatureError, MissingKeyError, OnnxOpsError
from onnx_ops.ports import Signer, Verifier

PAYLOAD_TYPE = "application/vnd.onnx-ops.ledger-entry+json"

_NEWER = "A newer onnx-ops wrote it: upgrade this one."
_REMEDY = "Restore the file from a backup (entries never change); see docs/runbooks/ledger-damaged.md."
_UNTRUSTED = (
    "If you trust the owner of the key, copy its public key to the trusted release keys; else restore the ledger from "
    "a backup: see docs/runbooks/ledger-damaged.md."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedEntry:
    """An entry as it is stored.

    `previous` is the digest of the entry before it, None for the first one. `snapshot` is the digest of a snapshot of
    the state before it, if it names one.
    """

    previous: Digest | None
    snapshot: Digest | None
    entry: LedgerEntry


@dataclass(frozen=True, slots=True)
class Head:
    """A verified state, and the digest of the entry that led to it; None before the first."""

    state: ReleaseState
    digest: Digest | None


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A parsed, unverified entry with its exact bytes."""

    signed: bytes
    chained: ChainedEntry
    signatures: tuple[EnvelopeSignature, ...]

    @property
    def entry(self) -> LedgerEntry:
        """The entry."""
        return self.chained.entry

    @property
    def digest(self) -> Digest:
        """Digest of what is signed."""
        return digest_bytes(self.signed)


def format_name(endpoint: str, sequence: int) -> str:
    """Return the name of an entry's object."""
    return f"{endpoint}/{sequence:08d}.jsonl"


def _list_none() -> Sequence[RetiredKey]:
    return ()


@dataclass(frozen=True, slots=True)
class LedgerKeys:
    """The keys of those who may grant.

    `verifier` trusts their public keys. `signer` returns the key of this process, or None; it is asked once an entry is
    written, and may raise an OnnxOpsError. `retired` lists the keys that were trusted before.
    """

    verifier: Callable[[], Verifier]
    signer: Callable[[], Signer | None]
    retired: Callable[[], Sequence[RetiredKey]] = _list_none

    def sign(self, data: bytes, grant: str, where: str) -> tuple[EnvelopeSignature, ...]:
        """Return the signatures of an entry.

        An entry that grants nothing has none if there is no trusted key here, or if a service would have to sign it: a
        rollback must not wait for one.

        Raises:
            MissingKeyError: the entry grants something, and no trusted key can sign it.
        """
        try:
            signer = self.signer()
            if signer is not None:
                if not grant and not signer.is_local:
                    return ()
                signatures = sign_bytes(PAYLOAD_TYPE, data, signer)
                verify_bytes(PAYLOAD_TYPE, data, signatures, self.verifier())
                return signatures
            why = "signing is off"
        except OnnxOpsError as error:
            why = str(error)
        if grant:
            raise MissingKeyError(
                f"this entry {grant}, and no trusted key can sign it here",
                where=where,
                why=why,
                remedy="Run it where a trusted release key is; `onnx-ops keys list` shows those of this machine.",
            )
        return ()

    def verify(self, stored: StoredEntry, grant: str) -> None:
        """Raise CorruptStateError if no trusted key has signed an entry that grants something."""
        if not grant:
            return
        where = f"ledger {format_name(stored.entry.endpoint, stored.entry.sequence)}"
        if not stored.signatures:
            raise CorruptStateError(f"the entry {grant}, and has no signature", where=where, remedy=_UNTRUSTED)
        try:
            verify_bytes(PAYLOAD_TYPE, stored.signed, stored.signatures, self.verifier())
        except InvalidSignatureError as error:
            if self._was_trusted(stored):
                return
            what = f"the entry {grant}, and {error.what}"
            raise CorruptStateError(what, where=where, why=error.why, remedy=_UNTRUSTED) from error

    def list_fixed(self, endpoint: str) -> list[FixedEntry]:
        """Return the entries of a ledger at which keys were retired."""
        found = [(one.key, one.heads[endpoint]) for one in self.retired() if endpoint in one.heads]
        return [
            FixedEntry(head, f"key {short_digest(key)} was retired at entry {head.sequence}", _REMEDY)
            for key, head in found
        ]

    def _was_trusted(self, stored: StoredEntry) -> bool:
        """Return whether a key has signed the entry that was retired later."""
        entry, keys = stored.entry, {signature.keyid for signature in stored.signatures}
        for retired in self.retired():
            head = retired.heads.get(entry.endpoint)
            if retired.key not in keys or head is None or head.sequence < entry.sequence:
                continue
            with suppress(InvalidSignatureError):
                verify_bytes(PAYLOAD_TYPE, stored.signed, stored.signatures, retired.verifier)
                return True
        return False


def encode(chained: ChainedEntry, signatures: tuple[EnvelopeSignature, ...] | None = None) -> bytes:
    """Return the bytes of an entry: those to sign, or with signatures those to store."""
    lines = [codec.dumps(chained)]
    if signatures:
        lines.append(codec.dumps(list(signatures)))
    return b"\n".join(lines)


def decode(endpoint: str, sequence: int, data: bytes) -> StoredEntry:
    """Parse the object of an entry.

    Raises:
        CorruptStateError: it is not this entry; with the remedy.
    """
    where = f"ledger {format_name(endpoint, sequence)}"
    signed, _, rest = data.partition(b"\n")
    try:
        chained = codec.loads(signed, ChainedEntry, where=where)
        signatures = codec.loads(rest, tuple[EnvelopeSignature, ...], where=where) if rest else ()
        if (chained.entry.endpoint, chained.entry.sequence) != (endpoint, sequence):
            raise CorruptStateError("the entry is not where it belongs", where=where)
        if chained.entry.schema != LEDGER_SCHEMA:
            raise CorruptStateError(f"the entry has schema {chained.entry.schema}, not {LEDGER_SCHEMA}", where=where)
    except CorruptStateError as error:
        error.remedy = _NEWER if _is_newer(signed) else _REMEDY
        raise
    return StoredEntry(signed, chained, signatures)


def follow(head: Head, stored: StoredEntry, keys: LedgerKeys) -> Head:
    """Return the head after one more entry.

    Raises:
        CorruptStateError: it does not follow, or grants what no trusted key has signed.
    """
    entry = stored.entry
    if stored.chained.previous != head.digest:
        where = f"ledger {format_name(entry.endpoint, entry.sequence)}"
        what = f"the entry does not follow entry {head.state.head}" if head.state.head else "the entry is not the first"
        why = "one of the two was changed, or written to a copy of the ledger" if head.state.head else ""
        raise CorruptStateError(what, where=where, why=why, remedy=_REMEDY)
    keys.verify(stored, explain_grant(head.state, entry.body))
    return Head(apply_entry(head.state, entry), stored.digest)


def build_changed_error(endpoint: str, sequence: int) -> CorruptStateError:
    """Return the error of an entry that the one after it does not name."""
    where = f"ledger {format_name(endpoint, sequence)}"
    return CorruptStateError("the entry was changed after the next one was written", where=where, remedy=_REMEDY)


def build_missing_error(endpoint: str, sequence: int) -> CorruptStateError:
    """Return the error of an entry that is missing though later ones exist."""
    return CorruptStateError("the entry is missing", where=f"ledger {format_name(endpoint, sequence)}", remedy=_REMEDY)


def _is_newer(data: bytes) -> bool:
    """Return whether an entry that cannot be read names a later schema."""
    try:
        entry: Any = codec.loads(data, dict[str, Any]).get("entry")
    except CorruptStateError:
        return False
    schema = entry.get("schema") if isinstance(entry, dict) else None
    return isinstance(schema, int) and schema > LEDGER_SCHEMA
