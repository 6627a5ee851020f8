"""A split that is drawn again in each epoch, on real servers."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops.adapters.host import SystemClock
from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.protocol.messages import (
    CELL_REQUESTS,
    KEYLESS_CELL,
    Counts,
    UserCountsRequest,
    decode_cells,
)
from onnx_ops.protocol.routing_table import build_next_table
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body, wait_until
from tests.support.server import ServerFamily

BODY = infer_body([1, 2])
EPOCH_S = 0.25
CLOCK = SystemClock()
WATCH = UserCountsRequest(limits_s={"blue": (), "green": ()})
PIN = "azureml-model-deployment"


@pytest.fixture
def both(blue: Deployment, green: Deployment) -> EndpointState:
    state = state_of(blue, green, blue=50, green=50)
    return replace(state, split=replace(state.split, epoch_s=EPOCH_S), generation=1)


@pytest.fixture
def server(tmp_path: Path, both: EndpointState) -> Iterator[ServerFamily]:
    """Yield a server with two workers, which already count by user."""
    with ServerFamily(folder=tmp_path / "state", options=("--workers", "2")) as server:
        assert server.publish(both, 1).status == 200
        begin_counting(server)
        yield server


def begin_counting(server: ServerFamily) -> None:
    """Wait until an epoch is counted from its beginning."""
    wait_until(lambda: server.counts(WATCH).open_epoch is not None)


def ask(server: ServerFamily, **headers: str) -> str:
    """Send a request; return the deployment that answered."""
    answer = server.call("POST", INFER, BODY, {"content-type": "application/json", **headers})
    assert answer.status == 200
    return answer.headers["x-onnx-ops-deployment"]


def read_closed(server: ServerFamily) -> Counts:
    """Return the counts once all epochs until now are closed."""
    last = int(CLOCK.now() / EPOCH_S)
    return wait_until(
        lambda: counts if (counts := server.counts(WATCH)).closed_through >= last else None
    )


def count_requests(counts: Counts) -> Counter[tuple[int, str, int]]:
    """Return the requests by epoch, deployment and cell."""
    requests: Counter[tuple[int, str, int]] = Counter()
    for each in counts.epochs:
        for name, text in each.cells.items():
            cells, fields = decode_cells(text)
            requests.update(
                {
                    (each.epoch, name, int(c)): int(n)
                    for c, n in zip(cells, fields[:, CELL_REQUESTS], strict=True)
                }
            )
    return requests


def test_user_keeps_version_within_epoch_and_is_redrawn_in_next(
    server: ServerFamily, both: EndpointState
) -> None:
    router = TrafficRouter.from_table(build_next_table(None, both))
    met: dict[str, set[str]] = {f"user-{number}": set() for number in range(3)}
    asked = 0
    deadline = time.monotonic() + 60
    while not all(len(names) == 2 for names in met.values()):
        assert time.monotonic() < deadline, f"a user keeps one version: {met}"
        for user, names in met.items():
            names.add(ask(server, **{"x-user-key": user}))
            asked += 1
        time.sleep(EPOCH_S / 10)
    requests = count_requests(read_closed(server))
    assert sum(requests.values()) == asked, "each is counted in one epoch"
    sides: dict[tuple[int, int], set[str]] = {}
    for epoch, name, cell in requests:
        sides.setdefault((epoch, cell), set()).add(name)
        assert router.route_cell(router.get_draw(epoch), cell) == name
    assert all(len(names) == 1 for names in sides.values())


def test_requests_that_select_version_by_header_or_path_are_not_judged(
    server: ServerFamily,
) -> None:
    for _ in range(6):
        assert ask(server, **{PIN: "green"}) == "green"
        path = INFER.replace("/infer", "/versions/2/infer")
        assert server.call("POST", path, BODY, {"content-type": "application/json"}).status == 200
    drawn = Counter(ask(server) for _ in range(10))
    counts = read_closed(server)
    requests = count_requests(counts)
    assert {cell for *_, cell in requests} == {KEYLESS_CELL}
    assert {n: sum(k for (_, name, _), k in requests.items() if name == n) for n in drawn} == dict(
        drawn
    )
    assert counts.tables[-1].deployments["green"].statuses.get("200", 0) == drawn["green"]
    assert counts.tables[-1].deployments["green"].unjudged == {"200": 12}


def test_feedback_by_id_or_key_counts_for_version_that_answered(server: ServerFamily) -> None:
    """Feedback names the request id, or the key of the user's last answer.

    The user's version can change from epoch to epoch.
    """
    expected: Counter[str] = Counter()
    for number in range(6):
        name = ask(server, **{"x-user-key": "u", "x-request-id": f"r-{number}"})
        time.sleep(EPOCH_S)
        entries = [{"request_id": f"r-{number}", "success": True}, {"key": "u", "success": True}]
        body = json.dumps({"feedback": [*entries, {"key": "never seen", "success": True}]}).encode()
        answer = server.call("POST", "/feedback", body, {"content-type": "application/json"}).json()
        assert answer == {"counted": 2, "unknown": 1}
        expected[name] += 2
    feedback = {name: one.feedback for name, one in server.counts().deployments.items()}
    assert feedback == {name: expected[name] for name in ("blue", "green")}


def test_server_restart_begins_new_counts_and_epochs(server: ServerFamily) -> None:
    for _ in range(5):
        ask(server)
    before = read_closed(server)
    server.stop()
    server.start()
    begin_counting(server)
    for _ in range(5):
        ask(server)
    after = read_closed(server)
    assert after.origin != before.origin
    assert [sum(count_requests(each).values()) for each in (before, after)] == [5, 5]
    assert max(each.epoch for each in before.epochs) < min(each.epoch for each in after.epochs)
    assert [
        sum(one.statuses.get("200", 0) for one in c.tables[-1].deployments.values())
        for c in (before, after)
    ] == [
        5,
        5,
    ]


def test_epoch_with_changed_weights_is_excluded(server: ServerFamily, both: EndpointState) -> None:
    asked = 0
    last = CLOCK.now() + 4 * EPOCH_S
    generation = 1
    changed: set[int] = set()
    while CLOCK.now() < last:
        generation += 1
        before = int(CLOCK.now() / EPOCH_S)
        weights = {"blue": 50 + generation % 2 * 20, "green": 50 - generation % 2 * 20}
        assert (
            server.publish(
                replace(both, split=replace(both.split, weights=weights)), generation
            ).status
            == 200
        )
        if int(CLOCK.now() / EPOCH_S) == before:
            changed.add(before)
        ask(server)
        asked += 1
    assert generation > 5
    assert changed
    counts = read_closed(server)
    held = Counter(each.epoch for each in counts.epochs)
    assert set(held.values()) <= {1}, "an epoch is of one generation"
    assert not changed & set(held)
    assert sum(count_requests(counts).values()) < asked
    totals = Counter(
        str(table.generation)
        for table in counts.tables
        for one in table.deployments.values()
        if one.statuses
    )
    assert all(number == 1 for number in totals.values()), "a request counts in one generation"
