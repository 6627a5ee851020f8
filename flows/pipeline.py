"""Lead a model through its pipeline: what `onnx-ops run` does, with every stage a task run of its own."""

from pathlib import Path
from typing import Any

from prefect import State, flow

from onnx_ops.domain.pipeline import StageKind
from onnx_ops.orchestration.artifacts import publish_tables
from onnx_ops.orchestration.executor import PrefectExecutor
from onnx_ops.orchestration.flows import actor, concluding, conclusion, named_after_file
from onnx_ops.wiring.project import execute, open_project, prepare
from onnx_ops.wiring.summary import summarise


@flow(name="pipeline", flow_run_name=named_after_file, persist_result=False)
@concluding
def pipeline(
    file: str,
    overrides: tuple[str, ...] = (),
    until: StageKind | None = None,
    fresh: tuple[StageKind, ...] = (),
) -> State[Any]:
    """Train, export, validate, quantize, benchmark, gate, register and deploy; what is known already is not done again.

    Args:
        file: Pipeline file, relative to the project's root, such as configs/pipelines/digits-mlp.yaml.
        overrides: Values to override, such as train.with.seed=3.
        until: Stop after this kind of stage.
        fresh: Kinds of stages to do again, whatever is known.
    """
    project = open_project()
    prepared = prepare(project, project.settings.root / Path(file), overrides=overrides, until=until)
    result = execute(project, prepared, fresh=fresh, executor=PrefectExecutor(), actor=actor(project.ports))
    summary = summarise(prepared.pipeline, result, project.ports)
    publish_tables(summary)
    return conclusion(summary, result.errors)
