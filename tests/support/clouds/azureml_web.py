"""HTTPS on loopback, with a certificate made for it, and faults that tests order."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from onnx_ops.adapters.host import SystemClock

_DAY = datetime.timedelta(days=1)

Fault = Literal[
    "throttle", "error", "drop", "hang", "conflict", "expired", "forbidden", "page", "page-error"
]
"""Fault of a request.

- `throttle`: 429.
- `error`: 500.
- `drop`: the connection is closed without an answer.
- `hang`: no answer comes until the client gives up.
- `conflict`: 409, another client is changing the same resource.
- `expired`: 401, the credentials have expired.
- `forbidden`: 403, a permission is missing.
- `page`, `page-error`: an HTML page instead of an answer, with 200 or 500.
"""
_MOST_PATIENT_S = 600.0
"""Longest wait for a client to give up; no client waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `path` is decoded and without the query.

    Names of headers are in lower case.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer. `body` is sent as it is.

    With `never`, nothing is sent, and the client has to give up.
    """

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    never: bool = False


PAGE = b"<!DOCTYPE html><html><body>Please sign in</body></html>"
FAULTS: Mapping[Fault, Reply | None] = {
    "page": Reply(status=200, body=PAGE, headers={"Content-Type": "text/html"}),
    "page-error": Reply(status=500, body=PAGE, headers={"Content-Type": "text/html"}),
    "throttle": Reply(
        status=429, body=b'{"error":{"code":"TooManyRequests","message":"Rate limit is exceeded"}}'
    ),
    "error": Reply(
        status=500,
        body=b'{"error":{"code":"InternalServerError","message":"Something went wrong"}}',
    ),
    "drop": None,
    "hang": Reply(status=0, never=True),
    "conflict": Reply(
        status=409,
        body=b'{"error":{"code":"Conflict","message":"It cannot be changed while in Updating '
        b'provisioning state"}}',
    ),
    "expired": Reply(
        status=401,
        body=b'{"error":{"code":"ExpiredAuthenticationToken","message":"The access token expiry '
        b'is in the past."}}',
    ),
    "forbidden": Reply(
        status=403,
        body=b'{"error":{"code":"AuthorizationFailed","message":"The client is not authorized."}}',
    ),
}


class Web:
    """An HTTPS server that calls `answer`.

    It closes the connection if the answer is None.
    """

    def __init__(self, folder: Path, answer: Callable[[Call], Reply | None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / "cloud.pem"
        _make_certificate(self.certificate)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate)
        self._server = _Server(("127.0.0.1", 0), _handler(answer), self._context)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        context: ssl.SSLContext,
    ) -> None:
        super().__init__(address, handler)
        self._context = context

    def finish_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Make the TLS handshake in the connection's own thread."""
        if isinstance(request, socket.socket):
            with suppress(OSError), self._context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that disconnects."""


def _handler(answer: Callable[[Call], Reply | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            parts = urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            call = Call(
                method=self.command,
                path=unquote(parts.path),
                query={k.lower(): v for k, v in parse_qsl(parts.query, keep_blank_values=True)},
                headers={k.lower(): v for k, v in self.headers.items()},
                body=self.rfile.read(length) if length else b"",
            )
            self._send(answer(call), head=call.method == "HEAD")

        def _send(self, reply: Reply | None, *, head: bool) -> None:
            if reply is None:
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            if reply.never:
                self.close_connection = True
                self.connection.settimeout(_MOST_PATIENT_S)
                with suppress(OSError):
                    while self.connection.recv(1 << 16):
                        pass
                return
            self.send_response(reply.status)
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(reply.body)),
                **reply.headers,
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if not head:
                self.wfile.write(reply.body)
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class calls it so)
            pass

    return Handler


def _make_certificate(path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.fromtimestamp(SystemClock().now(), datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 7 * _DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
    path.chmod(0o600)
