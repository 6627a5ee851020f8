"""Several processes behind one port.

The tests kill one or all of them, and check which data remain and how counts add up.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from onnx_ops import codec
from onnx_ops.domain.endpoint import Deployment
from onnx_ops.domain.execution import Execution, SessionSettings
from onnx_ops.protocol.server_process import AUDIT_FILE
from onnx_ops.serving.metrics import SharedMetrics
from onnx_ops.serving.workers.worker import count_parallel_runs
from onnx_ops.serving.workers.worker_health import WorkerHealth
from onnx_ops.serving.workers.worker_pool import WorkerPool, WorkerProcess
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Server, after, infer_body, serving
from tests.support.load import LoadPlan, Payload
from tests.support.publish_stress import stress_publications


@pytest.mark.parametrize(
    ("deaths", "expected_s"),
    [
        ("run run run", [0.0, 0.4, 0.8]),
        ("run run other run", [0.0, 0.4, 0.0, 0.8]),
        ("run run old-run run", [0.0, 0.4, 0.0, 0.4]),
        ("run run old-other run", [0.0, 0.4, 0.0, 0.0]),
        ("run run run run run run", [0.0, 0.4, 0.8, 1.6, 2.0, 2.0]),
        ("load load load", [0.0, 0.4, 0.8]),
        ("run run load run", [0.0, 0.4, 0.0, 0.8]),
    ],
)
def test_compute_pause_s_grows_only_with_deaths_of_worker_during_run_or_load(
    deaths: str, expected_s: list[float]
) -> None:
    health = WorkerHealth(SharedMetrics(1))
    pool = WorkerPool(1, Mock(), keep=(), health=health, max_body=0)

    def die(cause: str) -> float:
        born_at = time.monotonic() - (3600 if cause.startswith("old") else 0)
        worker = WorkerProcess(0, 1, Mock(), Mock(), Mock(), started_at=born_at)
        return pool._compute_pause_s(
            worker, was_ready=cause != "load", was_running=cause.endswith("run")
        )

    assert [die(cause) for cause in deaths.split()] == pytest.approx(expected_s)


def test_supervisor_has_one_thread_and_shares_memory_with_workers(two_workers: Server) -> None:
    assert len(os.listdir(f"/proc/{two_workers.supervisor}/task")) == 1
    for pid in two_workers.workers():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        private = kib["Private_Dirty"] + kib["Private_Clean"]
        assert private < kib["Rss"] / 2


def test_connections_after_kill_of_all_workers_wait_and_counts_remain(two_workers: Server) -> None:
    for _ in range(30):
        two_workers.infer([1, 2])
    for pid in two_workers.workers():
        os.kill(pid, signal.SIGKILL)
    for _ in range(10):
        assert two_workers.infer([1, 2]).status == 200
    labels = 'endpoint="state",deployment="blue",version="1",variant="fp32"'
    text = two_workers.call("GET", "/metrics").body.decode()
    counts = [line for line in text.splitlines() if line.startswith("onnx_ops_requests_total")]
    assert counts == [f'onnx_ops_requests_total{{{labels},status="200"}} 40']
    assert f"onnx_ops_request_duration_seconds_count{{{labels}}} 40\n" in text
    assert 'onnx_ops_workers{endpoint="state"} 2\n' in text


def test_publication_to_several_workers_under_load_leaves_no_stale_response(
    two_workers: Server, blue: Deployment
) -> None:
    payloads = [Payload(body=infer_body([1, 2]))]
    plan = LoadPlan(
        url=two_workers.url(INFER), payloads=payloads, connections=8, keys=50, seconds=300
    )
    seen = stress_publications(two_workers, blue, plan, publications=40)
    assert seen.records.failures() == {}
    assert seen.stale == 0
    assert len(seen.records.by_deployment()) > 10, "too few of the published versions answered"
    # If each publication had returned a second before it began, the check must find stale answers.
    early = tuple(
        replace(p, returned_ns=p.begun_ns - 10**9, begun_ns=p.begun_ns - 10**9)
        for p in seen.publications
    )
    assert replace(seen, publications=early).stale > 0


POISON = """
import os
from onnx_ops.serving.workers import worker
load = worker.Worker._load
def poisoned(self, deployment, row, replica):
    if deployment.name == "poison":
        os.kill(os.getpid(), 9)
    return load(self, deployment, row, replica)
