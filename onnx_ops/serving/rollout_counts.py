"""Counts by which a rollout is judged: by deployment, by user, and feedback.

All requests of a user go to one version, so a user is one draw of the split, however many requests it sends. The judge
of a rollout sets a watch: which two deployments are counted by user, and which latencies count as slow. Another watch
resets the counts. Users are grouped by buckets of the hash that also splits the traffic; a bucket counts as one user.
"""

from __future__ import annotations

import base64
import time
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_FEEDBACK,
    CELL_LATENCIES,
    CELL_SUCCESSES,
    FAILURE_STATUSES,
    KEYLESS_CELL,
    MAX_USER_THRESHOLDS,
    USER_CELLS,
    USER_FIELDS,
    Counts,
    DeploymentCounts,
    UserCountsRequest,
)
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.deployments import LoadedDeployments
from onnx_ops.serving.metrics import (
    BOUNDS_S,
    OTHER_STATUS,
    REQUEST_IDS,
    SLOTS,
    STATUSES,
    WATCH,
    SharedMetrics,
    find_bound,
    get_column,
)

MAX_FEEDBACK = 1000
"""Entries of feedback in one body."""
_FAILURE_COLUMNS = frozenset({get_column(int(s)) for s in FAILURE_STATUSES if s != "other"} | {OTHER_STATUS})
_NO_BOUND = len(BOUNDS_S)
_SLOT_BITS = (SLOTS - 1).bit_length()
_VALUE_BITS = _SLOT_BITS + (USER_CELLS - 1).bit_length()
_HASH_MASK = (1 << 64) - 1
_SUBJECTS = ("request_id", "key", "deployment")
"""What an entry of feedback is about: exactly one of these."""


class UserCounts:
    """Counts by user of one worker. Another watch resets them.

    A request costs 0.05 µs without a watch, and 0.7 µs while its deployment is watched (`benchmarks.count_cost`).
    """

    def __init__(self, shared: SharedMetrics, worker: int) -> None:
        self._shared_header = shared.header
        self._header, self._cells = shared.get_user_counts(worker)
        self._watch = 0
        self._sides: dict[int, tuple[int, Sequence[float]]] = {}

    @property
    def is_watching(self) -> bool:
        """Whether any deployments are counted by user."""
        return self._shared_header[WATCH] != 0

    def count_request(self, slot: int, bucket: int, status: int, seconds: float) -> None:
        """Count a request; `seconds` are 0 if its latency is not comparable."""
        side = self._get_side(slot)
        if side is None:
            return
        cells, at = self._cells, side[0] + bucket
        cells[at] += 1
        if status != 200 and get_column(status) in _FAILURE_COLUMNS:
            cells[at + CELL_ERRORS * USER_CELLS] += 1
        if seconds:
            cells[at + (CELL_LATENCIES + bisect_left(side[1], seconds)) * USER_CELLS] += 1

    def count_feedback(self, slot: int, bucket: int, success: bool) -> None:
        """Count an entry of feedback."""
        side = self._get_side(slot)
        if side is not None:
            at = side[0] + bucket
            self._cells[at + CELL_FEEDBACK * USER_CELLS] += 1
            self._cells[at + CELL_SUCCESSES * USER_CELLS] += success

    def _get_side(self, slot: int) -> tuple[int, Sequence[float]] | None:
        if self._shared_header[WATCH] != self._watch:
            self._watch = self._shared_header[WATCH]
            if self._header[0] != self._watch:  # else the worker before this one has counted by it
                self._cells[:] = memoryview(bytes(8 * len(self._cells))).cast("Q")
            self._sides = {}
            for side in range(2):
                begin = WATCH + 1 + side * (1 + MAX_USER_THRESHOLDS)
                watched, *bounds = self._shared_header[begin : begin + 1 + MAX_USER_THRESHOLDS]
                if watched:
                    limits_s = [BOUNDS_S[bound] for bound in bounds if bound < _NO_BOUND]
                    self._sides[watched] = side * USER_CELLS * USER_FIELDS, limits_s
            self._header[0] = self._watch
        return self._sides.get(slot)


def set_watch(shared: SharedMetrics, slots: Mapping[str, int], request: UserCountsRequest) -> None:
    """Make the workers count two deployments by user. Idempotent."""
    wanted: list[int] = []
    for name in sorted(request.limits_s)[:2]:
        bounds = [find_bound(limit_s) for limit_s in request.limits_s[name]]
        wanted += [slots.get(name, 0), *bounds, *[_NO_BOUND] * (MAX_USER_THRESHOLDS - len(bounds))]
    wanted += [0] * (2 + 2 * MAX_USER_THRESHOLDS - len(wanted)) + [request.number]
    numbers = shared.header[WATCH + 1 : WATCH + 1 + len(wanted)]
    if numbers.tolist() != wanted:
        for place, value in enumerate(wanted):
            numbers[place] = value
        shared.header[WATCH] += 1


