"""HTTP as well-behaved and faulty clients use it, and the limits."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnx_ops.serving.http.limits import READING
from onnx_ops.serving.http.protocol import HttpProtocol, LargeBodyReader
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, ODD, X, infer_body, wait_until
from tests.serving.serving_worker import Worker, post, without_date
from tests.support.server import parse_answers, received, scaled

BODY = infer_body([1, 2])
GOOD = post(INFER, BODY, {"azureml-model-deployment": "blue"})


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    root = tmp_path_factory.mktemp("models")
    state = state_of(scaled(root, "blue"), scaled(root, "green"), blue=70, green=30)
    with Worker(state, bounds={"max_connections": 50}).running() as running:
        # The first request prepares objects that later requests use.
        running.send(GOOD)
        yield running


@pytest.fixture
def hasty(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return the worker, which waits at most about half a second for a client."""
    monkeypatch.setattr(worker.connections, "read_timeout_s", 0.5)
    monkeypatch.setattr(worker.connections, "keep_alive_s", 0.5)
    return worker


@pytest.fixture(autouse=True)
def next_good_request_is_answered(worker: Worker) -> Iterator[None]:
    yield
    answer = worker.send(GOOD)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"data":[2.0,4.0]' in answer
    # Connections are accepted in the order of arrival, so the worker has accepted those of
    # all earlier clients. It can still be reading what a disconnected client sent.
    wait_until(lambda: not worker.connections.open)
    assert worker.connections.body_bytes == 0


