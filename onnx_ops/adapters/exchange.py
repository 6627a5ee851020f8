"""One HTTP exchange of JSON with a service: within seconds, with no other host, and with no secret in any error."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

from onnx_ops.errors import RefusedError, ServiceUnavailableError, UserError

PATIENCE_S = 10.0
"""Seconds for an answer."""

_LARGEST = 4 << 20
"""Bytes of an answer that are read."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LATER = frozenset({408, 425, 429})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: whoever is named there gets neither message nor token."""

    def redirect_request(self, *_: object) -> None:
        return None


def host_of(url: str, what: str) -> str:
    """The host of an address that may be sent to.

    Raises:
        UserError: it is no https address (http is allowed on this machine). The address itself is not told: it may be
            a secret.
    """
    try:
        parts = urlsplit(url)
        host, scheme, _ = parts.hostname or "", parts.scheme, parts.port
    except ValueError:
        host, scheme = "", ""
    if host and (scheme == "https" or (scheme == "http" and host in _LOOPBACK)) and url.isascii() and url.isprintable():
        return host
    raise UserError(
        f"{what} is not an https address", remedy="It begins with https://; plain http is for this machine."
    )


def exchange(
    method: str,
    url: str,
    document: object = None,
    *,
    host: str,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send JSON, and return the JSON of the answer, or its text where it is none. `host` is what errors name.

    Raises:
        ServiceUnavailableError: no answer in time, or one that asks to try again later.
        RefusedError: any other answer that is not a success, a redirect among them.
    """
    body = None if document is None else json.dumps(document).encode()
    given = {"User-Agent": "onnx-ops", **({"Content-Type": "application/json"} if body else {}), **(headers or {})}
    deadline = time.monotonic() + PATIENCE_S
    try:
        request = urllib.request.Request(url, data=body, headers=given, method=method)  # noqa: S310 (see `host_of`)
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=PATIENCE_S) as answer:
            text = _read(answer, deadline)
    except urllib.error.HTTPError as error:
        with error:
            _complain(error.code, _said(error, deadline), host)
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The reasons of these may hold the address; their types do not.
        reason = getattr(error, "reason", None)
        why = type(reason if isinstance(reason, BaseException) else error).__name__
        raise ServiceUnavailableError("does not answer", where=host, why=why) from None
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")


def _read(answer: http.client.HTTPResponse | urllib.error.HTTPError, deadline: float) -> bytes:
    """Raises TimeoutError for an answer that comes too slowly or does not end."""
    found = b""
    while chunk := answer.read1(1 << 16):
        found += chunk
        if len(found) > _LARGEST or time.monotonic() > deadline:
            raise TimeoutError
    return found


def _said(error: urllib.error.HTTPError, deadline: float) -> str:
    try:
        return _read(error, deadline)[:200].decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""


def _complain(status: int, said: str, host: str) -> NoReturn:
    why = f"HTTP {status} {' '.join(said.split())}".strip()
    if status >= 500 or status in _LATER:
        raise ServiceUnavailableError("does not take it now", where=host, why=why) from None
    if 300 <= status < 400:
        remedy = "Put the new address into the settings, if you trust it: what is sent here holds a secret."
        raise RefusedError("sends us elsewhere", where=host, why=why, remedy=remedy) from None
    raise RefusedError("does not take it", where=host, why=why, remedy="Look at the address and the token.") from None
