"""Run a plan: each stage runs when its inputs exist, unless its result is cached."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.plan import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.errors import InfrastructureError, OnnxOpsError, StorageError
from onnx_ops.pipeline.stage_settings import get_pool
from onnx_ops.ports import Clock, Executor, Observer, Work
from onnx_ops.scratch import storage_errors

T = TypeVar("T")
R = TypeVar("R")

StageResult = tuple[StageOutcome, OnnxOpsError | None]
"""The outcome of a stage, and the error if the stage failed."""

Step = Callable[[Stage], StageResult]

_ASKED = 64
"""Maximum number of stages that one run requests from pools simultaneously.

A thread waits for each requested stage.
"""


class DaemonThreadPool(Generic[R]):
    """Thread pool that starts tasks in the order of their submission.

    Up to `jobs` tasks run simultaneously. The threads are daemons: an interrupted command exits
    immediately, and running tasks end with the process.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, not {jobs}")
        self._jobs = jobs
        self._tasks: SimpleQueue[tuple[Future[R], Callable[[], R]] | None] = SimpleQueue()

    def __enter__(self) -> DaemonThreadPool[R]:
        for _ in range(self._jobs):
            threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(Empty):  # After an error, the queued tasks are discarded.
            while error is not None:
                self._tasks.get_nowait()
        for _ in range(self._jobs):
            self._tasks.put(None)

    def submit(self, task: Callable[[], R]) -> Future[R]:
        """Submit a task, which gets a copy of the caller's context."""
        future: Future[R] = Future()
        self._tasks.put((future, partial(contextvars.copy_context().run, task)))
        return future

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                result: Any = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # Without these references, the result is freed while this thread waits.
            del item, future, task


def ordered_map(jobs: int, task: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of `task` for every item, in the order of the items.

    After a result was yielded, the pool does not keep it in memory.
    """
    with DaemonThreadPool[R](jobs) as pool:
        futures = deque(pool.submit(partial(task, item)) for item in items)
        while futures:
            yield futures.popleft().result()


class Handler(Protocol):
    """The operations on stages that `run` and `preview` need."""

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        """Return the stage's intact stored result; None if the stage must run."""

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        """Return why the stage is skipped, for example because no variant passed.

        The text is empty if it is not skipped.
        """

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Hold the lock that prevents other runs from executing the stage with this key."""

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Compute the result of a stage, store it, and return its manifest."""

    def decision(self, manifest: Manifest) -> Decision | None:
        """Return the decision in a gate stage's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of every stage of a plan, and the errors of the failed stages."""

    plan: Plan
    outcomes: Mapping[str, StageOutcome]
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)

    def executed(self) -> tuple[str, ...]:
        """Return the ids of the stages that were executed or failed in this run."""
        busy = (StageStatus.DONE, StageStatus.FAILED)
        return tuple(s.id for s in self.plan.stages if self.outcomes[s.id].status in busy)


class InlineExecutor:
    """Executor that runs stages in the caller's thread, with retries.

    A stage is repeated only after an InfrastructureError.
    """

    def run(
        self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]
    ) -> Manifest:
        """Run the work of a stage, and return its manifest."""
        for _ in range(stage.retries):
            with suppress(InfrastructureError):
                return work()
        return work()

    def show(
        self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]
    ) -> None:
        """Ignore an outcome that needed no work."""


def run(
    plan: Plan,
    *,
    handler: Handler,
    executor: Executor,
    observer: Observer,
    clock: Clock,
    no_cache: Collection[StageKind] = (),
    jobs: int = 1,
) -> RunResult:
    """Run every stage of a plan that can run; a failure stops only dependent stages.

    A StorageError stops the whole run: its cause is not a property of a variant, and the release
    would lack results.

    Args:
        no_cache: kinds of stages whose cached results are ignored.
        jobs: maximum number of parallel stages on this machine; stages of pools are requested as
            soon as they can run. With 1, and without pools, stages run in the caller's thread, in
            the order of the plan.

    Raises:
        StorageError: the disk is full, or a file or folder cannot be used; finished results are
            kept.
    """
    observer.planned(plan)
    runner = _StageRunner(
        handler=handler, executor=executor, observer=observer, clock=clock, no_cache=no_cache
    )
    errors: dict[str, OnnxOpsError] = {}
    in_order = ((stage, runner.step(stage)) for stage in plan.stages)
    parallel = jobs > 1 or any(get_pool(stage) for stage in plan.stages)
    for stage, (outcome, error) in (
        _run_in_parallel(plan, runner.step, jobs) if parallel else in_order
    ):
        if error is not None:
            errors[stage.id] = error
        runner.outcomes[stage.id] = outcome
        observer.finished(stage, outcome)
    return RunResult(plan=plan, outcomes=runner.outcomes, errors=errors)


