"""Workers that die or hang: the deployments that are charged.

A deployment that ends too many workers goes out of service.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from onnx_ops.serving.inference.cell_counts import CellCounter
from onnx_ops.serving.inference.deployments import TableRevision
from onnx_ops.serving.inference.traffic_router import TrafficRouter
from onnx_ops.serving.metrics import (
    HEARTBEAT,
    HUNG_RUN,
    INLINE_RUN,
    ISOLATION,
    OUT_OF_SERVICE,
    ROUTED,
    RUN_CELL,
    RUN_KINDS,
    RUN_SLOT,
    SELECTED,
    UNJUDGED,
    WORKER_DEATHS,
    SharedMetrics,
    get_column,
)
from onnx_ops.serving.rollout_counts import RolloutCounts
from onnx_ops.serving.workers.worker_health import (
    MIN_DEATHS,
    RunCounts,
    WorkerHealth,
    is_deadlier,
    share_death,
)
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, after, infer_body, serving, wait_until
from tests.support.endpoints import fileless_deployment
from tests.support.must import must

OLD, NEW = 1, 2
CELL = 5


def build_revision(weights: dict[str, int], generation: int = 1) -> TableRevision:
    deployments = tuple(map(fileless_deployment, weights))
    state = EndpointState(
        deployments=deployments, split=TrafficSplit(weights=weights), generation=generation
    )
    older = build_next_table(None, state_of(deployments[0], **{deployments[0].name: 100}))
    return TableRevision(
        number=generation, table=build_next_table(older, state), slots={"old": OLD, "new": NEW}
    )


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

    def die_on_threads(self, *runs: tuple[int, int], worker: int = 1) -> str:
        """Let a worker die while its threads run requests.

        A run has a slot, and was routed by the split or selected by the client.
        """
        counts = self.shared.get_thread_runs(worker)
        for slot, kind in runs:
            counts[RUN_KINDS * slot + kind] += 1
        names = self.health.record_death(worker)
        assert not any(counts)
        return names

    def count_deaths(self) -> tuple[int, int]:
        """Return the deaths of workers while they ran the old deployment, and the new one."""
        old, new = (self.shared.sum_slot(slot)[WORKER_DEATHS] for slot in (OLD, NEW))
        return old, new


@pytest.mark.parametrize("place", [INLINE_RUN, None, HUNG_RUN])
def test_record_death_during_run_charges_its_deployment(place: int | None) -> None:
    site = Site()
    if place == INLINE_RUN:
        site.die(NEW)
    else:
        state = site.shared.get_process_state(1)
        if place is not None:
            state[place + RUN_SLOT], state[place + RUN_CELL] = NEW, CELL
        assert site.die_on_threads((NEW, ROUTED)) == "new"
    totals = site.shared.sum_slot(NEW)
    assert (totals[WORKER_DEATHS], totals[get_column(500)]) == (1, 1)
    assert site.shared.sum_slot(OLD)[WORKER_DEATHS] == 0


def test_record_death_without_run_charges_no_deployment() -> None:
    site = Site()
    assert site.health.record_death(0) == ""
    assert [site.shared.sum_slot(slot)[WORKER_DEATHS] for slot in (0, OLD, NEW)] == [0, 0, 0]


def test_deployment_that_ends_workers_far_more_often_than_stable_goes_out_of_service() -> None:
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
def test_deaths_without_evidence_against_version_keep_it_in_service(
    old_deaths: int, new_deaths: int, cell: int
) -> None:
    site = Site()
    site.answer(OLD, 900)
    site.answer(NEW, 300)
    site.die(OLD, times=old_deaths, cell=cell)
    site.die(NEW, times=new_deaths, cell=cell)
    assert site.health.get_out_of_service() == {}
    assert site.shared.sum_slot(NEW)[WORKER_DEATHS] == new_deaths


def test_sole_deployment_with_traffic_stays_in_service() -> None:
    site = Site(old=0, new=100)
    site.die(NEW, times=20)
    assert site.health.get_out_of_service() == {}


@pytest.mark.parametrize(("cell", "errors"), [(KEYLESS_CELL + 1, 1), (0, 0)])
def test_request_of_dead_worker_counts_as_error_unless_selected(cell: int, errors: int) -> None:
    site = Site()
    counts = RolloutCounts(site.shared)
    revision = build_revision({"old": 90, "new": 10})
    counts.start_table(revision, 0.0)
    watch = UserCountsRequest(limits_s={"old": (), "new": ()})
    counts.collect(watch)
    worker, draw = CellCounter(site.shared, 1), TrafficRouter.from_table(revision.table).draw
    worker.count(draw, NEW, KEYLESS_CELL, 200, 0.0)
    site.die(NEW, cell=cell)
    # The next worker counts the lost request, and later workers do not count it again.
    for _ in range(2):
        CellCounter(site.shared, 1)
    _, found = decode_cells(counts.collect(watch).tables[-1].cells["new"])
    assert found[0, [CELL_REQUESTS, CELL_ERRORS]].tolist() == [1 + errors, errors]


def test_record_death_on_threads_charges_running_deployments_by_share() -> None:
    site = Site()
    assert site.die_on_threads((OLD, ROUTED), (NEW, ROUTED), (NEW, ROUTED)) == "old, new"
    assert site.health._deaths == {OLD: Fraction(1, 3), NEW: Fraction(2, 3)}
    assert site.count_deaths() == (1, 1)
    lost = [site.shared.sum_slot(slot)[get_column(500)] for slot in (OLD, NEW)]
    assert lost == [1, 2]


def test_record_death_with_runs_on_event_loop_and_thread_charges_both() -> None:
    site = Site()
    state = site.shared.get_process_state(1)
    state[INLINE_RUN + RUN_SLOT], state[INLINE_RUN + RUN_CELL] = OLD, CELL
    site.die_on_threads((NEW, ROUTED))
    assert site.health._deaths == {OLD: Fraction(1, 2), NEW: Fraction(1, 2)}


def test_record_death_of_hung_run_charges_it_alone_and_counts_lost_requests() -> None:
    site = Site()
    state = site.shared.get_process_state(1)
    state[HUNG_RUN + RUN_SLOT], state[HUNG_RUN + RUN_CELL] = NEW, CELL
    assert site.die_on_threads((OLD, ROUTED), (NEW, ROUTED)) == "new"
    assert site.health._deaths == {NEW: Fraction(1)}
    assert site.count_deaths() == (0, 1)
    assert site.shared.sum_slot(OLD)[get_column(500)] == 1


@pytest.mark.parametrize(("inline", "charged"), [(OLD, {OLD: 1}), (0, {NEW: 1})])
def test_record_hang_charges_event_loop_run_in_preference_to_thread_runs(
    inline: int, charged: dict[int, int]
) -> None:
    site = Site()
    state = site.shared.get_process_state(1)
    state[INLINE_RUN + RUN_SLOT], state[INLINE_RUN + RUN_CELL] = inline, CELL
    site.health.record_hang(1)
    site.die_on_threads((NEW, ROUTED))
    assert site.health._deaths == charged


def test_record_death_charges_no_share_to_selected_run() -> None:
    site = Site()
    site.die_on_threads((NEW, SELECTED), (OLD, ROUTED))
    assert site.health._deaths == {OLD: Fraction(1, 2)}
    assert site.count_deaths() == (1, 1)
    assert site.shared.sum_slot(NEW)[UNJUDGED + get_column(500)] == 1


def test_record_death_ignores_share_of_unpublished_deployment() -> None:
    site = Site()
    assert site.die_on_threads((9, ROUTED), (NEW, ROUTED)) == "new"
    assert site.health._deaths == {NEW: Fraction(1, 2)}


def test_record_death_of_two_versions_twice_isolates_runs_until_one_is_out_of_service() -> None:
    site = Site()
    site.answer(OLD, 900)
    site.answer(NEW, 100)
    both = (OLD, ROUTED), (NEW, ROUTED)
    site.die_on_threads(*both)
    assert site.shared.header[ISOLATION] == 0
    site.die_on_threads(*both, worker=0)
    assert site.shared.header[ISOLATION] == 1
    site.die_on_threads((NEW, ROUTED))
    assert (site.shared.header[ISOLATION], site.health.get_out_of_service()) == (1, {})
    site.die_on_threads((NEW, ROUTED))
    assert (site.shared.header[ISOLATION], set(site.health.get_out_of_service())) == (0, {"new"})
    site.health.start_table(build_revision({"old": 100, "new": 0}, 2))
    assert site.health._deaths == {}


def count_deaths_until_out(
    site: Site, random: Random, threads: int, percent: int, killers: set[int]
) -> int | None:
    """Return the number of deaths that take the new deployment out of service.

    Return None if it is still in service after 40 deaths.

    All threads run requests by the split, and those of `killers` end the worker. Isolated workers
    run one deployment.
    """

    def draw() -> int:
        return NEW if random.random() * 100 < percent else OLD

    for number in range(1, 41):
        site.answer(OLD, 10 * (100 - percent))
        site.answer(NEW, 10 * percent)
        killer = draw()
        while killer not in killers:
            killer = draw()
        others = [draw() for _ in range(threads - 1)]
        if site.shared.header[ISOLATION]:
            others = [slot for slot in others if slot == killer]
        site.die_on_threads(*((slot, ROUTED) for slot in [killer, *others]))
        if site.health.get_out_of_service():
            return number
    return None


@pytest.mark.parametrize("threads", [1, 2, 8, 256])
@pytest.mark.parametrize(("percent", "most"), [(1, 5), (10, 5), (50, 20)])
def test_record_death_on_busy_threads_puts_guilty_and_rarely_innocent_version_out_of_service(
    threads: int, percent: int, most: int
) -> None:
    site, random = Site(), Random(1)  # noqa: S311 (a simulation)
    weights = {"old": 100 - percent, "new": percent}
    outcomes: dict[bool, list[int | None]] = {True: [], False: []}
    for generation in range(2, 22):
        is_guilty = generation % 2 == 0
        site.health.start_table(build_revision(weights, generation))
        killers = {NEW} if is_guilty else {OLD, NEW}
        outcomes[is_guilty].append(count_deaths_until_out(site, random, threads, percent, killers))
    assert all(number is not None and number <= most for number in outcomes[True]), outcomes
    assert sum(number is not None for number in outcomes[False]) <= 1, outcomes


runs_by_slot = st.dictionaries(
    st.integers(1, 63), st.builds(RunCounts, st.integers(0, 256), st.integers(0, 256)), max_size=8
)


@given(runs_by_slot)
def test_share_death_sums_to_share_of_routed_runs(runs: dict[int, RunCounts]) -> None:
    shares = share_death(runs)
    routed, total = sum(r.routed for r in runs.values()), sum(r.total for r in runs.values())
    assert sum(shares.values()) == (Fraction(routed, total) if total else 0)
    assert all(share > 0 for share in shares.values())


@given(
    threads=st.sampled_from([1, 2, 8, 256]),
    percent=st.integers(1, 99),
    deaths=st.integers(1, 200),
)
def test_is_deadlier_with_deaths_in_proportion_to_traffic_returns_false(
    threads: int, percent: int, deaths: int
) -> None:
    """Any run ends the worker, and the threads run as the traffic is split.

    The deaths have the expected shares then.
    """
    new = Fraction(percent, 100)
    charged = deaths * new, deaths * (1 - new)
    requests = 1000 * threads * percent, 1000 * threads * (100 - percent)
    assert not is_deadlier(charged[0], requests[0], charged[1], requests[1])


@given(percent=st.integers(1, 50), requests=st.integers(1, 10**6))
def test_is_deadlier_with_20_times_the_deaths_and_at_most_equal_traffic_returns_true(
    percent: int, requests: int
) -> None:
    new, old = requests * percent, requests * (100 - percent)
    assert is_deadlier(Fraction(10), new, Fraction(1, 2), old)


@given(requests=st.integers(0, 10**6), share=st.fractions(0, 1))
def test_is_deadlier_of_deployment_compared_with_itself_returns_false(
    requests: int, share: Fraction
) -> None:
    deaths = requests * share
    assert not is_deadlier(deaths, requests, deaths, requests)


@given(st.fractions(0, MIN_DEATHS).filter(lambda share: share < MIN_DEATHS))
def test_is_deadlier_below_three_deaths_returns_false(deaths: Fraction) -> None:
    assert not is_deadlier(deaths, 0, Fraction(), 10**9)


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
"""  # noqa: E501
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
    """Yield a server whose workers hang in runs of green."""
    options = "--workers=2", "--run-timeout=200 ms"
    with serving(tmp_path, *options, program=after(request.param), blue=90, green=10) as server:
        yield server


