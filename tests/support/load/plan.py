"""Requests of a load generator, and their rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from onnx_ops.errors import UserError
from onnx_ops.protocol.messages import USER_KEY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One body with its headers."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One load.

    Args:
        url: where requests are posted to; only `http`.
        payloads: the bodies, sent in turn.
        headers: sent with every request.
        connections: how many keep-alive connections; one request at a time on each.
        seconds: how long new requests are sent; those under way are then waited for.
        requests: most requests that are sent; 0 for no limit.
        rate: requests a second that arrive whether or not the server keeps up (open loop, Poisson
            arrivals); 0 sends the next request of a connection as soon as the last one was answered
            (closed loop).
        keys: how many users send; each sends `x-user-key: user-N`. 0 sends no key.
        timeout_s: a request without an answer after that long has failed.
        seed: seed of the arrivals.
    """

    url: str
    payloads: Sequence[Payload]
    headers: Mapping[str, str] = field(default_factory=dict)
    connections: int = 1
    seconds: float = 5.0
    requests: int = 0
    rate: float = 0.0
    keys: int = 0
    timeout_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme != "http" or not urlsplit(self.url).hostname:
            raise UserError(
                f"{self.url!r} is not the address of a server", remedy="Give http://HOST:PORT/PATH."
            )
        if not self.payloads:
            raise UserError("there is nothing to send", remedy="Give at least one payload.")
        if self.connections < 1 or self.seconds <= 0 or self.timeout_s <= 0:
            raise UserError("connections, seconds and the time-out must be positive")
        if min(self.requests, self.rate, self.keys) < 0:
            raise UserError("requests, rate and keys must not be negative")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), parts.port or 80


class Requests:
    """The bytes of each request of a plan.

    Their parts are built in advance, and `render` joins them.
    """

    def __init__(self, plan: LoadPlan) -> None:
        parts = urlsplit(plan.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._heads = [
            _head(target, parts.netloc, {**plan.headers, **p.headers}, p.body)
            for p in plan.payloads
        ]
        self._tails = [b"\r\n" + payload.body for payload in plan.payloads]
        self._keys = [
            f"{USER_KEY_HEADER}: user-{number}\r\n".encode() for number in range(plan.keys)
        ] or [b""]

    def key_of(self, number: int) -> int:
        """Return which user sends request `number`. Each user sends every payload."""
        return number // len(self._heads) % len(self._keys)

    def render(self, number: int) -> bytes:
        payload = number % len(self._heads)
        return self._heads[payload] + self._keys[self.key_of(number)] + self._tails[payload]


def _head(target: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    sent = {
        "host": host,
        "content-type": "application/json",
        **{k.lower(): v for k, v in headers.items()},
    }
    sent["content-length"] = str(len(body))
    if any("\r" in text or "\n" in text for text in (*sent, *sent.values(), target)):
        raise UserError("a header must not contain a line break")
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"POST {target} HTTP/1.1\r\n{lines}".encode("latin-1")
