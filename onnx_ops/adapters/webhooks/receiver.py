"""An HTTP server for MLflow's webhooks and for metrics, and the webhook secret.

The server runs on a separate thread. It uses Starlette and uvicorn, on which MLflow and Prefect
also depend.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from onnx_ops.adapters.files import read_private
from onnx_ops.adapters.webhooks.connections import MAX_HEAD_BYTES, BoundedProtocol
from onnx_ops.errors import (
    InvalidSignatureError,
    NotFoundError,
    OnnxOpsError,
    ServiceUnavailableError,
    TooLargeError,
    UserError,
)
from onnx_ops.ports import Clock
from onnx_ops.protocol.webhooks import MAX_BODY_BYTES, RecentDeliveryIds, verify_delivery
from onnx_ops.scratch import create_file

PATH = "/webhooks/mlflow"
VARIABLE = "ONNX_OPS_WEBHOOK_SECRET"
_SHORTEST_SECRET = 16
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of metrics in Prometheus' text format."""
_TIMEOUT_S = 10.0
"""Maximum time in seconds to receive a body, and to stop the server."""


class WebhookReceiver:
    """HTTP server that listens while this context manager is open.

    Port 0 selects a free port. For each valid delivery, the receiver calls `wake` with the model's
    name; for each rejected delivery, it calls `refused` with the reason. `secret` is shared with
    MLflow, and `clock` determines the age of a delivery. `metrics` returns the text for `/metrics`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: str,
        clock: Clock,
        wake: Callable[[str], None],
        refused: Callable[[str], None],
        metrics: Callable[[], str],
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._wake = wake
        self._refused = refused
        self._metrics = metrics
        self._recent = RecentDeliveryIds()
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            remedy = "Choose another address with --listen HOST:PORT."
            raise ServiceUnavailableError(
                "the webhook receiver cannot listen on this address",
                where=f"{host}:{port}",
                why=error.strerror or str(error),
                remedy=remedy,
            ) from error
        deliveries = Route(PATH, self._receive, methods=["POST"])
        config = uvicorn.Config(
            Starlette(routes=[deliveries, Route("/metrics", self._show_metrics, methods=["GET"])]),
            http=BoundedProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        # The thread is a daemon, so that a second signal ends the process despite open requests.
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="webhooks", daemon=True
        )

    @property
    def address(self) -> str:
        """Return the address to which MLflow on this machine would send deliveries."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=_TIMEOUT_S)
        self._socket.close()

    async def _receive(self, request: Request) -> Response:
        try:
            body = await _read_body(request)
            delivery = verify_delivery(
                request.headers, body, secret=self._secret, now=self._clock.now()
            )
        except ClientDisconnect:
            return Response(status_code=400)
        except OnnxOpsError as error:
            self._refused(error.what)
            # MLflow retries a delivery after 429 and most 5xx, and the receiver would refuse it
            # again. So the status is another 4xx.
            status = {TooLargeError: 413, InvalidSignatureError: 401}.get(type(error), 400)
            return PlainTextResponse(error.what, status_code=status)
        if self._recent.add(delivery.id):
            self._wake(delivery.model)
        return Response(status_code=204)

    def _show_metrics(self, _: Request) -> Response:
        """Return the metrics.

        The method is not async, so Starlette runs it on a thread: reading a remote ledger blocks.
        """
        try:
            return Response(self._metrics(), media_type=CONTENT_TYPE)
        except OnnxOpsError as error:
            return PlainTextResponse(str(error), status_code=503)


async def _read_body(request: Request) -> bytes:
    """Read the body of a delivery.

    Raises:
        TooLargeError: the body exceeds MAX_BODY_BYTES; the rest is not read.
        UserError: the body does not arrive within the time limit.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise TooLargeError(f"the delivery is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise UserError("the delivery was not received in time") from error
    return bytes(body)


def read_secret(path: Path, environ: Mapping[str, str]) -> str:
    """Return the webhook secret from the environment or, if it is not set, the file."""
    secret, where = environ.get(VARIABLE), VARIABLE
    if secret is None:
        remedy = (
            "Delete this file, and create a new secret with `onnx-ops webhooks install`; or run "
            f"chmod 600 {path}."
        )
        try:
            secret, where = read_private(path, "the webhook secret", remedy=remedy), str(path)
        except FileNotFoundError as error:
            remedy = f"Run `onnx-ops webhooks install --url URL` to create one, or set {VARIABLE}."
            raise NotFoundError(
                "there is no webhook secret", where=str(path), remedy=remedy
            ) from error
    if len(secret) < _SHORTEST_SECRET:
        remedy = "Generate a secret: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        raise UserError(
            f"the webhook secret is shorter than {_SHORTEST_SECRET} characters",
            where=where,
            remedy=remedy,
        )
    return secret


def make_secret(path: Path, environ: Mapping[str, str]) -> str:
    """Return the webhook secret; create the file if there is no secret.

    Concurrent processes get the same secret.
    """
    if VARIABLE not in environ and not path.exists():
        create_file(path, f"{secrets.token_urlsafe(32)}\n".encode())
    return read_secret(path, environ)
