"""Lead a model through its pipeline: what `onnx-ops run` does, with every stage a task run of its own."""

from typing import Any

from prefect import State, flow

from onnx_ops.domain.pipeline import StageKind
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import ends_as_failed, named_after_file, run_pipeline


@flow(name="pipeline", flow_run_name=named_after_file, persist_result=False)
@ends_as_failed
def pipeline(
    file: str,
    overrides: tuple[str, ...] = (),
    until: StageKind | None = None,
    fresh: tuple[StageKind, ...] = (),
    abandon: str = "",
    blocks: tuple[str, ...] = (),
) -> State[Any]:
    """Train, export, validate, quantize, benchmark, gate, register and deploy; what is known already is not done again.

    Args:
        file: Pipeline file, relative to the project's root, such as configs/pipelines/digits-mlp.yaml.
        overrides: Values to override, such as train.with.seed=3.
        until: Stop after this kind of stage.
        fresh: Kinds of stages to do again, whatever is known.
        abandon: Why endpoints may stay behind that the file names no longer, or elsewhere.
        blocks: Blocks of Prefect's that say where services are, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        return run_pipeline(project, file, overrides=overrides, until=until, fresh=fresh, abandon=abandon)
