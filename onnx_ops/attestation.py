"""Sign and verify decisions and overrides.

A server with trusted keys loads the files of a deployment only if a signed statement names them.

A statement is an in-toto Statement v1 (https://in-toto.io/Statement/v1). Its subject is a manifest
of files. Its predicate is a record: a decision or an override. The statement is signed in a DSSE
envelope with ECDSA P-256 and SHA-256. The signature covers the stored bytes, so that verification
never encodes a record again.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest, canonical_json, digest_bytes, hex_digits, short_digest
from onnx_ops.domain.attestation import Attested, Envelope, EnvelopeSignature, OverrideRecord
from onnx_ops.domain.decision import DecisionRecord, Verdict
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.release import VersionRecord
from onnx_ops.errors import CorruptStateError, InvalidSignatureError, RefusedError, UserError
from onnx_ops.ports import Signer, Verifier

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"

PUBLIC_SUFFIX = ".pub.pem"
"""Suffix of public key files: `signing.pub.pem` for the key `signing.pem`."""

RETIRED_SUFFIX = ".retired.pem"
"""Suffix of public key files that are no longer trusted and remain as a record."""

Record: TypeAlias = DecisionRecord | OverrideRecord

_R = TypeVar("_R", bound=Record)

_PREDICATES: dict[type, str] = {
    DecisionRecord: "urn:onnx-ops:decision:v1",
    OverrideRecord: "urn:onnx-ops:override:v1",
}
_UNSIGNED = (
    "Promote a version whose gates passed, or override the gates of this version: "
    "`onnx-ops promote MODEL/VERSION --target TARGET --override --reason …`."
)
_ENCODED = "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE"
"""Base64 prefix of an ECDSA P-256 public key in DER with an uncompressed point."""
_SUBJECT = "manifest.json"
"""Name of the subject of a statement.

Its digest is that of the manifest's canonical JSON, which names every file of a version.
"""


def sign_record(record: _R, signer: Signer) -> Attested[_R]:
    """Return the record in an envelope signed by the signer.

    Raises:
        ValueError: the record contains NaN, an infinity, or a string that UTF-8 cannot encode.
    """
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": _SUBJECT, "digest": {"sha256": hex_digits(record.manifest)}}],
        "predicateType": _PREDICATES[type(record)],
        "predicate": codec.to_json(record),
    }
    payload = canonical_json(statement)
    signatures = sign_bytes(PAYLOAD_TYPE, payload, signer)
    envelope = Envelope(
        payload=base64.b64encode(payload).decode(), payloadType=PAYLOAD_TYPE, signatures=signatures
    )
    return Attested(record=record, envelope=envelope)


def sign_bytes(payload_type: str, payload: bytes, signer: Signer) -> tuple[EnvelopeSignature, ...]:
    """Return the signature of a DSSE envelope over a payload."""
    return (
        EnvelopeSignature(
            keyid=signer.key, sig=signer.sign(_pre_authentication(payload_type, payload))
        ),
    )


def verify_bytes(
    payload_type: str, payload: bytes, signatures: Iterable[EnvelopeSignature], verifier: Verifier
) -> None:
    """Verify that a trusted key has signed a payload.

    Raises:
        InvalidSignatureError: no trusted key has signed the payload; the error is about the first
            signature.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    signed, refused = _pre_authentication(payload_type, payload), None
    for signature in signatures:
        try:
            verifier.verify(signed, signature.sig, signature.keyid)
        except InvalidSignatureError as error:
            refused = refused or error
        else:
            return
    raise refused or InvalidSignatureError("it has no signature")


