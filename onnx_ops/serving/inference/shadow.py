"""Shadow traffic: mirrored requests, and how their responses differ."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson

from onnx_ops.errors import OnnxOpsError
from onnx_ops.serving.inference.deployments import InferenceRoute, LoadedDeployment
from onnx_ops.serving.inference.responses import RawResponse, RequestHead, read_header_length
from onnx_ops.serving.metrics import SHADOW_DIFFERING, SHADOW_DONE, SHADOW_DROPPED, SHADOW_FAILED, SHADOW_SENT

_log = logging.getLogger(__name__)

_MAX_QUEUED = 64
_MAX_QUEUED_BYTES = 64 << 20
_LOWEST_PRIORITY = 19
_FLOATS: Mapping[str, str] = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


class ShadowQueue:
    """A bounded queue of mirrored requests, and one thread of lowest priority.

    Requests that do not fit into the queue are dropped and counted. `put` belongs to the event loop.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        """Size in bytes, and what runs the request."""
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(
        self,
        loaded: LoadedDeployment,
        route: InferenceRoute,
        head: RequestHead,
        body: bytes,
        expected: RawResponse,
        tolerance: float,
    ) -> None:
        """Queue a request, to compare its response with `expected`."""
        size = len(body) + len(expected.body)
        with self._changed:
            if len(self._queue) >= _MAX_QUEUED or self._bytes + size > _MAX_QUEUED_BYTES:
                loaded.row[SHADOW_DROPPED] += 1
                return
            self._queue.append((size, partial(_run, loaded, route, head, body, expected, tolerance)))
            self._bytes += size
            loaded.row[SHADOW_SENT] += 1
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
                size, run = self._queue.popleft()
                self._bytes -= size
            run()


def _run(
    loaded: LoadedDeployment,
    route: InferenceRoute,
    head: RequestHead,
    body: bytes,
    expected: RawResponse,
    tolerance: float,
) -> None:
    try:
        request = loaded.decode(route, head, body)
        # Not `loaded.answer`: the run time at this priority must not enter the latency of the model.
        response = loaded.encode(request, loaded.run(request.outputs, request.feed))
        if responses_differ(expected, response, tolerance):
            loaded.row[SHADOW_DIFFERING] += 1
    except OnnxOpsError:
        loaded.row[SHADOW_FAILED] += 1
    except Exception:
        _log.exception("a mirrored request failed unexpectedly")
        loaded.row[SHADOW_FAILED] += 1
    else:
        loaded.row[SHADOW_DONE] += 1


def responses_differ(expected: RawResponse, actual: RawResponse, tolerance: float) -> bool:
    """Return whether an output is missing, reshaped, or beyond the tolerance.

    A floating-point number may differ by `tolerance` times the largest finite number of its output in `expected`;
    infinities and NaN must have the same places. Everything else must be equal.
    """
    before, after = _decode_outputs(expected), _decode_outputs(actual)
    return before.keys() != after.keys() or any(_differ(before[name], after[name], tolerance) for name in before)


def _decode_outputs(response: RawResponse) -> dict[str, Any]:
    """Return values by output: arrays in the binary form, else as in JSON."""
    size = read_header_length(response)
    document = orjson.loads(response.body[:size])
    if "predictions" in document:
        predictions = document["predictions"]
        if isinstance(predictions, dict):
            return predictions
        if isinstance(predictions, list) and predictions and all(isinstance(row, dict) for row in predictions):
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
            outputs[output["name"]] = (output["shape"], raw if kind is None else np.frombuffer(raw, kind))
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
    """Return floats, with NaN for null; None for values that must be equal."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind == "f" else None
