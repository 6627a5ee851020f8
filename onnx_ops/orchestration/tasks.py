"""Run stages and other work as Prefect task runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect import State, Task, allow_failure
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_logger, get_run_logger
from prefect.states import Completed, Failed

from onnx_ops.domain.artifact import Manifest, short_digest
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.plan import Stage, StageOutcome, StageStatus
from onnx_ops.errors import InfrastructureError, OnnxOpsError
from onnx_ops.ports import Work


def run_as_task(
    kind: str,
    name: str,
    work: Callable[[], State[Any]],
    *,
    after: Sequence[State[Any]] = (),
    retries: int = 0,
    retry_if: Callable[[], bool] = lambda: False,
) -> State[Any]:
    """Run `work` in this thread as a task run, and return its final state.

    The task has no parameters, result, cache or tags. Prefect would otherwise traverse parameters,
    pickle results, and take a concurrency lease for each tag.

    Args:
        work: function that returns the final state of the run; Prefect handles its exceptions.
        after: states of earlier task runs; Prefect draws an edge from each, whatever its outcome.
        retries: maximum number of further attempts after a Failed state.
        retry_if: function that returns whether to try again. It is called after a Failed state
            while attempts are left.
    """
    # If a task returns a Failed state, Prefect 3.8 logs an error with `exc_info=True`, but without
    # an exception (`handle_retry` in prefect/task_engine.py). This prints `NoneType: None`. The
    # next line of the log has the state, so the filter removes this record.
    get_logger("prefect.task_runs").addFilter(_has_traceback)
    task = Task(
        fn=work,
        name=kind,
        task_run_name=lambda: name,
        retries=retries,
        retry_condition_fn=lambda _task, _run, _state: retry_if(),
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    return task(return_state=True, wait_for=[allow_failure(state) for state in after])


def _has_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info != (None, None, None)


def failed(error: OnnxOpsError) -> State[Any]:
    """Return the final state of a run that raised this error.

    The state has the message of the error, without a traceback.
    """
    return Failed(name=FAILED_STATES[error.exit_code], message=str(error))


FAILED_STATES = {
    1: "GateFailed",
    2: "WrongInput",
    3: "Inconclusive",
    4: "EnvironmentFailed",
    5: "Refused",
}
"""Names of Failed states, by the exit code of the corresponding command."""

Decide = Callable[[Manifest], Decision | None]

GATE_STATES = {
    Verdict.FAIL: "GateFailed",
    Verdict.ERROR: "GateError",
    Verdict.INCONCLUSIVE: "GateInconclusive",
}
"""Names of the Failed states of gates that did not pass, by verdict."""


class PrefectExecutor:
    """A `ports.Executor` for one run, in a flow or without one."""

    def __init__(self) -> None:
        self._states: dict[str, State[Any]] = {}

    def run(self, stage: Stage, work: Work, decide: Decide) -> Manifest:
        """Run a stage as a task run; return its manifest."""
        attempt = _Attempt(task_run_name(stage), work, decide)
        self._run(
            stage,
            attempt.run,
            retries=stage.retries,
            retry_if=lambda: isinstance(attempt.error, InfrastructureError),
        )
        if attempt.manifest is None:
            raise attempt.error or AssertionError(f"{stage.id} ended without a result or an error")
        return attempt.manifest

    def show(self, stage: Stage, outcome: StageOutcome, decide: Decide) -> None:
        """Record a stage that needed no work.

        The message of a Completed state names the stage. `prefect flow-run logs` prints the message
        of a task run's state, and not its name.
        """

        def end() -> State[Any]:
            name = task_run_name(stage)
            if outcome.status is StageStatus.FAILED:
                return Failed(message=outcome.reason)
            if outcome.manifest is None or outcome.status is StageStatus.SKIPPED:
                return Completed(name="Skipped", message=f"{name}: {outcome.reason}")
            decision = decide(outcome.manifest)
            if decision is not None and decision.verdict is not Verdict.PASS:
                return judged(decision)
            key = f" ({short_digest(outcome.key)})" if outcome.key is not None else ""
            return Completed(name="Cached", message=f"{name}: unchanged{key}")

        self._run(stage, end)

    def _run(
        self,
        stage: Stage,
        work: Callable[[], State[Any]],
        *,
        retries: int = 0,
        retry_if: Callable[[], bool] = lambda: False,
    ) -> None:
        upstream = dict.fromkeys((*stage.needs, *stage.tolerates))
        after = [self._states[name] for name in upstream if name in self._states]
        kind, name = stage.kind.value, task_run_name(stage)
        self._states[stage.id] = run_as_task(
            kind, name, work, after=after, retries=retries, retry_if=retry_if
        )


class _Attempt:
    """The work of a stage, which runs once for each attempt.

    The object has the result of the last attempt.
    """

    def __init__(self, name: str, work: Work, decide: Decide) -> None:
        self._name = name
        self._work = work
        self._decide = decide
        self.manifest: Manifest | None = None
        self.error: Exception | None = None

    def run(self) -> State[Any]:
        """Run the stage's work once, and return the final state of the task run."""
        begun = time.monotonic()
        self.error = None
        try:
            manifest = self._work()
            decision = self._decide(manifest)
        except OnnxOpsError as error:
            self.error = error
            get_run_logger().error("%s: failed after %.2f s", self._name, time.monotonic() - begun)
            return failed(error)
        except Exception as error:
            self.error = error
            raise
        self.manifest = manifest
        if decision is None:
            return Completed(message=f"{self._name}: done in {time.monotonic() - begun:.2f} s")
        return judged(decision)


def task_run_name(stage: Stage) -> str:
    """Return the name of a stage's task run.

    Examples: `benchmark int8-static @ cpu-1t`, `data train`, `promote @ cpu-1t`.
    """
    subject = (
        stage.variant or stage.id.removeprefix(stage.kind.value).removeprefix("/").partition("@")[0]
    )
    words = [stage.kind.value, subject] if subject else [stage.kind.value]
    return " ".join([*words, "@", stage.target] if stage.target else words)


def judged(decision: Decision) -> State[Any]:
    """Return the final state of a gate.

    The state is Completed if the gate passed. Otherwise it is Failed, with the name of the verdict
    in `GATE_STATES`.
    """
    message = f"{decision.variant} @ {decision.target}: {decision.reason}"
    if decision.verdict is Verdict.PASS:
        return Completed(message=message)
    return Failed(name=GATE_STATES[decision.verdict], message=message)
