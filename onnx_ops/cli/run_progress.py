"""Progress of runs on standard error."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from onnx_ops.cli.common import markup
from onnx_ops.cli.progress import StepProgress, read_durations
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.ports import Observer

_LINES = {
    StageStatus.CACHED: "{}[dim]= {}[/dim]",
    StageStatus.DONE: "{}[green]✓[/green] {}",
    StageStatus.FAILED: "{}[red]✗ {}[/red]",
    StageStatus.SKIPPED: "{}[yellow]- {}[/yellow]",
}

_WAIT_S = 1.0
"""Minimum waiting time in seconds that is reported."""


class RunProgress(Observer):
    """Display of a run: the running stages, the remaining time, and each ended stage.

    For one of several runs, only the number of stages and the ended stages are shown, with the name
    of the pipeline. Cached stages are then left out.
    """

    def __init__(self, console: Console, *, jobs: int = 1, is_one_of_several: bool = False) -> None:
        self._console, self._jobs, self._is_one_of_several = console, jobs, is_one_of_several
        self._durations = read_durations(console)
        self._progress = StepProgress(console, self._durations, "")
        self._prefix, self._name, self._width = "", " ", 0
        self._files: dict[str, Path] = {}
        self._worked: dict[str, float] = {}

    def planned(self, plan: Plan) -> None:
        """Add the stages of a run, and print their number.

        Durations of parallel stages include waiting, so they are recorded separately for each
        number of jobs.
        """
        self._name = f"{plan.pipeline} " if self._is_one_of_several else " "
        self._prefix = f"run {plan.pipeline} {f'--jobs {self._jobs} ' if self._jobs > 1 else ''}"
        self._progress = StepProgress(self._console, self._durations, self._prefix, jobs=self._jobs)
        needs = {stage.id: (*stage.needs, *stage.tolerates) for stage in plan.stages}
        self._progress.plan([*needs], needs)
        self._width = max(map(len, needs), default=0)
        if not self._console.is_terminal:
            self._progress.print_lines()
        self._console.print(markup("[bold]{}[/bold]: {} stages", plan.pipeline, len(needs)))

    def started(self, stage: Stage) -> None:
        """Show that a stage has started."""
        if not self._is_one_of_several:
            self._progress.start(stage.id)

    def progressed(self, stage: Stage, line: str) -> None:
        """Show the progress of a stage."""
        if self._is_one_of_several:
            return
        if self._console.is_terminal:
            self._progress.show_detail(line)
        else:
            prefix = f"{stage.id}: " if self._jobs > 1 else ""
            self._console.print(Text(f"   {prefix}{line}"), soft_wrap=True)

    def printed(self, stage: Stage, line: str, file: Path) -> None:
        """Show the last line that a stage's code printed, if there is a terminal.

        `file` contains all lines that the code printed.
        """
        self._files[stage.id] = file
        if self._console.is_terminal and not self._is_one_of_several:
            self._progress.show_detail(line)

    def _describe_output(self, stage: Stage) -> str:
        """Return the path of a training stage's output, as a part of the stage's line.

        The path is not shown for other stages: mostly libraries print there.
        """
        file = self._files.get(stage.id)
        if file is None or stage.kind is not StageKind.TRAIN:
            return ""
        return (
            ", "
            f"output in {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}"
        )

    def worked(self, stage: Stage, seconds: float) -> None:
        """Record the working time of a stage, to show it on the stage's line."""
        self._worked[stage.id] = seconds

    def _describe_time(self, stage: Stage, outcome: StageOutcome) -> str:
        """Return the duration of a stage, and its waiting time if that was long."""
        worked = self._worked.get(stage.id, outcome.seconds)
        waited = outcome.seconds - worked
        return (
            f"{worked:.1f} s after {waited:.1f} s of waiting"
            if waited >= _WAIT_S
            else f"{outcome.seconds:.1f} s"
        )

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Show the outcome of a stage."""
        self._progress.finish(stage.id)
        if outcome.status is StageStatus.DONE:
            self._durations.add(f"{self._prefix}{stage.id.partition('/')[0]}/", outcome.seconds)
        if not self._is_one_of_several or outcome.status is not StageStatus.CACHED:
            text = {
                StageStatus.CACHED: "unchanged",
                StageStatus.DONE: self._describe_time(stage, outcome)
                + self._describe_output(stage),
                # The report of the run shows the reason.
                StageStatus.FAILED: f"failed after {self._describe_time(stage, outcome)}",
                StageStatus.SKIPPED: f"skipped: {outcome.reason}",
            }[outcome.status]
            line = markup(_LINES[outcome.status], self._name, f"{stage.id:<{self._width}} {text}")
            self._console.print(line, highlight=False)
        if self._progress.is_done and not self._is_one_of_several:
            self._durations.save()
