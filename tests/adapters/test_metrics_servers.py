"""Counts of endpoint servers as a rollout's metrics.

They come from one server, or from several servers with common users.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.adapters.metrics.servers import MAX_COUNTS_BYTES, VARIABLE, SeveralServers
from onnx_ops.adapters.server_metrics import ServerMetrics
from onnx_ops.domain.endpoint import EndpointConfig, EndpointState, TrafficSplit
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    USER_BLOCKS,
    EpochUnits,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ShadowCounts,
    UnitCounts,
)
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES
from onnx_ops.errors import ServiceUnavailableError, UserError
from onnx_ops.protocol.messages import (
    KEYLESS_CELL,
    Counts,
    EpochCounts,
    UserCountsRequest,
    encode_cells,
)
from onnx_ops.protocol.routing_table import build_next_table
from onnx_ops.protocol.server_process import TOKEN_FILE
from onnx_ops.serving import metrics, rollout_counts
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import BOUNDS_S, EPOCH, SharedMetrics, count_request
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.adapters.endpoint_site import make_config
from tests.support.endpoints import fileless_deployment
from tests.support.must import must
from tests.support.processes import until
from tests.support.server import ServerFamily

CONFIG = make_config("digits")
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
).encode()
WATCHED = {"blue": None, "green": None}


EPOCH_S = 0.25


def with_epochs(state: EndpointState) -> EndpointState:
    return replace(state, split=replace(state.split, epoch_s=EPOCH_S))


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerFamily]]:
    """Yield two servers with the same token and table.

    Blue and green share the traffic.
    """
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
            assert server.publish(with_epochs(state_of(*pair, blue=50, green=50)), 1).status == 200
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


def begin_counting(source: SeveralServers) -> None:
    """Wait until an epoch is counted from its beginning."""
    until(lambda: source.read(CONFIG, WATCHED).open_epoch is not None)


def read_units(source: SeveralServers, requests: int) -> tuple[EpochUnits, ...]:
    """Return the closed epochs with requests, after another epoch has closed.

    Assert that they count at most `requests` units.
    """
    until(lambda: count_units(source.read(CONFIG, WATCHED)) > 0)
    last = must(source.read(CONFIG, WATCHED).open_epoch).epoch
    reading = until(
        lambda: (
            each
            if must((each := source.read(CONFIG, WATCHED)).open_epoch).epoch > last + 1
            else None
        )
    )
    assert count_units(reading) <= requests
    return tuple(each for each in reading.epochs if each.units["errors"] != UnitCounts())


def count_units(reading: MetricsReading) -> int:
    return sum(
        sum(each.units["errors"].candidate) + sum(each.units["errors"].stable)
        for each in reading.epochs
    )


def test_several_servers_read_counts_common_user_once_and_refuses_repeated_server(
    servers: list[ServerFamily],
) -> None:
    source = source_of(servers)
    begin_counting(source)
    for turn in range(12):
        call(servers[turn % 2], "u", 1)
    epochs = read_units(source, 12)
    for each in epochs:
        assert each.generation == 1
        assert sum(each.units["errors"].candidate) + sum(each.units["errors"].stable) == 1
    reading = source.read(CONFIG, WATCHED)
    assert sum(tally.requests for each in reading.counts for tally in each.tallies.values()) == 12
    assert len({each.origin for each in reading.counts}) == 2
    counted = source.latencies(CONFIG, "blue")
    assert counted is not None
    assert len(counted[1]) == len(counted[0]) + 1
    port = servers[0].record().admin_port
    with pytest.raises(ServiceUnavailableError, match="the same server"):
        SeveralServers({"urls": [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]}).read(
            CONFIG, WATCHED
        )


def test_several_servers_read_with_unusable_server_or_token_raises_service_unavailable_error(
    servers: list[ServerFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(servers)
    begin_counting(source)
    call(servers[0], "u", 3)
    before = read_units(source, 3)
    state = must(servers[0].state())
    assert (
        servers[1]
        .publish(replace(state, split=replace(state.split, weights={"blue": 40, "green": 60})), 2)
        .status
        == 200
    )
    # This read happens while a table is published to the servers one after the other.
    source.read(CONFIG, WATCHED)
    assert (
        servers[0]
        .publish(replace(state, split=replace(state.split, weights={"blue": 30, "green": 70})), 2)
        .status
        == 200
    )
    with pytest.raises(ServiceUnavailableError, match="split users differently"):
        source.read(CONFIG, WATCHED)
    for server in servers:
        assert server.publish(state, 3).status == 200
    servers[1].stop()
    with pytest.raises(ServiceUnavailableError, match="the request to the server failed"):
        source.read(CONFIG, WATCHED)
    servers[1].start()
    again = source_of(servers)
    reading = until(lambda: each if (each := again.read(CONFIG, WATCHED)).epochs else None)
    assert [each for each in reading.epochs if each.units["errors"] != UnitCounts()] == list(
        before
    ), "the other server still knows its epochs"
    assert len({each.origin for each in reading.counts}) == 2
    monkeypatch.setenv(VARIABLE, "another")
    with pytest.raises(ServiceUnavailableError, match="401"):
        again.read(CONFIG, WATCHED)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ServiceUnavailableError, match=VARIABLE):
        again.read(CONFIG, WATCHED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"urls": "https://one.example"},
        {"urls": ["https://one.example", "https://one.example/"]},
        {"urls": ["http://one.example"]},
        {"urls": ["https://one.example"], "url": "x"},
    ],
)
def test_several_servers_with_wrong_options_raises_user_error(options: dict[str, str]) -> None:
    with pytest.raises(UserError):
        SeveralServers(options)


def test_max_counts_bytes_exceeds_size_of_stored_epochs() -> None:
    """The stored bytes become Base64 texts; the rest of the answer is small."""
    assert MAX_COUNTS_BYTES > rollout_counts._KEPT_BYTES + (16 << 20)


SLOTS = {"v1": 1, "v2": 2}
START = 1_000


class Server:
    """The counts of a real server, without its models; v2 is the candidate."""

    def __init__(self, *, epoch_s: float = 60.0, epoch: int = START) -> None:
        self.shared = SharedMetrics(2)
        self.counts = RolloutCounts(self.shared)
        self.workers = [CellCounter(self.shared, number) for number in range(2)]
        self.source = ServerMetrics(self._counts)
        split = TrafficSplit(weights={"v1": 90, "v2": 10}, epoch_s=epoch_s)
        deployments = tuple(map(fileless_deployment, split.weights))
        table = build_next_table(
            None, EndpointState(deployments=deployments, split=split, generation=7)
        )
        self.router = TrafficRouter.from_table(table)
        self.counts.start_table(TableRevision(number=1, table=table, slots=SLOTS), epoch * 60.0)

    def _counts(self, config: EndpointConfig, watch: UserCountsRequest | None) -> list[Counts]:
        assert config is CONFIG
        return [self.counts.collect(watch)]

    def read(self, limits: dict[str, LatencyThresholds | None] | None = None) -> MetricsReading:
        return self.source.read(CONFIG, {"v2": None, "v1": None} if limits is None else limits)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.counts.turn_epoch((self.shared.header[EPOCH] + 1) * 60.0)

    def answer(self, slot: int, status: int, seconds: float, times: int = 1) -> None:
        for turn in range(times):
            count_request(self.shared.get_row(turn % 2, slot), status, seconds)

    def count(
        self, slot: int, cell: int, status: int, seconds: float = 0.0, *, worker: int = 0
    ) -> None:
        self.workers[worker].count(
            self.router.get_draw(self.shared.header[EPOCH]), slot, cell, status, seconds
        )


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close epochs as soon as they are over and no request is in progress."""
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 0.0)


