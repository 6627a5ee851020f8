"""How far this machine has read each ledger, so that storage cannot take a ledger back unnoticed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_ops import codec
from onnx_ops.domain.artifact import Digest
from onnx_ops.errors import CorruptStateError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHead:
    """The last entry of a ledger that was verified: its sequence, and the digest of its bytes."""

    sequence: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class FixedEntry:
    """An entry that a ledger must hold since this machine has verified it; `path` is the file that remembers it."""

    digest: Digest
    path: Path


def require_fixed(
    endpoint: str, fixed: Mapping[int, FixedEntry], sequence: int, digest: Digest | None
) -> None:
    """Raise CorruptStateError if a ledger holds another entry than it must, or none (None)."""
    expected = fixed.get(sequence)
    if expected is None or expected.digest == digest:
        return
    raise CorruptStateError(
        f"the ledger went back: {'it ends before' if digest is None else 'it has another'} entry "
        f"{sequence}",
        where=f"ledger {endpoint}",
        why=f"this machine has seen entry {sequence}; the storage was restored from a backup, "
        "or changed",
        remedy="If it was restored on purpose, accept its state with `onnx-ops ledger adopt`, "
        f"or without a key remove {expected.path}. "
        "Else see `onnx-ops docs runbooks/ledger-damaged`.",
    )


class SeenHeads:
    """One file by endpoint in a folder; without a folder, nothing is remembered.

    Those who can change the ledger's storage must not be able to write there. A file that a power
    cut damaged counts as missing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, SeenHead | None] = {}

    def list_fixed(self, endpoint: str) -> dict[int, FixedEntry]:
        """Return the last entry that this machine has verified by its sequence, if it remembers any."""
        if self._folder is None:
            return {}
        seen = self._known[endpoint] = self._load(self._folder, endpoint)
        if seen is None:
            return {}
        return {seen.sequence: FixedEntry(seen.digest, _format_path(self._folder, endpoint))}

    def remember(self, endpoint: str, sequence: int, digest: Digest) -> None:
        """Remember the head of a ledger that was verified, unless another process has seen more."""
        head = SeenHead(sequence=sequence, digest=digest)
        if self._folder is None or self._known.get(endpoint) == head:
            return
        self._known[endpoint] = head
        path = _format_path(self._folder, endpoint)
        temporary = path.with_suffix(f".{os.getpid()}")
        # It protects only those who can write here; a reader without that right works nevertheless.
        with contextlib.suppress(OSError):
            other = self._load(self._folder, endpoint)
            if other is None or other.sequence < sequence:
                self._folder.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(codec.dumps(head))
                temporary.replace(path)

    def _load(self, folder: Path, endpoint: str) -> SeenHead | None:
        try:
            return codec.loads(_format_path(folder, endpoint).read_bytes(), SeenHead)
        except FileNotFoundError:
            return None
        except (OSError, CorruptStateError) as error:
            _log.warning(
                "what this machine has seen of ledger %s cannot be read: %s", endpoint, error
            )
            return None


def _format_path(folder: Path, endpoint: str) -> Path:
    return folder / f"{endpoint}.json"
