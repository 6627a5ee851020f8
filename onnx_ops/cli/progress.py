"""Progress on standard error: what is at work, for how long, and about how long it still takes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from onnx_ops.cli.terminal import error_console, markup
from onnx_ops.domain.pipeline import Plan, Stage, StageOutcome, StageStatus

if TYPE_CHECKING:
    from rich.status import Status

_LINES = {
    StageStatus.CACHED: "{}[dim]= {}[/dim]",
    StageStatus.DONE: "{}[green]✓[/green] {}",
    StageStatus.FAILED: "{}[red]✗ {}[/red]",
    StageStatus.SKIPPED: "{}[yellow]- {}[/yellow]",
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
        """Return how long a step took last time, in seconds."""
        return self._known.get(key)

    def record(self, key: str, seconds: float) -> None:
        """Remember how long a step took."""
        self._known.pop(key, None)
        self._known[key] = round(seconds, 2)

    def save(self) -> None:
        """Write them, unless the disk does not allow it: estimates are not worth an error."""
        if self._path is None:
            return
        recent = dict(list(self._known.items())[-_REMEMBERED:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = self._path.with_name(f"{_FILE}.{os.getpid()}")
            made.write_text(json.dumps(recent), encoding="utf-8")
            os.replace(made, self._path)


class StepProgress:
    """The steps at work, in one line that is redrawn on a terminal."""

    def __init__(
        self, console: Console, durations: Durations, prefix: str, steps: Sequence[str] = (), *, jobs: int = 1
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
        """End the step before, and begin this one."""
        self.end()
        self._done.update(self._steps[: self._steps.index(name)] if name in self._steps else ())
        self.start(name)

    def start(self, name: str) -> None:
        """Begin a step beside those at work."""
        with self._lock:
            self._begun[name], self._detail = time.monotonic(), ""
            self._done.discard(name)
            if self._console.is_terminal and self._status is None:
                self._status = self._console.status(self)
                self._status.start()
            elif self._is_printing:
                self._print()

    def plan(self, steps: Sequence[str], needs: Mapping[str, Sequence[str]] | None = None) -> None:
        """Add steps that are to come, and which of them each waits for."""
        self._steps += steps
        self._needs = needs or {}

    def tell(self, detail: str) -> None:
        """Show a detail of the current step."""
        self._detail = detail
        if self._is_printing:
            self._print()

    def print_lines(self) -> None:
        """From now on print a line for the steps at work and each one after them."""
        self._is_printing = True
        self._print()

    def _print(self) -> None:
        if line := self.line():
            self._console.print(Text(line), soft_wrap=True)

    def end(self) -> None:
        """End all steps at work."""
        for name in [*self._begun]:
            self.finish(name)

    def finish(self, name: str) -> None:
        """End one step, or leave it out."""
        with self._lock:
            if name in self._begun:
                self._durations.record(self._prefix + name, time.monotonic() - self._begun.pop(name))
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
        """Return the line, empty where nothing is at work. Takes no lock: the thread that redraws holds rich's."""
        begun = dict(self._begun)
        if not begun:
            return ""
        names, count = [*begun], len(self._steps)
        remaining = self._estimate(begun)
        left = f", about {_seconds(remaining)} left" if remaining else ""
        if len(names) > 1:  # long: a narrow terminal cuts names off, and not the time
            return f"[{len(self._done)}/{count} done{left}] {', '.join(names)} …"
        (name,) = names
        place = f"[{self._steps.index(name) + 1}/{count}] " if count > 1 and name in self._steps else ""
        elapsed = time.monotonic() - begun[name]
        took = f" {_seconds(elapsed)}" if elapsed >= 1 else ""
        return f"{place}{name}{f': {self._detail}' if self._detail else ' …'}{took}{left}"

    def __rich__(self) -> Text:
        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def _estimate(self, begun: Mapping[str, float]) -> float | None:
        """Return how long the steps that are not done will take, by the last time; None where that is not known.

        Side by side it is the longest chain of steps that wait for each other, or all of them shared out among `jobs`.
        """
        names = dict.fromkeys([*begun, *(name for name in self._steps if name not in self._done)])
        known: dict[str, float] = {}
        for name in names:
            last = self._durations.get(self._prefix + name)
            if last is None and "/" in name:  # that of the latest step of its kind (`benchmark/…`) in this run
                last = self._durations.get(f"{self._prefix}{name.partition('/')[0]}/")
            if last is not None:
                known[name] = last
        if len(known) < len(names) or sum(known.values()) < _PATIENCE_S:
            return None
        now = time.monotonic()
        rest = {name: max(each - (now - begun.get(name, now)), 0.0) for name, each in known.items()}
        chains: dict[str, float] = {}
        for name, own in rest.items():  # in the plan's order; what is at work waits for nothing
            chains[name] = own + max((chains.get(need, 0.0) for need in self._needs.get(name, ())), default=0.0)
        return max(*chains.values(), sum(rest.values()) / self._jobs)


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.0f} min"


