"""ECDSA P-256 keys (FIPS 186-5) in PEM files."""

from __future__ import annotations

import base64
from pathlib import Path

from onnx_ops.adapters.files import read_private
from onnx_ops.attestation import PUBLIC_SUFFIX, build_key_error, compute_key_digest
from onnx_ops.domain.artifact import Digest
from onnx_ops.errors import InfrastructureError, NotFoundError
from onnx_ops.scratch import create_file, write_durably


def read_key(path: Path) -> EcdsaSigner:
    """Return the signer of the private key in a file.

    The file is in PEM (PKCS #8), not encrypted, and readable by its owner only.

    Raises:
        NotFoundError: the file is missing, or this process cannot read it.
        RefusedError: other users can read the file.
        UserError: the file does not contain a private key of ECDSA P-256.
    """
    try:
        remedy = f"Run `chmod 600 {path}`; create a new key if other users had access to this key"
        pem = read_private(path, "the signing key", remedy=remedy).encode()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        first = (
            "Create a key with `onnx-ops keys new`"
            if is_missing
            else "Make the file readable for this user"
        )
        raise NotFoundError(
            "the signing key cannot be read",
            where=str(path),
            why=error.strerror or "",
            remedy=f"{first}, or correct the setting `signing_key`",
        ) from error
    return EcdsaSigner(pem, str(path))


class EcdsaSigner:
    """Signer with a private key.

    Args:
        pem: PEM, PKCS #8, not encrypted.
        where: location of the key, for errors.

    Raises:
        UserError: the key is not a private key of ECDSA P-256.
    """

    def __init__(self, pem: bytes, where: str) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise build_key_error("private", where) from error
        if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
            raise build_key_error("private", where)
        self.is_local = True
        self._private = key
        self._key = compute_key_digest(key.public_key())

    @property
    def key(self) -> Digest:
        """Return the digest of the public key, SubjectPublicKeyInfo in DER."""
        return self._key

    def sign(self, data: bytes) -> str:
        """Return the signature over the SHA-256 of the data, DER in base64."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.hashes import SHA256

        return base64.b64encode(
            self._private.sign(data, ECDSA(SHA256(), deterministic_signing=True))
        ).decode("ascii")

    def public_pem(self) -> bytes:
        """Return the public key, SubjectPublicKeyInfo in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._private.public_key().public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )


def create_key(path: Path) -> EcdsaSigner:
    """Create a private key at `path` (mode 0600), with the public key beside it.

    If the key exists, it is used unchanged. Two processes that start at the same time therefore use
    the same key.

    Raises:
        InfrastructureError: the files of the key cannot be written.
        NotFoundError: this process cannot read the existing key.
        RefusedError: other users can read the existing key.
        UserError: the existing file does not contain a private key of ECDSA P-256.
    """
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            private = generate_private_key(SECP256R1())
            create_file(
                path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            )
        signer = read_key(path)
        public = public_path(path)
        if not public.exists() or public.read_bytes() != signer.public_pem():
            write_durably(public, signer.public_pem(), 0o644)
    except OSError as error:
        raise InfrastructureError(
            "the files of the signing key cannot be written",
            where=str(path),
            why=str(error),
            remedy="Choose a writable folder.",
        ) from error
    return signer


def public_path(path: Path) -> Path:
    """Return the path of the public key of the private key at `path`."""
    return path.with_name(path.stem + PUBLIC_SUFFIX)
