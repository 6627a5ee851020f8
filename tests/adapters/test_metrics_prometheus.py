"""Counts from Prometheus.

A real HTTP server answers as Prometheus does, from the metrics pages of real counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from onnx_ops.adapters.metrics.prometheus import PrometheusMetrics
from onnx_ops.domain.quantities import Json
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    RequestCounts,
    ShadowCounts,
    diff_readings,
)
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.serving import metrics
from onnx_ops.serving.metrics import BOUNDS_S, STEPS, MetricsPage, SharedMetrics, count_request
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.testing.notifiers import ReceivedRequest, Reply, WebhookSink
from tests.adapters.endpoint_site import make_config

CONFIG = make_config("digits")
SHOWN = BOUNDS_S[:: STEPS // 2]
FAST, SLOW = SHOWN[10], SHOWN[20]
THRESHOLDS = LatencyThresholds(p50_s=SHOWN[12], p99_s=SHOWN[18], requests=1000)
SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Scraped:
    """A fake Prometheus that has scraped instances of an endpoint.

    It records its queries. The last scrape was at `at`. The scrape of an instance was earlier by
    its number of seconds in `older_s`.
    """

    def __init__(self, instances: int = 1) -> None:
        self.instances = {f"host-{n}:8000": self.start() for n in range(instances)}
        self.at = 1_700_000_000.0
        self.older_s: dict[str, float] = {}
        self.renamed: dict[str, str] = {}
        self.more: dict[str, object] = {}
        self.queries: list[str] = []
        self.requests: list[ReceivedRequest] = []

    def start(self) -> SharedMetrics:
        shared = SharedMetrics(1)
        for slot in (1, 2):
            shared.set_labels(
                slot, {"deployment": f"v{slot}", "version": str(slot), "variant": "fp32"}
            )
        return shared

    def answer(
        self, slot: int, status: int, seconds: float, times: int = 1, instance: int = 0
    ) -> None:
        shared = list(self.instances.values())[instance]
        for _ in range(times):
            count_request(shared.get_row(0, slot), status, seconds)

    def __call__(self, letter: ReceivedRequest) -> Reply:
        self.requests.append(letter)
        (query,) = parse_qs(urlsplit(letter.path).query)["query"]
        self.queries.append(query)
        found = [*self.samples()]
        return Reply(
            document={
                "status": "success",
                "data": {"resultType": "vector", "result": found},
                **self.more,
            }
        )

    def samples(self) -> Iterator[dict[str, object]]:
        for instance, shared in self.instances.items():
            for line in MetricsPage(shared, "digits").render(None).splitlines():
                if (found := SAMPLE.fullmatch(line)) is None:
                    continue
                labels = {
                    self.renamed.get(key, key): value for key, value in LABEL.findall(found[2])
                }
                metric = {"__name__": found[1], "instance": instance, **labels}
                yield {"metric": metric, "value": [self.at + 7, found[3]]}
                if found[1] == "onnx_ops_server_info":
                    del metric["__name__"]
                    at = self.at - self.older_s.get(instance, 0.0)
                    yield {
                        "metric": {**metric, "onnx_ops_scraped": "yes"},
                        "value": [self.at + 7, str(at)],
                    }
                    metric["__name__"] = "onnx_ops_server_info"


@pytest.fixture(autouse=True)
def no_token_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONNX_OPS_PROMETHEUS_TOKEN", raising=False)


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


@pytest.fixture
def inbox(scraped: Scraped) -> Iterator[WebhookSink]:
    with WebhookSink(scraped).open() as inbox:
        yield inbox


@pytest.fixture
def source(inbox: WebhookSink) -> PrometheusMetrics:
    return PrometheusMetrics({"url": inbox.url})


def test_prometheus_read_returns_requests_errors_and_exceedances(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    scraped.answer(1, 200, FAST, 90)
    scraped.answer(1, 200, SLOW, 5)
    scraped.answer(1, 503, FAST, 3)
    scraped.answer(1, 422, FAST, 1)
    scraped.answer(1, 400, FAST, 1)
    scraped.answer(2, 200, SLOW, 7)
    reading = source.read(CONFIG, {"v1": THRESHOLDS, "v2": THRESHOLDS})
    assert reading.tallies == {
        "v1": RequestCounts(requests=100, errors=4, refused=1, over_p50=5, over_p99=5, timed=100),
        "v2": RequestCounts(requests=7, errors=0, over_p50=7, over_p99=7, timed=7),
    }
    assert reading.at == scraped.at, "when it was scraped, not when it was asked"


def test_prometheus_read_of_all_metrics_sends_one_query(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    source.read(CONFIG, {"v1": THRESHOLDS})
    (query,) = scraped.queries
    assert query == (
        'onnx_ops_server_info{endpoint="digits"} or '
        'label_replace(timestamp(onnx_ops_server_info{endpoint="digits"}), '
        '"onnx_ops_scraped", "yes", "", "") or {__name__=~"onnx_ops_requests_total|'
        "onnx_ops_service_duration_seconds_bucket|"
        "onnx_ops_shadow_answered_total|onnx_ops_shadow_differing_total|onnx_ops_shadow_failed_total|"
        'onnx_ops_feedback_total|onnx_ops_feedback_successes_total",endpoint="digits"}'
    )


def test_prometheus_read_returns_shadow_and_feedback_counts(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    (shared,) = scraped.instances.values()
    scraped.answer(2, 200, FAST, 40)
    for column, count in (
        (metrics.SHADOW_DONE, 30),
        (metrics.SHADOW_DIFFERING, 4),
        (metrics.SHADOW_FAILED, 2),
        (metrics.FEEDBACK, 20),
        (metrics.SUCCESSES, 15),
    ):
        shared.get_row(0, 2)[column] += count
    reading = source.read(CONFIG, {"v1": None, "v2": None})
    assert reading.shadow == ShadowCounts(compared=30, differing=4, failed=2)
    assert (reading.tallies["v2"].feedback, reading.tallies["v2"].successes) == (20, 15)
    assert source.capabilities() == {"exceedances", "shadow", "feedback"}


def test_prometheus_read_adds_instances_and_changes_origin_on_restart() -> None:
    scraped = Scraped(instances=2)
    with WebhookSink(scraped).open() as inbox:
        source = PrometheusMetrics({"url": inbox.url})
        scraped.answer(1, 200, FAST, 10, instance=0)
        scraped.answer(1, 200, FAST, 20, instance=1)
        before = source.read(CONFIG, {"v1": THRESHOLDS})
        assert before.tallies["v1"].requests == 30
        scraped.answer(1, 500, FAST, 4, instance=1)
        again = source.read(CONFIG, {"v1": THRESHOLDS})
        found = diff_readings(before, again, step=0, stable="v1", candidate="v2")
        assert found is not None
        assert found.stable == RequestCounts(requests=4, errors=4, over_p50=0, over_p99=0, timed=4)
        scraped.instances["host-0:8000"] = scraped.start()
        after = source.read(CONFIG, {"v1": THRESHOLDS})
        assert after.origin != before.origin
        assert diff_readings(again, after, step=0, stable="v1", candidate="v2") is None
        del scraped.instances["host-0:8000"]
        assert source.read(CONFIG, {"v1": THRESHOLDS}).origin not in (before.origin, after.origin)


@pytest.mark.parametrize("older", ["host-0:8000", "host-1:8000"])
def test_prometheus_read_of_two_instances_returns_time_of_oldest_scrape(older: str) -> None:
    scraped = Scraped(instances=2)
    scraped.older_s[older] = 15.0
    with WebhookSink(scraped).open() as inbox:
        assert (
            PrometheusMetrics({"url": inbox.url}).read(CONFIG, {"v1": None}).at == scraped.at - 15.0
        )


def test_prometheus_latencies_give_thresholds_at_which_read_counts_exceedances(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    assert source.latencies(CONFIG, "v9") is None
    scraped.answer(1, 200, FAST, 990)
    scraped.answer(1, 200, SLOW, 10)
    found = source.latencies(CONFIG, "v1")
    assert found is not None
    bounds, counts = found
    assert (len(counts), sum(counts)) == (len(bounds) + 1, 1000)
    thresholds, _ = fix_thresholds(bounds, counts, {})
    assert thresholds is not None
    tally = source.read(CONFIG, {"v1": thresholds}).tallies["v1"]
    assert tally.over_p99 is not None
    assert tally.over_p50 is not None


def test_prometheus_read_with_threshold_between_buckets_counts_no_exceedances_for_it(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    scraped.answer(1, 200, FAST)
    between = LatencyThresholds(p50_s=SHOWN[12] * 1.1, p99_s=SHOWN[18], requests=1000)
    tally = source.read(CONFIG, {"v1": between}).tallies["v1"]
    assert (tally.over_p50, tally.over_p99) == (None, 0)


def test_prometheus_read_with_renamed_labels_uses_label_and_select_options(
    scraped: Scraped, inbox: WebhookSink
) -> None:
    scraped.renamed = {"endpoint": "exported_endpoint", "deployment": "release", "status": "code"}
    scraped.answer(1, 500, FAST, 3)
    options: dict[str, Json] = {
        "url": inbox.url,
        "endpoint_label": "exported_endpoint",
        "deployment_label": "release",
        "status_label": "code",
        "select": {"job": "serving", "namespace": '"prod\\'},
    }
    reading = PrometheusMetrics(options).read(CONFIG, {"v1": None})
    assert reading.tallies["v1"] == RequestCounts(requests=3, errors=3, timed=3)
    assert (
        'onnx_ops_server_info{exported_endpoint="digits",job="serving",namespace="\\"prod\\\\"}'
        in scraped.queries[0]
    )


def test_prometheus_read_of_other_server_uses_configured_series(inbox: WebhookSink) -> None:
    def answer(letter: ReceivedRequest) -> Reply:
        (query,) = parse_qs(urlsplit(letter.path).query)["query"]
        assert query.startswith('process_start_time_seconds{job="triton"} or ')
        assert "onnx_ops_shadow" not in query
        rows = [
            ({"__name__": "process_start_time_seconds", "job": "triton"}, "1.7e+09"),
            ({"onnx_ops_scraped": "yes", "job": "triton"}, "100.5"),
            ({"__name__": "calls_total", "deployment": "v1", "status": "200"}, "1e+03"),
            ({"__name__": "calls_total", "deployment": "v1", "status": "503"}, "7"),
            ({"__name__": "call_seconds_bucket", "deployment": "v1", "le": "0.1"}, "900"),
            ({"__name__": "call_seconds_bucket", "deployment": "v1", "le": "+Inf"}, "1007"),
        ]
        result = [{"metric": metric, "value": [107.0, value]} for metric, value in rows]
        return Reply(
            document={"status": "success", "data": {"resultType": "vector", "result": result}}
        )

    inbox.answer = answer
    source = PrometheusMetrics(
        {
            "url": inbox.url,
            "requests": "calls_total",
            "histogram": "call_seconds",
            "origin": "process_start_time_seconds",
            "select": {"job": "triton"},
        }
    )
    reading = source.read(CONFIG, {"v1": LatencyThresholds(p50_s=0.1, p99_s=0.1, requests=1000)})
    assert reading.at == 100.5
    assert reading.tallies == {
        "v1": RequestCounts(requests=1007, errors=7, over_p50=107, over_p99=107, timed=1007)
    }
    assert source.capabilities() == {"exceedances"}


def test_prometheus_read_without_samples_raises_service_unavailable_error(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    scraped.instances = {}
    with pytest.raises(ServiceUnavailableError, match="has no samples"):
        source.read(CONFIG, {"v1": None})


def test_prometheus_read_with_partial_answer_raises_service_unavailable_error(
    scraped: Scraped, source: PrometheusMetrics
) -> None:
    scraped.more = {"warnings": ["a store is down"]}
    with pytest.raises(ServiceUnavailableError, match="returned warnings"):
        source.read(CONFIG, {"v1": None})


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=500),
        Reply(status=400, document={"status": "error", "error": "parse error"}),
        Reply(status=302, headers={"Location": "https://elsewhere.example"}),
        Reply(document=[]),
        Reply(document="hello"),
        Reply(document={"status": "success"}),
        Reply(document={"data": {"result": 3}}),
        Reply(document={"data": {"result": [{"metric": {}, "value": [1, "NaN"]}]}}),
        Reply(document={"data": {"result": [{"metric": 3}]}}),
    ],
)
def test_prometheus_read_with_wrong_reply_raises_service_unavailable_error(
    inbox: WebhookSink, source: PrometheusMetrics, reply: Reply
) -> None:
    inbox.answer = lambda _: reply
    with pytest.raises(ServiceUnavailableError):
        source.read(CONFIG, {"v1": None})


def test_prometheus_read_with_token_sends_authorization_header(
    scraped: Scraped, source: PrometheusMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_OPS_PROMETHEUS_TOKEN", "hidden")
    source.read(CONFIG, {"v1": None})
    assert scraped.requests[-1].headers["authorization"] == "Bearer hidden"


def test_prometheus_read_with_token_over_http_to_remote_host_raises_user_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONNX_OPS_PROMETHEUS_TOKEN", "hidden")
    with pytest.raises(UserError, match="https"):
        PrometheusMetrics({"url": "http://prometheus.example"}).read(CONFIG, {"v1": None})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "missing key 'url'"),
        ({"url": "prometheus:9090"}, "is not an http address"),
        ({"url": "http://p", "histgram": "x"}, "did you mean 'histogram'"),
        ({"url": "http://p", "zzz": "x"}, "known keys: endpoint_label"),
        ({"url": "http://p", "requests": 'x{a="b"}'}, "is not the name of a metric"),
        ({"url": "http://p", "status_label": "a-b"}, "is not the name of a label"),
        ({"url": "http://p", "status_label": 3}, "status_label: expected a string"),
        ({"url": "http://p", "select": "job"}, "select: expected a mapping"),
    ],
)
def test_prometheus_metrics_with_wrong_options_raise_user_error(
    options: dict[str, str | int], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        PrometheusMetrics(options)
    assert expected in str(caught.value)
