"""The command `serve`, with a flag for every option of the server."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from onnx_ops.cli.common import reported
from onnx_ops.config.binding import bind_settings
from onnx_ops.config.server_options import format_flags, list_options
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.server_process import ServerOptions


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag per option, so that each is described in one place only (`ServerOptions`)."""
    hints = get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    for name, kind, default, text in list_options():
        hints[name] = Annotated[kind, typer.Option(help=text)]
        own.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]))
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


@_with_options
@reported
def serve(
    state_dir: Annotated[Path, typer.Option(help="Folder of the endpoint: table, token, log.")],
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback only behind a proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the inference API.")] = 8080,
    admin_port: Annotated[int, typer.Option(help="Port of the admin API on loopback; 0: any.")] = 0,
    **options: Any,
) -> None:
    """Run the endpoint server in the foreground, with the table last published in its folder.

    Example: onnx-ops serve --state-dir .onnx-ops/endpoints/digits --port 8080 --workers 4
    """
    require(*EXTRAS["serve"], where="")
    command = [sys.executable, "-m", "onnx_ops.serving.main", "--state-dir", str(state_dir), "--host", host]
    ports = ["--port", str(port), "--admin-port", str(admin_port)]
    # The server takes this process's place, so that nothing of the command line stays in its memory.
    os.execv(sys.executable, [*command, *ports, *format_flags(bind_settings(options, ServerOptions))])  # noqa: S606 (a list, no shell)
