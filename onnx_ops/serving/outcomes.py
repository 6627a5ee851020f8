"""What became of answers, as clients report it afterwards: counted for the deployment that gave the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.serving.shared import OUTCOMES, SUCCESSES, TICKETS, UNKNOWN_OUTCOMES, Shared

MOST_REPORTS = 1000
_NAMES = ("request_id", "key", "deployment")


class Outcomes:
    """Counts reports, and remembers which deployment answered a request that had an id.

    Each worker remembers its last requests in memory that all can read: a ticket is one number, 56 bits of a hash of
    the id and 8 of the slot, at the place that the hash says. A later request may take that place; then the report is
    about a request that is not known any more. An id counts once.

    Args:
        shared: the memory.
        worker: this worker's number.
        slot_of: the slot of the deployment that a name stands for, or that a user key goes to; both raise NotFound or
            ServiceUnavailable.
    """

    def __init__(
        self, shared: Shared, worker: int, *, named: Callable[[str], int], keyed: Callable[[bytes], int]
    ) -> None:
        self._shared = shared
        self._worker = worker
        self._mine = shared.tickets(worker)
        self._named = named
        self._keyed = keyed

    def remember(self, request_id: bytes, slot: int) -> None:
        ticket = _hash(request_id)
        self._mine[ticket % TICKETS] = ticket << 8 | slot

    def count(self, body: bytes) -> tuple[int, int]:
        """Count the reports of a request body; returns how many were counted, and how many are about nobody knows what.

        Raises:
            UserError: it is not what it should be; nothing was counted.
        """
        found = [(self._slot(report), bool(report["success"])) for report in _reports(body)]
        for slot, success in found:
            if slot is None:
                self._shared.row(self._worker, 0)[UNKNOWN_OUTCOMES] += 1
                continue
            row = self._shared.row(self._worker, slot)
            row[OUTCOMES] += 1
            row[SUCCESSES] += success
        unknown = sum(slot is None for slot, _ in found)
        return len(found) - unknown, unknown

    def _slot(self, report: dict[str, Any]) -> int | None:
        try:
            if "request_id" in report:
                return self._redeem(report["request_id"].encode())
            if "key" in report:
                return self._keyed(report["key"].encode())
            return self._named(report["deployment"])
        except OnnxOpsError:
            return None

    def _redeem(self, request_id: bytes) -> int | None:
        ticket = _hash(request_id)
        place = ticket % TICKETS
        for worker in range(self._shared.workers):
            tickets = self._shared.tickets(worker)
            if tickets[place] >> 8 == ticket:
                slot, tickets[place] = tickets[place] & 0xFF, 0
                return slot
        return None


def _hash(request_id: bytes) -> int:
    """56 bits, never 0."""
    return int.from_bytes(hashlib.blake2b(request_id, digest_size=7).digest(), "big") or 1


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