@contextlib.contextmanager
def working(command: str, *steps: str, quiet: bool = False) -> Iterator[StepProgress]:
    """Show the steps of a command that may take longer than two seconds; begin with the first."""
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


class RunProgress:
    """Shows a run: the stages at work with the time left, and each one that has ended.

    Of several runs side by side, only what did work is shown, with the name of its pipeline.
    """

    def __init__(self, console: Console, *, jobs: int = 1, is_one_of_several: bool = False) -> None:
        self._console, self._jobs, self._is_one_of_several = console, jobs, is_one_of_several
        self._durations = Durations(console)
        self._progress = StepProgress(console, self._durations, "")
        self._prefix, self._name = "", " "

    def planned(self, plan: Plan) -> None:
        """Durations of stages side by side include waiting: they are remembered apart."""
        self._name = f"{plan.pipeline} " if self._is_one_of_several else " "
        self._prefix = f"run {plan.pipeline} {f'--jobs {self._jobs} ' if self._jobs > 1 else ''}"
        self._progress = StepProgress(self._console, self._durations, self._prefix, jobs=self._jobs)
        needs = {stage.id: (*stage.needs, *stage.tolerates) for stage in plan.stages}
        self._progress.plan([*needs], needs)
        if not self._console.is_terminal:
            self._progress.print_lines()
        self._console.print(markup("[bold]{}[/bold]: {} stages", plan.pipeline, len(needs)))

    def started(self, stage: Stage) -> None:
        """Show that a stage has started."""
        if not self._is_one_of_several:
            self._progress.start(stage.id)

    def progressed(self, stage: Stage, line: str) -> None:
        """Show how far a stage is."""
        if self._is_one_of_several:
            return
        if self._console.is_terminal:
            self._progress.tell(line)
        else:
            prefix = f"{stage.id}: " if self._jobs > 1 else ""
            self._console.print(Text(f"   {prefix}{line}"), soft_wrap=True)

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Show how a stage ended."""
        self._progress.finish(stage.id)
        if outcome.status is StageStatus.DONE:
            self._durations.record(f"{self._prefix}{stage.id.partition('/')[0]}/", outcome.seconds)
        if not self._is_one_of_several or outcome.status is not StageStatus.CACHED:
            text = {
                StageStatus.CACHED: "unchanged",
                StageStatus.DONE: f"{outcome.seconds:.1f} s",
                StageStatus.FAILED: f"failed after {outcome.seconds:.1f} s",  # the report says why
                StageStatus.SKIPPED: f"skipped: {outcome.reason}",
            }[outcome.status]
            line = markup(_LINES[outcome.status], self._name, f"{stage.id:<28} {text}")
            self._console.print(line, highlight=False)
        if self._progress.is_done and not self._is_one_of_several:
            self._durations.save()
