"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHANCE = random.SystemRandom()
"""Seeded tests that run in parallel must not choose the same ports."""


def free_port() -> int:
    """Return a port of the loopback interface without a listener.

    It is below the range from which the kernel takes local ports of connections. A port in that
    range may be taken before the server that needs it has started.
    """
    end = 32_768
    with contextlib.suppress(OSError):
        # Only Linux has this file.
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
