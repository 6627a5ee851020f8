"""Copies of requests for deployments that are looked at before they get traffic. No client ever waits for one."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass

from onnx_ops.errors import OnnxOpsError
from onnx_ops.serving.answers import Answer
from onnx_ops.serving.batches import Item
from onnx_ops.serving.comparing import differs
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.shared import SHADOW_DIFFERING, SHADOW_DONE, SHADOW_DROPPED, SHADOW_FAILED, SHADOW_SENT

_log = logging.getLogger(__name__)

_MOST_ITEMS = 64
_MOST_BYTES = 64 << 20
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True)
class _Copy:
    """A request for a deployment, what the client was answered, and by how much numbers may be off."""

    resident: Resident
    item: Item
    expected: Answer
    tolerance: float


class Shadow:
    """A bounded queue and one thread that the system runs only when nobody else wants the processor.

    What does not fit into the queue is dropped and counted. `put` belongs to the event loop.
    """

    def __init__(self) -> None:
        self._queue: deque[_Copy] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, resident: Resident, item: Item, expected: Answer, tolerance: float) -> None:
        """Queue a copy for `resident`, whose answer is compared with `expected`."""
        size = len(item.body) + len(expected.body)
        with self._changed:
            if len(self._queue) >= _MOST_ITEMS or self._bytes + size > _MOST_BYTES:
                resident.row[SHADOW_DROPPED] += 1
                return
            self._queue.append(_Copy(resident, item, expected, tolerance))
            self._bytes += size
            resident.row[SHADOW_SENT] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="shadow", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _loop(self) -> None:
        with contextlib.suppress(OSError):  # it works at any priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                copy = self._queue.popleft()
                self._bytes -= len(copy.item.body) + len(copy.expected.body)
            _run(copy)


def _run(copy: _Copy) -> None:
    resident, item = copy.resident, copy.item
    try:
        call = resident.read(item.invocation, item.head, item.body)
        # Not `resident.answer`: at this priority its time would tell nothing about the model.
        found = resident.write(call, resident.run(call.outputs, call.feed))
        if differs(copy.expected, found, copy.tolerance):
            resident.row[SHADOW_DIFFERING] += 1
    except OnnxOpsError:
        resident.row[SHADOW_FAILED] += 1
    except Exception:
        _log.exception("a shadow request failed in a way that nobody foresaw")
        resident.row[SHADOW_FAILED] += 1
    else:
        resident.row[SHADOW_DONE] += 1