CORPUS: Mapping[str, tuple[str, bytes, dict[str, str]]] = {
    "infer": (INFER, BODY, {}),
    "version": ("/v2/models/m/versions/2/infer", BODY, {}),
    "no such version": ("/v2/models/m/versions/9/infer", BODY, {}),
    "pinned": (INFER, BODY, {"x-amzn-sagemaker-target-variant": "green"}),
    "pinned to nothing": (INFER, BODY, {"x-amzn-sagemaker-target-variant": "grey"}),
    "sticky": (INFER, BODY, {"x-user-key": "anna"}),
    "echoed": (
        INFER,
        BODY,
        {"x-request-id": "r-1", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa-01"},
    ),
    "echo too long": (INFER, BODY, {"x-request-id": "r" * 300}),
    "echo not printable": (INFER, BODY, {"x-request-id": "r\xe9"}),
    "outputs and id": (
        INFER,
        json.dumps({"id": "7", "inputs": [X], "outputs": [{"name": "y"}]}).encode(),
        {},
    ),
    "not JSON": (INFER, b"{", {}),
    "empty": (INFER, b"", {}),
    "wrong tensor": (INFER, json.dumps({"inputs": [{**X, "data": ["a", 2]}]}).encode(), {}),
    "instances": ("/invocations", b'{"instances": [[1, 2]]}', {}),
    "table": (
        "/invocations",
        b'{"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2]]}}',
        {},
    ),
    "at its endpoint": ("/endpoints/e/invocations", b'{"inputs": {"x": [[1, 2]]}}', {}),
    "no form": ("/invocations", b"{}", {"content-type": "application/json; charset=utf-8"}),
    "wrong length of the JSON part": (INFER, BODY, {"inference-header-content-length": "x"}),
}


def chunked(path: str, body: bytes, headers: dict[str, str], trailers: bytes = b"") -> bytes:
    head = post(path, b"", {**headers, "transfer-encoding": "chunked"}).replace(
        b"content-length: 0\r\n", b""
    )
    return (
        head
        + (b"%x;a=b\r\n%b\r\n" % (len(body), body) if body else b"")
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


FORMS: Mapping[str, Callable[[str, bytes, dict[str, str]], bytes]] = {
    "repeated header": lambda path, body, headers: post(path, body, {**headers, **ODD}),
    "chunked": chunked,
    "trailers": lambda path, body, headers: chunked(
        path,
        body,
        headers,
        b"host: y\r\nx-request-id: forged\r\nazureml-model-deployment: none\r\n",
    ),
    "query": lambda path, body, headers: post(f"{path}?a=b", body, headers),
    "escaped": lambda path, body, headers: post(path.replace("n", "%6e"), body, headers),
    "absolute": lambda path, body, headers: post(f"http://x{path}", body, headers),
    "kept explicitly": lambda path, body, headers: post(
        path, body, {**headers, "connection": "keep-alive"}
    ),
    "closed": lambda path, body, headers: post(path, body, {**headers, "connection": "close"}),
    "HTTP/1.0": lambda path, body, headers: post(path, body, headers, version="1.0"),
    "HTTP/1.0, kept": lambda path, body, headers: post(
        path, body, {"connection": "keep-alive"} | headers, version="1.0"
    ),
}
"""Unusual ways to send the same request."""


@pytest.mark.parametrize("name", CORPUS)
def test_request_in_unusual_form_returns_same_bytes(worker: Worker, name: str) -> None:
    path, body, headers = CORPUS[name]
    if not any("variant" in h or "key" in h for h in headers):
        headers = {**headers, "azureml-model-deployment": "blue"}
    usual = worker.send(post(path, body, headers))
    assert b"\r\ndate: " in usual
    for form, build in FORMS.items():
        answer = worker.send(build(path, body, headers))
        ends = form in ("closed", "HTTP/1.0", "HTTP/1.0, kept")
        assert (b"\r\nconnection: close\r\n" in answer) == ends
        assert without_date(answer.replace(b"connection: close\r\n", b"")) == without_date(usual), (
            form
        )


def test_requests_with_different_header_values_receive_their_own_answers(worker: Worker) -> None:
    with worker.connect() as client:
        for number in range(12):
            pin = "blue" if number % 3 else "green"
            body = infer_body([10**number, 1])
            client.sendall(
                post(INFER, body, {"azureml-model-deployment": pin, "x-request-id": f"r-{number}"})
            )
            answer = received(client)
            assert f"x-request-id: r-{number}\r\n".encode() in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"][0][
                "data"
            ] == pytest.approx(
                [10**number * (2 if pin == "blue" else 3), 2 if pin == "blue" else 3]
            )


def large(first: int, second: int, *, room: int) -> bytes:
    """Return a request whose body is padded with `room` spaces."""
    body = infer_body([first, second])
    return post(INFER, body[:-1] + b" " * room + body[-1:], {"azureml-model-deployment": "blue"})


def data_of(answers: bytes) -> list[bytes]:
    """Return the first numbers of each answer."""
    return [
        answer.partition(b'"data":')[2][:10] for answer in answers.split(b"HTTP/1.1 200 OK")[1:]
    ]


@pytest.mark.parametrize("piece", [1, 1000, 65_537, 1 << 20])
def test_large_bodies_in_pieces_with_small_requests_between_are_answered(
    worker: Worker, piece: int
) -> None:
    requests = (
        large(1, 2, room=300_000),
        large(3, 4, room=700_000),
        GOOD,
        large(5, 6, room=70_000),
        GOOD,
    )
    sent = b"".join(requests)
    with worker.connect() as client:
        start = 0
        # To save time, small pieces are used only for the start of each 500,000 bytes: the first
        # 50. The rest is sent as one piece. Larger pieces are used throughout.
        while start < len(sent):
            size = piece if start % 500_000 < 50 * piece else 500_000 - start % 500_000
            client.sendall(sent[start : start + size])
            start += size
        answers = received(client, len(requests))
    assert data_of(answers) == [
        b"[2.0,4.0]}",
        b"[6.0,8.0]}",
        b"[2.0,4.0]}",
        b"[10.0,12.0",
        b"[2.0,4.0]}",
    ]
    assert worker.send(requests[0]).startswith(b"HTTP/1.1 200 OK")
    assert worker.connections.body_bytes == 0


@pytest.mark.parametrize("first", [0, 10, -1])
def test_repeated_large_bodies_with_equal_head_are_answered(worker: Worker, first: int) -> None:
    """The first piece of a request is its head and `first` bytes of its body.

    With -1, it ends within the head.
    """
    requests = [large(number, 7, room=400_000) for number in range(1, 6)]
    head = requests[0].index(b"\r\n\r\n") + 4
    with worker.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, request in enumerate(requests, 1):
            for start, end in (
                (0, head + first),
                (head + first, head + first + 100_000),
                (head + first + 100_000, None),
            ):
                client.sendall(request[start:end])
                # The pause separates the pieces. The result does not depend on their number.
                time.sleep(0.005)
            assert b'"data":[%d.0,14.0]' % (2 * number) in received(client)
            client.sendall(GOOD if number % 2 else request)
            assert b" 200 OK" in received(client)
        client.sendall(requests[0] + GOOD + requests[1])
        answers = received(client, 3)
        (connection,) = worker.connections.open
        assert isinstance(connection, HttpProtocol)
        assert (connection._body, connection._reader) == (b"", None), (
            "an idle connection keeps no memory"
        )
    assert data_of(answers) == [b"[2.0,14.0]", b"[2.0,4.0]}", b"[4.0,14.0]"]
    assert worker.connections.body_bytes == 0


@pytest.mark.parametrize("pad", range(8))
def test_large_binary_tensor_after_header_of_any_alignment_is_read_correctly(
    worker: Worker, pad: int
) -> None:
    rows = np.arange(80_000, dtype=np.float32).reshape(-1, 2)
    tensor = {**X, "shape": rows.shape, "parameters": {"binary_data_size": rows.nbytes}}
    del tensor["data"]
    text = (
        json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        + b" " * pad
    )
    headers = {
        "azureml-model-deployment": "blue",
        "inference-header-content-length": str(len(text)),
    }
    request = post(INFER, text + rows.tobytes(), headers)
    with worker.connect() as client:
        client.sendall(request + GOOD)
        answer, following = received(client, 2).split(b"HTTP/1.1 200 OK")[1:]
    assert answer.endswith((2 * rows).tobytes())
    assert b'"data":[2.0,4.0]' in following


@pytest.mark.parametrize("start", [b"", b"1234567"])
@pytest.mark.parametrize("length", [b"", b"0", b"5", b"161", b"162", b"-1", b"x", b"9" * 5000])
def test_large_body_reader_aligns_data_after_json_header_or_whole_body_without_one(
    start: bytes, length: bytes
) -> None:
    content = bytes(range(256)) * 300
    collected: list[tuple[memoryview, int]] = []
    connection: Any = SimpleNamespace(
        body_received=lambda body, size: collected.append((body, size))
    )
    reader = LargeBodyReader(connection, len(content), content[: len(start)], length)
    for end in (1000, len(content)):
        missing = reader.get_buffer(-1)
        size = end - (len(content) - len(missing))
        missing[:size] = content[end - size : end]
        reader.buffer_updated(size)
    (_, first), (body, size) = collected
    assert (first, size) == (1000, len(content))
    assert bytes(body) == content
    assert body.readonly
    place = np.frombuffer(body, np.uint8).ctypes.data
    assert (place + (int(length) if len(length) < 5 and length.isdigit() else 0)) % 8 == 0


def test_incomplete_large_body_returns_408_and_frees_memory(hasty: Worker) -> None:
    request = large(1, 2, room=500_000)
    with hasty.connect() as client:
        client.sendall(request[:300_000])
        wait_until(lambda: hasty.connections.body_bytes > 100_000)
        assert received(client).startswith(b"HTTP/1.1 408")
        client.sendall(request[300_000:] + GOOD)
        assert client.recv(1) == b""
    assert hasty.connections.body_bytes == 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50, b"400"),
        (b"hello\r\n\r\n", b"400"),
        (random.Random(5).randbytes(4096), b"400"),  # noqa: S311
        (b"\r\n" * 5000 + b"x\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"POST /v2/models/m/infer\r\n\r\n", b"505"),
        (b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (post(INFER, b"").replace(b"length: 0", b"length: eighty"), b"400"),
        (post(INFER, b"").replace(b"length: 0", b"length: %d" % 10**30), b"400"),
        (
            b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
            b"400",
        ),
        (post(INFER, BODY, {"a\0b": "c"}), b"400"),
        (post(INFER, BODY, {" ": "y"}), b"400"),
        (b"A" * 200_000, b"400"),
        (b"\xff" * 500, b"400"),
        (b"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", b"400"),
        (b"POST /invocations HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n", b"400"),
        (
            b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"400",
        ),
        (b"POST /invoc\x00ations HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"GET /ping HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000, b"431"),
        (b"GET /" + b"a" * 200_000, b"431"),
        (post(INFER, b"").replace(b"length: 0", b"length: 1000000000"), b"413"),
        (post("/unrouted", b"").replace(b"length: 0", b"length: 1000000000"), b"413"),
        (
            post(INFER, b"", {"expect": "100-continue"}).replace(
                b"length: 0", b"length: 1000000000"
            ),
            b"413",
        ),
        (post(INFER, b"\x1f\x8b" + b"0" * 100, {"content-encoding": "gzip, gzip"}), b"415"),
        (post("/invocations", b"0" * 100, {"content-encoding": "br"}), b"415"),
        (post(INFER, BODY, method="PUT"), b"405"),
        (post("/v2", BODY), b"405"),
        (post("/unrouted", BODY), b"404"),
        (post("/admin/state", BODY), b"404"),
        (post("/v2/models/../../etc/passwd", BODY), b"404"),
        (post("/v2/models/%6d%00/infer", BODY), b"404"),
        (post("/v2/models/" + "m" * 10_000 + "/infer", BODY), b"404"),
        (post(INFER, BODY, {"azureml-model-deployment": "grey"}), b"404"),
    ],
)
def test_invalid_request_returns_error_status(
    worker: Worker, request_bytes: bytes, status: bytes
) -> None:
    answer = worker.send(request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]
    if status in (b"400", b"413", b"431"):
        assert b"connection: close" in head


