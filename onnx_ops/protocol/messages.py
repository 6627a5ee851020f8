"""Headers and messages of the endpoint server's HTTP interfaces, public and admin."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, from_document

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Headers of the public listener, in lower case.
USER_KEY_HEADER = "x-user-key"
"""Requests with the same value are answered by the same deployment."""
REQUEST_ID_HEADER = "x-request-id"
"""Copied to the response."""
TRACE_PARENT_HEADER = "traceparent"
"""W3C trace context, copied to the response."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""A request that has been queued for this many milliseconds gets a 504 instead of being run."""
PIN_HEADERS = ("x-amzn-sagemaker-target-variant", "azureml-model-deployment")
"""Headers that select a deployment by name, regardless of its traffic weight."""
DEPLOYMENT_HEADER = "x-onnx-ops-deployment"
"""Names the deployment that answered."""
VARIANT_HEADER = "x-amzn-invoked-production-variant"
"""Names the deployment that answered, as SageMaker does."""
BINARY_LENGTH_HEADER = "inference-header-content-length"
"""Bytes of JSON at the start of a body in the binary form of the Open Inference Protocol."""

STATE_PATH = "/admin/state"
COUNTS_PATH = "/admin/counts"

FAILURE_STATUSES = frozenset({"422", "429", "500", "503", "504", "other"})
"""Statuses that count against the deployment: its model failed on inputs that fit its signature, was not loaded, or
answered too late. Queue overflow (429) and timeouts (504) are fair: all deployments share one first-come order."""
REJECTION_STATUSES = frozenset({"400", "404", "413", "415"})
"""Statuses of requests that were rejected before they reached a model."""

USER_BUCKETS = 1 << 14
"""Users are grouped by the first 14 bits of the hash that also splits the traffic."""
KEYLESS_CELL = USER_BUCKETS
"""The cell of requests without a user key."""
USER_CELLS = USER_BUCKETS + 1
CELL_REQUESTS, CELL_ERRORS, CELL_FEEDBACK, CELL_SUCCESSES, CELL_LATENCIES = range(5)
"""Fields of the counts by user. From `CELL_LATENCIES` on: requests by the number of thresholds that they exceed."""
MAX_USER_THRESHOLDS = 24
"""Latency thresholds of a deployment: places of its distribution, and four quantiles with allowed slow-downs."""
USER_FIELDS = CELL_LATENCIES + MAX_USER_THRESHOLDS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminState:
    """Response to GET and PUT of the state; None before the first publication.

    `failed` are deployments that could not be loaded again, with the reason.
    """

    state: EndpointState | None
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentCounts:
    """Counts of one deployment since it was first published, summed over all workers.

    Attributes:
        statuses: requests by HTTP status; `other` for any status that is not listed. Shadow requests are excluded.
        latency: histogram of the time from the last byte of a request to its response.
        service: the same without queueing, for requests that ran alone. Both have one bucket more than
            `Counts.bounds_s`.
        shadow_answered, shadow_differing, shadow_failed: mirrored requests by result.
        feedback, successes: entries of feedback that clients reported, and the good ones.
        users: counts by user, if they were requested (see `decode_user_counts`).
        cold_s: seconds of loads in fresh processes. Measured if a deployment of a user counts request gets neither
            traffic nor mirrored requests.
    """

    statuses: Mapping[str, int]
    latency: tuple[int, ...]
    service: tuple[int, ...]
    shadow_answered: int = 0
    shadow_differing: int = 0
    shadow_failed: int = 0
    feedback: int = 0
    successes: int = 0
    users: str = ""
    cold_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCountsRequest:
    """Body of a POST to the counts: count the requests of two deployments by user.

    `limits_s` are, by deployment, ascending latency thresholds, at most `MAX_USER_THRESHOLDS`. Another number resets
    the counts.
    """

    limits_s: Mapping[str, tuple[float, ...]]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Response to GET and POST of the counts.

    Attributes:
        origin: identifies the server's memory. Another value means that all counts were reset.
        at: seconds since the epoch.
        bounds_s: upper bounds of the latency histograms in seconds.
        deployments: counts by name of deployment.
        split: equal for servers that send each user to the same deployment and count it in the same bucket.
    """

    origin: str
    at: float
    bounds_s: tuple[float, ...]
    deployments: Mapping[str, DeploymentCounts]
    split: str = ""


def decode_user_counts(text: str) -> npt.NDArray[np.int64]:
    """Return the counts of one deployment, shape (`USER_FIELDS`, `USER_CELLS`). Raises ValueError.

    A user can reach several servers: add the arrays of all servers before comparing users.
    """
    import numpy as np

    raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), USER_CELLS * USER_FIELDS * 8)
    return np.frombuffer(raw, dtype="<u8").astype(np.int64).reshape(USER_FIELDS, USER_CELLS)


def error_to_bytes(error: OnnxOpsError) -> bytes:
    """Serialize an error as JSON."""
    return canonical_json(error.as_document())


def error_from_bytes(data: bytes) -> OnnxOpsError:
    """Parse an error response of the server; any other body gives a ServiceUnavailableError."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict) or "what" not in document:
        text = data[:200].decode("utf-8", "replace")
        return ServiceUnavailableError("the endpoint server sent an unexpected response", why=text)
    return from_document(document)
