"""The framing of requests: each gets one answer.

This is true for any headers, and however the bytes arrive.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body
from tests.serving.serving_worker import Worker
from tests.support.server import Answer, parse_answers, scaled

OFFERS = {
    "no offer": "",
    "h2c": "connection: Upgrade, HTTP2-Settings\r\nupgrade: "
    "h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    "twice": "upgrade: h2c\r\nconnection: keep-alive\r\n"
    "connection: upgrade\r\nupgrade: TLS/1.0\r\n",
}
DELIVERIES = ("one packet", "head and body apart", "byte by byte")
Request = tuple[bytes, bytes]
"""The head and the body of a request."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(
        state_of(scaled(tmp_path_factory.mktemp("framing"), "blue"), blue=100)
    ).running() as worker:
        yield worker


def infer(server: Worker, x: int, *, offer: str = "", framing: str = "content-length") -> Request:
    start = f"POST {INFER} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n{offer}"
    body = infer_body([x, 1])
    if framing == "content-length":
        return f"{start}content-length: {len(body)}\r\n\r\n".encode(), body
    chunks = [body[:7], body[7:40], body[40:]]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return f"{start}transfer-encoding: chunked\r\n\r\n".encode(), chunked


def live(server: Worker, offer: str = "") -> Request:
    return (
        f"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n{offer}\r\n".encode(),
        b"",
    )


class Client:
    """One connection, on which bytes are sent unchanged."""

    def __init__(self, server: Worker) -> None:
        self._socket = server.connect()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = b""
        self._answers: list[Answer] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, delivery: str, *requests: Request) -> None:
        packets = [part for request in requests for part in request]
        if delivery == "one packet":
            packets = [b"".join(packets)]
        elif delivery == "byte by byte":
            packets = [bytes([byte]) for packet in packets for byte in packet]
        for packet in packets:
            self._socket.sendall(packet)
            # The pause usually separates the packets; the result does not depend on it.
            time.sleep(0 if len(packet) == 1 else 0.002)

    def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer."""
        while not self._answers:
            piece = self._socket.recv(1 << 16)
            assert piece, self._data
            self._answers, self._data = parse_answers(self._data + piece)
        answer = self._answers.pop(0)
        return answer.status, answer.body

    def rest(self) -> bytes:
        """Return the bytes that follow the answers read so far.

        Wait until the server has closed the connection.
        """
        assert not self._answers
        self._socket.shutdown(socket.SHUT_WR)
        while piece := self._socket.recv(1 << 16):
            self._data += piece
        return self._data

    def is_closed_by_server(self) -> bool:
        return not self._answers and not self._data and not self._socket.recv(1)


def product(answer: tuple[int, bytes]) -> float:
    """Return the model's output for the first number."""
    status, body = answer
    assert status == 200, body
    return float(json.loads(body)["outputs"][0]["data"][0])