def find_key(server: Server, name: str) -> str:
    """Return a user of a deployment, by the table."""
    router = TrafficRouter.from_table(build_next_table(None, must(server.state())))
    users = (str(number) for number in range(1000))
    return next(
        user
        for user in users
        if router.route_cell(router.draw, router.get_cell(user.encode())) == name
    )


def list_out_of_service(server: Server) -> set[str]:
    return set(codec.loads(server.admin("GET").body, AdminState).out_of_service)


def test_version_that_hangs_workers_goes_out_of_service(hanging: Server) -> None:
    blue, green = ({"x-user-key": find_key(hanging, name)} for name in ("blue", "green"))
    for _ in range(20):
        assert hanging.infer([1, 2], blue).status == 200
    for _ in range(MIN_DEATHS):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            hanging.infer([1, 2], green)
        assert hanging.infer([1, 2], blue).status == 200
    # The client gets the error a little before the supervisor records the death.
    wait_until(lambda: list_out_of_service(hanging) == {"green"})
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
    assert f'onnx_ops_worker_restarts_total{{endpoint="state"}} {MIN_DEATHS}\n' in text
    assert hanging.counts().deployments["green"].statuses == {"500": MIN_DEATHS, "503": 1}
    index = json.loads(hanging.call("POST", "/v2/repository/index").body)
    assert {model["version"]: model["state"] for model in index} == {
        "1": "READY",
        "2": "UNAVAILABLE",
    }
    assert hanging.call("GET", "/v2/models/m/versions/2/ready").status == 503

    published = must(hanging.state())
    rolled_back = EndpointState(
        deployments=published.deployments, split=TrafficSplit(weights={"blue": 100})
    )
    assert hanging.publish(rolled_back, 2).status == 200
    assert list_out_of_service(hanging) == set()


