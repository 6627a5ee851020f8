"""Commands of the service that judges rollouts of other programs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, add_command, make_group, print_line, print_result
from onnx_ops.errors import UserError
from onnx_ops.plugins import require

DELETE_EVERY_S = 6 * 3600.0
"""Seconds from one search for old rollouts to the next."""

analysis = make_group(
    "analysis",
    "Judge rollouts that Argo Rollouts, Flagger or a script advances.",
    "onnx-ops analysis serve analysis.yaml",
)

Configuration = Annotated[
    Path, typer.Argument(metavar="FILE", help="Configuration of the service.", show_default=False)
]


@add_command(analysis, "serve")
def analysis_serve(
    file: Configuration,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Address to bind, instead of `listen` in the file; port 0: any free port.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Answer requests for verdicts until SIGTERM or SIGINT.

    Beyond loopback, clients need the bearer token of ONNX_OPS_ANALYSIS_TOKEN, or of `token_file`.
    Several instances can share the state.

    Example: onnx-ops analysis serve analysis.yaml
    """
    from onnx_ops.config.analysis import load_analysis_config

    config = load_analysis_config(file)
    require("starlette", "uvicorn", where="onnx-ops analysis serve")
    from onnx_ops.adapters.host import SystemClock
    from onnx_ops.adapters.web.analysis_server import AnalysisServer, read_analysis_token
    from onnx_ops.app.analysis import make_service
    from onnx_ops.app.analysis_routes import AnalysisRoutes

    host, _, port = (listen or config.listen).rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        remedy = "For example: 127.0.0.1:8651"
        what = f"{listen or config.listen!r} is not HOST:PORT"
        raise UserError(what, where="--listen" if listen else str(file), remedy=remedy)
    token_file = None if config.token_file is None else file.parent / config.token_file
    service = make_service(config, file.parent, SystemClock())
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with AnalysisServer(
        host.strip("[]"),
        int(port),
        token=read_analysis_token(token_file, os.environ),
        handle=AnalysisRoutes(service).handle,
    ) as server:
        print_line(f"{server.url}: {len(config.analyses)} analyses, state in {config.state}")
        while not stopped.is_set():
            service.delete_old(stopped.is_set)
            stopped.wait(DELETE_EVERY_S)


@add_command(analysis, "status")
def analysis_status(file: Configuration, as_json: AsJson = False) -> None:
    """Show the recorded verdicts of rollouts, without new counts.

    Example: onnx-ops analysis status analysis.yaml
    """
    from onnx_ops.adapters.analysis_log import AnalysisLog
    from onnx_ops.adapters.files import open_objects
    from onnx_ops.app.analysis import find_state
    from onnx_ops.cli.common import print_table, say
    from onnx_ops.config.analysis import load_analysis_config
    from onnx_ops.domain.rollout_analysis import make_document

    config = load_analysis_config(file)
    log = AnalysisLog(open_objects(find_state(config, file.parent)))
    states = [state for state in log.list_states() if state.policy is not None]
    documents = [
        make_document(state, state.verdict) for state in states if state.verdict is not None
    ]

    def report() -> None:
        if not documents:
            say("no rollout has recorded counts")
            return
        heads = ("analysis", "rollout", "stable", "canary", "verdict", "reason")
        print_table(heads, [[str(each[head]) for head in heads] for each in documents])

    print_result(lambda: documents, report, as_json=as_json)
