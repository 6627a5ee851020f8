"""The nightly watch over champions as a flow run: a task run for each, one table, word of those that have drifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import State
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed

from onnx_ops.app.champions import ChampionRecord, list_champions, measure_again
from onnx_ops.app.execution import ExecuteStage
from onnx_ops.domain.decision import Drift, Verdict, compute_drift_exit_code
from onnx_ops.domain.notification import build_drift_notification
from onnx_ops.orchestration.tasks import run_as_task
from onnx_ops.ports import Ports
from onnx_ops.release.notify import send_now

DRIFTED = "Drifted"
_ENDS = {1: DRIFTED, 4: "EnvironmentFailed"}


def check_champions(ports: Ports, perform: ExecuteStage, names: Sequence[str], *, by: str) -> State[Any]:
    """Measure champions again, one after the other, and tell people and programs of those that have drifted.

    Args:
        ports: the outside world of the project that released them.
        perform: does a benchmark.
        names: pipelines or models; all if empty.
        by: who is answerable.

    Raises:
        UserError: a name has no champion.
        ServiceUnavailableError: the registry does not answer.
    """
    found: list[Drift] = []
    for champion in list_champions(ports, names):
        told = f"{champion.record.model} v{champion.record.version} @ {champion.target}"
        run_as_task("champion", told, lambda champion=champion: _measured(ports, perform, champion, found))  # type: ignore[misc]
        if found[-1].drifted:
            send_now(ports, build_drift_notification(found[-1], at=ports.clock.now(), actor=by))
    publish_champions(found)
    return concluded(found)


def publish_champions(found: Sequence[Drift]) -> None:
    """`champions`: one row for each; nothing where there are none."""
    if found:
        told = "Champions measured again, with the runtime and the machine of now."
        create_table_artifact([_row(drift) for drift in found], key="champions", description=told)


def concluded(found: Sequence[Drift]) -> State[Any]:
    """Return the final state of the flow run: Failed, named `Drifted`, if a champion has drifted."""
    lines = [f"{d.model} v{d.version} @ {d.target}: {_verdict(d)}. {d.reason}" for d in found]
    message = "\n".join(lines) or "no champions yet: the first release of a pipeline makes one"
    code = compute_drift_exit_code(found)
    return Failed(name=_ENDS[code], message=message) if code else Completed(message=message)


def _measured(ports: Ports, perform: ExecuteStage, champion: ChampionRecord, found: list[Drift]) -> State[Any]:
    drift = measure_again(ports, perform, champion)
    found.append(drift)
    return concluded([drift])


def _verdict(drift: Drift) -> str:
    words = {Verdict.PASS: "as it was", Verdict.FAIL: "drifted", Verdict.ERROR: "not measured"}
    return words.get(drift.verdict, drift.verdict.value)


def _row(drift: Drift) -> dict[str, str]:
    return {
        "pipeline": drift.pipeline,
        "target": drift.target,
        "version": drift.version,
        "variant": drift.variant,
        "verdict": _verdict(drift),
        "why": drift.why,
        "changed": ", ".join(drift.changed),
    }