def test_chunked_body_above_limit_closes_connection(worker: Worker) -> None:
    """The protocol refuses the body and stops reading.

    The application does not get the request.
    """
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    chunks = worker.connections.max_body // (1 << 16) + 1
    head = b"POST /invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer, _, _ = worker.send(head, chunk * chunks).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.split(b"\r\n")


def test_concurrent_bodies_above_total_limit_return_503(hasty: Worker) -> None:
    half = hasty.connections.max_body // 2
    head = post(INFER, b"").replace(b"length: 0", b"length: %d" % (half + 1))
    clients = [hasty.connect() for _ in range(18)]
    try:
        for client in clients:
            client.sendall(head + b" " * half)
        answers = [received(client) for client in clients]
    finally:
        for client in clients:
            client.close()
    assert {answer[9:12] for answer in answers} == {b"408", b"503"}
    assert hasty.connections.body_bytes <= hasty.connections.max_body_bytes


def test_request_that_arrives_too_slowly_returns_408(hasty: Worker) -> None:
    for start in (
        b"POST ",
        post(INFER, BODY)[:-3],
        post(INFER, BODY, ODD)[:-3],
        b"GET /ping HTTP/1.1\r\nhost: x\r\n",
    ):
        assert hasty.send(start).startswith(b"HTTP/1.1 408"), start


