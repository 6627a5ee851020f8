"""Lead an endpoint's rollout to its end: what the reconciler does, with a task run for each step and a page of it."""

from typing import Any

from prefect import State, flow

from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import actor, ends_as_failed
from onnx_ops.orchestration.rollouts import run_rollout


@flow(name="rollout", flow_run_name="{endpoint}", persist_result=False)
@ends_as_failed
def rollout(endpoint: str, limit: str = "1 d", every: str = "10 s", blocks: tuple[str, ...] = ()) -> State[Any]:
    """Move the endpoint's traffic step by step as the figures allow; the run fails if the candidate is rolled back.

    Args:
        endpoint: Name of the endpoint.
        limit: Longest time; then the rollout stays where it is, and the reconciler goes on with it.
        every: Time between two looks.
        blocks: Blocks of Prefect's that say where services are, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        return run_rollout(project.ports, endpoint, by=actor(project.ports), limit=limit, every=every)
