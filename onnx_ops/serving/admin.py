"""The admin listeners: show and publish the state. One on loopback, where every request needs the token, and on demand
one on a Unix socket that only the server's user can connect to."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onnx_ops import codec
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    OnnxOpsError,
    RefusedError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol.messages import (
    COUNTS_PATH,
    MAX_USER_THRESHOLDS,
    STATE_PATH,
    AdminState,
    Counts,
    UserCountsRequest,
    error_to_bytes,
    read_message,
)
from onnx_ops.protocol.routing_table import write_durably
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.serving.http import on_crash, on_http_error, read_body

_MAX_BODY = 1 << 20


class Publisher(Protocol):
    """What the admin routes change."""

    def shown(self) -> AdminState: ...

    def counts(self, asked: UserCountsRequest | None = None) -> Counts: ...

    async def publish(self, state: EndpointState, who: str) -> None: ...


def read_token(folder: Path) -> str:
    """The admin token of a server's folder; made on first use.

    Raises:
        RefusedError: others than its owner may read it, or it is empty.
        OSError: it cannot be read or written.
    """
    path = folder / TOKEN_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode())
    if path.stat().st_mode & 0o077:
        raise RefusedError("others may read the admin token", where=str(path), remedy=f"Run: chmod 600 {path}")
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise RefusedError("the admin token is empty", where=str(path), remedy="Delete the file; a new one is made.")
    return token


class AdminApp:
    """Handlers of the admin routes.

    Args:
        server: what is published.
        token: what a client must show as bearer token; None where the system lets nobody else connect.
        who: how changes that come in here are signed in the audit trail.
    """

    def __init__(self, server: Publisher, token: str | None, who: str) -> None:
        self._server = server
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._who = who

    def asgi(self) -> Starlette:
        routes = [
            Route(STATE_PATH, self.show),
            Route(STATE_PATH, self.publish, methods=["PUT"]),
            Route(COUNTS_PATH, self.counts),
            Route(COUNTS_PATH, self.watch, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_crash})

    async def show(self, request: Request) -> Response:
        self._authorize(request)
        return self._state()

    async def counts(self, request: Request) -> Response:
        self._authorize(request)
        return Response(codec.dumps(self._server.counts()), media_type="application/json")

    async def watch(self, request: Request) -> Response:
        """The counts, with those of the watched deployments by user."""
        self._authorize(request)
        try:
            asked = read_message(await read_body(request, _MAX_BODY), UserCountsRequest)
        except CorruptStateError as error:
            return _error(error, 400)
        if any(len(s) > MAX_USER_THRESHOLDS or list(s) != sorted(s) for s in asked.limits_s.values()):
            return _error(UserError(f"limits_s must ascend, at most {MAX_USER_THRESHOLDS} per deployment"), 400)
        return Response(codec.dumps(self._server.counts(asked)), media_type="application/json")

    async def publish(self, request: Request) -> Response:
        """Answers only after the state is served: 200; 409 if it is out of date; 422 if it cannot be loaded."""
        self._authorize(request)
        body = await read_body(request, _MAX_BODY)
        try:
            state = read_message(body, EndpointState)
        except CorruptStateError as error:
            return _error(error, 400)
        try:
            await self._server.publish(state, self._who)
        except ConflictError as error:
            return _error(error, 409)
        except ServiceUnavailableError as error:
            return _error(error, 503)
        except OnnxOpsError as error:
            return _error(error, 422)
        return self._state()

    def _authorize(self, request: Request) -> None:
        if self._expected is None:
            return
        shown = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(shown, self._expected):
            raise HTTPException(401, "the admin token is missing or wrong", {"www-authenticate": "Bearer"})

    def _state(self) -> Response:
        return Response(codec.dumps(self._server.shown()), media_type="application/json")


def _error(error: OnnxOpsError, status: int) -> Response:
    return Response(error_to_bytes(error), status, media_type="application/json")
