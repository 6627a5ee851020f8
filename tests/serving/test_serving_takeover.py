"""A supervisor that dies under load: its workers go on, and the next one takes over without a failed request."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
from collections import Counter

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.server_process import HANDOVER_SOCKET
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import INFER, Clients, Server, infer_body, wait_until

BODY = infer_body([1, 2])


class Steady:
    """A client that keeps its connections open, and says what went wrong and who answered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []

    def __call__(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            for _ in range(20):
                connection.request("POST", INFER, BODY)
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    self.failures.append(str(response.status))
                self.answers[response.headers["x-onnx-ops-deployment"] or ""] += 1
                if response.headers["connection"] == "close":
                    return
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
        finally:
            connection.close()


def test_workers_go_on_when_their_supervisor_is_killed_and_the_next_one_takes_over(
    crew: Server, blue: Deployment, green: Deployment
) -> None:
    crew.publish(state_of(blue, green, blue=100, green=0), 1)
    steady = Steady(crew)
    with Clients(steady, 3) as clients:
        port, orphans = crew.port, set(crew.workers())
        for number in (2, 3):
            crew.end(signal.SIGKILL)
            count = steady.answers.total()
            wait_until(lambda count=count: steady.answers.total() > count + 50)  # type: ignore[misc]
            crew.start()
            assert crew.port == port
            weights = {"blue": 0, "green": 100} if number == 2 else {"blue": 100, "green": 0}
            assert crew.publish(state_of(blue, green, **weights), number).status == 200
            assert orphans.isdisjoint(crew.workers())  # they had to be gone before anything was published
            assert crew.who_answers() == ("green" if number == 2 else "blue")
            orphans = set(crew.workers())
    assert clients.errors == []
    assert steady.failures == []
    assert crew.end() == 0
    assert crew.workers() == ()


@pytest.mark.nightly
def test_orphans_and_a_supervisor_killed_while_it_takes_over(crew: Server, blue: Deployment) -> None:
    crew.publish(state_of(blue, blue=100), 1)
    crew.end(signal.SIGKILL)
    for _ in range(3):  # each one dies while its workers are on their way or the orphans are being retired
        crew.process = subprocess.Popen(crew.command(f"--port={crew.port}"), stderr=subprocess.DEVNULL)
        before = set(crew.workers())
        wait_until(lambda before=before: set(crew.workers()) != before)  # type: ignore[misc]
        crew.end(signal.SIGKILL)
        assert crew.infer([1, 2]).status == 200
    crew.start()
    assert crew.publish(state_of(blue, blue=100), 2).status == 200
    assert len(crew.workers()) == 2
    assert crew.infer([1, 2]).status == 200


def test_a_port_that_a_stranger_has_taken_is_refused_although_a_handover_file_is_left(
    crew: Server, blue: Deployment
) -> None:
    crew.publish(state_of(blue, blue=100), 1)
    crew.kill_all()
    assert (crew.folder / HANDOVER_SOCKET).exists()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", crew.port))
        stranger.listen()
        found = subprocess.run(
            crew.command(f"--port={crew.port}"), capture_output=True, text=True, timeout=60, check=False
        )
    assert found.returncode == 4
    assert "port cannot be used" in found.stderr
    crew.start()
    assert crew.infer([1, 2]).status == 200
