"""The responses to requests do not depend on how their bytes are split.

This is also true for altered bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_ops.serving.inference.request_queue import LatencyEstimator
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body
from tests.serving.serving_worker import Worker, post
from tests.support.server import scaled

BODY = infer_body([1, 2])
PIN = {"azureml-model-deployment": "blue", "X-Request-Id": "r 1"}
CHUNKED = (
    b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (
        INFER.encode(),
        len(BODY),
        BODY,
    )
)
MESSAGES = (
    post(INFER, BODY, PIN),
    post(INFER, BODY),
    CHUNKED,
    post("/v2/health/live", b"", method="GET"),
    post("/unrouted", BODY),
    post("/invocations", b'{"instances": [[1, 2]]}', {"expect": "100-continue"}),
    post(INFER, BODY, {"connection": "upgrade", "upgrade": "h2c"}),
)
PIECES = (
    b"\r\n",
    b"\r\n\r\n",
    b": ",
    b"0",
    b"12",
    b"chunked",
    b"\0",
    b"\xff",
    b" ",
    b"GET ",
    b"Host: y\r\n",
    b"HTTP/1.0",
)
EDITS = st.lists(
    st.tuples(
        st.integers(0, 700),
        st.sampled_from(["insert", "delete", "replace"]),
        st.sampled_from(PIECES),
    ),
    max_size=3,
)


class Transport:
    """A transport that collects what is written, and refuses writes after its end."""

    def __init__(self) -> None:
        self.written = b""
        self.is_open = True

    def write(self, data: bytes) -> None:
        assert self.is_open
        self.written += data

    def close(self) -> None:
        self.is_open = False

    write_eof = abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def respond(worker: Worker, parts: list[bytes]) -> list[bytes]:
    """Return the responses to the parts of a connection, without their dates."""
    connection, transport = worker.build_connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    for part in parts:
        if part:
            connection.data_received(part)
    connection.connection_lost(None)
    assert worker.connections.body_bytes == 0
    assert not worker.connections.open
    written = re.sub(rb"date: [^\r]*\r\n", b"", transport.written)
    return written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")[1:]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return a worker that answers every request before `data_received` returns.

    The worker ignores run times. On a loaded machine the model can seem slow, and would then run on
    a thread. These tests do not await responses of threads.
    """
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatencyEstimator, "observe", lambda *_: None)
        worker = Worker(state_of(scaled(tmp_path_factory.mktemp("parts"), "blue"), blue=100))

        async def assemble() -> None:
            worker.assemble()
            worker.deployments.get_current()

        runner.run(assemble())
        yield worker


def test_connection_with_paused_writing_sends_responses_after_resume(worker: Worker) -> None:
    connection, transport = worker.build_connection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.pause_writing()
    connection.data_received(
        post(INFER, BODY) + post(INFER, BODY, {"connection": "close"}) + post(INFER, BODY)
    )
    assert transport.written == b""
    connection.resume_writing()
    assert transport.written.count(b"200 OK") == 2
    connection.pause_writing()
    connection.resume_writing()
    assert transport.written.count(b"200 OK") == 2
    assert not transport.is_open
    connection.connection_lost(None)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=4),
    EDITS,
    st.lists(st.integers(0, 1500), max_size=4),
)
def test_responses_to_split_requests_match_unsplit_requests(
    worker: Worker, messages: list[bytes], edits: list[tuple[int, str, bytes]], cuts: list[int]
) -> None:
    data = b"".join(messages)
    for place, how, piece in edits:
        rest = data[place + (0 if how == "insert" else len(piece)) :]
        data = data[:place] + (b"" if how == "delete" else piece) + rest
    ends = [0, *sorted(cuts), len(data)]
    whole = respond(worker, [data])
    assert respond(worker, [data[a:b] for a, b in pairwise(ends)]) == whole
    assert respond(worker, [bytes([byte]) for byte in data]) == whole
    if not edits:
        assert len(whole) == len(messages)
