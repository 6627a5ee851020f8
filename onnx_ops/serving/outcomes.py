"""What became of answers, as clients report it afterwards: counted for the deployment that gave the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.protocol.messages import KEYLESS_CELL, USER_CELLS
from onnx_ops.serving.shared import OUTCOMES, SLOTS, SUCCESSES, TICKETS, UNKNOWN_OUTCOMES, Shared
from onnx_ops.serving.user_counts import UserCounts

MOST_REPORTS = 1000
_SLOT_BITS = (SLOTS - 1).bit_length()
_PLACE_BITS = _SLOT_BITS + (USER_CELLS - 1).bit_length()
_NAMES = ("request_id", "key", "deployment")


class Outcomes:
    """Counts reports, and remembers which deployment answered a request that had an id.

    Each worker remembers its last requests in memory that all can read: a ticket is one number, 43 bits of a hash of
    the id, 15 of the user's bucket and 6 of the slot, at the place that the hash says. A later request may take that
    place; then the report is about a request that is not known any more. An id counts once.

    Args:
        shared: the memory.
        worker: this worker's number.
        named, keyed: the slot of the deployment that a name stands for, or that a user key goes to, and the user's
            bucket; both raise NotFoundError or ServiceUnavailableError.
        users: counts by user.
    """

    def __init__(
        self,
        shared: Shared,
        worker: int,
        *,
        named: Callable[[str], int],
        keyed: Callable[[bytes], tuple[int, int]],
        users: UserCounts,
    ) -> None:
        self._shared = shared
        self._worker = worker
        self._mine = shared.tickets(worker)
        self._named = named
        self._keyed = keyed
        self._users = users

    def remember(self, request_id: bytes, slot: int, bucket: int) -> None:
        ticket = _hash(request_id)
        self._mine[ticket % TICKETS] = ticket << _PLACE_BITS | bucket << _SLOT_BITS | slot

    def count(self, body: bytes) -> tuple[int, int]:
        """Count the reports of a request body; returns how many were counted, and how many are about nobody knows what.

        Raises:
            UserError: it is not what it should be; nothing was counted.
        """
        found = [(self._place(report), bool(report["success"])) for report in _reports(body)]
        for place, success in found:
            if place is None:
                self._shared.row(self._worker, 0)[UNKNOWN_OUTCOMES] += 1
                continue
            slot, bucket = place
            row = self._shared.row(self._worker, slot)
            row[OUTCOMES] += 1
            row[SUCCESSES] += success
            self._users.report(slot, bucket, success)
        unknown = sum(place is None for place, _ in found)
        return len(found) - unknown, unknown

    def _place(self, report: dict[str, Any]) -> tuple[int, int] | None:
        """Slot and bucket of what a report is about."""
        try:
            if "request_id" in report:
                return self._redeem(report["request_id"].encode())
            if "key" in report:
                return self._keyed(report["key"].encode())
            return self._named(report["deployment"]), KEYLESS_CELL
        except OnnxOpsError:
            return None

    def _redeem(self, request_id: bytes) -> tuple[int, int] | None:
        ticket = _hash(request_id)
        place = ticket % TICKETS
        for worker in range(self._shared.workers):
            tickets = self._shared.tickets(worker)
            if tickets[place] >> _PLACE_BITS == ticket:
                answered, tickets[place] = tickets[place], 0
                return answered % SLOTS, answered % (1 << _PLACE_BITS) >> _SLOT_BITS
        return None


def _hash(request_id: bytes) -> int:
    """43 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(request_id, digest_size=8).digest(), "big") >> _PLACE_BITS or 1


def _reports(body: bytes) -> list[dict[str, Any]]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError("this is not JSON", why=str(error)) from error
    reports = document.get("outcomes") if isinstance(document, dict) and "outcomes" in document else [document]
    if not isinstance(reports, list) or len(reports) > MOST_REPORTS:
        raise UserError(f"outcomes must be a list of at most {MOST_REPORTS}")
    for place, report in enumerate(reports):
        names = [name for name in _NAMES if isinstance(report, dict) and name in report]
        told = len(names) == 1 and isinstance(report[names[0]], str)
        if not told or not isinstance(report.get("success"), bool):
            raise UserError(
                f"outcome {place} must hold `success` (true or false) and one of {', '.join(_NAMES)} (text)",
                remedy='For example: {"outcomes": [{"request_id": "a1", "success": true}]}',
            )
    return reports
