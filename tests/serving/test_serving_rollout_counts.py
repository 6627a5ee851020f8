"""The counts that a rollout is judged by.

They are divided by generation of the table, by epoch, and by cell of users.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.rollout_policy import COLD_START_SAMPLES
from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_FEEDBACK,
    CELL_LATENCIES,
    CELL_REFUSED,
    CELL_REQUESTS,
    CELL_SUCCESSES,
    CELLS,
    COUNTS_PATH,
    KEYLESS_CELL,
    EpochCounts,
    UserCountsRequest,
    decode_cells,
    encode_cells,
)
from onnx_ops.protocol.routing_table import build_next_table
from onnx_ops.serving import rollout_counts
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.traffic_router import CellDraw, TrafficRouter
from onnx_ops.serving.metrics import BOUNDS_S, EPOCH, SharedMetrics, count_request
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body, wait_until
from tests.support.endpoints import fileless_deployment
from tests.support.server import ServerFamily

BODY = infer_body([1, 2])
SLOTS = {"old": 1, "new": 2}
WATCH = UserCountsRequest(limits_s={"new": (), "old": ()})
EPOCH_S = 60.0
START = 1_000


class Site:
    """The counts of a supervisor with two workers, without processes.

    The test sets their clock.
    """

    def __init__(self, *, is_fresh: bool = False) -> None:
        self.shared = SharedMetrics(2)
        self.counts = RolloutCounts(self.shared)
        self.workers = [CellCounter(self.shared, number) for number in range(2)]
        if not is_fresh:
            self.publish(0, epoch_s=0.0)
        self.router = self.publish(1)

    def publish(
        self, generation: int, *, candidate: int = 10, epoch_s: float = EPOCH_S
    ) -> TrafficRouter:
        """Publish another generation in the middle of the current epoch."""
        split = TrafficSplit(weights={"old": 100 - candidate, "new": candidate}, epoch_s=epoch_s)
        deployments = tuple(map(fileless_deployment, split.weights))
        table = build_next_table(
            None, EndpointState(deployments=deployments, split=split, generation=generation)
        )
        now = (max(self.epoch, START) + 0.5) * EPOCH_S
        self.counts.start_table(TableRevision(number=generation, table=table, slots=SLOTS), now)
        self.router = TrafficRouter.from_table(table)
        return self.router

    @property
    def epoch(self) -> int:
        return self.shared.header[EPOCH]

    @property
    def draw(self) -> CellDraw:
        return self.router.get_draw(self.epoch)

    def turn(self, times: int = 1, *, is_complete: bool = True) -> None:
        for _ in range(times):
            self.counts.turn_epoch((self.epoch + 1) * EPOCH_S, is_complete=is_complete)

    def watch(self) -> None:
        """Begin to count by user, and end the epoch in which the count begins."""
        self.counts.collect(WATCH)
        self.turn()

    def closed(self) -> dict[tuple[int, int], Counter[str]]:
        """Return the requests of the closed epochs, by deployment."""
        epochs = self.counts.collect(WATCH).epochs
        return {
            (each.generation, each.epoch - START): total(each, CELL_REQUESTS) for each in epochs
        }


def fields_of(text: str) -> dict[int, list[int]]:
    """Return the counts of each cell."""
    return dict(zip(*(each.tolist() for each in decode_cells(text)), strict=True))


def total(epoch: EpochCounts, field: int) -> Counter[str]:
    return Counter(
        {name: int(decode_cells(text)[1][:, field].sum()) for name, text in epoch.cells.items()}
    )


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close epochs as soon as they are over and no request is in progress."""
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 0.0)


pytestmark = pytest.mark.usefixtures("at_once")


def test_request_is_counted_in_epoch_in_which_it_was_routed() -> None:
    site = Site()
    site.watch()
    place = site.workers[0].begin(site.draw, 2, 5)
    assert place is not None
    site.workers[1].count(site.draw, 1, 6, 200, 0.0)
    site.turn()
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    assert site.closed() == {}, "a request of the epoch is in progress"
    site.workers[0].finish(place, 200, 0.0)
    assert site.closed() == {(1, 1): Counter(old=1, new=1)}
    site.turn()
    assert site.closed() == {(1, 1): Counter(old=1, new=1), (1, 2): Counter(old=0, new=1)}


