"""Threads that do work side by side, as many as are asked for.

Runs a plan: each stage once its inputs are there, unless its result is known already."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.pipeline import Plan, Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.errors import InfrastructureError, OnnxOpsError, StorageError, storage_errors
from onnx_ops.ports import Clock, Executor, Observer, Work

T = TypeVar("T")
R = TypeVar("R")

Ended = tuple[StageOutcome, OnnxOpsError | None]
"""What became of a stage, and the error behind a failure."""

Step = Callable[[Stage], Ended]


class DaemonThreadPool(Generic[R]):
    """At most `jobs` pieces of work at once, begun in the order in which they are given.

    Its threads hold nobody up: whoever is interrupted leaves at once, and what they had begun ends with the process.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ValueError(f"a crew of {jobs} does no work")
        self._jobs = jobs
        self._given: SimpleQueue[tuple[Future[R], Callable[[], R]] | None] = SimpleQueue()

    def __enter__(self) -> DaemonThreadPool[R]:
        for _ in range(self._jobs):
            threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self._jobs):
            self._given.put(None)

    def give(self, work: Callable[[], R]) -> Future[R]:
        future: Future[R] = Future()
        self._given.put((future, work))
        return future

    def _work(self) -> None:
        while (task := self._given.get()) is not None:
            future, work = task
            try:
                result: Any = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, work  # or the last result would be kept while this thread waits


