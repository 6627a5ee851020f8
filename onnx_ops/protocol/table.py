"""The published table: what an endpoint serves, as it stands on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from onnx_ops import codec
from onnx_ops.domain.artifact import canonical_json, digest_bytes, digest_json, short
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import CorruptStateError

FORMAT = "onnx-ops/table"
VERSION = 2
"""Version 1 knew no shadow traffic and no batchable deployments."""
_READABLE = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One published state of an endpoint.

    `layout` holds the deployments' names, the newest first. It depends on when each deployment came and never on
    weights, so that moving the split keeps everybody who stays within a deployment where they are.
    """

    state: EndpointState
    layout: tuple[str, ...]

    def __post_init__(self) -> None:
        if sorted(self.layout) != sorted(d.name for d in self.state.deployments):
            raise ValueError(f"the layout {list(self.layout)} does not name the deployments")

    def deployment(self, name: str) -> Deployment:
        return next(d for d in self.state.deployments if d.name == name)


def follow(previous: Table | None, state: EndpointState) -> Table:
    """The table that publishes `state` after `previous`.

    Deployments that were there keep their order; newcomers go before them, the one with less traffic first.
    A deployment whose manifest changed is a newcomer.
    """
    known = {} if previous is None else {d.name: d.manifest for d in previous.state.deployments}
    manifests = {d.name: d.manifest for d in state.deployments}
    weights = state.split.weights
    stay = [] if previous is None else [n for n in previous.layout if manifests.get(n) == known[n]]
    new = [d.name for d in reversed(state.deployments) if d.name not in stay]
    new.sort(key=lambda name: weights.get(name, 0))
    return Table(state=state, layout=(*new, *stay))


def encode(table: Table) -> bytes:
    """The table with its format, version and checksum."""
    content = codec.to_json(table)
    return canonical_json({"format": FORMAT, "version": VERSION, "checksum": digest_json(content), "table": content})


def decode(data: bytes, *, where: str = "") -> Table:
    """The table that `encode` wrote.

    Raises:
        CorruptStateError: it is torn, altered, of another format, or of a version that this program does not know.
    """
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        raise CorruptStateError("the table is torn", where=where, why=str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptStateError("not a table of an endpoint", where=where)
    if document.get("version") not in _READABLE:
        raise CorruptStateError(f"table version {document.get('version')!r} is not known here", where=where)
    content = document.get("table")
    if not isinstance(content, dict) or not _matches(content, document.get("checksum")):
        raise CorruptStateError("the table does not match its checksum", where=where)
    return codec.from_json(content, Table, where=where)


def _matches(content: object, checksum: object) -> bool:
    try:
        return digest_json(content) == checksum
    except ValueError:  # an infinity, which no table of ours holds
        return False


def slots(table: Table) -> tuple[str, ...]:
    """One deployment name per percent of traffic, laid out newest first; the length is 100."""
    weights = table.state.split.weights
    return tuple(name for name in table.layout for _ in range(weights.get(name, 0)))


def experiment(table: Table) -> tuple[str, str]:
    """What the salt of sticky assignment stands for: name and manifest of the newest deployment with traffic."""
    newest = next(name for name in table.layout if table.state.split.weights.get(name, 0) > 0)
    return newest, table.deployment(newest).manifest


def split_of(table: Table) -> str:
    """What decides which deployment answers a user: equal for tables that send every user to the same one."""
    return short(digest_bytes("\0".join((*experiment(table), *slots(table))).encode()))