def test_request_results_are_counted_by_field() -> None:
    site = Site()
    limits = {"new": tuple(BOUNDS_S[k] for k in (100, 200)), "old": (BOUNDS_S[100],)}
    site.counts.collect(UserCountsRequest(limits_s=limits))
    site.turn()
    for status, seconds in (
        (200, BOUNDS_S[100]),
        (200, BOUNDS_S[101]),
        (200, 30.0),
        (500, 0.0),
        (400, 0.0),
        (499, 0.0),
    ):
        site.workers[0].count(site.draw, 2, KEYLESS_CELL, status, seconds)
    # The deployment of slot 3 is not watched.
    site.workers[0].count(site.draw, 3, 7, 200, 0.0)
    site.turn()
    (epoch,) = site.counts.collect(UserCountsRequest(limits_s=limits)).epochs
    assert fields_of(epoch.cells["old"]) == {}
    ((cell, counts),) = fields_of(epoch.cells["new"]).items()
    assert (cell, counts[CELL_REQUESTS], counts[CELL_ERRORS], counts[CELL_REFUSED]) == (
        KEYLESS_CELL,
        6,
        1,
        1,
    )
    assert counts[CELL_LATENCIES : CELL_LATENCIES + 4] == [1, 1, 1, 0]


def test_request_that_outlasts_its_epoch_memory_counts_once_as_error() -> None:
    site = Site()
    site.watch()
    place = site.workers[0].begin(site.draw, 2, 5)
    assert place is not None
    site.turn(2)
    assert site.closed() == {}
    site.turn()
    closed = site.counts.collect(WATCH).epochs
    assert [total(each, CELL_ERRORS)["new"] for each in closed] == [1, 0, 0]
    # This call resets the memory of the epoch.
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.workers[0].finish(place, 200, 0.0)
    site.turn(3)
    again = site.counts.collect(WATCH).epochs
    assert again[:3] == closed, "a closed epoch never changes"
    assert [total(each, CELL_REQUESTS)["new"] for each in again] == [1, 0, 0, 1, 0, 0]


def test_collect_returns_only_complete_epochs_with_unchanged_table_and_watch() -> None:
    site = Site()
    # No watch is set in the first epoch, and counts begin in the next epoch.
    site.turn()
    site.watch()
    site.turn()
    # A deployment was not loaded in this epoch.
    site.turn(is_complete=False)
    site.publish(2)
    site.turn(2)
    site.publish(3, candidate=50, epoch_s=0.0)
    site.turn()
    assert site.counts.collect(WATCH).open_epoch is None
    assert list(site.closed()) == [(1, 1), (1, 2), (2, 5)]


def test_collect_of_fresh_server_includes_first_epoch() -> None:
    site = Site(is_fresh=True)
    site.counts.collect(WATCH)
    site.workers[0].count(site.draw, 2, 5, 500, 0.0)
    place = site.workers[0].begin(site.draw, 1, 6)
    opened = site.counts.collect(WATCH).open_epoch
    assert opened is not None
    assert total(opened, CELL_REQUESTS) == Counter(new=1, old=1), (
        "the one in progress counts as answered"
    )
    assert total(opened, CELL_ERRORS) == Counter(new=1, old=0)
    assert place is not None
    site.workers[0].finish(place, 500, 0.0)
    site.turn()
    (epoch,) = site.counts.collect(WATCH).epochs
    assert total(epoch, CELL_ERRORS) == Counter(new=1, old=1)


def test_collect_of_fresh_server_excludes_epoch_in_which_watch_changes() -> None:
    site = Site(is_fresh=True)
    site.counts.collect(WATCH)
    other = UserCountsRequest(limits_s={"new": (1e-3,), "old": ()})
    assert site.counts.collect(other).open_epoch is None
    site.turn()
    assert site.counts.collect(other).epochs == ()


