"""Run a pipeline as `onnx-ops run` does, with a task run for each stage."""

from typing import Any

from prefect import State, flow

from onnx_ops.domain.plan import StageKind
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import ends_as_failed, named_after_file, run_pipeline


@flow(name="pipeline", flow_run_name=named_after_file, persist_result=False)
@ends_as_failed
def pipeline(
    file: str,
    overrides: tuple[str, ...] = (),
    until: StageKind | None = None,
    no_cache: tuple[StageKind, ...] = (),
    abandon: str = "",
    jobs: int | None = None,
    blocks: tuple[str, ...] = (),
) -> State[Any]:
    """Run all stages of a pipeline; unchanged stages are cached.

    Among the stages are training, export, validation, quantization, benchmarks, gates, registration
    and deployment.

    Args:
        file: Pipeline file, relative to the project's root, such as
            configs/pipelines/digits-mlp.yaml.
        overrides: Values to override, such as train.with.seed=3.
        until: Stop after this kind of stage.
        no_cache: Kinds of stages to run again, cached or not.
        abandon: Why endpoints that the file no longer names or has moved may be abandoned.
        jobs: Maximum number of stages that run in parallel; by default one for each core.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        return run_pipeline(
            project,
            file,
            overrides=overrides,
            until=until,
            no_cache=no_cache,
            abandon=abandon,
            jobs=jobs,
        )
