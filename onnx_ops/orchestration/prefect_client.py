"""Send requests to Prefect's server with retries, and classify their errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from onnx_ops.errors import ServiceUnavailableError

if TYPE_CHECKING:
    import httpx
    from prefect.client.orchestration import SyncPrefectClient

PAGE_SIZE = 200
"""Maximum number of entries in one response of Prefect's server."""
_PAUSES_S = (0.03, 0.07, 0.15, 0.3, 0.6)
"""Seconds before each retry of a request that a server on SQLite refused."""


def is_unavailable(error: Exception) -> bool:
    """Return whether an exception means that the server is temporarily unavailable.

    The exception must be one of Prefect's client, or a ServiceUnavailableError.
    """
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx.TransportError, ServiceUnavailableError))


def describe_unavailability(error: Exception) -> str:
    """Return the status of a server error, or the type of another exception."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return type(error).__name__


def retry_soon(client: SyncPrefectClient) -> None:
    """Change the client, so that it retries refused requests within about a second.

    A server on SQLite responds to simultaneous writers with status 503. Prefect 3.8 would then wait
    for two seconds before the first retry, and has no setting for a shorter time.
    """
    http: Any = client._client  # noqa: SLF001 (a transport of our own would lack Prefect's proxies and certificates)
    transport = http._transport_for_url(http.base_url)  # noqa: SLF001
    transport.handle_request = partial(_send, transport.handle_request)


def _send(
    handle: Callable[[httpx.Request], httpx.Response], request: httpx.Request
) -> httpx.Response:
    for pause in _PAUSES_S:
        response = handle(request)
        if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            return response
        response.close()
        time.sleep(pause)
    return handle(request)


def server_time(client: SyncPrefectClient) -> datetime:
    """Return the time of Prefect's server.

    The clock of this machine can differ from it.
    """
    return parsedate_to_datetime(client.request("GET", "/admin/version").headers["date"])
