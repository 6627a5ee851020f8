"""Stored entries of a ledger, which are chained by digests and signed.

An entry is one line of JSON that contains the digest of the previous entry's line. If the entry is
signed, a second line has its signatures. A DSSE signature
(https://github.com/secure-systems-lab/dsse, v1.0) covers the exact bytes of the first line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops import codec
from onnx_ops.attestation import TrustedKeys, sign_bytes, verify_bytes
from onnx_ops.domain.artifact import Digest, digest_bytes
from onnx_ops.domain.attestation import EnvelopeSignature
from onnx_ops.domain.ledger import (
    LEDGER_SCHEMA,
    LedgerAdopted,
    LedgerEntry,
    ReleaseState,
    apply_entry,
)
from onnx_ops.domain.ledger_authority import explain_grant
from onnx_ops.errors import CorruptStateError, InvalidSignatureError, MissingKeyError, OnnxOpsError
from onnx_ops.ports import Signer, Verifier

PAYLOAD_TYPE = "application/vnd.onnx-ops.ledger-entry+json"

_NEWER = "A newer onnx-ops wrote the entry: upgrade onnx-ops on this machine."
_REMEDY = (
    "Restore the file from a backup (entries never change), or accept a state with `onnx-ops "
    "ledger adopt ENDPOINT`; see `onnx-ops docs runbooks/ledger-damaged`."
)
_SIGNING_OFF = (
    'Remove the setting `signing = "off"`, or run the command on a machine with a trusted release '
    "key."
)
_NOT_ADMITTED = (
    "Run the command on a machine with a trusted release key, or admit the key of this machine "
    "there: `onnx-ops keys admit FILE`. `onnx-ops keys list` shows the keys."
)
_NOT_TRUSTED = (
    "Run the command on a machine with a trusted release key. Or copy the public key of this "
    "machine (`onnx-ops keys public`) to the folder `release` of its trusted keys."
)
_UNKNOWN_KEY = (
    "If you trust the owner of the key, copy its public key to the trusted release keys. "
    "Otherwise, restore the ledger from a backup: see `onnx-ops docs runbooks/ledger-damaged`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedEntry:
    """An entry with the digests that chain it to the previous entry and a snapshot.

    `previous` is the digest of the previous entry, None for the first entry. `snapshot` is the
    digest of a snapshot of the state before this entry, if the entry names a snapshot.
    """

    previous: Digest | None
    snapshot: Digest | None
    entry: LedgerEntry


@dataclass(frozen=True, slots=True)
class Head:
    """A state, and the digest of its last entry; None before the first entry."""

    state: ReleaseState
    digest: Digest | None


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A parsed but unverified entry with its exact bytes."""

    signed: bytes
    chained: ChainedEntry
    signatures: tuple[EnvelopeSignature, ...]

    @property
    def entry(self) -> LedgerEntry:
        """The ledger entry without its chain and signatures."""
        return self.chained.entry

    @property
    def digest(self) -> Digest:
        """Digest of the signed bytes."""
        return digest_bytes(self.signed)


def format_name(endpoint: str, sequence: int) -> str:
    """Return the name of an entry's object."""
    return f"{endpoint}/{sequence:08d}.jsonl"


@dataclass(frozen=True, slots=True)
class LedgerKeys:
    """The keys that can sign an entry that grants something.

    An entry grants something unless it only records facts, restricts, or returns to what earlier
    entries granted; see `explain_grant`. A machine trusts some release keys. These keys authorize
    the first entry of a ledger, an adoption, and a snapshot. After the first entry, the ledger
    records which keys are valid.

    Args:
        verifier: returns the verifier that trusts the release keys of this machine.
        signer: returns the key of this process, or None. It is called when an entry is written, and
            can raise an OnnxOpsError.
        public: returns the release keys of this machine in base64 of DER, by digest.
    """

    verifier: Callable[[], Verifier]
    signer: Callable[[], Signer | None]
    public: Callable[[], Mapping[Digest, str]] = dict

    def sign(
        self, data: bytes, grant: str, where: str, admitted: Mapping[Digest, str]
    ) -> tuple[EnvelopeSignature, ...]:
        """Return the signatures of an entry.

        An entry that grants nothing is signed only if this process has a valid key outside a remote
        service. A rollback must not wait for a service.

        Args:
            data: the bytes of the entry.
            grant: what the entry grants; empty for nothing.
            where: location for errors.
            admitted: the keys that are valid in the ledger; if empty, the keys that this machine
                trusts.

        Raises:
            MissingKeyError: the entry grants something, and this process has no valid key, or the
                key's service fails.
        """
        remedy = _NOT_ADMITTED if admitted else _NOT_TRUSTED
        try:
            signer = self.signer()
            if signer is not None:
                if not grant and not signer.is_local:
                    return ()
                signatures = sign_bytes(PAYLOAD_TYPE, data, signer)
                verify_bytes(PAYLOAD_TYPE, data, signatures, self._choose_verifier(admitted))
                return signatures
            why, remedy = "signing is off", _SIGNING_OFF
        except InvalidSignatureError as error:
            # The remedy of this error applies to decisions, not to entries.
            why = f"{error.what}; {error.why}"
        except OnnxOpsError as error:
            why = str(error)
        if grant:
            raise MissingKeyError(
                f"this entry {grant}, and this process could not sign it with a trusted key",
                where=where,
                why=why,
                remedy=remedy,
            )
        return ()

    def verify(self, stored: StoredEntry, grant: str, admitted: Mapping[Digest, str]) -> None:
        """Raise CorruptStateError if an entry that grants something is not validly signed.

        A signature is valid if its key is one of `admitted`. If `admitted` is empty, the keys that
        this machine trusts are valid. For an adoption, these keys are always valid too.
        """
        if not grant:
            return None
        where = f"ledger {format_name(stored.entry.endpoint, stored.entry.sequence)}"
        if not stored.signatures:
            raise CorruptStateError(
                f"the entry {grant}, and has no signature",
                where=where,
                remedy=f"{_REMEDY} If the ledger was never signed and you trust its storage, add "
                "`--unsigned`.",
            )
        # After keys of a ledger were stolen, an adoption can replace them. So its signature can
        # also be by a key that this machine trusts.
        may_be_own = bool(admitted) and isinstance(stored.entry.body, LedgerAdopted)
        try:
            verify_bytes(
                PAYLOAD_TYPE, stored.signed, stored.signatures, self._choose_verifier(admitted)
            )
        except InvalidSignatureError as error:
            if may_be_own:
                return self.verify(stored, grant, {})
            what = f"the entry {grant}, and {error.what}"
            is_known = admitted or self.public().keys() & {one.keyid for one in stored.signatures}
            remedy = _REMEDY if is_known else _UNKNOWN_KEY
            raise CorruptStateError(what, where=where, why=error.why, remedy=remedy) from error

    def _choose_verifier(self, admitted: Mapping[Digest, str]) -> Verifier:
        return _parse(",".join(admitted.values())) if admitted else self.verifier()


