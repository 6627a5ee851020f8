"""Access rules of the console, and what its pages can load.

The console changes nothing, so it permits only GET and HEAD. If there is a token, every request
needs it; a console that other machines can reach must have one. On loopback, or if the user lists
allowed names, the Host header must be an allowed name. Without this check, a web page could reach
the console, since its own host name can resolve to this machine.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onnx_ops.adapters.files import read_private
from onnx_ops.errors import UserError
from onnx_ops.printable import hide

VARIABLE = "ONNX_OPS_CONSOLE_TOKEN"
_SHORTEST_TOKEN = 16
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":[0-9]*\Z")

PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of every response that sets no other policy."""
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
"""Content-Security-Policy of a stored report.

Every user with write access to the registry can change a report. So the policy forbids scripts, and
gives the report a separate origin.
"""
_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def read_token(path: Path, environ: Mapping[str, str]) -> str:
    """Return the token from the environment or the file; empty if neither is set.

    Raises:
        RefusedError: users other than the owner have access to the file.
        UserError: the token is too short.
    """
    token, where = environ.get(VARIABLE), VARIABLE
    if token is None:
        try:
            token, where = read_private(path, "the token of the console"), str(path)
        except FileNotFoundError:
            return ""
    if len(token) < _SHORTEST_TOKEN:
        raise UserError(
            f"the token of the console is shorter than {_SHORTEST_TOKEN} characters",
            where=where,
            remedy="Generate a token: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    hide(token, VARIABLE)
    return token


class AccessControl:
    """Access control of the console, which also adds security headers.

    Args:
        app: the pages.
        token: the token that a request needs; empty for none.
        hosts: allowed names in the Host header, whose port is ignored; None allows every name.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str] | None) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request; pass lifespan events to the pages unchanged.

        WebSockets are ignored.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._find_refusal(scope["method"], Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _find_refusal(self, method: str, headers: Headers) -> Response | None:
        """Return the response that refuses a request; None if the request is permitted."""
        if method not in ("GET", "HEAD"):
            text = "The console changes nothing. Its pages show commands that change something.\n"
            return PlainTextResponse(text, status_code=405, headers={"allow": "GET, HEAD"})
        if self._hosts is not None:
            host = headers.get("host", "").lower()
            if _PORT.sub("", host) not in self._hosts:
                text = (
                    "The Host header is not allowed, since a web page could let any name resolve "
                    "to this machine. Start the console with --allowed-hosts to allow a name.\n"
                )
                return PlainTextResponse(text, status_code=421)
        if self._token and not self._is_authorized(headers.get("authorization", "")):
            text = "The console needs its token: as the password of any user name.\n"
            challenge = 'Basic realm="onnx-ops console", charset="UTF-8"'
            return PlainTextResponse(text, status_code=401, headers={"www-authenticate": challenge})
        return None

    def _is_authorized(self, header: str) -> bool:
        """Return whether a header contains the token, as Basic password or Bearer token."""
        scheme, _, value = header.partition(" ")
        given = b""
        if scheme.lower() == "bearer":
            given = value.strip().encode("utf-8", "surrogatepass")
        elif scheme.lower() == "basic":
            try:
                given = base64.b64decode(value, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                given = b""
        return hmac.compare_digest(given, self._token)


def choose_hosts(address: str, allowed: Collection[str]) -> frozenset[str] | None:
    """Return the allowed names of a server that listens on an IP address.

    The result is None, which allows every name, if `allowed` is empty and the address is not
    loopback. The valid names of such an address depend on the network. Its requests need the token,
    which a web page does not have.
    """
    names = {name.strip().lower() for name in allowed if name.strip()}
    if not (ip_address(address).is_loopback or names):
        return None
    own = f"[{address}]" if ":" in address else address
    return frozenset({*_LOOPBACK_NAMES, own, *names})
