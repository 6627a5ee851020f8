"""What both listeners share: bounded bodies, JSON, errors as answers."""

from __future__ import annotations

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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


class Overloaded(ServiceUnavailableError):
    """Too many requests wait already (429). `retry_after_s` is when to come again."""

    def __init__(self, what: str, *, retry_after_s: int) -> None:
        super().__init__(what, remedy=f"Come again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class Unfit(UserError):
    """The inputs fit the model's signature, and its run refuses them all the same (422).

    Another version may well take them: a vocabulary that is shorter than the tokens of the clients, for example.
    """


class DeadlinePassed(ServiceUnavailableError):
    """The request waited longer than it wanted to (504)."""


_STATUSES: tuple[tuple[type[OnnxOpsError], int], ...] = (
    (NotFoundError, 404),
    (TooLargeError, 413),
    (Unfit, 422),
    (UserError, 400),
    (Overloaded, 429),
    (DeadlinePassed, 504),
    (ServiceUnavailableError, 503),
    (ConflictError, 409),
    (RefusedError, 422),
    (InfrastructureError, 500),
)


def status_of(error: OnnxOpsError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        HTTPException: 413 as soon as more than `limit` bytes are announced or came; 415 for a compressed body.
        ClientDisconnect: the client went away.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "compressed bodies are not accepted")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    return bytes(body)


def json_response(content: object, status: int = 200) -> Response:
    """Arrays of numbers are written as lists; NaN and infinities, which JSON does not have, as null."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def error_response(error: OnnxOpsError) -> Response:
    return json_response({"error": str(error)}, status_of(error))


async def on_http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    response = json_response({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def on_crash(_: Request, __: Exception) -> Response:
    """An error that nobody foresaw: the server's log has it all, the client only learns that it happened."""
    return json_response({"error": "internal error"}, 500)
