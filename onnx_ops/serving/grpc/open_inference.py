"""Messages of the Open Inference Protocol over gRPC.

The module also translates the messages to the binary form of HTTP.

The descriptors are built from the table below, because generated code must match the installed
version of protobuf. Generated code also registers names in the default pool. They would conflict
with the names of a client in the same process, such as Triton's.

- https://github.com/kserve/open-inference-protocol
  (specification/protocol/open_inference_grpc.proto)
- https://github.com/triton-inference-server/common (protobuf/grpc_service.proto), for
  `ModelStreamInfer` and `RepositoryIndex`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.serving.inference.responses import RawResponse, read_header_length
from onnx_ops.serving.inference.tensors import MAX_KEYS, join_text, shorten

SERVICE = "inference.GRPCInferenceService"
STREAM = "ModelStreamInfer"
METHODS: Mapping[str, tuple[str, str]] = {
    **{
        name: (f"{name}Request", f"{name}Response")
        for name in (
            "ServerLive",
            "ServerReady",
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelInfer",
            "RepositoryIndex",
        )
    },
    STREAM: ("ModelInferRequest", f"{STREAM}Response"),
}
"""Names of the request and response messages by method."""

_PARAMETERS = "map parameters"
_MESSAGES: Mapping[str, tuple[str, ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("bool live",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("bool ready",),
    "ModelReadyRequest": ("string name", "string version"),
    "ModelReadyResponse": ("bool ready",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("string name", "string version", "repeated string extensions"),
    "ModelMetadataRequest": ("string name", "string version"),
    "ModelMetadataResponse": (
        "string name",
        "repeated string versions",
        "string platform",
        "repeated ModelMetadataResponse.TensorMetadata inputs",
        "repeated ModelMetadataResponse.TensorMetadata outputs",
    ),
    "ModelMetadataResponse.TensorMetadata": (
        "string name",
        "string datatype",
        "repeated int64 shape",
    ),
    "RepositoryIndexRequest": ("string repository_name", "bool ready"),
    "RepositoryIndexResponse": ("repeated RepositoryIndexResponse.ModelIndex models",),
    "RepositoryIndexResponse.ModelIndex": (
        "string name",
        "string version",
        "string state",
        "string reason",
    ),
    "InferParameter": (
        "oneof bool bool_param",
        "oneof int64 int64_param",
        "oneof string string_param",
        "oneof double double_param",
        "oneof uint64 uint64_param",
    ),
    "InferTensorContents": (
        "repeated bool bool_contents",
        "repeated int32 int_contents",
        "repeated int64 int64_contents",
        "repeated uint32 uint_contents",
        "repeated uint64 uint64_contents",
        "repeated float fp32_contents",
        "repeated double fp64_contents",
        "repeated bytes bytes_contents",
    ),
    "ModelInferRequest": (
        "string model_name",
        "string model_version",
        "string id",
        _PARAMETERS,
        "repeated ModelInferRequest.InferInputTensor inputs",
        "repeated ModelInferRequest.InferRequestedOutputTensor outputs",
        "repeated bytes raw_input_contents",
    ),
    "ModelInferRequest.InferInputTensor": (
        "string name",
        "string datatype",
        "repeated int64 shape",
        _PARAMETERS,
        "InferTensorContents contents",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ("string name", _PARAMETERS),
    "ModelInferResponse": (
        "string model_name",
        "string model_version",
        "string id",
        _PARAMETERS,
        "repeated ModelInferResponse.InferOutputTensor outputs",
        "repeated bytes raw_output_contents",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "string name",
        "string datatype",
        "repeated int64 shape",
        _PARAMETERS,
        "InferTensorContents contents",
    ),
    "ModelStreamInferResponse": ("string error_message", "ModelInferResponse infer_response"),
}
"""Fields by message. The number of a field is its position, from 1."""

_CONTENTS: Mapping[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "bool"),
    **{f"INT{bits}": ("int_contents", f"int{bits}") for bits in (8, 16, 32)},
    "INT64": ("int64_contents", "int64"),
    **{f"UINT{bits}": ("uint_contents", f"uint{bits}") for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
    "BYTES": ("bytes_contents", "object"),
}
"""Field of the typed contents, and numpy's type of an element, by datatype."""
_WIDE: Mapping[str, str] = {"int_contents": "int32", "uint_contents": "uint32"}
"""Numpy's types of the fields that datatypes with fewer bits share."""
_MAX_TEXTS = 1 << 16
"""Maximum number of elements in typed contents of BYTES.

The event loop reads these elements one by one.
"""


