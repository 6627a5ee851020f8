"""Signing keys: creation, rotation and retirement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx_ops.adapters.signers.ecdsa import EcdsaSigner, create_key, public_path
from onnx_ops.attestation import PUBLIC_SUFFIX, TrustedKeys
from onnx_ops.domain.artifact import Digest, hex_digits, short_digest
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.scratch import write_durably

RETIRED_SUFFIX = ".retired.pem"
"""`NAME.pub.pem` is trusted; as `NAME.retired.pem` the same file is a record only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One public key. `signs`: this machine signs with it now."""

    key: Digest
    files: tuple[Path, ...]
    signs: bool
    trusted: bool


class Keyring:
    """The file of this machine's signing key, which need not exist, and the folder of trusted public keys."""

    def __init__(self, signing: Path, trusted: Path) -> None:
        self._signing = signing
        self._trusted = trusted

    def list_keys(self) -> tuple[KnownKey, ...]:
        """Return all keys: the signing one first, then the trusted, then the retired."""
        mine = EcdsaSigner(self._signing).key if self._signing.exists() else None
        files: dict[tuple[Digest, bool], list[Path]] = {}
        if mine is not None:
            trusted = TrustedKeys(self._trusted).keys()
            files[mine, mine in trusted] = [self._signing]
        public, retired = (sorted(self._trusted.glob(f"*{suffix}")) for suffix in (PUBLIC_SUFFIX, RETIRED_SUFFIX))
        for path in (*public, *retired):
            (key,) = TrustedKeys(path).keys()
            files.setdefault((key, path.name.endswith(PUBLIC_SUFFIX)), []).append(path)
        known = [
            KnownKey(key=key, files=tuple(paths), signs=key == mine, trusted=is_trusted)
            for (key, is_trusted), paths in files.items()
        ]
        return tuple(sorted(known, key=lambda one: (not one.signs, not one.trusted, one.key)))

    def create(self, path: Path | None = None) -> EcdsaSigner:
        """Create a key pair, by default this machine's signing key."""
        path = path or self._signing
        if path.exists():
            raise UserError("there is a key already", where=str(path), remedy="Replace it with `onnx-ops keys rotate`.")
        signer = create_key(path)
        if path == self._signing:
            self._trust(signer)
        return signer

    def rotate(self) -> tuple[Digest, Digest]:
        """Replace the signing key, return the old and the new one; the old public key stays trusted.

        Both public keys are trusted before the new private key signs anything, so that every decision is verifiable
        after a crash at any point. The next call continues with the same new key.
        """
        old = EcdsaSigner(self._signing)
        following = self._signing.with_name(f"{self._signing.stem}.next.pem")
        new = create_key(following)
        self._trust(old)
        self._trust(new)
        following.replace(self._signing)
        public_path(following).replace(public_path(self._signing))
        return old.key, new.key

    def find(self, text: str) -> KnownKey:
        """Return the trusted key whose digest begins with `text`."""
        prefix = hex_digits(Digest(text.lower()))
        trusted = [known for known in self.list_keys() if known.trusted]
        matches = [known for known in trusted if prefix and hex_digits(known.key).startswith(prefix)]
        if len(matches) > 1:
            raise UserError(f"several keys begin with {text}", remedy="Write more of its digits.")
        if not matches:
            names = ", ".join(short_digest(known.key) for known in trusted) or "none"
            raise NotFoundError(
                f"no trusted key begins with {text!r}", where=str(self._trusted), remedy=f"Trusted: {names}."
            )
        return matches[0]

    def retire(self, known: KnownKey) -> tuple[Path, ...]:
        """Stop trusting a key; return the files that are kept as a record."""
        if known.signs:
            what = f"this machine signs with key {short_digest(known.key)}"
            raise RefusedError(what, where=str(self._signing), remedy="Replace that key first: `onnx-ops keys rotate`.")
        renames = [
            (path, path.with_name(path.name.removesuffix(PUBLIC_SUFFIX) + RETIRED_SUFFIX)) for path in known.files
        ]
        return tuple(path.replace(retired) for path, retired in renames)

    def _trust(self, signer: EcdsaSigner) -> None:
        path = self._trusted / f"{self._signing.stem}-{short_digest(signer.key)}{PUBLIC_SUFFIX}"
        if not path.exists():
            write_durably(path, signer.public_pem())
