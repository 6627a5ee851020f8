"""Compressed requests and responses.

The tests cover every form of a body, hostile bodies, and what clients accept.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.serving import metrics
from onnx_ops.testing.endpoints import state_of
from tests.serving.inference.tensor_cases import binary
from tests.serving.serving_process import INFER, infer_body, mirrored, wait_until
from tests.serving.serving_worker import MAX_BODY, Gate, Worker, post
from tests.support.server import parse_answers, received, scaled

CODINGS: Mapping[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "gzip": (gzip.compress, gzip.decompress),
    "deflate": (zlib.compress, zlib.decompress),
}
BODY = infer_body([1, 2])
MANY = infer_body(*([n, 1] for n in range(20_000)))
"""A request whose response has about 300 KB."""
SOME = infer_body(*([n, 1] for n in range(3000)))
"""A request whose response has about 30 KB."""
ROWS, HEADER = binary(
    {"x": ("float32", np.arange(10_000, dtype=np.float32).reshape(-1, 2))},
    parameters={"binary_data_output": True},
)
FORMS: Mapping[str, tuple[str, bytes, dict[str, str]]] = {
    "JSON": (INFER, BODY, {}),
    "large JSON": (INFER, MANY, {}),
    "JSON of a version": ("/v2/models/m/versions/1/infer", SOME, {"x-request-id": "r-1"}),
    "binary": (INFER, ROWS, {"inference-header-content-length": str(HEADER)}),
    "raw": (INFER, ROWS[HEADER:], {"inference-header-content-length": "0"}),
    "SageMaker": (
        "/invocations",
        ROWS,
        {"content-type": f"application/vnd.sagemaker-triton.binary+json;json-header-size={HEADER}"},
    ),
    "instances": ("/invocations", json.dumps({"instances": [[1, 2]] * 3000}).encode(), {}),
    "CSV": ("/endpoints/e/invocations", b"a,b\n" + b"1,2\n" * 3000, {"content-type": "text/csv"}),
    "not JSON": (INFER, b"{", {}),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(
        state_of(scaled(tmp_path_factory.mktemp("models"), "blue"), blue=100)
    ).running() as running:
        yield running


@pytest.fixture(autouse=True)
def next_good_request_is_answered(worker: Worker) -> Iterator[None]:
    yield
    assert b'"data":[2.0,4.0]' in worker.send(post(INFER, BODY))
    wait_until(lambda: not worker.connections.open)
    assert worker.connections.body_bytes == 0


def parse(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and transmitted body of the first response."""
    first = parse_answers(answer)[0][0]
    return (
        first.status,
        {name: value for name, value in first.headers.items() if name != "date"},
        first.body,
    )


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("form", FORMS)
def test_compressed_request_body_returns_same_answer_as_plain_body(
    worker: Worker, form: str, coding: str
) -> None:
    path, body, headers = FORMS[form]
    encode, _ = CODINGS[coding]
    plain = parse(worker.send(post(path, body, headers)))
    for value in (coding, coding.upper(), f" {coding} "):
        assert (
            parse(worker.send(post(path, encode(body), {**headers, "content-encoding": value})))
            == plain
        )


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("form", FORMS)
def test_response_with_accept_encoding_is_compressed_if_large_and_keeps_content(
    worker: Worker, form: str, coding: str
) -> None:
    path, body, headers = FORMS[form]
    _, decode = CODINGS[coding]
    plain_status, plain_headers, plain = parse(worker.send(post(path, body, headers)))
    status, answered, sent = parse(
        worker.send(post(path, body, {**headers, "accept-encoding": coding}))
    )
    if len(plain) < 1 << 14:
        assert (status, answered, sent) == (plain_status, plain_headers, plain)
        return
    assert plain_headers["vary"] == "accept-encoding"
    assert "content-encoding" not in plain_headers
    assert int(answered["content-length"]) == len(sent) < len(plain)
    assert decode(sent) == plain
    same = {name: value for name, value in plain_headers.items() if name != "content-length"}
    assert {
        **same,
        "content-length": answered["content-length"],
        "content-encoding": coding,
    } == answered
    assert status == plain_status


