"""Headers and messages of the endpoint server's HTTP interfaces, public and admin."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.endpoint import EndpointState, ServerMemory
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.rollout_observations import ServerUptime
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, from_document

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The names of headers are in lower case, because the public listener converts received names to
# lower case.
USER_KEY_HEADER = "x-user-key"
"""Header with the key of a user.

The split assigns all requests with the same key to one deployment, until the split, or an epoch of
it, ends.
"""
REQUEST_ID_HEADER = "x-request-id"
"""Header with the id of a request.

The response contains a copy of an id that is short enough and printable ASCII.
"""
TRACE_PARENT_HEADER = "traceparent"
"""Header with the W3C trace context.

The response contains a copy of it, like the request id.
"""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""Header with the milliseconds after which a request gets a 504.

The limit applies to requests that are queued or run on a thread.
"""
PIN_HEADERS = ("x-amzn-sagemaker-target-variant", "azureml-model-deployment")
"""Headers that select a deployment by name, regardless of its traffic weight."""
DEPLOYMENT_HEADER = "x-onnx-ops-deployment"
"""Header with the name of the deployment that answered."""
FEEDBACK_HEADER = "x-onnx-ops-feedback"
"""Header with the feedback token, which every server of the endpoint accepts."""
VARIANT_HEADER = "x-amzn-invoked-production-variant"
"""Header with the name of the deployment that answered, as in SageMaker."""
BINARY_LENGTH_HEADER = "inference-header-content-length"
"""Header with the number of bytes of JSON at the start of a body.

The header belongs to the binary form of the Open Inference Protocol.
"""

STATE_PATH = "/admin/state"
COUNTS_PATH = "/admin/counts"
TABLE_PATH = "/admin/table"
LEASE_PATH = "/admin/lease"

FAILURE_STATUSES = frozenset({"422", "429", "500", "503", "504", "other"})
"""Statuses of requests that are counted as errors of the deployment.

The model failed on inputs that fit its signature, was not loaded, or answered too late. Queue
overflow (429) and timeouts (504) can be counted without bias, because requests start in the order
of arrival, regardless of their deployment.
"""
REJECTION_STATUSES = frozenset({"400", "404", "413", "415"})
"""Statuses of requests that were rejected as invalid, mostly before a model ran."""