def test_collect_shows_open_epoch_until_table_changes() -> None:
    site = Site()
    assert site.counts.collect(WATCH).open_epoch is None
    site.turn()
    site.workers[0].count(site.draw, 2, 5, 500, 0.0)
    opened = site.counts.collect(WATCH)
    assert opened.open_epoch is not None
    assert (opened.open_epoch.epoch, opened.closed_through) == (START + 1, START)
    assert total(opened.open_epoch, CELL_ERRORS) == Counter(new=1, old=0)
    site.publish(2)
    assert site.counts.collect(WATCH).open_epoch is None
    assert site.counts.collect().epochs == ()


def test_epoch_is_closed_only_after_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 1e9)
    site = Site()
    site.watch()
    site.turn()
    counts = site.counts.collect(WATCH)
    assert (counts.epochs, counts.closed_through) == ((), START)
    monkeypatch.setattr(rollout_counts, "_SETTLE_S", 0.0)
    assert site.counts.collect(WATCH).closed_through == START + 1


@pytest.mark.parametrize("seed", range(5))
def test_requests_in_random_event_order_are_counted_once(seed: int) -> None:
    """Requests, answers, epochs, readings and deaths of workers in any order."""
    draw, site = np.random.default_rng(seed), Site()
    steps, shares = (
        ("inline", "queue", "answer", "turn", "read", "die"),
        (0.498, 0.2, 0.25, 0.01, 0.04, 0.002),
    )
    site.watch()
    routed: Counter[tuple[int, str]] = Counter()
    running = []
    for _ in range(3000):
        number, cell = (
            int(draw.integers(2)),
            int(draw.choice([KEYLESS_CELL, int(draw.integers(50))])),
        )
        name = str(draw.choice(("old", "new")))
        match str(draw.choice(steps, p=shares)):
            case "inline":
                routed[site.epoch, name] += 1
                site.workers[number].count(site.draw, SLOTS[name], cell, 200, 0.0)
            case "queue":
                routed[site.epoch, name] += 1
                running.append((number, site.workers[number].begin(site.draw, SLOTS[name], cell)))
            case "answer" if running:
                worker, place = running.pop(0)
                assert place is not None
                site.workers[worker].finish(place, 200, 0.0)
            case "turn":
                site.turn()
            case "read":
                site.closed()
            case _:
                site.workers[number] = CellCounter(site.shared, number)
                running = [each for each in running if each[0] != number]
    site.turn(4)
    counted = {
        (each.epoch, name): count
        for each in site.counts.collect(WATCH).epochs
        for name, count in total(each, CELL_REQUESTS).items()
        if count
    }
    assert counted == dict(routed)
    assert len({epoch for epoch, _ in counted}) > 10


def test_new_worker_counts_unanswered_requests_of_dead_worker_as_errors() -> None:
    site = Site()
    site.watch()
    for _ in range(2):
        site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.workers[0].begin(site.draw, 2, 5)
    site.workers[0] = CellCounter(site.shared, 0)
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.turn()
    (epoch,) = site.counts.collect(WATCH).epochs
    assert (total(epoch, CELL_REQUESTS)["new"], total(epoch, CELL_ERRORS)["new"]) == (4, 1)


def test_user_counts_stop_with_rollout_and_start_at_zero_in_next_one() -> None:
    site = Site()
    site.watch()
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    before = site.workers[0].is_watching
    site.publish(2, candidate=100, epoch_s=0.0)
    assert (before, site.workers[0].is_watching) == (True, False)
    site.publish(3)
    assert site.counts.collect().tables[-1].cells == {}
    site.watch()
    site.workers[0].count(site.draw, 2, 5, 500, 0.0)
    site.turn()
    (epoch,) = site.counts.collect(WATCH).epochs
    assert (
        epoch.generation,
        total(epoch, CELL_REQUESTS)["new"],
        total(epoch, CELL_ERRORS)["new"],
    ) == (3, 1, 1)


def test_collect_with_changed_watch_starts_at_zero() -> None:
    site = Site()
    site.watch()
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.turn()
    assert len(site.closed()) == 1
    other = UserCountsRequest(limits_s={"new": (1e-3,), "old": ()})
    assert site.counts.collect(other).epochs == ()
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.turn()
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.turn()
    assert [total(each, CELL_REQUESTS)["new"] for each in site.counts.collect(other).epochs] == [1]


