"""Invalid and hostile requests: the right status, bounded memory, and the next good request is answered."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.chaos.chaos_parts import GOOD, INFER, MB, Patient, X, answers_of, chunked, post, status_of


@pytest.fixture(autouse=True)
def well(patient: Patient) -> Iterator[None]:
    yield
    patient.is_well()


def tensor(**changes: object) -> bytes:
    return json.dumps({"inputs": [{**X, **changes}]}).encode()


BAD_BODIES = {
    "empty": b"",
    "half": GOOD[:-1],
    "not text": b"\xff\xfe\x00",
    "zeros": b"\0" * 1000,
    "deep": b"[" * 1_000_000,
    "deep in data": b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": '
    + b"[" * 900
    + b"1"
    + b"]" * 900
    + b"}]}",
    "nan": GOOD.replace(b"[1, 2]}", b"[NaN, 2]}"),
    "infinity": GOOD.replace(b"[1, 2]}", b"[1, -Infinity]}"),
    "beyond float32": tensor(data=[1e39, 1]),
    "beyond float64": GOOD.replace(b"[1, 2]}", b"[1e999, 2]}"),
    "beyond int64": GOOD.replace(b"[1, 2]}", b"[" + b"9" * 400 + b", 2]}"),
    "null": tensor(data=[None, 1]),
    "text": tensor(data=["1", 2]),
    "truth": tensor(data=[True, False]),
    "object": tensor(data={"0": 1}),
    "negative shape": tensor(shape=[-1, 2]),
    "all negative shape": tensor(shape=[-1, -2]),
    "huge shape": tensor(shape=[1 << 31, 2]),
    "overflowing shape": tensor(shape=[1 << 62, 2]),
    "shape beyond 64 bits": tensor(shape=[10**30, 2]),
    "huge empty shape": tensor(shape=[0, 2, 1 << 40], data=[]),
    "rank 100": tensor(shape=[1] * 99 + [2]),
    "fractional shape": tensor(shape=[1.0, 2]),
    "wrong rank": tensor(shape=[2]),
    "wrong shape": tensor(shape=[1, 3], data=[1, 2, 3]),
    "wrong count": tensor(data=[1, 2, 3]),
    "wrong dtype": tensor(datatype="INT64"),
    "text dtype": tensor(datatype="BYTES", data=["a", "b"]),
    "no dtype": tensor(datatype="FP1"),
    "unknown input": tensor(name="z"),
    "twice": json.dumps({"inputs": [X, X]}).encode(),
    "none": b'{"inputs": []}',
    "unknown output": json.dumps({"inputs": [X], "outputs": [{"name": "z"}]}).encode(),
    "binary size without binary": tensor(parameters={"binary_data_size": 1 << 40}, data=None),
}


@pytest.mark.parametrize("path", [INFER, "/invocations"])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_is_refused(patient: Patient, body: bytes, path: str) -> None:
    with patient.bounded(64 * MB):
        assert patient.sent(post(body, path=path)) == 400


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(path="/v2/models/z/infer"), 404),
        (post(path="/v2/models/m/versions/9/infer"), 404),
        (post(path="/v2/models/" + "m" * 10_000 + "/infer"), 404),
        (post(path="/v2/models/%6d%00/infer"), 404),
        (post(path="/v2/models/../../etc/passwd"), 404),
        (post(path="/admin/state"), 404),
        (post(azureml_model_deployment="grey"), 404),
        (post(path="/v2"), 405),
        (b"DELETE " + INFER.encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (post(gzip.compress(GOOD), content_encoding="br"), 415),
    ],
)
def test_what_is_not_here_or_not_allowed_says_so(patient: Patient, data: bytes, status: int) -> None:
    assert patient.sent(data) == status


NOT_HTTP = {
    "garbage": random.Random(5).randbytes(4096),  # noqa: S311
    "line breaks": b"\r\n" * 5000 + b"x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"POST /v2/models/m/infer\r\n\r\n",
    "unknown method": b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n",
    "negative length": post(length=None).replace(b"content-length: ", b"content-length: -"),
    "length in words": post().replace(b"content-length: 80", b"content-length: eighty"),
    "two lengths": post().replace(b"host: x\r\n", b"host: x\r\ncontent-length: 3\r\n"),
    "length and chunks": post().replace(b"host: x\r\n", b"host: x\r\ntransfer-encoding: chunked\r\n"),
    "length beyond 64 bits": post(length=10**30),
    "bad chunk size": post(b"zz\r\n{}\r\n0\r\n\r\n", length=-1, transfer_encoding="chunked"),
    "negative chunk size": post(b"-5\r\n{}\r\n0\r\n\r\n", length=-1, transfer_encoding="chunked"),
    "zero in a header": b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\na\0b: c\r\n\r\n",
    "folded header": b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\n : y\r\n\r\n",
}


@pytest.mark.parametrize("data", NOT_HTTP.values(), ids=NOT_HTTP)
def test_what_is_not_http_is_refused_and_the_connection_ends(patient: Patient, data: bytes) -> None:
    with patient.connect() as client:
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)  # what ends too early to be refused must not hang either
        assert status_of(client) in (400, 404, 405, 413, 501, 505, None)
        assert status_of(client) is None


@pytest.mark.parametrize("announced", [33 * MB, 1 << 30, 1 << 62])
def test_a_body_that_is_too_large_is_refused_before_it_comes(patient: Patient, announced: int) -> None:
    with patient.bounded(8 * MB), patient.connect() as client:
        client.sendall(post(b"{", length=announced))
        assert status_of(client, 5) == 413


def test_a_chunked_body_without_end_is_refused(patient: Patient) -> None:
    with patient.bounded(160 * MB), patient.connect() as client:
        client.sendall(post(b"", length=-1, transfer_encoding="chunked"))
        piece = b"100000\r\n" + b" " * MB + b"\r\n"
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(128):
                client.sendall(piece)
        assert status_of(client) in (413, None)


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 413), ("deflate", 400), ("br", 415), ("zstd", 415), ("gzip, gzip", 415)]
)
def test_a_bomb_is_opened_up_to_the_limit_of_bodies_at_most(patient: Patient, encoding: str, status: int) -> None:
    bomb = gzip.compress(b"\0" * (640 * MB))
    with patient.bounded(96 * MB):
        assert patient.sent(post(bomb, content_encoding=encoding)) == status


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\n", b"x-filler: " + b"y" * 8000 + b"\r\n"),
        (b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\nx-filler: ", b"y" * 8000),
        (b"POST /", b"a" * 8000),
        (b"", b"A" * 8000),
    ],
    ids=["lines", "header", "target", "method"],
)
def test_a_head_without_end_is_refused(patient: Patient, begin: bytes, more: bytes) -> None:
    """Within a megabyte: a parser keeps what it is given, and some of it costs time that grows with its square."""
    with patient.bounded(16 * MB), patient.connect() as client:
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(begin)
            for _ in range(MB // len(more)):
                client.sendall(more)
        assert status_of(client) in (400, 414, 431, None)


def test_a_body_shorter_than_announced_gets_no_answer_of_success(patient: Patient) -> None:
    assert patient.sent(post(length=len(GOOD) + 10), half_close=True) in (400, 408, None)


def test_what_follows_a_body_longer_than_announced_is_not_its_request(patient: Patient) -> None:
    with patient.connect() as client:
        client.sendall(post(length=len(GOOD) - 1))
        assert status_of(client) == 400


def test_pipelined_requests_are_answered_in_their_order(patient: Patient) -> None:
    bodies = [json.dumps({"id": str(n), "inputs": [{**X, "data": [n, -n]}]}).encode() for n in range(200)]
    requests = [
        post(chunked(b, 11), length=-1, transfer_encoding="chunked") if n % 3 == 0 else post(b)
        for n, b in enumerate(bodies)
    ]
    with patient.connect() as client:
        client.sendall(b"".join(requests))
        answers = answers_of(client, len(bodies))
    assert [status for status, _ in answers] == [200] * len(bodies)
    documents = [json.loads(body) for _, body in answers]
    assert [d["id"] for d in documents] == [str(n) for n in range(200)]
    assert [d["outputs"][0]["data"] for d in documents] == [[2.0 * n, -2.0 * n] for n in range(200)]


def test_good_and_bad_requests_share_a_connection(patient: Patient) -> None:
    with patient.connect() as client:
        client.sendall(post(b"{") + post() + post(path="/v2/models/z/infer") + post())
        assert [status for status, _ in answers_of(client, 4)] == [400, 200, 404, 200]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_request_may_come_in_fragments(patient: Patient, size: int) -> None:
    for data in (post(), post(chunked(GOOD, 7), length=-1, transfer_encoding="chunked")):
        with patient.connect() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(data), size):
                client.sendall(data[start : start + size])
            assert answers_of(client, 1)[0][0] == 200


def test_chunks_may_have_extensions_and_trailers(patient: Patient) -> None:
    body = b"%x;a=b\r\n%s\r\n0\r\nx-trailer: y\r\n\r\n" % (len(GOOD), GOOD)
    assert patient.sent(post(body, length=-1, transfer_encoding="chunked")) == 200


def test_who_asks_whether_to_go_on_is_told(patient: Patient) -> None:
    with patient.connect() as client:
        client.sendall(post(b"", length=len(GOOD), expect="100-continue"))
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(GOOD)
        assert answers_of(client, 1)[0][0] == 200


@pytest.mark.parametrize("data", [post().replace(b"HTTP/1.1", b"HTTP/1.0"), post(connection="close")])
def test_who_wants_the_connection_closed_gets_an_answer_and_its_end(patient: Patient, data: bytes) -> None:
    with patient.connect() as client:
        client.sendall(data)
        assert answers_of(client, 1)[0][0] == 200
        assert status_of(client) is None


def test_thousands_of_random_requests_leave_no_trace(patient: Patient) -> None:
    """Good requests with a few bytes changed: any answer but a server's error will do."""
    draw = random.Random(11)  # noqa: S311
    with patient.bounded(64 * MB):
        for _ in range(1000):
            data = bytearray(post())
            for _ in range(draw.randint(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            status = patient.sent(bytes(data), half_close=True)
            assert status is None or status < 500, bytes(data)