worker.Worker._load = poisoned
"""


def test_publish_of_model_that_kills_workers_is_refused(tmp_path: Path, green: Deployment) -> None:
    with serving(tmp_path, "--workers=2", program=after(POISON), blue=100) as server:
        poison = replace(green, name="poison")
        answer = server.publish(state_of(poison, poison=100), 2)
        assert answer.status == 422
        error = answer.json()
        assert error["what"] == "a worker process ended 2 times while it loaded the state"
        assert error["why"]
        assert error["remedy"]
        assert server.generation() == 1
        assert {server.who_answers() for _ in range(10)} == {"blue"}
        assert server.publish(state_of(green, green=100), 2).status == 200
        assert {server.who_answers() for _ in range(10)} == {"green"}


@pytest.mark.nightly
def test_server_with_table_that_kills_workers_accepts_next_publication(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    poison = replace(green, name="poison")
    assert server.publish(state_of(poison, poison=100), 1).status == 200
    server.stop()
    server.program = after(POISON)
    server.start()
    answer = server.infer([1, 2])
    assert answer.status == 503
    assert "ended repeatedly" in answer.json()["error"]
    assert server.call("GET", "/v2/health/ready").status == 503
    assert set(server.admin("GET").json()["failed"]) == {"poison"}
    assert server.publish(state_of(blue, blue=100), 2).status == 200
    assert server.who_answers() == "blue"


def test_admin_socket_admits_owner_without_token_and_audits_changes(
    tmp_path: Path, blue: Deployment
) -> None:
    # The path is longer than the limit for Unix sockets.
    folder = tmp_path / ("deep" * 30) / "state"
    folder.mkdir(parents=True)
    address = folder / "admin.sock"
    with Server(folder=folder, options=[f"--admin-socket={address}"]) as server:
        assert address.stat().st_mode & 0o777 == 0o600
        handle = os.open(folder, os.O_RDONLY)
        connection = http.client.HTTPConnection("localhost", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(f"/proc/self/fd/{handle}/admin.sock")
        os.close(handle)
        connection.request(
            "PUT", "/admin/state", codec.dumps(replace(state_of(blue, blue=100), generation=1))
        )
        assert connection.getresponse().status == 200
        connection.close()
        assert (
            server.admin("PUT", codec.dumps(replace(state_of(blue, blue=100), generation=2))).status
            == 200
        )
        lost = replace(blue, location="/unrouted", name="lost", manifest=blue.release)
        assert server.publish(state_of(lost, lost=100), 3).status == 422
        lines = [json.loads(line) for line in (folder / AUDIT_FILE).read_text().splitlines()]
        entries = [(line["who"], line["what"], line["generation"]) for line in lines]
        uid = f"uid:{os.getuid()}"
        assert entries == [
            (uid, "publish", 1),
            (uid, "published", 1),
            ("token", "publish", 2),
            ("token", "published", 2),
            ("token", "publish", 3),
            ("token", "refused", 3),
        ]
        assert lines[0]["deployments"] == {"blue": "m/1"}
        assert "does not exist" in lines[-1]["why"]
        assert (folder / AUDIT_FILE).stat().st_mode & 0o777 == 0o600


def test_access_log_of_several_workers_has_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    with serving(
        tmp_path, "--workers=2", f"--access-log={log}", "--endpoint=digits", blue=100
    ) as server:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        for number in range(60):
            server.infer(
                [1, 2] if number % 3 else ["a"],
                {"x-request-id": f"r{number}", "traceparent": trace},
            )
        text = server.call("GET", "/metrics").body.decode()
        assert 'onnx_ops_generation{endpoint="digits"} 1\n' in text
        # The server writes the remaining entries when it stops.
        assert server.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["request_id"] for line in lines) == sorted(
        f"r{number}" for number in range(60)
    )
    assert {line["traceparent"] for line in lines} == {trace}
    assert Counter(line["status"] for line in lines) == {200: 40, 400: 20}
    assert {(line["deployment"], line["protocol"], line["model"]) for line in lines} == {
        ("blue", "infer", "m")
    }
    assert all(line["duration_ms"] >= line["waited_ms"] >= 0 for line in lines)


def test_server_with_1000_open_connections_answers_next_request(two_workers: Server) -> None:
    clients = [
        socket.create_connection(("127.0.0.1", two_workers.port), timeout=30) for _ in range(1000)
    ]
    try:
        for number, client in enumerate(clients):
            client.sendall(
                (b"", b"POST ", b"garbage\r\n\r\n", b"POST /invocations HTTP/1.1\r\n")[number % 4]
            )
        assert two_workers.infer([1, 2]).status == 200
    finally:
        for client in clients:
            client.close()
    assert two_workers.infer([1, 2]).status == 200


@pytest.mark.parametrize(
    "flag", ["--workers=0", "--deadline=-1", "--max-body=0", "--keep-alive=nan"]
)
def test_server_with_invalid_option_value_exits_2(tmp_path: Path, flag: str) -> None:
    found = subprocess.run(
        Server(folder=tmp_path).command(flag), capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert flag.partition("=")[0][2:].replace("-", "_") in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("allowed", "intra_op_threads", "workers", "runs"),
    [
        (0, 1, 1, 8),
        (0, 0, 1, 1),
        (0, 3, 1, 2),
        (2, 1, 1, 2),
        (16, 1, 1, 8),
        (3, 1, 2, 2),
        (1, 0, 4, 1),
        (0, 16, 1, 1),
    ],
)
def test_count_parallel_runs_respects_session_threads_workers_and_thread_limit(
    blue: Deployment, allowed: int, intra_op_threads: int, workers: int, runs: int
) -> None:
    execution = Execution(session=SessionSettings(intra_op_threads=intra_op_threads))
    deployment = replace(blue, threads=allowed, execution=execution)
    assert count_parallel_runs(deployment, 8, workers) == runs
