"""Spans at an OTLP collector, and exemplars on the metrics page."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from onnx_ops import plugins
from onnx_ops.serving import main
from onnx_ops.serving.metrics import BOUNDS_S, MetricsPage, SharedMetrics, count_request
from tests.serving.serving_process import serving, wait_until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{CALLER}-{flags}" for flags in ("01", "00"))


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {
                    entry.key: entry.value.string_value for entry in resource.resource.attributes
                }
                found.services.add(named["service.name"])
                found.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield found
        server.shutdown()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_sampled_requests_have_spans_with_status_and_exemplars(
    tmp_path: Path, collector: Collector
) -> None:
    with serving(tmp_path, "--endpoint=digits", blue=100) as server:
        begun = time.time()  # noqa: TID251 (compared with times of spans)
        assert server.infer([1, 2], {"traceparent": SAMPLED, "x-request-id": "r1"}).status == 200
        assert server.infer([1, 2], {"traceparent": UNSAMPLED, "x-request-id": "r2"}).status == 200
        assert server.infer([1, 2], {"traceparent": "garbage", "x-request-id": "r3"}).status == 200
        assert (
            server.infer(
                ["a"], {"traceparent": SAMPLED, "x-request-id": "r4"}, "/invocations"
            ).status
            == 400
        )
        wait_until(lambda: len(collector.spans) >= 3)
        ended = time.time()  # noqa: TID251
        accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        page = server.call("GET", "/metrics", headers=accept)
        assert server.infer([1, 2], {"traceparent": SAMPLED, "x-request-id": "r5"}).status == 200
        # The server sends the remaining spans when it stops.
        assert server.stop() == 0
    spans = {attributes(span)["onnx_ops.request_id"]: span for span in collector.spans}
    assert sorted(spans) == ["r1", "r3", "r4", "r5"]
    assert collector.services == {"digits"}
    for name in ("r1", "r4", "r5"):
        assert (spans[name].trace_id.hex(), spans[name].parent_span_id.hex()) == (TRACE, CALLER)
    assert spans["r3"].parent_span_id == b""
    assert spans["r1"].name == "infer m"
    assert spans["r1"].kind == Span.SPAN_KIND_SERVER
    assert (
        begun
        <= spans["r1"].start_time_unix_nano / 1e9
        < spans["r1"].end_time_unix_nano / 1e9
        <= ended
    )
    known = attributes(spans["r1"])
    assert (known["http.response.status_code"], known["onnx_ops.deployment"]) == (200, "blue")
    assert attributes(spans["r4"])["http.response.status_code"] == 400
    # The error is the client's, so it is not an error of the span.
    assert spans["r4"].status.code == Status.STATUS_CODE_UNSET
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert exemplars(page.body.decode()) == {TRACE}


def exemplars(page: str) -> set[str]:
    """Return the traces on a page, and check that each latency is in its bucket."""
    traces = set()
    for family in text_string_to_metric_families(page):  # type: ignore[no-untyped-call]
        lower = 0.0
        for sample in family.samples:
            upper = float(sample.labels.get("le", "nan"))
            if sample.exemplar is not None:
                assert family.name == "onnx_ops_request_duration_seconds"
                assert (
                    (lower if lower < upper else 0.0) * (1 - 1e-5)
                    <= sample.exemplar.value
                    <= upper * (1 + 1e-5)
                )
                traces.add(sample.exemplar.labels["trace_id"])
            lower = upper
    return traces


def test_unreachable_span_collector_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    log = tmp_path / "access.jsonl"
    with serving(tmp_path, f"--access-log={log}", blue=100) as server:
        assert {server.infer([1, 2], {"traceparent": SAMPLED}).status for _ in range(50)} == {200}
        wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") == 50)


@pytest.mark.parametrize(
    "variable", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_spans_with_disabled_exporter_are_not_sent(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    with serving(tmp_path, blue=100) as server:
        assert server.infer([1, 2], {"traceparent": SAMPLED}).status == 200
        assert server.stop() == 0
    assert collector.spans == []


def test_server_start_without_otel_extra_exits_4_and_names_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(plugins.EXTRAS, "otel", ("opentelemetry-not-there",))
    assert main.main([f"--state-dir={tmp_path / 'state'}", "--port=0"]) == 4
    assert "opentelemetry-not-there is not installed" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, 3), st.floats(0, 100), st.integers(1, 2**128 - 1)
        )
    )
)
def test_exemplars_show_last_trace_of_each_bucket_until_reset(
    requests: list[tuple[int, int, float, int]],
) -> None:
    shared = SharedMetrics(2)
    shared.set_labels(1, {"deployment": "blue"})
    shared.set_labels(2, {"deployment": "green"})
    last: dict[tuple[int, int], str] = {}
    for worker, slot, seconds, trace in requests:
        count_request(shared.get_row(worker, slot), 200, seconds)
        shared.get_exemplars(worker).put(slot, f"00-{trace:032x}-{CALLER}-01".encode(), seconds)
        shown = next(
            (k for k, bound in enumerate(BOUNDS_S[::8]) if seconds <= bound), len(BOUNDS_S[::8])
        )
        last[slot, shown] = f"{trace:032x}"
    page = MetricsPage(shared, "e").render(None, open_metrics=True)
    assert exemplars(page) == {trace for (slot, _), trace in last.items() if slot in (1, 2)}
    shared.reset_slot(1)
    page = MetricsPage(shared, "e").render(None, open_metrics=True)
    assert exemplars(page) == {trace for (slot, _), trace in last.items() if slot == 2}


@pytest.mark.parametrize(
    "header",
    [
        UNSAMPLED,
        SAMPLED.upper(),
        SAMPLED[:-3],
        f"{SAMPLED}-x",
        f"ff{SAMPLED[2:]}",
        f"00-{'0' * 32}-{CALLER}-01",
        "\xff",
        "1" * 55,
    ],
)
def test_exemplar_of_unsampled_or_invalid_traceparent_is_not_stored(header: str) -> None:
    shared = SharedMetrics(1)
    shared.set_labels(1, {"deployment": "blue"})
    shared.get_exemplars(0).put(1, header.encode("latin-1"), 0.001)
    assert exemplars(MetricsPage(shared, "e").render(None, open_metrics=True)) == set()


def test_openmetrics_page_has_same_numbers_as_plain_page() -> None:
    shared = SharedMetrics(1)
    shared.set_labels(1, {"deployment": "blue"})
    shared.get_exemplars(0).put(1, SAMPLED.encode(), 0.001)
    page = MetricsPage(shared, "e")
    plain, full = page.render(None), page.render(None, open_metrics=True)
    assert full.endswith("\n# EOF\n")
    numbers = [re.sub(r" # \{.*", "", line) for line in full.splitlines() if line[0] != "#"]
    assert numbers == [line for line in plain.splitlines() if line[0] != "#"]
