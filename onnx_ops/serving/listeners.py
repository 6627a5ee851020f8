"""The listening sockets, and how they outlive the supervisor that made them.

Workers accept from one shared socket, so that a worker that dies takes no waiting connection with it. Should the
supervisor die, its workers go on, and whoever connects to the folder's handover socket gets the listening socket from
one of them: the next supervisor goes on with the very same socket, and no connection is lost on the way.
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
_BACKLOG = 2048
_HANDOVER_S = 5.0
"""A worker hands over between two requests; none that is run on the event loop takes this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The public socket, and the one over which workers give both away."""

    public: socket.socket
    handover: socket.socket


def bound(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        ServiceUnavailableError: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # without it, a second server could bind the same port and fail only later
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServiceUnavailableError(
            "the port cannot be used", where=f"{host}:{port}", why=str(error), remedy="Choose another port."
        ) from error
    return listener


def bound_to_file(path: Path) -> socket.socket:
    """A listening Unix socket that only its owner may connect to. What stood at the path before is replaced.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as address:
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


def inherited(folder: Path, host: str, port: int) -> Listeners | None:
    """The sockets of workers whose supervisor died; None if there are none, or they listen elsewhere."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, _short(folder / HANDOVER_SOCKET) as address:
            client.settimeout(_HANDOVER_S)
            client.connect(address)
            _, descriptors, _, _ = socket.recv_fds(client, 1, 2)
    except (FileNotFoundError, ConnectionError):
        return None
    except TimeoutError:
        _log.warning("the workers of before do not hand over their socket")
        return None
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    public, handover = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    found_host, found_port = public.getsockname()[:2]
    if found_host != host or port not in (0, found_port):
        public.close()
        handover.close()
        return None
    return Listeners(public=public, handover=handover)


def hand_over(listeners: Listeners) -> None:
    """Give both sockets to whoever connected to the handover socket. Its file lets only its owner connect."""
    try:
        client, _ = listeners.handover.accept()
    except OSError:  # another worker was faster
        return
    with client, contextlib.suppress(OSError):
        client.settimeout(_HANDOVER_S)
        socket.send_fds(client, [b"."], [listeners.public.fileno(), listeners.handover.fileno()])


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path as an address that is short enough for a Unix socket, wherever the folder is (unix(7): 108 bytes)."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
