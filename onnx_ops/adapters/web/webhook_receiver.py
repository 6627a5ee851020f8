"""An HTTP server for MLflow's webhooks and for metrics, and the webhook secret."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from onnx_ops.adapters.files import read_private
from onnx_ops.adapters.web.server import BackgroundServer, read_body
from onnx_ops.errors import (
    InvalidSignatureError,
    NotFoundError,
    OnnxOpsError,
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


class WebhookReceiver(BackgroundServer):
    """HTTP server that answers requests while this context manager is open.

    Port 0 selects a free port. For each valid delivery that is not a repetition, the receiver calls
    `wake` with the model's name. For each rejected delivery, it calls `refused` with the reason.
    `secret` is shared with MLflow, and `clock` determines the age of a delivery. `metrics` returns
    the text for `/metrics`.
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
        routes = [
            Route(PATH, self._receive, methods=["POST"]),
            Route("/metrics", self._show_metrics, methods=["GET"]),
        ]
        super().__init__(
            host,
            port,
            build_app=lambda _: Starlette(routes=routes),
            name="webhooks",
            what="the webhook receiver",
            remedy="Choose another address with --listen HOST:PORT.",
        )

    @property
    def address(self) -> str:
        """Return the address to which MLflow on this machine would send deliveries."""
        return f"{self.url}{PATH}"

    async def _receive(self, request: Request) -> Response:
        try:
            body = await read_body(request, MAX_BODY_BYTES, "the delivery")
            delivery = verify_delivery(
                request.headers, body, secret=self._secret, now=self._clock.now()
            )
        except ClientDisconnect:
            return Response(status_code=400)
        except OnnxOpsError as error:
            self._refused(error.what)
            # MLflow would retry a delivery after 429 and most 5xx, only to be refused again. So the
            # status is another 4xx.
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


def read_secret(path: Path, environ: Mapping[str, str]) -> str:
    """Return the secret in ONNX_OPS_WEBHOOK_SECRET; if that is not set, in the file.

    Raises:
        NotFoundError: neither the variable nor the file exists.
        RefusedError: other users have access to the file.
        UserError: the secret is too short.
    """
    secret, where = environ.get(VARIABLE), VARIABLE
    if secret is None:
        remedy = (
            f"Run `chmod 600 {path}`. If other users had access to the secret, delete the file "
            "and run `onnx-ops webhooks install --url URL`."
        )
        try:
            secret, where = read_private(path, "the webhook secret", remedy=remedy), str(path)
        except FileNotFoundError as error:
            remedy = (
                f"Set {VARIABLE} to a secret of at least {_SHORTEST_SECRET} characters. "
                "With an MLflow server, `onnx-ops webhooks install --url URL` creates one."
            )
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
