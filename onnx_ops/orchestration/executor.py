"""Runs each stage of a plan as a Prefect task run of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prefect import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from onnx_ops.domain.artifact import Manifest, short_digest
from onnx_ops.domain.decision import Decision, Verdict
from onnx_ops.domain.pipeline import Stage, StageOutcome, StageStatus
from onnx_ops.errors import InfrastructureError, OnnxOpsError
from onnx_ops.orchestration.tasks import failed, run_as_task
from onnx_ops.ports import Work

Decide = Callable[[Manifest], Decision | None]

GATE_STATES = {Verdict.FAIL: "GateFailed", Verdict.ERROR: "GateError", Verdict.INCONCLUSIVE: "GateInconclusive"}
"""Names of the Failed states in which a gate ends that did not pass."""


class PrefectExecutor:
    """Fulfils `ports.Executor`. One instance serves one run, inside a flow or on its own.

    The engine orders the stages; Prefect shows them. Stages run in the caller's thread, so that a cancelled flow run
    interrupts the stage at work.
    """

    def __init__(self) -> None:
        self._states: dict[str, State[Any]] = {}

    def run(self, stage: Stage, work: Work, decide: Decide) -> Manifest:
        attempt = _Attempt(work, decide)
        self._run(
            stage,
            attempt.run,
            retries=stage.retries,
            retry_if=lambda: isinstance(attempt.error, InfrastructureError),
        )
        if attempt.manifest is None:
            raise attempt.error or AssertionError(f"{stage.id} ended without a result and without an error")
        return attempt.manifest

    def show(self, stage: Stage, outcome: StageOutcome, decide: Decide) -> None:
        self._run(stage, lambda: _shown(outcome, decide))

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
        self._states[stage.id] = run_as_task(kind, name, work, after=after, retries=retries, retry_if=retry_if)


class _Attempt:
    """Does the work of a stage, once for each attempt; keeps what the last one brought."""

    def __init__(self, work: Work, decide: Decide) -> None:
        self._work = work
        self._decide = decide
        self.manifest: Manifest | None = None
        self.error: Exception | None = None

    def run(self) -> State[Any]:
        logger = get_run_logger()
        begun = time.monotonic()
        self.error = None
        try:
            manifest = self._work()
            decision = self._decide(manifest)
        except OnnxOpsError as error:
            self.error = error
            logger.error("failed after %.2f s", time.monotonic() - begun)
            return failed(error)
        except Exception as error:
            self.error = error
            raise
        self.manifest = manifest
        seconds = time.monotonic() - begun
        logger.info("done in %.2f s", seconds)
        if decision is None:
            return Completed(message=f"done in {seconds:.2f} s")
        return judged(decision)


def task_run_name(stage: Stage) -> str:
    """Kind, variant and target for people: `benchmark int8-static @ cpu-1t`, `data train`, `promote @ cpu-1t`."""
    subject = stage.variant or stage.id.removeprefix(stage.kind.value).removeprefix("/").partition("@")[0]
    words = [stage.kind.value, subject] if subject else [stage.kind.value]
    return " ".join([*words, "@", stage.target] if stage.target else words)


def judged(decision: Decision) -> State[Any]:
    """The end of a gate: Completed if it passed, else Failed, named by the verdict."""
    if decision.verdict is Verdict.PASS:
        return Completed(message=decision.reason)
    return Failed(name=GATE_STATES[decision.verdict], message=decision.reason)


def _shown(outcome: StageOutcome, decide: Decide) -> State[Any]:
    """The end of a stage that needed no work."""
    if outcome.status is StageStatus.FAILED:
        return Failed(message=outcome.reason)
    if outcome.manifest is None or outcome.status is StageStatus.SKIPPED:
        return Completed(name="Skipped", message=outcome.reason)
    decision = decide(outcome.manifest)
    if decision is not None and decision.verdict is not Verdict.PASS:
        return judged(decision)
    known = f" ({short_digest(outcome.key)})" if outcome.key is not None else ""
    return Completed(name="Cached", message=f"its result is known already{known}")
