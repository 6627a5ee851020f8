"""The command line. A command imports only what it runs."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from typing import Any

import typer

from onnx_ops.cli import (
    endpoints,
    inspect,
    judge,
    keys,
    ledgers,
    machine,
    messages,
    pages,
    pipelines,
    quantize,
    releases,
    rollouts,
    tools,
)
from onnx_ops.cli.common import Command, CommandGroup, handle_errors, program

app = typer.Typer(
    name="onnx-ops",
    cls=CommandGroup,
    callback=program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Release engineering for ONNX models: one file from training to rollback.",
    epilog="Start with: onnx-ops check FILE, onnx-ops plan FILE, onnx-ops run FILE.",
)

PIPELINES, RELEASES, TOOLS, MACHINE = "Pipelines", "Releases", "Tools", "Machine"

_COMMANDS: list[tuple[str, Callable[..., Any] | typer.Typer]] = [
    (PIPELINES, pipelines.init),
    (PIPELINES, pipelines.check),
    (PIPELINES, pipelines.plan),
    (PIPELINES, pipelines.run),
    (PIPELINES, pipelines.affected),
    (RELEASES, releases.explain),
    (RELEASES, releases.report),
    (RELEASES, releases.export_dvc),
    (RELEASES, releases.drift),
    (RELEASES, releases.promote),
    (RELEASES, rollouts.rollout),
    (RELEASES, rollouts.rollback),
    (RELEASES, releases.reconcile),
    (RELEASES, messages.webhooks),
    (RELEASES, messages.notify),
    (RELEASES, endpoints.status),
    (RELEASES, endpoints.history),
    (RELEASES, endpoints.prune),
    (RELEASES, endpoints.delete),
    (TOOLS, inspect.inspect),
    (TOOLS, judge.judge),
    (TOOLS, tools.bench),
    (TOOLS, quantize.quantize),
    (MACHINE, machine.serve),
    (MACHINE, machine.doctor),
    (MACHINE, pages.docs),
    (MACHINE, machine.targets),
    (MACHINE, machine.work),
    (MACHINE, keys.keys),
    (MACHINE, ledgers.ledger),
]

for panel, command in _COMMANDS:
    if isinstance(command, typer.Typer):
        app.add_typer(command, rich_help_panel=panel)
    else:
        app.command(rich_help_panel=panel, cls=Command)(handle_errors(command))


def main() -> None:
    """Run the command line."""
    gc.set_threshold(50_000, 20, 20)  # imports make many objects and no garbage: a tenth of their time
    # The collections at the end of the process look at every object of MLflow's modules: 1.1 s for nothing.
    atexit.register(gc.freeze)
    app()
