"""The memory that supervisor and workers share: the published edition, and every count.

It is anonymous and made before the first fork, so that it needs no file and outlives any worker. Each number is 8
bytes, aligned, and has exactly one writer; a reader sees the old value or the new one.

    words:   edition; the watch of a rollout (see `user_counts`); spare ...
    labels:  one text a slot, written by the supervisor
    rows:    one a worker and slot, `COLUMNS` numbers each
    tickets: which deployment answered a request id, `TICKETS` a worker (see `outcomes`)
    users:   counts by user, a header and two deployments a worker (see `user_counts`)

A slot is what counts are kept by: slot 0 for requests that reached no deployment, the others for deployments.
"""

from __future__ import annotations

import json
import mmap
import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.errors import UserError
from onnx_ops.protocol.messages import USER_CELLS, USER_FIELDS
from onnx_ops.protocol.routing_table import RoutingTable

SLOTS = 64
"""Deployments that are told apart in metrics; those of the present and the previous table always are."""
_WORDS = 64
_EDITION = 0
WATCH = 1
"""Number of the watch; behind it, for either deployment, its slot and places in `BOUNDS_S` for all thresholds; last
the number that the reader gave it."""
_USERS = 2 * USER_CELLS * USER_FIELDS
_SAME = 1e-9
_LABEL = 1024
_NUMBER = 8

