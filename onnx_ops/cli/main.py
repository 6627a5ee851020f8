"""The command line. A command imports only what it runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from onnx_ops.cli import (
    affected,
    champions,
    dvc,
    endpoints,
    init,
    inspecting,
    judge,
    keys,
    machine,
    notify,
    pipelines,
    quantize,
    releases,
    report,
    rollback,
    rollout,
    serve,
    tools,
    webhooks,
)
from onnx_ops.cli.help import Command, CommandGroup

app = typer.Typer(
    name="onnx-ops",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Release engineering for ONNX models: one file from training to rollback.",
    epilog="Start with: onnx-ops check FILE, onnx-ops plan FILE, onnx-ops run FILE.",
)

PIPELINES, RELEASES, TOOLS, MACHINE = "Pipelines", "Releases", "Tools", "Machine"

_COMMANDS: list[tuple[str, Callable[..., Any]]] = [
    (PIPELINES, init.init),
    (PIPELINES, pipelines.check),
    (PIPELINES, pipelines.plan),
    (PIPELINES, pipelines.run),
    (PIPELINES, affected.affected),
    (RELEASES, releases.explain),
    (RELEASES, report.report),
    (RELEASES, dvc.export_dvc),
    (RELEASES, champions.champions),
    (RELEASES, releases.promote),
    (RELEASES, rollout.rollout),
    (RELEASES, rollback.rollback),
    (RELEASES, releases.reconcile),
    (RELEASES, webhooks.webhooks),
    (RELEASES, notify.notify),
    (RELEASES, endpoints.status),
    (RELEASES, endpoints.history),
    (RELEASES, endpoints.prune),
    (RELEASES, endpoints.delete),
    (TOOLS, inspecting.inspect),
    (TOOLS, judge.judge),
    (TOOLS, tools.bench),
    (TOOLS, quantize.quantize),
    (MACHINE, serve.serve),
    (MACHINE, machine.doctor),
    (MACHINE, machine.targets),
]

for panel, command in _COMMANDS:
    app.command(rich_help_panel=panel, cls=Command)(command)
app.add_typer(keys.app, name="keys", rich_help_panel=MACHINE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onnx-ops {version('onnx-ops')}")
        raise typer.Exit


@app.callback()
def program(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version of onnx-ops and exit."),
    ] = False,
) -> None:
    """Options that need no command."""


def main() -> None:
    app()
