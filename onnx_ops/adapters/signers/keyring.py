"""Signing keys: creation, rotation and retirement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, create_key, public_path, read_key
from onnx_ops.attestation import KEY_FOLDERS, PUBLIC_SUFFIX, RETIRED_SUFFIX, KeyRole, TrustedKeys
from onnx_ops.domain.artifact import Digest, hex_digits, short_digest
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.ports import Signer
from onnx_ops.scratch import write_durably

_REPLACE_REMOTE = (
    "Create a new key in the service or variable. Save its public key: "
    "`ONNX_OPS_SIGNER=NEW onnx-ops keys public > new.pub.pem`. Run `onnx-ops keys admit "
    "new.pub.pem` with the old key, and copy the file to the folder of trusted keys everywhere. "
    "Then set `signer` to the new key: see `onnx-ops docs keys`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """Public key of this machine or in the folder of trusted keys.

    `signs` states whether this machine signs with the key now. `roles` are the roles for which the
    key is trusted.
    """

    key: Digest
    files: tuple[Path, ...]
    signs: bool
    roles: tuple[KeyRole, ...]

    @property
    def trusted(self) -> bool:
        """Return whether the key is trusted for any role."""
        return bool(self.roles)


class Keyring:
    """The signing key of this machine, and the folder of trusted public keys.

    The file of the signing key can be missing.

    Args:
        remote: signer that is used instead of the file.
    """

    def __init__(self, signing: Path, trusted: Path, remote: Signer | None = None) -> None:
        self._signing = signing
        self._trusted = trusted
        self._remote = remote

    def list_keys(self) -> tuple[KnownKey, ...]:
        """Return all keys: the signing key first, then the trusted and the retired keys."""
        mine = None if (signer := self.find_signer()) is None else signer.key
        files: dict[tuple[Digest, bool], list[Path]] = {}
        roles: dict[Digest, set[KeyRole]] = {}
        for name, granted in KEY_FOLDERS:
            for path in sorted((self._trusted / name).glob(f"*{PUBLIC_SUFFIX}")):
                (key,) = TrustedKeys(path).keys()
                roles.setdefault(key, set()).update(granted)
                files.setdefault((key, True), []).append(path)
        for name, _ in KEY_FOLDERS:
            for path in sorted((self._trusted / name).glob(f"*{RETIRED_SUFFIX}")):
                (key,) = TrustedKeys(path).keys()
                files.setdefault((key, False), []).append(path)
        if mine is not None:
            own = [] if self._remote is not None else [self._signing]
            files[mine, mine in roles] = [*own, *files.get((mine, mine in roles), [])]
        known = [
            KnownKey(
                key=key,
                files=tuple(paths),
                signs=key == mine,
                roles=tuple(sorted(roles[key])) if is_trusted else (),
            )
            for (key, is_trusted), paths in files.items()
        ]
        return tuple(sorted(known, key=lambda one: (not one.signs, not one.trusted, one.key)))

    def find_signer(self) -> Signer | None:
        """Return the signer of this machine; None without a signing key."""
        if self._remote is not None:
            return self._remote
        return read_key(self._signing) if self._signing.exists() else None

    def create(self, path: Path | None = None) -> EcdsaSigner:
        """Create a key pair, by default this machine's signing key, which is then trusted.

        Raises:
            UserError: the file of the key exists.
            InfrastructureError: the key cannot be written.
        """
        path = path or self._signing
        if path.exists():
            raise UserError(
                "a file already exists at this path",
                where=str(path),
                remedy="Choose another path, or replace the signing key with "
                "`onnx-ops keys rotate`.",
            )
        signer = create_key(path)
        if path == self._signing:
            self._trust(signer)
        return signer

    def trust(self, path: Path, role: KeyRole) -> Mapping[Digest, str]:
        """Trust a public key for a role; return the key in base64 of DER, by digest.

        Raises:
            NotFoundError: the file does not exist.
            UserError: the file does not contain a public key of ECDSA P-256.
        """
        if not path.is_file():
            remedy = f"Name the file NAME{PUBLIC_SUFFIX} that the key's owner sent."
            raise NotFoundError("there is no such file", where=str(path), remedy=remedy)
        keys, trusted = TrustedKeys(path).public(), TrustedKeys(self._trusted, role=role).public()
        (digest,) = keys
        if digest not in trusted:
            name = path.name.removesuffix(PUBLIC_SUFFIX).removesuffix(".pem")
            copy = self._trusted / role / f"{name}-{short_digest(digest)}{PUBLIC_SUFFIX}"
            write_durably(copy, path.read_bytes(), 0o644)
        return keys

    def rotate(self, admit: Callable[[Mapping[Digest, str]], object]) -> tuple[Digest, Digest]:
        """Replace the signing key; return the digests of the old and the new key.

        The old public key stays trusted. Both public keys are trusted on this machine before the
        new private key signs anything. Decisions therefore stay verifiable here after a crash.
        After a crash, the next call completes the rotation with the same new key.

        Args:
            admit: makes the old key admit the new key to the ledgers. If it fails, the old key
                continues to sign.

        Raises:
            NotFoundError: this machine has no signing key.
            UserError: the signing key is in a service or an environment variable, or the file does
                not contain a private key of ECDSA P-256.
            RefusedError: other users can read the file of the signing key.
            InfrastructureError: the new key cannot be written.
        """
        if self._remote is not None:
            what = "onnx-ops can replace a signing key only in a file"
            raise UserError(what, where="signer", remedy=_REPLACE_REMOTE)
        old = read_key(self._signing)
        following = self._signing.with_name(f"{self._signing.stem}.next.pem")
        new = create_key(following)
        self._trust(old)
        self._trust(new)
        admit(TrustedKeys(public_path(following)).public())
        # The private key is replaced last: until then, the next call continues this rotation.
        public_path(following).replace(public_path(self._signing))
        following.replace(self._signing)
        return old.key, new.key

    def find(self, text: str) -> KnownKey:
        """Return the trusted key whose digest begins with `text`.

        Raises:
            UserError: the digests of several trusted keys begin with `text`.
            NotFoundError: the digest of no trusted key begins with `text`.
        """
        prefix = hex_digits(Digest(text.lower()))
        trusted = [known for known in self.list_keys() if known.trusted]
        matches = [
            known for known in trusted if prefix and hex_digits(known.key).startswith(prefix)
        ]
        if len(matches) > 1:
            what = f"several keys begin with {text}"
            raise UserError(what, remedy="Write more digits of the key.")
        if not matches:
            names = ", ".join(short_digest(known.key) for known in trusted) or "none"
            raise NotFoundError(
                f"no trusted key begins with {text!r}",
                where=str(self._trusted),
                remedy=f"Trusted: {names}.",
            )
        return matches[0]

    def require_retirable(self, known: KnownKey) -> None:
        """Raise RefusedError if the key is this machine's signing key."""
        if known.signs:
            what = f"this machine signs with key {short_digest(known.key)}"
            where, remedy = str(self._signing), "Replace that key first: `onnx-ops keys rotate`."
            if self._remote is not None:
                where, remedy = "signer", _REPLACE_REMOTE
            raise RefusedError(what, where=where, remedy=remedy)

    def retire(self, known: KnownKey) -> tuple[Path, ...]:
        """Stop trusting a key; return its renamed files, which remain as a record.

        Raises:
            RefusedError: the key is this machine's signing key.
        """
        self.require_retirable(known)
        return tuple(
            path.replace(path.with_name(path.name.removesuffix(PUBLIC_SUFFIX) + RETIRED_SUFFIX))
            for path in known.files
        )

    def _trust(self, signer: EcdsaSigner) -> None:
        path = self._trusted / f"{self._signing.stem}-{short_digest(signer.key)}{PUBLIC_SUFFIX}"
        if not path.exists():
            write_durably(path, signer.public_pem(), 0o644)
