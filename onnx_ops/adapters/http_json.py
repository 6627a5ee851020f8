"""JSON requests with a deadline, whose errors and logs do not show the address."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from onnx_ops.errors import OnnxOpsError, RefusedError, ServiceUnavailableError, UserError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4 << 20
_TRY_LATER = frozenset({408, 425, 429})

_is_sending = ContextVar("_is_sending", default=False)
# httpx logs addresses, which can be secrets.
logging.getLogger("httpx").addFilter(lambda _: not _is_sending.get())


def require_https(url: str, what: str) -> str:
    """Return the host of an address to which requests can be sent.

    Raises:
        UserError: the address is not a valid https address (http is allowed on this machine). The
            error does not show the address, which can be a secret.
    """
    try:
        parts = urlsplit(url)
        host, scheme, _ = parts.hostname or "", parts.scheme, parts.port
    except ValueError:
        host, scheme = "", ""
    is_safe = scheme == "https" or (scheme == "http" and host in ("localhost", "127.0.0.1", "::1"))
    if host and is_safe and url.isascii() and url.isprintable():
        return host
    remedy = "Use an ASCII address with https://; http:// is allowed only for this machine."
    raise UserError(f"{what} is not a valid https address", remedy=remedy)


def request_json(
    method: str,
    url: str,
    document: object = None,
    *,
    host: str,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
    timeout_s: float | None = None,
) -> Any:
    """Send a request; return the answer's JSON value, or its text if it is not JSON.

    Errors show `host` in place of the address, which can be a secret. They also show the status and
    the start of an answer that reports an error.

    Args:
        max_bytes: largest size of an answer in bytes.
        timeout_s: time limit in seconds, by default `TIMEOUT_S`.

    Raises:
        ServiceUnavailableError: no whole answer arrives in time, the answer exceeds `max_bytes`, or
            its status is 5xx or requests a later retry.
        RefusedError: the answer has another error status, or is a redirect.
    """
    import httpx

    body, sent = None, {"User-Agent": "onnx-ops", "Accept-Encoding": "identity", **(headers or {})}
    if document is not None:
        body, sent = json.dumps(document).encode(), {"Content-Type": "application/json", **sent}
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    token = _is_sending.set(True)
    try:
        with httpx.stream(
            method,
            url,
            content=body,
            headers=sent,
            timeout=timeout_s,
            # The target of a redirect must receive neither message nor token.
            follow_redirects=False,
            # Plain http needs no certificates, which take tens of milliseconds to load (timed with
            # `timeit`).
            verify=ssl.create_default_context() if url.startswith("https:") else False,
        ) as response:
            if not response.is_success:
                text = b""
                with suppress(httpx.HTTPError, TimeoutError, ServiceUnavailableError):
                    text = _read(response, host, deadline, max_bytes)
                raise _explain(response.status_code, text[:200].decode("utf-8", "replace"), host)
            text = _read(response, host, deadline, max_bytes)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        # The messages of these errors can contain the address, which can be a secret. Their types
        # contain no address.
        raise ServiceUnavailableError(
            "the request to the server failed", where=host, why=type(error).__name__
        ) from None
    finally:
        _is_sending.reset(token)
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


def _read(response: httpx.Response, host: str, deadline: float, max_bytes: int) -> bytes:
    """Read the answer; raise an error if it is late or too large."""
    text = b""
    for chunk in response.iter_bytes(1 << 16):
        text += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(text) > max_bytes:
            raise ServiceUnavailableError(
                f"the answer of the server has more than {max_bytes} bytes", where=host
            )
    return text


def _explain(status: int, text: str, host: str) -> OnnxOpsError:
    why = f"HTTP {status} {' '.join(text.split())}".strip()
    if status >= 500 or status in _TRY_LATER:
        return ServiceUnavailableError(
            "the server cannot serve the request now", where=host, why=why
        )
    if 300 <= status < 400:
        remedy = (
            "If you trust the new address, put it into the settings. Requests can contain a secret."
        )
        return RefusedError(
            "the server answers with a redirect", where=host, why=why, remedy=remedy
        )
    return RefusedError(
        "the server does not accept the request",
        where=host,
        why=why,
        remedy="Check the address and the token.",
    )
