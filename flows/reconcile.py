"""Move endpoints to the desired state of the registry.

This is needed where a webhook was lost or a process was killed.
"""

from typing import Any

from prefect import State, flow

from onnx_ops.orchestration.environment import project_of
from onnx_ops.orchestration.flows import actor, aggregate_state, ends_as_failed, reconcile_as_task
from onnx_ops.release.journal import list_bound_endpoints
from onnx_ops.release.notify import send_pending_each
from onnx_ops.release.reconcile_pass import ReconcilePass, read_registry


@flow(name="reconcile", persist_result=False)
@ends_as_failed
def reconcile(endpoints: tuple[str, ...] = (), blocks: tuple[str, ...] = ()) -> State[Any]:
    """Reconcile every endpoint separately; the run fails if one of them fails.

    Args:
        endpoints: Names of endpoints; all by default.
        blocks: Prefect blocks with the addresses of services, such as onnx-ops-registry/prod.
    """
    with project_of(blocks) as project:
        context = project.context
        names = endpoints or list_bound_endpoints(context)
        reconcile_pass = ReconcilePass(context, lambda: read_registry(context))
        states = {name: reconcile_as_task(reconcile_pass, name, actor(context)) for name in names}
        send_pending_each(context, names)
        return aggregate_state(states)