def _build_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference_grpc.proto", package="inference", syntax="proto3"
    )
    messages: dict[str, Any] = {}
    for name, fields in _MESSAGES.items():
        parent, _, short = name.rpartition(".")
        message = (messages[parent].nested_type if parent else file.message_type).add(name=short)
        messages[name] = message
        for number, text in enumerate(fields, start=1):
            _add_field(message, name, number, text)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name, (request, response) in METHODS.items():
        is_stream = name == STREAM
        service.method.add(
            name=name,
            input_type=f".inference.{request}",
            output_type=f".inference.{response}",
            client_streaming=is_stream,
            server_streaming=is_stream,
        )
    return file


def _add_field(message: Any, full_name: str, number: int, text: str) -> None:
    field_type = descriptor_pb2.FieldDescriptorProto
    *modifiers, kind, name = ["", *text.split()][-3:]
    field = message.field.add(name=name, number=number, label=field_type.LABEL_OPTIONAL)
    if kind == "map":
        entry = message.nested_type.add(name="ParametersEntry", options={"map_entry": True})
        _add_field(entry, "", 1, "string key")
        _add_field(entry, "", 2, "InferParameter value")
        modifiers, kind = ["repeated"], f"{full_name}.ParametersEntry"
    if "repeated" in modifiers:
        field.label = field_type.LABEL_REPEATED
    if "oneof" in modifiers:
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind[0].isupper():
        field.type, field.type_name = field_type.TYPE_MESSAGE, f".inference.{kind}"
    else:
        field.type = field_type.Type.Value(f"TYPE_{kind.upper()}")


POOL: Any = descriptor_pool.DescriptorPool()
POOL.Add(_build_file())


