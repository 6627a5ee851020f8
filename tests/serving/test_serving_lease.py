"""A table with a fallback, on a server with a lease.

The candidate gets traffic only while the server has a lease.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.protocol.messages import (
    DEPLOYMENT_HEADER,
    LEASE_PATH,
    TABLE_PATH,
    Lease,
    UserCountsRequest,
)
from onnx_ops.protocol.routing_table import NOTICE_S, RoutingTable
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.support.processes import until
from tests.support.server import ServerFamily

WATCH = UserCountsRequest(limits_s={"blue": (), "green": ()})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerFamily]:
    blue = scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0)
    green = scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0)
    state = replace(state_of(blue, green, blue=50, green=50), generation=3)
    table = RoutingTable(state=state, layout=("green", "blue"), fallback="blue")
    with ServerFamily(folder=tmp_path / "state", options=("--workers", "2")) as server:
        assert server.admin("PUT", codec.dumps(table), TABLE_PATH).status == 200
        server.counts(WATCH)
        yield server


def set_lease(server: ServerFamily, seconds: float) -> Lease:
    end = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds if seconds else 0.0
    answer = server.admin("PUT", codec.dumps(Lease(until_ns=int(end * 1e9))), LEASE_PATH)
    assert answer.status == 200
    return codec.loads(answer.body, Lease)


def ask(server: ServerFamily, count: int, **headers: str) -> Counter[str]:
    """Send requests; return the deployments that answered, with their counts."""
    body = {"inputs": {"x": [[1.0, 1.0]]}}
    answers = [server.call("POST", "/invocations", body, headers) for _ in range(count)]
    assert {answer.status for answer in answers} == {200}
    return Counter(answer.headers[DEPLOYMENT_HEADER] for answer in answers)


def test_server_with_fallback_gives_candidate_traffic_only_during_lease(
    server: ServerFamily,
) -> None:
    assert ask(server, 40) == {"blue": 40}
    assert set_lease(server, 60).lapsed == 40
    assert ask(server, 60).keys() == {"blue", "green"}
    set_lease(server, 0)
    assert ask(server, 40) == {"blue": 40}


def test_lease_expiry_moves_candidate_traffic_to_fallback(server: ServerFamily) -> None:
    set_lease(server, 1.0)
    until(lambda: ask(server, 20) == {"blue": 20}, "the end of the lease", seconds=20)
    assert ask(server, 60) == {"blue": 60}


def test_server_after_restart_has_no_lease(server: ServerFamily) -> None:
    set_lease(server, 60)
    assert ask(server, 60).keys() == {"blue", "green"}
    server.destroy()
    server.start()
    assert ask(server, 60) == {"blue": 60}


def test_requests_without_lease_are_not_judged(server: ServerFamily) -> None:
    ask(server, 30)
    set_lease(server, 60)
    answered = ask(server, 50)
    (table,) = server.counts(WATCH).tables
    assert {name: sum(one.statuses.values()) for name, one in table.deployments.items()} == answered
    assert sum(table.deployments["blue"].unjudged.values()) == 30


def test_request_that_selects_deployment_without_lease_reaches_it(server: ServerFamily) -> None:
    assert ask(server, 5, **{"azureml-model-deployment": "green"}) == {"green": 5}


def test_published_state_without_fallback_and_lease_serves_candidate(
    server: ServerFamily, tmp_path: Path
) -> None:
    blue = scaling_deployment(tmp_path / "again" / "blue", name="blue", version="1", scale=2.0)
    green = scaling_deployment(tmp_path / "again" / "green", name="green", version="2", scale=3.0)
    assert server.publish(state_of(blue, green, blue=50, green=50), 4).status == 200
    assert ask(server, 60).keys() == {"blue", "green"}


class TestServingLease:
    """A table that needs a lease for every request."""

    @pytest.fixture
    def leased(self, server: ServerFamily, tmp_path: Path) -> ServerFamily:
        blue = scaling_deployment(tmp_path / "last", name="blue", version="1", scale=2.0)
        state = replace(state_of(blue, blue=100), generation=5)
        table = RoutingTable(state=state, layout=("blue",), is_leased=True)
        assert server.admin("PUT", codec.dumps(table), TABLE_PATH).status == 200
        return server

    def test_server_without_lease_is_unready_and_refuses_requests(
        self, leased: ServerFamily
    ) -> None:
        assert leased.call("GET", "/v2/health/ready").status == 503
        assert leased.call("GET", "/v2/health/live").status == 200
        for headers in ({}, {"azureml-model-deployment": "blue"}):
            answer = leased.call("POST", "/invocations", {"inputs": {"x": [[1.0, 1.0]]}}, headers)
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert set_serving_lease(leased, 60).lapsed == 2
        assert leased.call("GET", "/v2/health/ready").status == 200
        assert ask(leased, 20) == {"blue": 20}

    def test_server_shortly_before_lease_expiry_is_unready_but_answers(
        self, leased: ServerFamily
    ) -> None:
        set_serving_lease(leased, NOTICE_S - 1)
        assert leased.call("GET", "/v2/health/ready").status == 503
        assert ask(leased, 5) == {"blue": 5}

    def test_server_after_lease_expiry_or_restart_refuses_requests(
        self, leased: ServerFamily
    ) -> None:
        set_serving_lease(leased, 1.0)
        body = {"inputs": {"x": [[1.0, 1.0]]}}
        until(
            lambda: leased.call("POST", "/invocations", body).status == 503,
            "the end of the lease",
            seconds=20,
        )
        set_serving_lease(leased, 60)
        assert ask(leased, 5) == {"blue": 5}
        leased.destroy()
        leased.start()
        assert leased.call("POST", "/invocations", body).status == 503

    def test_requests_refused_without_lease_are_not_judged(self, leased: ServerFamily) -> None:
        leased.call("POST", "/invocations", {"inputs": {"x": [[1.0, 1.0]]}})
        table = leased.counts(UserCountsRequest(limits_s={"blue": ()})).tables[-1]
        assert not any(table.deployments["blue"].statuses.values())


def set_serving_lease(server: ServerFamily, seconds: float) -> Lease:
    end = time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
    answer = server.admin(
        "PUT", codec.dumps(Lease(until_ns=0, serving_until_ns=int(end * 1e9))), LEASE_PATH
    )
    assert answer.status == 200
    return codec.loads(answer.body, Lease)
