"""The server's own counts as a source: what its pages say, and what they say after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from onnx_ops.adapters.metrics.server import ServerMetrics
from onnx_ops.analysis.rollout import freeze
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observed import Tally, Thresholds, interval
from onnx_ops.errors import ServiceUnavailable
from onnx_ops.serving.metrics import Metrics
from onnx_ops.serving.shared import BOUNDS_S, Shared, observe
from onnx_ops.testing.fakes import FakeClock

CONFIG = EndpointConfig(
    endpoint="digits", provider="local", model="m", target="cpu", target_digest=digest_bytes(b"t"), pipeline="p"
)
NAMES = {1: "v1", 2: 'v"2\\'}


class Server:
    """The counts and the page of a real server, without its models."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.shared = Shared(2)
        for slot, name in NAMES.items():
            self.shared.set_label(slot, {"deployment": name, "version": str(slot), "variant": "fp32"})

    def answer(self, slot: int, status: int, seconds: float, times: int = 1) -> None:
        for turn in range(times):
            observe(self.shared.row(turn % 2, slot), status, seconds)

    @contextmanager
    def source(self, status: int = 200) -> Iterator[ServerMetrics]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = Metrics(server.shared, "digits").text(None).encode()
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
            threading.Thread(target=listener.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{listener.server_port}/v2/models/digits/infer"
            yield ServerMetrics(FakeClock(), lambda _: address)
            listener.shutdown()


def test_a_reading_counts_the_server_s_failures_and_slow_answers() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 90)
    server.answer(1, 200, 0.02, 9)
    server.answer(2, 500, 0.001, 3)
    server.answer(2, 400, 0.001, 4)
    server.answer(2, 200, 0.001, 13)
    limits = Thresholds(p50_s=BOUNDS_S[16], p99_s=BOUNDS_S[20], requests=500)
    with server.source() as source:
        reading = source.read(CONFIG, tuple(NAMES.values()), limits)
        bare = source.read(CONFIG, ("v1", "unknown"), None)
    assert reading.tallies == {
        "v1": Tally(requests=99, errors=0, over_p50=9, over_p99=9),
        'v"2\\': Tally(requests=20, errors=3, over_p50=0, over_p99=0),
    }
    assert bare.tallies == {"v1": Tally(requests=99)}


def test_thresholds_come_from_the_histogram_and_are_found_in_it_again() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 300)
    server.answer(1, 200, 0.0021, 690)
    server.answer(1, 200, 0.1, 10)
    with server.source() as source:
        found = source.latencies(CONFIG, "v1")
        assert found is not None
        limits = freeze(*found)
        assert limits is not None
        (tally,) = source.read(CONFIG, ("v1",), limits).tallies.values()
        assert source.latencies(CONFIG, "unknown") is None
    assert limits.requests == 1000
    assert tally.over_p50 == 700
    assert tally.over_p99 == 10


def test_a_latency_that_is_no_bound_cannot_be_told() -> None:
    server = Server()
    server.answer(1, 200, 0.001)
    with server.source() as source:
        (tally,) = source.read(CONFIG, ("v1",), Thresholds(p50_s=0.0011, p99_s=5e9, requests=1)).tallies.values()
    assert (tally.over_p50, tally.over_p99) == (None, None)


def test_a_restart_makes_no_interval() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 5)
    with server.source() as source:
        first = source.read(CONFIG, ("v1",), None)
        server.answer(1, 500, 0.001, 2)
        second = source.read(CONFIG, ("v1",), None)
        server.start()
        server.answer(1, 200, 0.001, 50)
        third = source.read(CONFIG, ("v1",), None)
    found = interval(first, second, step=0, stable="v1", candidate="v2")
    assert found is not None
    assert found.stable == Tally(requests=2, errors=2)
    assert interval(second, third, step=0, stable="v1", candidate="v2") is None


def test_a_server_that_does_not_answer_is_unavailable() -> None:
    with Server().source(status=503) as source, pytest.raises(ServiceUnavailable, match="no metrics"):
        source.read(CONFIG, ("v1",), None)
    with pytest.raises(ServiceUnavailable, match="no metrics"):
        source.read(CONFIG, ("v1",), None)
    nowhere = ServerMetrics(FakeClock(), lambda _: None)
    with pytest.raises(ServiceUnavailable, match="does not exist"):
        nowhere.latencies(CONFIG, "v1")
