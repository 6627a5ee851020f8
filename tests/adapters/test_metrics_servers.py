"""Counts of endpoint servers as a rollout's metrics: of one server, and of several with common users."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.metrics.servers import VARIABLE, SeveralServers
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observations import LatencyThresholds, RequestCounts, ShadowCounts, UnitSums, diff_readings
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.protocol.messages import KEYLESS_CELL, Counts, UserCountsRequest
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.serving import metrics
from onnx_ops.serving.metrics import BOUNDS_S, SharedMetrics, count_request
from onnx_ops.serving.rollout_counts import UserCounts, collect_counts
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.adapters.endpoint_site import make_config
from tests.support.server import ServerFamily

CONFIG = make_config("digits")
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()
WATCHED = {"blue": None, "green": None}


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerFamily]]:
    """Two servers with the same token and table; blue and green share the traffic."""
    monkeypatch.setenv(VARIABLE, "one for all")
    pair = [
        scaling_deployment(tmp_path / name, name=name, version=version, scale=2.0, model="m")
        for name, version in (("blue", "1"), ("green", "2"))
    ]
    found = [ServerFamily(folder=tmp_path / f"server-{number}") for number in range(2)]
    try:
        for server in found:
            server.folder.mkdir(mode=0o700)
            (server.folder / TOKEN_FILE).write_text("one for all")
            (server.folder / TOKEN_FILE).chmod(0o600)
            server.start()
            assert server.publish(state_of(*pair, blue=50, green=50), 1).status == 200
        yield found
    finally:
        for server in found:
            server.destroy()


def source_of(servers: list[ServerFamily]) -> SeveralServers:
    urls = [f"http://127.0.0.1:{server.record().admin_port}" for server in servers]
    return SeveralServers({"urls": list(urls)})


def call(server: ServerFamily, user: str, times: int) -> None:
    for _ in range(times):
        headers = {"content-type": "application/json", "x-user-key": user}
        assert server.call("POST", "/v2/models/m/infer", BODY, headers).status == 200


def test_users_of_both_servers_are_added_before_they_are_squared(servers: list[ServerFamily]) -> None:
    source = source_of(servers)
    assert source.read(CONFIG, WATCHED).units["errors"] == UnitSums()
    totals = {f"user-{number}": (number % 3, number % 5) for number in range(12)}
    for user, times in totals.items():
        for server, many in zip(servers, times, strict=True):
            call(server, user, many)
    reading = source.read(CONFIG, WATCHED)
    summed = [sum(times) for times in totals.values()]
    assert sum(tally.requests for tally in reading.tallies.values()) == sum(summed)
    found = reading.units["errors"]
    assert (found.requests, found.requests_squared) == (sum(summed), sum(n * n for n in summed))
    counted = source.latencies(CONFIG, "blue")
    assert counted is not None
    assert len(counted[1]) == len(counted[0]) + 1
    assert source.read(CONFIG, WATCHED).origin == reading.origin
    port = servers[0].record().admin_port
    with pytest.raises(ServiceUnavailableError, match="the same server"):
        SeveralServers({"urls": [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]}).read(CONFIG, WATCHED)


def test_a_server_that_cannot_be_counted_is_no_silence(
    servers: list[ServerFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(servers)
    call(servers[0], "u", 3)
    before = source.read(CONFIG, WATCHED)
    state = servers[0].state()
    assert state is not None
    blue, green = state.deployments
    assert servers[1].publish(state_of(blue, green, blue=40, green=60), 2).status == 200
    with pytest.raises(ServiceUnavailableError, match="split users differently"):
        source.read(CONFIG, WATCHED)
    assert servers[0].publish(state_of(blue, green, blue=40, green=60), 2).status == 200
    call(servers[0], "u", 2)
    assert source.read(CONFIG, WATCHED).units["errors"].requests_squared == 4
    servers[1].stop()
    with pytest.raises(ServiceUnavailableError, match="does not answer"):
        source.read(CONFIG, WATCHED)
    servers[1].start()
    call(servers[0], "u", 1)
    again = source_of(servers)
    after = again.read(CONFIG, WATCHED)
    assert after.origin != before.origin
    assert after.units["errors"] == UnitSums(), "else the first server's users would count in either epoch"
    monkeypatch.setenv(VARIABLE, "another")
    with pytest.raises(ServiceUnavailableError, match="401"):
        again.read(CONFIG, WATCHED)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ServiceUnavailableError, match=VARIABLE):
        again.read(CONFIG, WATCHED)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"urls": "https://one.example"},
        {"urls": ["https://one.example", "https://one.example/"]},
        {"urls": ["http://one.example"]},
        {"urls": ["https://one.example"], "url": "x"},
    ],
)
def test_settings_that_name_no_servers_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(UserError):
        SeveralServers(settings)


SLOTS = {"v1": 1, "v2": 2}


class Server:
    """The counts of a real server, without its models."""

    def __init__(self) -> None:
        self.shared = SharedMetrics(2)
        self.source = ServerMetrics(self._counts)

    def _counts(self, config: EndpointConfig, watch: UserCountsRequest | None) -> list[Counts]:
        assert config is CONFIG
        return [collect_counts(self.shared, SLOTS, watch)]

    def answer(self, slot: int, status: int, seconds: float, times: int = 1) -> None:
        for turn in range(times):
            count_request(self.shared.get_row(turn % 2, slot), status, seconds)


def test_a_reading_counts_failures_refusals_and_slow_answers() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 90)
    server.answer(1, 200, 0.02, 9)
    for status, times in ((500, 3), (429, 2), (504, 1), (418, 1), (422, 1), (400, 4), (499, 1), (200, 12)):
        server.answer(2, status, 0.001, times)
    limits = LatencyThresholds(p50_s=BOUNDS_S[108], p99_s=BOUNDS_S[140], requests=500)
    assert BOUNDS_S[108] > 0.001
    reading = server.source.read(CONFIG, {"v1": limits, "v2": limits})
    assert reading.tallies == {
        "v1": RequestCounts(requests=99, over_p50=9, over_p99=9, timed=99),
        "v2": RequestCounts(requests=25, errors=8, refused=4, over_p50=0, over_p99=0, timed=25),
    }
    assert server.source.read(CONFIG, {"v1": None, "unknown": None}).tallies == {
        "v1": RequestCounts(requests=99, timed=99)
    }


def test_copies_and_feedback() -> None:
    server = Server()
    row = server.shared.get_row(1, 2)
    for column, number in ((metrics.SHADOW_DONE, 9), (metrics.SHADOW_DIFFERING, 2), (metrics.SHADOW_FAILED, 1)):
        row[column] = number
    row[metrics.FEEDBACK], row[metrics.SUCCESSES] = 7, 5
    reading = server.source.read(CONFIG, {"v2": None, "v1": None})
    assert reading.shadow == ShadowCounts(compared=9, differing=2, failed=1)
    assert reading.tallies["v2"] == RequestCounts(feedback=7, successes=5, timed=0)


def test_thresholds_come_from_the_histogram_and_are_found_in_it_again() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 300)
    server.answer(1, 200, 0.0021, 690)
    server.answer(1, 200, 0.1, 10)
    found = server.source.latencies(CONFIG, "v1")
    assert found is not None
    limits, slower = fix_thresholds(*found, {"latency_p50": 0.1, "latency_p99": 0.1})
    assert limits is not None
    assert slower is not None
    (tally,) = server.source.read(CONFIG, {"v1": limits}).tallies.values()
    assert server.source.latencies(CONFIG, "unknown") is None
    assert limits.requests == 1000
    assert (tally.over_p50, tally.over_p99) == (700, 10)
    raised = [
        BOUNDS_S.index(after) - BOUNDS_S.index(before)
        for before, after in ((limits.p50_s, slower.p50_s), (limits.p99_s, slower.p99_s))
    ]
    assert raised == [2, 2], "16 bounds a doubling: the second one is 9 % higher"


def test_a_latency_that_is_no_bound_cannot_be_told() -> None:
    server = Server()
    server.answer(1, 200, 0.001)
    (tally,) = server.source.read(
        CONFIG, {"v1": LatencyThresholds(p50_s=0.0011, p99_s=5e9, requests=1)}
    ).tallies.values()
    assert (tally.over_p50, tally.over_p99) == (None, None)


def test_a_restart_makes_no_interval() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 5)
    first = server.source.read(CONFIG, {"v1": None})
    server.answer(1, 500, 0.001, 2)
    second = server.source.read(CONFIG, {"v1": None})
    server.shared = SharedMetrics(2)
    server.answer(1, 200, 0.001, 50)
    third = server.source.read(CONFIG, {"v1": None})
    found = diff_readings(first, second, step=0, stable="v1", candidate="v2")
    assert found is not None
    assert found.stable == RequestCounts(requests=2, errors=2, timed=2)
    assert diff_readings(second, third, step=0, stable="v1", candidate="v2") is None


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.0003, 29.0, 400.0])
def test_every_request_is_in_one_bucket(seconds: float) -> None:
    server = Server()
    server.answer(1, 200, seconds)
    found = server.source.latencies(CONFIG, "v1")
    assert found is not None
    assert sum(found[1]) == 1


def test_requests_are_counted_by_user_once_a_reading_asked_for_it() -> None:
    server = Server()
    workers = [UserCounts(server.shared, number) for number in range(2)]
    slow = LatencyThresholds(p50_s=BOUNDS_S[100], p99_s=BOUNDS_S[150], requests=500)
    limits = {
        "v1": replace(slow, p90_s=BOUNDS_S[110]),
        "v2": replace(slow, p50_s=BOUNDS_S[110], p90_s=BOUNDS_S[120], p95_s=BOUNDS_S[121]),
    }
    workers[0].count_request(1, 5, 200, 1.0)
    assert server.source.read(CONFIG, limits).units["errors"] == UnitSums(), "nothing was asked for by then"
    for worker in workers:  # a user whose requests come to either worker
        worker.count_request(2, 7, 500, 0.0)
        worker.count_request(2, 7, 200, BOUNDS_S[115])
    workers[0].count_request(1, 7, 200, BOUNDS_S[105])
    for seconds in (BOUNDS_S[100], 0.0):
        workers[1].count_request(1, KEYLESS_CELL, 422, seconds)
    workers[1].count_feedback(1, 3, True)
    workers[1].count_feedback(3, 3, True)
    found = server.source.read(CONFIG, limits).units
    assert found["errors"] == sums((4, 2), (1, 0), (1, 1), (1, 1))
    assert found["latency_p50"] == sums((2, 2), (1, 1), (1, 0))
    assert found["latency_p90"] == sums((2, 0), (1, 0), (1, 0))
    assert found["feedback"] == sums((1, 1))
    assert "latency_p95" not in found, "one of the versions has no such threshold"
    begun = server.source.read(CONFIG, {**limits, "v1": None})
    assert begun.units["errors"] == UnitSums(), "another watch begins anew, before a worker has seen it"
    workers[0].count_request(2, 7, 200, 0.0)
    assert server.source.read(CONFIG, {**limits, "v1": None}).units["errors"] == sums((1, 0))
    again = UserCounts(server.shared, 0)
    again.count_request(2, 7, 200, 0.0)
    assert server.source.read(CONFIG, {**limits, "v1": None}).units["errors"] == sums((2, 0)), "of a worker that died"


def test_the_whole_distribution_is_read_off_and_counted_by_user() -> None:
    server = Server()
    for number in range(1000):
        server.answer(1, 200, 0.001 * 1.002**number)
    found = server.source.latencies(CONFIG, "v1")
    assert found is not None
    limits, slower = fix_thresholds(
        *found, {**dict.fromkeys(LATENCY_QUANTILES, 0.3), **dict.fromkeys(LATENCY_PLACES, 0.1)}
    )
    assert limits is not None
    assert slower is not None
    assert list(limits.places_s) == sorted(limits.places_s)
    assert len(set(limits.places_s)) == len(LATENCY_PLACES)
    reading = server.source.read(CONFIG, {"v1": limits, "v2": slower})
    over = reading.tallies["v1"].over()
    assert [over[place] / 1000 for place in LATENCY_PLACES] == pytest.approx(
        [1 - q for q in LATENCY_PLACES.values()], abs=0.02
    )
    worker = UserCounts(server.shared, 0)
    for seconds in (limits.places_s[0], *limits.places_s):
        worker.count_request(1, 3, 200, seconds)
    worker.count_request(2, 4, 200, 30.0)
    collect_counts = server.source.read(CONFIG, {"v1": limits, "v2": slower}).units
    for place, exceeded in zip(LATENCY_PLACES, range(19, -1, -1), strict=True):
        assert collect_counts[place] == sums((21, exceeded), (1, 1)), place
    assert "latency@p50" not in server.source.read(CONFIG, {"v1": limits, "v2": None}).units


def test_an_answer_that_holds_no_cells_is_refused() -> None:
    server = Server()
    (counts,) = server._counts(CONFIG, None)
    for text in ("AAAA", "not base64", base64.b64encode(zlib.compress(b"short")).decode()):
        one = replace(counts.deployments["v1"], users=text)
        source = ServerMetrics(lambda *_, one=one: [replace(counts, deployments={"v1": one})])
        with pytest.raises(ServiceUnavailableError):
            source.read(CONFIG, {"v1": None})


def sums(*units: tuple[int, int]) -> UnitSums:
    return UnitSums(
        requests=sum(n for n, _ in units),
        events=sum(e for _, e in units),
        requests_squared=sum(n * n for n, _ in units),
        events_squared=sum(e * e for _, e in units),
        products=sum(n * e for n, e in units),
    )
