"""Run the nightly check of champions as a flow run.

The flow run has a task run for each champion, publishes a table, and sends notifications of drift.
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
from onnx_ops.domain.decision import Drift, Verdict, compute_drift_exit_code
from onnx_ops.domain.notification import build_drift_notification
from onnx_ops.orchestration.tasks import run_as_task
from onnx_ops.ports import Context
from onnx_ops.release.notify import send_now

DRIFTED = "Drifted"
_ENDS = {1: DRIFTED, 4: "EnvironmentFailed"}


def check_champions(
    context: Context, perform: ExecuteStage, names: Sequence[str], *, by: str
) -> State[Any]:
    """Measure champions again, one after the other, and return the final state.

    Notifications and events about drift are sent.

    Args:
        names: pipelines or models whose champions are measured; all champions if empty.

    Raises:
        UserError: a name has no champion.
        ServiceUnavailableError: the registry does not answer.
    """
    drifts: list[Drift] = []

    def measure(champion: ChampionRecord) -> State[Any]:
        drifts.append(measure_again(context, perform, champion))
        return concluded(drifts[-1:])

    for champion in list_champions(context, names):
        name = f"{champion.record.model} v{champion.record.version} @ {champion.target}"
        run_as_task("champion", name, partial(measure, champion))
        if drifts[-1].drifted:
            send_now(
                context, build_drift_notification(drifts[-1], at=context.clock.now(), actor=by)
            )
    rows = [
        {
            "pipeline": drift.pipeline,
            "target": drift.target,
            "version": drift.version,
            "variant": drift.variant,
            "verdict": _verdict(drift),
            "why": drift.why,
            "changed": ", ".join(drift.changed),
        }
        for drift in drifts
    ]
    if rows:
        description = "Champions measured again, with the current runtime and machine."
        create_table_artifact(rows, key="champions", description=description)
    return concluded(drifts)


def concluded(drifts: Sequence[Drift]) -> State[Any]:
    """Return the final state of a run that measured these champions again.

    The state is Failed, with the name `Drifted`, if a champion has drifted.
    """
    lines = [f"{d.model} v{d.version} @ {d.target}: {_verdict(d)}. {d.reason}" for d in drifts]
    message = "\n".join(lines) or "no champions yet: the first release of a pipeline creates one"
    code = compute_drift_exit_code(drifts)
    return Failed(name=_ENDS[code], message=message) if code else Completed(message=message)


def _verdict(drift: Drift) -> str:
    words = {Verdict.PASS: "as it was", Verdict.FAIL: "drifted", Verdict.ERROR: "not measured"}
    return words.get(drift.verdict, drift.verdict.value)
