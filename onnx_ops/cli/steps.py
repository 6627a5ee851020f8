"""How the steps of a reconciler are told, and which exit code they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from onnx_ops.operations.reconcile import StepReport


def tell_steps(reports: Mapping[str, Sequence[StepReport]]) -> None:
    for name, steps in reports.items():
        for report in steps:
            typer.echo(f"{name}: {report.did + ': ' if report.did else ''}{report.why}")
        if steps[-1].registry_down:
            typer.echo(f"{name}: the registry does not answer: {steps[-1].registry_down}", err=True)


def exit_for(reports: Mapping[str, Sequence[StepReport]]) -> None:
    """5 if something was refused, 4 if the registry could not be asked."""
    if any(report.refused for steps in reports.values() for report in steps):
        raise typer.Exit(5)
    if any(steps[-1].registry_down for steps in reports.values()):
        raise typer.Exit(4)
