"""`onnx-ops console`: read-only web pages about endpoints and releases."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Annotated

import typer

from onnx_ops.cli.common import open_project, parse_duration, say
from onnx_ops.errors import UserError
from onnx_ops.plugins import EXTRAS, require


def console(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to bind; port 0: any free port.")
    ] = "127.0.0.1:8660",
    interval: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Shortest time between two reads of the endpoints, from 2s."
        ),
    ] = "5s",
    allowed_hosts: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Further host names, comma-separated, at which a proxy serves the console.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Serve read-only pages about endpoints, rollouts, history and releases.

    The pages change nothing, and show the commands that would. They are updated automatically.
    Endpoints and ledgers are read at most once in --interval, whatever the number of viewers, and
    only while a page is open. A read costs a provider what `status` costs.

    Beyond loopback, viewers need a token: the variable ONNX_OPS_CONSOLE_TOKEN, or the file
    .onnx-ops/console.token. A browser prompts for the token as a password.

    Example: onnx-ops console --listen 127.0.0.1:8660
    """
    require(*EXTRAS["console"], where="")
    from onnx_ops.console.access import read_token
    from onnx_ops.console.server import MAX_INTERVAL_S, MIN_INTERVAL_S, ConsoleServer

    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        remedy = "For example: --listen 127.0.0.1:8660"
        raise UserError(f"{listen!r} is not HOST:PORT", where="--listen", remedy=remedy)
    interval_s = parse_duration(interval, "--interval")
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        remedy = f"Write a duration from {MIN_INTERVAL_S:g} s to 1 h."
        what = f"the interval {interval} is out of range"
        raise UserError(what, where="--interval", remedy=remedy)
    project = open_project()
    stopped = threading.Event()
    with (
        _stopping(stopped),
        ConsoleServer(
            project,
            host.strip("[]") or "127.0.0.1",
            int(port),
            token=read_token(project.settings.console_token, os.environ),
            interval_s=interval_s,
            allowed_hosts=tuple(name for name in allowed_hosts.split(",") if name.strip()),
        ) as server,
    ):
        say(f"The console is at {server.url}; Ctrl-C ends it.", err=True)
        stopped.wait()


@contextlib.contextmanager
def _stopping(stopped: threading.Event) -> Iterator[None]:
    """Set the event at SIGTERM and SIGINT until the block ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: stopped.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
