"""The public listener's routes: Open Inference v2 and MLflow's scoring protocol over one endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as Path

from onnx_ops import codec
from onnx_ops.errors import OnnxOpsError
from onnx_ops.protocol.tensors import metadata
from onnx_ops.serving import answers
from onnx_ops.serving.answers import Answer, Head
from onnx_ops.serving.http import error_response, json_response, on_crash, on_http_error, read_body
from onnx_ops.serving.inference import Inference
from onnx_ops.serving.inference import Request as InferenceRequest
from onnx_ops.serving.metrics import CONTENT_TYPE, Metrics
from onnx_ops.serving.openapi import describe
from onnx_ops.serving.outcomes import Outcomes
from onnx_ops.serving.residents import Residents, Route
from onnx_ops.serving.sessions import RUNTIME

_GONE = 499
_MAX_REPORTS = 1 << 20

Handler = Callable[[Request], Awaitable[Response]]


class PublicApp:
    """Handlers of the public routes.

    Args:
        inference: answers inference requests.
        metrics: what `/metrics` shows.
        outcomes: counts what clients report.
        max_body: bytes of the largest request body.
    """

    def __init__(self, inference: Inference, metrics: Metrics, outcomes: Outcomes, *, max_body: int) -> None:
        self._inference = inference
        self._residents: Residents = inference.residents
        self._metrics = metrics
        self._outcomes = outcomes
        self._max_body = max_body

    def asgi(self) -> Starlette:
        routes = [
            Path("/v2", self.server),
            Path("/v2/health/live", self.live),
            Path("/v2/health/ready", self.ready),
            Path("/v2/models/{model}", _answering_errors(self.model)),
            Path("/v2/models/{model}/ready", _answering_errors(self.model_ready)),
            Path("/v2/models/{model}/infer", self.infer, methods=["POST"]),
            Path("/v2/models/{model}/versions/{version}", _answering_errors(self.model)),
            Path("/v2/models/{model}/versions/{version}/ready", _answering_errors(self.model_ready)),
            Path("/v2/models/{model}/versions/{version}/infer", self.infer, methods=["POST"]),
            Path("/invocations", self.invocations, methods=["POST"]),
            Path("/endpoints/{endpoint}/invocations", self.invocations, methods=["POST"]),
            Path("/outcomes", _answering_errors(self.outcomes), methods=["POST"]),
            Path("/openapi.json", _answering_errors(self.openapi)),
            Path("/version", self.version),
            Path("/ping", self.ready),
            Path("/metrics", self.metrics),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_crash})

    async def server(self, _: Request) -> Response:
        return json_response({"name": "onnx-ops", "version": version("onnx-ops"), "extensions": ["binary_tensor_data"]})

    async def live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        """Ready once every deployment that receives traffic is loaded."""
        snapshot = self._residents.snapshot
        ready = snapshot is not None and snapshot.ready()
        return json_response({"ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        parameters = request.path_params
        resident = self._inference.choose(parameters["model"], parameters.get("version"), head_of(request))
        signature = resident.signature
        deployments = self._residents.current().table.state.deployments
        document = {
            "name": resident.deployment.model,
            "versions": sorted({d.version for d in deployments}),
            "platform": "onnxruntime_onnx",
            "execution": {"runtime": RUNTIME, **codec.to_json(resident.deployment.execution)},
            "inputs": [metadata(spec, optional=name in signature.optional) for name, spec in signature.inputs.items()],
            "outputs": [metadata(spec) for spec in signature.outputs.values()],
        }
        response = json_response(document)
        response.raw_headers.extend(Answer(200, resident.lines, b"").pairs()[:-1])
        return response

    async def model_ready(self, request: Request) -> Response:
        parameters = request.path_params
        resident = self._inference.choose(parameters["model"], parameters.get("version"), head_of(request))
        return json_response({"name": resident.deployment.model, "ready": True})

    async def infer(self, request: Request) -> Response:
        parameters = request.path_params
        return await self._answered(request, Route(model=parameters["model"], version=parameters.get("version")))

    async def invocations(self, request: Request) -> Response:
        return await self._answered(request, Route(invocation=True))

    async def outcomes(self, request: Request) -> Response:
        """Reports about answers that were given: `counted`, and `unknown` ones about no request that is remembered.

        Only JSON, by its content type: browsers send that to another site only if the site has said yes before, which
        this server does not (https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "outcomes are taken as JSON only: send `Content-Type: application/json`")
        counted, unknown = self._outcomes.count(await read_body(request, min(self._max_body, _MAX_REPORTS)))
        return json_response({"counted": counted, "unknown": unknown})

    async def openapi(self, _: Request) -> Response:
        residents = self._residents.current().residents
        return json_response(describe([resident.signature for resident in residents.values()]))

    async def version(self, _: Request) -> Response:
        """What MLflow's client asks for."""
        return PlainTextResponse(version("onnx-ops"))

    async def metrics(self, _: Request) -> Response:
        text = self._metrics.text(self._residents.snapshot)
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})

    async def _answered(self, request: Request, route: Route) -> Response:
        head = head_of(request)
        try:
            body = await read_body(request, self._max_body)
        except HTTPException as error:
            self._inference.count(error.status_code)
            return _response(answers.refusal(error.status_code, error.detail), head)
        except ClientDisconnect:
            return Response(status_code=_GONE)  # nobody reads it
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def respond(answer: Answer) -> None:
            if not answered.done():  # it is, if the drain was too short
                answered.set_result(answer)

        inference = InferenceRequest(route, head, body, respond, time.perf_counter())
        answer = self._inference.call(inference) or await answered
        return _response(answer, head)


def head_of(request: Request) -> Head:
    """The request's headers; of several with one name the first."""
    return dict(reversed(request.scope["headers"]))


def _response(answer: Answer, head: Head) -> Response:
    echoed = Answer(answer.status, answer.lines + answers.echo(head), answer.body)
    response = Response(answer.body, answer.status)
    response.raw_headers = echoed.pairs()
    return response


def _answering_errors(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except OnnxOpsError as error:
            return error_response(error)

    return handle