@functools.lru_cache(maxsize=64)
def _parse(encoded: str) -> TrustedKeys:
    """Return the verifier for the encoded keys of a ledger; the result is cached."""
    return TrustedKeys((), encoded=encoded)


def encode(chained: ChainedEntry, signatures: tuple[EnvelopeSignature, ...] | None = None) -> bytes:
    """Return the bytes of an entry.

    Without signatures, these are the bytes to sign. An entry without signatures is stored in the
    same form.
    """
    lines = [codec.dumps(chained)]
    if signatures:
        lines.append(codec.dumps(list(signatures)))
    return b"\n".join(lines)


def decode(endpoint: str, sequence: int, data: bytes) -> StoredEntry:
    """Return the parsed entry of an object.

    Raises:
        CorruptStateError: the object does not contain this entry in the present schema. The error
            has a remedy.
    """
    where = f"ledger {format_name(endpoint, sequence)}"
    signed, _, rest = data.partition(b"\n")
    try:
        chained = codec.loads(signed, ChainedEntry, where=where)
        signatures = codec.loads(rest, tuple[EnvelopeSignature, ...], where=where) if rest else ()
        if (chained.entry.endpoint, chained.entry.sequence) != (endpoint, sequence):
            raise CorruptStateError(
                f"the object contains entry {chained.entry.sequence} of endpoint "
                f"{chained.entry.endpoint}",
                where=where,
            )
        if chained.entry.schema != LEDGER_SCHEMA:
            raise CorruptStateError(
                f"the entry has schema {chained.entry.schema}, not {LEDGER_SCHEMA}", where=where
            )
    except CorruptStateError as error:
        error.remedy = _NEWER if _is_newer(signed) else _REMEDY
        raise
    return StoredEntry(signed, chained, signatures)


def follow(head: Head, stored: StoredEntry, keys: LedgerKeys | None) -> Head:
    """Return the head after one more entry.

    Signatures are verified only with keys.

    Raises:
        CorruptStateError: the entry does not follow the head, or lacks the signature of a valid key
            for what it grants.
    """
    entry = stored.entry
    if stored.chained.previous != head.digest:
        where = f"ledger {format_name(entry.endpoint, entry.sequence)}"
        what = (
            f"the entry does not follow entry {head.state.head}"
            if head.state.head
            else "the entry is not the first entry of a ledger"
        )
        why = (
            "one of the two entries was changed, or was written to a copy of the ledger"
            if head.state.head
            else ""
        )
        raise CorruptStateError(what, where=where, why=why, remedy=_REMEDY)
    if keys is not None:
        keys.verify(stored, explain_grant(head.state, entry.body), head.state.keys)
    return Head(apply_entry(head.state, entry), stored.digest)


def adopt(stored: StoredEntry, keys: LedgerKeys) -> Head | None:
    """Return the head after an entry that sets the state; None for other entries.

    A key that this machine trusts must have signed the entry. The previous entries do not matter.

    Raises:
        CorruptStateError: the entry would set the state, but no key that this machine trusts has
            signed it.
    """
    entry = stored.entry
    if not isinstance(entry.body, LedgerAdopted) or entry.body.state is None:
        return None
    keys.verify(stored, "sets the state", {})
    return Head(apply_entry(ReleaseState(endpoint=entry.endpoint), entry), stored.digest)


def build_changed_error(endpoint: str, sequence: int) -> CorruptStateError:
    """Return the error for an entry whose digest is not the recorded one."""
    where = f"ledger {format_name(endpoint, sequence)}"
    return CorruptStateError(
        "the entry was changed after its digest was recorded", where=where, remedy=_REMEDY
    )


def build_missing_error(endpoint: str, sequence: int) -> CorruptStateError:
    """Return the error for a missing entry."""
    return CorruptStateError(
        "the entry is missing", where=f"ledger {format_name(endpoint, sequence)}", remedy=_REMEDY
    )


def _is_newer(data: bytes) -> bool:
    """Return whether an unreadable entry names a later schema."""
    try:
        entry: Any = codec.loads(data, dict[str, Any]).get("entry")
    except CorruptStateError:
        return False
    schema = entry.get("schema") if isinstance(entry, dict) else None
    return isinstance(schema, int) and schema > LEDGER_SCHEMA
