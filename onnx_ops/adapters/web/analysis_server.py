"""HTTP server of the service of analyses, and its bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from onnx_ops.adapters.files import read_private
from onnx_ops.adapters.web.server import BackgroundServer, read_body
from onnx_ops.errors import NotFoundError, OnnxOpsError, TooLargeError, UserError
from onnx_ops.protocol.analysis import (
    MAX_BODY_BYTES,
    VARIABLE,
    AnalysisReply,
    AnalysisRequest,
)

_SHORTEST_TOKEN = 16
_METHODS = ["GET", "POST", "PUT", "DELETE"]
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class AnalysisServer(BackgroundServer):
    """HTTP server that answers requests while this context manager is open.

    Port 0 selects a free port. `handle` is called on other threads. With a token, all requests
    except `/healthz` need it. Without a token, the server listens on loopback only. Except for
    `/healthz`, it then refuses requests with an `Origin`, or with a `Host` other than loopback.

    Raises:
        UserError: the token is missing, and `host` is not loopback.
        ServiceUnavailableError: the address is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        handle: Callable[[AnalysisRequest], AnalysisReply],
    ) -> None:
        if not token and not is_loopback(host):
            raise UserError(
                "the service needs a token for an address other than loopback",
                where=f"{host}:{port}",
                remedy=f"Set {VARIABLE}, or `token_file` in the configuration.",
            )
        self._token = token
        self._handle = handle
        routes = [
            Route("/healthz", self._show_health, methods=["GET"]),
            Route("/{path:path}", self._answer, methods=_METHODS),
        ]
        super().__init__(
            host,
            port,
            build_app=lambda _: Starlette(routes=routes),
            name="analysis",
            what="the service of analyses",
            remedy="Choose another address with `listen` or --listen HOST:PORT.",
        )

    async def _show_health(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _answer(self, request: Request) -> Response:
        if (refusal := self._refuse(request)) is not None:
            return refusal
        try:
            body = await read_body(request, MAX_BODY_BYTES, "the body")
        except ClientDisconnect:
            return Response(status_code=400)
        except OnnxOpsError as error:
            status = 413 if isinstance(error, TooLargeError) else 400
            return JSONResponse({"error": error.what}, status_code=status)
        reply = await run_in_threadpool(
            self._handle,
            AnalysisRequest(
                method=request.method,
                path=request.url.path,
                query=request.url.query,
                body=body,
            ),
        )
        kind = PlainTextResponse if isinstance(reply.document, str) else JSONResponse
        return kind(reply.document, status_code=reply.status)

    def _refuse(self, request: Request) -> Response | None:
        """Return the answer to a request without permission; None with permission."""
        if self._token:
            given = request.headers.get("authorization", "").encode()
            if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return None
            return JSONResponse(
                {"error": "the token is missing or wrong"},
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        # A web page can send requests to loopback: directly, or through a name that resolves to
        # loopback (DNS rebinding).
        host = request.headers.get("host", "").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name not in _LOOPBACK_HOSTS or "origin" in request.headers:
            problem = (
                "the server has no token, so it accepts only loopback requests that lack an Origin"
            )
            return JSONResponse({"error": problem}, status_code=403)
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def read_analysis_token(file: Path | None, environ: Mapping[str, str]) -> str:
    """Return the token of the environment or of the file; empty if neither is set.

    Raises:
        RefusedError: other users can read the file.
        NotFoundError: the file does not exist.
        UserError: the token is too short, or not ASCII.
    """
    token, where = environ.get(VARIABLE), VARIABLE
    if token is None:
        if file is None:
            return ""
        where = str(file)
        try:
            token = read_private(file, "the token of analyses")
        except FileNotFoundError as error:
            remedy = "Create the file, or correct `token_file` in the configuration."
            raise NotFoundError(
                "there is no such token file", where=where, remedy=remedy
            ) from error
    token = token.strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii():
        remedy = "Generate a token: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        raise UserError(
            f"the token has fewer than {_SHORTEST_TOKEN} characters"
            if token.isascii()
            else "the token has a character that is not ASCII",
            where=where,
            remedy=remedy,
        )
    return token
