"""Connections that are slow, half-closed, or too many."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import state_of
from tests.chaos.chaos_parts import MB, Make, Patient, post, status_of

CONNECTIONS = 10_000
SPARE_FILES = 200
TOGETHER = 100
"""Number of concurrent requests: fewer than a queue admits."""


def test_slow_senders_block_no_other_client_and_are_disconnected(patient: Patient) -> None:
    """Fifty clients slowly send the bytes of a header.

    Other clients are served meanwhile, and the time limit disconnects the slow ones.
    """
    with ExitStack() as stack:
        clients = {stack.enter_context(patient.connect()) for _ in range(50)}
        for client in clients:
            client.sendall(post()[:30] + b" HTTP/1.1\r\nx-slow: ")
        for _ in range(1000):
            for client in list(clients):
                try:
                    client.sendall(b"y")
                except (ConnectionResetError, BrokenPipeError):
                    clients.remove(client)
            patient.is_well()
            if not clients:
                break
            time.sleep(0.02)
        assert not clients, f"{len(clients)} are still there"


@pytest.mark.nightly
def test_server_with_clients_that_never_read_responses_uses_bounded_memory(
    patient: Patient,
) -> None:
    """Pipelining clients never read, and their responses must not accumulate."""
    with patient.bounded(64 * MB), ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(patient.connect())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(1.0)
            with suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
                for _ in range(300):
                    client.sendall(post() * 100)
        patient.is_well()


@pytest.mark.nightly
def test_server_with_10_000_connections_answers_all_requests_in_bounded_memory(
    many_files: int, family: Make, blue: Deployment
) -> None:
    if many_files < CONNECTIONS + SPARE_FILES:
        pytest.skip(
            f"this system allows {many_files} open files: {CONNECTIONS} connections were NOT tried"
        )
    patient = Patient(family("--allowed-hosts", "x"))
    assert patient.server.publish(state_of(blue, blue=100), 1).status == 200
    with patient.bounded(400 * MB), ExitStack() as stack:
        clients = [stack.enter_context(patient.connect()) for _ in range(CONNECTIONS)]
        for first in range(0, CONNECTIONS, TOGETHER):
            asking = clients[first : first + TOGETHER]
            for client in asking:
                client.sendall(post())
            assert Counter(status_of(client, 60) for client in asking) == {200: TOGETHER}
        patient.is_well()
    patient.is_well()
