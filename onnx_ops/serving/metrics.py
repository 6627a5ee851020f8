"""Metrics of all workers: in shared memory, and as Prometheus scrapes them.

The memory is anonymous and allocated before the first fork. So it needs no file, and remains when a
worker ends. Outside of labels and exemplars, each number is aligned, and has 8 bytes, or 4 bytes in
counts by cell. At any time, it has one writer, except that all workers write the counted tokens and
delete counted request ids. A reader gets the old value or the new value of such a number.

    header:      published revision; its epoch; the watch of a rollout (see `cell_counts`);
        deployments out of service; isolation of new workers; leases
    processes:   one per worker, `PROCESS_NUMBERS` each: its heartbeat, its lapsed requests, and
        what it runs (see `worker_health`)
    labels:      one JSON text per slot, written by the supervisor
    rows:        one per worker and slot, and one per slot for its shadow process and the
        supervisor, `COLUMNS` numbers each
    request ids: which deployment answered a request id, `REQUEST_IDS` per worker (see `feedback`)
    answers:     which deployment answered a cell of users last, per worker (see `feedback`)
    tokens:      which tokens of responses were counted, shared by all workers (see `feedback`)
    exemplars:   the last traced request of each shown latency bucket, per worker and slot
    cells:       counts by cell of users, `BLOCKS` per worker (see `cell_counts`)

A slot belongs to one deployment. Slot 0 counts requests that reached no deployment.
"""

from __future__ import annotations

import itertools
import json
import mmap
import re
import secrets
import struct
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.protocol.messages import CELL_FIELDS, CELLS, USER_CELLS
from onnx_ops.protocol.routing_table import RoutingTable

SLOTS = 64
"""Number of slots. Each deployment with separate metrics has one slot.

Deployments of the current table and of the previous table always have a slot.
"""
_HEADER = 64
REVISION = 0
"""Index in the header: the published revision, which every worker serves."""
EPOCH = 1
"""Index in the header: the epoch of a split that assigns users anew per epoch.

The epoch is written before the revision.
"""
WATCH = 2
"""Index in the header: the number of the watch; 0 without a watch.

For each of two deployments, the next fields are its slot, and its thresholds as indices into
`BOUNDS_S`.
"""
OUT_OF_SERVICE = 60
"""Index in the header: a bit mask of the slots that get no requests.

`worker_health` takes deployments out of service.
"""
ISOLATION = 61
"""Index in the header: whether new workers run one deployment at a time.

`worker_health` sets this value.
"""
LEASE = 62
"""Index in the header: the end of the lease that a table with a fallback needs.

The end is in nanoseconds since boot; 0 means no lease.
"""
SERVING_LEASE = 63
"""Index in the header: the end of the lease that a leased table needs.

A server with such a table refuses all requests after this time. The unit is that of `LEASE`.
"""
HEARTBEAT = 0
"""Index in a worker's state: the last heartbeat of its event loop.

The unit is nanoseconds of `time.monotonic`.
"""
LAPSED = 1
"""Index in a worker's state: number of requests that lapsed.

These requests were passed to the fallback or refused, because the server had no lease.
"""
INLINE_RUN, HUNG_RUN, LOST_RUN = 2, 4, 6
"""Indices in a worker's state: recorded runs.

`INLINE_RUN` is the run on the worker's event loop, and `HUNG_RUN` is a run that did not end.
`LOST_RUN` is the run on the event loop of the worker's predecessor when the predecessor ended.
"""
RUN_SLOT, RUN_CELL = 0, 1
"""Numbers of a recorded run: its slot, and the user's cell plus 1.

The second number is 0 if the split has not routed the request. In this case, a client has selected
the deployment, or the fallback answers without a lease.
"""
THREAD_RUNS = 16
"""Index in a worker's state: the numbers of runs in progress on its threads.

Each slot has `RUN_KINDS` numbers. Runs are counted by slot and not listed by thread, because
overdue runs (see `WorkerThreads`) can outnumber the threads.
"""
RUN_KINDS = 2
ROUTED, SELECTED = 0, 1
"""Kinds of runs.

The split has routed all requests of a `ROUTED` run. A `SELECTED` run has at least one other request
(see `RUN_CELL`).
"""
PROCESS_NUMBERS = THREAD_RUNS + RUN_KINDS * SLOTS
RING = 3
"""Number of epochs that are counted at the same time.

These are the current epoch, and earlier epochs with requests that still run.
"""
BLOCKS = RING + 1
"""Number of blocks of counts by cell per worker.

Each epoch of the ring has one block, and splits without epochs share one block.
"""
BLOCK_CELLS = 2 * CELLS
"""Number of cells in a block, for two deployments together."""
CELL_NUMBERS = CELL_FIELDS + 2
"""Numbers of a cell: its fields, requests in progress, and whether it is listed.

These 32 numbers of 4 bytes fill two cache lines.
"""
_TAG_NUMBERS = 4
_COUNT_BYTES = 4
_ROUNDING = 1e-9
_LABEL_BYTES = 1024
_NUMBER_BYTES = 8