def units(*badness: float) -> tuple[int, ...]:
    """Return the units by bin of their badness."""
    bins = [next(k for k, edge in enumerate(BADNESS_EDGES) if each <= edge) for each in badness]
    return tuple(bins.count(k) for k in range(max(bins) + 1)) if bins else ()


def test_server_metrics_read_counts_errors_refusals_and_slow_answers() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 90)
    server.answer(1, 200, 0.02, 9)
    for status, times in (
        (500, 3),
        (429, 2),
        (504, 1),
        (418, 1),
        (422, 1),
        (400, 4),
        (499, 1),
        (200, 12),
    ):
        server.answer(2, status, 0.001, times)
    limits = LatencyThresholds(p50_s=BOUNDS_S[108], p99_s=BOUNDS_S[140], requests=500)
    assert BOUNDS_S[108] > 0.001
    (counts,) = server.read(dict.fromkeys(("v2", "v1"), limits)).counts
    assert (counts.origin, counts.generation) == (server.shared.origin, 7)
    assert counts.tallies == {
        "v1": RequestCounts(requests=99, over_p50=9, over_p99=9, timed=99),
        "v2": RequestCounts(requests=25, errors=8, refused=4, over_p50=0, over_p99=0, timed=25),
    }
    assert server.read({"v1": None, "unknown": None}).counts == (), (
        "a table without one of them is of no rollout"
    )


