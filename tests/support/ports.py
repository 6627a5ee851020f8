"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHANCE = random.SystemRandom()
"""Seeded tests that run side by side must not choose alike."""


def free_port() -> int:
    """A port of the loopback interface without a listener.

    It is below those from which the kernel takes a connection's own end: one of these may be taken
    before the server that it is meant for has started.
    """
    end = 32_768
    with contextlib.suppress(OSError):  # another system than Linux
        end = int(_CONNECTIONS.read_text(encoding="ascii").split()[0])
    for port in _CHANCE.sample(
        range(_LOWEST, max(end, _LOWEST)), k=min(100, max(end - _LOWEST, 0))
    ):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
