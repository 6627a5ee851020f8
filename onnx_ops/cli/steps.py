"""How the steps of a reconciler are told, and which exit code they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import complain
from onnx_ops.cli.terminal import say
from onnx_ops.errors import OnnxOpsError

if TYPE_CHECKING:
    from onnx_ops.release.reconcile import StepReport


def tell_steps(reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None) -> None:
    for name, steps in reports.items():
        for report in steps:
            say(f"{name}: {report.did + ': ' if report.did else ''}{report.why}")
        if steps[-1].registry_down:
            say(f"{name}: the registry does not answer: {steps[-1].registry_down}", err=True)
    for error in (errors or {}).values():
        complain(error, as_json=False)


def steps_document(reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError]) -> dict[str, Any]:
    """By endpoint a list of its steps, or the error that it ended with."""
    return {**codec.to_json(reports), **{name: error.as_document() for name, error in errors.items()}}


def exit_for(reports: Mapping[str, Sequence[StepReport]], errors: Mapping[str, OnnxOpsError] | None = None) -> None:
    """The worst error's code; else 5 if something was refused, 4 if the registry could not be asked."""
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))
    if any(report.refused for steps in reports.values() for report in steps):
        raise typer.Exit(5)
    if any(steps[-1].registry_down for steps in reports.values()):
        raise typer.Exit(4)
