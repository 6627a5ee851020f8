"""Faults of the fake SageMaker: how a failing request ends."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.clouds.iam import Request

Start = Callable[..., Any]

_MOST_PATIENT_S = 600.0
"""Longest wait for a client to give up; no client waits longer."""
_CREATES = {
    "CreateModel": "model",
    "CreateEndpointConfig": "endpoint configuration",
    "CreateEndpoint": "endpoint",
}


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault of requests at chosen moments.

    It happens at moment `at`, and at the same moment of the `times - 1` following requests. Moments
    are counted from 0; each request has two.

    Args:
        kind: throttle, error, expired (credentials), drop (the connection ends without an answer),
            hang (no answer ever comes), conflict (the service's error if another writer was
            faster), page or page-error (HTML instead of an answer, with 200 or 500) or kill
            (SIGKILL to `pid`, then drop).
        only: limits the fault to requests whose name contains this text; then `at` counts only
            these.
    """

    at: int
    kind: str
    times: int = 1
    pid: int = 0
    only: str = ""


def fail(fault: Fault, name: str, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
    """Return the answer to a failing request with this name.

    Raises:
        ConnectionAbortedError: the request gets no answer.
    """
    if fault.kind in ("drop", "hang", "kill"):
        if fault.kind == "kill":
            os.kill(fault.pid, signal.SIGKILL)
        connection: socket.socket = environ["werkzeug.socket"]
        if fault.kind == "hang":
            _until_given_up(connection)
        else:
            connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError
    if fault.kind.startswith("page"):
        start("200 OK" if fault.kind == "page" else "500 Error", [("Content-Type", "text/html")])
        return [b"<!DOCTYPE html><html><body>Please sign in</body></html>"]
    s3 = not environ.get("HTTP_X_AMZ_TARGET")
    status, code, message = _said(fault.kind, name, s3=s3)
    if s3:
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]
    return answer_json(start, int(status.split()[0]), {"__type": code, "message": message})


def deny(request: Request, *, speaks_json: bool, start: Start) -> Iterable[bytes]:
    """Return the answer of AWS to a caller without the permission."""
    message = (
        "User: caller is not authorized to perform: "
        f"{request.action} on resource: {request.resource}"
    )
    if speaks_json:
        return answer_json(start, 400, {"__type": "AccessDeniedException", "message": message})
    start("403 Forbidden", [("Content-Type", "application/xml")])
    error = f"<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>"
    return [
        (
            error if request.action.startswith("s3:") else f"<ErrorResponse>{error}</ErrorResponse>"
        ).encode()
    ]


def can_conflict(name: str, *, after: bool) -> bool:
    """Return whether another writer can cause a conflict for a request of this name.

    The conflict occurs before or after the effect of the request. Creations get it after their
    effect: they succeeded, but their first answer was lost.
    """
    if name.startswith("SageMaker.Create"):
        return after
    return not after and name.startswith(("SageMaker.Update", "PUT /"))


def answer_json(
    start: Start, status: int, document: object, headers: Mapping[str, str] | None = None
) -> Iterable[bytes]:
    body = json.dumps(document).encode()
    fields = [
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        *(headers or {}).items(),
    ]
    start(f"{status} Said", fields)
    return [body]


def _until_given_up(connection: socket.socket) -> None:
    """Keep the connection open until its client closes it."""
    connection.settimeout(_MOST_PATIENT_S)
    while connection.recv(1 << 16):
        pass


def _said(kind: str, name: str, *, s3: bool) -> tuple[str, str, str]:
    """Return the status, code and message of an answer."""
    match kind, s3:
        case "throttle", True:
            return "503 Slow Down", "SlowDown", "Please reduce your request rate."
        case "throttle", False:
            return "400 Said", "ThrottlingException", "Rate exceeded"
        case "expired", _:
            code = "ExpiredToken" if s3 else "ExpiredTokenException"
            return "400 Bad Request", code, "The security token included in the request is expired"
        case "conflict", True:
            return (
                "409 Conflict",
                "ConditionalRequestConflict",
                "The conditional request cannot succeed now.",
            )
        case "conflict", False:
            made = _CREATES.get(name.removeprefix("SageMaker."))
            what = f"create already existing {made}" if made else "update in-progress endpoint"
            return "400 Said", "ValidationException", f'Cannot {what} "arn".'
        case _:
            return "500 Error", "InternalError" if s3 else "InternalFailure", "injected"
