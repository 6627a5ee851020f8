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

from onnx_ops.cli.common import error_console
from onnx_ops.scratch import Durations

if TYPE_CHECKING:
    from rich.status import Status

_SLOW_AFTER_S = 2.0
"""Duration in seconds after which steps are shown even without a terminal.

It is also the minimum sum of the last durations for which a remaining time is shown.
"""


def read_durations(console: Console) -> Durations:
    """Return the last durations of commands, from the user's cache.

    Without a terminal, they are empty, since only a terminal shows an estimate. They are also empty
    if there is neither XDG_CACHE_HOME nor a home folder, as in some containers.
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
        """Print a line for the running steps now, and for each later step and detail."""
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
        """End one step, or mark a step that does not run as done."""
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
        seconds. The estimate is the longer of two durations: that of the longest chain of dependent
        steps, and the sum of all steps divided by `jobs`.
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
