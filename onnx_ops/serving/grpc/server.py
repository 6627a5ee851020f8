"""A worker's gRPC server.

The app and the service of the HTTP listener answer the requests. Each inference request is
converted to the binary form of HTTP, and its response is converted to a message. So the rules for
tensors, errors and counts are implemented once. gRPC metadata replaces the HTTP headers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import orjson
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from onnx_ops.errors import UserError
from onnx_ops.protocol import messages
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.grpc.open_inference import (
    METHODS,
    POOL,
    SERVICE,
    STREAM,
    decode_request,
    decode_response,
    encode_request,
    get_message_class,
)
from onnx_ops.serving.http.app import PublicApp
from onnx_ops.serving.http.limits import ConnectionLimits
from onnx_ops.serving.inference.deployments import InferenceRoute, PendingRequest
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    build_error,
    build_error_from,
    format_echoed_headers,
)

_CODES: Mapping[int, Any] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's code by HTTP status.

https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto defines the codes.
"""

_log = logging.getLogger(__name__)

_BINARY_LENGTH = messages.BINARY_LENGTH_HEADER.encode()
_TIMEOUT = messages.TIMEOUT_HEADER.encode()
_BODY_HEADERS = ("content-type", messages.BINARY_LENGTH_HEADER)
_MAX_TIMEOUT_MS = 10**9 - 1
_MAX_STREAMED = 64
"""Size of the queue of a stream's requests that are answered at the same time.

A full batch has the same number of requests.
"""
_HEALTH_PAUSE_S = 1.0
_DRAIN_PAUSE_S = 0.05
_DRAIN_IDLE_S = 1.0
"""Seconds that a draining server waits after its last request in progress.

Streams that are still open after this time are ended.
"""

for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    # With these descriptors, reflection can describe the services of health and reflection.
    POOL.AddSerializedFile(_file.serialized_pb)


