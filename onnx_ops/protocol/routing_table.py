"""The routing table: the deployments of an endpoint and the split of its traffic."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import canonical_json, digest_bytes, digest_json, short_digest
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.errors import CorruptStateError
from onnx_ops.scratch import write_durably

_log = logging.getLogger(__name__)

FORMAT = "onnx-ops/table"
VERSION = 1

NOTICE_S = 10.0
"""Seconds before the end of its serving lease from which a server is not ready.

In this time, a load balancer stops sending requests to the server.
"""

CURRENT_FILE = "table.json"
PREVIOUS_FILE = "table.previous.json"

FEEDBACK_KEY_BYTES = 16
_FEEDBACK_KEY = re.compile(f"[0-9a-f]{{{2 * FEEDBACK_KEY_BYTES}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """One published state of an endpoint.

    `layout` lists the deployments' names, the newest first. The order is fixed when a deployment is
    added, and later weights do not change it. Therefore, with two deployments and without epochs, a
    change of weights moves as few users as possible to another deployment.

    `fallback` is the deployment that answers while the server has no lease. It gets all requests
    for which the client selects no deployment. It is empty if no lease is needed. With `is_leased`,
    a server without a serving lease refuses all requests. `NOTICE_S` seconds before this lease
    ends, the server stops being ready.

    `feedback_key`, in hexadecimal, seals the tokens with which any server of the endpoint accepts
    feedback. If it is empty, responses have no tokens. The key is a secret, so `repr` omits it.
    """

    state: EndpointState
    layout: tuple[str, ...]
    fallback: str = field(default="", metadata=OMIT_DEFAULT)
    is_leased: bool = field(default=False, metadata=OMIT_DEFAULT)
    feedback_key: str = field(default="", repr=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if sorted(self.layout) != sorted(d.name for d in self.state.deployments):
            raise ValueError(f"the layout {list(self.layout)} differs from the deployments' names")
        if self.fallback and self.fallback not in self.layout:
            raise ValueError(f"the fallback {self.fallback!r} is not a deployment of the table")
        if self.feedback_key and not _FEEDBACK_KEY.fullmatch(self.feedback_key):
            raise ValueError(f"the feedback key is not {2 * FEEDBACK_KEY_BYTES} hexadecimal digits")

    def list_slots(self) -> tuple[str, ...]:
        """Return 100 deployment names, one per percent of traffic, newest first."""
        weights = self.state.split.weights
        return tuple(name for name in self.layout for _ in range(weights.get(name, 0)))

    def get_experiment(self) -> tuple[str, str]:
        """Return name and manifest of the newest deployment with traffic."""
        newest = next(name for name in self.layout if self.state.split.weights.get(name, 0) > 0)
        return newest, next(d.manifest for d in self.state.deployments if d.name == newest)

    def compute_split_digest(self) -> str:
        """Return a digest of the settings that assign users to deployments.

        In a split with epochs, generation and epoch also affect the assignment, but are not part of
        the digest.
        """
        parts = (*self.get_experiment(), *self.list_slots(), repr(self.state.split.epoch_s))
        return short_digest(digest_bytes("\0".join(parts).encode()))


def build_next_table(previous: RoutingTable | None, state: EndpointState) -> RoutingTable:
    """Return the table that publishes `state` after `previous`.

    Known deployments keep their order. New deployments and deployments with another manifest
    precede them, in ascending order of traffic. The feedback key is unchanged. `fallback` and
    `is_leased` have their defaults.
    """
    known = {} if previous is None else {d.name: d.manifest for d in previous.state.deployments}
    manifests = {d.name: d.manifest for d in state.deployments}
    weights = state.split.weights
    unchanged = (
        [] if previous is None else [n for n in previous.layout if manifests.get(n) == known[n]]
    )
    new = [d.name for d in reversed(state.deployments) if d.name not in unchanged]
    new.sort(key=lambda name: weights.get(name, 0))
    feedback_key = "" if previous is None else previous.feedback_key
    return RoutingTable(state=state, layout=(*new, *unchanged), feedback_key=feedback_key)


def encode_table(table: RoutingTable) -> bytes:
    """Serialize a table with format, version and checksum."""
    content = codec.to_json(table)
    return canonical_json(
        {"format": FORMAT, "version": VERSION, "checksum": digest_json(content), "table": content}
    )


def decode_table(data: bytes, *, where: str = "") -> RoutingTable:
    """Parse a table that `encode_table` wrote.

    Raises:
        CorruptStateError: the data is not JSON, has another format or version, differs from its
            checksum, or describes something else than a table.
    """
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        raise CorruptStateError("the table is not JSON", where=where, why=str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptStateError("the document is not the table of an endpoint", where=where)
    if document.get("version") != VERSION:
        raise CorruptStateError(
            f"table version {document.get('version')!r} is not supported", where=where
        )
    content = document.get("table")
    try:
        is_intact = isinstance(content, dict) and digest_json(content) == document.get("checksum")
    except ValueError:
        # Canonical JSON excludes NaN and infinity, so `encode_table` never writes them.
        is_intact = False
    if not is_intact:
        raise CorruptStateError("the table does not match its checksum", where=where)
    return codec.from_json(content, RoutingTable, where=where)


class TableFile:
    """Two files in a folder: the table that was published last, and the previous one."""

    def __init__(self, folder: Path) -> None:
        self._current = folder / CURRENT_FILE
        self._previous = folder / PREVIOUS_FILE

    def read(self) -> RoutingTable | None:
        """Return the current table, or the previous one if the current one is unusable.

        A file is unusable if it is missing or invalid. The result is None if both are. Invalid
        files are logged and not deleted.
        """
        for path in (self._current, self._previous):
            try:
                table = self._load(path)
            except CorruptStateError as error:
                _log.warning("invalid table: %s", error)
                continue
            if table is not None:
                return table
        return None

    def write(self, table: RoutingTable) -> None:
        """Write a table durably, and store a valid current table as the previous one.

        After an OSError, `read` returns the old table, unless only the last sync of the folder
        failed.
        """
        try:
            current = self._load(self._current)
        except CorruptStateError:
            current = None
        if current is not None:
            write_durably(self._previous, encode_table(current))
        write_durably(self._current, encode_table(table))

    @staticmethod
    def _load(path: Path) -> RoutingTable | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return decode_table(data, where=str(path))
