"""Log of answered requests: lines of JSON, and OpenTelemetry spans.

The spans are sent to a collector and need the extra `otel`. Requests are recorded when their
responses are ready, and are written on a thread. The standard variables configure the collector,
the sampler, and the limits of the span queue
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import orjson

from onnx_ops.protocol import messages
from onnx_ops.serving.inference.deployments import InferenceRoute, LoadedDeployment
from onnx_ops.serving.inference.responses import RequestHead
from onnx_ops.serving.metrics import LOG_DROPPED, MetricsRow

_log = logging.getLogger(__name__)

_REQUEST_ID = messages.REQUEST_ID_HEADER.encode()
_TRACE_PARENT = messages.TRACE_PARENT_HEADER.encode()
_MAX_LOG_RECORDS = 65_536
_LOG_PAUSE_S = 0.1
_MAX_LOG_TEXT = 256
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LAST_S = 2.0
_SERVER_ERROR = 500


RequestRecord = tuple[float, bytes | None, bytes | None, InferenceRoute, str, int, float, float]
"""An answered request.

The first field is the time when the response was ready, in seconds since the epoch. Then follow the
request id, the trace context, the route, the name of the deployment, and the status. The last two
are the seconds in the queue, and the seconds in total.
"""
Writer = Callable[[Sequence[RequestRecord]], object]
"""Function that writes records. It can raise any exception."""


class RequestLog:
    """Log that passes answered requests to writers, on a thread, ten times per second.

    Requests beyond the capacity of the buffer are dropped and counted.
    """

    def __init__(self, writers: Sequence[Writer], row: MetricsRow) -> None:
        self._writers = writers
        self._row = row
        self._records: deque[RequestRecord] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="request-log", daemon=True)
        self._thread.start()

    def put(
        self,
        route: InferenceRoute,
        head: RequestHead,
        loaded: LoadedDeployment | None,
        status: int,
        queue_s: float,
        seconds: float,
    ) -> None:
        """Add a request. `seconds` is the total time until its response was ready."""
        if len(self._records) >= _MAX_LOG_RECORDS:
            self._row[LOG_DROPPED] += 1
            return
        now = time.time()  # noqa: TID251 (the time of a response, for people)
        name = "" if loaded is None else loaded.deployment.name
        ids = head.get(_REQUEST_ID), head.get(_TRACE_PARENT)
        self._records.append((now, *ids, route, name, status, queue_s, seconds))

    def close(self) -> None:
        """Write the remaining records of the buffer."""
        self._stopped.set()
        self._thread.join()

    def _loop(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(_LOG_PAUSE_S)
            records = [self._records.popleft() for _ in range(len(self._records))]
            for write in self._writers if records else ():
                try:
                    write(records)
                except Exception as error:
                    _log.warning(
                        "a log of %d requests could not be written: %s: %s",
                        len(records),
                        type(error).__name__,
                        error,
                    )


def open_access_log(path: str) -> Writer:
    """Return a function that appends one JSON line per inference to a file.

    The path `-` is standard output. One write appends whole lines, so that several workers can
    share a file.
    """
    file = (
        1
        if path == "-"
        else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    )
    return lambda records: os.write(file, b"".join(map(_format_line, records)))


def _format_line(record: RequestRecord) -> bytes:
    at, request_id, trace_parent, route, deployment, status, queue_seconds, seconds = record
    document = {
        "at": f"{_format_second(int(at))}.{int(at * 1e3) % 1000:03d}Z",
        "request_id": _format_id(request_id),
        "traceparent": _format_id(trace_parent),
        "protocol": "invocations" if route.invocation else "infer",
        "model": route.model,
        "version": route.version,
        "deployment": deployment,
        "status": status,
        "waited_ms": round(queue_seconds * 1e3, 3),
        "duration_ms": round(seconds * 1e3, 3),
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


@functools.lru_cache(maxsize=2)
def _format_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _format_id(value: bytes | None) -> str | None:
    return None if value is None else value[:_MAX_LOG_TEXT].decode("latin-1")


def find_collector() -> str:
    """Return the variable that names the collector.

    The result is empty if no collector is configured, or if OpenTelemetry is disabled.
    """
    if (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    ):
        return ""
    return next((name for name in _ENDPOINTS if os.environ.get(name)), "")


class SpanWriter:
    """Writer of a span for each request, as a child of the caller's span.

    Spans that the collector does not accept in time are dropped.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        self._provider = TracerProvider(
            resource=Resource.create({} if is_named else {"service.name": endpoint})
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("onnx_ops")
        self._extract = TraceContextTextMapPropagator().extract

    def write(self, records: Sequence[RequestRecord]) -> None:
        """Create a span for each request."""
        from opentelemetry.trace import SpanKind, StatusCode

        for at, request_id, trace_parent, route, deployment, status, queue_s, seconds in records:
            kind = "invocations" if route.invocation else "infer"
            known: dict[str, str | float | None] = {
                "http.response.status_code": status,
                "onnx_ops.protocol": kind,
                "onnx_ops.model": route.model,
                "onnx_ops.version": route.version,
                "onnx_ops.deployment": deployment,
                "onnx_ops.request_id": _format_id(request_id),
                "onnx_ops.queue_seconds": queue_s,
                "error.type": str(status) if status >= _SERVER_ERROR else None,
            }
            started = at - seconds
            span = self._tracer.start_span(
                kind if route.model is None else f"{kind} {route.model}",
                context=self._extract({"traceparent": _format_id(trace_parent) or ""}),
                kind=SpanKind.SERVER,
                attributes={name: value for name, value in known.items() if value is not None},
                start_time=int(started * 1e9),
            )
            if queue_s:
                span.add_event("dequeued", timestamp=int((started + queue_s) * 1e9))
            if status >= _SERVER_ERROR:
                span.set_status(StatusCode.ERROR)
            span.end(end_time=int(at * 1e9))

    def close(self) -> None:
        """Send the remaining spans, within a short time limit.

        The collector must not delay the end of this process.
        """
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_S)
