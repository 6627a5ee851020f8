"""Commands about this machine: serve, doctor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from onnx_ops.cli.common import AsJson, print_json, reported


@reported
def serve(
    state: Annotated[Path, typer.Option("--state-dir", help="Folder of the endpoint: table, token, log.")],
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback only behind a proxy.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the inference API.")] = 8080,
) -> None:
    """Run the endpoint server in the foreground, with what was last published in its folder.

    Example: onnx-ops serve --state-dir .onnx-ops/endpoints/digits --port 8080
    """
    command = [sys.executable, "-m", "onnx_ops.serving.main", "--state-dir", str(state)]
    # The server takes this process's place, so that nothing of the command line stays in its memory.
    os.execv(sys.executable, [*command, "--host", host, "--port", str(port)])  # noqa: S606 (a list, no shell)


@reported
def doctor(as_json: AsJson = False) -> None:
    """Check packages, providers, services, keys and pins; every problem comes with a remedy.

    Exit code 4 if something is broken.

    Example: onnx-ops doctor
    """
    from onnx_ops.cli.diagnosis import diagnose
    from onnx_ops.cli.tables import doctor_table
    from onnx_ops.wiring.project import open_project

    findings = diagnose(open_project())
    if as_json:
        print_json([{"check": f.check, "ok": f.ok, "found": f.found, "remedy": f.remedy} for f in findings])
    else:
        doctor_table(findings)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)