def test_response_without_acceptable_coding_is_not_compressed(worker: Worker) -> None:
    plain = parse(worker.send(post(INFER, SOME)))
    assert parse(worker.send(post(INFER, SOME, {"accept-encoding": "gzip;q=0, br"}))) == plain


def test_coding_header_in_several_lines_is_read_as_one_list(worker: Worker) -> None:
    twice = {"accept-encoding": "br\r\naccept-encoding: deflate"}
    assert parse(worker.send(post(INFER, SOME, twice)))[1]["content-encoding"] == "deflate"
    twice = {"content-encoding": "identity\r\ncontent-encoding: gzip"}
    assert parse(worker.send(post(INFER, gzip.compress(BODY), twice)))[0] == 415


def test_response_that_compression_would_enlarge_is_sent_plain(worker: Worker) -> None:
    # The mask clears a bit of each exponent, so the body contains neither infinities nor NaN.
    noise = np.frombuffer(np.random.default_rng(7).bytes(32_000), np.uint32) & 0xBFFFFFFF
    headers = {"inference-header-content-length": "0", "accept-encoding": "gzip"}
    status, answered, body = parse(worker.send(post(INFER, noise.tobytes(), headers)))
    assert (status, answered["vary"], "content-encoding" in answered) == (
        200,
        "accept-encoding",
        False,
    )
    assert body.endswith((noise.view(np.float32) * np.float32(2)).tobytes())


def test_page_with_accept_encoding_is_compressed_for_get_and_head(worker: Worker) -> None:
    request = post("/openapi.json", b"", {"accept-encoding": "gzip"}, method="GET")
    status, headers, body = parse(worker.send(request))
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert "/v2/models/m/infer" in json.loads(gzip.decompress(body))["paths"]
    with worker.connect() as client:
        client.sendall(
            request.replace(b"GET", b"HEAD")
            + post("/ping", b"", {"connection": "close"}, method="GET")
        )
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
    first, second = data.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert b"content-encoding: gzip\r\n" in first
    assert first.endswith(b"\r\n\r\n")
    assert second.startswith(b"200")


@pytest.mark.parametrize("coding", CODINGS)
def test_compressed_body_above_limit_when_inflated_returns_413(worker: Worker, coding: str) -> None:
    encode, _ = CODINGS[coding]
    before = worker.shared.sum_slot(1)[metrics.get_column(413)]
    bomb = encode(bytes(MAX_BODY + 1))
    status, headers, body = parse(worker.send(post(INFER, bomb, {"content-encoding": coding})))
    assert status == 413
    assert f"larger than {MAX_BODY} bytes" in json.loads(body)["error"]
    # The server received the whole request, so the connection stays open.
    assert "connection" not in headers
    exactly = BODY + b" " * (MAX_BODY - len(BODY))
    assert parse(worker.send(post(INFER, encode(exactly), {"content-encoding": coding})))[0] == 200
    assert (
        parse(worker.send(post(INFER, encode(exactly + b" "), {"content-encoding": coding})))[0]
        == 413
    )
    assert worker.shared.sum_slot(1)[metrics.get_column(413)] == before + 2


