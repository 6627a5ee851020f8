"""Progress on the terminal: one line per finished stage, a spinner on the one at work."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from onnx_ops.domain.pipeline import Plan, Stage, StageOutcome, StageStatus

_MARKS = {
    StageStatus.CACHED: ("[dim]=[/dim]", "dim"),
    StageStatus.DONE: ("[green]✓[/green]", ""),
    StageStatus.FAILED: ("[red]✗[/red]", "red"),
    StageStatus.SKIPPED: ("[yellow]-[/yellow]", "yellow"),
}


class Lines:
    """Tells of one pipeline among several, or of stages side by side: a line for each stage that did work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""

    def planned(self, plan: Plan) -> None:
        self._name = plan.pipeline
        self._console.print(f"[bold]{escape(plan.pipeline)}[/bold]: {len(plan.stages)} stages")

    def started(self, stage: Stage) -> None:
        del stage

    def told(self, stage: Stage, line: str) -> None:
        del stage, line

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        if outcome.status is not StageStatus.CACHED:
            self._console.print(f"{escape(self._name)} {_finished(stage, outcome)}", highlight=False)


class TerminalProgress:
    """Watches a run and tells about it on standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._done = 0
        self._total = 0

    def planned(self, plan: Plan) -> None:
        self._total = len(plan.stages)
        self._console.print(f"[bold]{escape(plan.pipeline)}[/bold]: {self._total} stages")

    def started(self, stage: Stage) -> None:
        text = f"[{self._done + 1}/{self._total}] {escape(stage.id)} …"
        if self._console.is_terminal:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._console.print(text)

    def told(self, stage: Stage, line: str) -> None:
        if self._status is not None:
            self._status.update(f"[{self._done + 1}/{self._total}] {escape(stage.id)}: {escape(line)}")
        else:
            self._console.print(f"   {escape(line)}", soft_wrap=True, highlight=False)

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._done += 1
        self._console.print(f" {_finished(stage, outcome)}", highlight=False)


def _finished(stage: Stage, outcome: StageOutcome) -> str:
    mark, style = _MARKS[outcome.status]
    told = {
        StageStatus.CACHED: "unchanged",
        StageStatus.DONE: f"{outcome.seconds:.1f} s",
        StageStatus.FAILED: f"failed after {outcome.seconds:.1f} s",  # the report says why
        StageStatus.SKIPPED: f"skipped: {outcome.reason}",
    }[outcome.status]
    text = f"{escape(stage.id):<28} {escape(told)}"
    return f"{mark} [{style}]{text}[/{style}]" if style else f"{mark} {text}"