def test_closed_epochs_are_retained_within_time_and_memory_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site()
    site.watch()
    for _ in range(200):
        site.workers[0].count(site.draw, 2, 5, 200, 0.0)
        site.turn()
    assert [epoch for _, epoch in site.closed()] == [*range(141, 201)]
    size = sum(len(text) for text in site.counts.collect(WATCH).epochs[0].cells.values())
    monkeypatch.setattr(rollout_counts, "_KEPT_BYTES", 10 * size)
    site.turn()
    assert [epoch for _, epoch in site.closed()] == [*range(192, 202)]


def test_epoch_after_clock_jump_is_never_repeated() -> None:
    site = Site()
    site.watch()
    place = site.workers[0].begin(site.draw, 2, 5)
    site.counts.turn_epoch((START - 500) * EPOCH_S)
    assert site.counts.get_epoch_rest_s((START - 500) * EPOCH_S) == EPOCH_S
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.counts.turn_epoch((START + 700) * EPOCH_S)
    assert place is not None
    site.workers[0].finish(place, 200, 0.0)
    site.turn()
    assert site.closed() == {
        (1, 1): Counter(new=1, old=0),
        (1, 2): Counter(new=1, old=0),
        (1, 700): Counter(new=0, old=0),
    }


def test_split_without_epochs_is_counted_by_generation() -> None:
    site = Site(is_fresh=True)
    site.publish(2, candidate=50, epoch_s=0.0)
    assert site.counts.get_epoch_rest_s(0.0) is None
    site.counts.collect(WATCH)
    site.workers[0].count(site.draw, 2, 5, 200, 0.0)
    site.turn()
    site.workers[1].count(site.draw, 2, 5, 500, 0.0)
    site.workers[1].count_feedback(site.draw, 2, 5, True)
    site.publish(3, candidate=60, epoch_s=0.0)
    site.workers[1].count(site.draw, 2, 5, 200, 0.0)
    first, second, third = site.counts.collect(WATCH).tables
    assert (first.cells, second.generation, third.generation) == ({}, 2, 3)
    ((cell, counts),) = fields_of(second.cells["new"]).items()
    assert (cell, counts[CELL_REQUESTS], counts[CELL_ERRORS]) == (5, 2, 1)
    assert (counts[CELL_FEEDBACK], counts[CELL_SUCCESSES]) == (1, 1)
    assert [each[CELL_REQUESTS] for each in fields_of(third.cells["new"]).values()] == [1]
    assert len({second.split, third.split}) == 2


def test_collect_keeps_counts_of_last_16_generations() -> None:
    site = Site()
    for generation in range(2, 40):
        count_request(site.shared.get_row(generation % 2, 1), 200, 0.001)
        site.publish(generation)
    count_request(site.shared.get_row(0, 1), 500, 0.001)
    tables = site.counts.collect().tables
    assert [table.generation for table in tables] == [*range(24, 40)]
    assert [table.deployments["old"].statuses for table in tables] == [{"200": 1}] * 15 + [
        {"500": 1}
    ]


def test_decode_cells_of_encoded_cells_returns_same_values() -> None:
    cells = np.array([0, 7, KEYLESS_CELL])
    counts = np.arange(3 * 30).reshape(3, 30)
    read = decode_cells(encode_cells(cells, counts))
    assert all(np.array_equal(*pair) for pair in zip(read, (cells, counts), strict=True))
    assert [len(each) for each in decode_cells(encode_cells(cells[:0], counts[:0]))] == [0, 0]


def test_decode_cells_with_unordered_or_unknown_cells_raises_value_error() -> None:
    counts = np.arange(3 * 30).reshape(3, 30)
    for bad in (np.array([KEYLESS_CELL, 7, 0]), np.array([0, 7, CELLS])):
        with pytest.raises(ValueError, match="cells"):
            decode_cells(encode_cells(bad, counts))


