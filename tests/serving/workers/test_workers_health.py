"""Workers that die or stand still: what is charged with it, and what is taken out of service."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_REQUESTS,
    KEYLESS_CELL,
    AdminState,
    UserCountsRequest,
    decode_cells,
)
from onnx_ops.protocol.routing_table import build_next_table
from onnx_ops.serving.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import (
    HEARTBEAT,
    HUNG_RUN,
    INLINE_RUN,
    OUT_OF_SERVICE,
    RUN_CELL,
    RUN_SLOT,
    THREAD_RUN,
    WORKER_DEATHS,
    SharedMetrics,
    get_column,
)
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.serving.workers.worker_health import MIN_DEATHS, WorkerHealth
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, after, infer_body, serving, wait_until
from tests.support.endpoints import fileless_deployment
from tests.support.must import must

OLD, NEW = 1, 2
CELL = 5


def build_revision(weights: dict[str, int], generation: int = 1) -> TableRevision:
    deployments = tuple(map(fileless_deployment, weights))
    state = EndpointState(deployments=deployments, split=TrafficSplit(weights=weights), generation=generation)
    older = build_next_table(None, state_of(deployments[0], **{deployments[0].name: 100}))
    return TableRevision(number=generation, table=build_next_table(older, state), slots={"old": OLD, "new": NEW})


class Site:
    """The health of two workers, without processes."""

    def __init__(self, **weights: int) -> None:
        self.shared = SharedMetrics(2)
        self.health = WorkerHealth(self.shared)
        self.health.start_table(build_revision(weights or {"old": 90, "new": 10}))

    def answer(self, slot: int, requests: int) -> None:
        self.shared.get_row(0, slot)[get_column(200)] += requests

    def die(self, slot: int, *, place: int = INLINE_RUN, cell: int = CELL, times: int = 1) -> None:
        """Let a worker die while it runs a request of a user."""
        for _ in range(times):
            state = self.shared.get_process_state(1)
            state[HEARTBEAT], state[place + RUN_SLOT], state[place + RUN_CELL] = 1, slot, cell
            self.health.record_death(1)
            assert state[HEARTBEAT] == state[place + RUN_SLOT] == 0


@pytest.mark.parametrize("place", [INLINE_RUN, THREAD_RUN, HUNG_RUN])
def test_record_death_charges_the_deployment_that_ran(place: int) -> None:
    site = Site()
    site.die(NEW, place=place)
    totals = site.shared.sum_slot(NEW)
    assert (totals[WORKER_DEATHS], totals[get_column(500)]) == (1, 1)
    assert site.shared.sum_slot(OLD)[WORKER_DEATHS] == 0


def test_record_death_without_a_run_charges_no_deployment() -> None:
    site = Site()
    assert site.health.record_death(0) == ""
    assert [site.shared.sum_slot(slot)[WORKER_DEATHS] for slot in (0, OLD, NEW)] == [0, 0, 0]


def test_a_deployment_that_ends_workers_more_often_than_stable_goes_out_of_service() -> None:
    site = Site()
    site.answer(OLD, 900)
    site.answer(NEW, 100)
    site.die(NEW, times=MIN_DEATHS - 1)
    assert site.health.get_out_of_service() == {}
    site.die(NEW)
    assert set(site.health.get_out_of_service()) == {"new"}
    assert site.shared.header[OUT_OF_SERVICE] == 1 << NEW
    site.health.start_table(build_revision({"old": 100, "new": 0}, 2))
    assert site.health.get_out_of_service() == {}


@pytest.mark.parametrize(
    ("old_deaths", "new_deaths", "cell"),
    [
        pytest.param(9, 3, CELL, id="as often as stable"),
        pytest.param(30, 0, CELL, id="stable itself"),
        pytest.param(0, 30, 0, id="a client selects it"),
    ],
)
def test_deaths_that_say_nothing_about_the_version_take_nothing_out(
    old_deaths: int, new_deaths: int, cell: int
) -> None:
    site = Site()
    site.answer(OLD, 900)
    site.answer(NEW, 300)
    site.die(OLD, times=old_deaths, cell=cell)
    site.die(NEW, times=new_deaths, cell=cell)
    assert site.health.get_out_of_service() == {}
    assert site.shared.sum_slot(NEW)[WORKER_DEATHS] == new_deaths


def test_the_only_deployment_with_traffic_stays_in_service() -> None:
    site = Site(old=0, new=100)
    site.die(NEW, times=20)
    assert site.health.get_out_of_service() == {}


@pytest.mark.parametrize(("cell", "errors"), [(KEYLESS_CELL + 1, 1), (0, 0)])
def test_the_request_that_a_dead_worker_ran_counts_as_an_error_unless_it_was_selected(cell: int, errors: int) -> None:
    site = Site()
    counts = RolloutCounts(site.shared)
    revision = build_revision({"old": 90, "new": 10})
    counts.start_table(revision, 0.0)
    watch = UserCountsRequest(limits_s={"old": (), "new": ()})
    counts.collect(watch)
    worker, draw = CellCounter(site.shared, 1), TrafficRouter.from_table(revision.table).draw
    worker.count(draw, NEW, KEYLESS_CELL, 200, 0.0)
    site.die(NEW, cell=cell)
    for _ in range(2):  # only the next worker counts it
        CellCounter(site.shared, 1)
    _, found = decode_cells(counts.collect(watch).tables[-1].cells["new"])
    assert found[0, [CELL_REQUESTS, CELL_ERRORS]].tolist() == [1 + errors, errors]


HANG_INLINE = """
import time
from onnx_ops.serving.inference import deployments
from onnx_ops.serving.workers import worker_pool
worker_pool._HANG_S = 1.0
deployments.LoadedDeployment.should_run_inline = lambda *_: True  # on a busy machine it could be queued
answer = deployments.LoadedDeployment.answer_inline
def hang(self, *arguments):
    if self.deployment.name == "green":
        time.sleep(3600)
    return answer(self, *arguments)
