"""The listening sockets, which remain when the supervisor that created them ends.

Workers accept connections from one shared socket, so a worker that ends loses no waiting
connection. If the supervisor ends, the next supervisor receives the socket from a worker over the
handover socket in the server's folder (docs/adr/0008-endpoint-server.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.protocol.server_process import HANDOVER_SOCKET

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
SHADOW_SOCKETS = "shadow-*.sock"
"""Pattern of the file names that `get_shadow_path` returns."""
_BACKLOG = 2048
_HANDOVER_S = 5.0
"""Seconds to wait for a handover.

A worker sends the sockets between two requests, and no request on the event loop takes this long.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSockets:
    """The public socket, and the handover socket over which workers send both."""

    public: socket.socket
    handover: socket.socket


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 selects a free port.

    Raises:
        ServiceUnavailableError: the address or port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Without this call, a second server could bind the same port and would fail only later.
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServiceUnavailableError(
            "the address or port cannot be used",
            where=f"{host}:{port}",
            why=str(error),
            remedy="Choose another address or port.",
        ) from error
    return listener


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket for its owner only; replace an existing file."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _shorten(path) as address:
            before = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(before)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect_unix(path: Path, *, timeout_s: float) -> socket.socket:
    """Return a connection to a Unix socket.

    With a timeout of 0, the connection is non-blocking.

    Raises:
        OSError: the connection fails, or is not accepted within the timeout.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _shorten(path) as address:
            client.connect(address)
    except OSError:
        client.close()
        raise
    return client


def get_shadow_path(folder: Path, origin: str, slot: int) -> Path:
    """Return the path of the Unix socket of a slot's shadow process.

    Workers whose supervisor has ended can have other slots for the same deployments. The path
    contains the origin of `SharedMetrics`, so these workers cannot connect to the shadow processes
    of the next supervisor.
    """
    return folder / f"shadow-{origin}-{slot}.sock"


def receive_sockets(folder: Path, host: str, port: int) -> ListenerSockets | None:
    """Return the sockets of workers whose supervisor has ended.

    Return None if there are no such workers, or if they answer too late. Return None also if the
    socket has another host or port.
    """
    try:
        with connect_unix(folder / HANDOVER_SOCKET, timeout_s=_HANDOVER_S) as client:
            _, descriptors, _, _ = socket.recv_fds(client, 1, 2)
    except (FileNotFoundError, ConnectionError):
        return None
    except TimeoutError:
        _log.warning(
            "the workers of the previous supervisor did not pass on their sockets within %g s",
            _HANDOVER_S,
        )
        return None
    if not descriptors:  # The worker has ended.
        return None
    public, handover = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    public_host, public_port = public.getsockname()[:2]
    if public_host != host or port not in (0, public_port):
        public.close()
        handover.close()
        return None
    return ListenerSockets(public=public, handover=handover)


def send_sockets(listeners: ListenerSockets) -> None:
    """Send both sockets to a client that connects to the handover socket."""
    try:
        client, _ = listeners.handover.accept()
    except OSError:  # Another worker has accepted the connection.
        return
    with client, contextlib.suppress(OSError):
        client.settimeout(_HANDOVER_S)
        socket.send_fds(client, [b"."], [listeners.public.fileno(), listeners.handover.fileno()])


@contextlib.contextmanager
def _shorten(path: Path) -> Iterator[str]:
    """Yield a short address for a Unix socket; unix(7) limits addresses to 108 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