class InferenceServicer:
    """Handlers of the methods of `GRPCInferenceService`."""

    def __init__(self, app: PublicApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._responses = {
            name: get_message_class(response) for name, (_, response) in METHODS.items()
        }
        self.in_progress = 0
        """Inference requests that are queued or running on a thread."""

    def build_handler(self) -> Any:
        """Return the handler that gRPC calls for a method of the service."""
        methods: Mapping[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self.get_liveness,
            "ServerReady": self.get_readiness,
            "ModelReady": self.get_model_readiness,
            "ServerMetadata": self.get_server,
            "ModelMetadata": self.get_model,
            "RepositoryIndex": self.get_repository_index,
            "ModelInfer": self.infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, **_get_codec(name))
            for name, method in methods.items()
        }
        handlers[STREAM] = grpc.stream_stream_rpc_method_handler(self.stream, **_get_codec(STREAM))
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def get_liveness(self, _message: Any, _context: Any) -> Any:
        """Return a response which states that the server is alive."""
        return self._responses["ServerLive"](live=True)

    async def get_readiness(self, _message: Any, _context: Any) -> Any:
        """Return a response which states whether the server is ready (see `is_ready`)."""
        return self._responses["ServerReady"](ready=is_ready(self._app))

    async def get_model_readiness(self, message: Any, context: Any) -> Any:
        """Return a response which states whether the model is loaded and in service."""
        model, version = message.name, message.version or None
        head = _read_head(context)
        response = self._app.call(
            lambda head, _: self._app.get_model_readiness(model, version, head), head, b""
        )
        return self._responses["ModelReady"](ready=response.status == 200)

    async def get_server(self, _message: Any, context: Any) -> Any:
        """Return the name, version and extensions of the server."""
        return self._responses["ServerMetadata"](
            **await self._read_json(self._app.get_server, context)
        )

    async def get_model(self, message: Any, context: Any) -> Any:
        """Return the name, served versions, platform and tensors of the model."""
        model, version = message.name, message.version or None
        document = await self._read_json(
            lambda head, _: self._app.get_model(model, version, head), context
        )
        return self._responses["ModelMetadata"](
            name=document["name"],
            versions=document["versions"],
            platform=document["platform"],
            **{
                side: [
                    {key: tensor[key] for key in ("name", "datatype", "shape")}
                    for tensor in document[side]
                ]
                for side in ("inputs", "outputs")
            },
        )

    async def get_repository_index(self, message: Any, context: Any) -> Any:
        """Return the state of each version in the routing table, or of ready ones only."""
        only_ready = message.ready
        models = await self._read_json(
            lambda *_: self._app.get_repository_index(only_ready=only_ready), context
        )
        return self._responses["RepositoryIndex"](models=models)

    async def infer(self, data: bytes, context: Any) -> Any:
        """Answer an inference request."""
        head = _read_head(context)
        try:
            response = await self._answer(decode_request(data), head)
        except UserError as error:
            response = self._reject(error)
        return decode_response(await _check(response, head, context))

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Yield the responses to a stream of requests, in the order of the requests.

        Several requests are answered at the same time. A failed request does not end its stream. A
        draining server ends the stream with UNAVAILABLE.
        """
        tasks: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_MAX_STREAMED)

        async def read() -> None:
            async for data in requests:
                if self._limits.draining:
                    break
                await tasks.put(
                    self._loop.create_task(self._answer_streamed(data, _read_head(context)))
                )
            await tasks.put(None)

        reader = self._loop.create_task(read())
        try:
            while (task := await tasks.get()) is not None:
                yield await task
            if self._limits.draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        finally:
            reader.cancel()
            while not tasks.empty():
                if (task := tasks.get_nowait()) is not None:
                    task.cancel()

    async def _answer_streamed(self, data: bytes, head: dict[bytes, bytes]) -> Any:
        try:
            message = decode_request(data)
        except UserError as error:
            return self._responses[STREAM](error_message=_get_message(self._reject(error)))
        response = await self._answer(message, head)
        if response.status != 200:
            return self._responses[STREAM](
                error_message=_get_message(response), infer_response={"id": message.id}
            )
        result = decode_response(response)
        if token := dict(_read_metadata(response.lines)).get(messages.FEEDBACK_HEADER):
            result.parameters[messages.FEEDBACK_HEADER].string_param = token
        if message.parameters["triton_enable_empty_final_response"].bool_param:
            result.parameters["triton_final_response"].bool_param = True
        return self._responses[STREAM](infer_response=result)

    async def _answer(self, message: Any, head: dict[bytes, bytes]) -> RawResponse:
        service, limits = self._app.service, self._limits
        try:
            body, length = encode_request(message)
        except UserError as error:
            return self._reject(error)
        if limits.body_bytes + limits.inflated.bytes + len(body) > limits.max_body_bytes:
            service.count_rejected(503)
            return build_error(503, "the server is receiving too many bytes at the same time")
        head[_BINARY_LENGTH] = b"%d" % length
        route = InferenceRoute(model=message.model_name, version=message.model_version or None)
        answered: asyncio.Future[RawResponse] = self._loop.create_future()
        response = service.handle(
            route, head, body, lambda r: None if answered.done() else answered.set_result(r)
        )
        if not isinstance(response, PendingRequest):
            return response
        limits.body_bytes += len(body)
        self.in_progress += 1
        try:
            return await answered
        except asyncio.CancelledError:
            response.abandoned = True
            raise
        finally:
            limits.body_bytes -= len(body)
            self.in_progress -= 1

    def _reject(self, error: UserError) -> RawResponse:
        """Return the response to a message that is not a valid request, and count it."""
        response = build_error_from(error)
        self._app.count_rejected(response.status)
        return response

    async def _read_json(
        self, handler: Callable[[RequestHead, bytes], RawResponse], context: Any
    ) -> Any:
        head = _read_head(context)
        return orjson.loads((await _check(self._app.call(handler, head, b""), head, context)).body)


def _get_codec(method: str) -> Mapping[str, Any]:
    """Return the decoder and encoder of a method's messages.

    An inference request is not decoded here but in `decode_request`.
    """
    request, response = map(get_message_class, METHODS[method])
    is_inference = METHODS[method][0] == "ModelInferRequest"
    return {
        "request_deserializer": None if is_inference else request.FromString,
        "response_serializer": response.SerializeToString,
    }


def is_ready(app: PublicApp) -> bool:
    """Return whether the server is ready for requests (see `PublicApp.get_readiness`)."""
    return app.call(app.get_readiness, {}, b"").status == 200


def _read_head(context: Any) -> dict[bytes, bytes]:
    """Return the metadata of a call as headers, with the deadline of the call.

    A header that sets a deadline takes precedence over the deadline of the call.
    """
    head: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        head.setdefault(name.encode(), value if isinstance(value, bytes) else value.encode())
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s * 1e3 < _MAX_TIMEOUT_MS:
        head.setdefault(_TIMEOUT, b"%d" % (remaining_s * 1e3))
    return head


async def _check(response: RawResponse, head: RequestHead, context: Any) -> RawResponse:
    """Send the response's headers as trailing metadata, and return the response.

    An error response ends the call with the gRPC code of its status.
    """
    pairs = _read_metadata(response.lines + format_echoed_headers(head))
    metadata = tuple((name, value) for name, value in pairs if name not in _BODY_HEADERS)
    context.set_trailing_metadata(metadata)
    if response.status != 200:
        await context.abort(
            _CODES.get(response.status, grpc.StatusCode.UNKNOWN), _get_message(response), metadata
        )
    return response


def _read_metadata(lines: bytes) -> Sequence[tuple[str, str]]:
    """Return the names and values of header lines."""
    return [
        (name, value)
        for name, _, value in (line.partition(": ") for line in lines.decode("ascii").splitlines())
    ]


def _get_message(response: RawResponse) -> str:
    return str(orjson.loads(response.body)["error"])


class ReadinessServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """The standard health service, which reports the readiness of the worker."""

    def __init__(self, app: PublicApp) -> None:
        super().__init__()
        self._app = app

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC's name)
        """Return the current readiness of the worker."""
        await self.refresh()
        return await super().Check(request, context)

    async def refresh(self) -> None:
        """Send the status to the clients that watch it, if it has changed."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_ready(self._app) else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self.set(name, status)

    async def watch(self) -> None:
        """Send changes of the status to watching clients, once a second, without end."""
        while True:
            try:
                await self.refresh()
            except Exception:
                # If this error ended the task, watching clients would receive a changed status only
                # when a client calls `Check`.
                _log.exception("the health status could not be refreshed")
            await asyncio.sleep(_HEALTH_PAUSE_S)


