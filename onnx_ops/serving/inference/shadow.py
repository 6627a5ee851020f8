"""Shadow traffic: mirrored requests, and the comparison of their responses.

A worker copies a request and its response into the queue of a socket, in 2 to 3 µs
(`benchmarks.serving.shadow_cost`). A shadow process runs the request again and compares the two
responses (`workers/shadow_processes.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import orjson

from onnx_ops.errors import OnnxOpsError
from onnx_ops.protocol.messages import BINARY_LENGTH_HEADER
from onnx_ops.serving.inference.content_coding import CODINGS
from onnx_ops.serving.inference.deployments import DeployedModel, InferenceRoute, LoadedDeployment
from onnx_ops.serving.inference.responses import RawResponse, RequestHead, read_header_length
from onnx_ops.serving.inference.tensors import RequestBody
from onnx_ops.serving.metrics import (
    SHADOW_DIFFERING,
    SHADOW_DONE,
    SHADOW_DROPPED,
    SHADOW_FAILED,
    SHADOW_SENT,
    MetricsRow,
)

_log = logging.getLogger(__name__)

_MAX_QUEUED = 1024
_MAX_QUEUED_BYTES = 64 << 20
_MAX_JOINED_BYTES = 1 << 16
"""Size in bytes up to which the parts of a message are copied into one buffer."""
_MAX_BUFFERS = 256
"""Maximum number of buffers in one system call.

The kernel accepts at most 1024 (IOV_MAX).
"""
_SEND_PAUSE_S = 0.005
"""Seconds in which messages are collected for one system call.

Without this pause, each message would wake the shadow process.
"""
_MAX_SEND_PAUSE_S = 0.08
"""Longest pause in seconds between two attempts to send messages.

While the shadow process is busy, each attempt that sends nothing doubles the pause.
"""
_MAX_SENT_BYTES = 1 << 20
"""Number of sent bytes after which one step sends no further messages.

Without the limit, a large body would delay other requests.
"""
_RECONNECT_PAUSE_S = 1.0
_FLOATS: Mapping[str, str] = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_CONTENT_TYPE, _BINARY_LENGTH = b"content-type", BINARY_LENGTH_HEADER.encode()
_CODINGS = (b"", *CODINGS)
_PREFIX = struct.Struct("<5Qd?B")
"""The fields of a message before its buffers.

The first five are the sizes of content type, binary length, header lines, request body and response
body. Then follow the tolerance, whether the request is an invocation, and the number of the content
coding.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredRequest:
    """A request, and the response of the deployment that answered it.

    The head contains only the headers that affect the run.
    """

    route: InferenceRoute
    head: RequestHead
    body: bytes
    expected: RawResponse
    tolerance: float


def encode_request(
    route: InferenceRoute,
    head: RequestHead,
    body: RequestBody,
    expected: RawResponse,
    tolerance: float,
) -> tuple[RequestBody, ...]:
    """Return the buffers of a message, which `take_requests` decodes."""
    kind, length = head.get(_CONTENT_TYPE, b""), head.get(_BINARY_LENGTH, b"")
    lines, content = expected.lines, expected.body
    way = route.invocation, _CODINGS.index(route.coding)
    prefix = _PREFIX.pack(
        len(kind), len(length), len(lines), len(body), len(content), tolerance, *way
    )
    if len(body) + len(content) <= _MAX_JOINED_BYTES:
        return (b"".join((prefix, kind, length, lines, body, content)),)
    return b"".join((prefix, kind, length, lines)), *(part for part in (body, content) if part)


def take_requests(data: bytearray) -> Iterator[MirroredRequest]:
    """Yield the decoded complete messages at the start of `data`; then remove them."""
    place = 0
    while len(data) - place >= _PREFIX.size:
        *sizes, tolerance, invocation, coding = _PREFIX.unpack_from(data, place)
        start = place + _PREFIX.size
        if len(data) < start + sum(sizes):
            break
        parts = []
        for size in sizes:
            parts.append(bytes(data[start : start + size]))
            start += size
        kind, length, lines, body, expected = parts
        named = ((_CONTENT_TYPE, kind), (_BINARY_LENGTH, length))
        yield MirroredRequest(
            route=InferenceRoute(invocation=invocation, coding=_CODINGS[coding]),
            head={name: value for name, value in named if value},
            body=body,
            expected=RawResponse(200, lines, expected),
            tolerance=tolerance,
        )
        place = start
    del data[:place]


