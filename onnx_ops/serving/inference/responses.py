"""Responses to inference requests as bytes: outputs of a model, and errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from onnx_ops.errors import (
    ConflictError,
    InfrastructureError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    TooLargeError,
    UserError,
)
from onnx_ops.ports.data import Array
from onnx_ops.protocol import messages
from onnx_ops.serving.inference.requests import SAGEMAKER_TYPE
from onnx_ops.serving.inference.signature import InferenceRequest, ModelSignature, ResponseFormat

RequestHead = Mapping[bytes, bytes]
"""Headers of a request by lower-case name; see `HttpProtocol.on_header`."""

_INFER = ResponseFormat.INFER
_JSON_LINE = b"content-type: application/json\r\n"
_BINARY_LINES = (
    f"content-type: application/octet-stream\r\n{messages.BINARY_LENGTH_HEADER}: %d\r\n".encode()
)
_SAGEMAKER_LINES = f"content-type: {SAGEMAKER_TYPE};json-header-size=%d\r\n".encode()
_ECHOED = (messages.REQUEST_ID_HEADER.encode(), messages.TRACE_PARENT_HEADER.encode())
_LENGTH = re.compile(
    rb"(?:%b: |json-header-size=)([0-9]+)" % messages.BINARY_LENGTH_HEADER.encode()
)
_TAB = ord("\t")
_MAX_ECHO_BYTES = 256


class QueueFullError(ServiceUnavailableError):
    """The queue for a request is full (429); the client can retry after a time.

    `retry_after_s` is this time in seconds.
    """

    def __init__(self, what: str, *, retry_after_s: int) -> None:
        super().__init__(what, remedy=f"Retry in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class LeaseLapsedError(ServiceUnavailableError):
    """The table is leased, and the server has no serving lease (503)."""

    def __init__(self) -> None:
        self.retry_after_s = 5
        super().__init__(
            "this replica has no serving lease",
            why="the replica did not get or renew the lease in time",
            remedy=f"Retry in {self.retry_after_s} s, at another replica.",
        )


class InputsRejectedError(UserError):
    """The inputs match the model's signature but make its run fail.

    The status is 422, and 500 for invocations (see `build_error_from`).

    Another version of the model can accept the same inputs. For example, the vocabulary of this
    version can lack tokens that clients send.
    """


class DeadlineExceededError(ServiceUnavailableError):
    """A request was queued past its deadline (504)."""


class RunTimeoutError(DeadlineExceededError):
    """The run of a model was ended because it took too long (504)."""


_STATUSES: tuple[tuple[type[OnnxOpsError], int], ...] = (
    (NotFoundError, 404),
    (TooLargeError, 413),
    (InputsRejectedError, 422),
    (UserError, 400),
    (QueueFullError, 429),
    (DeadlineExceededError, 504),
    (ServiceUnavailableError, 503),
    (ConflictError, 409),
    (RefusedError, 422),
    (InfrastructureError, 500),
)


def get_status(error: OnnxOpsError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


@dataclass(slots=True)
class RawResponse:
    """A response as bytes. `lines` are the header lines except content-length."""

    status: int
    lines: bytes
    body: bytes


def read_header_length(response: RawResponse) -> int:
    """Return the number of bytes of JSON at the start of a response's body."""
    match = _LENGTH.search(response.lines)
    return len(response.body) if match is None else int(match[1])


def build_error(status: int, message: str, lines: bytes = b"") -> RawResponse:
    """Return an error as the Open Inference Protocol defines it: `{"error": message}`."""
    return RawResponse(status, _JSON_LINE + lines, orjson.dumps({"error": message}))


def build_error_from(
    error: OnnxOpsError, lines: bytes = b"", *, invocation: bool = False
) -> RawResponse:
    """Return the response to a request that failed.

    An invocation whose inputs the model rejects gets status 500 and not 422. SageMaker counts 4xx
    as errors of the caller, so a rollout on SageMaker would not detect a failing candidate.
    """
    if isinstance(error, QueueFullError | LeaseLapsedError):
        lines += b"retry-after: %d\r\n" % error.retry_after_s
    status = 500 if invocation and isinstance(error, InputsRejectedError) else get_status(error)
    return build_error(status, str(error), lines)


