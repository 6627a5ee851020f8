"""Drive a rollout to its end as the reconciler does.

There is a task run for each step, and a page of evidence.
"""

from typing import Any

from prefect import State, flow

from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import actor, ends_as_failed
from onnx_ops.orchestration.rollouts import run_rollout


@flow(name="rollout", flow_run_name="{endpoint}", persist_result=False)
@ends_as_failed
def rollout(
    endpoint: str, limit: str = "1 d", interval: str = "10 s", blocks: tuple[str, ...] = ()
) -> State[Any]:
    """Move traffic step by step as the metrics allow.

    The run fails if the endpoint's last rollout was rolled back, or if the last reconciliation ends
    with an error.

    Args:
        endpoint: Name of the endpoint.
        limit: Time limit; afterwards the rollout stays as it is, and the reconciler continues it.
        interval: Interval between checks.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        return run_rollout(
            project.context, endpoint, by=actor(project.context), limit=limit, interval=interval
        )