class ShadowQueue:
    """The bounded queues of a worker to the shadow processes.

    All calls are on the event loop, and none of them blocks. Requests that do not fit into a queue
    are dropped and counted.

    Args:
        connect: opens a non-blocking connection to the shadow process of a slot. It raises OSError
            if there is no such process.
        limit: number of buffers from which a queue accepts no further message. A message has one to
            three buffers.
    """

    def __init__(
        self, connect: Callable[[int], socket.socket], *, limit: int = _MAX_QUEUED
    ) -> None:
        self._connect = connect
        self._limit = limit
        self._links: dict[int, _ShadowLink] = {}

    def put(
        self,
        loaded: LoadedDeployment,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        expected: RawResponse,
        tolerance: float,
    ) -> None:
        """Queue a request for a shadow deployment, with the response to compare with.

        `expected` is the response of the deployment that answered the client.
        """
        link = self._links.get(loaded.slot)
        if link is None:
            link = _ShadowLink(partial(self._connect, loaded.slot), loaded.row, self._limit)
            self._links[loaded.slot] = link
        if link.has_room(len(body) + len(expected.body)):
            link.put(encode_request(route, head, body, expected, tolerance))
            loaded.row[SHADOW_SENT] += 1
        else:
            loaded.row[SHADOW_DROPPED] += 1

    def close(self) -> None:
        """Send a part of each queue, drop the rest, and close the connections.

        Only what the sockets accept now is sent, and at most about `_MAX_SENT_BYTES` of a queue.
        """
        for link in self._links.values():
            link.close()