def build_internal_error(lines: bytes = b"") -> RawResponse:
    """Return the response to an unexpected error. Only the log contains the details."""
    return build_error(500, "internal error", lines)


def format_deployment_headers(deployment: str) -> bytes:
    """Return the header lines that name the deployment."""
    name = deployment.encode("ascii", "replace")
    own, variant = messages.DEPLOYMENT_HEADER.encode(), messages.VARIANT_HEADER.encode()
    return b"%s: %s\r\n%s: %s\r\n" % (own, name, variant, name)


def format_echoed_headers(head: RequestHead) -> bytes:
    """Return the header lines that copy the request id and the trace context.

    Only values of printable ASCII with at most `_MAX_ECHO_BYTES` are copied.
    """
    lines = b""
    for name in _ECHOED:
        value = head.get(name)
        # The parser accepts the tab as the only control character, so a value without a tab is
        # printable.
        if (
            value is not None
            and len(value) <= _MAX_ECHO_BYTES
            and value.isascii()
            and _TAB not in value
        ):
            lines += b"%b: %b\r\n" % (name, value)
    return lines


def encode_outputs(
    request: InferenceRequest, signature: ModelSignature, arrays: Sequence[Array]
) -> tuple[bytes, bytes]:
    """Return the body of a response, and the header lines that describe it.

    JSON lacks NaN and infinities, so they are written as null. The binary form can represent
    them.

    Raises:
        UserError: a table was requested, and the outputs do not fit one.
    """
    if request.response_format is not _INFER:
        return _encode_predictions(request, arrays), _JSON_LINE
    writers = signature.writers
    if len(arrays) == 1 and not request.binary and request.request_id is None:
        # The usual response, without the lists that the general case needs below.
        (name,), (array,) = request.outputs, arrays
        return b"".join(
            (signature.outputs_prefix, writers[name].write_json(array), b"]}")
        ), _JSON_LINE
    tail: list[bytes] = []
    items = []
    for name, array, as_bytes in zip(
        request.outputs, arrays, request.binary or (False,) * len(arrays), strict=True
    ):
        if as_bytes:
            item, data = writers[name].write_binary(array)
            items.append(item)
            tail.append(data)
        else:
            items.append(writers[name].write_json(array))
    request_id = b"" if request.request_id is None else b',"id":' + orjson.dumps(request.request_id)
    header = b'%b%b,"outputs":[%b]}' % (signature.response_prefix, request_id, b",".join(items))
    if not request.binary:
        return header, _JSON_LINE
    lines = _SAGEMAKER_LINES if request.is_sagemaker else _BINARY_LINES
    return b"".join((header, *tail)), lines % len(header)


def _encode_predictions(request: InferenceRequest, arrays: Sequence[Array]) -> bytes:
    named = dict(zip(request.outputs, arrays, strict=True))
    content: object
    if request.response_format is ResponseFormat.NAMED:
        content = {
            # orjson accepts contiguous arrays of numbers. Text and single values must be Python
            # objects.
            name: array.tolist()
            if array.dtype.kind == "O" or array.ndim == 0
            else np.ascontiguousarray(array)
            for name, array in named.items()
        }
    else:
        columns: dict[str, list[Any]] = {}
        for name, array in named.items():
            if array.ndim == 0:
                raise UserError(
                    f"output {name!r} is a single value and does not fit a table; "
                    "send inputs or instances"
                )
            flat = array[:, 0] if array.shape[1:] == (1,) else array
            # Numbers are converted through JSON, as in the other JSON forms. So float32 is written
            # with the fewest digits, and NaN becomes null.
            columns[name] = (
                flat.tolist()
                if flat.dtype.kind == "O"
                else orjson.loads(
                    orjson.dumps(np.ascontiguousarray(flat), option=orjson.OPT_SERIALIZE_NUMPY)
                )
            )
        if len(set(map(len, columns.values()))) > 1:
            raise UserError(
                "the outputs differ in length and do not fit a table; send inputs or instances"
            )
        content = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    return orjson.dumps({"predictions": content}, option=orjson.OPT_SERIALIZE_NUMPY)
