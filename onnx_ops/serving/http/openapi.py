"""The OpenAPI document of an endpoint, generated from the tensors of its model.

https://spec.openapis.org/oas/v3.1.1.html
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.protocol import messages
from onnx_ops.serving.http.sagemaker import CUSTOM_ATTRIBUTES, FEEDBACK_TYPE, INFERENCE_ID
from onnx_ops.serving.inference.feedback import MAX_FEEDBACK
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.serving.inference.tensors import DATATYPE_OF

Schema = dict[str, Any]

_ERRORS = {
    "400": "The request is invalid or does not fit the model; the message names the problem.",
    "403": "The Host or Origin header is not allowed.",
    "404": "The model, version or deployment does not exist.",
    "413": "The body exceeds a limit of the server, such as its size or number of values.",
    "415": "The content encoding or the content type of the body is not supported.",
    "422": "The inputs fit the signature, but the model rejects them. Invocations get status 500.",
    "429": "The queue of the server is full.",
    "500": "The model failed on these inputs, or the server has an internal error.",
    "503": "The deployment is not available, the server lacks a lease that it needs, or it has "
    "too many connections or bytes of request bodies.",
    "504": "The request was queued past its deadline, or its run took too long.",
}
_INFERENCE_ERRORS = ("400", "404", "413", "415", "422", "429", "500", "503", "504")
_TEXT: Schema = {"type": "string"}
_TOKEN: Schema = {"type": "string", "pattern": "^[A-Za-z0-9-]{1,64}$"}
_ATTRIBUTES: Schema = {"type": "string", "pattern": "^(user|pin)=[A-Za-z0-9-]{1,64}$"}
"""Schema of one custom attribute of SageMaker.

