"""The base of the listeners' apps, and the routes of the public listener."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar
from urllib.parse import unquote

import httptools
import orjson

from onnx_ops import codec
from onnx_ops.errors import OnnxOpsError, ServiceUnavailableError, UserError
from onnx_ops.protocol.routing_table import NOTICE_S
from onnx_ops.serving.http.openapi import build_openapi
from onnx_ops.serving.http.pages import build_docs_page, build_start_page, list_served
from onnx_ops.serving.http.sagemaker import (
    CUSTOM_ATTRIBUTES,
    FEEDBACK_TYPE,
    INFERENCE_ID,
    add_attributes,
    read_attributes,
)
from onnx_ops.serving.http.triton_extensions import (
    EXTENSIONS,
    PLATFORM,
    build_config,
    build_statistics,
    list_models,
)
from onnx_ops.serving.inference.deployments import InferenceRoute, PendingRequest
from onnx_ops.serving.inference.models import RUNTIME
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    build_error,
    build_error_from,
    build_internal_error,
)
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.serving.inference.tensors import RequestBody, describe_tensor
from onnx_ops.serving.metrics import CONTENT_TYPE, OPEN_METRICS_TYPE, OUT_OF_SERVICE, MetricsPage

_log = logging.getLogger(__name__)

T = TypeVar("T")

Handler = Callable[[RequestHead, bytes], RawResponse | Awaitable[RawResponse]]
"""Function that returns the response to a request, or an awaitable response.

