"""Record of how far this machine has read each ledger.

The record reveals a ledger whose storage was reset to an earlier state.
"""

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
    """The last verified entry of a ledger: its sequence, and the digest of its bytes."""

    sequence: int
    digest: Digest


def require_fixed(
    endpoint: str, fixed: Mapping[int, Digest], sequence: int, digest: Digest | None
) -> None:
    """Raise CorruptStateError if a ledger does not contain the required entry.

    `fixed` has the digests of required entries by sequence. `digest` is the digest of the entry in
    the ledger; None if the ledger has no such entry.
    """
    if fixed.get(sequence) in (None, digest):
        return
    raise CorruptStateError(
        f"the ledger lost entries: {'it ends before' if digest is None else 'it has a different'} "
        f"entry {sequence}",
        where=f"ledger {endpoint}",
        why=f"this machine has read entry {sequence} before; the storage was restored from a "
        "backup, or changed",
        remedy="If the storage was restored on purpose, accept its state with "
        f"`onnx-ops ledger adopt {endpoint}` on a machine with a release key. "
        "If it was not, see `onnx-ops docs runbooks/ledger-damaged`.",
    )


class SeenHeads:
    """Store of the last verified entry of each ledger, one file for each endpoint.

    Entries are recorded only with a folder. Users who can change the ledger's storage must not have
    write access to this folder. A damaged file, for example after a power failure, is ignored. With
    `is_read_only`, existing records are read, and nothing is recorded.
    """

    def __init__(self, folder: Path | None, *, is_read_only: bool = False) -> None:
        self._folder = folder
        self._is_read_only = is_read_only
        self._known: dict[str, SeenHead | None] = {}

    def list_fixed(self, endpoint: str) -> dict[int, Digest]:
        """Return the digest of the last entry verified on this machine, by its sequence.

        The result is empty if no entry is recorded.
        """
        if self._folder is None:
            return {}
        seen = self._known[endpoint] = self._load(self._folder, endpoint)
        if seen is None:
            return {}
        return {seen.sequence: seen.digest}

    def remember(self, endpoint: str, sequence: int, digest: Digest) -> None:
        """Record the verified head of a ledger.

        A recorded head with the same or a later sequence is kept.
        """
        head = SeenHead(sequence=sequence, digest=digest)
        if self._folder is None or self._is_read_only or self._known.get(endpoint) == head:
            return
        self._known[endpoint] = head
        path = _format_path(self._folder, endpoint)
        temporary = path.with_suffix(f".{os.getpid()}")
        # A machine without write access to this folder can still read ledgers. But it records no
        # head, so it can miss that a ledger was reset.
        with contextlib.suppress(OSError):
            other = self._load(self._folder, endpoint)
            if other is None or other.sequence < sequence:
                self._folder.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(codec.dumps(head))
                temporary.replace(path)

    def _load(self, folder: Path, endpoint: str) -> SeenHead | None:
        path = _format_path(folder, endpoint)
        try:
            return codec.loads(path.read_bytes(), SeenHead)
        except FileNotFoundError:
            return None
        except (OSError, CorruptStateError) as error:
            _log.warning("%s is ignored: the last verified entry cannot be read: %s", path, error)
            return None


def _format_path(folder: Path, endpoint: str) -> Path:
    return folder / f"{endpoint}.json"