def test_server_metrics_read_returns_shadow_and_feedback_counts() -> None:
    server = Server()
    row = server.shared.get_row(1, 2)
    for column, number in (
        (metrics.SHADOW_DONE, 9),
        (metrics.SHADOW_DIFFERING, 2),
        (metrics.SHADOW_FAILED, 1),
    ):
        row[column] = number
    row[metrics.FEEDBACK], row[metrics.SUCCESSES] = 7, 5
    (counts,) = server.read().counts
    assert counts.shadow == ShadowCounts(compared=9, differing=2, failed=1)
    assert counts.tallies["v2"] == RequestCounts(feedback=7, successes=5, timed=0)


def test_server_metrics_read_with_fixed_thresholds_counts_exceedances() -> None:
    server = Server()
    server.answer(1, 200, 0.001, 300)
    server.answer(1, 200, 0.0021, 690)
    server.answer(1, 200, 0.1, 10)
    found = server.source.latencies(CONFIG, "v1")
    assert found is not None
    limits, slower = fix_thresholds(*found, {"latency_p50": 0.1, "latency_p99": 0.1})
    assert limits is not None
    assert slower is not None
    tally = server.read({"v2": None, "v1": limits}).counts[0].tallies["v1"]
    assert server.source.latencies(CONFIG, "unknown") is None
    assert limits.requests == 1000
    assert (tally.over_p50, tally.over_p99) == (700, 10)
    raised = [
        BOUNDS_S.index(after) - BOUNDS_S.index(before)
        for before, after in ((limits.p50_s, slower.p50_s), (limits.p99_s, slower.p99_s))
    ]
    assert raised == [2, 2], "16 bounds a doubling: the second one is 9 % higher"


def test_server_metrics_read_with_threshold_other_than_bound_counts_no_exceedances() -> None:
    server = Server()
    server.answer(1, 200, 0.001)
    limits = LatencyThresholds(p50_s=0.0011, p99_s=5e9, requests=1)
    tally = server.read({"v2": None, "v1": limits}).counts[0].tallies["v1"]
    assert (tally.over_p50, tally.over_p99) == (None, None)


def test_server_metrics_read_of_new_server_has_own_origin_and_counts() -> None:
    server, again = Server(), Server()
    server.answer(1, 200, 0.001, 5)
    again.answer(1, 500, 0.001, 2)
    readings = [each.read().counts[0] for each in (server, again)]
    assert len({each.origin for each in readings}) == 2
    assert [each.tallies["v1"] for each in readings] == [
        RequestCounts(requests=5, timed=5),
        RequestCounts(requests=2, errors=2, timed=2),
    ]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.0003, 29.0, 400.0])