The server accepts the user and the selected deployment as attributes, separated by `;`.
"""
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_ELEMENTS: Mapping[str, Schema] = {
    "bool": _BOOLEAN,
    "string": _TEXT,
    IMAGE_DTYPE: {"type": "string", "contentEncoding": "base64"},
}
"""Schemas of elements in JSON that are not numbers, by `TensorSpec.dtype`."""
_BINARY: Schema = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def build_openapi(signatures: Sequence[ModelSignature]) -> Schema:
    """Return the OpenAPI 3.1 document of an endpoint.

    All signatures must belong to one model. Equal signatures share schemas.
    """
    model = signatures[0].model
    error = {"application/json": {"schema": _ref("Error")}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Endpoint of {model}",
            "version": version("onnx-ops"),
            "description": "Open Inference Protocol v2 and MLflow's scoring protocol.",
        },
        "paths": _build_paths(
            f"/v2/models/{quote(model, safe='')}", sorted({s.version for s in signatures})
        ),
        "components": {
            "responses": {
                status: {"description": text, "content": error} for status, text in _ERRORS.items()
            },
            "schemas": _build_schemas(
                {repr((s.inputs, s.outputs, s.optional)): s for s in signatures}.values()
            ),
        },
    }


def _build_paths(base: str, versions: list[str]) -> Schema:
    not_ready = {
        "description": "Not ready.",
        "content": {"application/json": {"schema": _ref("Ready")}},
    }
    readiness = {**_respond(_ref("Ready")), "503": not_ready}
    text = {"200": {"description": "OK.", "content": {"text/plain": {}}}, **_list_errors()}
    page = {"200": {"description": "OK.", "content": {"text/html": {}}}, **_list_errors()}
    endpoint = _parameter("endpoint", "path", {"type": "string", "pattern": "^[\\w-]+$"})
    infer = {
        "summary": "Run the model",
        **_build_inference(
            {"application/json": {"schema": _ref("InferRequest")}, **_BINARY}, _ref("InferResponse")
        ),
    }
    entries = _object(feedback={**_list(_ref("Feedback")), "maxItems": MAX_FEEDBACK})
    counts = _object(counted=_INTEGER, unknown=_INTEGER)
    invoke = {
        "summary": "Run the model, with a body of MLflow's scoring protocol or of Open Inference",
        **_build_inference(
            {
                "application/json": {"schema": _ref("Invocation")},
                "text/csv": {"schema": _TEXT},
                FEEDBACK_TYPE.decode(): {"schema": entries},
            },
            {"anyOf": [_ref("Predictions"), _ref("InferResponse"), counts]},
            {CUSTOM_ATTRIBUTES.decode(): _ATTRIBUTES, INFERENCE_ID.decode(): _TOKEN},
        ),
    }
    report = {
        "summary": "Report feedback on responses, by which rollouts are judged",
        "requestBody": {"required": True, "content": {"application/json": {"schema": entries}}},
        "responses": _respond(counts, "400", "413", "415"),
    }
    options = _object(
        {"ready": {**_BOOLEAN, "description": "Whether to list only versions that are ready."}}
    )
    index = {
        "summary": "State of each version",
        "requestBody": {"content": {"application/json": {"schema": options}}},
        "responses": _respond(_list(_ref("ModelIndex")), "400", "413", "415"),
    }
    paths: Schema = {
        "/": _get("Page with links", page),
        "/docs": _get("Page that describes the API", {**page, **_list_errors("503")}),
        "/v2": _get("Metadata of the server", _respond(_ref("Server"))),
        "/v2/health/live": _get("Liveness of the server", _respond(_object(live=_BOOLEAN))),
        "/v2/health/ready": _get(
            "Readiness: deployments with traffic are loaded, and the lease is valid", readiness
        ),
        "/v2/models/stats": _get("Statistics of all versions", _respond(_ref("Statistics"), "503")),
        "/v2/repository/index": {"post": index},
        "/ping": _get("Readiness, for SageMaker and MLflow", readiness),
        "/version": _get("Version of the server", text),
        "/metrics": _get("Metrics in Prometheus' text format", text),
        "/feedback": {"post": report},
        "/openapi.json": _get("This document", _respond({"type": "object"}, "503")),
        "/invocations": {"post": invoke},
        "/endpoints/{endpoint}/invocations": {"parameters": [endpoint], "post": invoke},
    }
    chosen = {"parameters": [_parameter("version", "path", {"enum": versions})]}
    for place, shared in ((base, {}), (base + "/versions/{version}", chosen)):
        for action, summary, schema in (
            ("", "Inputs and outputs of the model", "Model"),
            ("/ready", "Readiness of the model", "Ready"),
            ("/config", "Configuration of the model, in Triton's form", "ModelConfig"),
            ("/stats", "Statistics of the model, in Triton's form", "Statistics"),
        ):
            paths[place + action] = {
                **shared,
                **_get(summary, _respond(_ref(schema), "404", "503")),
            }
        paths[place + "/infer"] = {**shared, "post": infer}
    return paths


def _build_inference(
    content: Schema, schema: Schema, headers: Mapping[str, Schema] | None = None
) -> Schema:
    """Return parameters, body and responses of an inference operation."""
    texts = {
        messages.USER_KEY_HEADER: "One deployment answers all requests with the same key, "
        "in a canary step until the epoch ends.",
        messages.REQUEST_ID_HEADER: "Copied to the response.",
        **dict.fromkeys(messages.PIN_HEADERS, "Selects a deployment by name."),
    }
    length = "Number of bytes of JSON at the start of a body in the binary form."
    responses = _respond(schema, *_INFERENCE_ERRORS)
    responses["200"]["content"].update(_BINARY)
    responses["200"]["headers"] = {
        messages.FEEDBACK_HEADER: {
            "description": "Token for feedback; only replicas send it.",
            "schema": _TEXT,
        }
    }
    return {
        "parameters": [
            *(_parameter(name, "header", _TOKEN, text) for name, text in texts.items()),
            *(_parameter(name, "header", kind) for name, kind in (headers or {}).items()),
            _parameter(messages.BINARY_LENGTH_HEADER, "header", {**_INTEGER, "minimum": 0}, length),
        ],
        "requestBody": {
            "required": True,
            "description": "The body can be compressed, with Content-Encoding: gzip or deflate.",
            "content": content,
        },
        "responses": responses,
    }


def _parameter(name: str, place: str, schema: Schema, text: str = "") -> Schema:
    return {
        "name": name,
        "in": place,
        "description": text,
        "required": place == "path",
        "schema": schema,
    }


def _get(summary: str, responses: Schema) -> Schema:
    return {"get": {"summary": summary, "responses": responses}}


def _respond(schema: Schema, *errors: str) -> Schema:
    return {
        "200": {"description": "OK.", "content": {"application/json": {"schema": schema}}},
        **_list_errors(*errors),
    }


def _list_errors(*statuses: str) -> Schema:
    """Return the error responses of an operation, including the common error 403."""
    return {status: {"$ref": f"#/components/responses/{status}"} for status in ("403", *statuses)}


def _build_schemas(signatures: Collection[ModelSignature]) -> Schema:
    tensors = _list(
        _object(
            name=_TEXT,
            datatype={"enum": list(dict.fromkeys(DATATYPE_OF.values()))},
            shape=_list(_INTEGER),
        )
    )
    dims = _list(_object({"optional": _BOOLEAN}, name=_TEXT, data_type=_TEXT, dims=_list(_INTEGER)))
    duration = _object(count=_INTEGER, ns=_INTEGER)
    statistics = _object(
        name=_TEXT,
        version=_TEXT,
        execution_count={
            **_INTEGER,
            "description": "Runs of the model; a batch of requests is one run.",
        },
        inference_stats=_object(success=duration, fail=duration),
    )
    execution = {
        "type": "object",
        "description": "Runtime, execution providers and settings of sessions.",
    }
    subjects = {
        "token": f"Token of a response, as in its header {messages.FEEDBACK_HEADER}.",
        "request_id": f"Id of a request, as in its header {messages.REQUEST_ID_HEADER}.",
        "key": f"User key, as in the header {messages.USER_KEY_HEADER}.",
        "deployment": f"Deployment, as in the header {messages.DEPLOYMENT_HEADER} of a response.",
    }
    feedback = _object(
        {name: {**_TEXT, "description": text} for name, text in subjects.items()}, success=_BOOLEAN
    )
    rows, scalars = _list({}), {"type": ["array", "number", "string", "boolean"]}
    requests, responses, invocations = [], [], []
    for signature in signatures:
        inputs = [_build_tensor(spec, nested=True) for spec in signature.inputs.values()]
        options = {
            "id": _TEXT,
            "outputs": _list(_object(name={"enum": list(signature.outputs)})),
            "parameters": {"type": "object", "properties": {"binary_data_output": _BOOLEAN}},
        }
        count = {"minItems": len(signature.required), "maxItems": len(inputs)}
        requests.append(_object(options, inputs={**_list({"anyOf": inputs}), **count}))
        outputs = _list(
            {"anyOf": [_build_tensor(spec, nested=False) for spec in signature.outputs.values()]}
        )
        responses.append(
            _object({"id": _TEXT}, model_name=_TEXT, model_version=_TEXT, outputs=outputs)
        )
        columns = dict.fromkeys(signature.inputs, scalars)
        named: Schema = {
            "type": "object",
            "required": sorted(signature.required),
            "properties": columns,
        }
        forms = [
            _object(inputs={"anyOf": [named, rows]}),
            _object(instances={**rows, "minItems": 1}),
            _object(
                dataframe_split=_object(
                    columns=_list({"type": ["string", "integer"]}), data=_list(rows)
                )
            ),
            _object(dataframe_records={**_list({"type": "object"}), "minItems": 1}),
        ]
        invocations.append({"oneOf": [*forms, _ref("InferRequest")]})
    return {
        "Error": _object(error=_TEXT),
        "Ready": {"type": "object", "properties": {"ready": _BOOLEAN, "name": _TEXT}},
        "Server": _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
        "Model": _object(
            name=_TEXT,
            versions=_list(_TEXT),
            platform=_TEXT,
            execution=execution,
            inputs=tensors,
            outputs=tensors,
        ),
        "ModelConfig": _object(
            name=_TEXT,
            platform=_TEXT,
            backend=_TEXT,
            max_batch_size=_INTEGER,
            input=dims,
            output=dims,
        ),
        "ModelIndex": _object(
            {"reason": _TEXT}, name=_TEXT, version=_TEXT, state={"enum": ["READY", "UNAVAILABLE"]}
        ),
        "Statistics": _object(model_stats=_list(statistics)),
        "Feedback": {**feedback, "oneOf": [{"required": [name]} for name in subjects]},
        "InferRequest": _any_of(requests),
        "InferResponse": _any_of(responses),
        "Invocation": _any_of(invocations),
        "Predictions": _object(predictions={"type": ["object", "array"]}),
    }


def _build_tensor(spec: TensorSpec, *, nested: bool) -> Schema:
    """Return the schema of a tensor of a request (`nested`) or of a response.

    Data of requests can be nested. Floating-point values of responses can be null.
    """
    rank = len(spec.shape)
    dims = [{"const": d} if isinstance(d, int) else {**_INTEGER, "minimum": 0} for d in spec.shape]
    shape: Schema = {"type": "array", "minItems": rank, "maxItems": rank}
    if spec.dtype in _ELEMENTS:
        element = _ELEMENTS[spec.dtype]
    elif "float" in spec.dtype:
        element = {"type": "number"} if nested else {"type": ["number", "null"]}
    else:
        bits = int(spec.dtype.lstrip("uint"))
        low, high = (
            (0, 2**bits - 1)
            if spec.dtype.startswith("u")
            else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        element = {**_INTEGER, "minimum": low, "maximum": high}
    flat = _list(element)
    data = (
        {"description": "Flat list, or nested lists.", "anyOf": [flat, _list(_list({}))]}
        if nested
        else flat
    )
    parameters = {
        "type": "object",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }
    return _object(
        {"data": data, "parameters": parameters},
        name={"const": spec.name},
        datatype={"const": DATATYPE_OF[spec.dtype]},
        shape={**shape, "prefixItems": dims} if dims else shape,
    )


def _any_of(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _object(optional: Schema | None = None, /, **required: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