STATUSES = (200, 400, 404, 408, 413, 415, 422, 429, 431, 499, 500, 503, 504)
"""HTTP statuses that are counted one by one; 499 stands for clients that went away before their turn."""
STEPS = 16
"""Buckets of the latency histogram from one latency to its double: 4.4 % a step, so that a rollout sees one of 20 %."""
BOUNDS_S = tuple(1e-5 * 2 ** (k / STEPS) for k in range(21 * STEPS + STEPS // 2 + 1))
"""Upper bounds of the latency histogram in seconds: 10 µs to 30 s."""
TICKETS = 1 << 15
UNTIMED = 64
"""First requests to a deployment, whose times are held against nobody: caches and memory are still cold. Workers share
them, but each has `LEAST_UNTIMED`."""
LEAST_UNTIMED = 16

_COLUMN_OF = {status: column for column, status in enumerate(STATUSES)}
OTHER = len(STATUSES)
BUCKETS = OTHER + 1
OTHER_BUCKETS = BUCKETS + len(BOUNDS_S) + 1
SERVED_BUCKETS = OTHER_BUCKETS + len(BOUNDS_S) + 1
NANOSECONDS = SERVED_BUCKETS + len(BOUNDS_S) + 1
OTHER_NANOSECONDS, SERVED_NANOSECONDS = NANOSECONDS + 1, NANOSECONDS + 2
RUNS, RUN_NANOSECONDS, BATCHED = (SERVED_NANOSECONDS + k for k in range(1, 4))
QUEUED, RUNNING = BATCHED + 1, BATCHED + 2
SHADOW_SENT, SHADOW_DROPPED, SHADOW_DONE, SHADOW_FAILED = (RUNNING + k for k in range(1, 5))
LOADS, LOAD_FAILURES, LOAD_NANOSECONDS = (SHADOW_FAILED + k for k in range(1, 4))
CONNECTIONS, CONNECTIONS_REFUSED, LOG_DROPPED = (LOAD_NANOSECONDS + k for k in range(1, 4))
SHADOW_DIFFERING, OUTCOMES, SUCCESSES, UNKNOWN_OUTCOMES = (LOG_DROPPED + k for k in range(1, 5))
COLUMNS = UNKNOWN_OUTCOMES + 1
_GAUGES = (QUEUED, RUNNING, CONNECTIONS)

Row = memoryview
"""The numbers of one worker about one slot, by column; format `Q`."""


def bound_of(latency_s: float) -> int:
    """Place of a latency among the bounds of the histogram, or of the next one."""
    return bisect_left(BOUNDS_S, latency_s * (1 - _SAME))


def column_of(status: int) -> int:
    return _COLUMN_OF.get(status, OTHER)


class Shared:
    """Made once by the supervisor; workers get it by being forked."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.origin = secrets.token_hex(8)
        """Another one means that every count began anew."""
        labels = _WORDS * _NUMBER
        rows = labels + SLOTS * _LABEL
        tickets = rows + workers * SLOTS * COLUMNS * _NUMBER
        users = tickets + workers * TICKETS * _NUMBER
        memory = memoryview(mmap.mmap(-1, users + workers * (1 + _USERS) * _NUMBER))
        self.words = memory[:labels].cast("Q")
        self._labels = memory[labels:rows]
        self._rows = memory[rows:tickets].cast("Q")
        self._tickets = memory[tickets:users].cast("Q")
        self._users = memory[users:].cast("Q")

    @property
    def edition(self) -> int:
        """Number of the publication that every worker answers by, from the moment that it is set."""
        return self.words[_EDITION]

    @edition.setter
    def edition(self, value: int) -> None:
        self.words[_EDITION] = value

    def row(self, worker: int, slot: int) -> Row:
        start = (worker * SLOTS + slot) * COLUMNS
        return self._rows[start : start + COLUMNS]

    def tickets(self, worker: int) -> Row:
        return self._tickets[worker * TICKETS : (worker + 1) * TICKETS]

    def users(self, worker: int) -> tuple[Row, Row]:
        """A header of one number, and the cells of two deployments. The system gives pages to what is touched only."""
        start = worker * (1 + _USERS)
        return self._users[start : start + 1], self._users[start + 1 : start + 1 + _USERS]

    def totals(self, slot: int) -> Sequence[int]:
        """The numbers of a slot, summed over the workers."""
        rows = [self.row(worker, slot).tolist() for worker in range(self.workers)]
        return [sum(column) for column in zip(*rows, strict=True)]

    def restart(self, worker: int) -> None:
        """Gauges of a worker begin at nothing; its counts go on."""
        for slot in range(SLOTS):
            row = self.row(worker, slot)
            for gauge in _GAUGES:
                row[gauge] = 0

    def clear(self, slot: int) -> None:
        for worker in range(self.workers):
            row = self.row(worker, slot)
            for column in range(COLUMNS):
                row[column] = 0

    def label(self, slot: int) -> Mapping[str, str] | None:
        """Labels of a slot's deployment; None if it stands for none."""
        text = bytes(self._labels[slot * _LABEL : (slot + 1) * _LABEL]).rstrip(b"\0")
        try:
            return dict(json.loads(text)) if text else None
        except ValueError:  # it is being written
            return None

    def set_label(self, slot: int, labels: Mapping[str, str]) -> None:
        text = json.dumps(dict(labels)).encode()
        self._labels[slot * _LABEL : (slot + 1) * _LABEL] = text.ljust(_LABEL, b"\0")


class Slots:
    """The supervisor's book of which deployment has which slot. A deployment that comes back gets its slot again."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._taken: dict[Deployment, int] = {}

    def assign(self, table: RoutingTable, previous: RoutingTable | None) -> Mapping[str, int]:
        """Slot by deployment name. When all are taken, the one that was assigned longest ago begins anew.

        Raises:
            UserError: the table has too many deployments, or a name that is too long to be counted by.
        """
        wanted = table.state.deployments
        keep = {*wanted, *(previous.state.deployments if previous else ())}
        if len(keep) >= SLOTS:
            raise UserError(f"an endpoint holds at most {SLOTS // 2 - 1} deployments")
        for deployment in wanted:
            labels = {"deployment": deployment.name, "version": deployment.version, "variant": deployment.variant}
            if len(json.dumps(labels)) > _LABEL:
                raise UserError(f"the names of deployment {deployment.name[:40]!r} are too long")
        return {d.name: self._slot(d, keep) for d in wanted}

    def _slot(self, deployment: Deployment, keep: set[Deployment]) -> int:
        slot = self._taken.pop(deployment, None)
        if slot is None:
            slot = self._free(keep)
            self._shared.clear(slot)
            self._shared.set_label(
                slot, {"deployment": deployment.name, "version": deployment.version, "variant": deployment.variant}
            )
        self._taken[deployment] = slot
        return slot

    def _free(self, keep: set[Deployment]) -> int:
        used = set(self._taken.values())
        for slot in range(1, SLOTS):
            if slot not in used:
                return slot
        oldest = next(d for d in self._taken if d not in keep)
        return self._taken.pop(oldest)


def observe(row: Row, status: int, seconds: float) -> None:
    """Count one request that was run where it came in, and how long it took until its answer was ready."""
    row[_COLUMN_OF.get(status, OTHER)] += 1
    row[BUCKETS + bisect_left(BOUNDS_S, seconds)] += 1
    row[NANOSECONDS] += int(seconds * 1e9)


def observe_else(row: Row, status: int, seconds: float, served: float) -> None:
    """Count one request that had to wait for its turn, or whose time may not be held against other deployments.

    Args:
        row: of the deployment.
        status: of its answer.
        seconds: until its answer was ready.
        served: without the wait for its turn; 0 if that may not be held against other deployments.
    """
    row[_COLUMN_OF.get(status, OTHER)] += 1
    row[OTHER_BUCKETS + bisect_left(BOUNDS_S, seconds)] += 1
    row[OTHER_NANOSECONDS] += int(seconds * 1e9)
    if served:
        row[SERVED_BUCKETS + bisect_left(BOUNDS_S, served)] += 1
        row[SERVED_NANOSECONDS] += int(served * 1e9)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many requests took how long, with one count more than `BOUNDS_S`, and all of them together."""

    buckets: Sequence[int]
    nanoseconds: int


def request_times(row: Sequence[int]) -> Histogram:
    """From a request's last byte until its answer was ready."""
    others = row[OTHER_BUCKETS:SERVED_BUCKETS]
    return Histogram(_sum(row[BUCKETS:OTHER_BUCKETS], others), row[NANOSECONDS] + row[OTHER_NANOSECONDS])


def service_times(row: Sequence[int]) -> Histogram:
    """Without the wait for its turn, of requests that may be held against other deployments: they were run alone, and
    where the deployment has a twin, by that one."""
    served = row[SERVED_BUCKETS:NANOSECONDS]
    return Histogram(_sum(row[BUCKETS:OTHER_BUCKETS], served), row[NANOSECONDS] + row[SERVED_NANOSECONDS])


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [here + there for here, there in zip(one, other, strict=True)]