def test_server_metrics_latencies_count_each_request_in_one_bucket(seconds: float) -> None:
    server = Server()
    server.answer(1, 200, seconds)
    found = server.source.latencies(CONFIG, "v1")
    assert found is not None
    assert sum(found[1]) == 1


def test_server_metrics_read_counts_units_by_cell_or_request() -> None:
    server = Server()
    slow = LatencyThresholds(p50_s=BOUNDS_S[100], p99_s=BOUNDS_S[150], requests=500)
    limits: dict[str, LatencyThresholds | None] = {
        "v2": replace(slow, p50_s=BOUNDS_S[110], p90_s=BOUNDS_S[120], p95_s=BOUNDS_S[121]),
        "v1": replace(slow, p90_s=BOUNDS_S[110]),
    }
    server.count(1, 5, 200, 1.0)
    begun = must(server.read(limits).open_epoch)
    assert begun.units["errors"] == UnitCounts(candidate=(), stable=()), (
        "nothing was asked for by then"
    )
    server.turn()
    for worker in range(2):  # requests of the same user come to both workers
        server.count(2, 7, 500, worker=worker)
        server.count(2, 7, 200, BOUNDS_S[115], worker=worker)
    server.count(1, 8, 400, BOUNDS_S[105])
    server.count(1, 9, 200, BOUNDS_S[100])
    for status, seconds in ((422, BOUNDS_S[100]), (200, 0.0), (200, BOUNDS_S[101])):
        server.count(1, KEYLESS_CELL, status, seconds, worker=1)
    opened = must(server.read(limits).open_epoch)
    server.turn()
    server.count(2, 7, 200)
    _, epoch = server.read(limits).epochs
    assert epoch == opened
    assert (epoch.generation, epoch.epoch) == (7, START + 1)
    assert epoch.units == {
        "errors": UnitCounts(candidate=units(0.5), stable=units(0, 0, 0, 0, 1)),
        "refused": UnitCounts(candidate=units(0), stable=units(0, 1, 0, 0, 0)),
        "latency_p50": UnitCounts(candidate=units(1), stable=units(0, 1, 0, 1)),
        "latency_p90": UnitCounts(candidate=units(0), stable=units(0, 0, 0, 0)),
        "latency_p99": UnitCounts(candidate=units(0), stable=units(0, 0, 0, 0)),
    }, "there is no latency_p95: one of the versions has no such threshold"
    assert server.read({**limits, "v1": None}).epochs == (), "other thresholds begin anew"


def test_server_metrics_read_with_sticky_split_counts_users_by_block() -> None:
    server = Server(epoch_s=0.0)
    server.read()
    for cell, status in ((5, 200), (5 + USER_BLOCKS, 500), (6, 200), (KEYLESS_CELL, 500)):
        server.count(2, cell, status, worker=cell % 2)
    server.workers[0].count_feedback(server.router.get_draw(0), 1, 6, True)
    reading = server.read()
    (counts,) = reading.counts
    assert (reading.epochs, reading.open_epoch) == ((), None)
    candidate = counts.blocks["v2"]["errors"]
    assert [(k, n, candidate.events[k]) for k, n in enumerate(candidate.requests) if n] == [
        (5, 2, 1),
        (6, 1, 0),
        (USER_BLOCKS, 1, 1),
    ]
    feedback = counts.blocks["v1"]["feedback"]
    assert (sum(feedback.requests), feedback.events[6]) == (1, 1)


def test_server_metrics_read_counts_first_epoch_of_server() -> None:
    server = Server()
    server.read()
    server.count(2, 7, 500)
    server.turn()
    (epoch,) = server.read().epochs
    assert epoch.units["errors"] == UnitCounts(candidate=units(1), stable=())


def several(*servers: Server) -> MetricsReading:
    """Return the reading of several servers behind one address."""
    source = ServerMetrics(lambda _, request: [one.counts.collect(request) for one in servers])
    return source.read(CONFIG, {"v2": None, "v1": None})


