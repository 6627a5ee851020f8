"""Output of commands with `--dry-run`: what a command would change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_ops import codec
from onnx_ops.cli.common import (
    documents,
    error_console,
    exit_after_steps,
    print_result,
    render_error,
    say,
    steps_to_document,
)
from onnx_ops.errors import OnnxOpsError

if TYPE_CHECKING:
    from onnx_ops.ports import Context
    from onnx_ops.release.dry_run import DryRun
    from onnx_ops.release.reconcile import StepReport

NOTHING_CHANGED = "Nothing was changed. Run the same command without --dry-run."
"""Last line of a dry run without errors."""

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only show what the command would change.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunOutcome:
    """How a command would end, apart from its changes.

    `notes` are further sentences, for example about an endpoint that stays unchanged.
    """

    reports: Mapping[str, Sequence[StepReport]] = field(default_factory=dict)
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)
    notes: Sequence[str] = ()


def show_dry_run(operate: Callable[[Context], DryRunOutcome], *, as_json: bool) -> None:
    """Run an operation without changing anything, and print what it would change.

    The exit code is that of the operation, as far as it is known in advance.
    """
    from onnx_ops.app.dry_run import open_dry_run

    with open_dry_run() as dry_run:
        failure: OnnxOpsError | None = None
        outcome = DryRunOutcome()
        try:
            outcome = operate(dry_run.context)
        except OnnxOpsError as error:
            failure = error
        print_result(
            lambda: build_dry_run_document(dry_run, outcome, failure),
            lambda: print_dry_run(dry_run, outcome, failure),
            as_json=as_json,
        )
    if failure is not None:
        raise typer.Exit(failure.exit_code)
    exit_after_steps(outcome.reports, outcome.errors)


def build_dry_run_document(
    dry_run: DryRun, outcome: DryRunOutcome, failure: OnnxOpsError | None
) -> dict[str, Any]:
    """Return the JSON document of a dry run."""
    return {
        "dry_run": True,
        "changes": codec.to_json(dry_run.changes),
        "needs": list(dry_run.list_needs()),
        "rollbacks": codec.to_json(dry_run.list_rollbacks()),
        "steps": steps_to_document(outcome.reports, {}),
        "errors": documents(outcome.errors),
        "error": None if failure is None else failure.as_document(),
        "notes": list(outcome.notes),
    }


def print_dry_run(dry_run: DryRun, outcome: DryRunOutcome, failure: OnnxOpsError | None) -> None:
    """Print the changes of a dry run, what they need, and how the command would end."""
    print_changes(dry_run, outcome, failure)
    say("Nothing was changed." if outcome.errors or failure else NOTHING_CHANGED)


def print_changes(dry_run: DryRun, outcome: DryRunOutcome, failure: OnnxOpsError | None) -> None:
    """Print the changes of a dry run, their needs, the next rollbacks, and the errors."""
    from onnx_ops.release.dry_run import format_rollbacks

    for change in dry_run.changes:
        say(change.describe())
    if not (dry_run.changes or outcome.notes):
        say("would change nothing")
    for note in outcome.notes:
        say(note)
    for name, steps in outcome.reports.items():
        for step in steps:
            if not step.did:
                say(f"{name}: {step.why}")
        if steps[-1].registry_down:
            say(f"{name}: the registry could not be read: {steps[-1].registry_down}", err=True)
    if needs := dry_run.list_needs():
        say(f"Needs: {'; '.join(needs)}.")
    for text in format_rollbacks(dry_run.list_rollbacks()).values():
        say(text)
    for error in (*outcome.errors.values(), *([] if failure is None else [failure])):
        render_error(error_console(), error, "would end with")
