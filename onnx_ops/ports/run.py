"""Ports of a run, and the context that contains all ports of a project.

The ports of a run are executor, observer, clock, pools and host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onnx_ops.ports.plugin import Plugin

if TYPE_CHECKING:
    # These imports are only for type hints, as in `onnx_ops.ports.release`.
    from onnx_ops.domain.artifact import Digest, Manifest
    from onnx_ops.domain.decision import Decision
    from onnx_ops.domain.endpoint import EndpointConfig
    from onnx_ops.domain.execution import Environment
    from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome
    from onnx_ops.domain.pool import EndedRun, PlacedStage, PoolStatus
    from onnx_ops.ports.data import DataSource, ModelSource
    from onnx_ops.ports.export import Exporter
    from onnx_ops.ports.optimize import Optimizer
    from onnx_ops.ports.release import (
        EndpointProvider,
        Ledger,
        MetricsSource,
        ModelFiles,
        Notifier,
        Registry,
    )
    from onnx_ops.ports.runtime import Runtime
    from onnx_ops.ports.store import Signer, StageJournal, Store, Verifier

Work = Callable[[], "Manifest"]
"""Function that computes a stage's result, or raises OnnxOpsError."""


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the seconds since the epoch."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary start, to measure durations."""


class Executor(Protocol):
    """An executor of the work of stages.

    The work runs in this process, in a separate process, or as a task of an orchestrator.
    """

    def run(
        self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]
    ) -> Manifest:
        """Run attempts until one succeeds or `stage.retries` are spent.

        Only a failure of the environment (InfrastructureError) is retried.

        `decide` reads a gate stage's decision from its result, so that an executor can show a
        failed gate as failed.

        Raises:
            OnnxOpsError: the last attempt's error.
        """

    def show(
        self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]
    ) -> None:
        """Show the outcome of a stage that did no work (cached, skipped, check failed).

        A gate that failed earlier is shown as failed.
        """


class Observer:
    """An observer of a run. The base class ignores every event."""

    def planned(self, plan: Plan) -> None:
        """Report the plan before its first stage starts."""

    def started(self, stage: Stage) -> None:
        """Report that a stage that needs work starts."""

    def progressed(self, stage: Stage, line: str) -> None:
        """Report in one line what a stage does or waits for."""

    def printed(self, stage: Stage, line: str, file: Path) -> None:
        """Report a line that the stage's code printed.

        `file` contains all of these lines.
        """

    def worked(self, stage: Stage, seconds: float) -> None:
        """Report how long a stage worked, without the time it waited for a machine."""

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        """Report the outcome of a stage, including cached and skipped stages."""


class Pools(Plugin):
    """Remote machines, reached through pools of workers."""

    @abstractmethod
    def prepare(self) -> None:
        """Do slow preparations of the first `run` in advance.

        Errors are ignored; `run` raises them if they persist.
        """

    @abstractmethod
    def run(self, stage: PlacedStage, is_done: Callable[[], bool]) -> EndedRun:
        """Have a worker of the pool execute a stage, and wait for its end.

        A request for a key that is already being executed waits for that execution.

        Args:
            stage: what to execute.
            is_done: returns whether the stage's result is in the store; the stage is then not
                executed.

        Raises:
            UserError: the orchestrator or the pool is not configured.
            ServiceUnavailableError: the orchestrator is unavailable, or no running worker of the
                pool executes this kind of stage.
            StageError: the stage took longer than its time-out, or `cancel` was called.
            MeasurementError: several attempts crashed, were cancelled or stopped sending
                heartbeats, or a worker took the stage and did not start it.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the work that `run` requested and awaits; later calls start no work.

        The work of all threads is cancelled. Errors are ignored.
        """

    @abstractmethod
    def work(self, pool: str, kinds: Sequence[StageKind], *, limit: int) -> None:
        """Execute stages of a pool on this machine, until a signal ends the process.

        At most `limit` stages run concurrently. Missing parts of the pool are created.

        Raises:
            UserError: no orchestrator is configured.
            ServiceUnavailableError: the orchestrator is unavailable.
        """

    @abstractmethod
    def read_status(self) -> tuple[PoolStatus, ...]:
        """Return all pools for stages, sorted by name.

        Raises:
            UserError: no orchestrator is configured.
            ServiceUnavailableError: the orchestrator is unavailable.
        """


class Host(Protocol):
    """This machine and its processes, for leases."""

    def holder(self) -> str:
        """Return an identifier of this process, which `alive` accepts on the same machine."""

    def alive(self, holder: str) -> bool:
        """Return whether that holder can still be running.

        The result is True for a process on another machine.
        """

    def actor(self) -> str:
        """Return the person or service on whose behalf this process runs."""


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports of one project. Adapters are created on first use.

    `root` is the project's folder, the base of user code and relative paths. `signer` returns None
    where decisions are not signed. `exporter` and `optimizer` run in the given environment,
    otherwise in their default environment or in this process. `notifiers` are by name. `conditions`
    describes the state of the machine (load, governor, limits). `journal` returns the journal of
    the stage with a key. `report_progress` receives the progress of a long stage.
    """

    root: Path
    open_store: Callable[[], Store]
    open_ledger: Callable[[], Ledger]
    files: ModelFiles
    models: ModelSource
    clock: Clock
    host: Host
    registry: Callable[[], Registry]
    verifier: Callable[[], Verifier]
    signer: Callable[[], Signer | None]
    provider: Callable[[str], EndpointProvider]
    metrics: Callable[[EndpointConfig], MetricsSource]
    exporter: Callable[[str, Environment | None], Exporter]
    optimizer: Callable[[str, Environment | None], Optimizer]
    runtime: Callable[[str], Runtime]
    source: Callable[[str], DataSource]
    notifiers: Callable[[], Mapping[str, Notifier]]
    git_sha: Callable[[], str]
    conditions: Callable[[], Mapping[str, str]]
    journal: Callable[[Digest], StageJournal]
    report_progress: Callable[[str], None] = _silent

    @property
    def store(self) -> Store:
        """The content and the results of stages."""
        return self.open_store()

    @property
    def ledger(self) -> Ledger:
        """The ledgers of the endpoints."""
        return self.open_ledger()
