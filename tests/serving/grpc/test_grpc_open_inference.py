"""Messages over gRPC: their descriptors, and the conversion of typed contents."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.serving.grpc.open_inference import (
    METHODS,
    POOL,
    SERVICE,
    decode_request,
    encode_request,
    get_message_class,
)
from onnx_ops.serving.inference.tensors import MAX_KEYS

Message = get_message_class("ModelInferRequest")


def request(datatype: str, shape: list[int], **contents: Any) -> Any:
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "contents": contents}
    return Message(model_name="m", inputs=[tensor])


def describe_fields(descriptor: Any) -> dict[str, Any]:
    """Return everything that determines the bytes of a message."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type and field.message_type.full_name,
            field.containing_oneof and field.containing_oneof.name,
        )
        for field in descriptor.fields
    }


def list_messages(descriptors: Any) -> dict[str, Any]:
    return {
        d.full_name: d
        for top in descriptors
        for d in (top, *list_messages(top.nested_types).values())
    }


def test_grpc_messages_match_triton_definitions() -> None:
    from tritonclient.grpc import service_pb2

    file = POOL.FindFileByName("open_inference_grpc.proto")
    theirs = list_messages(service_pb2.DESCRIPTOR.message_types_by_name.values())
    for name, message in list_messages(file.message_types_by_name.values()).items():
        assert describe_fields(message) == describe_fields(theirs[name]), name
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in POOL.FindServiceByName(SERVICE).methods:
        other = service.methods_by_name[method.name]
        assert (method.input_type.full_name, method.output_type.full_name) == (
            other.input_type.full_name,
            other.output_type.full_name,
        )
        assert (method.client_streaming, method.server_streaming) == (
            other.client_streaming,
            other.server_streaming,
        )
    assert set(METHODS) == {method.name for method in POOL.FindServiceByName(SERVICE).methods}


@pytest.mark.parametrize(
    ("datatype", "field", "values", "dtype"),
    [
        ("BOOL", "bool_contents", [True, False], "bool"),
        ("INT8", "int_contents", [127, -128], "int8"),
        ("INT16", "int_contents", [-32768, 1], "int16"),
        ("INT32", "int_contents", [-(2**31), 1], "int32"),
        ("INT64", "int64_contents", [2**62 + 1, -1], "int64"),
        ("UINT8", "uint_contents", [255, 0], "uint8"),
        ("UINT16", "uint_contents", [65535, 0], "uint16"),
        ("UINT32", "uint_contents", [2**32 - 1, 0], "uint32"),
        ("UINT64", "uint64_contents", [2**64 - 1, 0], "uint64"),
        ("FP32", "fp32_contents", [1.5, float("nan")], "float32"),
        ("FP64", "fp64_contents", [0.1, float("inf")], "float64"),
    ],
)
def test_encode_request_with_typed_contents_writes_bytes_of_datatype(
    datatype: str, field: str, values: list[Any], dtype: str
) -> None:
    body, length = encode_request(request(datatype, [2], **{field: values}))
    assert body[length:] == np.array(values, dtype).tobytes()
    assert json.loads(body[:length])["inputs"][0]["parameters"] == {
        "binary_data_size": len(body) - length
    }


def test_encode_request_of_bytes_contents_writes_length_before_each_element() -> None:
    body, length = encode_request(request("BYTES", [2], bytes_contents=[b"ab", b""]))
    assert body[length:] == b"\x02\0\0\0ab\0\0\0\0"


def test_encode_request_without_contents_writes_no_bytes() -> None:
    body, length = encode_request(request("INT8", [0]))
    assert body[length:] == b""


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (request("INT8", [1], int_contents=[128]), "a number outside the range of INT8"),
        (request("UINT16", [1], uint_contents=[65536]), "a number outside the range of UINT16"),
        (request("FP32", [1], fp64_contents=[1.0]), "tensor 'x' of FP32 has fp64_contents"),
        (
            request("FP16", [1], fp32_contents=[1.0]),
            "tensor 'x' of 'FP16' has no raw_input_contents",
        ),
        (
            Message(inputs=[{"name": "x"}], raw_input_contents=[b"", b""]),
            "1 inputs, but 2 raw_input_contents",
        ),
        (
            Message(
                inputs=[{"name": "x", "contents": {"fp32_contents": [1]}}], raw_input_contents=[b""]
            ),
            "both raw_input_contents and contents",
        ),
    ],
)
def test_encode_request_with_mismatched_contents_raises_user_error(message: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        encode_request(message)


def test_encode_request_copies_parameters_and_requests_binary_outputs() -> None:
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [0],
        "parameters": {"shared_memory_region": {"string_param": "a"}},
    }
    output = {
        "name": "y",
        "parameters": {"classification": {"int64_param": 3}, "binary_data": {"bool_param": False}},
    }
    body, length = encode_request(Message(id="7", inputs=[tensor], outputs=[output]))
    assert json.loads(body[:length]) == {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [{**tensor, "parameters": {"shared_memory_region": "a", "binary_data_size": 0}}],
        "outputs": [{"name": "y", "parameters": {"classification": 3, "binary_data": True}}],
    }


def test_decode_request_of_serialized_message_returns_equal_message() -> None:
    message = request("FP32", [2], fp32_contents=[1.5, 2])
    message.parameters["a"].int64_param = -1
    message.parameters["b"].double_param = 0.5
    assert decode_request(message.SerializeToString()) == message


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x2a\x00" * (MAX_KEYS + 1), id="inputs"),
        pytest.param(b"\x3a\x00" * (MAX_KEYS + 1), id="raw contents"),
        pytest.param(
            Message(inputs=[{"shape": [1]}] * (MAX_KEYS // 2 + 1)).SerializeToString(),
            id="two each",
        ),
        pytest.param(
            Message(
                inputs=[{"parameters": {str(k): {} for k in range(MAX_KEYS)}}]
            ).SerializeToString(),
            id="parameters of an input",
        ),
    ],
)
def test_decode_request_with_too_many_fields_raises_too_large_error(data: bytes) -> None:
    with pytest.raises(TooLargeError, match="4096 fields"):
        decode_request(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a",
        b"\x2a\xff\xff\xff\x7f",
        b"\x0a\x05ab",
        b"\xff" * 20,
        b"\x0c",
        b"\x2b\x2c",
        b"\x09\x00",
        b"\x0d\x00",
    ],
)
def test_decode_request_of_malformed_bytes_raises_user_error(data: bytes) -> None:
    with pytest.raises(UserError, match="not a ModelInferRequest"):
        decode_request(data)


def test_encode_request_with_too_many_bytes_contents_raises_too_large_error() -> None:
    with pytest.raises(TooLargeError, match="raw_input_contents"):
        encode_request(request("BYTES", [65537], bytes_contents=[b""] * 65537))
