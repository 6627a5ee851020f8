"""The access log: one JSON line per inference, written off the hot path."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque

import orjson

from onnx_ops.protocol import messages
from onnx_ops.serving.answers import Head
from onnx_ops.serving.residents import Route
from onnx_ops.serving.shared import LOG_DROPPED, Row

_log = logging.getLogger(__name__)

_MOST_RECORDS = 65_536
_PAUSE_S = 0.1
_LONGEST = 256
_REQUEST_ID = messages.REQUEST_ID_HEADER.encode()
_TRACE_PARENT = messages.TRACE_PARENT_HEADER.encode()

Record = tuple[float, bytes | None, bytes | None, Route, str, int, float, float]


class AccessLog:
    """A bounded buffer, and a thread that writes it out ten times a second. What does not fit is dropped and counted.

    Whole lines are appended with one write, so that several workers may share a file.

    Args:
        path: the file; `-` is standard output.
        row: where drops are counted.
    """

    def __init__(self, path: str, row: Row) -> None:
        self._file = 1 if path == "-" else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._row = row
        self._records: deque[Record] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="access-log", daemon=True)
        self._thread.start()

    def put(self, head: Head, route: Route, deployment: str, status: int, waited: float, seconds: float) -> None:
        """`waited` are the seconds in a lane's queue, `seconds` all of them until the answer was written."""
        if len(self._records) >= _MOST_RECORDS:
            self._row[LOG_DROPPED] += 1
            return
        now = time.time()  # noqa: TID251 (when a request was answered, for people to read)
        record = (now, head.get(_REQUEST_ID), head.get(_TRACE_PARENT), route, deployment, status, waited, seconds)
        self._records.append(record)

    def close(self) -> None:
        """Write what is left."""
        self._stopped.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(_PAUSE_S):
            self._write_out()
        self._write_out()

    def _write_out(self) -> None:
        count = len(self._records)
        if not count:
            return
        data = b"".join(_line(self._records.popleft()) for _ in range(count))
        try:
            os.write(self._file, data)
        except OSError as error:
            _log.warning("%d lines of the access log are lost: %s", count, error)


def _line(record: Record) -> bytes:
    at, request, trace, route, deployment, status, waited, seconds = record
    document = {
        "at": f"{_second(int(at))}.{int(at * 1e3) % 1000:03d}Z",
        "request_id": _text(request),
        "traceparent": _text(trace),
        "protocol": "invocations" if route.invocation else "infer",
        "model": route.model,
        "version": route.version,
        "deployment": deployment,
        "status": status,
        "waited_ms": round(waited * 1e3, 3),
        "duration_ms": round(seconds * 1e3, 3),
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


@functools.lru_cache(maxsize=2)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:_LONGEST].decode("latin-1")
