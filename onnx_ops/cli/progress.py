"""Progress on standard error: what is at work, for how long, and about how long it still takes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from onnx_ops.cli.terminal import error_console
from onnx_ops.domain.pipeline import Plan, Stage, StageOutcome, StageStatus

_MARKS = {
    StageStatus.CACHED: ("[dim]=[/dim]", "dim"),
    StageStatus.DONE: ("[green]✓[/green]", ""),
    StageStatus.FAILED: ("[red]✗[/red]", "red"),
    StageStatus.SKIPPED: ("[yellow]-[/yellow]", "yellow"),
}

_PATIENCE_S = 2.0
"""What takes longer is shown, also where there is no terminal."""

_FILE = "durations.json"
_REMEMBERED = 2000
"""Steps whose last duration is kept."""


class Durations:
    """How long each step took the last time, in a file of the user's cache; for terminals, which alone show it."""

    def __init__(self, console: Console) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = home / "onnx-ops" / _FILE if console.is_terminal else None
        self._known: dict[str, float] = {}
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._known = {str(key): float(s) for key, s in json.loads(self._path.read_text("utf-8")).items()}

    def get(self, key: str) -> float | None:
        return self._known.get(key)

    def record(self, key: str, seconds: float) -> None:
        self._known.pop(key, None)
        self._known[key] = round(seconds, 2)

    def save(self) -> None:
        """Write them, unless the disk does not allow it: estimates are not worth an error."""
        if self._path is None:
            return
        kept = dict(list(self._known.items())[-_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = self._path.with_name(f"{_FILE}.{os.getpid()}")
            made.write_text(json.dumps(kept), encoding="utf-8")
            os.replace(made, self._path)


class StepProgress:
    """The step at work, in one line that is redrawn on a terminal."""

    def __init__(
        self,
        console: Console,
        durations: Durations,
        prefix: str,
        steps: Sequence[str] = (),
        *,
        is_printing: bool = False,
    ) -> None:
        self._console, self._durations, self._prefix = console, durations, prefix
        self._steps = list(steps)
        self._status: Status | None = None
        self._name, self._detail, self._begun = "", "", time.monotonic()
        self._is_printing = is_printing

    def begin(self, name: str) -> None:
        """End the step before, and begin this one."""
        self.end()
        self._name, self._detail, self._begun = name, "", time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(self)
            self._status.start()
        elif self._is_printing:
            self._print()

    def plan(self, steps: Sequence[str]) -> None:
        """Add steps that are to come."""
        self._steps += steps

    def tell(self, detail: str) -> None:
        self._detail = detail
        if self._is_printing:
            self._print()

    def print_lines(self) -> None:
        """From now on print a line for the step at work and each one after it."""
        self._is_printing = True
        self._print()

    def _print(self) -> None:
        self._console.print(escape(self.line()), soft_wrap=True)

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._name:
            self._durations.record(self._prefix + self._name, time.monotonic() - self._begun)
        self._name = ""

    def line(self) -> str:
        count = len(self._steps)
        place = f"[{self._steps.index(self._name) + 1}/{count}] " if self._name in self._steps and count > 1 else ""
        detail = f": {self._detail}" if self._detail else " …"
        elapsed = time.monotonic() - self._begun
        took = f" {_seconds(elapsed)}" if elapsed >= 1 else ""
        left = self._left(elapsed)
        return f"{place}{self._name}{detail}{took}{f', about {_seconds(left)} left' if left else ''}"

    def __rich__(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def _left(self, elapsed: float) -> float | None:
        """Return how long this step and those after it took the last time; None where that is not known."""
        place = self._steps.index(self._name) if self._name in self._steps else 0
        now, *later = [self._expected(name) for name in self._steps[place:] or [self._name]]
        known = [each for each in later if each is not None]
        if now is None or len(known) < len(later) or now + sum(known) < _PATIENCE_S:
            return None
        return max(now - elapsed, 0.0) + sum(known)

    def _expected(self, name: str) -> float | None:
        """Return the step's last duration, else that of the latest step of its kind (`benchmark/…`) in this run."""
        known = self._durations.get(self._prefix + name)
        if known is None and "/" in name:
            known = self._durations.get(f"{self._prefix}{name.partition('/')[0]}/")
        return known


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.0f} min"


@contextlib.contextmanager
def working(command: str, *steps: str, quiet: bool = False) -> Iterator[StepProgress]:
    """Show the progress of a command that may take longer than two seconds; begins with the first step.

    Args:
        command: whose durations are remembered.
        steps: names of what it does, in order; `StepProgress.plan` gives them later where they are not known yet.
        quiet: show nothing.
    """
    console = Console(quiet=True, file=io.StringIO()) if quiet else error_console()
    durations = Durations(console)
    progress = StepProgress(console, durations, f"{command} ", steps)
    progress.begin(steps[0])
    timer = threading.Timer(_PATIENCE_S, progress.print_lines)
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
        self._durations = Durations(console)
        self._progress = StepProgress(console, self._durations, "")
        self._prefix = ""
        self._last = ""

    def planned(self, plan: Plan) -> None:
        ids = [stage.id for stage in plan.stages]
        self._prefix, self._last = f"run {plan.pipeline} ", ids[-1] if ids else ""
        is_printing = not self._console.is_terminal
        self._progress = StepProgress(self._console, self._durations, self._prefix, ids, is_printing=is_printing)
        self._console.print(f"[bold]{escape(plan.pipeline)}[/bold]: {len(ids)} stages")

    def started(self, stage: Stage) -> None:
        self._progress.begin(stage.id)

    def told(self, stage: Stage, line: str) -> None:
        del stage
        if self._console.is_terminal:
            self._progress.tell(line)
        else:
            self._console.print(f"   {escape(line)}", soft_wrap=True, highlight=False)

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        self._progress.end()
        if outcome.status is StageStatus.DONE:
            self._durations.record(f"{self._prefix}{stage.id.partition('/')[0]}/", outcome.seconds)
        self._console.print(f" {_finished(stage, outcome)}", highlight=False)
        if stage.id == self._last:
            self._durations.save()


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
