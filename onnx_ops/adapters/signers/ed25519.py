"""Ed25519 signatures (RFC 8032) with keys in PEM files: one process holds the private key, all others the public."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import Digest, digest_bytes, short
from onnx_ops.errors import EnvironmentFailure, NotFound, Refused, SignatureInvalid, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PUBLIC_SUFFIX = ".pub.pem"
"""`signing.pem` has its public key beside it in `signing.pub.pem`."""


class Ed25519Signer:
    """Signs with the private key in a file.

    Args:
        path: PEM, PKCS #8, not encrypted, readable by its owner alone.

    Raises:
        NotFound: there is no such file.
        Refused: others may read it.
        UserError: it does not hold an Ed25519 private key.
    """

    def __init__(self, path: Path) -> None:
        self._private = _private_key(_read_secret(path), path)
        self._key = _digest(self._private.public_key())

    @property
    def key(self) -> Digest:
        """Digest of the 32 bytes of the public key."""
        return self._key

    def sign(self, data: bytes) -> str:
        """Base64 of the 64-byte signature."""
        return base64.b64encode(self._private.sign(data)).decode("ascii")

    def public_pem(self) -> bytes:
        """The public key, SubjectPublicKeyInfo in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class TrustedKeys:
    """The public keys whose signatures count.

    Keys are read again for every signature, so that one that is taken away is no longer trusted from then on.

    Args:
        paths: PEM files of public keys, or folders whose `*.pub.pem` files are. What does not exist trusts nobody.
    """

    def __init__(self, paths: Path | Iterable[Path]) -> None:
        self._paths = (paths,) if isinstance(paths, Path) else tuple(paths)

    def keys(self) -> tuple[Digest, ...]:
        """Digests of the trusted keys.

        Raises:
            UserError: a file does not hold an Ed25519 public key.
        """
        return tuple(sorted(self._load()))

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        """Raises SignatureInvalid if the key is not trusted or the signature does not fit."""
        from cryptography.exceptions import InvalidSignature

        trusted = self._load()
        if key not in trusted:
            raise SignatureInvalid(
                f"key {short(key)} is not trusted",
                where=", ".join(map(str, self._paths)),
                why=f"trusted keys: {', '.join(map(short, sorted(trusted))) or 'none'}",
                remedy=f"If you trust its owner, put the public key (NAME{PUBLIC_SUFFIX}) there; else judge again",
            )
        try:
            trusted[key].verify(base64.b64decode(signature, validate=True), data)
        except (InvalidSignature, ValueError) as error:
            raise SignatureInvalid(
                f"the signature by key {short(key)} does not fit",
                why="the record or the signature was changed after it was signed",
                remedy="Judge the release again with `onnx-ops run`, and find out who changed it",
            ) from error

    def _load(self) -> dict[Digest, Ed25519PublicKey]:
        loaded = ((path, _public_key(path)) for path in self._files())
        return {_digest(key): key for _, key in loaded}

    def _files(self) -> Iterator[Path]:
        for path in self._paths:
            if path.is_dir():
                yield from sorted(path.glob(f"*{PUBLIC_SUFFIX}"))
            elif path.exists():
                yield path


def create_key(path: Path) -> Ed25519Signer:
    """A new key pair: the private key at `path` (mode 0600), the public one beside it.

    A key that stands there already is kept and used: of two processes that start at once, both end with the same key.
    The private key appears under its name only when it is whole and on the disk.

    Raises:
        EnvironmentFailure: the folder cannot be written.
        NotFound, Refused, UserError: as `Ed25519Signer` does, of a key that stands there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _write_new(path, _new_private_pem())
        signer = Ed25519Signer(path)
        public = public_path(path)
        if not public.exists() or public.read_bytes() != signer.public_pem():
            _write_public(public, signer.public_pem())
    except OSError as error:
        raise EnvironmentFailure(
            "the signing key cannot be created", where=str(path), why=str(error), remedy="Choose a folder you may write"
        ) from error
    return signer


def public_path(path: Path) -> Path:
    """Where the public key of the private key at `path` stands."""
    return path.with_name(path.stem + PUBLIC_SUFFIX)


def _digest(key: Ed25519PublicKey) -> Digest:
    return digest_bytes(key.public_bytes_raw())


def _read_secret(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(
            "the signing key cannot be read",
            where=str(path),
            why=error.strerror or "",
            remedy="Make one with `onnx-ops init`, or name the right file in the settings",
        ) from error
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode & 0o777
        if mode & 0o077:
            raise Refused(
                "the signing key may be read by others than its owner",
                where=str(path),
                why=f"its mode is {mode:04o}",
                remedy=f"chmod 600 {path}; and make a new key if others had access to this one",
            )
        return stream.read()


def _private_key(pem: bytes, path: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _not_a_key("private", path) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key("private", path)
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (ValueError, OSError, UnsupportedAlgorithm) as error:
        raise _not_a_key("public", path) from error
    if not isinstance(key, Ed25519PublicKey):
        raise _not_a_key("public", path)
    return key


def _not_a_key(kind: str, path: Path) -> UserError:
    return UserError(
        f"this is not an Ed25519 {kind} key in PEM",
        where=str(path),
        remedy=f"`onnx-ops init` makes a pair: NAME.pem is the private key, NAME{PUBLIC_SUFFIX} the public one",
    )


def _new_private_pem() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


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
