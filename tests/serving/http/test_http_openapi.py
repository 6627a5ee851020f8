from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from onnx_ops.serving.http.openapi import build_openapi
from onnx_ops.serving.inference.requests import read_infer
from onnx_ops.serving.inference.responses import encode_outputs
from onnx_ops.serving.inference.tensors import DATATYPE_OF
from tests.serving.inference.tensor_cases import encode, signature, spec
from tests.serving.serving_process import X

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

INPUTS = [spec("x", "float32", "batch", 2), spec("t", "int8", 1)]
OUTPUTS = [spec("y", "float16", "b"), spec("s", "string", "b")]
MODEL = signature(INPUTS, OUTPUTS)
T = {"name": "t", "datatype": "INT8", "shape": [1], "data": [3]}


def validator(name: str) -> Draft202012Validator:
    from jsonschema import Draft202012Validator

    document = build_openapi([MODEL])
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    )


def test_openapi_schemas_accept_valid_request_and_answer() -> None:
    request = {"id": "1", "inputs": [X, T]}
    validator("InferRequest").validate(request)
    call = read_infer(encode(request), None, MODEL)
    body, _ = encode_outputs(call, MODEL, [np.array([np.nan], np.float16), np.array(["a"], object)])
    validator("InferResponse").validate(json.loads(body))


@pytest.mark.parametrize(
    "inputs",
    [
        [X],
        [X, {**T, "datatype": "INT16"}],
        [X, {**T, "name": "z"}],
        [X, {**T, "shape": [2]}],
        [X, {**T, "data": [300]}],
        [X, T, T],
    ],
)
def test_openapi_schema_with_invalid_request_raises_validation_error(inputs: list[object]) -> None:
    from jsonschema import ValidationError

    with pytest.raises(ValidationError):
        validator("InferRequest").validate({"inputs": inputs})


def test_build_openapi_of_all_types_and_several_versions_returns_valid_schema() -> None:
    from jsonschema import Draft202012Validator

    every = signature([spec(dtype, dtype, "n") for dtype in DATATYPE_OF], [spec("y", "bfloat16")])
    document = build_openapi(
        [every, *(signature(INPUTS, OUTPUTS, version=version) for version in "45")]
    )
    assert len(document["components"]["schemas"]["InferRequest"]["anyOf"]) == 2
    path = document["paths"]["/v2/models/m/versions/{version}/infer"]
    assert path["parameters"][0]["schema"] == {"enum": ["3", "4", "5"]}
    Draft202012Validator.check_schema(document["components"]["schemas"]["InferRequest"])
