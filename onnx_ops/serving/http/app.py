"""Routes of the public listener: Open Inference v2, MLflow's scoring protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from urllib.parse import unquote

import httptools
import orjson

from onnx_ops import codec
from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.errors import OnnxOpsError
from onnx_ops.serving.http.openapi import build_openapi
from onnx_ops.serving.inference.deployments import InferenceRoute
from onnx_ops.serving.inference.models import RUNTIME
from onnx_ops.serving.inference.responses import (
    RawResponse,
    RequestHead,
    build_error,
    build_error_from,
    build_internal_error,
)
from onnx_ops.serving.inference.service import InferenceService
from onnx_ops.serving.inference.tensors import DATATYPE_OF
from onnx_ops.serving.metrics import CONTENT_TYPE, MetricsPage
from onnx_ops.serving.rollout_counts import FeedbackCounter

_log = logging.getLogger(__name__)

Handler = Callable[[RequestHead, bytes], RawResponse]
"""Returns the response to a request with this head and body."""

_MAX_FEEDBACK_BYTES = 1 << 20
_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<action>/ready|/infer)?")
_INVOCATIONS = re.compile(r"(?:/endpoints/[^/]+)?/invocations")
_READ, _WRITE = (b"GET", b"HEAD"), (b"POST",)


class PublicApp:
    """Handlers of the public routes."""

    def __init__(self, service: InferenceService, metrics: MetricsPage, feedback: FeedbackCounter) -> None:
        self.service = service
        self._deployments = service.deployments
        self._metrics = metrics
        self._feedback = feedback
        self._routes: Mapping[str, tuple[tuple[bytes, ...], Handler]] = {
            "/v2": (_READ, self.get_server),
            "/v2/health/live": (_READ, self.get_liveness),
            "/v2/health/ready": (_READ, self.get_readiness),
            "/feedback": (_WRITE, self.post_feedback),
            "/openapi.json": (_READ, self.get_openapi),
            "/version": (_READ, self.get_version),
            "/ping": (_READ, self.get_readiness),
            "/metrics": (_READ, self.get_metrics),
        }

    def find(self, method: bytes, url: bytes) -> InferenceRoute | Handler | RawResponse:
        """Return the route or handler of a request, or the response if it has none.

        Raises httptools.HttpParserInvalidURLError.
        """
        path = unquote((httptools.parse_url(url).path or b"").decode("latin-1"))
        answer: InferenceRoute | Handler
        if path in self._routes:
            methods, answer = self._routes[path]
        elif _INVOCATIONS.fullmatch(path):
            methods, answer = _WRITE, InferenceRoute(invocation=True)
        elif (match := _MODEL.fullmatch(path)) is not None:
            model, number = match["model"], match["version"]
            if match["action"] == "/infer":
                methods, answer = _WRITE, InferenceRoute(model=model, version=number)
            else:
                get = self.get_model_readiness if match["action"] else self.get_model
                methods, answer = _READ, lambda head, _: get(model, number, head)
        else:
            return build_error(404, "Not Found")
        if method not in methods:
            return build_error(405, "Method Not Allowed", b"allow: %b\r\n" % b", ".join(methods))
        return answer

    def respond(self, handler: Handler, head: RequestHead, body: bytes) -> RawResponse:
        """Return the response of a handler, or its error."""
        try:
            return handler(head, body)
        except OnnxOpsError as error:
            return build_error_from(error)
        except Exception:
            _log.exception("a request failed unexpectedly")
            return build_internal_error()

    def get_server(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the server's metadata."""
        return _build_json({"name": "onnx-ops", "version": version("onnx-ops"), "extensions": ["binary_tensor_data"]})

    def get_liveness(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return that the server is alive."""
        return _build_json({"live": True})

    def get_readiness(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return whether every deployment with traffic is loaded."""
        snapshot = self._deployments.get_published()
        ready = snapshot is not None and snapshot.is_ready()
        return _build_json({"ready": ready}, 200 if ready else 503)

    def get_model(self, model: str, number: str | None, head: RequestHead) -> RawResponse:
        """Return the model's metadata."""
        loaded = self.service.choose(model, number, head)
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
        return _build_json(document, lines=loaded.header_lines)

    def get_model_readiness(self, model: str, number: str | None, head: RequestHead) -> RawResponse:
        """Return whether the model is loaded."""
        return _build_json({"name": self.service.choose(model, number, head).deployment.model, "ready": True})

    def post_feedback(self, head: RequestHead, body: bytes) -> RawResponse:
        """Count feedback; return the number of `counted` and of `unknown` entries.

        The content type must be JSON: browsers send that to another site only if the site allows it, which this server
        does not (https://fetch.spec.whatwg.org/#cors-safelisted-request-header).
        """
        if head.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            return build_error(415, "feedback must be JSON: send `Content-Type: application/json`")
        if len(body) > _MAX_FEEDBACK_BYTES:
            return build_error(413, f"the body must not be larger than {_MAX_FEEDBACK_BYTES} bytes")
        counted, unknown = self._feedback.count(body)
        return _build_json({"counted": counted, "unknown": unknown})

    def get_openapi(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the OpenAPI document of the endpoint."""
        deployments = self._deployments.get_current().deployments
        return _build_json(build_openapi([loaded.signature for loaded in deployments.values()]))

    def get_version(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the version, as MLflow's client requests it."""
        return RawResponse(200, b"content-type: text/plain; charset=utf-8\r\n", version("onnx-ops").encode())

    def get_metrics(self, _head: RequestHead, _body: bytes) -> RawResponse:
        """Return the metrics in Prometheus' text format."""
        snapshot = self._deployments.get_published()
        text = self._metrics.render(None if snapshot is None else snapshot.table.state)
        return RawResponse(200, b"content-type: %b\r\n" % CONTENT_TYPE.encode(), text.encode())


def describe_tensor(spec: TensorSpec, *, optional: bool = False) -> dict[str, object]:
    """Return the metadata of an input or output: -1 for a free dimension."""
    shape = [d if isinstance(d, int) else -1 for d in spec.shape]
    document: dict[str, object] = {"name": spec.name, "datatype": DATATYPE_OF[spec.dtype], "shape": shape}
    return {**document, "parameters": {"optional": True}} if optional else document


def _build_json(content: object, status: int = 200, lines: bytes = b"") -> RawResponse:
    return RawResponse(status, b"content-type: application/json\r\n" + lines, orjson.dumps(content))
