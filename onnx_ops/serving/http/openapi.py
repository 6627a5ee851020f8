"""The OpenAPI document of an endpoint, generated from the tensors of its model.

https://spec.openapis.org/oas/v3.1.1.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from onnx_ops.domain.artifact import TensorSpec
from onnx_ops.protocol import messages
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.serving.inference.tensors import DATATYPE_OF
from onnx_ops.serving.rollout_counts import MAX_OUTCOMES

Schema = dict[str, Any]

_ERRORS = {
    "400": "The request does not fit the model; the message names the tensor.",
    "403": "The Host or Origin header is not allowed.",
    "404": "No such model, version or deployment.",
    "413": "The body is larger than the server's limit.",
    "415": "The body is compressed, or its content type is not supported.",
    "422": "The inputs fit the signature, but the model rejects them. An invocation gets a 500.",
    "429": "The queue of the server is full.",
    "500": "The model failed on these inputs.",
    "503": "Nothing is published yet, or the deployment is not loaded.",
    "504": "The request was queued past its deadline.",
}
_IN_BODY = ("400", "404", "413", "415", "422", "429", "500", "503", "504")
_TEXT: Schema = {"type": "string"}


def build_openapi(signatures: Sequence[ModelSignature]) -> Schema:
    """Return the OpenAPI 3.1 document of an endpoint.

    Args:
        signatures: of the loaded deployments, at least one, all of one model. Deployments with equal tensors share
            their schemas.
    """
    model = signatures[0].model
    kinds = list({repr((s.inputs, s.outputs, s.optional)): s for s in signatures}.values())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Endpoint of {model}",
            "version": version("onnx-ops"),
            "description": "Open Inference Protocol v2 and MLflow's scoring protocol.",
        },
        "paths": _paths(f"/v2/models/{quote(model, safe='')}", sorted({s.version for s in signatures})),
        "components": {
            "schemas": {
                "Error": _object({"error": _TEXT}),
                "Ready": {"type": "object", "properties": {"ready": {"type": "boolean"}, "name": _TEXT}},
                "Server": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
                "Model": _model(),
                "InferRequest": _either(_infer_request(s) for s in kinds),
                "InferResponse": _either(_infer_response(s) for s in kinds),
                "Invocation": _either(_invocation(s) for s in kinds),
                "Predictions": {
                    "type": "object",
                    "required": ["predictions"],
                    "properties": {"predictions": {"type": ["object", "array"]}},
                },
            },
        },
    }


def _paths(base: str, versions: list[str]) -> Schema:
    invocations = {"post": _invocations()}
    named = {"name": "endpoint", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[\\w-]+$"}}
    paths: Schema = {
        "/v2": {"get": _get("Metadata of the server", "Server")},
        "/v2/health/live": {
            "get": _get("Liveness of the server", {"type": "object", "properties": {"live": {"type": "boolean"}}})
        },
        "/v2/health/ready": {"get": _ready("Readiness: every deployment with traffic is loaded")},
        "/ping": {"get": _ready("Readiness, for SageMaker and MLflow")},
        "/version": {"get": _plain("Version of the server")},
        "/metrics": {"get": _plain("Metrics in Prometheus' text format")},
        "/outcomes": {"post": _outcomes()},
        "/openapi.json": {"get": _get("This document", {"type": "object"}, "503")},
        "/invocations": invocations,
        "/endpoints/{endpoint}/invocations": {"parameters": [named], **invocations},
    }
    chosen = {"name": "version", "in": "path", "required": True, "schema": {"enum": versions}}
    for place, shared in ((base, {}), (base + "/versions/{version}", {"parameters": [chosen]})):
        paths[place] = {**shared, "get": _get("Inputs and outputs of the model", "Model", "404", "503")}
        paths[place + "/ready"] = {**shared, "get": _get("Readiness of the model", "Ready", "404", "503")}
        paths[place + "/infer"] = {**shared, "post": _infer()}
    return paths


def _infer() -> Schema:
    return {
        "summary": "Run the model",
        "parameters": [*_request_headers(), _length_header()],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _ref("InferRequest")},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "200": {
                "description": "The outputs, in the binary form if requested.",
                "content": {
                    "application/json": {"schema": _ref("InferResponse")},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **_errors(*_IN_BODY),
        },
    }


def _invocations() -> Schema:
    return {
        "summary": "Run the model, with a body of MLflow's scoring protocol or of Open Inference",
        "parameters": [*_request_headers(), _length_header()],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("Invocation")}, "text/csv": {"schema": _TEXT}},
        },
        "responses": {
            "200": {
                "description": "Predictions, or an Open Inference response to an Open Inference request.",
                "content": {
                    "application/json": {"schema": {"anyOf": [_ref("Predictions"), _ref("InferResponse")]}},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            **_errors(*_IN_BODY),
        },
    }


def _outcomes() -> Schema:
    counted = _object({"counted": {"type": "integer"}, "unknown": {"type": "integer"}})
    report = {
        "type": "object",
        "required": ["success"],
        "properties": {
            "success": {"type": "boolean"},
            "request_id": {
                **_TEXT,
                "description": f"Of a request that had the header {messages.REQUEST_ID_HEADER}.",
            },
            "key": {**_TEXT, "description": f"User key, as in the header {messages.USER_KEY_HEADER}."},
            "deployment": {**_TEXT, "description": f"The header {messages.DEPLOYMENT_HEADER} of the response."},
        },
        "oneOf": [{"required": [name]} for name in ("request_id", "key", "deployment")],
    }
    body = {**_object({"outcomes": {**_list(report), "maxItems": MAX_OUTCOMES}})}
    return {
        "summary": "Report outcomes of responses, by which rollouts are judged",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "Number of counted outcomes, and of outcomes of unknown requests.",
                "content": {"application/json": {"schema": counted}},
            },
            **_errors("400", "413", "415"),
        },
    }


def _request_headers() -> list[Schema]:
    about = {
        messages.USER_KEY_HEADER: "Requests with the same key go to the same deployment.",
        messages.REQUEST_ID_HEADER: "Copied to the response.",
        **dict.fromkeys(messages.PIN_HEADERS, "Selects a deployment by name."),
    }
    token = {"type": "string", "pattern": "^[A-Za-z0-9-]{1,64}$"}
    return [{"name": name, "in": "header", "description": text, "schema": token} for name, text in about.items()]


def _length_header() -> Schema:
    return {
        "name": messages.BINARY_LENGTH_HEADER,
        "in": "header",
        "description": "Bytes of JSON at the start of a body in the binary form.",
        "schema": {"type": "integer", "minimum": 0},
    }


def _get(summary: str, schema: str | Schema, *errors: str) -> Schema:
    content = {"application/json": {"schema": _ref(schema) if isinstance(schema, str) else schema}}
    return {"summary": summary, "responses": {"200": {"description": "OK.", "content": content}, **_errors(*errors)}}


def _ready(summary: str) -> Schema:
    operation = _get(summary, "Ready")
    content = {"application/json": {"schema": _ref("Ready")}}
    operation["responses"]["503"] = {"description": "Not yet.", "content": content}
    return operation


def _plain(summary: str) -> Schema:
    text = {"description": "Text.", "content": {"text/plain": {}}}
    return {"summary": summary, "responses": {"200": text, **_errors()}}


def _errors(*statuses: str) -> Schema:
    """Return the errors of an operation, with those of every operation."""
    content = {"application/json": {"schema": _ref("Error")}}
    return {status: {"description": _ERRORS[status], "content": content} for status in ("403", *statuses)}


def _model() -> Schema:
    tensor = _object({"name": _TEXT, "datatype": {"enum": list(DATATYPE_OF.values())}, "shape": _list(_INTEGER)})
    names = {"name": _TEXT, "versions": _list(_TEXT), "platform": _TEXT}
    names["execution"] = {"type": "object", "description": "Runtime, execution providers and settings of sessions."}
    return _object({**names, "inputs": _list(tensor), "outputs": _list(tensor)})


_INTEGER: Schema = {"type": "integer"}
_PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}


def _infer_request(signature: ModelSignature) -> Schema:
    output = {"type": "object", "required": ["name"], "properties": {"name": {"enum": list(signature.outputs)}}}
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": _TEXT,
            "inputs": {
                **_list({"anyOf": [_tensor(spec, response=False) for spec in signature.inputs.values()]}),
                "minItems": len(signature.required),
                "maxItems": len(signature.inputs),
            },
            "outputs": _list(output),
            "parameters": {"type": "object", "properties": {"binary_data_output": {"type": "boolean"}}},
        },
    }


def _infer_response(signature: ModelSignature) -> Schema:
    tensors = {"anyOf": [_tensor(spec, response=True) for spec in signature.outputs.values()]}
    document = _object({"model_name": _TEXT, "model_version": _TEXT, "outputs": _list(tensors)})
    document["properties"]["id"] = _TEXT
    return document


def _tensor(spec: TensorSpec, *, response: bool) -> Schema:
    rank = len(spec.shape)
    dims = [{"const": d} if isinstance(d, int) else {"type": "integer", "minimum": 0} for d in spec.shape]
    shape: Schema = {"type": "array", "minItems": rank, "maxItems": rank}
    document = _object(
        {
            "name": {"const": spec.name},
            "datatype": {"const": DATATYPE_OF[spec.dtype]},
            "shape": {**shape, "prefixItems": dims} if dims else shape,
        }
    )
    flat = _list(_element(spec.dtype, response=response))
    document["properties"]["data"] = (
        flat if response else {"description": "Flat, or nested as the shape.", "anyOf": [flat, _list(_list({}))]}
    )
    document["properties"]["parameters"] = _PARAMETERS
    return document


def _invocation(signature: ModelSignature) -> Schema:
    columns = {name: {"type": ["array", "number", "string", "boolean"]} for name in signature.inputs}
    named: Schema = {"type": "object", "required": sorted(signature.required), "properties": columns}
    rows: Schema = {"type": "array", "items": {}}
    split = _object({"columns": _list({"type": ["string", "integer"]}), "data": _list(rows)})
    forms: dict[str, Schema] = {
        "inputs": {"anyOf": [named, rows]},
        "instances": {**rows, "minItems": 1},
        "dataframe_split": split,
        "dataframe_records": {**_list({"type": "object"}), "minItems": 1},
    }
    return {"oneOf": [*(_object({form: schema}) for form, schema in forms.items()), _ref("InferRequest")]}


def _element(dtype: str, *, response: bool) -> Schema:
    if dtype in ("bool", "string"):
        return {"type": {"bool": "boolean", "string": "string"}[dtype]}
    if "float" in dtype:
        return {"type": ["number", "null"]} if response else {"type": "number"}
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"type": "integer", "minimum": low, "maximum": high}


def _either(schemas: Iterable[Schema]) -> Schema:
    listed = list(schemas)
    return listed[0] if len(listed) == 1 else {"anyOf": listed}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
