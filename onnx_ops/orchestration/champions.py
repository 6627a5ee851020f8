"""Run the nightly check of champions as a flow run.

The flow run has a task run for each champion, publishes a table, and sends notifications of
failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from prefect import State
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed

from onnx_ops.app.champions import ChampionRecord, list_champions, measure_again
from onnx_ops.app.stage_request import ExecuteStage
from onnx_ops.domain.decision import RecheckResult, Verdict, compute_recheck_exit_code
from onnx_ops.domain.notification import build_recheck_notification
from onnx_ops.orchestration.tasks import run_as_task
from onnx_ops.ports import Context
from onnx_ops.release.notify import send_now

RECHECK_FAILED = "RecheckFailed"
_ENDS = {1: RECHECK_FAILED, 4: "EnvironmentFailed"}


def check_champions(
    context: Context, perform: ExecuteStage, names: Sequence[str], *, by: str
) -> State[Any]:
    """Measure champions again, one after the other, and return the final state.

    A notification and an event are sent for each champion that failed.

    Args:
        names: pipelines or models whose champions are measured; all champions if empty.

    Raises:
        UserError: a name has no champion.
        ServiceUnavailableError: the registry is unavailable.
    """
    results: list[RecheckResult] = []

    def measure(champion: ChampionRecord) -> State[Any]:
        results.append(measure_again(context, perform, champion))
        return concluded(results[-1:])

    for champion in list_champions(context, names):
        name = f"{champion.record.model} v{champion.record.version} @ {champion.target}"
        run_as_task("champion", name, partial(measure, champion))
        if results[-1].has_failed:
            send_now(
                context, build_recheck_notification(results[-1], at=context.clock.now(), actor=by)
            )
    rows = [
        {
            "pipeline": result.pipeline,
            "target": result.target,
            "version": result.version,
            "variant": result.variant,
            "verdict": _verdict(result),
            "why": result.why,
            "changed": ", ".join(result.changed),
        }
        for result in results
    ]
    if rows:
        description = "Champions measured again, with the current runtime and machine."
        create_table_artifact(rows, key="champions", description=description)
    return concluded(results)


def concluded(results: Sequence[RecheckResult]) -> State[Any]:
    """Return the final state of a run that measured these champions again.

    The state is Failed, with the name `RecheckFailed`, if a champion failed its recheck. Otherwise,
    it is Failed with the name `EnvironmentFailed` if a champion could not be measured. In all other
    cases, it is Completed.
    """
    lines = [f"{d.model} v{d.version} @ {d.target}: {_verdict(d)}. {d.reason}" for d in results]
    message = (
        "\n".join(lines)
        or "no champions yet: the first version that is promoted on a target becomes one"
    )
    code = compute_recheck_exit_code(results)
    return Failed(name=_ENDS[code], message=message) if code else Completed(message=message)


def _verdict(result: RecheckResult) -> str:
    words = {Verdict.PASS: "as it was", Verdict.FAIL: "failed", Verdict.ERROR: "not measured"}
    return words.get(result.verdict, result.verdict.value)
