"""Move all traffic of an endpoint back, now: what `onnx-ops rollback` does, for those who work in Prefect."""

from typing import Any

from prefect import State, flow
from prefect.states import Completed

from onnx_ops.operations.reconcile import tell_registry
from onnx_ops.operations.rollback import roll_back
from onnx_ops.orchestration.flows import actor, concluding
from onnx_ops.wiring.project import open_project


@flow(name="rollback", flow_run_name="{endpoint}", persist_result=False)
@concluding
def rollback(endpoint: str, to: str | None = None, reason: str = "", force: bool = False) -> State[Any]:
    """Back to the previous version, or to `to`. Needs no MLflow; the aliases follow when the registry answers.

    Args:
        endpoint: Name of the endpoint.
        to: Version to go back to; the previous one by default.
        reason: Why; recorded in the ledger.
        force: Even onto a version that was rolled back itself.
    """
    ports = open_project().ports
    by = actor(ports)
    rolled = roll_back(ports, endpoint, to=to, reason=reason, actor=by, force=force)
    pending = tell_registry(ports, endpoint, actor=by) if rolled.owed else ""
    moved = f"{endpoint}: {rolled.moved_from} -> {rolled.moved_to}, 100 % of traffic. Reason: {rolled.reason}"
    return Completed(message=f"{moved}\nregistry pending: {pending}" if pending else moved)