class _ShadowLink:
    """The queue to one shadow process, and the connection over which it is sent."""

    def __init__(self, connect: Callable[[], socket.socket], row: MetricsRow, limit: int) -> None:
        self._connect = connect
        self._row = row
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._buffers: deque[tuple[RequestBody, bool]] = deque()
        """Buffers, each with a flag for the first buffer of a message."""
        self._sent_bytes = 0
        """Number of bytes of the first buffer that were already sent."""
        self._queued_bytes = 0
        self._is_scheduled = False
        self._pause_s = _SEND_PAUSE_S
        self._refused_until = 0.0

    def has_room(self, size: int) -> bool:
        if self._refused_until and self._loop.time() < self._refused_until:
            return False
        return len(self._buffers) < self._limit and self._queued_bytes + size <= _MAX_QUEUED_BYTES

    def put(self, message: tuple[RequestBody, ...]) -> None:
        is_first = True
        for buffer in message:
            self._buffers.append((buffer, is_first))
            self._queued_bytes += len(buffer)
            is_first = False
        if not self._is_scheduled:
            self._schedule()

    def close(self) -> None:
        self._flush()
        self._disconnect()
        self._drop(len(self._buffers))

    def _flush(self) -> None:
        for _ in range(2):
            # If the process was replaced after the last message, the second attempt connects to the
            # new process.
            try:
                self._send()
                return
            except BlockingIOError:  # The process is busy, or it is still starting.
                return
            except OSError:
                self._disconnect()
        self._refused_until = self._loop.time() + _RECONNECT_PAUSE_S
        self._drop(len(self._buffers))

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_later(self._pause_s, self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        before = self._queued_bytes
        self._flush()
        is_blocked = self._queued_bytes == before
        self._pause_s = min(2 * self._pause_s, _MAX_SEND_PAUSE_S) if is_blocked else _SEND_PAUSE_S
        if self._buffers:
            self._schedule()

    def _send(self) -> None:
        """Send the first messages of the queue, up to about `_MAX_SENT_BYTES`.

        Raises:
            BlockingIOError: the socket accepts no more data at present.
            OSError: the connection is lost, or cannot be opened.
        """
        end = self._queued_bytes - _MAX_SENT_BYTES
        while self._buffers and self._queued_bytes > end:
            if self._socket is None:
                self._socket = self._connect()
                self._refused_until = 0.0
            first, *others = (buffer for buffer, _ in islice(self._buffers, _MAX_BUFFERS))
            sent = self._socket.sendmsg((memoryview(first)[self._sent_bytes :], *others))
            self._queued_bytes -= sent
            self._sent_bytes += sent
            while self._buffers and self._sent_bytes >= len(self._buffers[0][0]):
                self._sent_bytes -= len(self._buffers.popleft()[0])

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._sent_bytes or (self._buffers and not self._buffers[0][1]):
            # A new connection cannot continue a message that was partly sent.
            self._row[SHADOW_DROPPED] += 1
            starts = (
                place for place, (_, is_first) in enumerate(self._buffers) if is_first and place
            )
            self._drop(next(starts, len(self._buffers)))

    def _drop(self, count: int) -> None:
        """Remove the first `count` buffers; count their unsent messages as dropped."""
        for _ in range(count):
            buffer, is_first = self._buffers.popleft()
            self._queued_bytes -= len(buffer) - self._sent_bytes
            self._row[SHADOW_DROPPED] += is_first and not self._sent_bytes
            self._sent_bytes = 0


def run_mirrored_request(model: DeployedModel, row: MetricsRow, request: MirroredRequest) -> None:
    """Run a mirrored request, compare the two responses, and count the result."""
    try:
        decoded = model.decode(request.route, request.head, request.body)
        response = model.encode(decoded, model.run(decoded.outputs, decoded.feed))
        if responses_differ(request.expected, response, request.tolerance):
            row[SHADOW_DIFFERING] += 1
    except OnnxOpsError:
        row[SHADOW_FAILED] += 1
    except Exception:
        _log.exception("a mirrored request failed unexpectedly")
        row[SHADOW_FAILED] += 1
    else:
        row[SHADOW_DONE] += 1


def responses_differ(expected: RawResponse, actual: RawResponse, tolerance: float) -> bool:
    """Return whether an output is missing, added, reshaped, or beyond the tolerance.

    A floating-point number can differ by `tolerance` times the largest finite absolute value of its
    output in `expected`. Infinities and NaN must be at the same positions. All other values must be
    equal.
    """
    before, after = _decode_outputs(expected), _decode_outputs(actual)
    return before.keys() != after.keys() or any(
        _differ(before[name], after[name], tolerance) for name in before
    )


def _decode_outputs(response: RawResponse) -> dict[str, Any]:
    """Return values by output.

    Values in the binary form are arrays of floats, or bytes for other types. Others are JSON
    values.
    """
    size = read_header_length(response)
    document = orjson.loads(response.body[:size])
    if "predictions" in document:
        predictions = document["predictions"]
        if isinstance(predictions, dict):
            return predictions
        if (
            isinstance(predictions, list)
            and predictions
            and all(isinstance(row, dict) for row in predictions)
        ):
            return {name: [row.get(name) for row in predictions] for name in predictions[0]}
        return {"": predictions}
    outputs: dict[str, Any] = {}
    place = size
    for output in document["outputs"]:
        length = output.get("parameters", {}).get("binary_data_size")
        if length is None:
            outputs[output["name"]] = (output["shape"], output["data"])
        else:
            raw, place = response.body[place : place + length], place + length
            kind = _FLOATS.get(output["datatype"])
            outputs[output["name"]] = (
                output["shape"],
                raw if kind is None else np.frombuffer(raw, kind),
            )
    return outputs


def _differ(expected: Any, actual: Any, tolerance: float) -> bool:
    if isinstance(expected, tuple):
        return bool(expected[0] != actual[0]) or _differ(expected[1], actual[1], tolerance)
    before, after = _convert_floats(expected), _convert_floats(actual)
    if before is None or after is None:
        return bool(expected != actual)
    if before.shape != after.shape:
        return True
    finite = np.isfinite(before)
    scale = float(np.abs(before[finite]).max()) if finite.any() else 0.0
    return not np.allclose(after, before, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _convert_floats(value: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return floats, with NaN for null; None for values that must be exactly equal."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind == "f" else None