deployments.LoadedDeployment.answer_inline = hang
"""
HANG_ON_THREAD = """
import time
from onnx_ops.serving.inference import deployments, run_monitor
run_monitor.RunMonitor.__init__.__kwdefaults__["grace_s"] = 0.2
deployments.LoadedDeployment.should_run_inline = lambda self, *_: self.deployment.name != "green"
answer = deployments.LoadedDeployment.answer
def hang(self, *arguments):
    if self.deployment.name == "green":
        time.sleep(3600)
    return answer(self, *arguments)
deployments.LoadedDeployment.answer = hang
"""


@pytest.fixture(params=[HANG_INLINE, HANG_ON_THREAD], ids=["event loop", "thread"])
def hanging(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose workers stand still in runs of green."""
    options = "--workers=2", "--run-timeout=200 ms"
    with serving(tmp_path, *options, program=after(request.param), blue=90, green=10) as server:
        yield server


def find_key(server: Server, name: str) -> str:
    """Return a user of a deployment, by the table."""
    router = TrafficRouter.from_table(build_next_table(None, must(server.state())))
    users = (str(number) for number in range(1000))
    return next(user for user in users if router.route_cell(router.draw, router.get_cell(user.encode())) == name)


def list_out_of_service(server: Server) -> set[str]:
    return set(codec.loads(server.admin("GET").body, AdminState).out_of_service)


def test_a_version_that_hangs_its_workers_goes_out_of_service_and_the_other_one_answers(hanging: Server) -> None:
    blue, green = ({"x-user-key": find_key(hanging, name)} for name in ("blue", "green"))
    for _ in range(20):
        assert hanging.infer([1, 2], blue).status == 200
    for _ in range(MIN_DEATHS):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            hanging.infer([1, 2], green)
        assert hanging.infer([1, 2], blue).status == 200
    wait_until(lambda: list_out_of_service(hanging) == {"green"})  # the client sees the death a little earlier
    answer = hanging.infer([1, 2], green)
    assert answer.status == 503
    assert "out of service" in answer.json()["error"]
    assert hanging.infer([1, 2], blue).status == 200

    assert "out of service" in hanging.log()
    assert "out of service" in hanging.call("GET", "/").body.decode()
    text = hanging.call("GET", "/metrics").body.decode()
    labels = 'endpoint="state",deployment="green",version="2",variant="fp32"'
    assert f"onnx_ops_out_of_service{{{labels}}} 1\n" in text
    assert f"onnx_ops_worker_deaths_total{{{labels}}} {MIN_DEATHS}\n" in text
    assert hanging.counts().deployments["green"].statuses == {"500": MIN_DEATHS, "503": 1}
    index = json.loads(hanging.call("POST", "/v2/repository/index").body)
    assert {model["version"]: model["state"] for model in index} == {"1": "READY", "2": "UNAVAILABLE"}
    assert hanging.call("GET", "/v2/models/m/versions/2/ready").status == 503

    published = must(hanging.state())
    rolled_back = EndpointState(deployments=published.deployments, split=TrafficSplit(weights={"blue": 100}))
    assert hanging.publish(rolled_back, 2).status == 200
    assert list_out_of_service(hanging) == set()


def test_a_client_that_selects_a_version_takes_it_not_out_of_service(hanging: Server) -> None:
    for _ in range(MIN_DEATHS):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            hanging.call("POST", INFER, infer_body([1, 2]), {"azureml-model-deployment": "green"})
    assert list_out_of_service(hanging) == set()
