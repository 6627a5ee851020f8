"""Routes of the public listener: Open Inference v2, MLflow's scoring protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import version

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from onnx_ops import codec
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import OnnxOpsError
from onnx_ops.serving.http.openapi import build_openapi
from onnx_ops.serving.inference.deployments import InferenceRoute, LoadedDeployment, PendingRequest
from onnx_ops.serving.inference.models import RUNTIME
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    build_error,
    format_echoed_headers,
    get_status,
)
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.inference.tensors import DATATYPE_OF
from onnx_ops.serving.metrics import CONTENT_TYPE, MetricsPage
from onnx_ops.serving.rollout_counts import FeedbackCounter

_CLIENT_GONE = 499
_MAX_FEEDBACK_BYTES = 1 << 20


class PublicApp:
    """Handlers of the public routes."""

    def __init__(
        self, service: InferenceService, metrics: MetricsPage, feedback: FeedbackCounter, *, max_body: int
    ) -> None:
        self._service = service
        self._deployments = service.deployments
        self._metrics = metrics
        self._feedback = feedback
        self._max_body = max_body

    def build(self) -> Starlette:
        """Return the ASGI app."""
        routes = [
            Route("/v2", self.get_server),
            Route("/v2/health/live", self.get_liveness),
            Route("/v2/health/ready", self.get_readiness),
            Route("/invocations", self.invoke, methods=["POST"]),
            Route("/endpoints/{endpoint}/invocations", self.invoke, methods=["POST"]),
            Route("/feedback", self.post_feedback, methods=["POST"]),
            Route("/openapi.json", self.get_openapi),
            Route("/version", self.get_version),
            Route("/ping", self.get_readiness),
            Route("/metrics", self.get_metrics),
        ]
        for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(base, self.get_model),
                Route(f"{base}/ready", self.get_model_readiness),
                Route(f"{base}/infer", self.infer, methods=["POST"]),
            ]
        return build_app(routes)

    async def get_server(self, _: Request) -> Response:
        """Return the server's metadata."""
        return json_response({"name": "onnx-ops", "version": version("onnx-ops"), "extensions": ["binary_tensor_data"]})

    async def get_liveness(self, _: Request) -> Response:
        """Return that the server is alive."""
        return json_response({"live": True})

    async def get_readiness(self, _: Request) -> Response:
        """Return whether every deployment with traffic is loaded."""
        snapshot = self._deployments.get_published()
        ready = snapshot is not None and snapshot.is_ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def get_model(self, request: Request) -> Response:
        """Return the model's metadata."""
        loaded = self._choose(request)
        signature = loaded.signature
        versions = {d.version for d in self._deployments.get_current().table.state.deployments}
        inputs = [describe_tensor(spec, optional=name in signature.optional) for name, spec in signature.inputs.items()]
        document = {
            "name": loaded.deployment.model,
            "versions": sorted(versions),
            "platform": "onnxruntime_onnx",
            "execution": {"runtime": RUNTIME, **codec.to_json(loaded.deployment.execution)},
            "inputs": inputs,
            "outputs": [describe_tensor(spec) for spec in signature.outputs.values()],
        }
        response = json_response(document)
        response.raw_headers.extend(RawResponse(200, loaded.header_lines, b"").list_headers()[:-1])
        return response

    async def get_model_readiness(self, request: Request) -> Response:
        """Return whether the model is loaded."""
        return json_response({"name": self._choose(request).deployment.model, "ready": True})

    async def infer(self, request: Request) -> Response:
        """Answer an Open Inference v2 request."""
        parameters = request.path_params
        route = InferenceRoute(model=parameters["model"], version=parameters.get("version"))
        return await self._answer(request, route)

    async def invoke(self, request: Request) -> Response:
        """Answer a request of MLflow's scoring protocol, SageMaker or Azure ML."""
        return await self._answer(request, InferenceRoute(invocation=True))

    async def post_feedback(self, request: Request) -> Response:
        """Count feedback; return the number of `counted` and of `unknown` entries.

        The content type must be JSON: browsers send that to another site only if the site allows it, which this server
        does not (https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "feedback must be JSON: send `Content-Type: application/json`")
        counted, unknown = self._feedback.count(await read_body(request, min(self._max_body, _MAX_FEEDBACK_BYTES)))
        return json_response({"counted": counted, "unknown": unknown})

    async def get_openapi(self, _: Request) -> Response:
        """Return the OpenAPI document of the endpoint."""
        deployments = self._deployments.get_current().deployments
        return json_response(build_openapi([loaded.signature for loaded in deployments.values()]))

    async def get_version(self, _: Request) -> Response:
        """Return the version, as MLflow's client requests it."""
        return PlainTextResponse(version("onnx-ops"))

    async def get_metrics(self, _: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        snapshot = self._deployments.get_published()
        text = self._metrics.render(None if snapshot is None else snapshot.table.state)
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})

    def _choose(self, request: Request) -> LoadedDeployment:
        parameters = request.path_params
        return self._service.choose(parameters["model"], parameters.get("version"), get_head(request))

    async def _answer(self, request: Request, route: InferenceRoute) -> Response:
        head = get_head(request)
        try:
            body = await read_body(request, self._max_body)
        except HTTPException as error:
            self._service.count_rejected(error.status_code)
            return _convert(build_error(error.status_code, error.detail), head)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)  # no client reads it
        future: asyncio.Future[RawResponse] = asyncio.get_running_loop().create_future()

        def respond(response: RawResponse) -> None:
            if not future.done():  # it is, if the drain was too short
                future.set_result(response)

        pending = PendingRequest(route, head, body, respond, time.perf_counter())
        return _convert(self._service.handle(pending) or await future, head)


def get_head(request: Request) -> RequestHead:
    """Return the request's headers; the first of several with one name."""
    return dict(reversed(request.scope["headers"]))


def describe_tensor(spec: TensorSpec, *, optional: bool = False) -> dict[str, object]:
    """Return the metadata of an input or output: -1 for a free dimension."""
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    document: dict[str, object] = {"name": spec.name, "datatype": DATATYPE_OF[spec.dtype], "shape": shape}
    return {**document, "parameters": {"optional": True}} if optional else document


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request; 413 as soon as more than `limit` bytes are announced or received."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "compressed bodies are not supported")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    return bytes(body)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def build_app(routes: list[Route]) -> Starlette:
    """Return an ASGI app whose errors are JSON."""

    async def respond(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return json_response({"error": error.detail}, error.status_code, error.headers)
        if isinstance(error, OnnxOpsError):
            return json_response({"error": str(error)}, get_status(error))
        return json_response({"error": "internal error"}, 500)  # the details are in the server's log

    handlers = dict.fromkeys((HTTPException, OnnxOpsError, Exception), respond)
    return Starlette(routes=routes, exception_handlers=handlers)


def _convert(response: RawResponse, head: RequestHead) -> Response:
    echoed = RawResponse(response.status, response.lines + format_echoed_headers(head), response.body)
    converted = Response(response.body, response.status)
    converted.raw_headers = echoed.list_headers()
    return converted