def test_server_metrics_read_of_two_servers_adds_counts_before_forming_units() -> None:
    servers = [Server(), Server()]
    several(*servers)
    for number, server in enumerate(servers):
        server.turn()
        server.count(2, 7, 500 if number else 200)
        server.count(1, 8 + number, 200)
    servers[0].turn()
    assert [each.epoch for each in several(*servers).epochs] == [START], (
        "the other server has not closed the next one"
    )
    servers[1].turn()
    _, epoch = several(*servers).epochs
    assert epoch.units["errors"] == UnitCounts(candidate=units(0.5), stable=units(0, 0))
    servers[0].turn(2)
    servers[0].counts.collect()
    assert len(several(*servers).epochs) == 2


def test_server_metrics_read_of_repeated_server_counts_epoch_once() -> None:
    server, other = Server(), Server()
    several(server, other)
    for each in (server, other):
        each.turn()
        each.count(2, KEYLESS_CELL, 500)
        each.count(1, KEYLESS_CELL, 200)
        each.turn()
    _, epoch = several(server, other, server).epochs
    assert epoch.units["errors"] == UnitCounts(candidate=units(1, 1), stable=units(0, 0))


@pytest.mark.parametrize("lag", [-7200, -120, -1, 1, 120, 7200])
def test_server_metrics_read_of_server_with_wrong_clock_delays_no_other_server(lag: int) -> None:
    """One of three servers has a clock that is this many epochs ahead of the others."""
    servers = [Server(epoch=START + 10_000 + each) for each in (0, 0, lag)]
    several(*servers)
    for _ in range(10):
        for server in servers:
            server.turn()
            server.count(2, 7, 200)
            server.count(2, 8, 200)
    epochs = several(*servers).epochs
    ours = [each for each in epochs if START + 10_000 < each.epoch < START + 10_010]
    assert len(ours) >= 5
    assert {each.units["errors"] for each in ours} == {UnitCounts(candidate=units(0, 0))}, (
        "no user is a unit twice"
    )
    assert [each.epoch for each in epochs] == sorted({each.epoch for each in epochs})


def test_server_metrics_read_with_latency_places_counts_exceedances_by_user() -> None:
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
    limits_of: dict[str, LatencyThresholds | None] = {"v2": slower, "v1": limits}
    over = server.read(limits_of).counts[0].tallies["v1"].over()
    assert [over[place] / 1000 for place in LATENCY_PLACES] == pytest.approx(
        [1 - q for q in LATENCY_PLACES.values()], abs=0.02
    )
    server.turn()
    for seconds in (limits.places_s[0], *limits.places_s):
        server.count(1, 3, 200, seconds)
    server.count(2, 4, 200, 30.0)
    found_units = must(server.read(limits_of).open_epoch).units
    for place, exceeded in zip(LATENCY_PLACES, range(19, -1, -1), strict=True):
        assert found_units[place] == UnitCounts(candidate=units(1), stable=units(exceeded / 21)), (
            place
        )
    assert set(server.read({"v2": None, "v1": limits}).epochs) == set()


def test_server_metrics_read_with_invalid_cells_raises_service_unavailable_error() -> None:
    server = Server()
    counts = server.counts.collect()
    big = encode_cells(np.arange(10), np.zeros((10, 31), np.int64))
    for text in ("AAAA", "not base64", base64.b64encode(zlib.compress(b"short")).decode(), big):
        epoch = EpochCounts(generation=7, epoch=1, cells={"v1": text, "v2": text})
        answers = [
            replace(counts, epochs=(epoch,), closed_through=1),
            replace(counts, open_epoch=epoch),
        ]
        for answer in answers:
            source = ServerMetrics(lambda *_, answer=answer: [answer])
            with pytest.raises(ServiceUnavailableError):
                source.read(CONFIG, {"v2": None, "v1": None})