def read_envelope(data: bytes | Envelope, kind: type[_R], *, where: str = "") -> Attested[_R]:
    """Return the record of an envelope, unverified.

    Args:
        data: the envelope, or its JSON text.
        kind: type of the record.
        where: location for errors.

    Raises:
        CorruptStateError: the data is not a signed statement of this kind.
    """
    envelope = data if isinstance(data, Envelope) else codec.loads(data, Envelope, where=where)
    payload = _decoded(envelope.payload, where)
    statement = codec.loads(payload, dict[str, Any], where=where)
    if (envelope.payloadType, statement.get("_type")) != (PAYLOAD_TYPE, STATEMENT_TYPE):
        raise CorruptStateError("not an in-toto statement", where=where)
    if (predicate := statement.get("predicateType")) != _PREDICATES[kind]:
        raise CorruptStateError(
            f"not a {_PREDICATES[kind]}", where=where, why=f"it is a {predicate}"[:200]
        )
    if not envelope.signatures:
        raise CorruptStateError("it has no signature", where=where)
    record = codec.from_json(statement.get("predicate"), kind, where=where)
    if statement.get("subject") != [
        {"name": _SUBJECT, "digest": {"sha256": hex_digits(record.manifest)}}
    ]:
        raise CorruptStateError(
            "the subject of the statement does not match the predicate", where=where
        )
    return Attested(record=record, envelope=envelope)


def verify_envelope(
    envelope: Envelope, kind: type[_R], verifier: Verifier, *, where: str = ""
) -> _R:
    """Return the record from the bytes that a trusted key has signed.

    Raises:
        InvalidSignatureError: no trusted key has signed the envelope, or it lacks a valid record of
            this kind.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    try:
        record = read_envelope(envelope, kind, where=where).record
        payload = _decoded(envelope.payload, where)
    except (CorruptStateError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidSignatureError(
            "the signed record is not valid", where=where, why=str(error)
        ) from error
    try:
        verify_bytes(envelope.payloadType, payload, envelope.signatures, verifier)
    except InvalidSignatureError as error:
        error.where = where or error.where
        raise
    return record


def is_about(about: Record, what: VersionRecord | Deployment, target: str) -> bool:
    """Return whether a record is about this version or deployment on this target.

    Such a record names the same model, variant, release, manifest and target. An override also
    names the same version.
    """
    expected = (what.model, what.variant, what.release, what.manifest, target)
    named = (about.model, about.variant, about.release, about.manifest, about.target) == expected
    return named and (not isinstance(about, OverrideRecord) or about.version == what.version)


def verify_authority(deployment: Deployment, verifier: Verifier) -> Record:
    """Return the decision or override that allows a deployment's files to be loaded.

    The verdict of a decision must be PASS.

    Raises:
        RefusedError: the decision or override is missing, or no trusted key has signed it. The same
            error is raised for a decision with another verdict than PASS. It is also raised if the
            record does not match the deployment: model, variant, release, files, evidence,
            batching, threads or execution settings. An override must also match the version.
        UserError: the file of a trusted key cannot be read, or contains another kind of key.
    """
    where = f"{deployment.model}/{deployment.version}"
    if deployment.authority is None:
        raise RefusedError(
            "no signed decision names the files of this version", where=where, remedy=_UNSIGNED
        )
    about = verify_envelope(
        deployment.authority, _get_record_type(deployment), verifier, where=where
    )
    if not is_about(about, deployment, about.target):
        raise RefusedError(
            "the signed decision or override is not about this version",
            where=where,
            why=f"it is about {about.model}, {about.variant}, "
            f"release {short_digest(about.release)}, files {short_digest(about.manifest)}"
            + (f", version {about.version}" if isinstance(about, OverrideRecord) else ""),
            remedy=_UNSIGNED,
        )
    decision = about if isinstance(about, DecisionRecord) else None
    if decision is not None and decision.verdict is not Verdict.PASS:
        raise RefusedError(
            f"the verdict on {decision.target} is {decision.verdict.name}",
            where=where,
            remedy=_UNSIGNED,
        )
    rests_on = (
        (None, False, 0)
        if decision is None
        else (decision.evidence, decision.batchable, decision.threads)
    )
    if (deployment.evidence, deployment.batchable, deployment.threads) != rests_on:
        raise RefusedError(
            "the evidence, batching or threads are not those of the signed decision or override",
            where=where,
            remedy=_UNSIGNED,
        )
    if deployment.execution != about.execution:
        raise RefusedError(
            f"the execution settings are not those that were approved for target {about.target}",
            where=where,
            remedy=_UNSIGNED,
        )
    return about


def read_authority_target(deployment: Deployment) -> str:
    """Return the target that a deployment's authority names, unverified.

    The result is empty if the deployment has no authority.

    Raises:
        CorruptStateError: the authority is not a signed statement of the expected kind.
    """
    if deployment.authority is None:
        return ""
    return read_envelope(deployment.authority, _get_record_type(deployment)).record.target


def _get_record_type(deployment: Deployment) -> type[Record]:
    """Return the type of a deployment's authority.

    A deployment that a decision allows has evidence; a deployment that an override allows has none.
    """
    return OverrideRecord if deployment.evidence is None else DecisionRecord


KeyRole: TypeAlias = Literal["gate", "release"]
"""What a key is allowed to sign.

