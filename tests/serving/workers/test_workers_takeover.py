"""Workers of a killed supervisor, and the supervisor that follows."""

from __future__ import annotations

import socket
import subprocess

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.protocol.server_process import HANDOVER_SOCKET
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import Server, wait_until


def test_publication_after_supervisor_kill_ends_orphaned_workers_first(
    two_workers: Server, blue: Deployment, green: Deployment
) -> None:
    """`tests/chaos/test_chaos_kills.py` shows that clients are not affected."""
    port = two_workers.port
    for number, weights in ((2, {"blue": 0, "green": 100}), (3, {"blue": 100, "green": 0})):
        orphans = set(two_workers.workers())
        two_workers.kill()
        two_workers.start()
        assert two_workers.port == port
        assert two_workers.publish(state_of(blue, green, **weights), number).status == 200
        assert orphans.isdisjoint(two_workers.workers())
        assert two_workers.who_answers() == ("green" if number == 2 else "blue")
    assert two_workers.stop() == 0
    assert two_workers.workers() == []


@pytest.mark.nightly
def test_server_after_repeated_supervisor_kills_during_takeover_answers(
    two_workers: Server, blue: Deployment
) -> None:
    two_workers.kill()
    # Each supervisor is killed while its workers start, or while the orphans drain.
    for _ in range(3):
        before = two_workers.workers()
        two_workers.launch()
        wait_until(lambda before=before: two_workers.workers() != before)  # type: ignore[misc]
        two_workers.kill()
        assert two_workers.infer([1, 2]).status == 200
    two_workers.start()
    assert two_workers.publish(state_of(blue, blue=100), 2).status == 200
    assert len(two_workers.workers()) == 2
    assert two_workers.infer([1, 2]).status == 200


def test_start_on_port_of_other_process_with_handover_file_is_refused(two_workers: Server) -> None:
    two_workers.destroy()
    # The port is in use until the last thread of the orphans ends.
    wait_until(lambda: not two_workers.workers())
    assert (two_workers.folder / HANDOVER_SOCKET).exists()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", two_workers.port))
        stranger.listen()
        found = subprocess.run(
            two_workers.command(), capture_output=True, text=True, timeout=60, check=False
        )
    assert found.returncode == 4
    assert "port cannot be used" in found.stderr
    two_workers.start()
    assert two_workers.infer([1, 2]).status == 200
