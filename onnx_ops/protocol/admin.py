"""Messages and file names between the endpoint server and whoever runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from onnx_ops import codec
from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import CorruptStateError, OnnxOpsError, ServiceUnavailableError, from_document
from onnx_ops.protocol.options import ServerOptions

T = TypeVar("T")

STATE_PATH = "/admin/state"
COUNTS_PATH = "/admin/counts"

SERVER_FILE = "server.json"
"""The `ServerRecord` of the server that runs on this folder; written once it answers."""
LOCK_FILE = "server.lock"
"""Locked (flock) by the server for as long as it lives; holds its process id."""
TOKEN_FILE = "token"  # noqa: S105 (the name of the file)
"""The bearer token of the admin listener; readable by its owner only."""
WORKERS_FOLDER = "workers"
"""One file per live worker, named after its process id; holds when that process started (see `processes`)."""
HANDOVER_SOCKET = "handover.sock"
"""Where workers whose supervisor died give their listening socket to the next one."""
AUDIT_FILE = "audit.jsonl"
"""One line per change that was asked for: who, what, when, and how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """Where a running server listens, and how it was told to run. `started` is in seconds since the epoch."""

    pid: int
    port: int
    admin_port: int
    started: float
    options: ServerOptions = field(default_factory=ServerOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """Answer to GET and PUT of the state. `failed` names deployments that could not be loaded again, and why."""

    state: EndpointState | None
    failed: Mapping[str, str] = field(default_factory=dict)


FAILURES = frozenset({"422", "429", "500", "503", "504", "other"})
"""Statuses that tell against the deployment: it failed on inputs that fit its signature, had no model, was too late, or
had a full queue. Whoever comes first has the next turn, so a version is late no more often than another for the traffic
that it gets."""
REFUSALS = frozenset({"400", "404", "413", "415"})
"""Statuses of requests that were wrong before any model saw them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCounts:
    """What one deployment answered since it was first published, summed over all workers.

    `statuses` are requests by HTTP status, `other` for any not listed. `latency` tells how long requests took from
    their last byte to their answer, `service` how long without the wait for their turn, of those that had one for
    themselves; either holds one count more than `Counts.bounds_s`. Copies of requests (`shadow_*`) are in none of
    these. `outcomes` are reports of clients. `users` are the counts by user that a watch asks for (`protocol.users`).
    `cold_s` are seconds that loads took in processes of their own, which a watch asks for if a deployment of it gets
    neither traffic nor copies.
    """

    statuses: Mapping[str, int]
    latency: tuple[int, ...]
    service: tuple[int, ...]
    shadow_answered: int = 0
    shadow_differing: int = 0
    shadow_failed: int = 0
    outcomes: int = 0
    successes: int = 0
    users: str = ""
    cold_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """With a POST to the counts: count the requests of two deployments by user. By name, the latencies in seconds that
    are told apart, ascending, at most `protocol.users.MOST_LIMITS`. Another `number` begins anew."""

    limits_s: Mapping[str, tuple[float, ...]]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Answer to GET of the counts, by name of deployment. Another `origin` means that they began anew.

    `at` is seconds since the epoch; `bounds_s` are upper bounds of latencies in seconds. Servers whose `split` is equal
    send a user to the same deployment and count it in the same bucket.
    """

    origin: str
    at: float
    bounds_s: tuple[float, ...]
    deployments: Mapping[str, DeploymentCounts]
    split: str = ""


def read_message(data: bytes, kind: type[T], *, where: str = "") -> T:
    """A message, or the record of a server, from its JSON text.

    Raises:
        CorruptStateError: it is not one.
    """
    if not data.lstrip().startswith(b"{"):
        raise CorruptStateError(f"not a {kind.__name__}", where=where, why="it is not a JSON object")
    return codec.loads(data, kind, where=where)


def error_to_bytes(error: OnnxOpsError) -> bytes:
    return canonical_json(error.as_document())


def error_from_bytes(data: bytes) -> OnnxOpsError:
    """The error that the server meant; ServiceUnavailable if it said nothing that can be understood."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict) or "what" not in document:
        text = data[:200].decode("utf-8", "replace")
        return ServiceUnavailableError("the endpoint server gave an answer that is not its own", why=text)
    return from_document(document)
