"""The admin listener: shows and publishes the state. Bound to loopback, and every request needs the token."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from concurrent.futures import Executor
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onnx_ops import codec
from onnx_ops.domain.endpoint import EndpointState
from onnx_ops.errors import Conflict, OnnxOpsError, Refused, ServiceUnavailable, StateCorrupt
from onnx_ops.protocol.admin import STATE_PATH, TOKEN_FILE, AdminState, error_to_bytes, read_message
from onnx_ops.serving.endpoint import Endpoint, Snapshot
from onnx_ops.serving.http import on_crash, on_http_error, read_body
from onnx_ops.serving.table import write_durably

_MAX_BODY = 1 << 20


def read_token(folder: Path) -> str:
    """The admin token of a server's folder; made on first use.

    Raises:
        Refused: others than its owner may read it, or it is empty.
        OSError: it cannot be read or written.
    """
    path = folder / TOKEN_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode())
    if path.stat().st_mode & 0o077:
        raise Refused("others may read the admin token", where=str(path), remedy=f"Run: chmod 600 {path}")
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise Refused("the admin token is empty", where=str(path), remedy="Delete the file; a new one is made.")
    return token


class AdminApp:
    """Handlers of the admin routes.

    Args:
        endpoint: what is published.
        token: what a client must show as bearer token.
        pool: one thread in which models are loaded, so that clients are answered meanwhile.
    """

    def __init__(self, endpoint: Endpoint, token: str, pool: Executor) -> None:
        self._endpoint = endpoint
        self._expected = f"Bearer {token}".encode()
        self._pool = pool

    def asgi(self) -> Starlette:
        routes = [Route(STATE_PATH, self.show), Route(STATE_PATH, self.publish, methods=["PUT"])]
        return Starlette(routes=routes, exception_handlers={HTTPException: on_http_error, Exception: on_crash})

    async def show(self, request: Request) -> Response:
        self._authorize(request)
        return _state(self._endpoint.snapshot)

    async def publish(self, request: Request) -> Response:
        """Answers only after the state is served: 200; 409 if it is out of date; 422 if it cannot be loaded."""
        self._authorize(request)
        body = await read_body(request, _MAX_BODY)
        try:
            state = read_message(body, EndpointState)
        except StateCorrupt as error:
            return _error(error, 400)
        loop = asyncio.get_running_loop()
        try:
            return _state(await loop.run_in_executor(self._pool, self._endpoint.publish, state))
        except Conflict as error:
            return _error(error, 409)
        except ServiceUnavailable as error:
            return _error(error, 503)
        except OnnxOpsError as error:
            return _error(error, 422)

    def _authorize(self, request: Request) -> None:
        shown = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(shown, self._expected):
            raise HTTPException(401, "the admin token is missing or wrong", {"www-authenticate": "Bearer"})


def _state(snapshot: Snapshot | None) -> Response:
    state = None if snapshot is None else snapshot.table.state
    failed = {} if snapshot is None else snapshot.failed
    return Response(codec.dumps(AdminState(state=state, failed=failed)), media_type="application/json")


def _error(error: OnnxOpsError, status: int) -> Response:
    return Response(error_to_bytes(error), status, media_type="application/json")