@pytest.fixture
def server(tmp_path: Path, blue: Deployment, green: Deployment) -> Iterator[ServerFamily]:
    """Yield a server with two workers; blue and green share the traffic."""
    with ServerFamily(folder=tmp_path / "state", options=("--workers", "2")) as server:
        assert server.publish(state_of(blue, green, blue=50, green=50), 1).status == 200
        yield server


def ask(server: ServerFamily, **headers: str) -> str:
    """Send a request; return the deployment that answered."""
    answer = server.call("POST", INFER, BODY, {"content-type": "application/json", **headers})
    assert answer.status == 200
    return answer.headers["x-onnx-ops-deployment"]


def test_server_counts_cover_all_workers_generations_and_shadow_requests(
    server: ServerFamily, blue: Deployment, green: Deployment
) -> None:
    before = server.counts()
    answered = [ask(server) for _ in range(60)]
    assert (
        server.call("POST", INFER, b"{", {"x-amzn-sagemaker-target-variant": "green"}).status == 400
    )
    state = state_of(blue, green, blue=100, green=0)
    assert (
        server.publish(replace(state, split=replace(state.split, shadow={"green": 100})), 2).status
        == 200
    )
    for _ in range(10):
        ask(server)
    found = server.counts()
    assert found.origin == before.origin
    assert [table.generation for table in found.tables] == [1, 2]
    for name, total in found.deployments.items():
        parts = [table.deployments[name].statuses for table in found.tables]
        assert sum(map(Counter, parts), Counter[str]()) == Counter(total.statuses), (
            "each request is in one generation"
        )
    assert found.tables[1].deployments["blue"].statuses == {"200": 10}
    assert found.at >= before.at
    assert found.deployments["blue"].statuses == {"200": answered.count("blue") + 10}
    assert found.deployments["green"].statuses == {"200": answered.count("green")}
    assert found.deployments["green"].unjudged == {"400": 1}
    for counts in found.deployments.values():
        assert len(counts.latency) == len(found.bounds_s) + 1
        assert sum(counts.latency) == sum(counts.statuses.values()) + sum(counts.unjudged.values())
    wait_until(lambda: server.counts().deployments["green"].shadow_answered == 10)
    shadow = server.counts().deployments["green"]
    assert (shadow.shadow_answered, shadow.shadow_differing, shadow.shadow_failed) == (10, 10, 0)
    assert shadow.statuses == found.deployments["green"].statuses


def test_counts_without_token_return_401(server: ServerFamily) -> None:
    assert server.call("GET", COUNTS_PATH).status == 404
    assert server.call("GET", COUNTS_PATH, admin=True).status == 401
    assert server.call("POST", COUNTS_PATH, b'{"limits_s": {}}', admin=True).status == 401


def test_counts_with_invalid_watch_return_400(server: ServerFamily) -> None:
    for body in (
        b"{}",
        b'{"limits_s": {"blue": [2, 1]}}',
        b'{"limits_s": {"blue": [%s 1]}}' % (b"1," * 24),
    ):
        assert server.admin("POST", body, COUNTS_PATH).status == 400


def test_watched_deployments_get_cold_start_samples_in_turn(
    server: ServerFamily, blue: Deployment, green: Deployment
) -> None:
    asked = UserCountsRequest(limits_s={"blue": (), "green": ()})
    assert server.counts(asked).cold_s == {}
    # The second publication ends the loads that the first watch has begun.
    for generation in (2, 3):
        assert server.publish(state_of(blue, green, blue=100, green=0), generation).status == 200
        server.counts(asked)
    loads: list[tuple[float, ...]] = [()]
    deadline = time.monotonic() + 120
    while min(map(len, loads)) < COLD_START_SAMPLES:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
        loads = [*server.counts(asked).cold_s.values()]
        assert max(map(len, loads)) - min(map(len, loads)) <= 1, "the models are loaded alternately"
    assert all(seconds > 0 for each in loads for seconds in each)
    ask(server, **{"x-user-key": "u"})
    counts = server.counts(asked)
    assert [table.cells for table in counts.tables] == [{}] * 3, "no version was chosen for a user"
    assert [*counts.cold_s.values()] == loads, "the models are loaded no more often"