STATUSES = (200, 400, 404, 408, 413, 415, 422, 429, 431, 499, 500, 503, 504)
"""HTTP statuses with a counter.

499 means that the client closed the connection before its queued request was answered.
"""
STEPS = 16
"""Latency buckets per factor of two.

With a step of 4.4 %, a rollout can detect a difference of 20 %.
"""
BOUNDS_S = tuple(1e-5 * 2 ** (k / STEPS) for k in range(21 * STEPS + STEPS // 2 + 1))
"""Upper bounds of the latency histograms in seconds: 10 µs to about 30 s."""
REQUEST_IDS = 1 << 15
TOKEN_BUCKETS, BUCKET_TOKENS = 32_749, 8
"""Number of token buckets, and of stored tokens in each: 2 MiB in total.

The number of buckets is a prime, so the stamps of any clock are spread over all buckets.
"""
WARM_UP_REQUESTS = 64
"""Number of first requests to a deployment that are not compared by latency.

During these requests, caches and memory are still cold. The number is divided by the number of
workers, but each worker uses at least `MIN_WARM_UP_REQUESTS`.
"""
MIN_WARM_UP_REQUESTS = 16

# The following constants are columns of a row. Requests that a listener rejected, or that were lost
# with a worker, are counted only by status. Of the others, comparable requests that ran on the
# event loop are counted in the INLINE columns, as are requests that reached no deployment. The rest
# are counted in the QUEUED columns. Comparable requests that waited in the queue are also counted
# in the SERVICE columns, without their time in the queue.
_COLUMN_OF = {status: column for column, status in enumerate(STATUSES)}
OTHER_STATUS = len(STATUSES)
_STATUS_COLUMNS: Sequence[tuple[int | str, int]] = (*_COLUMN_OF.items(), ("other", OTHER_STATUS))
INLINE_BUCKETS = OTHER_STATUS + 1
QUEUED_BUCKETS = INLINE_BUCKETS + len(BOUNDS_S) + 1
SERVICE_BUCKETS = QUEUED_BUCKETS + len(BOUNDS_S) + 1
INLINE_NANOSECONDS = SERVICE_BUCKETS + len(BOUNDS_S) + 1
QUEUED_NANOSECONDS, SERVICE_NANOSECONDS = INLINE_NANOSECONDS + 1, INLINE_NANOSECONDS + 2
RUNS, RUN_NANOSECONDS, BATCHED = (SERVICE_NANOSECONDS + k for k in range(1, 4))
QUEUED, IN_PROGRESS = BATCHED + 1, BATCHED + 2
SHADOW_SENT, SHADOW_DROPPED, SHADOW_DONE, SHADOW_FAILED = (IN_PROGRESS + k for k in range(1, 5))
LOADS, LOAD_FAILURES, LOAD_NANOSECONDS = (SHADOW_FAILED + k for k in range(1, 4))
CONNECTIONS, CONNECTIONS_REFUSED, LOG_DROPPED = (LOAD_NANOSECONDS + k for k in range(1, 4))
SHADOW_DIFFERING, FEEDBACK, SUCCESSES, UNKNOWN_FEEDBACK = (LOG_DROPPED + k for k in range(1, 5))
# The next column counts the time of requests without status 200, which INLINE_NANOSECONDS and
# QUEUED_NANOSECONDS include.
FAILED_NANOSECONDS = UNKNOWN_FEEDBACK + 1
SHADOW_RESTARTS = FAILED_NANOSECONDS + 1
EPOCH_FAILURES = SHADOW_RESTARTS + 1
WORKER_DEATHS = EPOCH_FAILURES + 1
# The next two columns count feedback that is not evidence about a version. FEEDBACK and SUCCESSES
# do not include it.
UNJUDGED_FEEDBACK, UNJUDGED_SUCCESSES = (
    WORKER_DEATHS + 1,
    WORKER_DEATHS + 2,
)
WORKER_RESTARTS = UNJUDGED_SUCCESSES + 1
# The columns from UNJUDGED on count, by status, requests that are not evidence about a version. The
# columns by status count them, too.
UNJUDGED = WORKER_RESTARTS + 1
COLUMNS = UNJUDGED + OTHER_STATUS + 1
_GAUGES = (QUEUED, IN_PROGRESS, CONNECTIONS)

_SHOWN_STEPS = STEPS // 2
_SHOWN_BOUNDS = BOUNDS_S[::_SHOWN_STEPS]
"""Bounds on the page, in steps of the square root of two.

Dashboards need no finer steps, and the page has an eighth of the lines.
"""
_TRACE_PARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Pattern of a trace context.

See https://www.w3.org/TR/trace-context/#traceparent-header.
"""
_TRACE_PARENT_BYTES = 55
_EXEMPLAR = struct.Struct(f"={_TRACE_PARENT_BYTES}sdd")
"""Trace context, latency in seconds, and time in seconds since the epoch."""
_EXEMPLARS = len(_SHOWN_BOUNDS) + 1

MetricsRow = memoryview
"""Numbers with format `Q`, usually those of one worker about one slot, by column."""


def make_row() -> MetricsRow:
    """Return a row of zeros that belongs to no slot."""
    return memoryview(bytearray(COLUMNS * _NUMBER_BYTES)).cast("Q")


def make_thread_runs() -> MetricsRow:
    """Return zeros for the numbers of runs, in memory of only this process.

    `SharedMetrics.get_thread_runs` returns the shared numbers.
    """
    return memoryview(bytearray(RUN_KINDS * SLOTS * _NUMBER_BYTES)).cast("Q")


def find_bound(latency_s: float) -> int:
    """Return the index of a latency in `BOUNDS_S`, or of the next larger bound.

    For a latency above all bounds, the result is the number of bounds.
    """
    return bisect_left(BOUNDS_S, latency_s * (1 - _ROUNDING))


def count_judged(row: Sequence[int]) -> Mapping[int | str, int]:
    """Return the requests of a slot that are evidence about its version, by status."""
    return {status: row[column] - row[UNJUDGED + column] for status, column in _STATUS_COLUMNS}


def count_unjudged(row: Sequence[int]) -> Mapping[int | str, int]:
    """Return requests of a slot that are not evidence about its version, by status.

    Clients have selected the version for these requests, the server had no lease, or every version
    refuses them. Refusals are also counted if their cause stays unknown.
    """
    return {status: row[UNJUDGED + column] for status, column in _STATUS_COLUMNS}


def get_column(status: int) -> int:
    """Return the column that counts an HTTP status."""
    return _COLUMN_OF.get(status, OTHER_STATUS)


@dataclass(frozen=True, slots=True)
class CellBlock:
    """Memory of one worker for the counts by cell of users of one epoch.

    Attributes:
        tag: generation, epoch and watch of the counts, and the number of listed cells; format `Q`.
        counts: `CELL_NUMBERS` for each of `BLOCK_CELLS` cells; format `I`.
        listed: numbers of the cells with counts, so that readers skip all other cells; format `I`.
    """

    tag: memoryview
    counts: memoryview
    listed: memoryview


@dataclass(frozen=True, slots=True)
class Exemplars:
    """The last traced request of each shown latency bucket and slot, of one worker."""

    memory: memoryview

    def put(self, slot: int, trace_parent: bytes, latency_s: float) -> None:
        """Store a request if its trace is sampled; `get` validates the trace context."""
        if len(trace_parent) == _TRACE_PARENT_BYTES and trace_parent[-1] in b"13579bdf":
            bucket = -(-bisect_left(BOUNDS_S, latency_s) // _SHOWN_STEPS)
            now = time.time()  # noqa: TID251 (for people)
            place = (slot * _EXEMPLARS + bucket) * _EXEMPLAR.size
            _EXEMPLAR.pack_into(self.memory, place, trace_parent, latency_s, now)

    def get(self, slot: int, bucket: int) -> tuple[float, float, str] | None:
        """Return time, latency and trace of the last request in a shown bucket.

        The result is None if no request is stored, or its trace context is invalid. It is also None
        while a worker writes a new request.
        """
        start = (slot * _EXEMPLARS + bucket) * _EXEMPLAR.size
        found = bytes(self.memory[start : start + _EXEMPLAR.size])
        trace_parent, latency_s, at = _EXEMPLAR.unpack(found)
        match = _TRACE_PARENT.fullmatch(trace_parent)
        is_whole = self.memory[start : start + _EXEMPLAR.size] == found
        return (at, latency_s, match[1].decode()) if match and is_whole else None

    def reset(self, slot: int) -> None:
        """Remove the requests of a slot."""
        size = _EXEMPLARS * _EXEMPLAR.size
        self.memory[slot * size : (slot + 1) * size] = bytes(size)


class SharedMetrics:
    """Counters that the supervisor shares with the processes that it forks."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.origin = secrets.token_hex(8)
        """Identifier of this memory. Another value means that all counters were reset."""
        processes = _HEADER * _NUMBER_BYTES
        labels = processes + workers * PROCESS_NUMBERS * _NUMBER_BYTES
        rows = labels + SLOTS * _LABEL_BYTES
        ids = rows + (workers + 1) * SLOTS * COLUMNS * _NUMBER_BYTES
        answers = ids + workers * REQUEST_IDS * _NUMBER_BYTES
        tokens = answers + workers * USER_CELLS * _NUMBER_BYTES
        tags = tokens + TOKEN_BUCKETS * BUCKET_TOKENS * _NUMBER_BYTES
        exemplars = tags + workers * BLOCKS * _TAG_NUMBERS * _NUMBER_BYTES
        counts = exemplars + workers * SLOTS * _EXEMPLARS * _EXEMPLAR.size
        counts += -counts % mmap.PAGESIZE
        listed = counts + workers * BLOCKS * BLOCK_CELLS * CELL_NUMBERS * _COUNT_BYTES
        memory = memoryview(mmap.mmap(-1, listed + workers * BLOCKS * BLOCK_CELLS * _COUNT_BYTES))
        self.header = memory[:processes].cast("Q")
        self._processes = memory[processes:labels].cast("Q")
        self._labels = memory[labels:rows]
        self._rows = memory[rows:ids].cast("Q")
        self._request_ids = memory[ids:answers].cast("Q")
        self._answers = memory[answers:tokens].cast("Q")
        self._tokens = memory[tokens:tags].cast("Q")
        self._tags = memory[tags:exemplars].cast("Q")
        self._exemplars = memory[exemplars:counts]
        self._counts = memory[counts:listed].cast("I")
        self._listed = memory[listed:].cast("I")

    def get_row(self, worker: int, slot: int) -> MetricsRow:
        """Return the numbers of a worker and a slot."""
        start = (worker * SLOTS + slot) * COLUMNS
        return self._rows[start : start + COLUMNS]

    def get_process_state(self, worker: int) -> MetricsRow:
        """Return a worker's heartbeat, lapsed requests and recorded runs."""
        return self._processes[worker * PROCESS_NUMBERS : (worker + 1) * PROCESS_NUMBERS]

    def get_thread_runs(self, worker: int) -> MetricsRow:
        """Return the numbers of runs in progress on a worker's threads, by slot and kind."""
        return self.get_process_state(worker)[THREAD_RUNS:]

    def get_shadow_row(self, slot: int) -> MetricsRow:
        """Return the numbers that the shadow process of a slot and the supervisor count.

        The numbers of slot 0 are only those of the supervisor.
        """
        return self.get_row(self.workers, slot)

    def get_request_ids(self, worker: int) -> MetricsRow:
        """Return the request ids that a worker has stored."""
        return self._request_ids[worker * REQUEST_IDS : (worker + 1) * REQUEST_IDS]

    def get_token_bucket(self, stamp: int) -> memoryview:
        """Return the stamps of counted tokens in the bucket of this stamp."""
        start = stamp % TOKEN_BUCKETS * BUCKET_TOKENS
        return self._tokens[start : start + BUCKET_TOKENS]

    def get_exemplars(self, worker: int) -> Exemplars:
        """Return the exemplars that a worker has stored."""
        size = SLOTS * _EXEMPLARS * _EXEMPLAR.size
        return Exemplars(self._exemplars[worker * size : (worker + 1) * size])

    def get_answers(self, worker: int) -> MetricsRow:
        """Return a worker's entries for the last response to each cell of users."""
        return self._answers[worker * USER_CELLS : (worker + 1) * USER_CELLS]

    def get_cell_block(self, worker: int, place: int) -> CellBlock:
        """Return the block at an index of a worker."""
        at = worker * BLOCKS + place
        numbers = BLOCK_CELLS * CELL_NUMBERS
        return CellBlock(
            tag=self._tags[at * _TAG_NUMBERS : (at + 1) * _TAG_NUMBERS],
            counts=self._counts[at * numbers : (at + 1) * numbers],
            listed=self._listed[at * BLOCK_CELLS : (at + 1) * BLOCK_CELLS],
        )

    def sum_slot(self, slot: int) -> Sequence[int]:
        """Return the numbers of a slot, summed over all processes."""
        rows = [self.get_row(process, slot).tolist() for process in range(self.workers + 1)]
        return [sum(column) for column in zip(*rows, strict=True)]

    def reset_gauges(self, worker: int) -> None:
        """Set the gauges of a restarted worker to 0; keep its counters."""
        for slot in range(SLOTS):
            row = self.get_row(worker, slot)
            for gauge in _GAUGES:
                row[gauge] = 0

    def reset_slot(self, slot: int) -> None:
        """Set all numbers of a slot to 0."""
        for process in range(self.workers + 1):
            self.get_row(process, slot)[:] = make_row()
        for worker in range(self.workers):
            self.get_exemplars(worker).reset(slot)

    def get_labels(self, slot: int) -> Mapping[str, str] | None:
        """Return the labels of a slot's deployment; None if the slot is free.

        The result is also None while the supervisor writes the labels.
        """
        text = bytes(self._labels[slot * _LABEL_BYTES : (slot + 1) * _LABEL_BYTES]).rstrip(b"\0")
        try:
            return dict(json.loads(text)) if text else None
        except ValueError:
            # The supervisor may be writing the labels, so that the text is incomplete.
            return None

    def set_labels(self, slot: int, labels: Mapping[str, str]) -> None:
        """Set the labels of a slot's deployment."""
        text = json.dumps(dict(labels)).encode()
        self._labels[slot * _LABEL_BYTES : (slot + 1) * _LABEL_BYTES] = text.ljust(
            _LABEL_BYTES, b"\0"
        )


class SlotAllocator:
    """Assignment of slots to deployments.

    A deployment that returns gets its earlier slot, unless another deployment got it meanwhile.
    """

    def __init__(self, shared: SharedMetrics) -> None:
        self._shared = shared
        self._slots: dict[Deployment, int] = {}

    def assign(self, table: RoutingTable, previous: RoutingTable | None) -> Mapping[str, int]:
        """Return slots by deployment name, resetting the oldest slots if needed.

        Raises:
            UserError: there are too many deployments, or the names of a deployment are too long.
        """
        wanted = table.state.deployments
        in_use = {*wanted, *(previous.state.deployments if previous else ())}
        if len(in_use) >= SLOTS:
            raise UserError(
                f"the new routing table and the current one have {len(in_use)} deployments "
                f"together, and the limit is {SLOTS - 1}"
            )
        for deployment in wanted:
            if len(json.dumps(_get_labels(deployment))) > _LABEL_BYTES:
                raise UserError(
                    f"the name, version and variant of deployment {deployment.name[:40]!r} take "
                    f"more than {_LABEL_BYTES} bytes as JSON"
                )
        for deployment in wanted:
            slot = self._slots.pop(deployment, None)
            if slot is None:
                free = set(range(1, SLOTS)) - set(self._slots.values())
                slot = (
                    min(free)
                    if free
                    else self._slots.pop(next(d for d in self._slots if d not in in_use))
                )
                self._shared.reset_slot(slot)
                self._shared.set_labels(slot, _get_labels(deployment))
            # The entry moves to the end, so that the first entries are the oldest.
            self._slots[deployment] = slot
        return {d.name: self._slots[d] for d in wanted}


def _get_labels(deployment: Deployment) -> Mapping[str, str]:
    return {
        "deployment": deployment.name,
        "version": deployment.version,
        "variant": deployment.variant,
    }


def count_request(row: MetricsRow, status: int, seconds: float) -> None:
    """Count one request in the INLINE columns.

    `seconds` is the time until its response was ready.
    """
    row[_COLUMN_OF.get(status, OTHER_STATUS)] += 1
    row[INLINE_BUCKETS + bisect_left(BOUNDS_S, seconds)] += 1
    row[INLINE_NANOSECONDS] += int(seconds * 1e9)
    if status != 200:
        row[FAILED_NANOSECONDS] += int(seconds * 1e9)


def count_queued_request(
    row: MetricsRow, status: int, seconds: float, service_seconds: float
) -> None:
    """Count one request that was queued, or whose latency is not comparable.

    `service_seconds` is its latency minus its time in the queue; 0 if it is not comparable.
    """
    row[_COLUMN_OF.get(status, OTHER_STATUS)] += 1
    row[QUEUED_BUCKETS + bisect_left(BOUNDS_S, seconds)] += 1
    row[QUEUED_NANOSECONDS] += int(seconds * 1e9)
    if status != 200:
        row[FAILED_NANOSECONDS] += int(seconds * 1e9)
    if service_seconds:
        row[SERVICE_BUCKETS + bisect_left(BOUNDS_S, service_seconds)] += 1
        row[SERVICE_NANOSECONDS] += int(service_seconds * 1e9)


@contextmanager
def count_load(row: MetricsRow) -> Iterator[None]:
    """Count the load of a model in the block, with its duration or its failure."""
    started_at = time.perf_counter_ns()
    try:
        yield
    except OnnxOpsError:
        row[LOAD_FAILURES] += 1
        raise
    row[LOADS] += 1
    row[LOAD_NANOSECONDS] += time.perf_counter_ns() - started_at


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Requests by latency, and the sum of latencies; one bucket more than `BOUNDS_S`."""

    buckets: Sequence[int]
    nanoseconds: int


def get_request_latency(row: Sequence[int]) -> LatencyHistogram:
    """Return the histogram of the time from a request's last byte to its response."""
    buckets = zip(
        row[INLINE_BUCKETS:QUEUED_BUCKETS], row[QUEUED_BUCKETS:SERVICE_BUCKETS], strict=True
    )
    return LatencyHistogram(
        [a + b for a, b in buckets], row[INLINE_NANOSECONDS] + row[QUEUED_NANOSECONDS]
    )


def get_service_latency(row: Sequence[int]) -> LatencyHistogram:
    """Return the histogram of latencies without queue time, of comparable requests."""
    buckets = zip(
        row[INLINE_BUCKETS:QUEUED_BUCKETS], row[SERVICE_BUCKETS:INLINE_NANOSECONDS], strict=True
    )
    return LatencyHistogram(
        [a + b for a, b in buckets], row[INLINE_NANOSECONDS] + row[SERVICE_NANOSECONDS]
    )


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_REASONS: Mapping[str, tuple[int, ...]] = {
    "input": (400, 404, 408, 413, 415, 431),
    "unfit": (422,),
    "overload": (429,),
    "deadline": (504,),
    "unavailable": (503,),
    "client_gone": (499,),
    "internal": (500,),
}
"""Names of the classes of errors, with the HTTP statuses of each class."""

_LabeledRow: TypeAlias = tuple[str, Sequence[int]]
"""Labels as a string, and the numbers of a row."""
_FAMILIES = (
    (
        "model_runs_total",
        "Runs of the model; a batch of requests is one run.",
        "counter",
        RUNS,
    ),
    ("batched_requests_total", "Requests that ran in a batch with others.", "counter", BATCHED),
    (
        "shadow_requests_total",
        "Mirrored requests queued for the deployment.",
        "counter",
        SHADOW_SENT,
    ),
    (
        "shadow_dropped_total",
        "Mirrored requests dropped before the deployment got them.",
        "counter",
        SHADOW_DROPPED,
    ),
    (
        "shadow_answered_total",
        "Mirrored requests that the deployment answered.",
        "counter",
        SHADOW_DONE,
    ),
    ("shadow_failed_total", "Mirrored requests that failed.", "counter", SHADOW_FAILED),
    (
        "shadow_differing_total",
        "Mirrored requests whose response differs.",
        "counter",
        SHADOW_DIFFERING,
    ),
    (
        "model_loads_total",
        "Successful loads of the model, by workers and shadow processes.",
        "counter",
        LOADS,
    ),
    ("model_load_failures_total", "Loads of the model that failed.", "counter", LOAD_FAILURES),
    (
        "worker_deaths_total",
        "Workers that crashed or hung while they ran the model.",
        "counter",
        WORKER_DEATHS,
    ),
    ("requests_queued", "Requests in the queue of the model.", "gauge", QUEUED),
    (
        "requests_in_progress",
        "Requests that the model is running, off the event loop.",
        "gauge",
        IN_PROGRESS,
    ),
)
_FEEDBACK_FAMILIES = (
    ("feedback_total", "Entries of feedback that clients reported.", FEEDBACK, UNJUDGED_FEEDBACK),
    (
        "feedback_successes_total",
        "Entries of feedback that report a success.",
        SUCCESSES,
        UNJUDGED_SUCCESSES,
    ),
)
"""Metrics of feedback.

Each has two columns: the entries that are evidence about a version, and all other entries.
"""
_SERVER_FAMILIES = (
    ("connections", "Open connections.", "gauge", CONNECTIONS),
    ("connections_refused_total", "Connections over the limit.", "counter", CONNECTIONS_REFUSED),
    (
        "request_log_dropped_total",
        "Requests that were not logged, because the buffer of the log was full.",
        "counter",
        LOG_DROPPED,
    ),
    (
        "epoch_failures_total",
        "Errors at the change of epochs; the epoch is then no evidence for a rollout.",
        "counter",
        EPOCH_FAILURES,
    ),
    (
        "worker_restarts_total",
        "Workers that ended for any reason and were replaced.",
        "counter",
        WORKER_RESTARTS,
    ),
    (
        "shadow_restarts_total",
        "Shadow processes that ended and were replaced.",
        "counter",
        SHADOW_RESTARTS,
    ),
    (
        "feedback_unknown_total",
        "Entries of feedback about unknown requests.",
        "counter",
        UNKNOWN_FEEDBACK,
    ),
)
_COUNTER_HEAD = re.compile(r"^(# (?:HELP|TYPE) \S+)_total ", re.MULTILINE)
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class MetricsPage:
    """The page `/metrics` in Prometheus' text format, summed over all workers."""

    def __init__(self, shared: SharedMetrics, endpoint: str) -> None:
        self._shared = shared
        self._endpoint = endpoint

    def render(self, state: EndpointState | None, *, open_metrics: bool = False) -> str:
        """Return the page. `state` is the published state; None before a publication.

        The OpenMetrics format (https://prometheus.io/docs/specs/om/open_metrics_spec/) also has the
        exemplars.
        """
        text = "\n".join(self._render_lines(state, open_metrics=open_metrics)) + "\n"
        return _COUNTER_HEAD.sub(r"\1 ", text) + "# EOF\n" if open_metrics else text

    def _render_lines(self, state: EndpointState | None, *, open_metrics: bool) -> list[str]:
        unrouted = (
            self._format_labels({"deployment": "", "version": "", "variant": ""}),
            self._shared.sum_slot(0),
        )
        used = ((slot, self._shared.get_labels(slot)) for slot in range(1, SLOTS))
        slots = {slot: self._format_labels(ls) for slot, ls in used if ls is not None}
        rows = [(labels, self._shared.sum_slot(slot)) for slot, labels in slots.items()]
        return [
            *_render_requests(unrouted, rows),
            *self._render_latencies(slots, rows, traced=open_metrics),
            *self._render_deployments(slots, rows),
            *self._render_server(unrouted[1]),
            *(() if state is None else self._render_table(state)),
        ]

    def _render_latencies(
        self, slots: Mapping[int, str], rows: Sequence[_LabeledRow], *, traced: bool
    ) -> Iterator[str]:
        text = "Time from the last byte of a request to its response."
        exemplars = (
            {labels: self._list_exemplars(slot) for slot, labels in slots.items()} if traced else {}
        )
        samples = [(labels, get_request_latency(row)) for labels, row in rows]
        yield from _render_histogram("request_duration_seconds", text, samples, exemplars)
        text = "Latency of comparable requests, without their time in the queue."
        samples = [(labels, get_service_latency(row)) for labels, row in rows]
        yield from _render_histogram("service_duration_seconds", text, samples, {})

    def _render_deployments(
        self, slots: Mapping[int, str], rows: Sequence[_LabeledRow]
    ) -> Iterator[str]:
        for name, text, kind, column in _FAMILIES:
            yield from _render_family(
                name, text, kind, [(labels, row[column]) for labels, row in rows]
            )
        for name, text, column, unjudged in _FEEDBACK_FAMILIES:
            entries = [(labels, row[column]) for labels, row in rows]
            entries += [
                (f'{labels},judged="false"', row[unjudged]) for labels, row in rows if row[unjudged]
            ]
            yield from _render_family(name, text, "counter", entries)
        mask = self._shared.header[OUT_OF_SERVICE]
        out = [(labels, mask >> slot & 1) for slot, labels in slots.items()]
        yield from _render_family(
            "out_of_service", "1 if the deployment is out of service, else 0.", "gauge", out
        )
        loads = [(labels, row[LOAD_NANOSECONDS] / 1e9) for labels, row in rows]
        yield from _render_family(
            "model_load_seconds_total", "Time of loads, with verification.", "counter", loads
        )

    def _render_server(self, unrouted: Sequence[int]) -> Iterator[str]:
        server = self._format_labels({})
        for name, text, kind, column in _SERVER_FAMILIES:
            yield from _render_family(name, text, kind, [(server, unrouted[column])])
        info = [(self._format_labels({"instance_id": self._shared.origin}), 1)]
        yield from _render_family(
            "server_info", "Id of the counters, which changes at a restart.", "gauge", info
        )
        yield from _render_family(
            "workers", "Worker processes.", "gauge", [(server, self._shared.workers)]
        )

    def _render_table(self, state: EndpointState) -> Iterator[str]:
        generation = [(self._format_labels({}), state.generation)]
        yield from _render_family(
            "generation", "Generation of the routing table.", "gauge", generation
        )
        for name, text, percents in (
            ("traffic_weight_ratio", "Share of the traffic.", state.split.weights),
            ("shadow_traffic_ratio", "Share of the traffic that is mirrored.", state.split.shadow),
        ):
            shares = [
                (self._format_labels(_get_labels(d)), percents.get(d.name, 0) / 100)
                for d in state.deployments
            ]
            yield from _render_family(name, text, "gauge", shares)

    def _list_exemplars(self, slot: int) -> list[str]:
        """Return the last traced request of each shown bucket, as a string.

        The string is empty for a bucket without a traced request.
        """
        workers = [self._shared.get_exemplars(worker) for worker in range(self._shared.workers)]
        found = (
            max(filter(None, (one.get(slot, k) for one in workers)), default=None)
            for k in range(_EXEMPLARS)
        )
        return [
            "" if one is None else f' # {{trace_id="{one[2]}"}} {one[1]:.9g} {one[0]:.3f}'
            for one in found
        ]

    def _format_labels(self, labels: Mapping[str, str]) -> str:
        full = {"endpoint": self._endpoint, **labels}
        return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in full.items())


def _render_requests(unrouted: _LabeledRow, rows: Sequence[_LabeledRow]) -> Iterator[str]:
    """Yield the lines of requests by status, and of errors by reason."""
    requests = [
        (f'{labels},status="{status}"', count)
        for labels, row in (unrouted, *rows)
        for status, count in count_judged(row).items()
        if count
    ]
    requests += [
        (f'{labels},status="{status}",judged="false"', count)
        for labels, row in rows
        for status, count in count_unjudged(row).items()
        if count
    ]
    yield from _render_family(
        "requests_total", "Inference requests by HTTP status.", "counter", requests
    )
    errors = [
        (f'{labels},reason="{reason}"', sum(row[get_column(status)] for status in statuses))
        for labels, row in (unrouted, *rows)
        for reason, statuses in _REASONS.items()
    ]
    yield from _render_family(
        "errors_total", "Inference requests that failed, by reason.", "counter", errors
    )


def _render_histogram(
    name: str,
    text: str,
    samples: Iterable[tuple[str, LatencyHistogram]],
    exemplars: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """Yield the lines of a histogram.

    `exemplars` has a string for each shown bucket, by labels.
    """
    name = f"onnx_ops_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    for labels, histogram in samples:
        counts = [*itertools.accumulate(histogram.buckets)]
        shown = [*counts[:-1:_SHOWN_STEPS], counts[-1]]
        for bound, count, exemplar in zip(
            (*_SHOWN_BOUNDS, None), shown, exemplars.get(labels, [""] * _EXEMPLARS), strict=True
        ):
            yield (
                f'{name}_bucket{{{labels},le="{"+Inf" if bound is None else f"{bound:.6g}"}"}} '
                f"{count}{exemplar}"
            )
        yield f"{name}_sum{{{labels}}} {histogram.nanoseconds / 1e9:.9g}"
        yield f"{name}_count{{{labels}}} {counts[-1]}"


def _render_family(
    name: str, text: str, kind: str, samples: Iterable[tuple[str, float]]
) -> list[str]:
    name = f"onnx_ops_{name}"
    values = (f"{name}{{{labels}}} {value}" for labels, value in samples)
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *values]
