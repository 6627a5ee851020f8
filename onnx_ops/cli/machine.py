"""Commands about this machine: doctor, targets, work, serve."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from onnx_ops import codec
from onnx_ops.cli.common import KEEP, AsJson, Markup, markup, open_project, print_json, print_table
from onnx_ops.cli.progress import working
from onnx_ops.config.binding import bind_options
from onnx_ops.config.server_options import format_flags, list_options
from onnx_ops.domain.plan import PLACEABLE, StageKind
from onnx_ops.domain.target import Diagnosis
from onnx_ops.errors import UserError
from onnx_ops.plugins import EXTRAS, require
from onnx_ops.protocol.server_process import FOLLOW_VARIABLE, ServerOptions


def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pipeline files whose endpoints --provider checks.")
    ] = None,
    provider: Annotated[
        str, typer.Option(help="Check only this endpoint provider: azureml, replicas, sagemaker.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check package versions, providers, services and keys.

    Problems are shown with remedies. With --provider, only the requirements of that endpoint
    provider are checked, such as its package, credentials and quota. In the container of a replica
    (ONNX_OPS_FOLLOW is set), the container is checked: folders, keys, store, clock, memory. Exit
    code 4 if something is broken.

    Example: onnx-ops doctor --provider azureml configs/pipelines/digits.yaml
    """
    if os.environ.get(FOLLOW_VARIABLE) and not provider:
        findings = _diagnose_container(as_json)
    else:
        findings = _diagnose_project(provider, files or (), as_json)
    if as_json:
        print_json(codec.to_json(findings))
    else:
        rows = []
        for finding in findings:
            sign = (
                "[yellow]--[/yellow]"
                if finding.absent
                else "[green]ok[/green]"
                if finding.ok
                else "[red]!![/red]"
            )
            is_open = finding.remedy and (finding.absent or not finding.ok)
            text = (
                markup("{}\n[bold]{}[/bold]", finding.found, finding.remedy)
                if is_open
                else finding.found
            )
            rows.append((Markup(sign), finding.check.replace(" ", KEEP), text))
        print_table(("", "check", "found"), rows)
    if any(not finding.ok for finding in findings):
        raise typer.Exit(4)


def _diagnose_project(provider: str, files: Sequence[Path], quiet: bool) -> list[Diagnosis]:
    from onnx_ops.cli.diagnosis import CHECKS, diagnose, diagnose_provider

    project = open_project()
    with working(
        "doctor", provider or CHECKS[0], *([] if provider else CHECKS[1:]), quiet=quiet
    ) as progress:
        if provider:
            return diagnose_provider(project, provider, files)
        return diagnose(project, progress.begin)


def _diagnose_container(quiet: bool) -> list[Diagnosis]:
    from onnx_ops.app.replica_diagnosis import CHECKS, diagnose_replica

    with working("doctor", *CHECKS, quiet=quiet) as progress:
        return diagnose_replica(os.environ, progress.begin)


def targets(as_json: AsJson = False) -> None:
    """List the project's targets and the shipped profiles.

    The list shows which targets this machine can measure. The check of a target builds a session of
    a tiny model, unless a pool or a separate environment measures the target. A pipeline uses a
    profile by its name. A file targets/NAME.yaml in `configs/`, or in `onnx-ops/` if an existing
    repository has this folder, overrides the profile of that name. "never measured" marks shipped
    profiles whose settings come from documentation instead of timings on their hardware.

    Example: onnx-ops targets --json
    """
    from onnx_ops.app.target_status import list_target_statuses

    with working("targets", "building sessions", quiet=as_json):
        statuses = list_target_statuses(open_project())
    if as_json:
        print_json([asdict(status) for status in statuses])
        return
    rows = []
    for status in statuses:
        able = (
            "can measure it"
            if status.here
            else "cannot measure it"
            if status.here is False
            else "not checked"
        )
        text = ". ".join(
            part
            for part in (f"{able}: {status.why}" if status.why else able, status.remedy)
            if part
        )
        template = "[green]{}[/green]" if status.here else "[yellow]{}[/yellow]"
        source = f"{status.source}, never measured" if status.measured is False else status.source
        rows.append((status.name, source, status.provider, markup(template, text)))
    print_table(("target", "from", "provider", "this machine"), rows)


