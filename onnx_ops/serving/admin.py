"""The admin listeners: read and publish the state, read the counts.

One listens on loopback and requires the token. An optional second one listens on a Unix socket that only the server's
user can connect to.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from onnx_ops import codec
from onnx_ops.domain.artifact import canonical_json
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
    UserCountsRequest,
    error_to_bytes,
)
from onnx_ops.protocol.routing_table import write_durably
from onnx_ops.protocol.server_process import AUDIT_FILE, TOKEN_FILE
from onnx_ops.serving.inference.responses import get_status

if TYPE_CHECKING:
    from onnx_ops.serving.workers.supervisor import Supervisor

_MAX_BODY = 1 << 20


def read_token(folder: Path) -> str:
    """Return the admin token of a server's folder; create it on first use."""
    path = folder / TOKEN_FILE
    if not path.exists():
        write_durably(path, secrets.token_urlsafe(32).encode())
    if path.stat().st_mode & 0o077:
        raise RefusedError("other users can read the admin token", where=str(path), remedy=f"Run: chmod 600 {path}")
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise RefusedError("the admin token is empty", where=str(path), remedy="Delete the file; a new one is made.")
    return token


class AdminApp:
    """Handlers of the admin routes. Without a token, the system lets no other user connect.

    `actor` is who makes changes on this listener, for the audit trail.
    """

    def __init__(self, supervisor: Supervisor, token: str | None, actor: str) -> None:
        self._supervisor = supervisor
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._actor = actor

    def build(self) -> Starlette:
        """Return the ASGI app."""
        routes = [
            Route(STATE_PATH, self.get_state),
            Route(STATE_PATH, self.put_state, methods=["PUT"]),
            Route(COUNTS_PATH, self.get_counts),
            Route(COUNTS_PATH, self.post_counts, methods=["POST"]),
        ]
        handlers = dict.fromkeys((HTTPException, OnnxOpsError, Exception), _respond_to_error)
        return Starlette(routes=routes, exception_handlers=handlers)

    async def get_state(self, request: Request) -> Response:
        """Return the published state."""
        self._authorize(request)
        return self._build_state()

    async def get_counts(self, request: Request) -> Response:
        """Return the counts of all deployments."""
        self._authorize(request)
        return Response(codec.dumps(self._supervisor.collect_counts()), media_type="application/json")

    async def post_counts(self, request: Request) -> Response:
        """Return the counts, with those of two deployments by user."""
        self._authorize(request)
        try:
            message = codec.loads(await read_body(request, _MAX_BODY), UserCountsRequest)
        except CorruptStateError as error:
            return _build_error(error, 400)
        if any(len(s) > MAX_USER_THRESHOLDS or list(s) != sorted(s) for s in message.limits_s.values()):
            what = f"limits_s must ascend, at most {MAX_USER_THRESHOLDS} per deployment"
            return _build_error(UserError(what), 400)
        return Response(codec.dumps(self._supervisor.collect_counts(message)), media_type="application/json")

    async def put_state(self, request: Request) -> Response:
        """Publish a state: 200 once it is served, 409 if outdated, 422 if not loadable."""
        self._authorize(request)
        try:
            state = codec.loads(await read_body(request, _MAX_BODY), EndpointState)
        except CorruptStateError as error:
            return _build_error(error, 400)
        try:
            await self._supervisor.publish(state, self._actor)
        except OnnxOpsError as error:
            statuses = ((ConflictError, 409), (ServiceUnavailableError, 503))
            return _build_error(error, next((status for kind, status in statuses if isinstance(error, kind)), 422))
        return self._build_state()

    def _authorize(self, request: Request) -> None:
        if self._expected is None:
            return
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._expected):
            raise HTTPException(401, "the admin token is missing or wrong", {"www-authenticate": "Bearer"})

    def _build_state(self) -> Response:
        return Response(codec.dumps(self._supervisor.get_state()), media_type="application/json")


async def _respond_to_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, OnnxOpsError):
        return JSONResponse({"error": str(error)}, get_status(error))
    return JSONResponse({"error": "internal error"}, 500)  # the details are in the server's log


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request; 413 as soon as more than `limit` bytes are announced or received."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "compressed bodies are not supported")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HTTPException(413, f"the body must not be larger than {limit} bytes")
    return bytes(body)


def _build_error(error: OnnxOpsError, status: int) -> Response:
    return Response(error_to_bytes(error), status, media_type="application/json")


class AuditTrail:
    """Records each requested change and its result in a file, durably.

    A change that cannot be recorded (ServiceUnavailableError) is not made. `actor` is `token` for clients with the
    admin token, or `uid:N` for a user of the Unix socket.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / AUDIT_FILE

    def record_request(self, actor: str, state: EndpointState) -> None:
        """Record a change that is about to be made."""
        names = {d.name: f"{d.model}/{d.version}" for d in state.deployments}
        split = {"weights": dict(state.split.weights), "shadow": dict(state.split.shadow)}
        self._write({"what": "publish", "who": actor, "generation": state.generation, "deployments": names, **split})

    def record_result(self, actor: str, state: EndpointState, error: str = "") -> None:
        """Record the result of a change; `error` is why nothing was changed."""
        line = {"what": "refused", "why": error} if error else {"what": "published"}
        self._write({**line, "who": actor, "generation": state.generation})

    def _write(self, line: dict[str, object]) -> None:
        now = datetime.fromtimestamp(time.time(), UTC)  # noqa: TID251 (the time of a change, for people)
        data = canonical_json({"at": now.isoformat(timespec="milliseconds"), **line}) + b"\n"
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("the line was written in part")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise ServiceUnavailableError("the audit trail cannot be written", why=str(error)) from error