def get_message_class(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


_ModelInferRequest = get_message_class("ModelInferRequest")
_ModelInferResponse = get_message_class("ModelInferResponse")
_INPUTS = _ModelInferRequest.DESCRIPTOR.fields_by_name["inputs"].number
_MAX_VARINT_BYTES = 10


def decode_request(data: bytes) -> Any:
    """Return the parsed ModelInferRequest.

    Parsing turns a field of two bytes into an object of a hundred bytes. Therefore the fields of
    the message and of its inputs are counted before parsing. The count leaves out the elements of
    typed contents, because parsing creates no object for each of them.

    Raises:
        UserError: the message is malformed.
        TooLargeError: the message and its inputs have more than `MAX_KEYS` fields.
    """
    try:
        fields = _list_fields(data, 0, len(data), MAX_KEYS)
        count = len(fields)
        for number, start, end in fields:
            if number == _INPUTS:
                count += len(_list_fields(data, start, end, MAX_KEYS - count))
        return _ModelInferRequest.FromString(data)
    except (DecodeError, IndexError) as error:
        raise UserError("the message is not a ModelInferRequest", why=str(error)) from error


def _list_fields(data: bytes, place: int, end: int, limit: int) -> list[tuple[int, int, int]]:
    """Return number, start and end of each field between two offsets of a message.

    https://protobuf.dev/programming-guides/encoding describes the wire types.

    Raises:
        DecodeError: a field has an unknown wire type, or a number has too many bytes.
        IndexError: a number continues beyond the end of `data`.
        TooLargeError: there are more than `limit` fields.
    """
    fields = []
    while place < end:
        tag, place = _read_varint(data, place)
        start = place
        match tag & 7:
            case 0:
                _, place = _read_varint(data, place)
            case 1:
                place += 8
            case 2:
                length, start = _read_varint(data, place)
                place = start + length
            case 5:
                place += 4
            case kind:
                raise DecodeError(f"a field has wire type {kind}")
        fields.append((tag >> 3, start, place))
        if len(fields) > limit:
            raise TooLargeError(f"the message and its inputs have more than {MAX_KEYS} fields")
    return fields


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a varint and the offset after it.

    Raises:
        DecodeError: the number has too many bytes.
        IndexError: the number continues beyond the end of `data`.
    """
    value = 0
    for position in range(_MAX_VARINT_BYTES):
        value |= (data[place + position] & 0x7F) << 7 * position
        if data[place + position] < 0x80:
            return value, place + position + 1
    raise DecodeError("a number has more than 64 bits")


def encode_request(message: Any) -> tuple[bytes, int]:
    """Return a ModelInferRequest in the binary form of HTTP, and its header length.

    The header length is the number of bytes of JSON at the start. All outputs are requested in the
    binary form.

    Raises:
        UserError: the tensors and their data do not match, or both forms of data are given. The
            same error is raised if a datatype has no typed contents, or a number is outside the
            range of its datatype.
        TooLargeError: the typed contents of a BYTES tensor have more than `_MAX_TEXTS` elements.
    """
    inputs, data = message.inputs, message.raw_input_contents
    if not data:
        data = [_encode_contents(tensor) for tensor in inputs]
    elif len(data) != len(inputs):
        raise UserError(
            f"the request has {len(inputs)} inputs, but {len(data)} raw_input_contents",
            remedy="Send one element for each input; shared memory is not supported.",
        )
    elif any(tensor.HasField("contents") for tensor in inputs):
        raise UserError(
            "the request has both raw_input_contents and contents",
            remedy="Send only one of the two.",
        )
    document: dict[str, Any] = {
        "parameters": {"binary_data_output": True},
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": _read_parameters(tensor.parameters, binary_data_size=len(part)),
            }
            for tensor, part in zip(inputs, data, strict=True)
        ],
    }
    if message.id:
        document["id"] = message.id
    if message.outputs:
        document["outputs"] = [
            {
                "name": output.name,
                "parameters": _read_parameters(output.parameters, binary_data=True),
            }
            for output in message.outputs
        ]
    header = orjson.dumps(document)
    return b"".join((header, *data)), len(header)


def _read_parameters(given: Any, **own: object) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, parameter in given.items():
        field = parameter.WhichOneof("parameter_choice")
        values[name] = None if field is None else getattr(parameter, field)
    return values | own


def _encode_contents(tensor: Any) -> bytes:
    """Return the typed contents of a tensor in the binary form."""
    if tensor.datatype not in _CONTENTS:
        raise UserError(
            f"tensor {shorten(tensor.name)} of {shorten(tensor.datatype)} has no "
            "raw_input_contents",
            remedy=f"Send raw_input_contents: only {', '.join(_CONTENTS)} have typed contents.",
        )
    field, dtype = _CONTENTS[tensor.datatype]
    if unexpected := [
        other.name for other, _ in tensor.contents.ListFields() if other.name != field
    ]:
        raise UserError(
            f"tensor {shorten(tensor.name)} of {tensor.datatype} has {unexpected[0]}",
            remedy=f"Send {field}.",
        )
    values: Sequence[Any] = getattr(tensor.contents, field)
    if dtype == "object":
        if len(values) > _MAX_TEXTS:
            raise TooLargeError(
                f"tensor {shorten(tensor.name)} has more than {_MAX_TEXTS} elements in {field}",
                remedy="Send raw_input_contents.",
            )
        return join_text(values)
    sent = np.array(values, _WIDE.get(field, dtype))
    array = sent.astype(dtype)
    if not np.array_equal(array, sent, equal_nan=sent.dtype.kind == "f"):
        raise UserError(
            f"tensor {shorten(tensor.name)} contains a number outside the range of "
            f"{tensor.datatype}"
        )
    return array.tobytes()


def decode_response(response: RawResponse) -> Any:
    """Return the ModelInferResponse of a response in the binary form."""
    body, place = response.body, read_header_length(response)
    document = orjson.loads(body[:place])
    message = _ModelInferResponse(
        model_name=document["model_name"],
        model_version=document["model_version"],
        id=document.get("id", ""),
    )
    for item in document["outputs"]:
        message.outputs.add(name=item["name"], datatype=item["datatype"], shape=item["shape"])
        size = item["parameters"]["binary_data_size"]
        message.raw_output_contents.append(body[place : place + size])
        place += size
    return message
