"""Ports for servers of tests.

They are free, and outside the range of connections' local ports.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support import ports
from tests.support.ports import free_port


def test_free_port_returns_mostly_distinct_ports_below_ephemeral_range() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert all(1024 < port < lowest for port in found)
    assert len(found) > 40
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_free_port_without_port_below_ephemeral_range_uses_kernel_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text("1024\t60999\n")
    monkeypatch.setattr(ports, "_CONNECTIONS", tmp_path / "range")
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = free_port()
    assert int(ephemeral[0]) <= port <= int(ephemeral[1])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_free_port_skips_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", taken)
        monkeypatch.setattr(ports, "_CONNECTIONS", tmp_path / "range")
        # Below this range, there is no other port to choose.
        (tmp_path / "range").write_text(f"{taken + 1}\t60999\n")
        assert free_port() != taken