class GrpcServer:
    """The gRPC listener of one worker.

    The workers share the port, and the system distributes the connections.

    Web pages cannot call this listener, because browsers support HTTP/2 only with TLS. So the
    listener checks neither `Host` nor `Origin`.
    """

    def __init__(
        self, app: PublicApp, limits: ConnectionLimits, host: str, options: ServerOptions
    ) -> None:
        self._limits = limits
        self._drain_s = options.drain
        self._inference = InferenceServicer(app, limits)
        self._health = ReadinessServicer(app)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.max_connections,
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", limits.max_body),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_connection_idle_ms", int(options.keep_alive * 1e3)),
                ("grpc.server_handshake_timeout_ms", int(options.read_timeout * 1e3)),
            ],
        )
        self._server.add_generic_rpc_handlers((self._inference.build_handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, POOL)
        self._server.add_insecure_port(
            f"[{host}]:{options.grpc_port}" if ":" in host else f"{host}:{options.grpc_port}"
        )

    async def start(self) -> None:
        """Set the health status, and start to accept connections."""
        await self._health.refresh()
        await self._server.start()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then wait for requests in progress.

        The wait ends after the drain time at the latest. Streams that are still open after the wait
        end with UNAVAILABLE.
        """
        watching = asyncio.create_task(self._health.watch())
        await stop.wait()
        watching.cancel()
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(self._drain_s))
        while self._inference.in_progress and not stopping.done():
            await asyncio.sleep(_DRAIN_PAUSE_S)
        await self._server.stop(min(_DRAIN_IDLE_S, self._drain_s))
        await stopping