USER_CELLS = 16_000
"""Number of cells into which users are grouped, by a hash of their key.

Each percent of traffic has 160 cells, so cells represent every weight exactly.
"""
KEYLESS_CELL = USER_CELLS
"""The cell of requests without a user key."""
CELLS = USER_CELLS + 1
CELL_REQUESTS, CELL_ERRORS, CELL_REFUSED, CELL_FEEDBACK, CELL_SUCCESSES, CELL_LATENCIES = range(6)
"""Indexes of the fields in the counts of a cell.

The fields from `CELL_LATENCIES` on count requests by the number of thresholds that they exceed.
"""
MAX_USER_THRESHOLDS = 24
"""Largest number of latency thresholds of a deployment.

These are the 20 `LATENCY_PLACES`, and four percentiles that single guardrails compare.
"""
CELL_FIELDS = CELL_LATENCIES + MAX_USER_THRESHOLDS + 1
_CELL_BYTES = 2 + 4 * CELL_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """Response to GET and PUT of the state, and to PUT of a table.

    `state` is None before the first publication.

    `failed` contains deployments that could not be loaded after a restart, with the reason. It also
    contains shadow deployments without a process. `out_of_service` contains deployments that
    crashed or blocked workers, with the reason. They get no requests until the next publication.
    `counting_failure` is the reason why evidence for a rollout is currently missing; empty if
    nothing failed. `memory` is None if reading it fails, or if no worker runs.
    """

    state: EndpointState | None
    failed: Mapping[str, str] = field(default_factory=dict)
    out_of_service: Mapping[str, str] = field(default_factory=dict)
    counting_failure: str = ""
    memory: ServerMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Body of a PUT of the lease, and of its response.

    `until_ns` is the end of the lease that a table with a fallback needs. `serving_until_ns` is the
    end of the lease that a table with `RoutingTable.is_leased` needs for any request. Both are in
    nanoseconds since boot (CLOCK_BOOTTIME); 0 ends the lease. `lapsed` counts requests of this
    start of the server that were passed to the fallback or refused, because the server had no
    lease.
    """

    until_ns: int
    serving_until_ns: int = 0
    lapsed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCounts:
    """Counts of one deployment, summed over all workers.

    Attributes:
        statuses: requests that are evidence about the deployment, by HTTP status; `other` stands
            for statuses without a counter. Shadow requests are excluded.
        unjudged: all other requests by HTTP status. A client has selected the deployment, the
            server had no lease, or every version with traffic refuses the request.
        latency: histogram of the time from the last byte of a request to its response. It has one
            bucket more than `Counts.bounds_s`.
        service: histogram of the same time minus the time in the queue. It contains only judged
            requests whose latency can be compared. Requests of the warm-up, or in a batch with
            others, are excluded.
        shadow_answered: mirrored requests that the shadow deployment answered.
        shadow_differing: mirrored requests whose responses differ.
        shadow_failed: mirrored requests that failed.
        feedback: number of feedback entries that are evidence about the deployment.
        successes: number of these entries that report a success.
    """

    statuses: Mapping[str, int]
    latency: tuple[int, ...]
    service: tuple[int, ...]
    unjudged: Mapping[str, int] = field(default_factory=dict)
    shadow_answered: int = 0
    shadow_differing: int = 0
    shadow_failed: int = 0
    feedback: int = 0
    successes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCounts:
    """Counts from the publication of one routing table to that of the next.

    `generation` is the generation of the table. The counts never decrease, except `cells`. A
    changed `UserCountsRequest` resets `cells`.

    Attributes:
        split: digest that is equal for servers that select the same deployment for each user.
        deployments: counts by name of deployment.
        cells: counts by cell of users and deployment (see `decode_cells`), if they were requested
            and the split is sticky. Unjudged requests are excluded.
    """

    generation: int
    split: str
    deployments: Mapping[str, DeploymentCounts]
    cells: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCounts:
    """Counts of the requests that were routed in one epoch of a split.

    The split of `generation` was the only valid split in the epoch. This split assigns users anew
    in each epoch. `cells` has the format of `TableCounts.cells`.
    """

    generation: int
    epoch: int
    cells: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCountsRequest:
    """Body of a POST to the counts: count the requests of two deployments by user.

    `limits_s` contains ascending latency thresholds in seconds by deployment, at most
    `MAX_USER_THRESHOLDS` each. If the deployments or thresholds have changed, the counts by user
    are reset.
    """

    limits_s: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Response to GET and POST of the counts.

    Attributes:
        origin: id of the server's start. A different id means that all counts were reset.
        at: seconds since the epoch, on the server's clock.
        bounds_s: upper bounds of the latency histograms in seconds.
        deployments: counts of each deployment of the current table, summed over all tables.
        tables: counts of the last tables, by generation, the current one last.
        epochs: the last closed epochs in ascending order, if counts by user were requested. Their
            counts do not change any more.
        open_epoch: counts of the current epoch so far, if they were requested and are evidence.
        closed_through: number of the last epoch whose counts are final, like those of all epochs
            before it; 0 if the split has no epochs.
        cold_s: times in seconds of loads in fresh processes, by deployment. They are measured if a
            deployment of a `UserCountsRequest` gets neither traffic nor mirrored requests.
        failure: why evidence is currently missing, such as an error at the change of an epoch;
            empty if nothing failed.
        uptimes: uptimes by table, from the follower of a replica. Servers leave this field empty.
        is_final: whether the follower is ending. Only the last report can still replace these
            counts.
        server: name of the replica, from the name of its report. Servers leave this field empty.
    """

    origin: str
    at: float
    bounds_s: tuple[float, ...]
    deployments: Mapping[str, DeploymentCounts]
    tables: tuple[TableCounts, ...] = ()
    epochs: tuple[EpochCounts, ...] = ()
    open_epoch: EpochCounts | None = None
    closed_through: int = 0
    cold_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failure: str = ""
    uptimes: tuple[ServerUptime, ...] = field(default=(), metadata=OMIT_DEFAULT)
    is_final: bool = field(default=False, metadata=OMIT_DEFAULT)
    server: str = field(default="", metadata=OMIT_DEFAULT)


def encode_cells(cells: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> str:
    """Serialize the counts of some cells.

    Args:
        cells: numbers of the cells in ascending order, shape (n,).
        counts: counts of these cells, shape (n, `CELL_FIELDS`).
    """
    data = cells.astype("<u2").tobytes() + counts.astype("<u4").T.tobytes()
    return base64.b64encode(zlib.compress(data, 1)).decode()


def decode_cells(text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Parse a text of `encode_cells`; return the cells and their counts.

    A user can send requests to several servers. Therefore add the counts of all servers before you
    compare users.

    Raises:
        ValueError: the text is not in base64, is truncated or too long, or contains invalid cells.
        zlib.error: the decoded text is not a zlib stream.
    """
    import numpy as np

    inflater = zlib.decompressobj()
    raw = inflater.decompress(base64.b64decode(text, validate=True), CELLS * _CELL_BYTES)
    length, rest = divmod(len(raw), _CELL_BYTES)
    if rest or not inflater.eof:
        raise ValueError("the counts by cell are truncated or too long")
    cells = np.frombuffer(raw, "<u2", length).astype(np.int64)
    if (cells >= CELLS).any() or (np.diff(cells) <= 0).any():
        raise ValueError("the cells are unknown or not in ascending order")
    counts = np.frombuffer(raw, "<u4", offset=2 * length).reshape(CELL_FIELDS, length)
    return cells, counts.T.astype(np.int64)


def error_to_bytes(error: OnnxOpsError) -> bytes:
    """Serialize an error as JSON."""
    return canonical_json(error.as_document())


def error_from_bytes(data: bytes) -> OnnxOpsError:
    """Parse an error response of the server.

    For any other body, return a ServiceUnavailableError.
    """
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict) or "what" not in document:
        text = data[:200].decode("utf-8", "replace")
        return ServiceUnavailableError("the endpoint server sent an unexpected response", why=text)
    return from_document(document)