A `gate` key signs decisions and overrides. A `release` key signs ledger entries that grant a
permission.
"""


KEY_FOLDERS: tuple[tuple[str, tuple[KeyRole, ...]], ...] = (
    ("", ("gate", "release")),
    ("gate", ("gate",)),
    ("release", ("release",)),
)
"""Subfolders of the folder of trusted keys, and the roles of their keys.

The empty name is the folder itself.
"""


def is_encoded_keys(text: str) -> bool:
    """Return whether a setting of trusted keys contains base64 keys, and not a path."""
    return text.startswith(_ENCODED)


class TrustedKeys:
    """The trusted public keys of one role.

    The files are checked for every signature, and parsed again if they changed, so that a removed
    key is no longer trusted.

    Args:
        paths: PEM files of public keys, or folders with `*.pub.pem` files. A missing path adds no
            key. Keys directly in a folder are trusted for both roles. Keys in its folders `gate`
            and `release` are trusted for that role only.
        encoded: further keys, as the method `encoded` returns them.
        role: role for which the keys must be trusted.
    """

    def __init__(
        self, paths: Path | Iterable[Path], *, encoded: str = "", role: KeyRole = "gate"
    ) -> None:
        given = (paths,) if isinstance(paths, Path) else tuple(paths)
        self._paths = tuple(place for path in given for place in (path, path / role))
        self._encoded = encoded
        self._parsed: tuple[object, dict[Digest, EllipticCurvePublicKey]] | None = None

    @classmethod
    def of(cls, text: str, folder: Path = Path(), *, role: KeyRole = "gate") -> TrustedKeys:
        """Return the keys of a setting: a path, or keys as `encoded` returns them.

        A relative path is relative to `folder`.
        """
        if is_encoded_keys(text):
            return cls((), encoded=text, role=role)
        return cls(folder / text, role=role)

    def encoded(self) -> str:
        """Return the keys in base64 of DER, separated by commas.

        Raises:
            UserError: a file cannot be read, or contains another kind of key than ECDSA P-256.
        """
        return ",".join(self.public().values())

    def public(self) -> dict[Digest, str]:
        """Return the keys in base64 of DER, by digest.

        Raises:
            UserError: a file cannot be read, or contains another kind of key than ECDSA P-256.
        """
        return {
            digest: base64.b64encode(_der(key)).decode()
            for digest, key in sorted(self._load().items())
        }

    def keys(self) -> tuple[Digest, ...]:
        """Return the digests of the trusted keys.

        Raises:
            UserError: a file cannot be read, or contains another kind of key than ECDSA P-256.
        """
        return tuple(sorted(self._load()))

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        """Verify a signature.

        Raises:
            InvalidSignatureError: the key is not trusted, or the signature is invalid.
            UserError: a file cannot be read, or contains another kind of key than ECDSA P-256.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        trusted = self._load()
        if key not in trusted:
            raise InvalidSignatureError(
                f"key {short_digest(key)} is not trusted",
                where=", ".join(map(str, self._paths[::2])),
                why=f"trusted keys: {', '.join(map(short_digest, sorted(trusted))) or 'none'}",
                remedy=f"If you trust its owner, add the public key (NAME{PUBLIC_SUFFIX}) to the "
                "trusted keys. Otherwise sign the record again with a trusted key; for a decision: "
                "`onnx-ops run FILE --no-cache gate`.",
            )
        try:
            trusted[key].verify(base64.b64decode(signature, validate=True), data, ECDSA(SHA256()))
        except (InvalidSignature, ValueError) as error:
            raise InvalidSignatureError(
                f"the signature by key {short_digest(key)} is not valid",
                why="the record or the signature was changed, or another key signed the record",
                remedy="Find out who can change the record, then sign it again; for a decision: "
                "`onnx-ops run FILE --no-cache gate`.",
            ) from error

    def _load(self) -> dict[Digest, EllipticCurvePublicKey]:
        try:
            files = [file for path in self._paths for file in _list_files(path)]
            state = [
                (file, (stat := file.stat()).st_mtime_ns, stat.st_size, stat.st_ino)
                for file in files
            ]
            if self._parsed is None or self._parsed[0] != state:
                self._parsed = state, self._parse(files)
        except OSError as error:
            raise UserError(
                "a trusted key cannot be read",
                where=str(error.filename or self._paths[0]),
                why=error.strerror or str(error),
                remedy="Make the file readable for this user, or remove it from the trusted keys.",
            ) from error
        return self._parsed[1]

    def _parse(self, files: Iterable[Path]) -> dict[Digest, EllipticCurvePublicKey]:
        from cryptography.hazmat.primitives.serialization import (
            load_der_public_key,
            load_pem_public_key,
        )

        keys = [_parse_key(load_pem_public_key, file.read_bytes, str(file)) for file in files]
        for text in filter(None, self._encoded.split(",")):
            decode = functools.partial(base64.b64decode, text, validate=True)
            keys.append(_parse_key(load_der_public_key, decode, text[:48]))
        return {compute_key_digest(key): key for key in keys}


