"""Feedback of clients: at server processes, and at counts without processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.messages import KEYLESS_CELL
from onnx_ops.protocol.routing_table import RoutingTable
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.feedback import MAX_FEEDBACK
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.testing.endpoints import state_of
from tests.serving.inference.feedback_server import FeedbackServer, make_table
from tests.serving.serving_process import INFER, infer_body
from tests.support.server import Answer, ServerFamily

BODY = infer_body([1, 2])


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


def report(server: ServerFamily, *feedback: Mapping[str, Any]) -> Answer:
    body = json.dumps({"feedback": feedback}).encode()
    return server.call("POST", "/feedback", body, {"content-type": "application/json"})


def feedback_of(server: ServerFamily) -> dict[str, tuple[int, int]]:
    return {
        name: (found.feedback, found.successes)
        for name, found in server.counts().deployments.items()
    }


def test_feedback_by_request_id_counts_once_for_deployment_that_answered(
    server: ServerFamily,
) -> None:
    answered = {f"r-{n}": ask(server, **{"x-request-id": f"r-{n}"}) for n in range(40)}
    assert set(answered.values()) == {"blue", "green"}
    good = {name: n % 3 > 0 for n, name in enumerate(answered)}
    response = report(server, *({"request_id": name, "success": good[name]} for name in answered))
    assert response.json() == {"counted": 40, "unknown": 0}
    expected = {
        who: (
            sum(d == who for d in answered.values()),
            sum(good[name] for name, d in answered.items() if d == who),
        )
        for who in ("blue", "green")
    }
    assert feedback_of(server) == expected
    again = report(
        server, {"request_id": "r-1", "success": True}, {"request_id": "never", "success": True}
    )
    assert again.json() == {"counted": 0, "unknown": 2}
    assert feedback_of(server) == expected


def test_feedback_by_user_key_or_deployment_name_is_counted(server: ServerFamily) -> None:
    users = {f"user-{n}": ask(server, **{"x-user-key": f"user-{n}"}) for n in range(20)}
    assert (
        report(server, *({"key": user, "success": True} for user in users)).json()["counted"] == 20
    )
    response = report(
        server, {"deployment": "green", "success": False}, {"deployment": "red", "success": False}
    )
    assert response.json() == {"counted": 1, "unknown": 1}
    blue, green = (sum(d == who for d in users.values()) for who in ("blue", "green"))
    assert feedback_of(server) == {"blue": (blue, blue), "green": (green + 1, green)}


NO_REPORTS = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"feedback": {}}',
    b'{"feedback": [1]}',
    b'{"feedback": [{"success": true}]}',
    b'{"feedback": [{"request_id": "a", "success": 1}]}',
    b'{"feedback": [{"request_id": 7, "success": true}]}',
    b'{"feedback": [{"request_id": "a", "key": "b", "success": true}]}',
    b'{"feedback": [{"deployment": "", "key": null, "success": true}]}',
    json.dumps({"feedback": [{"key": "a", "success": True}] * (MAX_FEEDBACK + 1)}).encode(),
)
OTHER_KINDS = (
    None,
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "text/plain;application/json",
    "json",
)


def test_malformed_feedback_report_returns_400_and_counts_nothing(server: ServerFamily) -> None:
    for body in NO_REPORTS:
        assert (
            server.call("POST", "/feedback", body, {"content-type": "application/json"}).status
            == 400
        ), body
        assert feedback_of(server) == {"blue": (0, 0), "green": (0, 0)}, body


def test_feedback_with_other_content_type_returns_415(server: ServerFamily) -> None:
    body = json.dumps({"feedback": [{"deployment": "green", "success": True}]}).encode()
    for kind in OTHER_KINDS:
        answer = server.call(
            "POST", "/feedback", body, {} if kind is None else {"content-type": kind}
        )
        assert answer.status == 415, kind
        assert "application/json" in answer.json()["error"]
        assert feedback_of(server) == {"blue": (0, 0), "green": (0, 0)}, kind
    # This request is a preflight request of a browser.
    assert server.call("OPTIONS", "/feedback").status == 405
    usual = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.call("POST", "/feedback", body, usual).json() == {"counted": 1, "unknown": 0}


def test_feedback_before_first_publication_is_unknown(tmp_path: Path) -> None:
    with ServerFamily(folder=tmp_path / "state") as server:
        assert report(server, {"key": "a", "success": True}).json() == {"counted": 0, "unknown": 1}
        assert server.counts().deployments == {}


def test_feedback_for_overwritten_request_id_is_unknown() -> None:
    server = FeedbackServer(make_table(), workers=1)
    names = ("old", "new")
    for number in range(3 * metrics.REQUEST_IDS):
        server.remember(names[number % 2], str(number), number % KEYLESS_CELL)
    reported = range(0, 3 * metrics.REQUEST_IDS, 97)
    counted = unknown = 0
    for start in range(0, len(reported), MAX_FEEDBACK):
        found = server.report(
            list(map(str, reported[start : start + MAX_FEEDBACK])), kind="request_id"
        )
        counted, unknown = counted + found[0], unknown + found[1]
    assert counted + unknown == len(reported)
    assert unknown == server.shared.sum_slot(0)[metrics.UNKNOWN_FEEDBACK] > 0
    feedback = {name: entries for name, (entries, _) in server.read_feedback().items()}
    assert feedback["new"] <= sum(number % 2 for number in reported)
    assert feedback["old"] <= sum(1 - number % 2 for number in reported)
    assert sum(feedback.values()) == counted


@pytest.mark.parametrize("kind", ["request_id", "key"])
def test_feedback_on_answer_of_earlier_split_is_counted_but_not_judged(kind: str) -> None:
    """Early feedback differs from late feedback, and a new candidate has early feedback only."""
    earlier, table = make_table(1, old=90, new=10), make_table(5)
    server = FeedbackServer(earlier)
    key, cell = find_user(table, "old")
    assert find_user(earlier, "old", key) == (key, cell), (
        "both splits give the user to the same deployment"
    )
    server.remember("old", "before", cell)
    server.publish(table)
    assert server.report(["before" if kind == "request_id" else key], kind=kind) == (1, 0)
    assert server.read_feedback() == {"old": (0, 0), "new": (0, 0)}
    assert server.read_cells("old") == {}
    server.remember("old", "after", cell, worker=1)
    assert server.report(["after" if kind == "request_id" else key], kind=kind) == (1, 0)
    assert server.read_feedback() == {"old": (1, 1), "new": (0, 0)}
    assert server.read_cells("old") == {cell: (1, 1)}


def test_feedback_after_publication_of_same_split_is_judged() -> None:
    server = FeedbackServer(make_table(1))
    server.remember("new", "r-1", KEYLESS_CELL)
    server.publish(make_table(2))
    assert server.report(["r-1"], kind="request_id") == (1, 0)
    assert server.read_feedback()["new"] == (1, 1)


def test_feedback_by_key_without_answer_is_counted_but_not_judged() -> None:
    table = make_table()
    server = FeedbackServer(table)
    key, _ = find_user(table, "new")
    assert server.report([key], kind="key") == (1, 0)
    assert server.read_feedback() == {"old": (0, 0), "new": (0, 0)}
    row = server.shared.sum_slot(server.get_slot("new"))
    assert (row[metrics.UNJUDGED_FEEDBACK], row[metrics.UNJUDGED_SUCCESSES]) == (1, 1)


def test_feedback_by_key_ignores_higher_epoch_of_earlier_split() -> None:
    server = FeedbackServer(make_table(1, epoch_s=60.0, old=90, new=10))
    key, cell = find_user(make_table(), "old")
    server.remember("new", "r-1", cell, epoch=30_000_000)
    server.publish(make_table(2, epoch_s=60.0))
    server.remember("old", "r-2", cell, epoch=7, worker=1)
    assert server.report([key], kind="key") == (1, 0)
    assert server.read_feedback() == {"old": (1, 1), "new": (0, 0)}


def find_user(table: RoutingTable, deployment: str, key: str = "") -> tuple[str, int]:
    """Return a user whom a sticky split gives to a deployment, and the user's cell."""
    router = TrafficRouter.from_table(table)
    keys = [key] if key else [f"user-{number}" for number in range(1000)]
    cells = ((each, router.get_cell(each.encode())) for each in keys)
    return next(
        (each, cell)
        for each, cell in cells
        if router.route_cell(router.get_draw(0), cell) == deployment
    )
