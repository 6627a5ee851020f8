"""The public listener: Open Inference v2 and MLflow's scoring protocol over one endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from onnx_ops.errors import NotFound, OnnxOpsError
from onnx_ops.protocol import headers
from onnx_ops.protocol.tensors import metadata
from onnx_ops.serving.endpoint import Endpoint, Snapshot
from onnx_ops.serving.forms import (
    is_infer,
    read_infer,
    read_invocation,
    write_infer,
    write_predictions,
)
from onnx_ops.serving.http import (
    error_response,
    json_response,
    on_crash,
    on_http_error,
    parse_json,
    read_body,
)
from onnx_ops.serving.metrics import CONTENT_TYPE, Metrics
from onnx_ops.serving.models import LoadedModel

MAX_BODY = 32 << 20
"""Bytes of the largest request body."""

Answer = Callable[[LoadedModel, bytes], Response]


class PublicApp:
    """Handlers of the public routes.

    Args:
        endpoint: what is served.
        pool: where models run, so that a slow one does not keep health checks waiting.
        max_body: bytes of the largest request body.
    """

    def __init__(self, endpoint: Endpoint, pool: Executor, *, max_body: int = MAX_BODY) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._max_body = max_body
        self._metrics = Metrics()
        self._random = random.Random()  # noqa: S311 (traffic is split, nothing is kept secret)

    def asgi(self) -> Starlette:
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/{model}", self.model),
            Route("/v2/models/{model}/ready", self.model_ready),
            Route("/v2/models/{model}/infer", self.infer, methods=["POST"]),
            Route("/v2/models/{model}/versions/{version}", self.model),
            Route("/v2/models/{model}/versions/{version}/ready", self.model_ready),
            Route("/v2/models/{model}/versions/{version}/infer", self.infer, methods=["POST"]),
            Route("/invocations", self.invocations, methods=["POST"]),
            Route("/ping", self.ready),
            Route("/metrics", self.metrics),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_crash})

    async def server(self, _: Request) -> Response:
        return json_response({"name": "onnx-ops", "version": version("onnx-ops"), "extensions": []})

    async def live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        """Ready once every deployment that receives traffic is loaded."""
        snapshot = self._endpoint.snapshot
        ready = snapshot is not None and all(name in snapshot.models for name in snapshot.router.slots)
        return json_response({"ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        try:
            snapshot = self._snapshot(request)
            loaded = self._choose(snapshot, request)
        except OnnxOpsError as error:
            return error_response(error)
        versions = sorted({d.version for d in snapshot.table.state.deployments})
        document = {
            "name": loaded.deployment.model,
            "versions": versions,
            "platform": "onnxruntime_onnx",
            "inputs": [metadata(spec) for spec in loaded.inputs.values()],
            "outputs": [metadata(spec) for spec in loaded.outputs.values()],
        }
        return _named(json_response(document), loaded)

    async def model_ready(self, request: Request) -> Response:
        try:
            loaded = self._choose(self._snapshot(request), request)
        except OnnxOpsError as error:
            return error_response(error)
        return json_response({"name": loaded.deployment.model, "ready": True})

    async def infer(self, request: Request) -> Response:
        return await self._counted(request, _answer_infer)

    async def invocations(self, request: Request) -> Response:
        return await self._counted(request, _answer_invocation)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._metrics.text(self._endpoint.snapshot), headers={"content-type": CONTENT_TYPE})

    async def _counted(self, request: Request, answer: Answer) -> Response:
        deployment = ""
        status = 500
        try:
            try:
                _check_content_type(request)
                body = await read_body(request, self._max_body)
                # Chosen only after the body has come: a request never waits on a table that was replaced meanwhile.
                loaded = self._choose(self._snapshot(request), request)
                deployment = loaded.deployment.name
                response = await self._run(answer, loaded, body)
            except OnnxOpsError as error:
                response = error_response(error)
            except HTTPException as error:
                response = await on_http_error(request, error)
            status = response.status_code
        finally:
            self._metrics.count(deployment, status)
        if (identity := request.headers.get(headers.REQUEST_ID)) is not None:
            response.headers[headers.REQUEST_ID] = identity
        return response

    async def _run(self, answer: Answer, loaded: LoadedModel, body: bytes) -> Response:
        loop = asyncio.get_running_loop()
        self._metrics.running += 1
        try:
            response = await loop.run_in_executor(self._pool, answer, loaded, body)
        except OnnxOpsError as error:
            response = error_response(error)
        finally:
            self._metrics.running -= 1
        return _named(response, loaded)

    def _snapshot(self, request: Request) -> Snapshot:
        snapshot = self._endpoint.current()
        model = request.path_params.get("model", snapshot.model)
        if model != snapshot.model:
            raise NotFound(f"no model is called {model!r}; this endpoint serves {snapshot.model!r}")
        return snapshot

    def _choose(self, snapshot: Snapshot, request: Request) -> LoadedModel:
        if (wanted := request.path_params.get("version")) is not None:
            return snapshot.version(wanted)
        router = snapshot.router
        if (pinned := router.pinned(request.headers)) is not None:
            return snapshot.loaded(pinned)
        key = request.headers.get(headers.USER_KEY)
        return snapshot.loaded(router.by_chance(self._random.random()) if key is None else router.by_key(key))


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind in ("text/csv", "application/octet-stream") or headers.BINARY_LENGTH in request.headers:
        raise HTTPException(415, "only JSON bodies are accepted")


def _answer_infer(loaded: LoadedModel, body: bytes) -> Response:
    return _infer(loaded, parse_json(body))


def _answer_invocation(loaded: LoadedModel, body: bytes) -> Response:
    document = parse_json(body)
    if is_infer(document):
        return _infer(loaded, document)
    feed, table = read_invocation(document, loaded.inputs)
    return json_response(write_predictions(loaded.run(feed, tuple(loaded.outputs)), table=table))


def _infer(loaded: LoadedModel, document: object) -> Response:
    request = read_infer(document, loaded.inputs, loaded.outputs)
    values = loaded.run(request.feed, request.outputs)
    deployment = loaded.deployment
    answer = write_infer(
        values, loaded.outputs, model=deployment.model, version=deployment.version, identity=request.id
    )
    return json_response(answer)


def _named(response: Response, loaded: LoadedModel) -> Response:
    response.headers[headers.DEPLOYMENT] = loaded.deployment.name
    response.headers[headers.INVOKED_VARIANT] = loaded.deployment.name
    return response