Its arguments are the head and the body. An awaitable response is completed even if the client
disconnects.
"""

_MAX_FEEDBACK_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 10
_MODEL = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/(?P<action>ready|config|stats|infer))?"
)
_INVOCATIONS = re.compile(r"(?:/endpoints/[^/]+)?/invocations")


@dataclass(slots=True)
class PendingResponse:
    """A request whose response is sent later."""

    head: RequestHead
    body: bytes
    abandoned: bool = False


Infer = Callable[
    [InferenceRoute, RequestHead, RequestBody, Callable[[RawResponse], None]],
    RawResponse | PendingRequest,
]

Methods = Mapping[bytes, InferenceRoute | Handler]
"""The route or handler of a path, by method."""


class HttpApp:
    """Base of the apps that answer the requests of a listener (see `HttpProtocol`).

    Args:
        routes: handlers of the fixed paths, by method.
        service: answers inference requests; None if the listener accepts no such requests.
    """

    def __init__(
        self, routes: Mapping[str, Methods], service: InferenceService | None = None
    ) -> None:
        self._routes = routes
        self.service = service
        self.infer: Infer = _cannot_infer if service is None else service.handle
        self.invoke: Infer = self.infer
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, method: bytes, url: bytes) -> InferenceRoute | Handler | RawResponse:
        """Return the route, the handler or the error response for a request.

        Raises:
            httptools.HttpParserInvalidURLError: the URL is invalid.
        """
        path = unquote((httptools.parse_url(url).path or b"").decode("latin-1"))
        methods = self._routes.get(path) or self.find_methods(path)
        if not methods:
            return build_error(404, "Not Found")
        if method not in methods:
            return build_error(405, "Method Not Allowed", b"allow: %b\r\n" % b", ".join(methods))
        return methods[method]

    def find_methods(self, _path: str) -> Methods:
        """Return the handlers of a path that is not among the fixed ones, by method."""
        return {}

    def respond(
        self,
        handler: Handler,
        head: RequestHead,
        body: bytes,
        deliver: Callable[[RawResponse], None],
    ) -> RawResponse | PendingResponse:
        """Return the response of a handler, or the response to its error.

        If the handler returns an awaitable, the result is a `PendingResponse`. The response is then
        passed to `deliver` later.
        """
        result = self.call(handler, head, body)
        if isinstance(result, RawResponse):
            return result

        async def answer() -> None:
            try:
                response = await result
            except Exception as error:
                response = _respond_to_error(error)
            deliver(response)

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return PendingResponse(head, body)

    def call(
        self, handler: Callable[[RequestHead, bytes], T], head: RequestHead, body: bytes
    ) -> T | RawResponse:
        """Return the result of a handler, or the response to its error."""
        try:
            return handler(head, body)
        except Exception as error:
            return _respond_to_error(error)

    def count_rejected(self, status: int) -> None:
        """Count a request that was rejected before it could reach a deployment."""
        if self.service is not None:
            self.service.count_rejected(status)


class PublicApp(HttpApp):
    """The app of the public listener, with its routes."""

    service: InferenceService

    def __init__(self, service: InferenceService) -> None:
        self._deployments = service.deployments
        self._metrics = MetricsPage(service.deployments.shared, service.deployments.endpoint)
        super().__init__(
            {
                "/": read_by(self.get_start_page),
                "/docs": read_by(self.get_docs_page),
                "/v2": read_by(self.get_server),
                "/v2/health/live": read_by(lambda _head, _body: _build_json({"live": True})),
                "/v2/health/ready": read_by(self.get_readiness),
                "/v2/models/stats": read_by(lambda head, _: self.get_statistics(None, None, head)),
                "/v2/repository/index": {b"POST": self.post_repository_index},
                "/feedback": {b"POST": self.post_feedback},
                "/openapi.json": read_by(
                    lambda _head, _body: _build_json(build_openapi(self._list_signatures()))
                ),
                "/version": read_by(self.get_version),
                "/ping": read_by(self.get_readiness),
                "/metrics": read_by(self.get_metrics),
            },
            service,
        )
        self.invoke = self._invoke

    def _invoke(
        self,
        route: InferenceRoute,
        head: RequestHead,
        body: RequestBody,
        respond: Callable[[RawResponse], None],
    ) -> RawResponse | PendingRequest:
        """Answer an invocation, or feedback that was sent to the same path.

        SageMaker forwards requests to no other path, and only with a few headers (see `sagemaker`).
        """
        if _read_content_type(head) == FEEDBACK_TYPE:
            return self.call(self.post_feedback, head, bytes(body))
        has_attributes = CUSTOM_ATTRIBUTES in head
        if not (has_attributes or INFERENCE_ID in head):
            return self.infer(route, head, body, respond)
        try:
            head = read_attributes(head)
        except UserError as error:
            response = build_error_from(error)
            self.count_rejected(response.status)
            return response
        if not has_attributes:
            return self.infer(route, head, body, respond)
        answer = self.infer(route, head, body, lambda late: respond(add_attributes(late)))
        return add_attributes(answer) if isinstance(answer, RawResponse) else answer

    def find_methods(self, path: str) -> Methods:
        """Return the handlers of an invocation or of a request about a model, by method."""
        if _INVOCATIONS.fullmatch(path):
            return {b"POST": InferenceRoute(invocation=True)}
        if (match := _MODEL.fullmatch(path)) is None:
            return {}
        model, number = match["model"], match["version"]
        if match["action"] == "infer":
            return {b"POST": InferenceRoute(model=model, version=number)}
        get = {
            None: self.get_model,
            "ready": self.get_model_readiness,
            "config": self.get_model_config,
            "stats": self.get_statistics,
        }[match["action"]]
        return read_by(lambda head, _: get(model, number, head))

    async def get_start_page(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the start page with the served versions and links to other pages."""
        snapshot, shared = self._deployments.get_published(), self._deployments.shared
        served = (
            []
            if snapshot is None
            else list_served(snapshot, shared.sum_slot, shared.header[OUT_OF_SERVICE])
        )
        return await asyncio.to_thread(build_start_page, snapshot, served)

    async def get_docs_page(self, head: RequestHead, _body: bytes) -> RawResponse:
        """Return the page that describes the API.

        The page is rendered on a thread, so that the event loop can answer other requests.
        """
        return await asyncio.to_thread(build_docs_page, self._list_signatures(), head)

    def get_server(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the name, version and protocol extensions of the server."""
        return _build_json(
            {"name": "onnx-ops", "version": version("onnx-ops"), "extensions": EXTENSIONS}
        )

    def get_readiness(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return a response which states whether the server is ready for requests.

        A table must be published, and every deployment with traffic must be loaded. If the table is
        leased, the lease must last for at least `NOTICE_S` seconds.
        """
        snapshot = self._deployments.get_published()
        ready = snapshot is not None and snapshot.is_ready()
        if ready and snapshot is not None and snapshot.table.is_leased:
            ready = self.service.has_serving_lease(NOTICE_S)
        return _build_json({"ready": ready}, 200 if ready else 503)

    def get_model(self, model: str, number: str | None, head: RequestHead) -> RawResponse:
        """Return the model's name, versions, platform, execution and tensors."""
        loaded = self.service.choose(model, number, head)
        signature = loaded.signature
        versions = {d.version for d in self._deployments.get_current().table.state.deployments}
        inputs = [
            describe_tensor(spec, optional=name in signature.optional)
            for name, spec in signature.inputs.items()
        ]
        document = {
            "name": loaded.deployment.model,
            "versions": sorted(versions),
            "platform": PLATFORM,
            "execution": {"runtime": RUNTIME, **codec.to_json(loaded.deployment.execution)},
            "inputs": inputs,
            "outputs": [describe_tensor(spec) for spec in signature.outputs.values()],
        }
        return _build_json(document, lines=loaded.header_lines)

    def get_model_readiness(self, model: str, number: str | None, head: RequestHead) -> RawResponse:
        """Return a response which states that the model is ready.

        Raises:
            NotFoundError: the model, version or deployment does not exist.
            ServiceUnavailableError: the deployment is out of service, the server lacks its lease,
                or this worker lacks the deployment or the current table.
        """
        loaded = self.service.choose(model, number, head)
        self.service.check_in_service(loaded)
        return _build_json({"name": loaded.deployment.model, "ready": True})

    def get_model_config(self, model: str, number: str | None, head: RequestHead) -> RawResponse:
        """Return the model's configuration, as Triton describes it."""
        loaded = self.service.choose(model, number, head)
        return _build_json(build_config(loaded), lines=loaded.header_lines)

    def get_statistics(
        self, model: str | None, number: str | None, _head: RequestHead
    ) -> RawResponse:
        """Return the statistics of the loaded versions, or of one version.

        Raises:
            NotFoundError: the model or version does not exist.
            ServiceUnavailableError: this worker lacks the version or the current table.
        """
        snapshot = self._deployments.get_current()
        if model is not None and model != snapshot.model:
            raise snapshot.build_model_error(model)
        if number is not None:
            snapshot.get_version(number)
        rows: dict[str, list[Sequence[int]]] = {}
        for loaded in snapshot.deployments.values():
            if number in (None, loaded.deployment.version):
                rows.setdefault(loaded.deployment.version, []).append(
                    self._deployments.shared.sum_slot(loaded.slot)
                )
        statistics = [build_statistics(snapshot.model, name, rows[name]) for name in sorted(rows)]
        return _build_json({"model_stats": statistics})

    def post_repository_index(self, _head: RequestHead, body: bytes) -> RawResponse:
        """Return the state of each version.

        With `{"ready": true}`, only versions that are ready are listed.
        """
        if len(body) > _MAX_INDEX_BYTES:
            return build_error(413, f"the body must not be larger than {_MAX_INDEX_BYTES} bytes")
        try:
            options = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError:
            options = None
        only_ready = options.get("ready", False) if isinstance(options, dict) else None
        if not isinstance(only_ready, bool):
            return build_error(400, 'the body must be empty or an object such as {"ready": true}')
        return self.get_repository_index(only_ready=only_ready)

    def get_repository_index(self, *, only_ready: bool) -> RawResponse:
        """Return the state of each version, or of ready versions only."""
        snapshot = self._deployments.get_published()
        out_of_service = self._deployments.shared.header[OUT_OF_SERVICE]
        return _build_json(
            [] if snapshot is None else list_models(snapshot, out_of_service, only_ready=only_ready)
        )

    def post_feedback(self, head: RequestHead, body: bytes) -> RawResponse:
        """Count feedback; return the number of `counted` and of `unknown` entries.

        The content type must be `application/json` or `FEEDBACK_TYPE`. Browsers send such types to
        another site only with that site's permission, which this server does not grant
        (https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
        """
        if _read_content_type(head) not in (b"application/json", FEEDBACK_TYPE):
            return build_error(415, "feedback must be JSON: send `Content-Type: application/json`")
        if len(body) > _MAX_FEEDBACK_BYTES:
            return build_error(413, f"the body must not be larger than {_MAX_FEEDBACK_BYTES} bytes")
        counted, unknown = self.service.feedback.count(body)
        return _build_json({"counted": counted, "unknown": unknown})

    def _list_signatures(self) -> Sequence[ModelSignature]:
        signatures = [
            loaded.signature for loaded in self._deployments.get_current().deployments.values()
        ]
        if not signatures:
            raise ServiceUnavailableError("no deployment is loaded")
        return signatures

    def get_version(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the version of onnx-ops in the form that MLflow's client expects."""
        return RawResponse(
            200, b"content-type: text/plain; charset=utf-8\r\n", version("onnx-ops").encode()
        )

    def get_metrics(self, head: RequestHead, _body: bytes) -> RawResponse:
        """Return the metrics in Prometheus' text format.

        Clients that accept the OpenMetrics format get the metrics in that format.
        """
        snapshot = self._deployments.get_published()
        open_metrics = b"application/openmetrics-text" in head.get(b"accept", b"")
        text = self._metrics.render(
            None if snapshot is None else snapshot.table.state, open_metrics=open_metrics
        )
        kind = OPEN_METRICS_TYPE if open_metrics else CONTENT_TYPE
        return RawResponse(200, b"content-type: %b\r\n" % kind.encode(), text.encode())


def _read_content_type(head: RequestHead) -> bytes:
    """Return the content type of a request without parameters."""
    return head.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _cannot_infer(*_: object) -> RawResponse:
    raise NotImplementedError


def _respond_to_error(error: Exception) -> RawResponse:
    if isinstance(error, OnnxOpsError):
        return build_error_from(error)
    _log.error("a request failed unexpectedly", exc_info=error)
    return build_internal_error()


def read_by(handler: Handler) -> Methods:
    """Return a mapping of the methods GET and HEAD to the given handler."""
    return {b"GET": handler, b"HEAD": handler}


def _build_json(content: object, status: int = 200, lines: bytes = b"") -> RawResponse:
    return RawResponse(status, b"content-type: application/json\r\n" + lines, orjson.dumps(content))