def _list_files(path: Path) -> list[Path]:
    """Return the files of public keys at a path: the file, or the folder's files."""
    if path.is_dir():
        return sorted(path.glob(f"*{PUBLIC_SUFFIX}"))
    return [path] if path.is_file() else []


def compute_key_digest(key: EllipticCurvePublicKey) -> Digest:
    """Return the digest of a public key's SubjectPublicKeyInfo in DER."""
    return digest_bytes(_der(key))


_KEY_REMEDIES = {
    "variable": "Set the variable to the PEM text (PKCS #8) of a P-256 private key.",
    "private": "Move this file away. Then run `onnx-ops keys new --out {where}`.",
    "signing": "In `signer`, name a key of spec ECC_NIST_P256 (AWS KMS) or curve P-256 (Azure Key "
    "Vault).",
    "public": f"Use the signer's public key (NAME{PUBLIC_SUFFIX}) in its place, or remove it from "
    "the trusted keys.",
}
"""Remedies for keys of another type, by the required kind of key.

A private key in an environment variable has a separate remedy.
"""


def build_key_error(kind: str, where: str) -> UserError:
    """Return the error of a file or text that is not an ECDSA P-256 key.

    `kind` is the required kind of key: public, private or signing. `where` is the path of a file,
    or `variable NAME`, or describes the service or text.
    """
    is_variable = kind == "private" and where.startswith("variable ")
    return UserError(
        f"this is not an ECDSA P-256 {kind} key",
        where=where,
        remedy=_KEY_REMEDIES["variable" if is_variable else kind].format(where=where),
    )


def _parse_key(
    load: Callable[[bytes], object], read: Callable[[], bytes], where: str
) -> EllipticCurvePublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey

    try:
        key = load(read())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise build_key_error("public", where) from error
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise build_key_error("public", where)
    return key


def _der(key: EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _decoded(payload: str, where: str) -> bytes:
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptStateError("the payload is not base64", where=where) from error


def _pre_authentication(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs: type and payload with their lengths."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
