"""Commands about this machine: doctor, targets, serve."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from onnx_ops import codec
from onnx_ops.cli.common import AsJson, handle_errors, print_json
from onnx_ops.config.binding import bind_settings
from onnx_ops.config.server_options import format_flags, list_options
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.server_process import ServerOptions


@handle_errors
def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pipeline files whose endpoints --provider looks at.")
    ] = None,
    provider: Annotated[
        str, typer.Option(help="Look at what this provider of endpoints needs: azureml, sagemaker.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check packages, providers, services, keys and pins; every problem comes with a remedy.

    With --provider, only what that provider of endpoints needs is looked at: package, credentials, region, role, quota.
    Exit code 4 if something is broken.

    Example: onnx-ops doctor --provider azureml configs/pipelines/digits.yaml
    """
    from onnx_ops.app.project import open_project
    from onnx_ops.cli.diagnosis import CHECKS, diagnose, diagnose_provider
    from onnx_ops.cli.progress import working
    from onnx_ops.cli.tables import doctor_table

    project = open_project()
    with working("doctor", provider or CHECKS[0], *([] if provider else CHECKS[1:]), quiet=as_json) as progress:
        findings = diagnose_provider(project, provider, files or ()) if provider else diagnose(project, progress.begin)
    if as_json:
        print_json(codec.to_json(findings))
    else:
        doctor_table(findings)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)


@handle_errors
def targets(as_json: AsJson = False) -> None:
    """List the project's targets and the shipped profiles, and which this machine can measure.

    A session of a tiny model is built for each; nothing is measured. A profile is used by its name, and a file
    configs/targets/NAME.yaml wins over the profile of that name.

    Example: onnx-ops targets --json
    """
    from dataclasses import asdict

    from onnx_ops.app.project import open_project
    from onnx_ops.cli.progress import working
    from onnx_ops.cli.tables import targets_table
    from onnx_ops.cli.targets import tell_targets

    with working("targets", "building a session for each", quiet=as_json):
        told = list(tell_targets(open_project()))
    if as_json:
        print_json([asdict(one) for one in told])
    else:
        targets_table(told)


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
@handle_errors
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
