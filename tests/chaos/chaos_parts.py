"""Raw sockets, and a server whose health is checked after each attack."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.processes import memory, peak_memory
from tests.support.server import ServerFamily, parse_answers, received

INFER = "/v2/models/m/infer"
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
GOOD = json.dumps({"inputs": [X]}).encode()
MB = 1 << 20

Make = Callable[..., ServerFamily]


def post(
    body: bytes = GOOD, *, path: str = INFER, length: int | None = None, **headers: str
) -> bytes:
    """Return the bytes of a request.

    `length` is announced instead of the length of the body; -1 announces none.
    """
    lines = {"host": "x", "content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    if length != -1:
        lines["content-length"] = str(len(body) if length is None else length)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def status_of(client: socket.socket, timeout_s: float = 10.0) -> int | None:
    """Return the status of the next response.

    It is None if the server closes the connection instead.

    Raises:
        TimeoutError: it does neither.
    """
    client.settimeout(timeout_s)
    answers, _ = parse_answers(received(client))
    return answers[0].status if answers else None


@dataclass
class Patient:
    server: ServerFamily

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)

    def sent(self, data: bytes, *, half_close: bool = False) -> int | None:
        """Return the status of the response to these bytes.

        It is None if the connection is closed without a response.
        """
        with self.connect() as client:
            # The server may respond and close before all bytes are sent.
            with suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(data)
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            return status_of(client)

    def is_well(self) -> None:
        """Assert that a good request is answered correctly."""
        answer = self.server.call("POST", INFER, GOOD, {"content-type": "application/json"})
        assert answer.status == 200, answer.body
        assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]

    @contextmanager
    def bounded(self, growth: int) -> Iterator[None]:
        """Assert that the server's memory grows by less than `growth` bytes.

        The limit applies to the memory after the block, and to the peak during it.
        """
        before = memory(self.server.processes()).rss
        peak = peak_memory(self.server.processes())
        yield
        assert memory(self.server.processes()).rss - before < growth
        assert peak_memory(self.server.processes()) - peak < growth
