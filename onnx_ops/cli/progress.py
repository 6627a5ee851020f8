"""Progress on standard error.

The progress shows the running steps, their duration, and an estimate of the remaining time.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from onnx_ops.cli.common import error_console, markup
from onnx_ops.domain.pipeline import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.ports import Observer
from onnx_ops.scratch import Durations

if TYPE_CHECKING:
    from rich.status import Status

_LINES = {
    StageStatus.CACHED: "{}[dim]= {}[/dim]",
    StageStatus.DONE: "{}[green]✓[/green] {}",
    StageStatus.FAILED: "{}[red]✗ {}[/red]",
    StageStatus.SKIPPED: "{}[yellow]- {}[/yellow]",
}

_WAIT_S = 1.0
"""Minimum waiting time in seconds that is reported."""

_SLOW_AFTER_S = 2.0
"""Duration in seconds after which steps are shown even without a terminal."""


def read_durations(console: Console) -> Durations:
    """Return the last durations of commands, from the user's cache.

    Without a terminal, they are empty, since no estimate is shown. They are also empty if the user
    has no home folder, as in some containers.
    """
    if not console.is_terminal:
        return Durations(None)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return Durations(None)
    return Durations(home / "onnx-ops" / "durations.json")


class StepProgress:
    """Display of the running steps, in one line that is redrawn on a terminal."""

    def __init__(
        self,
        console: Console,
        durations: Durations,
        prefix: str,
        steps: Sequence[str] = (),
        *,
        jobs: int = 1,
    ) -> None:
        self._console, self._durations, self._prefix = console, durations, prefix
        self._steps, self._jobs = list(steps), jobs
        self._needs: Mapping[str, Sequence[str]] = {}
        self._status: Status | None = None
        self._begun: dict[str, float] = {}
        self._done: set[str] = set()
        self._detail = ""
        self._is_printing = False
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        """End all running steps, and start a step."""
        self.end()
        self._done.update(self._steps[: self._steps.index(name)] if name in self._steps else ())
        self.start(name)

    def start(self, name: str) -> None:
        """Start a step in parallel to the running steps."""
        with self._lock:
            self._begun[name], self._detail = time.monotonic(), ""
            self._done.discard(name)
            if self._console.is_terminal and self._status is None:
                self._status = self._console.status(self)
                self._status.start()
            elif self._is_printing:
                self._print()

    def plan(self, steps: Sequence[str], needs: Mapping[str, Sequence[str]] | None = None) -> None:
        """Add future steps, and the steps for which each future step must wait."""
        self._steps += steps
        self._needs = needs or {}

    def show_detail(self, detail: str) -> None:
        """Show a detail of the current step."""
        self._detail = detail
        if self._is_printing:
            self._print()

    def print_lines(self) -> None:
        """Print a line for the running steps now, and for each step that starts later."""
        self._is_printing = True
        self._print()

    def _print(self) -> None:
        if line := self.line():
            self._console.print(Text(line), soft_wrap=True)

    def end(self) -> None:
        """End all running steps."""
        for name in [*self._begun]:
            self.finish(name)

    def finish(self, name: str) -> None:
        """End one step, or remove it from the plan."""
        with self._lock:
            if name in self._begun:
                self._durations.add(self._prefix + name, time.monotonic() - self._begun.pop(name))
            self._done.add(name)
            self._detail = ""
            if self._status is not None and not self._begun:
                self._status.stop()
                self._status = None

    @property
    def is_done(self) -> bool:
        """Return whether all steps have ended."""
        return self._done.issuperset(self._steps)

    def line(self) -> str:
        """Return the line of the display; empty if no step is running.

        This method acquires no lock, since the redrawing thread already holds the lock of Rich.
        """
        begun = dict(self._begun)
        if not begun:
            return ""
        names, count = [*begun], len(self._steps)
        remaining = self._estimate(begun)
        left = f", about {format_seconds(remaining)} left" if remaining else ""
        if len(names) > 1:
            # The names are last, since a narrow terminal cuts off the end of the line.
            return f"[{len(self._done)}/{count} done{left}] {', '.join(names)} …"
        (name,) = names
        place = (
            f"[{self._steps.index(name) + 1}/{count}] " if count > 1 and name in self._steps else ""
        )
        elapsed = time.monotonic() - begun[name]
        took = f" {format_seconds(elapsed)}" if elapsed >= 1 else ""
        return f"{place}{name}{f': {self._detail}' if self._detail else ' …'}{took}{left}"

    def __rich__(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def _estimate(self, begun: Mapping[str, float]) -> float | None:
        """Return the estimated remaining seconds, from the last durations of the steps.

        The result is None if a duration is unknown, or if the sum of the durations is below two
        seconds. The estimate is the duration of the longest chain of dependent steps, or the sum of
        all steps divided by `jobs` if that is longer.
        """
        names = dict.fromkeys([*begun, *(name for name in self._steps if name not in self._done)])
        known: dict[str, float] = {}
        for name in names:
            last = self._durations.last.get(self._prefix + name)
            # For a new step, use the last duration of a step of the same kind (`benchmark/…`).
            if last is None and "/" in name:
                last = self._durations.last.get(f"{self._prefix}{name.partition('/')[0]}/")
            if last is not None:
                known[name] = last
        if len(known) < len(names) or sum(known.values()) < _SLOW_AFTER_S:
            return None
        now = time.monotonic()
        rest = {name: max(each - (now - begun.get(name, now)), 0.0) for name, each in known.items()}
        chains: dict[str, float] = {}
        for name, own in rest.items():
            # The duration of a chain includes the steps for which its last step waits.
            chains[name] = own + max(
                (chains.get(need, 0.0) for need in self._needs.get(name, ())), default=0.0
            )
        return max(*chains.values(), sum(rest.values()) / self._jobs)


def format_seconds(value: float) -> str:
    """Return a duration as text in seconds or, from 90 s, in minutes."""
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.0f} min"


@contextlib.contextmanager
def working(command: str, *steps: str, quiet: bool = False) -> Iterator[StepProgress]:
    """Show the steps of a command while this context is open.

    The first step starts immediately. Without a terminal, steps are shown only after two seconds.
    """
    console = Console(quiet=True, file=io.StringIO()) if quiet else error_console()
    durations = read_durations(console)
    progress = StepProgress(console, durations, f"{command} ", steps)
    progress.begin(steps[0])
    timer = threading.Timer(_SLOW_AFTER_S, progress.print_lines)
    timer.daemon = True
    if not (quiet or console.is_terminal):
        timer.start()
    try:
        yield progress
        progress.end()
        durations.save()
    finally:
        timer.cancel()
        progress.end()


class RunProgress(Observer):
    """Display of a run: the running stages, the remaining time, and each ended stage.

    For one of several parallel runs, only ended stages that are not cached are shown, with the name
    of their pipeline.
    """

    def __init__(self, console: Console, *, jobs: int = 1, is_one_of_several: bool = False) -> None:
        self._console, self._jobs, self._is_one_of_several = console, jobs, is_one_of_several
        self._durations = read_durations(console)
        self._progress = StepProgress(console, self._durations, "")
        self._prefix, self._name, self._width = "", " ", 0
        self._files: dict[str, Path] = {}
        self._worked: dict[str, float] = {}

    def planned(self, plan: Plan) -> None:
        """Add the stages of a run.

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

        The path is not shown for other stages: only libraries print there.
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
