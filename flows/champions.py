"""Benchmark the champions again, and judge them by the gates of their release.

A champion can fail after an upgrade or on a new machine.
"""

from typing import Any

from prefect import State, flow

from onnx_ops.app.execution import StageExecutor
from onnx_ops.orchestration.champions import check_champions
from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import actor, ends_as_failed


@flow(name="champions", persist_result=False)
@ends_as_failed
def champions(pipelines: tuple[str, ...] = (), blocks: tuple[str, ...] = ()) -> State[Any]:
    """Repeat each champion's benchmark and evaluate its gates.

    The run fails as `RecheckFailed` if a champion fails. Otherwise, it fails as `EnvironmentFailed`
    if a champion could not be measured.

    Args:
        pipelines: Names of pipelines or models; by default all with a champion.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        executor = StageExecutor(settings=project.settings, context=project.context)
        return check_champions(project.context, executor, pipelines, by=actor(project.context))
