"""Reports of clients, and the counts that a rollout is judged by: against real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.rollout_policy import COLD_START_SAMPLES
from onnx_ops.protocol import messages
from onnx_ops.protocol.messages import COUNTS_PATH, USER_CELLS, UserCountsRequest
from onnx_ops.serving import metrics
from onnx_ops.serving.inference.deployments import LoadedDeployments
from onnx_ops.serving.metrics import SharedMetrics
from onnx_ops.serving.rollout_counts import MAX_FEEDBACK, FeedbackCounter, UserCounts
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, infer_body, wait_until
from tests.support.server import Answer, ServerFamily

BODY = infer_body([1, 2])


@pytest.fixture
def server(tmp_path: Path, blue: Deployment, green: Deployment) -> Iterator[ServerFamily]:
    """Two workers; blue and green share the traffic."""
    with ServerFamily(folder=tmp_path / "state", options=("--workers", "2")) as server:
        assert server.publish(state_of(blue, green, blue=50, green=50), 1).status == 200
        yield server


def ask(server: ServerFamily, **headers: str) -> str:
    """The deployment that answered."""
    answer = server.call("POST", INFER, BODY, {"content-type": "application/json", **headers})
    assert answer.status == 200
    return answer.headers["x-onnx-ops-deployment"]


def report(server: ServerFamily, *feedback: Mapping[str, Any]) -> Answer:
    body = json.dumps({"feedback": feedback}).encode()
    return server.call("POST", "/feedback", body, {"content-type": "application/json"})


def feedback_of(server: ServerFamily) -> dict[str, tuple[int, int]]:
    return {name: (found.feedback, found.successes) for name, found in server.counts().deployments.items()}


def test_feedback_counts_for_the_deployment_that_answered(server: ServerFamily) -> None:
    answered = {f"r-{n}": ask(server, **{"x-request-id": f"r-{n}"}) for n in range(40)}
    assert set(answered.values()) == {"blue", "green"}
    good = {name: n % 3 > 0 for n, name in enumerate(answered)}
    response = report(server, *({"request_id": name, "success": good[name]} for name in answered))
    assert response.json() == {"counted": 40, "unknown": 0}
    expected = {
        who: (sum(d == who for d in answered.values()), sum(good[name] for name, d in answered.items() if d == who))
        for who in ("blue", "green")
    }
    assert feedback_of(server) == expected
    again = report(server, {"request_id": "r-1", "success": True}, {"request_id": "never", "success": True})
    assert again.json() == {"counted": 0, "unknown": 2}
    assert feedback_of(server) == expected


def test_by_user_key_and_by_name(server: ServerFamily) -> None:
    users = {f"user-{n}": ask(server, **{"x-user-key": f"user-{n}"}) for n in range(20)}
    assert report(server, *({"key": user, "success": True} for user in users)).json()["counted"] == 20
    response = report(server, {"deployment": "green", "success": False}, {"deployment": "red", "success": False})
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
OTHER_KINDS = (None, "", "text/plain", "application/x-www-form-urlencoded", "text/plain;application/json", "json")


def test_what_is_no_report_is_refused_whole(server: ServerFamily) -> None:
    for body in NO_REPORTS:
        assert server.call("POST", "/feedback", body, {"content-type": "application/json"}).status == 400, body
        assert feedback_of(server) == {"blue": (0, 0), "green": (0, 0)}, body


def test_feedback_that_is_not_json_is_refused(server: ServerFamily) -> None:
    body = json.dumps({"feedback": [{"deployment": "green", "success": True}]}).encode()
    for kind in OTHER_KINDS:
        answer = server.call("POST", "/feedback", body, {} if kind is None else {"content-type": kind})
        assert answer.status == 415, kind
        assert "application/json" in answer.json()["error"]
        assert feedback_of(server) == {"blue": (0, 0), "green": (0, 0)}, kind
    assert server.call("OPTIONS", "/feedback").status == 405  # a preflight
    usual = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.call("POST", "/feedback", body, usual).json() == {"counted": 1, "unknown": 0}


def test_before_the_first_publication_nothing_is_known(tmp_path: Path) -> None:
    with ServerFamily(folder=tmp_path / "state") as server:
        assert report(server, {"key": "a", "success": True}).json() == {"counted": 0, "unknown": 1}
        assert server.counts().deployments == {}


def test_the_counts_are_those_of_all_workers(server: ServerFamily, blue: Deployment, green: Deployment) -> None:
    before = server.counts()
    answered = [ask(server) for _ in range(60)]
    assert server.call("POST", INFER, b"{", {"x-amzn-sagemaker-target-variant": "green"}).status == 400
    state = state_of(blue, green, blue=100, green=0)
    assert server.publish(replace(state, split=replace(state.split, shadow={"green": 100})), 2).status == 200
    for _ in range(10):
        ask(server)
    found = server.counts()
    assert found.origin == before.origin
    assert found.at >= before.at
    assert found.deployments["blue"].statuses == {"200": answered.count("blue") + 10}
    assert found.deployments["green"].statuses == {"200": answered.count("green"), "400": 1}
    for counts in found.deployments.values():
        assert len(counts.latency) == len(found.bounds_s) + 1
        assert sum(counts.latency) == sum(counts.statuses.values())
    wait_until(lambda: server.counts().deployments["green"].shadow_answered == 10)
    shadow = server.counts().deployments["green"]
    assert (shadow.shadow_answered, shadow.shadow_differing, shadow.shadow_failed) == (10, 10, 0)
    assert shadow.statuses == found.deployments["green"].statuses


def test_the_counts_need_the_token(server: ServerFamily) -> None:
    assert server.call("GET", COUNTS_PATH).status == 404
    assert server.call("GET", COUNTS_PATH, admin=True).status == 401
    assert server.call("POST", COUNTS_PATH, b'{"limits_s": {}}', admin=True).status == 401


def test_an_id_that_took_anothers_place_is_not_mistaken_for_it() -> None:
    shared = SharedMetrics(1)
    feedback = FeedbackCounter(
        LoadedDeployments(shared, 0, lambda *_: pytest.fail("nothing is loaded")), UserCounts(shared, 0)
    )
    for number in range(3 * metrics.REQUEST_IDS):
        feedback.remember(b"%d" % number, 1 + number % 2, number % USER_CELLS)
    reports = [{"request_id": str(number), "success": True} for number in range(0, 3 * metrics.REQUEST_IDS, 97)]
    counted = unknown = 0
    for start in range(0, len(reports), MAX_FEEDBACK):
        found = feedback.count(json.dumps({"feedback": reports[start : start + MAX_FEEDBACK]}).encode())
        counted, unknown = counted + found[0], unknown + found[1]
    assert counted + unknown == len(reports)
    assert unknown == shared.sum_slot(0)[metrics.UNKNOWN_FEEDBACK] > 0
    odd = sum(int(str(report["request_id"])) % 2 for report in reports)
    assert shared.sum_slot(2)[metrics.FEEDBACK] <= odd
    assert shared.sum_slot(1)[metrics.FEEDBACK] <= len(reports) - odd
    assert shared.sum_slot(1)[metrics.FEEDBACK] + shared.sum_slot(2)[metrics.FEEDBACK] == counted


def test_requests_and_feedback_are_counted_by_user_over_the_workers(server: ServerFamily) -> None:
    asked = UserCountsRequest(limits_s=dict.fromkeys(("blue", "green"), (1e-05 * 2**3, 1e-05 * 2**20)))
    server.counts(asked)
    who = ask(server, **{"x-user-key": "u", "x-request-id": "r"})
    for _ in range(29):
        assert ask(server, **{"x-user-key": "u"}) == who
    for _ in range(8):
        ask(server)
    report(server, {"request_id": "r", "success": True}, {"key": "u", "success": False})
    found = {name: messages.decode_user_counts(one.users) for name, one in server.counts(asked).deployments.items()}
    (bucket,) = np.flatnonzero(found[who][messages.CELL_REQUESTS, : messages.USER_BUCKETS])
    cell = found[who][:, bucket]
    assert (cell[messages.CELL_REQUESTS], cell[messages.CELL_ERRORS]) == (30, 0)
    assert (cell[messages.CELL_FEEDBACK], cell[messages.CELL_SUCCESSES]) == (2, 1)
    assert sum(cells[messages.CELL_REQUESTS, messages.KEYLESS_CELL] for cells in found.values()) == 8
    assert sum(int(cells[messages.CELL_REQUESTS].sum()) for cells in found.values()) == 38
    assert server.counts().deployments[who].users == ""


def test_a_new_worker_goes_on_from_the_counts_by_user_of_the_one_before() -> None:
    shared, slot = SharedMetrics(1), 3
    shared.header[metrics.WATCH], shared.header[metrics.WATCH + 1] = 7, slot
    for _ in range(2):
        UserCounts(shared, 0).count_request(slot, 5, 200, 0.0)
    _, cells = shared.get_user_counts(0)
    assert cells[5] == 2
    shared.header[metrics.WATCH] = 8
    UserCounts(shared, 0).count_request(slot, 5, 200, 0.0)
    assert cells[5] == 1, "another watch starts at 0"


def test_a_watch_that_is_none_is_refused(server: ServerFamily) -> None:
    for body in (b"{}", b'{"limits_s": {"blue": [2, 1]}}', b'{"limits_s": {"blue": [%s 1]}}' % (b"1," * 24)):
        assert server.admin("POST", body, COUNTS_PATH).status == 400


def test_a_watched_deployment_without_traffic_is_loaded_beside_the_other(
    server: ServerFamily, blue: Deployment, green: Deployment
) -> None:
    asked = UserCountsRequest(limits_s={"blue": (), "green": ()})
    assert {one.cold_s for one in server.counts(asked).deployments.values()} == {()}
    for generation in (2, 3):  # the second publication ends the loads that the first watch has begun
        assert server.publish(state_of(blue, green, blue=100, green=0), generation).status == 200
        server.counts(asked)
    loads: list[tuple[float, ...]] = [()]
    deadline = time.monotonic() + 120
    while min(map(len, loads)) < COLD_START_SAMPLES:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
        loads = [one.cold_s for one in server.counts(asked).deployments.values()]
        assert max(map(len, loads)) - min(map(len, loads)) <= 1, "they are loaded in turn"
    assert all(seconds > 0 for each in loads for seconds in each)
    ask(server, **{"x-user-key": "u"})
    assert {one.users for one in server.counts(asked).deployments.values()} == {""}, "no version was chosen for a user"
    assert [one.cold_s for one in server.counts(asked).deployments.values()] == loads, "and no more often"
