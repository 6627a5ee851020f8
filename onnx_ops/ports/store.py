"""Ports of the stores of stage results, and of signers and verifiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from onnx_ops.domain.artifact import Digest, Manifest, StoredObject


class Store(Protocol):
    """Content by digest, and stage results by key.

    A store is safe for several concurrent processes, even if a process is killed. Every method
    raises StorageError or ServiceUnavailableError if the storage fails.
    """

    def put_bytes(self, data: bytes) -> Digest:
        """Store bytes, and return their digest."""

    def put_file(self, path: Path) -> Digest:
        """Store a file, and return its digest."""

    def path(self, digest: Digest) -> Path:
        """Return a read-only local file whose content matches the digest.

        Raises:
            CorruptStateError: the content is missing or does not match its digest.
        """

    def read(self, digest: Digest) -> bytes:
        """Return the content.

        Raises:
            CorruptStateError: as `path`.
        """

    def record(self, key: Digest, manifest: Manifest) -> None:
        """Record the result of the stage with that key."""

    def lookup(self, key: Digest) -> Manifest | None:
        """Return the result of a key, or None.

        The result is None if the record or one of its files is missing or damaged.
        """

    def results(self) -> Iterator[Manifest]:
        """Yield every readable result, including those with missing files."""

    def contents(self) -> tuple[StoredObject, ...]:
        """Return all stored content, and unfinished files of writers; no records."""

    def forget(self, stored: StoredObject) -> bool:
        """Remove the object, unless it was stored again in the meantime.

        Return whether the store no longer has it. A missing object is not an error.
        """


class Signer(Protocol):
    """A signer of bytes. The private key never leaves the signer.

    Except for `is_local`, all members raise an OnnxOpsError if the signer needs a service that
    fails.
    """

    @property
    def is_local(self) -> bool:
        """Whether the signer needs no request to a service."""

    @property
    def key(self) -> Digest:
        """Digest of the public key, which identifies the signer."""

    def sign(self, data: bytes) -> str:
        """Return the signature in base64."""

    def public_pem(self) -> bytes:
        """Return the public key, SubjectPublicKeyInfo in PEM."""


class Verifier(Protocol):
    """A verifier of signatures, with the trusted public keys."""

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        """Verify a signature.

        Raises:
            InvalidSignatureError: the key is not trusted, or the signature is invalid.
            UserError: the file of a trusted key cannot be read, or contains another kind of
                key.
        """


class StageJournal(Protocol):
    """The progress of one long stage, in order.

    The journal survives a crash of its writer at any moment.
    """

    def read(self) -> tuple[Any, ...]:
        """Return the documents so far.

        All documents after an incomplete or altered document are dropped permanently.
        """

    def append(self, document: Any) -> None:
        """Add a JSON document, and sync it to the disk before returning."""

    def clear(self) -> None:
        """Remove all documents."""
