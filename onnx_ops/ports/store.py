"""Ports that keep and vouch for content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from onnx_ops.domain.artifact import Digest, Manifest, StoredObject


class Store(Protocol):
    """Content by digest, and stage results by key. Safe for several processes at once, whatever is killed."""

    def put_bytes(self, data: bytes) -> Digest:
        """Store bytes, and return their digest."""
        ...

    def put_file(self, path: Path) -> Digest:
        """Store a file, and return its digest."""
        ...

    def path(self, digest: Digest) -> Path:
        """Return a read-only local file with exactly that content, verified now.

        Raises:
            CorruptStateError: the content is missing or is not what its name says.
        """
        ...

    def read(self, digest: Digest) -> bytes:
        """Return the content. Raises CorruptStateError as `path` does."""
        ...

    def record(self, key: Digest, manifest: Manifest) -> None:
        """Remember the result of the stage with that key."""
        ...

    def lookup(self, key: Digest) -> Manifest | None:
        """Return the result of a key if the record and all its files are intact, else None."""
        ...

    def results(self) -> Iterator[Manifest]:
        """Every recorded result, whether its files are there or not."""
        ...

    def contents(self) -> tuple[StoredObject, ...]:
        """All content that is kept, and what killed writers left; records are not among it."""
        ...

    def forget(self, stored: StoredObject) -> bool:
        """Remove it, unless somebody has put it again since; says whether it went. No error if it is gone."""
        ...


class Signer(Protocol):
    """Signs bytes. The key never leaves it."""

    @property
    def key(self) -> Digest:
        """Digest of the public key."""
        ...

    def sign(self, data: bytes) -> str:
        """Base64 of the signature."""
        ...


class Verifier(Protocol):
    """Knows the public keys that are trusted."""

    def verify(self, data: bytes, signature: str, key: Digest) -> None:
        """Verify a signature. Raises InvalidSignatureError if the key is not trusted or it does not match."""
        ...


class StageJournal(Protocol):
    """What one long stage has done so far, in order. It survives the death of its writer at any moment."""

    def read(self) -> tuple[Any, ...]:
        """Return the documents so far; those behind a torn or altered one are dropped for good."""
        ...

    def append(self, document: Any) -> None:
        """Add a JSON document. It is on the disk when this returns."""
        ...

    def clear(self) -> None:
        """Forget all of them."""
        ...