def test_version_that_hangs_only_on_requests_that_select_it_stays_in_service(
    hanging: Server,
) -> None:
    for _ in range(MIN_DEATHS):
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            hanging.call("POST", INFER, infer_body([1, 2]), {"azureml-model-deployment": "green"})
    # The client gets the error a little before the supervisor records the death.
    restarts = f'onnx_ops_worker_restarts_total{{endpoint="state"}} {MIN_DEATHS}\n'.encode()
    wait_until(lambda: restarts in hanging.call("GET", "/metrics").body)
    assert list_out_of_service(hanging) == set()


DIE_BESIDE = """
import os, signal, time
from onnx_ops.serving.inference import deployments
deployments.LoadedDeployment.should_run_inline = lambda *_: False
answer = deployments.LoadedDeployment.answer
def die(self, *arguments):
    if self.deployment.name == "green":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists("MARK/slow"):
        open("MARK/running", "w").close()
        time.sleep(3600)
    return answer(self, *arguments)
deployments.LoadedDeployment.answer = die
"""


def test_version_that_ends_workers_beside_other_goes_out_of_service(tmp_path: Path) -> None:
    preamble = DIE_BESIDE.replace("MARK", str(tmp_path))
    with serving(
        tmp_path, "--workers=1", "--threads=2", program=after(preamble), blue=50, green=50
    ) as server:
        blue, green = ({"x-user-key": find_key(server, name)} for name in ("blue", "green"))
        slow, running = tmp_path / "slow", tmp_path / "running"

        def infer_lost(headers: dict[str, str]) -> None:
            with suppress(ConnectionError, http.client.HTTPException):
                server.infer([1, 2], headers)

        # In each round, the requests of both versions run at the same time.
        for _ in range(2):
            slow.touch()
            beside = threading.Thread(target=infer_lost, args=(blue,))
            beside.start()
            wait_until(running.exists)
            slow.unlink()
            infer_lost(green)
            beside.join()
            running.unlink()
            assert server.infer([1, 2], blue).status == 200
        counts = server.counts().deployments
        assert (counts["blue"].statuses["500"], counts["green"].statuses["500"]) == (2, 2)
        assert "while it ran blue, green" in server.log()
        assert "runs one deployment at a time" in server.log()
        assert list_out_of_service(server) == set()
        for _ in range(12):
            infer_lost(green)
            for _ in range(4):
                assert server.infer([1, 2], blue).status == 200
            if list_out_of_service(server):
                break
        assert list_out_of_service(server) == {"green"}
        assert server.infer([1, 2], green).status == 503