def _run_in_parallel(plan: Plan, step: Step, jobs: int) -> Iterator[tuple[Stage, StageResult]]:
    """Yield the results of stages; start each after the stages it depends on."""
    planned = {stage.id for stage in plan.stages}
    waiting, running, received = list(plan.stages), dict[Future[StageResult], Stage](), set[str]()
    placed = sum(1 for stage in plan.stages if get_pool(stage))
    with (
        DaemonThreadPool[StageResult](jobs) as here,
        DaemonThreadPool[StageResult](min(placed, _ASKED) or 1) as pools,
    ):
        while waiting or running:
            ready = [
                stage
                for stage in waiting
                if planned.intersection((*stage.needs, *stage.tolerates)) <= received
            ]
            started = {stage.id for stage in ready}
            waiting = [stage for stage in waiting if stage.id not in started]
            running |= {
                (pools if get_pool(stage) else here).submit(partial(step, stage)): stage
                for stage in ready
            }
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stage = running.pop(future)
                yield stage, future.result()
                received.add(stage.id)


def preview(
    plan: Plan, *, handler: Handler, no_cache: Collection[StageKind] = ()
) -> Mapping[str, StageOutcome | None]:
    """Return the outcome of each stage that needs no work; None for the others.

    If a stage would run, the result is also None for the stages that depend on it. `no_cache` is as
    in `run`.
    """
    outcomes: dict[str, StageOutcome] = {}
    result: dict[str, StageOutcome | None] = {}
    for stage in plan.stages:
        is_open = any(
            result[name] is None for name in (*stage.needs, *stage.tolerates) if name in result
        )
        outcome = None if is_open else _find_outcome(stage, outcomes, handler, no_cache)
        result[stage.id] = outcome
        if outcome is not None:
            outcomes[stage.id] = outcome
    return result


def collect_inputs(stage: Stage, outcomes: Mapping[str, StageOutcome]) -> dict[str, Manifest]:
    """Return the results that a stage depends on, as far as they exist."""
    manifests = {
        name: outcomes[name].manifest
        for name in (*stage.needs, *stage.tolerates)
        if name in outcomes
    }
    return {name: manifest for name, manifest in manifests.items() if manifest is not None}


_ENDED = {StageStatus.FAILED: "failed"}
"""Words for a status in the reason of a skipped stage; default: `was STATUS`."""


def _find_outcome(
    stage: Stage,
    outcomes: Mapping[str, StageOutcome],
    handler: Handler,
    no_cache: Collection[StageKind],
) -> StageOutcome | None:
    """Return the outcome of a stage that needs no work; None for any other stage."""
    missing = [
        name for name in stage.needs if name not in outcomes or outcomes[name].manifest is None
    ]
    if missing:
        first = outcomes.get(missing[0])
        ended = (
            "was not planned"
            if first is None
            else _ENDED.get(first.status, f"was {first.status.value}")
        )
        return StageOutcome(
            stage=stage.id, status=StageStatus.SKIPPED, reason=f"needs {missing[0]}, which {ended}"
        )
    inputs = collect_inputs(stage, outcomes)
    if reason := handler.refusal(stage, inputs):
        return StageOutcome(stage=stage.id, status=StageStatus.SKIPPED, reason=reason)
    key = stage.key(inputs)
    manifest = None if stage.kind in no_cache else handler.cached(stage, key, inputs)
    if manifest is None:
        return None
    return StageOutcome(stage=stage.id, status=StageStatus.CACHED, key=key, manifest=manifest)


@dataclass(frozen=True, kw_only=True)
class _StageRunner:
    """Runner of single stages, with the outcomes of the stages before them."""

    handler: Handler
    executor: Executor
    observer: Observer
    clock: Clock
    no_cache: Collection[StageKind]
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)

    def step(self, stage: Stage) -> StageResult:
        """Run a stage, unless it is cached, skipped, or cannot be checked.

        If another run has produced the result in the meantime, the stage is not run either.
        """
        outcome, error = self._check(stage)
        if outcome is None:
            self.observer.started(stage)
            inputs = collect_inputs(stage, self.outcomes)
            key = stage.key(inputs)
            with self.handler.claim(stage, key):
                outcome, error = self._check(stage)
                if outcome is None:
                    return self._execute(stage, key, inputs)
        self.executor.show(stage, outcome, self.handler.decision)
        return outcome, error

    def _check(self, stage: Stage) -> tuple[StageOutcome | None, OnnxOpsError | None]:
        """Return the outcome of a stage that needs no work, or None, and any error.

        An error other than a StorageError, such as an unreadable result, is a failure of the stage.
        """
        try:
            return _find_outcome(stage, self.outcomes, self.handler, self.no_cache), None
        except StorageError:
            raise
        except OnnxOpsError as error:
            return StageOutcome(stage=stage.id, status=StageStatus.FAILED, reason=str(error)), error

    def _execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> StageResult:
        started, handler = self.clock.monotonic(), self.handler
        manifest, failure = None, None
        try:
            with storage_errors(stage.id):
                manifest = self.executor.run(
                    stage, lambda: handler.execute(stage, key, inputs), handler.decision
                )
        except StorageError:
            raise
        except OnnxOpsError as error:
            failure = error
        outcome = StageOutcome(
            stage=stage.id,
            status=StageStatus.FAILED if failure else StageStatus.DONE,
            key=key,
            manifest=manifest,
            seconds=self.clock.monotonic() - started,
            reason=str(failure) if failure else "",
        )
        return outcome, failure