def test_compressed_body_above_received_byte_limit_returns_413(worker: Worker) -> None:
    incompressible = np.random.default_rng(7).bytes(MAX_BODY + 1)
    answer = worker.send(post(INFER, gzip.compress(incompressible), {"content-encoding": "gzip"}))
    assert parse(answer)[0] == 413


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    # The cases are named because gzip writes the time into its header, and all workers of
    # pytest-xdist must collect the same ids.
    [
        pytest.param(gzip.compress(BODY)[:-1], "gzip", 400, id="without its last byte"),
        pytest.param(gzip.compress(b"") * 10_000, "gzip", 400, id="ten thousand empty streams"),
        pytest.param(gzip.compress(gzip.compress(BODY)), "gzip", 400, id="gzip in gzip"),
        pytest.param(gzip.compress(gzip.compress(BODY)), "gzip, gzip", 415, id="two codings"),
        pytest.param(BODY, "br", 415, id="brotli"),
        pytest.param(BODY, "", 415, id="no name"),
        pytest.param(BODY, "identity", 200, id="identity"),
        pytest.param(BODY, "Identity", 200, id="Identity"),
    ],
)
def test_body_with_broken_unsupported_or_identity_coding_returns_status_and_keeps_connection(
    worker: Worker, body: bytes, coding: str, status: int
) -> None:
    with worker.connect() as client:
        client.sendall(post(INFER, body, {"content-encoding": coding}))
        found, headers, answer = parse(received(client))
        assert (found, "connection" in headers) == (status, False), answer
        assert headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
        client.sendall(post(INFER, BODY))
        assert b'"data":[2.0,4.0]' in received(client)


def test_compressed_body_outside_inference_is_refused(worker: Worker) -> None:
    body = gzip.compress(b'{"feedback": []}')
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert parse(worker.send(post("/feedback", body, headers)))[0] == 415
    assert parse(worker.send(post("/unrouted", body, headers)))[0] == 404


def test_pipelined_compressed_and_plain_requests_are_answered_in_order(worker: Worker) -> None:
    compressed = {"content-encoding": "gzip", "accept-encoding": "gzip"}
    bodies = [gzip.compress(MANY), SOME, gzip.compress(BODY), MANY, gzip.compress(BODY)]
    requests = [
        post(INFER, body, compressed if body[:1] == b"\x1f" else {"accept-encoding": "deflate"})
        for body in bodies
    ]
    with worker.connect() as client:
        client.sendall(b"".join(requests))
        data = received(client, len(requests))
    sizes = []
    for answer in parse_answers(data)[0]:
        decode = (
            CODINGS[answer.headers["content-encoding"]][1]
            if "content-encoding" in answer.headers
            else bytes
        )
        sizes.append(json.loads(decode(answer.body))["outputs"][0]["shape"][0])
    assert sizes == [20_000, 3000, 1, 20_000, 1]


def test_queued_compressed_requests_run_one_by_one(blue: Deployment, gate: Gate) -> None:
    """Their inflated bodies are never in memory at the same time."""
    state = state_of(replace(blue, batchable=True), blue=100)
    with Worker(state, wrap=gate.wrap, slow=True).running() as worker:
        clients = [worker.connect() for _ in range(4)]
        try:
            for client in clients:
                client.sendall(post(INFER, gzip.compress(BODY), {"content-encoding": "gzip"}))
            assert gate.entered.acquire(timeout=30)
            gate.open.set()
            for client in clients:
                assert b'"data":[2.0,4.0]' in received(client)
        finally:
            for client in clients:
                client.close()
    assert gate.rows == [1, 1, 1, 1]


def test_disconnect_before_response_is_compressed_frees_connection(worker: Worker) -> None:
    for _ in range(5):
        with worker.connect() as client:
            client.sendall(post(INFER, MANY, {"accept-encoding": "gzip"}))
    wait_until(lambda: not worker.connections.open)


def test_shadow_of_compressed_request_receives_inflated_body(
    blue: Deployment, green: Deployment
) -> None:
    with Worker(mirrored(blue, green)).running() as worker:
        answer = worker.send(
            post(
                INFER, gzip.compress(SOME), {"content-encoding": "gzip", "accept-encoding": "gzip"}
            )
        )
        assert parse(answer)[1]["content-encoding"] == "gzip"
        wait_until(lambda: worker.shared.sum_slot(2)[metrics.SHADOW_DONE])
        # The factor differs, which shows that the request did not fail.
        assert worker.shared.sum_slot(2)[metrics.SHADOW_DIFFERING] == 1
        assert worker.shared.sum_slot(2)[metrics.SHADOW_FAILED] == 0
