"""SIGKILL under load: of a worker, of the supervisor, and during a publication."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import state_of
from tests.chaos.chaos_parts import Make, Patient
from tests.support.chaos import Victim, count_moments, publish_and_kill
from tests.support.load import LoadPlan, LoadProcess
from tests.support.processes import until
from tests.support.server import ServerFamily, scaled

Plan = Callable[..., LoadPlan]


@pytest.fixture
def server(family: Make, blue: Deployment) -> ServerFamily:
    server: ServerFamily = family("--workers", "2")
    assert server.publish(state_of(blue, blue=100), 1).status == 200
    return server


def test_worker_killed_under_load_fails_at_most_one_request_per_connection_and_is_replaced(
    server: ServerFamily, plan: Plan
) -> None:
    connections = 8
    with LoadProcess(plan(server, connections=connections)) as load:
        for turn in range(1, 4):
            before = server.workers()
            assert len(before) == 2
            os.kill(before[0], signal.SIGKILL)
            until(lambda: len(set(server.workers()) - {before[0]}) == 2, "another worker")  # noqa: B023
            until(
                lambda: server.call("GET", "/v2/health/ready").status == 200,
                f"readiness after kill {turn}",
            )
            text = server.call("GET", "/metrics").body.decode()
            assert re.search(rf"^onnx_ops_worker_restarts_total{{.*}} {turn}$", text, re.MULTILINE)
        records = load.stop()
    failures = records.failures()
    assert set(failures) <= {"reset", "closed"}, failures
    assert sum(failures.values()) <= 3 * connections
    assert len(records) > 100
    Patient(server).is_well()


def test_workers_after_supervisor_kill_serve_until_next_supervisor_starts(
    server: ServerFamily, plan: Plan, blue: Deployment, green: Deployment
) -> None:
    orphans = server.workers()
    port = server.port
    with LoadProcess(plan(server)) as load:
        server.kill()
        for _ in range(20):
            Patient(server).is_well()
        assert set(orphans) <= set(server.processes())
        server.start()
        assert server.port == port
        until(lambda: not set(orphans) & set(server.processes()), "the end of the orphans")
        assert server.publish(state_of(blue, green, blue=0, green=100), 2).status == 200
        for _ in range(50):
            assert server.call("POST", "/invocations", b'{"inputs": {"x": [[1, 2]]}}').json() == {
                "predictions": {"y": [[3.0, 6.0]]}
            }
        records = load.stop()
    assert records.failures() == {}
    assert set(records.by_deployment()) == {"blue", "green"}
    assert server.stop() == 0


def test_supervisor_killed_twice_leaves_no_orphaned_process(server: ServerFamily) -> None:
    for _ in range(2):
        server.kill()
        server.start()
    until(lambda: len(server.processes()) == 3, "three processes")
    Patient(server).is_well()
    assert server.stop() == 0
    assert server.processes() == []


def test_sigterm_under_load_completes_requests_in_progress(
    server: ServerFamily, plan: Plan
) -> None:
    with LoadProcess(plan(server)) as load:
        until(lambda: _answered(server) > 50, "load")
        reported_at = time.monotonic_ns()
        assert server.stop() == 0
        assert server.processes() == []
        records = load.stop()
    begun = records.sent_ns < reported_at
    assert begun.sum() > 0
    assert (records.status[begun] == 200).all(), records.failures()
    assert set(records.failures()) <= {"refused", "reset", "closed"}, records.failures()


def _answered(server: ServerFamily) -> int:
    return sum(sum(counts.statuses.values()) for counts in server.counts().deployments.values())


@pytest.mark.nightly
@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["supervisor", "worker"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_kill_during_publication_violates_no_invariant(
    tmp_path: Path, blue: Deployment, victim: Victim, share: float, moments_of_a_publication: int
) -> None:
    """Each kind is killed at three moments; `benchmarks/chaos.py` covers all moments."""
    moment = int(share * moments_of_a_publication)
    outcome = publish_and_kill(tmp_path / "state", blue, moment=moment, victim=victim)
    assert outcome.reached
    assert outcome.broken(victim) == []


@pytest.fixture(scope="module")
def moments_of_a_publication(tmp_path_factory: pytest.TempPathFactory) -> int:
    root = tmp_path_factory.mktemp("counted")
    counted = count_moments(root / "state", scaled(root, "blue"))
    assert counted >= 10, "the order is not seen"
    return counted
