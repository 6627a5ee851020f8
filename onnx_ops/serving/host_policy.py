"""Which Host and Origin headers are answered: the defence of a server on loopback against DNS rebinding.

A web page can have its own host name resolve to 127.0.0.1. The browser then sends the page's requests to a server on
loopback, and lets the page read the answers. Their Host header is the page's host name, which no page can change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from onnx_ops.errors import RefusedError
from onnx_ops.protocol.server_process import ServerOptions
from onnx_ops.serving.answers import Head

_ANY = b"*"
_LOOPBACK = (b"localhost", b"127.0.0.1", b"[::1]")
_HTTP_PORT = 80
_PORT = re.compile(rb":[0-9]*\Z")
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Host headers, with port or for any port, and Origin headers that are answered; None: all of them."""

    hosts: frozenset[bytes] | None = None
    origins: frozenset[bytes] | None = None

    @classmethod
    def of(cls, address: str, port: int, options: ServerOptions) -> HostPolicy:
        """Return the policy of a server that listens on an IP address.

        On loopback, the server answers its own names and what the options allow. Elsewhere, it checks only headers
        for which the options have a list: how clients call it there is up to the proxy before it.
        """
        on_loopback = ip_address(address).is_loopback
        hosts, origins = _listed(options.allowed_hosts), _listed(options.allowed_origins)
        own = {*_LOOPBACK, f"[{address}]".encode() if ":" in address else address.encode()}
        own = {b"%b:%d" % (name, port) for name in own} | (own if port == _HTTP_PORT else set())
        return cls(
            hosts=hosts | own if (hosts or on_loopback) and _ANY not in hosts else None,
            origins=origins if (origins or on_loopback) and _ANY not in origins else None,
        )

    def check(self, head: Head) -> None:
        """Raises RefusedError if the request's Host or Origin is not one that is answered."""
        if self.hosts is not None:
            host = head.get(b"host", b"").lower()
            if host not in self.hosts and _PORT.sub(b"", host) not in self.hosts:
                raise _refusal(
                    "Host", host, "a web page could have that name resolve to this server: DNS rebinding", "hosts"
                )
        if self.origins is not None:
            origin = head.get(b"origin")
            if origin is not None and origin.lower() not in self.origins:
                raise _refusal("Origin", origin, "it comes from a web page, and any page could send it", "origins")


def _listed(text: str) -> frozenset[bytes]:
    return frozenset(entry.strip().lower().encode() for entry in text.split(",") if entry.strip())


def _refusal(header: str, value: bytes, why: str, option: str) -> RefusedError:
    shown = value[:_SHOWN].decode("latin-1")
    return RefusedError(
        f"the request's {header} header is {shown!r}, which is not allowed",
        why=why,
        remedy=f"To allow it, start the server with --allowed-{option}={shown or '*'}, or set allowed_{option} in the "
        "endpoint's settings.",
    )
