"""Feedback of clients on responses, counted for the deployments that responded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from onnx_ops.errors import OnnxOpsError, UserError
from onnx_ops.protocol.messages import KEYLESS_CELL
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import LoadedDeployments, TableSnapshot
from onnx_ops.serving.metrics import REQUEST_IDS, SLOTS

MAX_FEEDBACK = 1000
"""Maximum number of feedback entries in one body."""
_SLOT_BITS, _CELL_BITS, _SPLIT_BITS, _EPOCH_BITS = (
    (SLOTS - 1).bit_length(),
    KEYLESS_CELL.bit_length(),
    8,
    32,
)
_VALUE_BITS = _SLOT_BITS + _CELL_BITS + _SPLIT_BITS
_HASH_MASK = (1 << 64) - 1
_SUBJECTS = ("token", "request_id", "key", "deployment")
"""What an entry of feedback refers to. An entry has exactly one of these keys."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """The deployment and the user's cell that an entry of feedback refers to.

    Feedback on a response under an earlier split is not evidence (`is_judged`). Early feedback is
    often more positive than late feedback. A candidate that has just started has only early
    feedback, so it would win against a version with both kinds.
    """

    slot: int
    cell: int
    is_judged: bool = True


class FeedbackCounter:
    """Counter of the clients' feedback, for the deployments that sent the responses.

    Each worker stores its last request ids in memory that all workers read. The entry of a request
    is one number, at the index that the hash of the id selects. It consists of 36 bits of the hash,
    and the last 8 bits of the split's number. Then come 14 bits of the user's cell, and 6 bits of
    the slot. A later request can overwrite the entry; feedback on the earlier request is then
    unknown. Each id is counted once. Feedback by key refers to the last response to the user's
    cell.

    Any server of the endpoint accepts the token of a response (see `FeedbackTokens`). Each server
    counts a token once (for exceptions, see `_admit`). All workers store the stamps of counted
    tokens in the same memory.
    """

    def __init__(self, deployments: LoadedDeployments, cells: CellCounter) -> None:
        self._deployments = deployments
        self._shared = deployments.shared
        self._worker = deployments.worker
        self._request_ids = self._shared.get_request_ids(self._worker)
        self._answers = self._shared.get_answers(self._worker)
        self._cells = cells

    def remember(
        self, request_id: bytes | None, slot: int, split: int, epoch: int, cell: int
    ) -> None:
        """Store which deployment answered a request, by request id and by user's cell.

        In the entry of a cell, the split and the epoch are the highest bits. So the highest entry
        of all workers belongs to the latest response. One call writes both entries, because the
        method is called for every request that the split has routed.
        """
        if cell != KEYLESS_CELL:
            self._answers[cell] = (split << _EPOCH_BITS | epoch) << _SLOT_BITS | slot
        if request_id is not None:
            key = _hash_id(request_id)
            value = (split % (1 << _SPLIT_BITS) << _CELL_BITS | cell) << _SLOT_BITS | slot
            self._request_ids[key % REQUEST_IDS] = key << _VALUE_BITS | value

    def count(self, body: bytes) -> tuple[int, int]:
        """Count the feedback in a body.

        Return the number of counted entries and of unknown entries. If the body is invalid
        (UserError), nothing is counted.
        """
        entries = _read_entries(body)
        unknown = 0
        for entry in entries:
            subject = self._find_subject(entry)
            if subject is None:
                unknown += 1
                continue
            row = self._shared.get_row(self._worker, subject.slot)
            row[metrics.FEEDBACK if subject.is_judged else metrics.UNJUDGED_FEEDBACK] += 1
            row[metrics.SUCCESSES if subject.is_judged else metrics.UNJUDGED_SUCCESSES] += entry[
                "success"
            ]
            self._count_cell(subject, entry["success"])
        self._shared.get_row(self._worker, 0)[metrics.UNKNOWN_FEEDBACK] += unknown
        return len(entries) - unknown, unknown

    def _count_cell(self, subject: _Subject, success: bool) -> None:
        """Count feedback by user.

        Feedback is counted only if it is evidence, and if the current split assigns the user to the
        same deployment. In a split with epochs, no feedback is counted by user, because an epoch
        can be closed before its feedback arrives.
        """
        try:
            snapshot = self._deployments.get_current()
            if snapshot.router.epoch_s or not subject.is_judged:
                return
            if (
                subject.cell != KEYLESS_CELL
                and _find_sticky_slot(snapshot, subject.cell) != subject.slot
            ):
                return
        except OnnxOpsError:
            return
        self._cells.count_feedback(snapshot.router.get_draw(0), subject.slot, subject.cell, success)

    def _find_subject(self, entry: dict[str, Any]) -> _Subject | None:
        """Return the subject of an entry; None if it is unknown.

        A request id is deleted, so that it is counted once.
        """
        try:
            if "deployment" in entry:
                loaded = self._deployments.get_current().get_deployment(entry["deployment"])
                return _Subject(loaded.slot, KEYLESS_CELL)
            if "key" in entry:
                return self._find_answer(entry["key"].encode())
            if "token" in entry:
                return self._find_sealed(entry["token"])
        except OnnxOpsError:
            return None
        split_number = self._deployments.get_current().split_number
        key = _hash_id(entry["request_id"].encode())
        place = key % REQUEST_IDS
        for worker in range(self._shared.workers):
            ids = self._shared.get_request_ids(worker)
            if ids[place] >> _VALUE_BITS == key:
                value, ids[place] = ids[place], 0
                split = value >> _SLOT_BITS + _CELL_BITS
                is_judged = (split - split_number) % (1 << _SPLIT_BITS) == 0
                return _Subject(value % SLOTS, (value >> _SLOT_BITS) % (1 << _CELL_BITS), is_judged)
        return None

    def _find_sealed(self, text: str) -> _Subject | None:
        """Return the subject of a valid token that was not counted before; else None."""
        snapshot = self._deployments.get_current()
        token = None if snapshot.tokens is None else snapshot.tokens.open(text)
        if token is None:
            return None
        slot = snapshot.get_deployment(token.deployment).slot
        return _Subject(slot, token.cell, token.is_current) if self._admit(token.stamp) else None

    def _admit(self, stamp: int) -> bool:
        """Return whether a token was not counted before, and record it.

        A bucket contains the stamps of the last tokens. An older token is not counted, because it
        is unknown whether it was counted before. If two workers get the same token within a
        microsecond, both can count it.
        """
        bucket = self._shared.get_token_bucket(stamp)
        stamps = bucket.tolist()
        least = min(stamps)
        if stamp <= least or stamp in stamps:
            return False
        bucket[stamps.index(least)] = stamp
        return True

    def _find_answer(self, key: bytes) -> _Subject | None:
        """Return which deployment answered a user's cell last.

        If this server has not answered the cell, the split of the response is unknown. The result
        is then the deployment that would answer the cell, and the feedback is not evidence. In a
        split with epochs, the result is None in this case.
        """
        snapshot = self._deployments.get_current()
        cell = snapshot.router.get_cell(key)
        answer = max(
            self._shared.get_answers(worker)[cell] for worker in range(self._shared.workers)
        )
        if answer:
            is_judged = answer >> _SLOT_BITS + _EPOCH_BITS == snapshot.split_number
            return _Subject(answer % SLOTS, cell, is_judged)
        return (
            None
            if snapshot.router.epoch_s
            else _Subject(_find_sticky_slot(snapshot, cell), cell, is_judged=False)
        )


def _find_sticky_slot(snapshot: TableSnapshot, cell: int) -> int:
    """Return the slot of the deployment that answers a cell in a sticky split.

    Raises ServiceUnavailableError if the deployment is not loaded.
    """
    router = snapshot.router
    return snapshot.get_deployment(router.route_cell(router.get_draw(0), cell)).slot


def _read_entries(body: bytes) -> list[dict[str, Any]]:
    """Return the entries of a body.

    Raises:
        UserError: the body is not JSON, has too many entries, or an entry is invalid.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UserError("the body is not JSON", why=str(error)) from error
    entries = (
        document.get("feedback")
        if isinstance(document, dict) and "feedback" in document
        else [document]
    )
    if not isinstance(entries, list) or len(entries) > MAX_FEEDBACK:
        raise UserError(f"feedback must be a list of at most {MAX_FEEDBACK} entries")
    for place, entry in enumerate(entries):
        names = [name for name in _SUBJECTS if isinstance(entry, dict) and name in entry]
        has_subject = len(names) == 1 and isinstance(entry[names[0]], str)
        if not has_subject or not isinstance(entry.get("success"), bool):
            raise UserError(
                f"feedback entry {place} must have `success` (true or false) "
                f"and exactly one of {', '.join(_SUBJECTS)} (a string)",
                remedy='Send, for example: {"feedback": [{"request_id": "a1", "success": true}]}',
            )
    return entries


def _hash_id(request_id: bytes) -> int:
    """Return 36 bits of the hash of a request id, never 0.

    Python's hash of a value is the same in all forks of one process.
    """
    return (hash(request_id) & _HASH_MASK) >> _VALUE_BITS or 1
