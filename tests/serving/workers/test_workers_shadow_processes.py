"""Shadow processes that are killed, fail or are replaced.

The tests check the effects on clients, counts and publications.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.messages import DeploymentCounts
from tests.serving.serving_process import INFER, Server, after, mirrored, wait_until
from tests.support.processes import children_of, is_alive
from tests.support.server import scaled

LARGE_ROWS = 1 << 20
LARGE_HEADER = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [LARGE_ROWS, 2],
                "parameters": {"binary_data_size": 8 * LARGE_ROWS},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()
FAILING_LOAD = """
from onnx_ops.errors import InfrastructureError
from onnx_ops.serving.workers import shadow_processes
def load(*_):
    raise InfrastructureError("the model cannot be loaded here")
shadow_processes.load_deployment = load
"""
DYING_LOAD = """
import os
from onnx_ops.serving.workers import shadow_processes
shadow_processes.load_deployment = lambda *_: os.kill(os.getpid(), 9)
shadow_processes.compute_restart_pause_s = lambda _: 0
"""
DYING_RUN = """
import os
from onnx_ops.serving.workers import shadow_processes
run = shadow_processes.run_mirrored_request
def die(model, row, request):
    if b"13" in request.body:
        os.kill(os.getpid(), 9)
    run(model, row, request)
