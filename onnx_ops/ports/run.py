"""Ports of a run: executor, observer, clock, pools and host."""

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
    """Runs the work of a stage: in this process, in a separate one, or as a task of an orchestrator."""

    def run(self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]) -> Manifest:
        """Run attempts until one succeeds or `stage.retries` are spent.

        `decide` reads a gate stage's decision from its result, so that an executor can show a failed gate as failed.

        Raises:
            OnnxOpsError: the last attempt's error.
        """
        ...

    def show(self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]) -> None:
        """Show the outcome of a stage that needed no work (cached, skipped); an earlier failed gate shows as failed."""
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
        """Report the progress of a long stage."""
        ...

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Report that a stage ended."""
        ...


class Pools(ABC):
    """Remote machines, reached through pools of workers."""

    @abstractmethod
    def measure(self, pool: str, title: str, request: Mapping[str, Json], *, timeout: float | None) -> None:
        """Run the request on a worker of the pool and wait until its result is in the store.

        Args:
            pool: its name.
            title: display name of the request.
            request: what the worker's `app.remote.answer` takes.
            timeout: seconds from the start of the work; None for no limit.

        Raises:
            UserError: there is no such pool.
            ServiceUnavailableError: the orchestrator does not answer.
            MeasurementError: no worker took it, or workers died, or it took longer than `timeout`.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel all work that `measure` waits for, in any thread. Raises nothing."""


class Host(Protocol):
    """This machine and its processes, for leases."""

    def holder(self) -> str:
        """Return an identifier of this process that `alive` understands on the same machine."""
        ...

    def alive(self, holder: str) -> bool:
        """Return whether that holder may still be running; True if unknown."""
        ...

    def actor(self) -> str:
        """Return the person or service on whose behalf this process runs."""
        ...