def ordered_map(jobs: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`work` of every item, in the order of the items; at most `jobs` at once. What was taken is not kept."""
    with DaemonThreadPool[R](jobs) as crew:
        given = deque(crew.give(partial(work, item)) for item in items)
        while given:
            yield given.popleft().result()


class Handler(Protocol):
    """What the engine needs to know about the stages it runs."""

    def cached(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest | None:
        """The stage's result, if it is known and intact; for a release stage, if the endpoint is already so."""
        ...

    def refusal(self, stage: Stage, inputs: Mapping[str, Manifest]) -> str:
        """Why the stage has nothing to do (no variant passed); empty if it has."""
        ...

    def claim(self, stage: Stage, key: Digest) -> AbstractContextManager[None]:
        """Holds back other runs that would do the same work; they find its result when they come in."""
        ...

    def execute(self, stage: Stage, key: Digest, inputs: Mapping[str, Manifest]) -> Manifest:
        """Compute and record the result."""
        ...

    def decision(self, manifest: Manifest) -> Decision | None:
        """The decision in a gate stage's result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What became of every stage, and the errors behind the failures."""

    plan: Plan
    outcomes: Mapping[str, StageOutcome]
    errors: Mapping[str, OnnxOpsError] = field(default_factory=dict)

    def executed(self) -> tuple[str, ...]:
        """Stages that did work in this run."""
        busy = (StageStatus.DONE, StageStatus.FAILED)
        return tuple(s.id for s in self.plan.stages if self.outcomes[s.id].status in busy)


class SilentObserver:
    """An observer that says nothing."""

    def planned(self, plan: Plan) -> None:
        del plan

    def started(self, stage: Stage) -> None:
        del stage

    def told(self, stage: Stage, line: str) -> None:
        del stage, line

    def finished(self, stage: Stage, outcome: StageOutcome) -> None:
        del stage, outcome


class InlineExecutor:
    """Runs work here, again after a failure of the environment as often as the stage allows."""

    def run(self, stage: Stage, work: Work, decide: Callable[[Manifest], Decision | None]) -> Manifest:
        del decide
        for attempt in range(stage.retries + 1):
            try:
                return work()
            except InfrastructureError:
                if attempt == stage.retries:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def show(self, stage: Stage, outcome: StageOutcome, decide: Callable[[Manifest], Decision | None]) -> None:
        del stage, outcome, decide


def run(
    plan: Plan,
    *,
    handler: Handler,
    executor: Executor,
    observer: Observer,
    clock: Clock,
    fresh: Collection[StageKind] = (),
    jobs: int = 1,
) -> RunResult:
    """Run every stage of a plan that can run; a failure stops what depends on it and nothing else.

    A file that cannot be used stops the run: that says nothing about a variant, and a release that leaves out what
    could not be written would differ from the one that is meant.

    Args:
        plan: stages in order.
        handler: knows how stages are done.
        executor: runs the work of a stage.
        observer: is told what happens.
        clock: measures durations.
        fresh: kinds of stages whose known results are not used.
        jobs: stages that run side by side at most. One: all of them in the caller's thread, in the plan's order.

    Raises:
        StorageError: the disk is full, or a file or folder cannot be used; what was finished is kept.
    """
    observer.planned(plan)
    outcomes: dict[str, StageOutcome] = {}
    errors: dict[str, OnnxOpsError] = {}

    def step(stage: Stage) -> Ended:
        outcome, error = _look(stage, outcomes, handler, fresh)
        if outcome is not None:
            executor.show(stage, outcome, handler.decision)
            return outcome, error
        observer.started(stage)
        return _work(stage, outcomes, handler, executor, clock, fresh)

    for stage, (outcome, error) in _side_by_side(plan, step, jobs) if jobs > 1 else _one_by_one(plan, step):
        if error is not None:
            errors[stage.id] = error
        outcomes[stage.id] = outcome
        observer.finished(stage, outcome)
    return RunResult(plan=plan, outcomes=outcomes, errors=errors)


def _one_by_one(plan: Plan, step: Step) -> Iterator[tuple[Stage, Ended]]:
    for stage in plan.stages:
        yield stage, step(stage)


def _side_by_side(plan: Plan, step: Step, jobs: int) -> Iterator[tuple[Stage, Ended]]:
    """Each stage begins when all that it waits for have been taken by whoever iterates."""
    planned = {stage.id for stage in plan.stages}
    waiting, running, taken = list(plan.stages), dict[Future[Ended], Stage](), set[str]()
    with DaemonThreadPool[Ended](jobs) as crew:
        while waiting or running:
            ready = [stage for stage in waiting if planned.intersection((*stage.needs, *stage.tolerates)) <= taken]
            begun = {stage.id for stage in ready}
            waiting = [stage for stage in waiting if stage.id not in begun]
            running |= {crew.give(partial(step, stage)): stage for stage in ready}
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                stage = running.pop(future)
                yield stage, future.result()
                taken.add(stage.id)


def preview(plan: Plan, *, handler: Handler, fresh: Collection[StageKind] = ()) -> Mapping[str, StageOutcome | None]:
    """What a run would find: an outcome for what is known, None for what would run.

    A stage behind one that would run cannot be known yet and counts as one that would.
    """
    known: dict[str, StageOutcome] = {}
    result: dict[str, StageOutcome | None] = {}
    for stage in plan.stages:
        unknown = any(result[name] is None for name in (*stage.needs, *stage.tolerates) if name in result)
        outcome = None if unknown else _ready(stage, known, handler, fresh)
        result[stage.id] = outcome
        if outcome is not None:
            known[stage.id] = outcome
    return result


def collect_inputs(stage: Stage, outcomes: Mapping[str, StageOutcome]) -> dict[str, Manifest]:
    found = {name: outcomes[name].manifest for name in (*stage.needs, *stage.tolerates) if name in outcomes}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def _look(
    stage: Stage, outcomes: Mapping[str, StageOutcome], handler: Handler, fresh: Collection[StageKind]
) -> tuple[StageOutcome | None, OnnxOpsError | None]:
    """What can be had without work, or None; what is known but cannot be read is a failure."""
    try:
        return _ready(stage, outcomes, handler, fresh), None
    except StorageError:
        raise
    except OnnxOpsError as unreadable:
        return StageOutcome(stage=stage.id, status=StageStatus.FAILED, reason=str(unreadable)), unreadable


def _ready(
    stage: Stage, outcomes: Mapping[str, StageOutcome], handler: Handler, fresh: Collection[StageKind]
) -> StageOutcome | None:
    """The outcome that can be had without work, or None."""
    missing = [name for name in stage.needs if name not in outcomes or outcomes[name].manifest is None]
    if missing:
        first = outcomes.get(missing[0])
        verb = first.status.value if first else "not planned"
        return StageOutcome(stage=stage.id, status=StageStatus.SKIPPED, reason=f"needs {missing[0]}, which was {verb}")
    inputs = collect_inputs(stage, outcomes)
    if reason := handler.refusal(stage, inputs):
        return StageOutcome(stage=stage.id, status=StageStatus.SKIPPED, reason=reason)
    key = stage.key(inputs)
    manifest = None if stage.kind in fresh else handler.cached(stage, key, inputs)
    if manifest is None:
        return None
    return StageOutcome(stage=stage.id, status=StageStatus.CACHED, key=key, manifest=manifest)


def _work(
    stage: Stage,
    outcomes: Mapping[str, StageOutcome],
    handler: Handler,
    executor: Executor,
    clock: Clock,
    fresh: Collection[StageKind],
) -> Ended:
    """Do the stage, unless another run does so meanwhile."""
    inputs = collect_inputs(stage, outcomes)
    key = stage.key(inputs)
    with handler.claim(stage, key):
        outcome, error = _look(stage, outcomes, handler, fresh)
        if outcome is None:
            return _execute(stage, key, inputs, handler, executor, clock)
    executor.show(stage, outcome, handler.decision)
    return outcome, error


def _execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], handler: Handler, executor: Executor, clock: Clock
) -> Ended:
    begun = clock.monotonic()
    try:
        with storage_errors(stage.id):
            manifest = executor.run(stage, lambda: handler.execute(stage, key, inputs), handler.decision)
    except StorageError:
        raise
    except OnnxOpsError as error:
        seconds = clock.monotonic() - begun
        failed = StageOutcome(stage=stage.id, status=StageStatus.FAILED, key=key, seconds=seconds, reason=str(error))
        return failed, error
    seconds = clock.monotonic() - begun
    return StageOutcome(stage=stage.id, status=StageStatus.DONE, key=key, manifest=manifest, seconds=seconds), None
