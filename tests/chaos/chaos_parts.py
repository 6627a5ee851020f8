"""Raw sockets, and a server that is asked after every blow whether it is still well."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.processes import memory, peak_memory
from tests.support.server import ServerFamily

INFER = "/v2/models/m/infer"
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
GOOD = json.dumps({"inputs": [X]}).encode()
MB = 1 << 20

Make = Callable[..., ServerFamily]


def post(body: bytes = GOOD, *, path: str = INFER, length: int | None = None, **headers: str) -> bytes:
    """A request's bytes. `length` is announced instead of the body's; -1 announces none."""
    lines = {"host": "x", "content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    if length != -1:
        lines["content-length"] = str(len(body) if length is None else length)
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def status_of(client: socket.socket, timeout_s: float = 10.0) -> int | None:
    """The status of what the server answers next, whose body is read; None if it closes the connection instead.

    Raises:
        TimeoutError: it does neither.
    """
    client.settimeout(timeout_s)
    seen, wanted = b"", 1
    with suppress(ConnectionResetError, BrokenPipeError):
        while len(seen) < wanted and (piece := client.recv(65536)):
            seen += piece
            head, ended, _ = seen.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            wanted = len(head) + 4 + int(length or 0) if ended else len(seen) + 1
    return int(seen.split(b" ", 2)[1]) if seen else None


def answers_of(client: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers, each of which has a content-length."""
    found = []
    with client.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split(b" ", 2)[1])
            lines = [line.lower() for line in iter(stream.readline, b"\r\n")]
            length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
            found.append((status, stream.read(length)))
    return found


@dataclass
class Patient:
    server: ServerFamily

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)

    def sent(self, data: bytes, *, half_close: bool = False) -> int | None:
        """The status of the answer to these bytes; None if the connection is closed without one."""
        with self.connect() as client:
            with suppress(ConnectionResetError, BrokenPipeError):  # it may answer and close before all is sent
                client.sendall(data)
                if half_close:
                    client.shutdown(socket.SHUT_WR)
            return status_of(client)

    def is_well(self) -> None:
        """A good request is answered, and rightly."""
        answer = self.server.call("POST", INFER, GOOD, {"content-type": "application/json"})
        assert answer.status == 200, answer.body
        assert answer.json()["outputs"][0]["data"] == [2.0, 4.0]

    @contextmanager
    def bounded(self, growth: int) -> Iterator[None]:
        """Neither during nor after the block does the server hold more than `growth` bytes above what it held."""
        before = memory(self.server.processes()).rss
        peak = peak_memory(self.server.processes())
        yield
        assert memory(self.server.processes()).rss - before < growth
        assert peak_memory(self.server.processes()) - peak < growth