@pytest.mark.parametrize("pipelined", [False, True], ids=["keep-alive", "pipelined"])
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_request_body_with_any_framing_and_delivery_is_read_whole(
    endpoint: Worker, offer: str, delivery: str, pipelined: bool
) -> None:
    requests = [
        infer(endpoint, 1, offer=offer),
        infer(endpoint, 2),
        infer(endpoint, 3, offer=offer, framing="chunked"),
        infer(endpoint, 4, framing="chunked"),
        infer(endpoint, 5, offer=offer),
        infer(endpoint, 5, offer=offer),
    ]
    with Client(endpoint) as client:
        if pipelined:
            client.send(delivery, *requests, live(endpoint, offer), infer(endpoint, 6))
            found = [product(client.answer()) for _ in requests]
        else:
            found = []
            for request in requests:
                client.send(delivery, request)
                found.append(product(client.answer()))
            client.send(delivery, live(endpoint, offer))
            client.send(delivery, infer(endpoint, 6))
        assert found == [2.0, 4.0, 6.0, 8.0, 10.0, 10.0]
        assert client.answer() == (200, b'{"live":true}')
        assert product(client.answer()) == 12.0
        assert client.rest() == b""


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_request_embedded_in_body_is_not_answered(
    endpoint: Worker, offer: str, framing: str, delivery: str
) -> None:
    head, inner = b"".join(live(endpoint)), b"".join(infer(endpoint, 1))
    body = head + inner
    start = f"POST {INFER} HTTP/1.1\r\nhost: 127.0.0.1:{endpoint.port}\r\n{offer}".encode()
    if framing == "content-length":
        outer = (start + b"content-length: %d\r\n\r\n" % len(body), body)
    else:
        outer = (
            start + b"transfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        )
    with Client(endpoint) as client:
        client.send(delivery, outer)
        assert client.answer()[0] == 400
        client.send(delivery, infer(endpoint, 7))
        assert product(client.answer()) == 14.0
        assert client.rest() == b""


def test_pipelined_upgrade_offers_are_answered_once_each(endpoint: Worker) -> None:
    with Client(endpoint) as client:
        client.send("one packet", *[live(endpoint, OFFERS["h2c"])] * 1500)
        for _ in range(1500):
            assert client.answer()[0] == 200
        assert client.rest() == b""


@pytest.mark.parametrize("offer", [OFFERS["no offer"], OFFERS["h2c"]], ids=["no offer", "h2c"])
def test_expect_100_continue_returns_100_and_then_one_answer(endpoint: Worker, offer: str) -> None:
    head, body = infer(endpoint, 3, offer=f"{offer}expect: 100-Continue\r\n")
    with Client(endpoint) as client:
        for _ in range(2):
            client.send("one packet", (head, b""))
            assert client.answer() == (100, b"")
            client.send("one packet", (body, b""))
            assert product(client.answer()) == 6.0
        client.send("one packet", infer(endpoint, 4))
        assert product(client.answer()) == 8.0
        assert client.rest() == b""


def test_expect_100_continue_in_http_1_0_is_ignored(endpoint: Worker) -> None:
    head, body = infer(endpoint, 3, offer="expect: 100-continue\r\n")
    with Client(endpoint) as client:
        client.send("one packet", (head.replace(b"HTTP/1.1", b"HTTP/1.0"), body))
        assert product(client.answer()) == 6.0
        assert client.is_closed_by_server()


@pytest.mark.parametrize(
    "body", [b'{"inputs": []}', b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"]
)
def test_body_received_after_answer_is_not_read_as_request(endpoint: Worker, body: bytes) -> None:
    head = (
        f"POST /unrouted HTTP/1.1\r\nhost: 127.0.0.1:{endpoint.port}\r\ncontent-length: "
        f"{len(body)}\r\n\r\n".encode()
    )
    with Client(endpoint) as client:
        client.send("one packet", infer(endpoint, 1), (head, body[:5]))
        assert product(client.answer()) == 2.0
        assert client.answer()[0] == 404
        client.send("one packet", (body[5:], b""), infer(endpoint, 2))
        assert product(client.answer()) == 4.0
        client.send("one packet", infer(endpoint, 2))
        assert product(client.answer()) == 4.0
        assert client.rest() == b""


@pytest.mark.parametrize(
    ("begin", "spaces"), [(b"zz\r\n", 0), (b"4000000\r\n", 33 << 20)], ids=["no chunk", "too much"]
)
def test_invalid_or_too_large_body_received_after_answer_closes_connection(
    endpoint: Worker, begin: bytes, spaces: int
) -> None:
    head = (
        f"POST /unrouted HTTP/1.1\r\nhost: 127.0.0.1:{endpoint.port}\r\ntransfer-encoding: "
        "chunked\r\n\r\n".encode()
    )
    with Client(endpoint) as client:
        client.send("one packet", (head, b""))
        assert client.answer()[0] == 404
        client.send("one packet", (begin, b" " * spaces))
        assert client.is_closed_by_server()


WRONG = {
    "two lengths": (b"host: HOST\r\ncontent-length: 5\r\ncontent-length: 6", 400),
    "length and chunks": (b"host: HOST\r\ncontent-length: 5\r\ntransfer-encoding: chunked", 400),
    "chunks and length": (b"host: HOST\r\ntransfer-encoding: chunked\r\ncontent-length: 5", 400),
    "chunks that are compressed": (b"host: HOST\r\ntransfer-encoding: chunked, gzip", 400),
    "no host": (b"content-length: 5", 400),
    "two hosts": (b"host: HOST\r\nHost: HOST\r\ncontent-length: 5", 400),
    "two origins": (b"host: HOST\r\norigin: a\r\norigin: b\r\ncontent-length: 5", 400),
    "unknown expectation": (b"host: HOST\r\nexpect: tea\r\ncontent-length: 5", 417),
    "two expectations": (
        b"host: HOST\r\nexpect: 100-continue\r\nexpect: tea\r\ncontent-length: 5",
        417,
    ),
    "too large with repeats": (
        b"host: HOST\r\n" + b"x: y\r\n" * 40_000 + b"content-length: 5",
        431,
    ),
    "too large": (b"host: HOST\r\nx: " + b"y" * 70_000 + b"\r\ncontent-length: 5", 431),
}


@pytest.mark.parametrize("offer", [OFFERS["no offer"], OFFERS["h2c"]], ids=["no offer", "h2c"])
@pytest.mark.parametrize("name", WRONG)
def test_invalid_request_head_returns_one_error_and_closes_connection(
    endpoint: Worker, name: str, offer: str
) -> None:
    lines, status = WRONG[name]
    lines = lines.replace(b"HOST", b"127.0.0.1:%d" % endpoint.port)
    head = b"POST %b HTTP/1.1\r\n%b%b\r\n\r\n" % (INFER.encode(), offer.encode(), lines)
    with Client(endpoint) as client:
        client.send("one packet", (head, b"hello"), live(endpoint))
        found, body = client.answer()
        assert found == status
        assert json.loads(body)["error"]
        assert client.is_closed_by_server()


def test_request_head_too_large_with_last_packet_is_refused(endpoint: Worker) -> None:
    lines, status = WRONG["too large"]
    head = b"POST %b HTTP/1.1\r\n%b\r\n\r\n" % (
        INFER.encode(),
        lines.replace(b"HOST", b"127.0.0.1:%d" % endpoint.port),
    )
    with Client(endpoint) as client:
        client.send("packets", (head[:60_000], head[60_000:] + b"hello"))
        assert client.answer()[0] == status


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
@pytest.mark.parametrize("offer", [OFFERS["no offer"], OFFERS["h2c"]], ids=["no offer", "h2c"])
def test_unsupported_http_version_returns_505(endpoint: Worker, version: bytes, offer: str) -> None:
    head, _ = live(endpoint, offer)
    with Client(endpoint) as client:
        client.send("one packet", (head.replace(b"1.1", version), b""), live(endpoint))
        assert client.answer()[0] == 505
        assert client.is_closed_by_server()
