"""The server's process: `python -m onnx_ops.serving.main --state-dir DIR --host 127.0.0.1 --port N`."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from onnx_ops import codec
from onnx_ops.errors import Conflict, EnvironmentFailure, OnnxOpsError, ServiceUnavailable
from onnx_ops.protocol.admin import LOCK_FILE, SERVER_FILE, ServerRecord
from onnx_ops.serving.admin import AdminApp, read_token
from onnx_ops.serving.app import PublicApp
from onnx_ops.serving.endpoint import Endpoint
from onnx_ops.serving.table import TableFile, write_durably

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_DRAIN_S = 25
"""Requests in flight get this long after SIGTERM; clouds kill after 30 seconds."""
_BACKLOG = 2048
_LOCK_TRIES = 40
_LOCK_PAUSE_S = 0.05


def serve(state_dir: Path, host: str, port: int, admin_port: int = 0) -> None:
    """Serve the folder's last published table until SIGTERM or SIGINT, then drain.

    Args:
        state_dir: where table, token and server record stand; made if it is not there.
        host, port: the public listener; port 0 lets the system choose.
        admin_port: the admin listener on loopback; 0 lets the system choose.

    Raises:
        Conflict: another server runs on the folder.
        ServiceUnavailable: a port is taken.
        Refused: the token's file is open to others.
        EnvironmentFailure: the folder cannot be read or written.
    """
    with ExitStack() as stack:
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(_only_server(state_dir))
            token = read_token(state_dir)
            public = stack.enter_context(_bound(host, port))
            admin = stack.enter_context(_bound(_LOOPBACK, admin_port))
            endpoint = Endpoint(TableFile(state_dir))
            endpoint.restore()
        except OSError as error:
            raise EnvironmentFailure(
                "the server's folder cannot be used", where=str(state_dir), why=str(error)
            ) from error
        runs = ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1), thread_name_prefix="run")
        loads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        apps = (
            (PublicApp(endpoint, runs).asgi(), public),
            (AdminApp(endpoint, token, loads).asgi(), admin),
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(state_dir, apps))
        finally:
            (state_dir / SERVER_FILE).unlink(missing_ok=True)
            for pool in (runs, loads):
                pool.shutdown(wait=False, cancel_futures=True)


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`, which ends both listeners."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(state_dir: Path, apps: tuple[tuple[Starlette, socket.socket], ...]) -> None:
    servers = [(_Server(_config(app)), listener) for app, listener in apps]

    def stop() -> None:
        for server, _ in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        for server, listener in servers:
            group.create_task(server.serve(sockets=[listener]))
        while not all(server.started for server, _ in servers):
            await asyncio.sleep(0.005)
        ports = [listener.getsockname()[1] for _, listener in servers]
        record = ServerRecord(
            pid=os.getpid(),
            port=ports[0],
            admin_port=ports[1],
            started=time.time(),  # noqa: TID251 (the process's own start, for people to read)
        )
        write_durably(state_dir / SERVER_FILE, codec.dumps(record))
        _log.info("serving on port %d", record.port)


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )


@contextmanager
def _only_server(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock. A crash lets go of it, so that nobody takes a dead server for a live one."""
    with (state_dir / LOCK_FILE).open("a+", encoding="utf-8") as stream:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:  # a client that looks whether we live holds it for an instant
                if attempt == _LOCK_TRIES - 1:
                    raise Conflict("another server runs on this folder", where=str(state_dir)) from error
                time.sleep(_LOCK_PAUSE_S)
        stream.truncate(0)
        (state_dir / SERVER_FILE).unlink(missing_ok=True)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)  # without it, a second server could bind the same port and fail only later
        except OSError as error:
            raise ServiceUnavailable(
                "the port cannot be used", where=f"{host}:{port}", why=str(error), remedy="Choose another port."
            ) from error
        yield listener


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="onnx_ops.serving.main", description="Serve one endpoint.")
    parser.add_argument("--state-dir", type=Path, required=True, help="folder of table, token and server record")
    parser.add_argument("--host", default=_LOOPBACK, help="address of the public listener")
    parser.add_argument("--port", type=int, required=True, help="port of the public listener")
    parser.add_argument("--admin-port", type=int, default=0, help="port of the admin listener on loopback")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        serve(given.state_dir, given.host, given.port, given.admin_port)
    except OnnxOpsError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A run that outlived the drain would keep the interpreter waiting for its thread past the cloud's SIGKILL.
    os._exit(code)