def work(
    pool: Annotated[
        str, typer.Option(help="Prefect work pool whose stages this machine executes.")
    ],
    kinds: Annotated[
        list[StageKind] | None,
        typer.Option(help="Kinds of stages to take; default: all that can run in pools."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent stages.")] = 1,
) -> None:
    """Execute the stages of pipelines that name this machine's work pool.

    The pool is created if it is missing. This machine and those that run pipelines need the same
    Prefect server (PREFECT_API_URL), the same `store` in onnx-ops.toml and the same release of
    onnx-ops. After Ctrl-C or SIGTERM, the running stages finish, and no further stages start. A
    second signal ends the running stages immediately.

    Example: onnx-ops work --pool gpu --kinds train --kinds benchmark
    """
    wanted = tuple(kinds or PLACEABLE)
    if odd := [kind for kind in wanted if kind not in PLACEABLE]:
        remedy = f"Kinds of stages that run in pools: {', '.join(PLACEABLE)}."
        raise UserError(
            f"{', '.join(odd)} stages do not run in pools", where="--kinds", remedy=remedy
        )
    open_project().running().pools.work(pool, wanted, limit=limit)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add a command-line option to a command for each server option.

    Each option is therefore declared only once, in `ServerOptions`.
    """
    hints = get_type_hints(command, include_extras=True)
    own = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    for name, kind, default, text in list_options():
        hints[name] = Annotated[kind, typer.Option(help=text)]
        own.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]
            )
        )
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


@_with_options
def serve(
    state_dir: Annotated[
        Path, typer.Option(help="Folder of the endpoint, with its routing table and token.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to bind; beyond loopback only behind a proxy.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the inference API.")] = 8080,
    admin_port: Annotated[
        int,
        typer.Option(
            help="Port of the admin API on loopback; 0: any free port. --follow ignores it."
        ),
    ] = 0,
    follow: Annotated[
        str,
        typer.Option(
            metavar="URL", help="As a replica, follow the signed tables there: s3://… or a folder."
        ),
    ] = "",
    reports: Annotated[
        str, typer.Option(metavar="URL", help="Location to which a replica writes its reports.")
    ] = "",
    replica: Annotated[
        str, typer.Option(help="Name of the replica; default: the host's, with random digits.")
    ] = "",
    address: Annotated[
        str,
        typer.Option(metavar="URL", help="URL at which clients reach the replica, for `status`."),
    ] = "",
    **options: Any,
) -> None:
    """Run the endpoint server in the foreground.

    The server serves the routing table last published in its folder. With --follow, it is a replica
    of an endpoint with `provider: replicas`. A replica serves the newest signed table at that
    location, and writes reports. It needs --reports, --endpoint and --trusted-keys. See
    `onnx-ops docs replicas`.

    Example: onnx-ops serve --state-dir .onnx-ops/endpoints/digits --port 8080 --workers 4
    """
    require(*EXTRAS["serve"], where="")
    flags = ["--state-dir", str(state_dir), "--host", host, "--port", str(port)]
    flags += format_flags(bind_options(options, ServerOptions))
    if follow:
        if not reports:
            raise UserError(
                "a replica needs a location for its reports",
                where="--reports",
                remedy="Set --reports URL.",
            )
        module = "onnx_ops.app.follower"
        own = {"follow": follow, "reports": reports, "replica": replica, "address": address}
        flags += [f"--{name}={value}" for name, value in own.items()]
    else:
        module = "onnx_ops.serving.main"
        flags.append(f"--admin-port={admin_port}")
    # The server replaces this process, which frees the memory of the command line's modules.
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])  # noqa: S606 (a list, no shell)
