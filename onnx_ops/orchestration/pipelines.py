"""What flows do with pipelines: lead one to its end, or those that a change touches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prefect import State
from prefect.states import Completed, Failed

from onnx_ops.app.affected import affected, changed_since
from onnx_ops.app.project import Project, execute, prepare
from onnx_ops.app.summary import evidence_of, summarise
from onnx_ops.domain.pipeline import StageKind
from onnx_ops.errors import OnnxOpsError
from onnx_ops.orchestration.artifacts import publish_pictures, publish_tables
from onnx_ops.orchestration.events import tell_run
from onnx_ops.orchestration.executor import PrefectExecutor
from onnx_ops.orchestration.flows import actor, conclusion, together
from onnx_ops.orchestration.progress import Progress
from onnx_ops.orchestration.tasks import failed
from onnx_ops.release.notify import send_pending_each


def lead(
    project: Project,
    file: str,
    *,
    overrides: Sequence[str] = (),
    until: StageKind | None = None,
    fresh: Collection[StageKind] = (),
    abandon: str = "",
) -> State[Any]:
    """Run a pipeline, every stage a task run of its own; leaves progress, tables, pictures, events, notifications."""
    prepared = prepare(project, project.settings.root / Path(file), overrides=overrides, until=until)
    result = execute(
        project,
        prepared,
        fresh=fresh,
        executor=PrefectExecutor(),
        observer=Progress(),
        actor=actor(project.ports),
        abandon=abandon,
    )
    summary = summarise(prepared.pipeline, result, project.ports)
    publish_tables(summary)
    publish_pictures(summary, evidence_of(summary, project.ports.store).values())
    tell_run(project.ports, prepared.pipeline, summary)
    send_pending_each(project.ports, [entry.endpoint for entry in prepared.pipeline.deploy])
    return conclusion(summary, result.errors)


def lead_touched(project: Project, since: str, until: StageKind | None) -> State[Any]:
    """Run the pipelines that the change since a commit touches, one after the other; one's failure stops no other."""
    touched = affected(project, changed_since(project.settings.root, since))
    if not touched:
        return Completed(message="no pipeline is touched by this change")
    states: dict[str, State[Any]] = {}
    for one in touched:
        try:
            states[one.file] = (
                Failed(name="WrongInput", message=one.problem) if one.problem else lead(project, one.file, until=until)
            )
        except OnnxOpsError as error:
            states[one.file] = failed(error)
    return together(states)