shadow_processes.run_mirrored_request = die
shadow_processes.compute_restart_pause_s = lambda _: 0
"""


def send_large(server: Server) -> int:
    """Send a request of 8 MiB in the binary form; return the status."""
    headers = {"inference-header-content-length": str(len(LARGE_HEADER))}
    return server.call("POST", INFER, LARGE_HEADER + bytes(8 * LARGE_ROWS), headers).status


def shadow_processes(server: Server) -> list[int]:
    return [pid for pid in children_of(server.supervisor) if pid not in server.workers()]


def has_shadow_processes(server: Server, number: int) -> bool:
    return len(shadow_processes(server)) == number


def counts(server: Server, name: str = "green") -> DeploymentCounts:
    return server.counts().deployments[name]


def read_metric(server: Server, name: str, deployment: str | None = None) -> int:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    labels = "" if deployment is None else f'deployment="{deployment}"'
    (value,) = (
        line.rpartition(" ")[2]
        for line in lines
        if line.startswith(f"onnx_ops_{name}{{") and labels in line
    )
    return int(value)


def send_until_answered(server: Server, more: int = 1) -> None:
    """Send requests until the shadow has answered some more."""
    wanted = counts(server).shadow_answered + more
    wait_until(
        lambda: server.infer([1, 2]).status == 200 and counts(server).shadow_answered >= wanted
    )


@contextmanager
def shadowing(
    root: Path, blue: Deployment, green: Deployment, *options: str, preamble: str = ""
) -> Iterator[Server]:
    """Yield a server below `root` that mirrors all requests from blue to green."""
    with Server(folder=root / "state", options=options, program=after(preamble)) as server:
        assert server.publish(mirrored(blue), 1).status == 200
        assert shadow_processes(server) == []
        assert server.publish(mirrored(blue, green), 2).status == 200
        yield server


def test_shadow_process_with_lowest_priority_serves_all_workers(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green, "--workers=2") as server:
        for _ in range(20):
            assert server.infer([1, 2]).headers["x-onnx-ops-deployment"] == "blue"
        wait_until(lambda: counts(server).shadow_answered == 20)
        assert counts(server).shadow_differing == 20
        assert read_metric(server, "shadow_requests_total", "green") == 20
        assert read_metric(server, "shadow_dropped_total", "green") == 0
        assert read_metric(server, "model_loads_total", "blue") == 2
        assert read_metric(server, "model_loads_total", "green") == 3
        (pid,) = shadow_processes(server)
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}
        assert server.stop() == 0
        assert not is_alive(pid)
        assert list(server.folder.glob("shadow-*")) == []


def test_large_body_is_mirrored_to_shadow_process(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green) as server:
        assert send_large(server) == 200
        wait_until(lambda: counts(server).shadow_answered == 1)
        # The body contains zeros, which every factor leaves equal.
        assert counts(server).shadow_differing == 0


def test_shadow_process_that_hangs_delays_neither_clients_nor_publications(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green) as server:
        send_until_answered(server)
        (pid,) = shadow_processes(server)
        os.kill(pid, signal.SIGSTOP)
        while not read_metric(server, "shadow_dropped_total", "green"):
            assert send_large(server) == 200
        os.kill(pid, signal.SIGCONT)
        accepted = read_metric(server, "shadow_requests_total", "green")
        wait_until(lambda: counts(server).shadow_answered == accepted)
        os.kill(pid, signal.SIGSTOP)
        assert server.infer([1, 2]).status == 200
        assert server.publish(mirrored(blue), 3).status == 200
        wait_until(lambda: not is_alive(pid))


def test_killed_shadow_process_is_replaced_without_failed_requests(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green) as server:
        workers = server.workers()
        for number in range(1, 4):
            send_until_answered(server)
            (pid,) = shadow_processes(server)
            os.kill(pid, signal.SIGKILL)
            assert server.infer([1, 2]).status == 200
            wait_until(lambda number=number: read_metric(server, "shadow_restarts_total") == number)  # type: ignore[misc]
        send_until_answered(server)
        assert server.workers() == workers
        assert server.admin("GET").json()["failed"] == {}


def test_model_that_kills_its_shadow_process_is_counted_as_failing(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green, preamble=DYING_RUN) as server:
        workers = server.workers()
        send_until_answered(server)
        for number in range(1, 4):
            assert server.infer([13, 2]).status == 200
            wait_until(lambda number=number: counts(server).shadow_failed == number)  # type: ignore[misc]
        send_until_answered(server)
        assert read_metric(server, "shadow_restarts_total") == 3
        assert server.workers() == workers


@pytest.mark.parametrize(
    ("preamble", "why"),
    [(FAILING_LOAD, "cannot be loaded here"), (DYING_LOAD, "ended before the model was loaded")],
)
def test_shadow_that_cannot_be_loaded_is_reported_as_failed(
    tmp_path: Path, blue: Deployment, green: Deployment, preamble: str, why: str
) -> None:
    with shadowing(tmp_path, blue, green, preamble=preamble) as server:
        wait_until(lambda: why in server.admin("GET").json()["failed"].get("green", ""))
        wait_until(
            lambda: (
                server.infer([1, 2]).status == 200
                and read_metric(server, "shadow_dropped_total", "green")
            )
        )
        assert shadow_processes(server) == []
        assert (counts(server).shadow_answered, counts(server).shadow_failed) == (0, 0)
        # The workers, unlike the shadow process, have loaded green.
        assert server.who_answers({"azureml-model-deployment": "green"}) == "green"
        assert server.publish(mirrored(blue), 3).status == 200
        assert server.admin("GET").json()["failed"] == {}


def test_refused_publication_keeps_shadow_process(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green) as server:
        send_until_answered(server)
        pids = shadow_processes(server)
        red = scaled(tmp_path, "red")
        assert (
            server.publish(
                mirrored(blue, replace(red, manifest=red.release, location="/missing")), 3
            ).status
            == 422
        )
        assert shadow_processes(server) == pids
        send_until_answered(server)


def test_shadow_process_ends_and_restarts_with_its_supervisor(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green) as server:
        send_until_answered(server)
        (pid,) = shadow_processes(server)
        server.kill()
        wait_until(lambda: not is_alive(pid))
        wait_until(
            lambda: (
                server.infer([1, 2]).status == 200
                and read_metric(server, "shadow_dropped_total", "green")
            )
        )
        server.start()
        assert server.publish(mirrored(blue, green), 3).status == 200
        send_until_answered(server)
        assert len(shadow_processes(server)) == 1
        assert len(list(server.folder.glob("shadow-*"))) == 1


def test_publications_during_mirroring_replace_shadows_and_fail_no_request(
    tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    with shadowing(tmp_path, blue, green, "--workers=2") as server:
        red = scaled(tmp_path, "red")
        states = [
            mirrored(blue, red),
            mirrored(blue),
            mirrored(blue, green, red),
            mirrored(blue, green),
        ]
        statuses: list[int] = []
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                statuses.append(server.infer([1, 2]).status)

        client = threading.Thread(target=send)
        client.start()
        try:
            for generation in range(3, 15):
                state = states[generation % 4]
                assert server.publish(state, generation).status == 200
                wait_until(partial(has_shadow_processes, server, len(state.split.shadow)))
        finally:
            stop.set()
            client.join()
        assert set(statuses) == {200}
        state = states[14 % 4]
        for name in state.split.shadow:
            answered = counts(server, name).shadow_answered
            wait_until(
                lambda name=name, answered=answered: (  # type: ignore[misc]
                    server.infer([1, 2]).status == 200
                    and counts(server, name).shadow_answered > answered
                )
            )
            assert counts(server, name).shadow_failed == 0
        assert read_metric(server, "shadow_restarts_total") == 0
        assert server.publish(mirrored(blue), 15).status == 200
        wait_until(lambda: shadow_processes(server) == [])
        assert list(server.folder.glob("shadow-*")) == []
