"""An HTTP server with bounded connections and bodies, on a separate thread.

It uses Starlette and uvicorn, on which MLflow and Prefect also depend.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp

from onnx_ops.adapters.web.connections import MAX_HEAD_BYTES, BoundedProtocol
from onnx_ops.errors import ServiceUnavailableError, TooLargeError, UserError

_TIMEOUT_S = 10.0
"""Maximum time in seconds to receive a body, and to stop the server."""


class BackgroundServer:
    """HTTP server that answers requests while this context manager is open.

    Port 0 selects a free port.

    Args:
        build_app: function that returns the application, given the IP address on which the server
            listens.
        name: name of the thread.
        what: description of the server in the error about its address.
        remedy: what to do if the address cannot be used.

    Raises:
        ServiceUnavailableError: the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        build_app: Callable[[str], ASGIApp],
        name: str,
        what: str,
        remedy: str,
    ) -> None:
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise ServiceUnavailableError(
                f"{what} cannot listen on this address",
                where=f"{host}:{port}",
                why=error.strerror or str(error),
                remedy=remedy,
            ) from error
        try:
            app = build_app(self._socket.getsockname()[0])
        except BaseException:
            self._socket.close()
            raise
        # asyncio sets TCP_NODELAY only for sockets whose protocol number is given. Without the
        # option, a client that delays its acknowledgements (by 40 ms on Linux) gets the body of
        # each response that much later.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        # The thread is a daemon, so a second signal ends the process even while requests are open.
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name=name, daemon=True
        )

    @property
    def url(self) -> str:
        """Return the URL of the server for clients on this machine."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

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


async def read_body(request: Request, max_bytes: int, what: str) -> bytes:
    """Read the body of a request; `what` describes it in errors.

    Raises:
        TooLargeError: the body exceeds `max_bytes`; the rest is not read.
        UserError: the body does not arrive within the time limit.
        ClientDisconnect: the client closed the connection.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise TooLargeError(f"{what} is larger than {max_bytes} bytes")
    except TimeoutError as error:
        raise UserError(f"{what} was not received within {_TIMEOUT_S:g} s") from error
    return bytes(body)
