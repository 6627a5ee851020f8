"""Request bodies: Open Inference v2, MLflow's scoring forms, and CSV.

For a body that is malformed or does not fit the model, the functions raise `UserError`, or its
subclass `TooLargeError`. If one tensor is the cause, the message names it.

- https://github.com/kserve/open-inference-protocol (inference_rest.md), and its extension for
  binary data as in Triton and KServe. Such a body is `Inference-Header-Content-Length` bytes of
  JSON, then the bytes of the tensors one after another.
- https://mlflow.org/docs/latest/ml/deployment/deploy-model-locally/ (inference server
  specification)
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_ops.errors import TooLargeError, UserError
from onnx_ops.ports.data import Array
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature, ResponseFormat
from onnx_ops.serving.inference.tensors import (
    MAX_VALUES,
    LazyArray,
    RequestBody,
    TensorReader,
    parse_document,
    shorten,
    to_plain,
)

MLFLOW_FORMS = ("inputs", "instances", "dataframe_split", "dataframe_records")
SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json"
"""Content type of the binary form for clients that cannot send the header for it.

`;json-header-size=N` is appended.
"""

_INFER = ResponseFormat.INFER
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_MAX_DEPTH = 32


def parse_header_length(value: bytes) -> int:
    """Parse the value of `Inference-Header-Content-Length`."""
    if not (value.isdigit() and len(value) < 16):
        shown = value[:40].decode("latin-1")
        raise UserError(f"the length of the JSON header must be a number of bytes, not {shown!r}")
    return int(value)


def read_infer(
    body: RequestBody, header_length: int | None, signature: ModelSignature
) -> InferenceRequest:
    """Decode an Open Inference v2 request.

    `header_length` is the number of bytes of JSON at the start of the body. With None, the whole
    body is JSON. With 0, the body is the raw data of the only required input.
    """
    if header_length is None:
        document, literals = parse_document(bytes(body))
        return _read_document(document, signature, literals=literals)
    if header_length > len(body):
        raise UserError(
            f"the length of the JSON header is {header_length}, but the body has {len(body)} bytes"
        )
    if header_length == 0:
        name = signature.get_only_input("a raw body")
        feed = {name: signature.readers[name].read_raw(body)}
        names = signature.output_names
        return InferenceRequest(
            feed, names, signature.check_feed(feed), _INFER, None, (True,) * len(names)
        )
    document, literals = parse_document(bytes(body[:header_length]))
    return _read_document(
        document, signature, literals=literals, tail=_BinaryTail(body, header_length)
    )


class _BinaryTail:
    """The bytes after the JSON, which are read from front to back."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: RequestBody, at: int) -> None:
        self._body = body
        self._at = at

    def read(self, reader: TensorReader, shape: tuple[int, ...], size: object) -> Array:
        if type(size) is not int or size < 0:
            raise reader.error(": binary_data_size must be a number of bytes")
        left = len(self._body) - self._at
        if size > left:
            raise reader.error(
                f": binary_data_size is {size}, but {left} bytes are left in the body"
            )
        array = reader.read_binary(shape, self._body, self._at, size)
        self._at += size
        return array

    def check_end(self) -> None:
        if self._at != len(self._body):
            raise UserError(f"{len(self._body) - self._at} bytes follow after the last tensor")


def _read_document(
    document: Any, signature: ModelSignature, *, literals: bool, tail: _BinaryTail | None = None
) -> InferenceRequest:
    listed = document.get("inputs") if type(document) is dict else None
    if type(listed) is not list:
        raise UserError("the body must be an object with a list of inputs")
    feed: dict[str, Array] = {}
    for item in listed:
        if type(item) is not dict:
            raise UserError("a tensor must be an object with a name")
        reader = signature.get_reader(item.get("name"))
        if reader.name in feed:
            raise UserError(f"input {reader.name!r} is given twice")
        feed[reader.name] = _read_tensor(item, reader, literals, tail)
    if tail is not None:
        tail.check_end()
    rows = signature.check_feed(feed)
    request_id = document.get("id")
    if request_id is not None and type(request_id) is not str:
        raise UserError("id must be a string")
    outputs, binary = _select_outputs(document, signature)
    return InferenceRequest(feed, outputs, rows, _INFER, request_id, binary)


def _read_tensor(
    item: dict[str, Any], reader: TensorReader, literals: bool, tail: _BinaryTail | None
) -> Array:
    if item.get("datatype") != reader.datatype:
        raise reader.error(f" must be {reader.datatype}, not {shorten(item.get('datatype'))}")
    shape, count = reader.check_shape(item.get("shape"))
    parameters = item.get("parameters")
    if parameters is not None:
        parameters = _check_parameters(parameters, f"tensor {reader.name!r}")
        if any(name in parameters for name in _SHARED_MEMORY):
            raise reader.error(": shared memory is not supported", "Send the data in the body.")
        if "binary_data_size" in parameters:
            if "data" in item:
                raise reader.error(" has both data and binary_data_size")
            if tail is None:
                raise reader.error(
                    ": binary_data_size needs the header inference-header-content-length"
                )
            return tail.read(reader, shape, parameters["binary_data_size"])
    if "data" not in item:
        raise reader.error(" has neither data nor binary_data_size")
    return reader.read_json(shape, count, item["data"], literals=literals)