def collect_counts(
    shared: SharedMetrics,
    slots: Mapping[str, int],
    request: UserCountsRequest | None = None,
    *,
    split: str = "",
    cold_s: Mapping[str, Sequence[float]] | None = None,
) -> Counts:
    """Return the counts of deployments by name; by user if requested (`decode_user_counts`)."""
    users: dict[str, str] = {}
    if request is not None:
        set_watch(shared, slots, request)
        total = np.zeros((2, USER_FIELDS, USER_CELLS), dtype="<u8")
        for worker in range(shared.workers):
            header, cells = shared.get_user_counts(worker)
            if header[0] == shared.header[WATCH]:
                total += np.frombuffer(cells, dtype="<u8").reshape(total.shape)
        for name, counts in zip(sorted(request.limits_s), total, strict=False):
            users[name] = base64.b64encode(zlib.compress(counts.tobytes(), 1)).decode()
    deployments = {}
    for name, slot in slots.items():
        row = shared.sum_slot(slot)
        statuses = {str(s): row[get_column(s)] for s in STATUSES} | {"other": row[OTHER_STATUS]}
        deployments[name] = DeploymentCounts(
            statuses={status: count for status, count in statuses.items() if count},
            latency=tuple(metrics.get_request_latency(row).buckets),
            service=tuple(metrics.get_service_latency(row).buckets),
            shadow_answered=row[metrics.SHADOW_DONE],
            shadow_differing=row[metrics.SHADOW_DIFFERING],
            shadow_failed=row[metrics.SHADOW_FAILED],
            feedback=row[metrics.FEEDBACK],
            successes=row[metrics.SUCCESSES],
            users=users.get(name, ""),
            cold_s=tuple((cold_s or {}).get(name, ())),
        )
    now = time.time()  # noqa: TID251 (the server's own clock, as its counts are)
    return Counts(origin=shared.origin, at=now, bounds_s=BOUNDS_S, deployments=deployments, split=split)


class FeedbackCounter:
    """Counts feedback that clients report, for the deployment that sent the response.

    Each worker remembers its last request ids in memory that all workers read. An entry is one number: 43 bits of a
    hash of the id, 15 of the user's bucket and 6 of the slot, at the place that the hash selects. A later request can
    overwrite it; the feedback is then unknown. An id is counted once.
    """

    def __init__(self, deployments: LoadedDeployments, users: UserCounts) -> None:
        self._deployments = deployments
        self._shared = deployments.shared
        self._worker = deployments.worker
        self._request_ids = self._shared.get_request_ids(self._worker)
        self._users = users

    def remember(self, request_id: bytes, slot: int, bucket: int) -> None:
        """Remember which deployment answered a request."""
        key = _hash_id(request_id)
        self._request_ids[key % REQUEST_IDS] = key << _VALUE_BITS | bucket << _SLOT_BITS | slot

    def count(self, body: bytes) -> tuple[int, int]:
        """Count the feedback in a body; return the number of counted and of unknown entries.

        If the body is invalid (UserError), nothing is counted.
        """
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise UserError("the body is not JSON", why=str(error)) from error
        entries = document.get("feedback") if isinstance(document, dict) and "feedback" in document else [document]
        if not isinstance(entries, list) or len(entries) > MAX_FEEDBACK:
            raise UserError(f"feedback must be a list of at most {MAX_FEEDBACK}")
        for place, entry in enumerate(entries):
            names = [name for name in _SUBJECTS if isinstance(entry, dict) and name in entry]
            has_subject = len(names) == 1 and isinstance(entry[names[0]], str)
            if not has_subject or not isinstance(entry.get("success"), bool):
                raise UserError(
                    f"feedback {place} must hold `success` (true or false) and one of {', '.join(_SUBJECTS)} (text)",
                    remedy='For example: {"feedback": [{"request_id": "a1", "success": true}]}',
                )
        unknown = 0
        for entry in entries:
            subject = self._find_subject(entry)
            if subject is None:
                unknown += 1
                continue
            slot, bucket = subject
            row = self._shared.get_row(self._worker, slot)
            row[metrics.FEEDBACK] += 1
            row[metrics.SUCCESSES] += entry["success"]
            self._users.count_feedback(slot, bucket, entry["success"])
        self._shared.get_row(self._worker, 0)[metrics.UNKNOWN_FEEDBACK] += unknown
        return len(entries) - unknown, unknown

    def _find_subject(self, entry: dict[str, Any]) -> tuple[int, int] | None:
        """Return slot and bucket of the subject of an entry; forget its request id."""
        if "request_id" not in entry:
            try:
                snapshot = self._deployments.get_current()
                if "deployment" in entry:
                    return snapshot.get_deployment(entry["deployment"]).slot, KEYLESS_CELL
                user = snapshot.router.hash_key(entry["key"].encode())
                loaded = snapshot.get_deployment(snapshot.router.route_user(user))
                return loaded.slot, snapshot.router.get_bucket(user)
            except OnnxOpsError:
                return None
        key = _hash_id(entry["request_id"].encode())
        place = key % REQUEST_IDS
        for worker in range(self._shared.workers):
            ids = self._shared.get_request_ids(worker)
            if ids[place] >> _VALUE_BITS == key:
                value, ids[place] = ids[place], 0
                return value % SLOTS, value % (1 << _VALUE_BITS) >> _SLOT_BITS
        return None


def _hash_id(request_id: bytes) -> int:
    """Return 43 bits, never 0. Python's hash is the same in all processes that were forked from one."""
    return (hash(request_id) & _HASH_MASK) >> _VALUE_BITS or 1
