"""Ports of a run: who executes stages, who watches, what time it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from onnx_ops.domain.artifact import Manifest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.pipeline import Plan, Stage, StageOutcome
from onnx_ops.domain.quantities import Json

Work = Callable[[], Manifest]
"""Computes a stage's result; raises OnnxOpsError when it cannot."""


class Clock(Protocol):
    """The time."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, for durations."""
        ...


class Executor(Protocol):
    """Runs the work of a stage: here, in a process of its own, or as a task of an orchestrator."""

    def run(self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]) -> Manifest:
        """Run one attempt after another until one succeeds or `stage.retries` are spent.

        `decide` reads a gate stage's decision from its result, so that an executor can show a failed gate as
        failed.

        Raises:
            OnnxOpsError: the last attempt's error.
        """
        ...

    def show(self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]) -> None:
        """Make an outcome visible that needed no work (cached, skipped); a gate that failed earlier failed still."""
        ...


class Observer(Protocol):
    """Watches a run."""

    def planned(self, plan: Plan) -> None:
        """Report the plan."""
        ...

    def started(self, stage: Stage) -> None:
        """Report that a stage started."""
        ...

    def progressed(self, stage: Stage, line: str) -> None:
        """How far a long stage is."""
        ...

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Report that a stage ended."""
        ...


class Pools(ABC):
    """Machines elsewhere, reached through pools of workers."""

    @abstractmethod
    def measure(self, pool: str, title: str, request: Mapping[str, Json], *, timeout: float | None) -> None:
        """Have a worker of the pool answer the request, and wait until it has; what it found lies in the store.

        Args:
            pool: its name.
            title: what people see of it.
            request: what the worker's `app.remote.answer` takes.
            timeout: seconds from the start of the work; None for no limit.

        Raises:
            UserError: there is no such pool.
            ServiceUnavailableError: whoever hands out the work does not answer.
            MeasurementError: no worker took it, or workers died, or it took longer than `timeout`.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel all work that `measure` waits for, in whatever thread. Raises nothing."""


class Host(Protocol):
    """The machine, as far as leases are concerned."""

    def holder(self) -> str:
        """Who this process is, in a form that `alive` understands on the same machine."""
        ...

    def alive(self, holder: str) -> bool:
        """Whether that holder may still be at work. True if it cannot be known."""
        ...

    def actor(self) -> str:
        """Who is answerable: the person or service on whose behalf this process runs."""
        ...