def _select_outputs(
    document: dict[str, Any], signature: ModelSignature
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Return `outputs` and `binary` of a request (see `InferenceRequest`)."""
    given, listed = document.get("parameters"), document.get("outputs")
    if given is None and not listed and not signature.binary_only:
        return signature.output_names, ()
    default = given is not None and _get_flag(
        _check_parameters(given, "the request"), "binary_data_output", default=False
    )
    if listed:
        names = _read_output_names(listed, signature)
        binary = [_is_output_binary(item, default=default) for item in listed]
    else:
        names = signature.output_names
        binary = [default] * len(names)
    if signature.binary_only:
        for name, is_binary in zip(names, binary, strict=True):
            if name in signature.binary_only and not is_binary:
                raise UserError(
                    f"output {name!r} is BF16, which JSON cannot represent",
                    remedy="Request binary_data.",
                )
    return names, tuple(binary) if any(binary) else ()


def _read_output_names(listed: Any, signature: ModelSignature) -> tuple[str, ...]:
    if type(listed) is not list or not all(
        type(i) is dict and type(i.get("name")) is str for i in listed
    ):
        raise UserError("outputs must be a list of objects with a name")
    names = tuple(item["name"] for item in listed)
    if not all(name in signature.outputs for name in names) or len(set(names)) != len(names):
        raise UserError(
            f"outputs can contain only {', '.join(signature.outputs)}, each at most once"
        )
    return names


def _is_output_binary(item: dict[str, Any], *, default: bool) -> bool:
    """Return whether the client requests an output in the binary form.

    Raises UserError for parameters that are not supported.
    """
    place = f"output {item['name']!r}"
    parameters = _check_parameters(item.get("parameters") or {}, place)
    if parameters.get("classification"):
        raise UserError(
            f"{place}: classification is not supported", remedy="Request the output itself."
        )
    if any(name in parameters for name in _SHARED_MEMORY):
        raise UserError(
            f"{place}: shared memory is not supported", remedy="Read the data from the response."
        )
    return _get_flag(parameters, "binary_data", default=default)


def _check_parameters(given: Any, place: str) -> dict[str, Any]:
    if type(given) is not dict:
        raise UserError(f"{place}: parameters must be an object")
    return given


def _get_flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise UserError(f"{name} must be true or false")
    return value


def read_invocation(
    body: RequestBody, content_type: str, header_length: int | None, signature: ModelSignature
) -> InferenceRequest:
    """Decode a body for `/invocations`: any form of MLflow, CSV, or Open Inference v2.

    Args:
        content_type: `text/csv`, `SAGEMAKER_TYPE`, or anything else for JSON. Without a header
            length, `application/octet-stream` is refused.
        header_length: as for `read_infer`. With a header length, the body is an Open Inference
            request.
    """
    kind, _, options = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == SAGEMAKER_TYPE:
        name, _, value = options.strip().partition("=")
        if name.strip().lower() != "json-header-size":
            raise UserError(f"the content type {SAGEMAKER_TYPE} needs ;json-header-size=N")
        request = read_infer(body, parse_header_length(value.strip().encode()), signature)
        request.is_sagemaker = True
        return request
    if header_length is not None:
        return read_infer(body, header_length, signature)
    if kind == "application/octet-stream":
        raise UserError(
            "a body in the binary form needs the header inference-header-content-length"
        )
    body = bytes(body)
    if kind == "text/csv":
        columns = _map_columns(*_read_csv(body), signature)
        return _build_request(columns, signature, ResponseFormat.RECORDS, literals=True, text=True)
    document, literals = parse_document(body)
    inputs = document.get("inputs") if type(document) is dict else None
    if (
        type(inputs) is list
        and inputs
        and all(type(item) is dict and "datatype" in item for item in inputs)
    ):
        return _read_document(document, signature, literals=literals)
    return _read_mlflow(document, signature, literals)


def _read_mlflow(document: Any, signature: ModelSignature, literals: bool) -> InferenceRequest:
    given = [key for key in MLFLOW_FORMS if type(document) is dict and key in document]
    if len(given) != 1:
        raise UserError(f"the body must be an object with exactly one of {', '.join(MLFLOW_FORMS)}")
    form, content = given[0], document[given[0]]
    if document.get("params"):
        raise UserError("this model has no parameters; leave out params")
    columns: Mapping[str, object]
    match form:
        case "inputs":
            columns = (
                content if type(content) is dict else {signature.get_only_input(form): content}
            )
        case "instances":
            columns = _read_instances(content, signature)
        case "dataframe_split":
            columns = _map_columns(*_read_split(content), signature)
        case _:
            columns = _map_columns(*_read_records(content), signature)
    response_format = (
        ResponseFormat.RECORDS if form.startswith("dataframe") else ResponseFormat.NAMED
    )
    return _build_request(columns, signature, response_format, literals=literals)


def _read_instances(content: Any, signature: ModelSignature) -> Mapping[str, object]:
    """Return the columns of MLflow instances, by input.

    Each instance is an object whose keys are names of inputs, or a value of the only required
    input.
    """
    if type(content) is list and content and type(content[0]) is dict:
        return _collect_columns(content, "instances")
    if isinstance(content, LazyArray) or (type(content) is list and content):
        return {signature.get_only_input("instances"): content}
    raise UserError("instances must be a list with at least one instance")


def _read_records(content: Any) -> tuple[list[str], list[list[Any]]]:
    if type(content) is not list or not content:
        raise UserError("dataframe_records must be a list with at least one record")
    columns = _collect_columns(content, "dataframe_records")
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _build_request(
    columns: Mapping[str, object],
    signature: ModelSignature,
    response_format: ResponseFormat,
    *,
    literals: bool,
    text: bool = False,
) -> InferenceRequest:
    for name in signature.binary_only:
        raise UserError(
            f"output {name!r} is BF16, which JSON cannot represent",
            remedy="Use the binary form of Open Inference v2.",
        )
    feed: dict[str, Array] = {}
    for name, given in columns.items():
        reader, data = signature.get_reader(name), given
        shape = _measure_nesting(name, data)
        if len(shape) == 1 and reader.dims[1:] == (1,):
            shape.append(1)  # For an input of one feature, the values are one column of a table.
        accepted, count = reader.check_shape(shape)
        if text:
            data = reader.convert_cells(data)
        else:
            if literals and len(reader.dims) == 2:
                data = reader.fill_missing(data)
            if reader.dims[1:] == (1,):
                reader.check_column(data)
        feed[name] = reader.read_json(accepted, count, data, literals=literals)
    return InferenceRequest(
        feed, signature.output_names, signature.check_feed(feed), response_format
    )


def _measure_nesting(name: str, data: Any) -> list[int]:
    """Return the shape of nested lists, derived from the first element of each level.

    The reader checks the other elements.
    """
    shape: list[int] = []
    while type(data) is list:
        if len(shape) == _MAX_DEPTH:
            raise UserError(f"tensor {name!r}: data is nested more than {_MAX_DEPTH} levels deep")
        shape.append(len(data))
        data = data[0] if data else None
    return [*shape, *data.shape] if isinstance(data, LazyArray) else shape


def _collect_columns(rows: Sequence[Any], form: str) -> dict[str, list[Any]]:
    first = rows[0]
    names = list(first) if type(first) is dict else []
    for row in rows:
        if type(row) is not dict or row.keys() != first.keys():
            raise UserError(f"every item of {form} must be an object with the same names")
    return {name: [to_plain(row[name]) for row in rows] for name in names}


def _read_split(content: Any) -> tuple[list[str], list[list[Any]]]:
    columns = content.get("columns") if type(content) is dict else None
    rows = to_plain(content.get("data")) if type(content) is dict else None
    if type(columns) is not list or not all(type(c) in (str, int) for c in columns):
        raise UserError("dataframe_split must have columns: a list of strings or integers")
    if type(rows) is not list or not all(type(r) is list and len(r) == len(columns) for r in rows):
        raise UserError(f"dataframe_split must have data: a list of rows of {len(columns)} values")
    names = [str(column) for column in columns]
    if len(set(names)) != len(names):
        raise UserError("dataframe_split repeats a column")
    return names, rows


def _read_csv(body: bytes) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of a CSV table as pandas and MLflow write it."""
    if body.count(b",") + body.count(b"\n") > MAX_VALUES:
        raise TooLargeError(
            f"the table has more than {MAX_VALUES} commas and line breaks",
            remedy="Send the values in the binary form.",
        )
    try:
        lines = csv.reader(io.StringIO(body.decode("utf-8-sig"), newline=""), strict=True)
        table = [line for line in lines if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError("the body is not CSV in UTF-8", why=str(error)) from error
    names = table[0] if table else []
    if not names or all(map(_is_number, names)):
        # Without this error, a first line with data would be lost as column names.
        raise UserError("the first line of a table must name its columns")
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(f"the table repeats column {shorten(repeated)}")
    for number, row in enumerate(table[1:], start=1):
        if len(row) != len(names):
            raise UserError(f"row {number} of the table has {len(row)} cells, not {len(names)}")
    return names, table[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _map_columns(
    columns: list[str], rows: list[list[Any]], signature: ModelSignature
) -> Mapping[str, object]:
    """Return columns by input, or all rows for the only required input."""
    names = set(columns)
    if signature.required <= names <= signature.inputs.keys():
        return {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    if len(signature.required) == 1:
        return {signature.get_only_input("a table"): rows}
    unknown = [name for name in columns if name not in signature.inputs]
    missing = ", ".join(sorted(signature.required - names))
    raise UserError(
        f"the model has no input {shorten(unknown[0])}"
        if unknown
        else f"the table lacks inputs of the model: {missing}"
    )
