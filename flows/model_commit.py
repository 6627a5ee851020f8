"""Run the pipelines that a commit affects."""

from typing import Any

from prefect import State, flow

from onnx_ops.domain.plan import StageKind
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import ends_as_failed, run_affected


@flow(name="model_commit", persist_result=False)
@ends_as_failed
def model_commit(
    since: str = "HEAD~1",
    until: StageKind | None = None,
    jobs: int | None = None,
    blocks: tuple[str, ...] = (),
) -> State[Any]:
    """Run every pipeline that a change affects.

    A change affects a pipeline by its files, data, targets, or the code that it imports.

    Args:
        since: The commit, tag or branch before the change.
        until: Stop after this kind of stage; use `gate` before the change is merged.
        jobs: Maximum number of pipelines, or of stages of a single one, in parallel; by default one
            for each core.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        return run_affected(project, since, until, jobs)
