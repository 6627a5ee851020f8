"""Private keys of ECDSA P-256 (FIPS 186-5) in PEM files: one process holds one, all others the public key."""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.attestation import PUBLIC_SUFFIX, build_key_error, compute_key_digest
from onnx_ops.domain.artifact import Digest
from onnx_ops.errors import InfrastructureError, NotFoundError, RefusedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


class EcdsaSigner:
    """Signs with the private key in a file.

    Args:
        path: PEM, PKCS #8, not encrypted, readable by its owner alone.

    Raises:
        NotFoundError: there is no such file.
        RefusedError: others may read it.
        UserError: it does not hold a private key of ECDSA P-256.
    """

    def __init__(self, path: Path) -> None:
        self._private = _private_key(_read_secret(path), path)
        self._key = compute_key_digest(self._private.public_key())

    @property
    def key(self) -> Digest:
        """Digest of the public key, SubjectPublicKeyInfo in DER."""
        return self._key

    def sign(self, data: bytes) -> str:
        """Base64 of the signature over the SHA-256 of the data, in DER."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        return base64.b64encode(self._private.sign(data, ECDSA(SHA256(), deterministic_signing=True))).decode("ascii")

    def public_pem(self) -> bytes:
        """The public key, SubjectPublicKeyInfo in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def create_key(path: Path) -> EcdsaSigner:
    """A new key pair: the private key at `path` (mode 0600), the public one beside it.

    A key that stands there already is kept and used: of two processes that start at once, both end with the same key.
    The private key appears under its name only when it is whole and on the disk.

    Raises:
        InfrastructureError: the folder cannot be written.
        NotFoundError, RefusedError, UserError: as `EcdsaSigner` does, of a key that stands there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _write_new(path, _new_private_pem())
        signer = EcdsaSigner(path)
        public = public_path(path)
        if not public.exists() or public.read_bytes() != signer.public_pem():
            _write_public(public, signer.public_pem())
    except OSError as error:
        raise InfrastructureError(
            "the signing key cannot be created", where=str(path), why=str(error), remedy="Choose a folder you may write"
        ) from error
    return signer


def public_path(path: Path) -> Path:
    """Where the public key of the private key at `path` stands."""
    return path.with_name(path.stem + PUBLIC_SUFFIX)


def _read_secret(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFoundError(
            "the signing key cannot be read",
            where=str(path),
            why=error.strerror or "",
            remedy="Make one with `onnx-ops init`, or name the right file in the settings",
        ) from error
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode & 0o777
        if mode & 0o077:
            raise RefusedError(
                "the signing key may be read by others than its owner",
                where=str(path),
                why=f"its mode is {mode:04o}",
                remedy=f"chmod 600 {path}; and make a new key if others had access to this one",
            )
        return stream.read()


def _private_key(pem: bytes, path: Path) -> EllipticCurvePrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise build_key_error("private", str(path)) from error
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise build_key_error("private", str(path))
    return key


def _new_private_pem() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_new(path: Path, data: bytes) -> None:
    """Durably write `data` at `path` unless something stands there."""
    temporary = _write_temporary(path, data, 0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink()
    _sync_folder(path.parent)


def _write_public(path: Path, data: bytes) -> None:
    _write_temporary(path, data, 0o644).replace(path)
    _sync_folder(path.parent)


def _write_temporary(path: Path, data: bytes, mode: int) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