def test_idle_connection_after_timeout_is_closed(hasty: Worker) -> None:
    with hasty.connect() as client:
        assert client.recv(1) == b""
    with hasty.connect() as client:
        client.sendall(GOOD)
        assert b" 200 OK" in received(client)
        assert client.recv(1) == b""


@pytest.mark.parametrize("data", [b"", b"POST ", GOOD[:40], GOOD[:-1], GOOD, GOOD * 3])
def test_half_closed_connection_receives_answers_and_is_closed(worker: Worker, data: bytes) -> None:
    with worker.connect() as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        statuses = [answer.status for answer in parse_answers(received(client, 4))[0]]
    assert statuses in ([200] * (len(data) // len(GOOD)), [400], [408])
    assert statuses[:1] == [200] if len(data) >= len(GOOD) else 200 not in statuses


def test_connection_limit_when_reached_closes_idle_and_keeps_busy_connections(
    tmp_path: Path,
) -> None:
    with Worker(
        state_of(scaled(tmp_path, "blue"), blue=100), bounds={"max_connections": 5}
    ).running() as worker:
        idle = [worker.connect() for _ in range(20)]
        assert worker.send(GOOD).startswith(b"HTTP/1.1 200")
        busy = []
        for _ in range(5):
            busy.append(worker.connect())
            busy[-1].sendall(GOOD)
            assert b" 200 OK" in received(busy[-1])
            busy[-1].sendall(GOOD[:-1])
            wait_until(
                lambda: [c.stage for c in worker.connections.open].count(READING) == len(busy)
            )
        with worker.connect() as client:
            refused = received(client)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in refused
        for client in busy:
            client.sendall(GOOD[-1:])
            assert b" 200 OK" in received(client)
        for client in (*busy, *idle):
            client.close()


def test_client_disconnect_before_or_after_end_of_request_frees_body_memory(worker: Worker) -> None:
    for piece in (b"", b"POST", post(INFER, BODY)[:-1], post(INFER, BODY, ODD)[:-1], GOOD):
        client = worker.connect()
        client.sendall(piece)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    assert worker.send(GOOD).startswith(b"HTTP/1.1 200")
    wait_until(lambda: worker.connections.body_bytes == 0)
